"""Inputs made by users: with their own transform, or as tensors in place of photos."""

import io
import logging
import math
import operator
import struct
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal, TypeAlias

import numpy as np
from PIL import Image
from torch import Tensor

from camserve_server.core.arrays import Input, Map, Photo
from camserve_server.core.errors import ConfigError, FailedPrecondition, InvalidArgument
from camserve_server.imaging import channels as raw
from camserve_server.imaging import fitting, transforms
from camserve_server.imaging.transforms import ArrayTransform, Transform
from camserve_server.imaging.values import Box, Preprocess

log = logging.getLogger(__name__)

Size: TypeAlias = tuple[int, int]
Crop: TypeAlias = float | Literal["whole"]

SIDE = 224
"""Default side of an input, in pixels."""
CROP = 0.875
"""Default share of a photo's shorter side that a centre crop keeps: 224 of 256 pixels."""

_TRIAL_SIZE = (240, 320)  # height and width of the picture that a transform is tried with
_SIZES = 256  # sizes of photos for which the part that a transform shows is remembered
_CHUNK = b"caMi"  # type of a private PNG chunk, which other programs ignore
_CHUNK_HEADER = struct.Struct(">I4s")
_SIGNATURE_BYTES, _CRC_BYTES = 8, 4  # of a PNG: before its first chunk, and at the end of each chunk


@dataclass(frozen=True, slots=True)
class Prepare:
    """Make the input of a photo by a user's transform, or read it from the photo's file if that carries one.

    Attributes:
        plain: preprocessing without either; its crop defines the part of a photo that a transform's input shows.
        transform: the user's transform, or None.
        shown: returns the part of a photo of a size that the transform's input shows; None if `plain` defines it.
    """

    plain: Preprocess
    transform: ArrayTransform | None = None
    shown: Callable[[Size], Box] | None = None

    def __call__(self, photo: Photo, data: bytes, value_range: tuple[float, float] | None) -> tuple[Input, Box]:
        """Return the input, and the part of the photo that it shows, as `camserve_server.imaging.values.Prepare`."""
        size = photo.shape[0], photo.shape[1]
        if (embedded := _read_embedded(data, (*self.plain.size, self.plain.channels))) is not None:
            return embedded, Box(0, 0, size[1], size[0])
        if self.transform is None:
            return fitting.fit(photo, replace(self.plain, value_range=value_range))
        try:
            image = self.transform(photo)
        except Exception as error:  # a user's function may raise anything
            raise FailedPrecondition(f"the transform failed: {type(error).__name__}: {error}") from error
        if image.shape != (*self.plain.size, self.plain.channels):
            expected = _describe_size((*self.plain.size, self.plain.channels))
            raise FailedPrecondition(
                f"the transform made an input of {_describe_size(image.shape)}, and the size is {expected}"
            )
        return image, self._shown(size)

    def _shown(self, size: Size) -> Box:
        if self.shown is not None:
            with suppress(Exception):  # a photo of extreme proportions; or a user's function, which may raise anything
                return self.shown(size)
        return fitting.visible_box(size, self.plain)


def preprocess_of(
    size: int | Size | None,
    crop: Crop | None,
    mean: Sequence[float],
    std: Sequence[float],
    transform: Transform | None = None,
) -> Preprocess:
    """Return the preprocessing of a network's inputs.

    Args:
        size: height and width of the input, or one number for both; None for the size of the transform's inputs.
        crop: share of the photo's shorter side to keep around its centre, or "whole" to squash the whole photo. None
            for the default crop, or for the part that the transform shows.
        mean: for each channel, subtracted from values 0 to 1: RGB, if there are three.
        std: for each channel, the divisor after that.
        transform: function that makes the inputs instead.

    Raises:
        ConfigError: a value is out of range, or the transform does not return an input.
    """
    means, stds = _per_channel(mean, "mean"), _per_channel(std, "std")
    if len(means) != len(stds):
        raise ConfigError(f"mean is for {raw.count_of(len(means))}, and std for {raw.count_of(len(stds))}")
    array_transform, made = _try_transform(transform, len(means)) if transform else (None, (SIDE, SIDE, len(means)))
    made_size = made[:2]
    if made[2] != len(means):
        raise ConfigError(f"the transform makes inputs of {raw.count_of(made[2])}, and mean is for {len(means)}")
    input_size = made_size if size is None else size_of(size)
    if transform and input_size != made_size:
        raise ConfigError(f"the transform makes inputs of {_describe_size(made_size)}, and size={size} says otherwise")
    share = crop or ("whole" if transform else CROP)
    plain = Preprocess(input_size, _resize(input_size, share), "bilinear", means, stds)
    shown = None
    if array_transform and not crop and _measured(array_transform, len(means)):
        shown = lru_cache(_SIZES)(partial(transforms.shown_part, array_transform, channels=len(means)))
    return replace(plain, prepare=Prepare(plain, array_transform, shown))


def size_of(size: Any) -> Size:
    """Return height and width from either, or from one number for both.

    Raises:
        ConfigError: they are not whole numbers from 1.
    """
    try:
        height, width = map(operator.index, size if isinstance(size, Sequence) else (size, size))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"size={size!r}: it is a number of pixels, or (height, width)") from error
    if min(height, width) < 1:
        raise ConfigError(f"size={size}: an input has at least one pixel")
    return height, width


def _try_transform(transform: Transform, channels: int) -> tuple[ArrayTransform, tuple[int, int, int]]:
    """Try a transform on a picture; return it as a function of uint8 arrays, and the shape [H,W,C] of its inputs.

    Raises:
        ConfigError: the transform fails, or does not return an input.
    """
    noise = np.random.default_rng(0).integers(0, 256, (*_TRIAL_SIZE, channels), np.uint8)
    array_transform, made = transforms.as_array_transform(transform, noise)
    if not np.array_equal(made, array_transform(noise), equal_nan=True):
        log.warning("the transform makes another input of the same photo each time: is it that of a training?")
    height, width, made_channels = made.shape
    return array_transform, (height, width, made_channels)


def _measured(transform: ArrayTransform, channels: int) -> bool:
    """Return whether the part of a photo that a transform shows can be measured; if not, log why."""
    try:
        transforms.shown_part(transform, _TRIAL_SIZE, channels)
    except Exception as error:  # noqa: BLE001 -- a user's function may raise anything
        words = (
            "heatmaps may be drawn in the wrong place, for it is not known which part of a photo the transform shows"
        )
        log.warning("%s (%s): crop= says it", words, error)
        return False
    return True


def _resize(size: Size, crop: Any) -> int | Size:
    if crop == "whole":
        return size
    if not (isinstance(crop, int | float) and 0 < crop <= 1):
        raise ConfigError(f'crop={crop!r}: it is above 0 and up to 1, or "whole"')
    height, width = (round(side / crop) for side in size)
    return height if size[0] == size[1] else (height, width)


def _per_channel(values: Sequence[float], name: str) -> tuple[float, ...]:
    try:
        numbers = tuple(map(float, values))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}={values!r}: expected one number for each channel, such as three for RGB") from error
    if not numbers:
        raise ConfigError(f"{name}={values!r}: an input has at least one channel")
    return numbers


def _describe_size(shape: Sequence[int]) -> str:
    channels = f" with {raw.count_of(shape[2])}" if len(shape) == 3 and shape[2] != raw.RGB else ""  # noqa: PLR2004 -- [H,W,C]
    return f"{shape[0]} by {shape[1]} pixels{channels}"


def file_of(tensor: Tensor, preprocess: Preprocess) -> bytes:
    """Return a PNG picture of an already preprocessed input, with the input itself embedded.

    Args:
        tensor: normalised input, floating point [C,H,W] or [1,C,H,W], on any device.
        preprocess: the network's preprocessing; its mean and std make the picture.

    Raises:
        InvalidArgument: the tensor is not an input of the network.
    """
    try:
        image = transforms.as_input(tensor)
    except ValueError as error:
        raise InvalidArgument(str(error), field="image") from error
    if image.shape != (*preprocess.size, preprocess.channels):
        expected = _describe_size((*preprocess.size, preprocess.channels))
        message = f"the input has {_describe_size(image.shape)}, and the network takes {expected}"
        if image.shape[2] != preprocess.channels:
            message = f"the input has {raw.count_of(image.shape[2])}, and the network takes {preprocess.channels}"
        raise InvalidArgument(message, field="image")
    buffer = io.BytesIO()
    Image.fromarray(fitting.displayed(image, preprocess)).save(buffer, "png", compress_level=1)
    png, values = buffer.getvalue(), image.astype("<f4").tobytes()
    chunk = _CHUNK_HEADER.pack(len(values), _CHUNK) + values + struct.pack(">I", zlib.crc32(values, zlib.crc32(_CHUNK)))
    end = len(png) - _CHUNK_HEADER.size - _CRC_BYTES  # before the last chunk, IEND, which is empty
    return png[:end] + chunk + png[end:]


def carries_input(data: bytes, preprocess: Preprocess) -> bool:
    """Return whether a file is that of an input of a network of this process; see `file_of`."""
    shape = (*preprocess.size, preprocess.channels)
    return preprocess.prepare is not None and _start_of_embedded(data, shape) is not None


def _read_embedded(data: bytes, shape: tuple[int, int, int]) -> Map | None:
    """Return the input [H,W,C] that is embedded in a PNG, or None."""
    start = _start_of_embedded(data, shape)
    if start is None:
        return None
    return np.frombuffer(data, "<f4", math.prod(shape), start).reshape(shape).copy()  # torch needs writable memory


def _start_of_embedded(data: bytes, shape: tuple[int, int, int]) -> int | None:
    """Return where the values of an embedded input [H,W,C] start, or None without one."""
    length = 4 * math.prod(shape)
    start = len(data) - _CHUNK_HEADER.size - _CRC_BYTES - _CRC_BYTES - length  # before IEND
    header = data[start - _CHUNK_HEADER.size : start]
    is_there = start >= _SIGNATURE_BYTES + _CHUNK_HEADER.size and header == _CHUNK_HEADER.pack(length, _CHUNK)
    return start if is_there else None
