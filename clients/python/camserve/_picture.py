"""Pictures: pixels to files and back, and a raw map carried onto the photo."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageOps

from camserve._errors import CamserveError, Internal, InvalidArgument

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORMATS = {".jpg": "jpeg", ".jpeg": "jpeg", ".png": "png", ".webp": "webp"}

_PNG_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I"})
_DECODED = ("JPEG", "PNG", "WEBP")
_RGB = 3
_JPEG_QUALITY = 95


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle in pixels, from the upper left corner of the photo."""

    left: float
    top: float
    right: float
    bottom: float


@dataclass(frozen=True, slots=True)
class Photo:
    """The photo as it was decoded, upright.

    Attributes:
        width: In pixels.
        height: In pixels.
        seen: The part that the model saw; a resize and a centre crop leave a margin out.
    """

    width: int
    height: int
    seen: Box


@dataclass(frozen=True, slots=True)
class Picture:
    """An encoded picture: its format ("jpeg", "png" or "webp"), the file, and its size in pixels."""

    format: str
    data: bytes
    width: int
    height: int

    def open(self) -> Image.Image:
        """Decode it.

        Raises:
            Internal: It is not a JPEG, PNG or WebP, is broken, or has more pixels than
                ``PIL.Image.MAX_IMAGE_PIXELS``.
        """
        try:
            # Pillow has decoders for some forty formats, and without this list the server chooses the decoder.
            image = Image.open(io.BytesIO(self.data), formats=_DECODED)
            _check_pixels(image)
            image.load()
        except CamserveError:
            raise
        except Exception as error:
            raise Internal(f"the server sent a picture that cannot be decoded: {error}") from error
        return image

    def encoded(self, wanted: str) -> bytes:
        """Return the file in a format: the one at hand if it is that, else encoded again."""
        return self.data if wanted == self.format else encode(self.open(), wanted)


def _check_pixels(image: Image.Image) -> None:
    # Pillow itself only warns above this limit, and raises an error above twice the limit.
    most = Image.MAX_IMAGE_PIXELS
    if most is not None and image.width * image.height > most:
        raise Internal(f"the server sent a picture of {image.width:,} x {image.height:,} pixels; the limit is {most:,}")


def encode(image: Image.Image, wanted: str) -> bytes:
    """Encode an image as "jpeg", "png" or "webp"."""
    options: dict[str, dict[str, Any]] = {
        "jpeg": {"quality": _JPEG_QUALITY},
        "png": {"compress_level": 1},  # on its way over the wire, time matters more than size
        "webp": {"quality": _JPEG_QUALITY},
    }
    out = io.BytesIO()
    source = image.convert("RGB") if wanted == "jpeg" else image
    source.save(out, wanted, **options[wanted])
    return out.getvalue()


def from_pil(image: Image.Image) -> bytes:
    """Encode a PIL image without loss, turned upright as its EXIF orientation says."""
    upright = ImageOps.exif_transpose(image)
    if upright.mode == "F":
        raise _bad("a PIL image of mode F has no agreed range; convert it to RGB first")
    return encode(upright if upright.mode in _PNG_MODES else upright.convert("RGB"), "png")


def from_array(array: NDArray[Any]) -> bytes:
    """Encode a uint8 [H, W, 3] array in RGB order without loss."""
    fits = array.ndim == _RGB and array.shape[2] == _RGB and array.size
    if array.dtype != np.uint8 or not fits:
        raise _bad(f"an array must be uint8 [H, W, 3] in RGB, not {array.dtype} {array.shape}")
    return encode(Image.fromarray(np.ascontiguousarray(array)), "png")


def onto_photo(heatmap: NDArray[np.float32], photo: Photo) -> NDArray[np.float32]:
    """Carry a raw map back through the crop and resize that the photo went through.

    Bilinear between the centres of the map's cells, as PyTorch's and OpenCV's; towards the
    edge of what was seen, the outermost cells continue.

    Args:
        heatmap: [h, w], covering ``photo.seen``.
        photo: Its geometry.

    Returns:
        float32 [photo.height, photo.width]; NaN where the model did not look.
    """
    seen = photo.seen
    y = _samples(heatmap.shape[0], photo.height, seen.top, seen.bottom)
    x = _samples(heatmap.shape[1], photo.width, seen.left, seen.right)
    out = np.full((photo.height, photo.width), np.nan, np.float32)
    with np.errstate(invalid="ignore"):  # a map with infinities gives NaN around them
        rows = _between(heatmap, y)
        out[y.pixels, x.pixels] = _between(rows.T, x).T
    return out


@dataclass(frozen=True, slots=True)
class _Samples:
    """For each seen pixel on an axis: the cells to both sides of its centre, and the upper's share."""

    pixels: slice
    low: NDArray[np.intp]
    high: NDArray[np.intp]
    share: NDArray[np.float32]


def _samples(cells: int, pixels: int, start: float, end: float) -> _Samples:
    # A pixel is seen if its centre is.
    first, last = max(0, math.ceil(start - 0.5)), min(pixels, math.ceil(end - 0.5))
    centres = np.arange(first, last) + 0.5
    where = np.clip((centres - start) / (end - start) * cells - 0.5, 0, cells - 1)
    low = np.floor(where).astype(np.intp)
    share = (where - low).astype(np.float32)
    return _Samples(slice(first, max(first, last)), low, np.minimum(low + 1, cells - 1), share)


def _between(cells: NDArray[np.float32], samples: _Samples) -> NDArray[np.float32]:
    low, high = cells[samples.low], cells[samples.high]
    return (low + (high - low) * samples.share[:, None]).astype(np.float32, copy=False)


def _bad(reason: str) -> InvalidArgument:
    return InvalidArgument(f"image: {reason}", fields={"image": reason})
