"""Pictures of maps: colour intensities, blend them with the photo, and encode the result."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from camserve_server.core.arrays import Map, Pixels
from camserve_server.core.errors import InvalidArgument, did_you_mean
from camserve_server.imaging import marks
from camserve_server.imaging.interpolation import Interpolated, interpolate
from camserve_server.imaging.opencv import cv2
from camserve_server.imaging.scales import ScaledMap
from camserve_server.imaging.values import Box, Picture, Rendering, Sign

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


def check_colormap(name: str) -> None:
    """Check that there is a colour map of this name, without computing it, which may take 0.1 s.

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


def colormap(name: str) -> Pixels:
    """Return the colour map of this name: RGB, uint8 [256, 3].

    Raises:
        InvalidArgument: the name is unknown.
    """
    check_colormap(name)
    return _pixels_of(name)


@functools.cache  # not when the module is imported: OpenCV's tables for coolwarm take 0.1 s
def _pixels_of(name: str) -> Pixels:
    own = {"coolwarm": _coolwarm, "gray": _gray}
    return own[name]() if name in own else _built_in(name)


def draw(
    photo: Pixels,
    scaled: ScaledMap,
    seen: Box,
    rendering: Rendering,
    *,
    threshold: float | None = None,
    outlines: Sequence[NDArray[np.int32]] = (),
) -> tuple[Picture | None, Picture | None]:
    """Draw a map on its photo, and alone. A picture that is not requested is None.

    The intensities are interpolated bilinearly between the centres of the map's cells. Pixels with their centre outside
    of `seen` are not coloured: the overlay shows the photo there, and the heatmap alone is black.

    Args:
        photo: uint8 [height, width, 3].
        scaled: the map and its intensities.
        seen: the part of the photo that the map covers, in its pixels; it may reach beyond the photo.
        rendering: the requested pictures and their style.
        threshold: the least raw strength that is painted; None to paint every value.
        outlines: outlines to draw on the overlay: x and y of each corner, in the photo's pixels.

    Raises:
        InvalidArgument: the colour map is unknown, or the picture is too large for its format.
    """
    palette = _Palette(_colormap_bgr(rendering.colormap), rendering)
    if not rendering.pictures:
        return None, None
    width, overlay = _copy_as_bgr(photo, rendering)
    wide = [overlay, np.zeros_like(overlay)] if rendering.heatmap_image else [overlay]
    pictures = [picture[:, :width] for picture in wide]
    across, down = width / photo.shape[1], overlay.shape[0] / photo.shape[0]
    box = Box(seen.left * across, seen.top * down, seen.right * across, seen.bottom * down)
    _paint(pictures, scaled, box, palette, threshold)
    for outline in outlines:
        marks.draw_outline(pictures[0], outline * (across, down))
    for picture in wide if rendering.color_bar else ():
        marks.draw_bar(picture[:, width:], palette.column(), _labels(scaled, rendering.sign))
    overlay_file = _encode(overlay, rendering.overlay, rendering.quality, _PNG_OVERLAY)
    return overlay_file, _encode(wide[-1], rendering.heatmap_image, rendering.quality, _PNG_HEATMAP)


@functools.cache
def _colormap_bgr(name: str) -> Pixels:
    return cv2.cvtColor(colormap(name)[None], cv2.COLOR_RGB2BGR).reshape(256, 1, 3).astype(np.uint8)


@dataclass(frozen=True, slots=True)
class _Palette:
    """Colours of intensities.

    Attributes:
        colours: the colour map, BGR, uint8 [256, 1, 3].
        rendering: the style of the pictures.
    """

    colours: Pixels
    rendering: Rendering

    def paint(self, heat: Map) -> Pixels:
        """Return the colours of toned intensities, BGR; this may cut the intensities at 1."""
        signed = self.rendering.sign == "both"
        if signed or self.rendering.scale != "own":  # convertScaleAbs would mirror -2 at 0, and make 0 of 1e10
            np.clip(heat, -1, 1, out=heat)
        levels = cv2.convertScaleAbs(heat, alpha=127.5 if signed else 255, beta=127.5 if signed else 0)
        return cv2.applyColorMap(levels, self.colours).astype(np.uint8, copy=False)

    def tone(self, heat: Map) -> Map:
        """Square intensities for the profile "torchcam", which does so before it colours them."""
        return heat.clip(0, 1) ** 2 if self.rendering.profile == "torchcam" else heat

    def untone(self, heat: Map) -> Map:
        """Return intensities before they were toned."""
        return np.sqrt(heat) if self.rendering.profile == "torchcam" else heat

    def column(self) -> Pixels:
        """Return the colours of all intensities, the largest first: BGR, uint8 [256, 1, 3]."""
        least = -1 if self.rendering.sign == "both" else 0
        return self.paint(self.tone(np.linspace(1, least, 256, dtype=np.float32)[:, None]))


def _labels(scaled: ScaledMap, sign: Sign) -> tuple[float, float]:
    """Return the raw values at the top and at the bottom of a colour bar."""
    if sign == "both":
        return scaled.scale, -scaled.scale
    return (-scaled.scale, 0.0 - scaled.low) if sign == "negative" else (scaled.scale, scaled.low)


def _copy_as_bgr(photo: Pixels, rendering: Rendering) -> tuple[int, Pixels]:
    """Copy a photo as BGR, OpenCV's order, with its longer side reduced; return its width, and the copy.

    The copy is wider than that if it needs room for a colour bar.
    """
    height, width = photo.shape[:2]
    scale = (rendering.max_side or math.inf) / max(height, width)
    if scale < 1:
        height, width = max(1, round(height * scale)), max(1, round(width * scale))
        photo = cv2.resize(photo, (width, height), interpolation=cv2.INTER_AREA).astype(np.uint8, copy=False)
    if not rendering.color_bar:
        return width, cv2.cvtColor(photo, cv2.COLOR_RGB2BGR).astype(np.uint8, copy=False)
    picture = np.empty((height, width + marks.bar_width(height, width), 3), np.uint8)
    cv2.cvtColor(photo, cv2.COLOR_RGB2BGR, dst=picture[:, :width])
    return width, picture


def _paint(pictures: Sequence[Pixels], scaled: ScaledMap, box: Box, palette: _Palette, threshold: float | None) -> None:
    """Paint a map on the overlay, which is the photo before, and on the heatmap alone, if there is one."""
    size, rendering = (pictures[0].shape[0], pictures[0].shape[1]), palette.rendering
    canvas = _Canvas(pictures, interpolate(palette.tone(scaled.heat), box, size), palette)
    if threshold is None and not (rendering.fade or rendering.contour_lines):
        canvas.paint()
    else:
        strengths = None if threshold is None else interpolate(scaled.values, box, size)
        canvas.paint_selected(strengths, threshold or 0.0)


@dataclass(frozen=True, slots=True)
class _Canvas:
    """The pictures of a map while they are painted.

    Attributes:
        pictures: the overlay, which is the photo before, and the heatmap alone, which is black, if it is requested.
        grid: the toned intensities at the pixels of the pictures.
        palette: the colours.
    """

    pictures: Sequence[Pixels]
    grid: Interpolated
    palette: _Palette

    def paint(self) -> None:
        """Paint every value."""
        alpha = self.palette.rendering.alpha
        for first, last in self.grid.bands():
            place = self.grid.place(first, last)
            coloured = self.palette.paint(self.grid.values(first, last))
            for alone in self.pictures[1:]:
                alone[place] = coloured
            part = self.pictures[0][place]
            cv2.addWeighted(part, 1 - alpha, coloured, alpha, 0, dst=part)

    def paint_selected(self, strengths: Interpolated | None, threshold: float) -> None:
        """Paint the values that reach a threshold, with fading and contour lines if they are requested.

        Args:
            strengths: the shown raw values at the pixels of the pictures; None to paint every value.
            threshold: the least absolute value that is painted.
        """
        for first, last in self.grid.bands():
            place, heat = self.grid.place(first, last), self.grid.values(first, last)
            coloured = self.palette.paint(heat)
            layers = (self._blend(self.pictures[0][place], coloured, heat), coloured)
            painted = np.ones(heat.shape, np.uint8)
            if strengths is not None:
                values = np.abs(strengths.values(first, last))
                painted = ((values >= threshold) & (values > 0)).astype(np.uint8)
            for picture, layer in zip(self.pictures, layers, strict=False):  # there may be no second picture
                picture[place] = cv2.copyTo(layer, painted, picture[place].copy())
                if self.palette.rendering.contour_lines:
                    marks.draw_lines(picture[place], *self._lines(first, last, painted))

    def _blend(self, photo: Pixels, coloured: Pixels, heat: Map) -> Pixels:
        alpha = self.palette.rendering.alpha
        if not self.palette.rendering.fade:
            return cv2.addWeighted(photo, 1 - alpha, coloured, alpha, 0).astype(np.uint8, copy=False)
        opacity = np.abs(heat).clip(max=1) * np.float32(alpha)
        return cv2.blendLinear(photo, coloured, 1 - opacity, opacity).astype(np.uint8, copy=False)

    def _lines(self, first: int, last: int, painted: Pixels) -> tuple[Map, Map]:
        """Return the coverage of a band by contour lines: their cores and their edges, where the map is painted."""
        rendering, picture = self.palette.rendering, self.pictures[0]
        before, after = max(0, first - 1), min(len(self.grid.rows.low), last + 1)  # a row around it, for the slope
        heat = self.palette.untone(self.grid.values(before, after))
        thickness = marks.thickness(*picture.shape[:2])
        lines = marks.cover_lines(heat, rendering.contour_lines, thickness)
        core, edge = (cover[first - before :][: last - first] * painted for cover in lines)
        return core, edge


def _encode(
    picture: Pixels,
    kind: Literal["jpeg", "png", "webp"] | None,
    quality: int,
    png: Sequence[int],
) -> Picture | None:
    if kind is None:
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
