"""A user's own transform: how it is called, what it returns, and which part of a photo it shows."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from camserve_server.core.arrays import Map, Photo
from camserve_server.core.errors import ConfigError
from camserve_server.imaging.values import Box

Transform: TypeAlias = Callable[[Any], Any]
"""A PIL image, or a uint8 array [height, width, 3] -> an input [C,H,W] or [1,C,H,W]."""

ArrayTransform: TypeAlias = Callable[[Photo], Map]
"""An array [height, width, C], usually uint8 -> an input in the engine's layout, float32 [H,W,C]."""

_KEYS = ("pixel_values", "image")
"""Entries of a mapping that have the input, in processors of transformers and in Albumentations."""

_TOLERANCE = 2.5 / 255
"""Largest distance of a ramp of 8-bit values from a straight line, as a share of the ramp: rounding, twice."""


def as_array_transform(transform: Transform, photo: Photo) -> tuple[ArrayTransform, Map]:
    """Find out how a transform is called.

    Args:
        transform: the user's transform.
        photo: a photo to try it with, uint8 [H,W,C].

    Returns:
        The transform as a function of arrays, and the input that it made of the photo.

    Raises:
        ConfigError: the transform fails in every way, or does not return an input.
    """
    failures = []
    for words, call in _CALLS.items():
        run = partial(_run, call, transform)
        try:
            return run, run(photo)
        except Exception as error:  # noqa: BLE001 -- a user's function may raise anything
            failures.append(f"{words} ({type(error).__name__}: {error})")
    raise ConfigError(f"the transform fails {', '.join(failures[:-1])} and {failures[-1]}")


def _run(call: "_Call", transform: Transform, array: Photo) -> Map:
    return as_input(call(transform, array), array.shape[2])


def _pil(array: Photo) -> Image.Image:
    return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)


_Call: TypeAlias = Callable[[Any, Photo], Any]

_CALLS: Mapping[str, _Call] = {
    "with a PIL image": lambda transform, array: transform(_pil(array)),
    "with an array": lambda transform, array: transform(array),
    "with image=": lambda transform, array: transform(image=array),  # Albumentations
}


def as_input(value: Any, channels: int | None = None) -> Map:
    """Return an input in the engine's layout, float32 [H,W,C].

    Args:
        value: a float tensor or array [C,H,W] or [1,C,H,W]; an array [H,W,C], if it has that number of channels; or a
            mapping with one of these, as processors of transformers and Albumentations return it.
        channels: the number of channels of the photo.

    Raises:
        ValueError: the value is not an input.
    """
    if isinstance(value, Mapping):
        keys = [key for key in _KEYS if key in value] or [*value][: len(value) == 1]
        if not keys:
            raise ValueError(f"a mapping without pixel_values or image is not an input: it has {', '.join(value)}")
        value = value[keys[0]]
    tensor = value.detach() if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
    if tensor.dim() == 4 and len(tensor) == 1:  # noqa: PLR2004 -- a batch of one
        tensor = tensor[0]
    if tensor.dim() != 3 or not tensor.is_floating_point():  # noqa: PLR2004 -- [C,H,W]
        raise ValueError(f"{list(tensor.shape)} of {tensor.dtype} is not an input: expected a float tensor [C, H, W]")
    rows_first = not isinstance(value, Tensor) and tensor.shape[2] == channels != tensor.shape[0]
    tensor = tensor if rows_first else tensor.permute(1, 2, 0)
    return np.ascontiguousarray(tensor.float().cpu().numpy())


def shown_part(transform: ArrayTransform, size: tuple[int, int], channels: int) -> Box:
    """Return the part of a photo of a size that a transform shows, by what it makes of brightness that rises evenly.

    Args:
        transform: the transform. It may resize, crop, pad and normalise the photo.
        size: height and width of the photo.
        channels: number of channels of the photo.

    Returns:
        The part in pixels, which reaches beyond the photo where the input has a border. It covers less than a pixel
        more or less than what the transform shows, of a photo of 256 pixels and more.

    Raises:
        ValueError: the transform turns, mirrors or warps the photo, or its values do not rise with the photo's.
    """
    height, width = size
    black, white = (transform(np.full((height, width, channels), value, np.uint8)) for value in (0, 255))
    span = white - black
    if not np.isfinite(span).all() or not span.any():
        raise ValueError("its values do not depend on the photo's brightness alone")
    # A border has the same values in both.
    inside = np.abs(span) > np.abs(span).max() / 2
    parts = []
    for axis, side in ((0, height), (1, width)):
        ramp = np.rint((np.arange(side) + 0.5) * (255 / side)).astype(np.uint8)
        picture = np.broadcast_to(ramp[:, None, None] if axis == 0 else ramp[None, :, None], (height, width, channels))
        rises = (transform(np.ascontiguousarray(picture)) - black) / np.where(inside, span, 1)
        start, end = _fit(np.moveaxis(rises, axis, 0), np.moveaxis(inside, axis, 0))
        parts.append((_near(start * side, 0), _near(end * side, side)))
    (top, bottom), (left, right) = parts
    return Box(left, top, right, bottom)


def _near(place: float, edge: float) -> float:
    """Return the photo's edge for a place that is less than half a pixel from it, as rounding leaves it."""
    return edge if abs(place - edge) < 1 / 2 else place


def _fit(rises: NDArray[np.floating[Any]], inside: NDArray[np.bool_]) -> tuple[float, float]:
    """Return where an input begins and ends along an axis, from the place that each of its pixels shows.

    Args:
        rises: the places [n,m,C] along the photo's side, as shares of it.
        inside: False for pixels of a border.
    """
    used = inside.any((1, 2))
    counts = np.maximum(inside.sum((1, 2)), 1)
    places = np.where(inside, rises, 0).sum((1, 2), dtype=np.float64) / counts
    if np.abs(np.where(inside, rises - places[:, None, None], 0)).max() > _TOLERANCE:
        raise ValueError("it turns or warps the photo")
    count = len(places)
    centres = np.arange(count) + 0.5
    # Beyond the photo's first and last pixel, the ramp does not go on.
    used &= (places > _TOLERANCE) & (places < 1 - _TOLERANCE)
    if used.sum() < 2:  # noqa: PLR2004 -- points of a line
        raise ValueError("it shows too little of the photo")
    slope, start = np.polyfit(centres[used], places[used], 1)
    if np.abs(slope * centres + start - places)[used].max() > _TOLERANCE:
        raise ValueError("it warps the photo, or changes its contrast")
    if slope < 0:
        raise ValueError("it mirrors the photo")
    return float(start), float(start + slope * count)
