"""Pictures of maps: turn a raw map into intensities, colour them, blend them with the photo, and encode the result."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from camserve_server.core.arrays import Map, Pixels
from camserve_server.core.errors import InvalidArgument, did_you_mean
from camserve_server.imaging.opencv import cv2
from camserve_server.imaging.values import Box, Picture, Profile, Rendering

_OPENCV_COLORMAPS = """
autumn bone cividis cool deepgreen hot hsv inferno jet magma ocean parula pink plasma rainbow spring summer turbo
twilight twilight_shifted viridis winter
"""
# Measured on 500 x 375 pixels: an overlay is noise to a compressor, so that searching for repetitions costs time and
# bytes. A heatmap is smooth, and that search reduces it to a third of the bytes.
_PNG_OVERLAY = (
    *(cv2.IMWRITE_PNG_STRATEGY, cv2.IMWRITE_PNG_STRATEGY_HUFFMAN_ONLY),
    *(cv2.IMWRITE_PNG_FILTER, cv2.IMWRITE_PNG_FILTER_SUB),
    *(cv2.IMWRITE_PNG_COMPRESSION, 1),
)
_PNG_HEATMAP = (
    *(cv2.IMWRITE_PNG_STRATEGY, cv2.IMWRITE_PNG_STRATEGY_DEFAULT),
    *(cv2.IMWRITE_PNG_FILTER, cv2.IMWRITE_PNG_FILTER_SUB),
    *(cv2.IMWRITE_PNG_COMPRESSION, 1),
)
_WEBP_SIDE = 16_383
# Bands of this many pixels stay in the processor's cache, and make the memory needed independent of the photo's size.
# As float32 a band is below the 128 KiB from which glibc, by default, maps fresh pages for each allocation: drawing
# 500 x 375 pixels took 1.5 to 1.8 times as long with bands twice as large.
_BAND = 32_000


def _built_in(name: str) -> Pixels:
    levels = np.arange(256, dtype=np.uint8)
    bgr = cv2.applyColorMap(levels, getattr(cv2, f"COLORMAP_{name.upper()}"))
    return cv2.cvtColor(bgr, cv2.COLOR_BGR2RGB).reshape(256, 3).astype(np.uint8)


def _coolwarm() -> Pixels:
    """Return blue over white to red, after Moreland, "Diverging Color Maps for Scientific Visualization" (2009)."""
    half = np.linspace(0, 1, 128)[:, None]
    blue, bluish = np.array((80, 1.08, -1.1)), np.array((88, 0, -1.661))
    reddish, red = np.array((88, 0, 1.061)), np.array((80, 1.08, 0.5))
    length, angle, hue = np.concatenate((blue + half * (bluish - blue), reddish + half * (red - reddish))).T
    lab = length * np.stack((np.cos(angle), np.sin(angle) * np.cos(hue), np.sin(angle) * np.sin(hue)))
    rgb = cv2.cvtColor(lab.T.astype(np.float32)[None], cv2.COLOR_Lab2RGB)[0]
    pixels: Pixels = (rgb * 255).round().astype(np.uint8)
    return pixels


def _gray() -> Pixels:
    return np.repeat(np.arange(256, dtype=np.uint8)[:, None], 3, axis=1)


COLORMAPS = (*_OPENCV_COLORMAPS.split(), "coolwarm", "gray")
"""Names of the colour maps."""


def colormap(name: str) -> Pixels:
    """Return the colour map of this name: RGB, uint8 [256, 3].

    Raises:
        InvalidArgument: the name is unknown.
    """
    if name not in COLORMAPS:
        short = name[:40]
        raise InvalidArgument(
            f'unknown colormap "{short}": expected one of {", ".join(sorted(COLORMAPS))}'
            + did_you_mean(short, COLORMAPS),
            field="rendering.colormap",
        )
    return _pixels_of(name)


@functools.cache  # not when the module is imported: OpenCV's tables for coolwarm take 0.1 s
def _pixels_of(name: str) -> Pixels:
    own = {"coolwarm": _coolwarm, "gray": _gray}
    return own[name]() if name in own else _built_in(name)


def intensity(heatmap: Map, top: float = 1.0) -> Map:
    """Turn a raw map into intensities: negative values become 0 and the maximum 1, as in the Grad-CAM paper.

    Args:
        heatmap: float32 [h, w], signed, of any magnitude.
        top: quantile of the map that becomes 1, together with all values above it. Maps of single pixels have a few
            values far above all others; the SmoothGrad paper (section 3.2) uses 0.99.

    Returns:
        float32 [h, w], 0 to 1; zero everywhere if no value is above zero, or if a value is NaN or infinite.
    """
    maximum = heatmap.max()
    if not (maximum > 0 and np.isfinite(heatmap).all()):
        return np.zeros(heatmap.shape, np.float32)
    if top < 1:
        rank = round(top * (heatmap.size - 1))
        quantile = np.partition(heatmap, rank, axis=None)[rank]
        maximum = quantile if quantile > 0 else maximum
    intensities: Map = (heatmap / maximum).clip(0, 1)
    return intensities


def intensities(heatmap: Map, profile: Profile, size: tuple[int, int], top: float = 1.0) -> Map:
    """Turn a raw map into the intensities of a profile, on the pixels of the model's input.

    Args:
        heatmap: float32 [h, w], signed, of any magnitude.
        profile: convention of the intensities.
        size: height and width of the model's input.
        top: quantile as in `intensity`; used by the profile "paper" only.

    Returns:
        float32 [height, width], 0 to 1; "torchcam" overshoots slightly between cells, because it interpolates
        bicubically.
    """
    if profile == "paper" or not np.isfinite(heatmap).all():
        return _resize(intensity(heatmap, top), size)
    return _PROFILES[profile](heatmap, size)


def _resize(heatmap: Map, size: tuple[int, int]) -> Map:
    return cast("Map", cv2.resize(heatmap, size[::-1], interpolation=cv2.INTER_LINEAR).astype(np.float32, copy=False))


def _scale_to_unit(heatmap: Map, epsilon: float) -> Map:
    """Cut a map at zero and scale it from its minimum and maximum to 0..1; `epsilon` avoids 0/0 for a constant map."""
    cut = heatmap.clip(min=0)
    shifted = cut - cut.min()
    return cast("Map", (shifted / (shifted.max() + np.float32(epsilon))).astype(np.float32, copy=False))


def _grad_cam_intensities(heatmap: Map, size: tuple[int, int]) -> Map:
    # pytorch-grad-cam scales twice: on the layer's grid, and again after it has combined the layers, even a single one.
    return _scale_to_unit(_resize(_scale_to_unit(heatmap, 1e-7), size), 1e-7)


def _torchcam_intensities(heatmap: Map, size: tuple[int, int]) -> Map:
    grey = Image.fromarray(_scale_to_unit(heatmap, 1e-8))
    return np.asarray(grey.resize(size[::-1], Image.Resampling.BICUBIC), np.float32)


def _captum_intensities(heatmap: Map, size: tuple[int, int]) -> Map:
    # Nearest neighbours, and the value up to which 98 % of the map's sum lies becomes 1.
    rows, columns = (np.arange(pixels) * cells // pixels for pixels, cells in zip(size, heatmap.shape, strict=True))
    cut = heatmap[np.ix_(rows, columns)].clip(min=0)
    ordered = np.sort(cut, axis=None)
    sums = ordered.cumsum()
    maximum = ordered[np.searchsorted(sums, sums[-1] * np.float32(0.98))]
    return cast("Map", (cut / maximum).clip(0, 1)) if maximum > 0 else np.zeros(size, np.float32)


_PROFILES: Mapping[Profile, Callable[[Map, tuple[int, int]], Map]] = {
    "grad-cam": _grad_cam_intensities,
    "torchcam": _torchcam_intensities,
    "captum": _captum_intensities,
}


def draw(photo: Pixels, heat: Map, seen: Box, rendering: Rendering) -> tuple[Picture | None, Picture | None]:
    """Draw a map as an overlay on its photo, and alone.

    The intensities are interpolated bilinearly between the centres of the map's cells; a pixel is coloured if its
    centre lies in `seen`. Outside, the overlay is the photo, and the heatmap alone is black.

    Args:
        photo: uint8 [height, width, 3].
        heat: intensities, float32 [h, w], 0 to 1.
        seen: the part of the photo that the map covers, in the photo's pixels; it may reach beyond the photo.
        rendering: the requested pictures and their style.

    Returns:
        The overlay and the heatmap alone, each None if it is not requested. Both have the photo's size, or are reduced
        to a longer side of `rendering.max_side`.

    Raises:
        InvalidArgument: the colour map is unknown, or the picture is too large for its format.
    """
    colours = _colormap_bgr(rendering.colormap)
    if not (rendering.overlay or rendering.heatmap_image):
        return None, None
    overlay = _copy_as_bgr(photo, rendering.max_side)
    alone = np.zeros_like(overlay) if rendering.heatmap_image else None
    box = _scale_box(seen, overlay.shape[1] / photo.shape[1], overlay.shape[0] / photo.shape[0])
    for place, band in _paint_bands(_apply_tone(heat, rendering.profile), box, overlay.shape[:2], colours):
        if alone is not None:
            alone[place] = band
        cv2.addWeighted(overlay[place], 1 - rendering.alpha, band, rendering.alpha, 0, dst=overlay[place])
    return (
        _encode(overlay, rendering.overlay, rendering.quality, _PNG_OVERLAY),
        _encode(alone, rendering.heatmap_image, rendering.quality, _PNG_HEATMAP),
    )


@functools.cache
def _colormap_bgr(name: str) -> Pixels:
    return cv2.cvtColor(colormap(name)[None], cv2.COLOR_RGB2BGR).reshape(256, 1, 3).astype(np.uint8)


def _apply_tone(heat: Map, profile: Profile) -> Map:
    """Square the intensities for the profile "torchcam", which does so before it colours them."""
    return heat.clip(0, 1) ** 2 if profile == "torchcam" else heat


def _copy_as_bgr(photo: Pixels, max_side: int | None) -> Pixels:
    """Copy a photo as BGR, OpenCV's order, with its longer side reduced to at most `max_side` pixels."""
    height, width = photo.shape[:2]
    scale = (max_side or math.inf) / max(height, width)
    if scale < 1:
        size = (max(1, round(width * scale)), max(1, round(height * scale)))
        photo = cv2.resize(photo, size, interpolation=cv2.INTER_AREA).astype(np.uint8, copy=False)
    return cv2.cvtColor(photo, cv2.COLOR_RGB2BGR).astype(np.uint8, copy=False)


def _scale_box(box: Box, across: float, down: float) -> Box:
    return Box(box.left * across, box.top * down, box.right * across, box.bottom * down)


@dataclass(frozen=True, slots=True)
class _Span:
    """Pixels of one axis of a picture that a map covers, and the two cells on either side of each.

    Attributes:
        start: first covered pixel.
        low: per pixel, the cell before its centre.
        high: per pixel, the cell after its centre; the same cell at the map's edges.
        weight: per pixel, the weight of `high`.
    """

    start: int
    low: NDArray[np.intp]
    high: NDArray[np.intp]
    weight: NDArray[np.float32]


@functools.lru_cache(64)  # all explanations of a photo have the same size, and often all photos of a camera
def _span(first: float, last: float, pixels: int, cells: int) -> _Span:
    start, stop = _covered_pixels(first, last, pixels)
    centres = np.arange(start, stop) + 0.5
    at = ((centres - first) / (last - first) * cells - 0.5).clip(0, cells - 1)
    low = at.astype(np.intp)
    return _Span(start, low, np.minimum(low + 1, cells - 1), (at - low).astype(np.float32))


def _covered_pixels(first: float, last: float, pixels: int) -> tuple[int, int]:
    """Return the range of pixels with their centres between two edges, or one pixel if no centre is."""
    start = min(max(0, math.ceil(first - 0.5)), pixels - 1)
    return start, max(start + 1, min(pixels, math.ceil(last - 0.5)))


def _paint_bands(
    heat: Map, box: Box, size: tuple[int, int], colours: Pixels
) -> Iterator[tuple[tuple[slice, slice], Pixels]]:
    """Yield the coloured map in bands: the place of each in the picture, and its BGR."""
    heat = _coarsen(heat, box)
    rows = _span(box.top, box.bottom, size[0], heat.shape[0])
    columns = _span(box.left, box.right, size[1], heat.shape[1])
    widened = np.ascontiguousarray(_interpolate(heat.T, columns).T)
    steps = np.diff(widened, axis=0, append=widened[-1:])  # from a row of cells to the next
    column_slice = slice(columns.start, columns.start + len(columns.low))
    step = max(1, _BAND // len(columns.low))
    for begin in range(0, len(rows.low), step):
        low = rows.low[begin : begin + step]
        band = steps.take(low, 0)
        band *= rows.weight[begin : begin + step, None]
        band += widened.take(low, 0)
        coloured = cv2.applyColorMap(cv2.convertScaleAbs(band, alpha=255), colours)
        row_slice = slice(rows.start + begin, rows.start + begin + len(band))
        yield (row_slice, column_slice), coloured.astype(np.uint8, copy=False)


def _coarsen(heat: Map, box: Box) -> Map:
    """Average a map with more cells than its box has pixels, so that no cell is skipped; the maximum stays 1."""
    width = min(heat.shape[1], max(1, round(box.right - box.left)))
    height = min(heat.shape[0], max(1, round(box.bottom - box.top)))
    if (height, width) == heat.shape:
        return heat
    return intensity(cv2.resize(heat, (width, height), interpolation=cv2.INTER_AREA).astype(np.float32))


def _interpolate(values: Map, span: _Span) -> Map:
    """Interpolate values along the first axis at a span's pixels."""
    low, blend = values.take(span.low, 0), values.take(span.high, 0)  # half the time of an index array
    blend -= low
    blend *= span.weight[:, None]
    blend += low
    return blend


def _encode(
    picture: Pixels | None,
    kind: Literal["jpeg", "png", "webp"] | None,
    quality: int,
    png: Sequence[int],
) -> Picture | None:
    if kind is None or picture is None:
        return None
    height, width = picture.shape[:2]
    if kind == "webp" and max(height, width) > _WEBP_SIDE:
        raise InvalidArgument(
            f"a WebP picture has at most {_WEBP_SIDE:,} pixels on a side: set max_side, or request PNG",
            field="rendering.max_side",
        )
    parameters = {
        "jpeg": (cv2.IMWRITE_JPEG_QUALITY, quality),
        "png": png,
        "webp": (cv2.IMWRITE_WEBP_QUALITY, quality),
    }
    _, data = cv2.imencode(f".{kind}", picture, parameters[kind])
    return Picture(kind, data.tobytes(), width, height)
