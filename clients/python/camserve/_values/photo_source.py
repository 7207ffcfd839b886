"""Reference to the photo of a result, which is read only when the result is displayed."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import weakref
from typing import TYPE_CHECKING, Any, cast

from PIL import Image, ImageOps

from camserve._values.picture import encode_picture

if TYPE_CHECKING:
    from collections.abc import Callable

SIDE = 512
"""Longest side of the copy that is displayed, in pixels."""

_FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
_QUALITY = 80


class PhotoSource:
    """Reference to a photo: its path, its file, or a weak reference to an image of the caller.

    A result would otherwise keep the pixels of a large array alive. A pickle does not contain the photo.

    Args:
        image: The image that was explained; None for an empty reference.
        read: Function that returns the file of an image.
    """

    __slots__ = ("_image", "_read")

    def __init__(self, image: object = None, read: Callable[[object], bytes] | None = None) -> None:
        self._image = _reference(image)
        self._read = read

    def __reduce__(self) -> tuple[type[PhotoSource], tuple[()]]:
        return PhotoSource, ()

    def thumbnail(self, sha256: str) -> bytes | None:
        """Return the upright photo as a JPEG of at most ``SIDE`` pixels.

        Args:
            sha256: SHA-256 of the photo's file, in hexadecimal.

        Returns:
            None if the photo is not available any more, or is another one by now.
        """
        image = self._image()
        if image is None or self._read is None:
            return None
        with contextlib.suppress(Exception):  # a file that is gone, or that only the server can decode
            file = self._read(image)
            return _reduce(file) if hashlib.sha256(file).hexdigest() == sha256 else None
        return None


def _reference(image: Any) -> Callable[[], Any]:
    if isinstance(image, os.PathLike):
        return lambda: cast("Any", image)
    try:
        return weakref.ref(image)
    except TypeError:  # a path as text, or bytes, which are small
        return lambda: image


def _reduce(file: bytes) -> bytes:
    with Image.open(io.BytesIO(file), formats=_FORMATS) as image:
        image.draft("RGB", (SIDE, SIDE))  # a JPEG is decoded at a fraction of its size
        upright = ImageOps.exif_transpose(image)
        upright.thumbnail((SIDE, SIDE))
        return encode_picture(upright, "jpeg", _QUALITY)
