"""Pictures, boxes, and the geometry of a photo."""

from __future__ import annotations

import io
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from PIL import Image

from camserve._core.errors import CamserveError, Internal

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

FORMATS = {".jpg": "jpeg", ".jpeg": "jpeg", ".png": "png", ".webp": "webp"}

MAX_PIXELS_IN_ALL = 1 << 30
"""Most pixels of all pictures of an answer that are decoded together."""
_DECODED_FORMATS = ("JPEG", "PNG", "WEBP")
_JPEG_QUALITY = 95


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle in pixels; the origin is the upper left corner of the photo.

    Attributes:
        left: Distance of the left edge from the left edge of the photo.
        top: Distance of the upper edge from the upper edge of the photo.
        right: Distance of the right edge from the left edge of the photo.
        bottom: Distance of the lower edge from the upper edge of the photo.

    Example:
        >>> client.explain("cat.jpg").photo.seen  # the crop of the model leaves out the sides of this photo
        Box(left=75.1..., top=0.0, right=375.8..., bottom=300.0)
    """

    left: float
    top: float
    right: float
    bottom: float


@dataclass(frozen=True, slots=True)
class Photo:
    """Geometry of the photo after its EXIF orientation was applied.

    Attributes:
        width: Width in pixels. The photo has at most ``PIL.Image.MAX_IMAGE_PIXELS`` pixels.
        height: Height in pixels.
        seen: The part that the model sees: a resize with a centre crop leaves out a margin.

    Example:
        >>> photo = client.explain("cat.jpg").photo
        >>> photo.width, photo.height
        (451, 300)
        >>> round(photo.seen.left), round(photo.seen.right)  # columns of pixels
        (75, 376)
    """

    width: int
    height: int
    seen: Box


@dataclass(frozen=True, slots=True)
class Picture:
    """An encoded picture.

    Attributes:
        format: "jpeg", "png" or "webp".
        data: Content of the file.
        width: Width in pixels.
        height: Height in pixels.

    Example:
        >>> picture = client.explain("cat.jpg", overlay="png", max_side=200).explanations[0].overlay_picture
        >>> picture.format, picture.width, picture.height
        ('png', 200, 133)
    """

    format: str
    data: bytes
    width: int
    height: int

    def open(self) -> Image.Image:
        """Decode the picture.

        Raises:
            Internal: The data is not a JPEG, PNG or WebP file, is corrupt, or has more pixels than
                ``PIL.Image.MAX_IMAGE_PIXELS``.

        Example:
            >>> picture = client.explain("cat.jpg", max_side=200).explanations[0].overlay_picture
            >>> image = picture.open()
            >>> image.mode, image.size
            ('RGB', (200, 133))
        """
        with _as_internal():
            image = _read_header(self.data)
            image.load()
        return image

    def encoded(self, wanted: str) -> bytes:
        """Return the file in the ``wanted`` format; it is encoded again only if it has another format.

        Args:
            wanted: "jpeg", "png" or "webp".

        Raises:
            Internal: The picture has another format, and cannot be decoded.

        Example:
            >>> picture = client.explain("cat.jpg", overlay="png", max_side=200).explanations[0].overlay_picture
            >>> picture.encoded("jpeg")[:2].hex()  # every JPEG file begins with these bytes
            'ffd8'
        """
        return self.data if wanted == self.format else encode_picture(self.open(), wanted)


@contextmanager
def _as_internal() -> Generator[None, None, None]:
    try:
        yield
    except CamserveError:
        raise
    except Exception as error:
        raise Internal(f"the server sent a picture that cannot be decoded: {error}") from error


def _read_header(data: bytes) -> Image.Image:
    # Pillow has about forty decoders. Without this list the server could choose any of them.
    image = Image.open(io.BytesIO(data), formats=_DECODED_FORMATS)
    if excess := excess_pixels(image.width, image.height):
        raise Internal(f"the server sent a picture of {excess}")
    return image


def check_total(pictures: Iterable[Picture | None]) -> None:
    """Check the number of pixels of all pictures of an answer, before they are decoded.

    Raises:
        Internal: There are too many, or a file has no valid header.
    """
    total = 0
    for picture in filter(None, pictures):
        with _as_internal():
            image = _read_header(picture.data)
        total += image.width * image.height
    if total > MAX_PIXELS_IN_ALL:
        raise Internal(f"the server sent pictures of {total:,} pixels in all; the limit is {MAX_PIXELS_IN_ALL:,}")


def excess_pixels(width: int, height: int) -> str:
    """Return a description of a size and of the limit, if it has more pixels than Pillow's limit, or else nothing."""
    # Pillow itself only warns above this limit, and raises an error above twice the limit.
    limit = Image.MAX_IMAGE_PIXELS
    if limit is None or width * height <= limit:
        return ""
    return f"{width:,} x {height:,} pixels; the limit is {limit:,}"


def encode_picture(image: Image.Image, encoding: str, quality: int = _JPEG_QUALITY) -> bytes:
    """Encode an image as "jpeg", "png" or "webp"."""
    options: dict[str, dict[str, Any]] = {
        "jpeg": {"quality": quality},
        "png": {"compress_level": 1},  # for an upload, encoding time matters more than size
        "webp": {"quality": quality},
    }
    file = io.BytesIO()
    source = image.convert("RGB") if encoding == "jpeg" else image
    source.save(file, encoding, **options[encoding])
    return file.getvalue()
