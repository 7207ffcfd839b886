"""Encode and decode pictures, and resample a raw map to the pixels of the photo."""

from __future__ import annotations

import io
import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from PIL import Image, ImageOps

from camserve._errors import CamserveError, Internal, InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from numpy.typing import NDArray

FORMATS = {".jpg": "jpeg", ".jpeg": "jpeg", ".png": "png", ".webp": "webp"}

MAX_PIXELS_IN_ALL = 1 << 30
"""Most pixels of all pictures of an answer that are decoded together."""

_PNG_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})
_DECODED_FORMATS = ("JPEG", "PNG", "WEBP")
_MASK_MODES = frozenset({"1", "L"})
_RGB = 3
_GREY = 2  # axes of an array
_TYPES = ("uint8", "uint16", "float32")
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
        return self.data if wanted == self.format else encode(self.open(), wanted)


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


def encode(image: Image.Image, encoding: str, quality: int = _JPEG_QUALITY) -> bytes:
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
    return encode(upright if upright.mode in _PNG_MODES else upright.convert("RGB"), "png")


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
        return encode(Image.fromarray(np.ascontiguousarray(array)), "png")
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
    return encode(ImageOps.exif_transpose(mask), "png")


def _mask_from_array(array: NDArray[Any]) -> bytes:
    if array.dtype.name not in ("bool", "uint8") or array.ndim != _GREY or not array.size:
        raise _invalid(f"a mask must be a bool or uint8 array [H, W], not {array.dtype} {array.shape}")
    return encode(Image.fromarray(np.ascontiguousarray(array != 0)), "png")


def onto_photo(heatmap: NDArray[np.float32], photo: Photo) -> NDArray[np.float32]:
    """Resample a raw map to the pixels of the photo: the inverse of the model's resize and crop.

    The interpolation is bilinear between the centres of the map's cells, as in PyTorch and OpenCV. Beyond
    the outermost centres, the values of the outermost cells are repeated.

    Args:
        heatmap: float32 [h, w], which covers ``photo.seen``.
        photo: Geometry of the photo.

    Returns:
        float32 [photo.height, photo.width], with NaN outside of ``photo.seen``.
    """
    seen = photo.seen
    y = _sample_axis(heatmap.shape[0], photo.height, seen.top, seen.bottom)
    x = _sample_axis(heatmap.shape[1], photo.width, seen.left, seen.right)
    resampled = np.full((photo.height, photo.width), np.nan, np.float32)
    # The axis that grows comes last: between the two, a map of one long row would have billions of values otherwise.
    columns_first = heatmap.shape[1] > photo.width and photo.height > heatmap.shape[0]
    with np.errstate(invalid="ignore"):  # infinities in a map give NaN around them
        if columns_first:
            values = _interpolate(_interpolate(heatmap.T, x).T, y)
        else:
            values = _interpolate(_interpolate(heatmap, y).T, x).T
    resampled[y.pixels, x.pixels] = values
    return resampled


def classes_onto_photo(classes: NDArray[np.uint16], photo: Photo) -> NDArray[np.int32]:
    """Return the class of each pixel of the photo: that of the cell that its centre lies in.

    Args:
        classes: uint16 [h, w], which covers ``photo.seen``.
        photo: Geometry of the photo.

    Returns:
        int32 [photo.height, photo.width], with -1 outside of ``photo.seen``.
    """
    seen = photo.seen
    rows, y = _nearest_cells(classes.shape[0], photo.height, seen.top, seen.bottom)
    columns, x = _nearest_cells(classes.shape[1], photo.width, seen.left, seen.right)
    resampled = np.full((photo.height, photo.width), -1, np.int32)
    resampled[rows, columns] = classes[np.ix_(y, x)]
    return resampled


def _nearest_cells(cells: int, pixels: int, start: float, end: float) -> tuple[slice, NDArray[np.intp]]:
    """Return the pixels that the model sees along one axis, and the index of the cell of each."""
    seen, centres = _seen_pixels(pixels, start, end)
    positions = (centres - start) / (end - start) * cells
    return seen, np.clip(np.floor(positions), 0, cells - 1).astype(np.intp)


@dataclass(frozen=True, slots=True)
class _AxisSamples:
    """Interpolation weights along one axis, for each pixel that the model sees.

    Attributes:
        pixels: The pixels that the model sees.
        low: Index of the cell before each pixel's centre.
        high: Index of the cell after it.
        share: Weight of the cell after it, 0 to 1.
    """

    pixels: slice
    low: NDArray[np.intp]
    high: NDArray[np.intp]
    share: NDArray[np.float32]


def _sample_axis(cells: int, pixels: int, start: float, end: float) -> _AxisSamples:
    seen, centres = _seen_pixels(pixels, start, end)
    positions = np.clip((centres - start) / (end - start) * cells - 0.5, 0, cells - 1)
    low = np.floor(positions).astype(np.intp)
    share = (positions - low).astype(np.float32)
    return _AxisSamples(seen, low, np.minimum(low + 1, cells - 1), share)


def _seen_pixels(pixels: int, start: float, end: float) -> tuple[slice, NDArray[np.float64]]:
    """Return the pixels along one axis whose centres the model sees, and these centres."""
    first, last = (min(max(0, math.ceil(edge - 0.5)), pixels) for edge in (start, end))
    return slice(first, max(first, last)), np.arange(first, last, dtype=np.float64) + 0.5


def _interpolate(cells: NDArray[np.float32], samples: _AxisSamples) -> NDArray[np.float32]:
    low, high = cells[samples.low], cells[samples.high]
    return (low + (high - low) * samples.share[:, None]).astype(np.float32, copy=False)


def _invalid(reason: str) -> InvalidArgument:
    return InvalidArgument(f"image: {reason}", fields={"image": reason})
