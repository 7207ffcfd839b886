"""Intensities of maps: the values that a sign shows, the scale that gives one of them the strongest colour, profiles.

A profile is the convention of a library. Its function runs on the shown values: on v, -v, |v|, or both signs of v.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
from PIL import Image

from camserve_server.core.arrays import Map
from camserve_server.imaging.opencv import cv2
from camserve_server.imaging.values import Profile, Rendering, Sign, Threshold

PIXELWISE_TOP = 0.99  # quantile of a map of the input's pixels that has the strongest colour: Smilkov et al. 2017
CAPTUM_MASS = 0.98  # share of the sum of a map's values, from the weakest on, after which Captum cuts
_LARGEST = 1e30  # of a shown value, so that sums of float32 stay finite; no method returns values that large
_MOST = 1e37  # of an intensity, so that differences stay finite with a fixed scale far below the values


@dataclass(frozen=True, slots=True)
class ScaledMap:
    """The shown values of a map, and the intensities that are coloured.

    Attributes:
        values: the shown raw values, float32 [h, w]: negative ones only with the sign "both".
        heat: their intensities, on the same grid: 0 to 1, or -1 to 1 with the sign "both". Those of a map on a layer's
            grid may lie beyond 1 with a fixed scale, because interpolation comes before the cut.
        low: raw value of the intensity 0.
        scale: raw value of the intensity 1; 0 if no value is shown.
    """

    values: Map
    heat: Map
    low: float
    scale: float


def scale_map(heatmap: Map, rendering: Rendering, size: tuple[int, int], scale: float | None = None) -> ScaledMap:
    """Return the shown values of a map and their intensities.

    They are on the map's own grid if the profile is "paper", so that a picture is interpolated once. For the other
    profiles they are on the pixels of the model's input.

    Args:
        heatmap: float32 [h, w], signed, of any magnitude. If a value is NaN or infinite, no value is shown.
        rendering: the profile and the sign.
        size: height and width of the model's input.
        scale: raw value of the intensity 1; None for the map's own.
    """
    shown, profile = shown_values(heatmap, rendering.sign), rendering.profile
    scale = _scale_of(shown, rendering, size) if scale is None else scale
    if profile == "paper":
        return ScaledMap(shown, _divide(shown, scale, 1 if shown.shape == size else _MOST), 0.0, scale)
    values = resize(shown, profile, size)
    if profile == "captum":
        return ScaledMap(values, _divide(values, scale, 1), 0.0, scale)
    least = values if profile == "grad-cam" else shown  # pytorch-grad-cam scales once more after it resized
    return ScaledMap(values, _MIN_MAX[profile](shown, size), float(least.min()), scale)


def own_scale(heatmap: Map, rendering: Rendering, size: tuple[int, int]) -> float:
    """Return the raw value that a profile gives the strongest colour; 0 if no value is shown."""
    return _scale_of(shown_values(heatmap, rendering.sign), rendering, size)


def shown_values(heatmap: Map, sign: Sign) -> Map:
    """Return the values of a map that a sign shows, and 0 for all others; 0 for all if one is NaN or infinite."""
    if not (heatmap.max() <= _LARGEST and heatmap.min() >= -_LARGEST):  # NaN fails this too
        if not np.isfinite(heatmap).all():
            return np.zeros(heatmap.shape, np.float32)
        heatmap = heatmap.clip(-_LARGEST, _LARGEST)
    return _SIGNS[sign](heatmap)


_SIGNS: Mapping[Sign, Callable[[Map], Map]] = {
    "positive": lambda heatmap: np.maximum(heatmap, 0),
    "negative": lambda heatmap: np.maximum(-heatmap, 0),
    "both": lambda heatmap: heatmap,
    "absolute": lambda heatmap: cast("Map", np.abs(heatmap)),
}


def on_input(scaled: ScaledMap, size: tuple[int, int]) -> Map:
    """Return the intensities of a map on the pixels of the model's input, float32 [height, width]."""
    return scaled.heat if scaled.heat.shape == size else _resize_bilinear(scaled.heat, size).clip(-1, 1)


def values_on_input(heatmap: Map, rendering: Rendering, size: tuple[int, int]) -> Map:
    """Return the shown values of a map on the pixels of the model's input, interpolated as in the pictures."""
    return resize(shown_values(heatmap, rendering.sign), rendering.profile, size)


def resize(shown: Map, profile: Profile, size: tuple[int, int]) -> Map:
    """Resize the shown values of a map as a profile does."""
    return shown if shown.shape == size else _RESIZES[profile](shown, size)


def threshold_of(strengths: Map, threshold: Threshold) -> float:
    """Return the least value that reaches a threshold.

    Args:
        strengths: the absolute shown values on the pixels of the model's input.
        threshold: the threshold.
    """
    if threshold.kind == "value":
        return threshold.value
    if threshold.kind == "quantile":
        return float(np.quantile(strengths, threshold.value))
    ordered = np.sort(strengths, axis=None)[::-1]
    sums = ordered.cumsum(dtype=np.float64)
    return float(ordered[np.searchsorted(sums, threshold.value * sums[-1])])


def _divide(shown: Map, scale: float, limit: float) -> Map:
    if not scale > 0:
        return np.zeros(shown.shape, np.float32)
    with np.errstate(over="ignore"):  # of a value far above a fixed scale
        return (shown / np.float32(scale)).clip(-limit, limit)


def _scale_of(shown: Map, rendering: Rendering, size: tuple[int, int]) -> float:
    strengths = np.abs(shown) if rendering.sign == "both" else shown
    return float(_SCALES[rendering.profile](strengths, size))


def _paper_scale(strengths: Map, size: tuple[int, int]) -> np.float32:
    # Maps of single pixels have a few values far above all others; the SmoothGrad paper (section 3.2) cuts those.
    if strengths.shape == size:
        rank = round(PIXELWISE_TOP * (strengths.size - 1))
        if (quantile := np.partition(strengths, rank, axis=None)[rank]) > 0:
            return cast("np.float32", quantile)
    return cast("np.float32", strengths.max())


def _captum_scale(strengths: Map, size: tuple[int, int]) -> np.float32:
    ordered = np.sort(_resize_nearest(strengths, size), axis=None)
    sums = ordered.cumsum()
    return cast("np.float32", ordered[np.searchsorted(sums, sums[-1] * np.float32(CAPTUM_MASS))])


_SCALES: Mapping[Profile, Callable[[Map, tuple[int, int]], np.float32]] = {
    "paper": _paper_scale,
    "captum": _captum_scale,
    "grad-cam": lambda strengths, size: _resize_bilinear(strengths, size).max(),
    "torchcam": lambda strengths, _size: strengths.max(),
}


def _resize_bilinear(values: Map, size: tuple[int, int]) -> Map:
    return cast("Map", cv2.resize(values, size[::-1], interpolation=cv2.INTER_LINEAR).astype(np.float32, copy=False))


def _resize_bicubic(values: Map, size: tuple[int, int]) -> Map:
    return np.asarray(Image.fromarray(values).resize(size[::-1], Image.Resampling.BICUBIC), np.float32)


def _resize_nearest(values: Map, size: tuple[int, int]) -> Map:
    rows, columns = (np.arange(pixels) * cells // pixels for pixels, cells in zip(size, values.shape, strict=True))
    return values[np.ix_(rows, columns)]


_RESIZES: Mapping[Profile, Callable[[Map, tuple[int, int]], Map]] = {
    "paper": _resize_bilinear,
    "grad-cam": _resize_bilinear,
    "torchcam": lambda values, size: _resize_bicubic(values, size).clip(0),
    "captum": _resize_nearest,
}


def _scale_to_unit(values: Map, epsilon: float) -> Map:
    """Scale a map from its minimum and maximum to 0..1; `epsilon` avoids 0/0 for a constant map."""
    shifted = values - values.min()
    return cast("Map", (shifted / (shifted.max() + np.float32(epsilon))).astype(np.float32, copy=False))


def _grad_cam_intensities(shown: Map, size: tuple[int, int]) -> Map:
    # pytorch-grad-cam scales twice: on the layer's grid, and again after it has combined the layers, even a single one.
    return _scale_to_unit(_resize_bilinear(_scale_to_unit(shown, 1e-7), size), 1e-7)


def _torchcam_intensities(shown: Map, size: tuple[int, int]) -> Map:
    return _resize_bicubic(_scale_to_unit(shown, 1e-8), size)


_MIN_MAX: Mapping[Profile, Callable[[Map, tuple[int, int]], Map]] = {
    "grad-cam": _grad_cam_intensities,
    "torchcam": _torchcam_intensities,
}
"""Profiles that scale a map from its minimum to its maximum."""
