"""Fit a photo to the input of a model: resize, crop and pad."""

import functools
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn import functional

from camserve_server.core.arrays import Input, Map, Photo, Pixels
from camserve_server.core.errors import InvalidArgument
from camserve_server.imaging import channels as raw
from camserve_server.imaging.headers import Size
from camserve_server.imaging.opencv import cv2
from camserve_server.imaging.values import Box, KeepAspect, Preprocess

_LEAST_UNIT, _MOST_UNIT = -1.0, 2.0  # of values from 0 to 1: a resampling overshoots, and a bright thing may be above 1


@dataclass(frozen=True, slots=True)
class _CropAxis:
    """One axis of a resize and centre crop, in pixels.

    Attributes:
        photo: length before the resize.
        resized: length after the resize.
        crop: length of the model's input.
        floors: rounding of the crop's start, as in `Preprocess`.
    """

    photo: int
    resized: int
    crop: int
    floors: bool = False

    @property
    def pad(self) -> int:
        """Pixels of the border before the photo, if it is smaller than the crop."""
        return max(0, self.crop - self.resized) // 2

    @property
    def start(self) -> int:
        """First pixel of the resized photo that is kept."""
        spare = max(0, self.resized - self.crop)
        return spare // 2 if self.floors else round(spare / 2)  # half to even

    @property
    def stop(self) -> int:
        return self.start + min(self.crop, self.resized)

    @property
    def scale(self) -> float:
        """Pixels of the photo per pixel of the input."""
        return self.photo / self.resized

    @property
    def edges(self) -> tuple[float, float]:
        """Start and end of the input in the photo's pixels; they are beyond its edges if the input is padded."""
        first = self.start - self.pad
        return first * self.scale, (first + self.crop) * self.scale


def make_input(photo: Photo, data: bytes, preprocess: Preprocess) -> tuple[Input, Box]:
    """Return a model's input for a photo, made by the model's own `prepare` if it has one, else by resize and crop.

    Args:
        photo: the decoded photo.
        data: the photo's file.
        preprocess: the model's preprocessing.

    Returns:
        The input, and the part of the photo that it shows.
    """
    return (
        fit(photo, preprocess)
        if preprocess.prepare is None
        else preprocess.prepare(photo, data, preprocess.value_range)
    )


def displayed(image: Input, preprocess: Preprocess) -> Pixels:
    """Return a model's input as a picture; a normalised input is scaled back by mean and standard deviation."""
    if image.dtype == np.uint8:
        return raw.picture(cast("Pixels", image))
    if preprocess.channels != raw.RGB:
        return raw.picture(raw.denormalised(cast("Map", image), preprocess.mean, preprocess.std))
    values = np.nan_to_num(255 * (image * preprocess.std + preprocess.mean))
    return cast("Pixels", values.round().clip(0, 255).astype(np.uint8))


def visible_box(size: Size, preprocess: Preprocess) -> Box:
    """Return the part of a photo of this height and width that remains after resize and crop."""
    rows, columns = _axes(size, preprocess.for_photo(size))
    (top, bottom), (left, right) = rows.edges, columns.edges
    return Box(left, top, right, bottom)


def fit(photo: Photo, preprocess: Preprocess) -> tuple[Input, Box]:
    """Resize and crop a photo as torchvision's and timm's evaluation transforms do.

    Values differ from those of the transforms on a PIL image by at most 1, except at some hard edges with "bicubic".
    There it overshoots black and white, which Pillow cuts off between its two passes, in an order that depends on its
    version. A photo of extreme proportions is never resized as a whole, so that it costs no more than others.

    Values of 8 bits stay so. Others become 0 to 1 before the resize, and are normalised after it, all in float32.

    Args:
        photo: the decoded photo.
        preprocess: the model's preprocessing; mean and std are not applied to 8 bits.

    Returns:
        uint8 [*size, channels], or float32 if the photo has other values or a range of them, where size is that of
        `preprocess.for_photo`, with a border where the resized photo is smaller than the crop; and the part of the
        photo that it shows, in the photo's pixels, which reaches beyond the photo's edges if there is a border.
    """
    size = photo.shape[0], photo.shape[1]
    preprocess = preprocess.for_photo(size)
    rows, columns = _axes(size, preprocess)
    bytes_stay = photo.dtype == np.uint8 and preprocess.value_range is None
    if photo.dtype == np.float32 and preprocess.value_range is None:
        _check_unit(photo, preprocess)
    values = photo if bytes_stay else raw.as_unit(photo, preprocess.value_range)
    cropped = _resampler(rows, columns, preprocess)(values, rows, columns, preprocess.interpolation)
    image = _pad(cropped, rows, columns, preprocess.fill if bytes_stay else preprocess.fill / 255)
    if not bytes_stay:
        image = raw.normalised(image, preprocess.mean, preprocess.std)
    return cast("Input", image), visible_box(size, preprocess)


def _check_unit(photo: Photo, preprocess: Preprocess) -> None:
    """Check that floating-point values are in the unit of the model's mean and standard deviation.

    If these are from 0 to 1, as those of ImageNet, values far outside are in another unit, such as 0 to 255. A mean of
    0 and a deviation of 1 say nothing: the photo may be normalised already.

    Raises:
        InvalidArgument: they are in another unit.
    """
    mean, std = preprocess.mean, preprocess.std
    says_nothing = not any(mean) and all(value == 1 for value in std)
    if says_nothing or max(map(abs, mean)) > 1 or max(std) > 1:
        return
    low, high = float(photo.min()), float(photo.max())
    if low < _LEAST_UNIT or high > _MOST_UNIT:
        raise InvalidArgument(
            f"the image has values from {low:g} to {high:g}, and the model takes 0 to 1: name the values that become 0 "
            "and 1, such as 0 and 255, with value_range",
            field="value_range",
        )


def _axes(size: Size, preprocess: Preprocess) -> tuple[_CropAxis, _CropAxis]:
    resized = _resized_size(size, preprocess.resize)
    rows, columns = (
        _CropAxis(*lengths, preprocess.floors) for lengths in zip(size, resized, preprocess.size, strict=True)
    )
    return rows, columns


def _resized_size(size: Size, resize: int | Size | KeepAspect) -> Size:
    if not isinstance(resize, int):
        return cast("Size", resize)  # `Preprocess.for_photo` has replaced a KeepAspect
    height, width = size
    longer = int(resize * max(size) / min(size))
    return (longer, resize) if width <= height else (resize, longer)


_Resampler = Callable[[NDArray[Any], _CropAxis, _CropAxis, str], NDArray[Any]]


def _resampler(rows: _CropAxis, columns: _CropAxis, preprocess: Preprocess) -> _Resampler:
    if preprocess.interpolation == "nearest":
        return _pick
    if preprocess.interpolation == "linear":
        return _resize_linear
    # Up to this ratio torch, which resizes the whole photo, is five times faster than Pillow. Without the limit a photo
    # of 1 x 16384 would become 256 x 4194304.
    kept = (rows.stop - rows.start) * (columns.stop - columns.start)
    return _resize_part if rows.resized * columns.resized > 8 * kept else _resize_whole


def _resize_whole(photo: NDArray[Any], rows: _CropAxis, columns: _CropAxis, interpolation: str) -> NDArray[Any]:
    """Resize the photo with torch, as torchvision does, whose import would take seconds."""
    size = [rows.resized, columns.resized]
    if size != list(photo.shape[:2]):
        # torch resizes interleaved channels without copies if their strides show them: `photo[None]` has a stride of 0.
        # The views are NumPy's, because each of torch's releases the interpreter's lock, and waits for it again.
        interleaved = np.require(photo, requirements=["C", "W"]).reshape(1, *photo.shape).transpose(0, 3, 1, 2)
        images = torch.from_numpy(interleaved)
        native = images.is_floating_point() or interpolation == "bicubic" or _has_fast_bilinear()
        images = images if native else images.float()
        images = functional.interpolate(images, size, mode=interpolation, align_corners=False, antialias=True)
        images = images if native else images.round_().to(torch.uint8)
        photo = images.numpy()[0].transpose(1, 2, 0)
    return photo[rows.start : rows.stop, columns.start : columns.stop]


@functools.cache
def _has_fast_bilinear() -> bool:
    """Return whether torch has instructions of this processor for bilinear interpolation of uint8.

    Otherwise torchvision converts the photo to float32, and the result differs by up to 1.
    """
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") or platform.machine() in ("aarch64", "arm64")


def _resize_part(photo: NDArray[Any], rows: _CropAxis, columns: _CropAxis, interpolation: str) -> NDArray[Any]:
    """Resize the kept part alone; Pillow weights the pixels around its box as if it resized the whole photo."""
    (above, below), (top, bottom) = _window(rows)
    (before, after), (left, right) = _window(columns)
    part = np.ascontiguousarray(photo[above:below, before:after])
    size, box = (columns.stop - columns.start, rows.stop - rows.start), (left, top, right, bottom)
    resample = Image.Resampling[interpolation.upper()]
    if part.dtype == np.uint8 and part.shape[2] == raw.RGB:
        return np.asarray(Image.fromarray(part).resize(size, resample, box=box))
    bands = (Image.fromarray(np.ascontiguousarray(part[:, :, band])) for band in range(part.shape[2]))
    return np.stack([np.asarray(band.resize(size, resample, box=box)) for band in bands], 2)


def _resize_linear(photo: NDArray[Any], rows: _CropAxis, columns: _CropAxis, _interpolation: str) -> NDArray[Any]:
    """Resize the photo with OpenCV's bilinear interpolation, which reads four pixels at any scale."""
    resized = cv2.resize(photo, (columns.resized, rows.resized), interpolation=cv2.INTER_LINEAR)
    resized = resized.reshape(*resized.shape[:2], -1)  # OpenCV drops the axis of a single channel
    return resized[rows.start : rows.stop, columns.start : columns.stop]


def _window(axis: _CropAxis) -> tuple[tuple[int, int], tuple[float, float]]:
    """Return the range of the photo's pixels that the kept part depends on, and the kept part's edges in that range."""
    first, last = axis.start * axis.scale, axis.stop * axis.scale
    reach = 2 * max(axis.scale, 1) + 1
    begin, end = max(0, int(first - reach)), min(axis.photo, int(last + reach) + 1)
    return (begin, end), (first - begin, min(last, axis.photo) - begin)


def _pick(photo: NDArray[Any], rows: _CropAxis, columns: _CropAxis, _interpolation: str) -> NDArray[Any]:
    return photo[_nearest(rows)][:, _nearest(columns)]


def _nearest(axis: _CropAxis) -> NDArray[np.intp]:
    # Pillow adds up the steps. Multiplying them would sometimes round to another pixel.
    steps = np.full(axis.stop, axis.scale)
    steps[0] /= 2
    return np.cumsum(steps)[axis.start :].astype(np.intp)


def _pad(cropped: NDArray[Any], rows: _CropAxis, columns: _CropAxis, fill: float) -> NDArray[Any]:
    if cropped.shape[:2] == (rows.crop, columns.crop):
        return np.ascontiguousarray(cropped)
    padded = np.full((rows.crop, columns.crop, cropped.shape[2]), fill, cropped.dtype)
    padded[rows.pad :, columns.pad :][: cropped.shape[0], : cropped.shape[1]] = cropped
    return padded
