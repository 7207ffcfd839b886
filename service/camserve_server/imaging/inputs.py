"""Inputs that a user makes: by a transform of their own, or as tensors in place of photos."""

import io
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from camserve_server.core.arrays import Input, Map, Pixels
from camserve_server.core.errors import ConfigError, FailedPrecondition, InvalidArgument
from camserve_server.imaging import images
from camserve_server.imaging.values import Box, Preprocess

Size: TypeAlias = tuple[int, int]
Crop: TypeAlias = float | Literal["whole"]
Transform: TypeAlias = Callable[[Any], Any]
"""Makes an input [3,H,W] or [1,3,H,W] of a PIL image, or of a uint8 array [height, width, 3]."""

SIDE = 224
"""Side of an input for which no size is given, in pixels."""
CROP = 0.875
"""Share of a photo's shorter side that the usual centre crop keeps: 224 of 256 pixels."""

_TRIAL = (240, 320)  # height and width of the picture that a transform is tried with
_CHUNK = b"caMi"  # of a PNG: private, and ignored by whatever does not know it
_HEAD = struct.Struct(">I4s")
_FIRST, _CRC = 8, 4  # bytes of a PNG before its first chunk, and at the end of each


@dataclass(frozen=True, slots=True)
class Prepare:
    """Makes the input of a photo by a user's transform, or takes the one that the photo's file carries.

    Attributes:
        plain: what is done without either; its crop says which part of a photo a transform's input shows.
        transform: of the user, or None.
    """

    plain: Preprocess
    transform: Transform | None = None

    def __call__(self, photo: Pixels, data: bytes) -> tuple[Input, Box]:
        """Return the input, and the part of the photo that it shows; see `camserve_server.imaging.values.Prepare`."""
        size = photo.shape[0], photo.shape[1]
        if (carried := _carried(data, self.plain.size)) is not None:
            return carried, Box(0, 0, size[1], size[0])
        if self.transform is None:
            return images.fit(photo, self.plain)
        try:
            made = _as_input(self.transform(photo))
        except Exception as error:  # whatever a user's function raises
            raise FailedPrecondition(f"the transform failed: {type(error).__name__}: {error}") from error
        if made.shape[:2] != self.plain.size:
            words = f"the transform made an input of {_shown(made.shape)}, and the size is {_shown(self.plain.size)}"
            raise FailedPrecondition(words)
        return made, images.seen(size, self.plain)


def preprocess_of(
    size: int | Size | None,
    crop: Crop | None,
    mean: Sequence[float],
    std: Sequence[float],
    transform: Transform | None = None,
) -> Preprocess:
    """Return how the inputs of a network are made.

    Args:
        size: height and width of the input, or one number for both; None for that of what the transform makes.
        crop: share of the photo's shorter side that is kept around its centre, or "whole" for the whole photo,
            squashed. None for the usual crop, or for the whole photo where there is a transform.
        mean: subtracted per channel from RGB values 0 to 1.
        std: divides each channel after that.
        transform: makes inputs in place of all that.

    Raises:
        ConfigError: something is out of range, or the transform makes no input.
    """
    working, made = _tried(transform) if transform else (None, (SIDE, SIDE))
    wanted = made if size is None else (size, size) if isinstance(size, int) else size
    if min(wanted) < 1:
        raise ConfigError(f"size={size}: an input has at least one pixel")
    if transform and wanted != made:
        raise ConfigError(f"the transform makes inputs of {_shown(made)}, and size={size} says otherwise")
    share = crop or ("whole" if transform else CROP)
    plain = Preprocess(wanted, _resize(wanted, share), "bilinear", _rgb(mean, "mean"), _rgb(std, "std"))
    return replace(plain, prepare=Prepare(plain, working))


def _tried(transform: Transform) -> tuple[Transform, Size]:
    """Try a transform with a picture; return it for uint8 arrays, and the height and width of what it makes.

    Raises:
        ConfigError: it fails with a PIL image and with an array, or makes no input.
    """
    photo = np.full((*_TRIAL, 3), 128, np.uint8)
    faults = []
    for take in (_with_pil(transform), transform):
        try:
            height, width, _ = _as_input(take(photo)).shape
        except Exception as error:  # noqa: BLE001 -- whatever a user's function raises
            faults.append(f"{type(error).__name__}: {error}")
        else:
            return take, (height, width)
    raise ConfigError(f"the transform fails with a PIL image ({faults[0]}) and with an array ({faults[1]})")


def _with_pil(transform: Transform) -> Transform:
    return lambda array: transform(Image.fromarray(array))


def _as_input(made: Any) -> Map:
    """Return an input as the engine has it, float32 [h,w,3].

    Raises:
        ValueError: it is none.
    """
    tensor = made.detach() if isinstance(made, Tensor) else torch.as_tensor(np.asarray(made))
    if tensor.dim() == 4 and len(tensor) == 1:  # noqa: PLR2004 -- a batch of one
        tensor = tensor[0]
    if tensor.dim() != 3 or len(tensor) != 3 or not tensor.is_floating_point():  # noqa: PLR2004 -- [3,H,W]
        raise ValueError(f"{list(tensor.shape)} of {tensor.dtype} is no input: a float tensor [3, H, W] is")
    return np.ascontiguousarray(tensor.float().permute(1, 2, 0).cpu().numpy())


def _resize(size: Size, crop: Any) -> int | Size:
    if crop == "whole":
        return size
    if not (isinstance(crop, int | float) and 0 < crop <= 1):
        raise ConfigError(f'crop={crop!r}: it is above 0 and up to 1, or "whole"')
    height, width = (round(side / crop) for side in size)
    return height if size[0] == size[1] else (height, width)


def _rgb(values: Sequence[float], name: str) -> tuple[float, float, float]:
    try:
        red, green, blue = map(float, values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}={values!r}: there are three numbers, for red, green and blue") from error
    return red, green, blue


def _shown(shape: Sequence[int]) -> str:
    return f"{shape[0]} by {shape[1]} pixels"


def file_of(tensor: Tensor, preprocess: Preprocess) -> bytes:
    """Return a PNG of an input that is already preprocessed; the file carries the input itself, too.

    Args:
        tensor: floating point [3,H,W] or [1,3,H,W], normalised, on any device.
        preprocess: of the network; its mean and deviation make the picture.

    Raises:
        InvalidArgument: the tensor is no input of the network.
    """
    try:
        image = _as_input(tensor)
    except ValueError as error:
        raise InvalidArgument(str(error), field="image") from error
    if image.shape[:2] != preprocess.size:
        words = f"the input has {_shown(image.shape)}, and the network takes {_shown(preprocess.size)}"
        raise InvalidArgument(words, field="image")
    out = io.BytesIO()
    Image.fromarray(images.displayed(image, preprocess)).save(out, "png", compress_level=1)
    png, values = out.getvalue(), image.astype("<f4").tobytes()
    chunk = _HEAD.pack(len(values), _CHUNK) + values + struct.pack(">I", zlib.crc32(values, zlib.crc32(_CHUNK)))
    end = len(png) - _HEAD.size - _CRC  # before the last chunk, IEND, which is empty
    return png[:end] + chunk + png[end:]


def _carried(data: bytes, size: Size) -> Map | None:
    """Return the input that a PNG carries, or None."""
    length = 4 * 3 * size[0] * size[1]
    start = len(data) - _HEAD.size - _CRC - _CRC - length  # before IEND
    if start < _FIRST + _HEAD.size or data[start - _HEAD.size : start] != _HEAD.pack(length, _CHUNK):
        return None
    return np.frombuffer(data, "<f4", length // 4, start).reshape(*size, 3).copy()  # torch wants to own it
