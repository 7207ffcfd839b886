"""Encode images as the files that are sent."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from PIL import Image, ImageOps

from camserve._core.checks import invalid
from camserve._core.errors import InvalidArgument
from camserve._core.files import read_photo
from camserve._values.picture import encode_picture

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

_PNG_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})
_MASK_MODES = frozenset({"1", "L"})
_RGB = 3
_GREY = 2  # axes of an array
_TYPES = ("uint8", "uint16", "float32")


def from_pil(image: Image.Image) -> bytes:
    """Encode a PIL image as PNG, or as NPY if its values are floats, after applying its EXIF orientation.

    Raises:
        InvalidArgument: Its values are whole numbers of more than 16 bits.
    """
    upright = ImageOps.exif_transpose(image)
    if upright.mode == "F":
        return from_array(np.asarray(upright))
    if upright.mode == "I":
        return from_array(_whole_numbers(np.asarray(upright)))
    return encode_picture(upright if upright.mode in _PNG_MODES else upright.convert("RGB"), "png")


def _whole_numbers(values: NDArray[np.int32]) -> NDArray[np.uint8 | np.uint16]:
    """Return the values of a PIL image of mode "I" in 8 bits, as of ``image.convert("I")``, or else in 16."""
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > np.iinfo(np.uint16).max:
        raise _invalid(f"an image has whole numbers from 0 to 65,535, not {low:,} to {high:,}")
    return values.astype(np.uint8 if high <= np.iinfo(np.uint8).max else np.uint16)


def from_array(array: NDArray[Any]) -> bytes:
    """Encode a uint8 [H, W, 3] array in RGB order as PNG, and any other array as an NPY file.

    Other floats become float32, such as the float64 values of ``array / 255``.

    Raises:
        InvalidArgument: The array is not uint8, uint16 or floating point, [H, W] or [H, W, channels].
    """
    if array.dtype.kind == "f":
        with np.errstate(over="ignore"):  # an infinity is refused like others
            array = array.astype(np.float32, copy=False)
    if array.dtype.name not in _TYPES or array.ndim not in (_GREY, _GREY + 1) or not array.size:
        types = f"{', '.join(_TYPES[:-1])} or {_TYPES[-1]}"
        raise _invalid(f"an array must be {types}, [H, W] or [H, W, channels], not {array.dtype} {array.shape}")
    if array.dtype == np.uint8 and array.ndim == _GREY + 1 and array.shape[2] == _RGB:
        return encode_picture(Image.fromarray(np.ascontiguousarray(array)), "png")
    file = io.BytesIO()
    np.lib.format.write_array(file, np.ascontiguousarray(array), (1, 0), allow_pickle=False)
    return file.getvalue()


def mask_file(mask: object) -> bytes:
    """Encode a mask as a grey PNG; return an empty file for values of other types, such as a path.

    Raises:
        InvalidArgument: An array is not ``bool`` or ``uint8 [H, W]``, or a PIL image is not of mode "1" or "L".
    """
    if isinstance(mask, np.ndarray):
        return _mask_from_array(cast("NDArray[Any]", mask))
    if not isinstance(mask, Image.Image):
        return b""
    if mask.mode not in _MASK_MODES:
        raise _invalid(f'a mask must be a PIL image of mode "1" or "L", not "{mask.mode}"')
    return encode_picture(ImageOps.exif_transpose(mask), "png")


def _mask_from_array(array: NDArray[Any]) -> bytes:
    if array.dtype.name not in ("bool", "uint8") or array.ndim != _GREY or not array.size:
        raise _invalid(f"a mask must be a bool or uint8 array [H, W], not {array.dtype} {array.shape}")
    return encode_picture(Image.fromarray(np.ascontiguousarray(array != 0)), "png")


def _invalid(reason: str) -> InvalidArgument:
    return InvalidArgument(f"image: {reason}", fields={"image": reason})


def image_bytes(image: object) -> bytes:
    """Return an image as the bytes of a file: files and bytes unchanged, pixels encoded as PNG or NPY.

    Raises:
        InvalidArgument: The image cannot be read, or is not an image.
    """
    data = _read_image(image)
    if not data:
        raise invalid("image", "it is empty")
    return data


def _read_image(image: object) -> bytes:
    for types, read in _IMAGE_READERS:
        if isinstance(image, types):
            return read(image)
    expected = "a path, bytes, a PIL image or an array [H, W] or [H, W, channels]"
    raise invalid("image", f"it must be {expected}, not {type(image).__name__}")


def _read_file(path: str | os.PathLike[str]) -> bytes:
    try:
        with Path(path).open("rb") as file:
            return read_photo(file, os.fstat(file.fileno()).st_size)
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        reason = getattr(error, "strerror", None) or str(error)
        raise invalid("image", f"cannot read {os.fspath(path)!r}: {reason}") from error


_IMAGE_READERS: Sequence[tuple[tuple[type, ...], Callable[[Any], bytes]]] = (
    ((str, os.PathLike), _read_file),
    ((bytes, bytearray, memoryview), bytes),
    ((Image.Image,), from_pil),
    ((np.ndarray,), from_array),
)
