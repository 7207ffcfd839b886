"""Pictures of maps: a raw map to intensities, to colours, onto the photo, and into a file."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
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
# Measured on 500 x 375: an overlay is noise to a compressor, so that looking for repetitions costs time and bytes; a
# heatmap is smooth, and a third of the bytes with it.
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
# Bands of this many pixels stay in the processor's cache, and keep the memory needed apart from the size of the photo.
# As float32 they are below the 128 KiB from which glibc, left as it is, takes fresh pages for each: a drawing of 500 x
# 375 took 1.5 to 1.8 times as long with bands of twice as many.
_BAND = 32_000


def _built_in(name: str) -> Pixels:
    levels = np.arange(256, dtype=np.uint8)
    bgr = cv2.applyColorMap(levels, getattr(cv2, f"COLORMAP_{name.upper()}"))
    return cv2.cvtColor(bgr, cv2.COLOR_BGR2RGB).reshape(256, 3).astype(np.uint8)


def _coolwarm() -> Pixels:
    """Blue over white to red, after Moreland, "Diverging Color Maps for Scientific Visualization" (2009)."""
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


COLORMAPS: Mapping[str, Pixels] = MappingProxyType(
    {name: _built_in(name) for name in _OPENCV_COLORMAPS.split()} | {"coolwarm": _coolwarm(), "gray": _gray()}
)
"""RGB of the intensities 0 to 255, uint8 [256, 3], by name."""


def colormap(name: str) -> Pixels:
    """Look up a colour map: RGB, uint8 [256, 3].

    Raises:
        InvalidArgument: there is none of this name.
    """
    if name not in COLORMAPS:
        short = name[:40]
        raise InvalidArgument(
            f'unknown colormap "{short}": there are {", ".join(sorted(COLORMAPS))}' + did_you_mean(short, COLORMAPS),
            field="rendering.colormap",
        )
    return COLORMAPS[name]


def intensity(heatmap: Map, top: float = 1.0) -> Map:
    """Turn a raw map into intensities: negative values to 0, the greatest to 1, as the Grad-CAM paper draws it.

    Args:
        heatmap: float32 [h, w], signed, of any magnitude.
        top: quantile of the map that becomes 1, what is above it too. Maps of single pixels have a few values far above
            all others; the SmoothGrad paper (section 3.2) cuts them at 0.99.

    Returns:
        float32 [h, w], 0 to 1; zero everywhere if nothing is above zero, or if a value is NaN or infinite.
    """
    greatest = heatmap.max()
    if not (greatest > 0 and np.isfinite(heatmap).all()):
        return np.zeros(heatmap.shape, np.float32)
    if top < 1:
        place = round(top * (heatmap.size - 1))
        value = np.partition(heatmap, place, axis=None)[place]
        greatest = value if value > 0 else greatest
    intensities: Map = (heatmap / greatest).clip(0, 1)
    return intensities


def intensities(heatmap: Map, profile: Profile, size: tuple[int, int], top: float = 1.0) -> Map:
    """Turn a raw map into the intensities that a convention colours, on the pixels of the model's input.

    Args:
        heatmap: float32 [h, w], signed, of any magnitude.
        profile: whose convention.
        size: height and width of the model's input.
        top: as in `intensity`; for the papers' convention.

    Returns:
        float32 [height, width], 0 to 1; "torchcam" overshoots a little between cells, for it interpolates bicubically.
    """
    if profile == "paper" or not np.isfinite(heatmap).all():
        return _resized(intensity(heatmap, top), size)
    return _PROFILES[profile](heatmap, size)


def _resized(heatmap: Map, size: tuple[int, int]) -> Map:
    return cast("Map", cv2.resize(heatmap, size[::-1], interpolation=cv2.INTER_LINEAR).astype(np.float32, copy=False))


def _stretched(heatmap: Map, added: float) -> Map:
    """Cut a map at zero and stretch it from its minimum to its maximum; what is added keeps a flat one from 0/0."""
    cut = heatmap.clip(min=0)
    raised = cut - cut.min()
    return cast("Map", (raised / (raised.max() + np.float32(added))).astype(np.float32, copy=False))


def _as_grad_cam(heatmap: Map, size: tuple[int, int]) -> Map:
    # Twice: once on the layer's grid, and once more when the layers, be it one, have been put together.
    return _stretched(_resized(_stretched(heatmap, 1e-7), size), 1e-7)


def _as_torchcam(heatmap: Map, size: tuple[int, int]) -> Map:
    grey = Image.fromarray(_stretched(heatmap, 1e-8))
    return np.asarray(grey.resize(size[::-1], Image.Resampling.BICUBIC), np.float32)


def _as_captum(heatmap: Map, size: tuple[int, int]) -> Map:
    rows, columns = (np.arange(pixels) * cells // pixels for pixels, cells in zip(size, heatmap.shape, strict=True))
    cut = heatmap[np.ix_(rows, columns)].clip(min=0)
    ordered = np.sort(cut, axis=None)
    sums = ordered.cumsum()
    greatest = ordered[np.searchsorted(sums, sums[-1] * np.float32(0.98))]
    return cast("Map", (cut / greatest).clip(0, 1)) if greatest > 0 else np.zeros(size, np.float32)


_PROFILES: Mapping[Profile, Callable[[Map, tuple[int, int]], Map]] = {
    "grad-cam": _as_grad_cam,
    "torchcam": _as_torchcam,
    "captum": _as_captum,
}


def draw(photo: Pixels, heat: Map, seen: Box, rendering: Rendering) -> tuple[Picture | None, Picture | None]:
    """Draw a map on the photo that it explains, and alone.

    The intensities are interpolated bilinearly between the centres of the map's cells; a pixel is coloured if its
    centre lies in `seen`. Outside, the overlay is the photo, and the heatmap alone is black.

    Args:
        photo: uint8 [height, width, 3].
        heat: intensities, float32 [h, w], 0 to 1.
        seen: what the map covers, in the photo's pixels; it may reach beyond the photo.
        rendering: which pictures, and how.

    Returns:
        The overlay and the heatmap alone, each None if it is not asked for. Both have the photo's size, or are smaller
        so that their longer side is `rendering.max_side`.

    Raises:
        InvalidArgument: the colour map is unknown, or the picture is too large for its format.
    """
    colours = _in_bgr(rendering.colormap)
    if not (rendering.overlay or rendering.heatmap_image):
        return None, None
    overlay = _shrunk(photo, rendering.max_side)
    alone = np.zeros_like(overlay) if rendering.heatmap_image else None
    box = _scaled(seen, overlay.shape[1] / photo.shape[1], overlay.shape[0] / photo.shape[0])
    for place, painted in _painted(_toned(heat, rendering.profile), box, overlay.shape[:2], colours):
        if alone is not None:
            alone[place] = painted
        cv2.addWeighted(overlay[place], 1 - rendering.alpha, painted, rendering.alpha, 0, dst=overlay[place])
    return (
        _encode(overlay, rendering.overlay, rendering.quality, _PNG_OVERLAY),
        _encode(alone, rendering.heatmap_image, rendering.quality, _PNG_HEATMAP),
    )


@functools.cache
def _in_bgr(name: str) -> Pixels:
    return cv2.cvtColor(colormap(name)[None], cv2.COLOR_RGB2BGR).reshape(256, 1, 3).astype(np.uint8)


def _toned(heat: Map, profile: Profile) -> Map:
    """Square the intensities where torchcam's convention is drawn: it does so before it colours them."""
    return heat.clip(0, 1) ** 2 if profile == "torchcam" else heat


def _shrunk(photo: Pixels, max_side: int | None) -> Pixels:
    """Copy a photo as BGR, OpenCV's order, its longer side at most `max_side`."""
    height, width = photo.shape[:2]
    scale = (max_side or math.inf) / max(height, width)
    if scale < 1:
        size = (max(1, round(width * scale)), max(1, round(height * scale)))
        photo = cv2.resize(photo, size, interpolation=cv2.INTER_AREA).astype(np.uint8, copy=False)
    return cv2.cvtColor(photo, cv2.COLOR_RGB2BGR).astype(np.uint8, copy=False)


def _scaled(box: Box, across: float, down: float) -> Box:
    return Box(box.left * across, box.top * down, box.right * across, box.bottom * down)


@dataclass(frozen=True, slots=True)
class _Span:
    """The pixels of one axis of a picture that a map covers, and the two cells that each of them lies between.

    Attributes:
        start: the first of these pixels.
        low: per pixel, the cell before its centre.
        high: per pixel, the cell after it; the same at the map's edges.
        weight: per pixel, the share of `high`.
    """

    start: int
    low: NDArray[np.intp]
    high: NDArray[np.intp]
    weight: NDArray[np.float32]


@functools.lru_cache(64)  # photos of one camera have one size, and all explanations of a photo have
def _span(first: float, last: float, pixels: int, cells: int) -> _Span:
    start, stop = _inside(first, last, pixels)
    centres = np.arange(start, stop) + 0.5
    at = ((centres - first) / (last - first) * cells - 0.5).clip(0, cells - 1)
    low = at.astype(np.intp)
    return _Span(start, low, np.minimum(low + 1, cells - 1), (at - low).astype(np.float32))


def _inside(first: float, last: float, pixels: int) -> tuple[int, int]:
    """Find the pixels whose centres lie between two edges; where they fall between two centres, one pixel."""
    start = min(max(0, math.ceil(first - 0.5)), pixels - 1)
    return start, max(start + 1, min(pixels, math.ceil(last - 0.5)))


def _painted(
    heat: Map, box: Box, size: tuple[int, int], colours: Pixels
) -> Iterator[tuple[tuple[slice, slice], Pixels]]:
    """Yield the part of a picture that a map covers, in bands: where each lies, and its BGR."""
    heat = _coarsened(heat, box)
    rows = _span(box.top, box.bottom, size[0], heat.shape[0])
    columns = _span(box.left, box.right, size[1], heat.shape[1])
    wide = np.ascontiguousarray(_blend(heat.T, columns, slice(None)).T)
    across = slice(columns.start, columns.start + len(columns.low))
    step = max(1, _BAND // len(columns.low))
    for begin in range(0, len(rows.low), step):
        band = _blend(wide, rows, slice(begin, begin + step))
        painted = cv2.applyColorMap(cv2.convertScaleAbs(band, alpha=255), colours)
        down = slice(rows.start + begin, rows.start + begin + len(band))
        yield (down, across), painted.astype(np.uint8, copy=False)


def _coarsened(heat: Map, box: Box) -> Map:
    """Average a map that has more cells than its box has pixels, so that none is passed over; the greatest stays 1."""
    width = min(heat.shape[1], max(1, round(box.right - box.left)))
    height = min(heat.shape[0], max(1, round(box.bottom - box.top)))
    if (height, width) == heat.shape:
        return heat
    return intensity(cv2.resize(heat, (width, height), interpolation=cv2.INTER_AREA).astype(np.float32))


def _blend(values: Map, span: _Span, part: slice) -> Map:
    """Interpolate along the first axis at a part of a span's pixels."""
    low, blend = values[span.low[part]], values[span.high[part]]
    blend -= low
    blend *= span.weight[part, None]
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
            f"a WebP picture has at most {_WEBP_SIDE:,} pixels on a side: set max_side, or ask for PNG",
            field="rendering.max_side",
        )
    parameters = {
        "jpeg": (cv2.IMWRITE_JPEG_QUALITY, quality),
        "png": png,
        "webp": (cv2.IMWRITE_WEBP_QUALITY, quality),
    }
    _, data = cv2.imencode(f".{kind}", picture, parameters[kind])
    return Picture(kind, data.tobytes(), width, height)
