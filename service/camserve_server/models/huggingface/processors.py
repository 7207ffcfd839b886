"""Preprocessing that a processor of transformers does, found by running it on test photos.

The settings in the folder are not trusted: camserve's own preprocessing must give the same result.
"""

import copy
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from camserve_server.core.errors import ConfigError
from camserve_server.imaging.channels import MAX_CHANNELS, RGB
from camserve_server.imaging.values import KeepAspect, Preprocess
from camserve_server.models.huggingface.folder import PROCESSOR, one_line

Interpolation = Literal["bilinear", "bicubic", "nearest", "linear"]
Photo: TypeAlias = "np.ndarray[Any, Any]"  # uint8 [h,w,3]
Triple: TypeAlias = tuple[float, float, float]

# Largest difference between two preprocessings, as a share of the range from black to white. It allows for rounding and
# for implementations of interpolation. A shift by one pixel gives five times as much.
_MAX_DIFFERENCE = 0.04

_MAX_SIDE = 2048
"""The largest height or width that a processor may name, in pixels. Trying larger ones takes gigabytes."""

_MIN_SHARE = 0.1
"""The smallest part of a resized photo that a processor may keep."""

_SIDE = re.compile("size|edge|height|width|side|divisor|pinpoints|tiles|crops|patches|dynamic_patch|pixels")

_UNITS = ("patch_size", "merge_size")
"""Sides of which a processor makes each side of an image a multiple of the product."""

_WHITE = 255  # the value of white in a photo
_ROUNDING = 1e-5  # of a mean that was found

_SHAPES = ((90, 120), (120, 90), (75, 113), (101, 101), (97, 61), (40, 160), (200, 33))
"""Height and width of small photos for processors that keep proportions: fractions are rounded in every way."""


def load_processor(transformers: Any, folder: Path, origin: str) -> Any:
    """Load the image processor from a folder.

    Raises:
        ConfigError: the folder has none, or it cannot be used.
    """
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        fault = "cannot be used" if (folder / PROCESSOR).exists() else "does not exist"
        raise ConfigError(
            f"{origin}: its {PROCESSOR} {fault}, and only this file says what input the model was trained on "
            f"(AutoImageProcessor's save_pretrained writes it): {one_line(error)}"
        ) from error
    _check_sides(processor, origin)
    return processor


def _check_sides(processor: Any, origin: str) -> None:
    """Check that a processor's images have an ordinary size, before it makes one.

    Raises:
        ConfigError: one is too large, or so much is cropped that the image before is.
    """
    for name, side in _sides(vars(processor)):
        limit = _MAX_SIDE**2 if "pixels" in name else _MAX_SIDE
        if not side <= limit:
            raise ConfigError(f"{origin}: {name} in its {PROCESSOR} is {side:,}, and {limit:,} is the limit")
    units = [getattr(processor, name, 1) for name in _UNITS]
    if math.prod(unit for unit in units if isinstance(unit, int)) > _MAX_SIDE:
        raise ConfigError(f"{origin}: {' times '.join(_UNITS)} in its {PROCESSOR} is above {_MAX_SIDE:,}")
    for owner in (vars(processor), getattr(processor, "data_config", {})):
        share = owner.get("crop_pct") or 1.0
        if not (isinstance(share, int | float) and share >= _MIN_SHARE):
            raise ConfigError(f"{origin}: crop_pct in its {PROCESSOR} is {share!r:.99}, and {_MIN_SHARE} is the least")


def _sides(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield the names and values of the sides in the settings of a processor, in whatever way they are nested."""
    if hasattr(value, "__dataclass_fields__"):  # transformers' SizeDict
        value = vars(value)
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _sides(inner, str(key) if _SIDE.search(str(key)) else name)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _sides(inner, name)
    elif name and isinstance(value, int | float):
        yield name, value


def preprocess_for(processor: Any, channels: int, origin: str) -> Preprocess:
    """Find the `Preprocess` that gives the same result as a processor, for a network with this number of channels.

    Processors run on photos in colour alone. For other channels, resize and crop are those of a copy of the processor
    for photos in colour; the numbers of the normalisation are read.

    Raises:
        ConfigError: no `Preprocess` does, or the processor has no mean and deviation for each channel.
    """
    if channels == RGB:
        return preprocess_of(processor, origin)
    if not 0 < channels <= MAX_CHANNELS:
        raise ConfigError(
            f"{origin}: num_channels in its config.json is {channels:,}: 1 to {MAX_CHANNELS} are accepted"
        )
    normalises = getattr(processor, "do_normalize", True)
    mean = _per_channel(processor, "image_mean", channels, origin) if normalises else (0.0,) * channels
    std = _per_channel(processor, "image_std", channels, origin) if normalises else (1.0,) * channels
    in_colour = copy.deepcopy(processor)
    in_colour.image_mean, in_colour.image_std, in_colour.do_normalize = [0.5] * RGB, [0.5] * RGB, True
    in_colour.do_rescale, in_colour.rescale_factor = True, 1 / _WHITE
    found = preprocess_of(in_colour, origin)
    if not np.allclose((found.mean, found.std), 0.5, rtol=0, atol=_ROUNDING):
        raise ConfigError(f"{origin}: its {type(processor).__name__} does more than rescale, subtract and divide")
    rescales = getattr(processor, "do_rescale", True)
    (factor,) = _numbers([processor.rescale_factor], "rescale_factor", origin, positive=True) if rescales else (1.0,)
    value_range = None if math.isclose(factor, 1 / _WHITE) else (0.0, 1 / factor)
    return replace(found, mean=mean, std=std, value_range=value_range)


def _per_channel(processor: Any, name: str, channels: int, origin: str) -> tuple[float, ...]:
    """Return the numbers of a setting of a processor, one for each channel."""
    stated = getattr(processor, name, None)
    numbers = [stated] * channels if isinstance(stated, int | float) else list(stated or ())
    if len(numbers) != channels:
        raise ConfigError(
            f"{origin}: its config.json has num_channels={channels}, and {name} in its {PROCESSOR} has "
            f"{len(numbers)} number{'s' * (len(numbers) != 1)}: set one for each channel"
        )
    return _numbers(numbers, name, origin, positive=name == "image_std")


def _numbers(stated: Sequence[Any], name: str, origin: str, *, positive: bool) -> tuple[float, ...]:
    """Return numbers of a file of unknown origin, which may be anything."""
    try:
        numbers = tuple(map(float, stated))
    except (TypeError, ValueError, OverflowError):
        numbers = (math.nan,)
    if not all(math.isfinite(number) and (number > 0 or not positive) for number in numbers):
        least = " above 0" if positive else ""
        raise ConfigError(f"{origin}: {name} in its {PROCESSOR} must be finite numbers{least}")
    return numbers


def preprocess_of(processor: Any, origin: str) -> Preprocess:
    """Find the `Preprocess` that gives the same result as a processor of transformers.

    The result for black and white photos gives mean and standard deviation. Then all plausible combinations of resize,
    crop and interpolation are tried on test photos. If the processor swaps red and blue, see `swaps_channels`, the
    model has to swap them back.

    Raises:
        ConfigError: no `Preprocess` does.
    """
    try:
        low, high = (_process(processor, np.full((64, 96, 3), value, np.uint8)) for value in (0, 255))
        black, span = low.amax((1, 2)), (high - low).amax((1, 2))
        if bool((span > 0).all()):
            mean, std = _triple(-black / span), _triple(1 / span)
            swapped = swaps_channels(processor)
            if swapped:
                mean, std = mean[::-1], std[::-1]
            candidates, photos = _candidates(processor, low, mean, std)
            plain = [(_process(processor, photo) - black[:, None, None]) / span[:, None, None] for photo in photos]
            plain = [result.flip(0) for result in plain] if swapped else plain
            if preprocess := _closest(candidates, list(zip(photos, plain, strict=True))):
                return preprocess
    except Exception as error:
        raise ConfigError(f"{origin}: its processor cannot preprocess photos: {one_line(error)}") from error
    raise ConfigError(
        f"{origin}: its {type(processor).__name__} does more than resize, crop to the middle and normalise, or its "
        "results vary in size: load the model in a factory of your own, which says what input it needs"
    )


def swaps_channels(processor: Any) -> bool:
    """Return whether a processor of transformers returns blue, green and red instead of red, green and blue."""
    grey, red = np.full((64, 96, 3), 64, np.uint8), np.full((64, 96, 3), 64, np.uint8)
    red[..., 0] = 192
    changed = (_process(processor, red) - _process(processor, grey)).abs().amax((1, 2))
    return bool(changed[2] > changed[0])


def _process(processor: Any, photo: Photo) -> Tensor:
    """Return a processor's result for a photo, float32 [3,h,w]."""
    return cast("Tensor", processor(images=Image.fromarray(photo), return_tensors="pt")["pixel_values"])[0].float()


def _test_photos(height: int, width: int) -> list[Photo]:
    """Return a tall photo, and wide ones of enough widths for every way to round a crop."""
    high, wide = height * 5 // 4, width * 7 // 4
    return [_pattern(height * 9 // 5, width * 4 // 3), *(_pattern(high, wide + extra) for extra in range(6))]


def _pattern(height: int, width: int) -> Photo:
    """Return waves, different in each colour, which differ from any shifted, mirrored or cropped version of them."""
    rows, columns = (index / max(height, width) for index in np.mgrid[:height, :width])
    waves = [9 * rows + 5 * columns**2, 8 * columns - 5 * rows**2, 12 * rows * columns + 3 * rows]
    return np.asarray(127.5 + 127 * np.sin(2 * np.pi * np.stack(waves, -1)), np.uint8)


def _candidates(processor: Any, low: Tensor, mean: Triple, std: Triple) -> tuple[list[Preprocess], list[Photo]]:
    """Return the preprocessings that a processor's attributes may mean, and photos to try them on.

    Args:
        processor: the processor.
        low: its result for a black photo [3,h,w].
        mean: mean of its normalisation, red first.
        std: standard deviation of its normalisation, red first.
    """
    stated, size = getattr(processor, "size", None) or {}, (low.shape[1], low.shape[2])
    if stated.get("shortest_edge") and stated.get("longest_edge"):
        side = stated["shortest_edge"]
        photos = [_pattern(*shape) for shape in (*_SHAPES, (side * 5 // 4, side * 7 // 4))]
        resizes: list[Any] = _keeping_aspect(processor, stated["shortest_edge"], stated["longest_edge"], photos)
    else:
        photos = _test_photos(*size)
        side = stated.get("shortest_edge") or min(size)
        share = getattr(processor, "crop_pct", None) or getattr(processor, "data_config", {}).get("crop_pct") or 1.0
        exact = (stated.get("height") or size[0], stated.get("width") or size[1])
        resizes = [size, exact, side, int(side / share), (int(size[0] / share), int(size[1] / share))]
    combinations = product(dict.fromkeys(resizes), get_args(Interpolation), (True, False))
    return [
        Preprocess(resize.largest if isinstance(resize, KeepAspect) else size, resize, interpolation, mean, std, floors)
        for resize, interpolation, floors in combinations
    ], photos


def _keeping_aspect(processor: Any, shortest: int, longest: int, photos: Sequence[Photo]) -> list[KeepAspect]:
    """Return the resizes that give inputs of the same sizes as a processor that keeps a photo's proportions."""
    sizes = [tuple(_process(processor, photo).shape[1:]) for photo in photos]
    multiple = math.gcd(*(side for size in sizes for side in size))
    possible = [KeepAspect(shortest, longest, *fit) for fit in ((1, "up"), (multiple, "up"), (multiple, "down"))]
    return [
        resize
        for resize in possible
        if all(resize.resized(photo.shape[:2], floors=True) == size for photo, size in zip(photos, sizes, strict=True))
    ]


def _closest(candidates: Sequence[Preprocess], expected: Sequence[tuple[Photo, Tensor]]) -> Preprocess | None:
    """Return the preprocessing closest to the expected results for photos, or None if all differ too much."""
    differences = {}
    for preprocess in candidates:
        largest = 0.0
        for photo, result in expected:
            ready = _preprocess(photo, preprocess.for_photo(photo.shape[:2]))
            same_size = ready.shape == result.shape
            largest = max(largest, float((ready - result).abs().max()) if same_size else math.inf)
            if largest > _MAX_DIFFERENCE:
                break
        else:
            differences[preprocess] = largest
    return min(differences, key=differences.__getitem__) if differences else None


def _preprocess(photo: Photo, preprocess: Preprocess) -> Tensor:
    """Return a photo as the model receives it, before normalisation: 0 to 1 [3,h,w].

    Args:
        photo: uint8 [h,w,3].
        preprocess: the preprocessing, with the sizes for this photo.
    """
    from torchvision.transforms.v2 import InterpolationMode, functional  # noqa: PLC0415 -- it takes seconds to import

    image, resize = torch.from_numpy(photo).permute(2, 0, 1), preprocess.resize
    size = [resize] if isinstance(resize, int) else list(cast("tuple[int, int]", resize))
    antialias = preprocess.interpolation != "linear"
    mode = InterpolationMode(preprocess.interpolation if antialias else "bilinear")
    image = functional.resize(image, size, mode, antialias=antialias).float() / 255
    if preprocess.floors:
        for axis, target in enumerate(preprocess.size, 1):
            length = image.shape[axis]
            image = image.narrow(axis, max(0, length - target) // 2, min(length, target))
    return cast("Tensor", functional.center_crop(image, list(preprocess.size)))


def _triple(values: Tensor) -> Triple:
    red, green, blue = (round(float(value), 7) for value in values.double())  # the precision of float32
    return red, green, blue
