"""Values for photos and pictures: boxes, preprocessing, views, rendering options and regions."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from camserve_server.core.arrays import Input, Photo


@dataclass(frozen=True, slots=True)
class Box:
    """Rectangle in a photo's pixels, measured from the upper left corner; it may reach beyond the photo.

    Attributes:
        left: the left edge.
        top: the upper edge.
        right: the right edge.
        bottom: the lower edge.

    Example:
        >>> box = Box(left=75.0, top=0.0, right=376.0, bottom=300.0)
        >>> box.right - box.left
        301.0
    """

    left: float
    top: float
    right: float
    bottom: float


@dataclass(frozen=True, slots=True)
class KeepAspect:
    """Resize of the whole photo that keeps its proportions, so that the input's size depends on the photo.

    The photo is resized as far as neither side exceeds its limit. Nothing is cropped.

    Attributes:
        shortest: largest length of the shorter side, in pixels.
        longest: largest length of the longer side, in pixels.
        multiple: a number of which both sides of the input are multiples.
        fit: how the sides become multiples: "up" and "down" resize to the next multiple, which changes the proportions
            a little; "pad" adds a border around the photo.

    Example:
        >>> from camserve_server.models import KeepAspect, Preprocess
        >>> resize = KeepAspect(shortest=800, longest=1333, multiple=32)
        >>> resize.largest
        (800, 1344)
        >>> preprocess = Preprocess(resize.largest, resize, "bilinear", mean=(0, 0, 0), std=(1, 1, 1))
        >>> preprocess.for_photo((300, 451)).size
        (800, 1216)
    """

    shortest: int
    longest: int
    multiple: int = 1
    fit: Literal["up", "down", "pad"] = "up"

    @property
    def largest(self) -> tuple[int, int]:
        """Height and width of the largest input, that of a wide photo."""
        return self._to_multiple(self.shortest), self._to_multiple(self.longest)

    def resized(self, photo: tuple[int, int], *, floors: bool) -> tuple[int, int]:
        """Return the height and width to which a photo of this height and width is resized.

        Args:
            photo: height and width of the photo.
            floors: True if a fraction of a pixel is cut off, as in transformers; False if it is rounded.

        Example:
            >>> resize = KeepAspect(shortest=800, longest=1333)
            >>> resize.resized((300, 451), floors=False)
            (800, 1203)
            >>> resize.resized((300, 1200), floors=False)  # the longer side reaches its limit first
            (333, 1333)
        """
        shorter, longer = min(photo), max(photo)
        limited = longer / shorter * self.shortest > self.longest
        side = self.longest * shorter / longer if limited else float(self.shortest)
        # In this order of operations, because a fraction that is cut off depends on the last bit.
        other = side * longer / shorter
        sides = max(1, round(side)), max(1, int(other) if floors else round(other))
        if self.fit != "pad":
            sides = self._to_multiple(sides[0]), self._to_multiple(sides[1])
        return sides if photo[0] <= photo[1] else (sides[1], sides[0])

    def padded(self, resized: tuple[int, int]) -> tuple[int, int]:
        """Return the height and width of the input for a resized photo, with its border.

        Args:
            resized: height and width of the resized photo.

        Example:
            >>> resize = KeepAspect(shortest=800, longest=1333, multiple=32, fit="pad")
            >>> resized = resize.resized((300, 451), floors=False)
            >>> resized, resize.padded(resized)  # a border of 13 pixels
            ((800, 1203), (800, 1216))
        """
        return (self._to_multiple(resized[0]), self._to_multiple(resized[1])) if self.fit == "pad" else resized

    def _to_multiple(self, side: int) -> int:
        multiples = side // self.multiple if self.fit == "down" else -(-side // self.multiple)
        return max(1, multiples) * self.multiple


@dataclass(frozen=True, slots=True)
class Preprocess:
    """Preprocessing of a model's input: resize, centre crop, normalise.

    Attributes:
        size: height and width of the input, in pixels; with `KeepAspect` those of the largest input.
        resize: length of the photo's shorter side before the crop; or an exact (height, width); or `KeepAspect`.
        interpolation: "nearest", antialiased "bilinear" or "bicubic", or "linear", which is OpenCV's, not antialiased.
        mean: for each channel of the input, subtracted from values 0 to 1: RGB, if there are three.
        std: for each channel, the divisor after that.
        floors: True if a crop that cannot be centred exactly starts half a pixel early, as in transformers; False if
            half a pixel is rounded to even, as in torchvision.
        prepare: function that makes the input instead, for a model in this process; see `Prepare`.
        fill: grey level, 0 to 255, of the border around a photo that does not fill the input.
        value_range: the values of a photo that become 0 and 1; None for those of their type: 0 to 255, 0 to 65,535, or
            0 to 1.

    Example:
        >>> from camserve_server.models import Preprocess
        >>> half = (0.5, 0.5, 0.5)  # for each channel
        >>> preprocess = Preprocess(size=(224, 224), resize=256, interpolation="bilinear", mean=half, std=half)
        >>> preprocess.channels
        3
    """

    size: tuple[int, int]
    resize: int | tuple[int, int] | KeepAspect
    interpolation: Literal["nearest", "bilinear", "bicubic", "linear"]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    floors: bool = False
    prepare: "Prepare | None" = None
    fill: int = 0
    value_range: tuple[float, float] | None = None

    @property
    def channels(self) -> int:
        """The number of channels of the input."""
        return len(self.mean)

    def for_photo(self, photo: tuple[int, int]) -> "Preprocess":
        """Return the preprocessing of a photo of this height and width: the same, but with the sizes for that photo.

        Args:
            photo: height and width of the photo.

        Example:
            >>> resize = KeepAspect(shortest=64, longest=128)
            >>> preprocess = Preprocess((64, 128), resize, "bilinear", mean=(0, 0, 0), std=(1, 1, 1))
            >>> preprocess.for_photo((300, 451)).size
            (64, 96)
        """
        if not isinstance(self.resize, KeepAspect):
            return self
        resized = self.resize.resized(photo, floors=self.floors)
        return replace(self, size=self.resize.padded(resized), resize=resized)


Prepare: TypeAlias = Callable[[Photo, bytes, tuple[float, float] | None], tuple[Input, Box]]
"""Decoded photo, its file, `Preprocess.value_range` -> the model's input, and the part of the photo that it shows."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Part of a photo, one bit for each pixel, so that it is small next to the photo.

    Attributes:
        bits: the rows of pixels, packed by `numpy.packbits`, uint8 [height, ceil(width / 8)].
        width: width of the photo.
        seen: the part of the photo that the model sees.
    """

    bits: NDArray[np.uint8]
    width: int
    seen: Box


@dataclass(frozen=True, slots=True)
class View:
    """Copy of the normalised input [3,H,W]: mirrored, scaled in contrast, noisy, or a window of an enlarged copy.

    Attributes:
        mirrored: True to mirror left to right.
        gain: factor of the values.
        scale: factor of the sides, bilinearly, before a window of the input's size is cut out.
        top: first row of the window, in pixels of the enlarged image.
        left: first column of the window.
        noise: standard deviation of added noise, in the input's normalised units.
        seed: seed of that noise.

    Example:
        >>> from camserve_server.methods import View
        >>> View(scale=2.0, left=224).enlarged(224, 224)  # the upper right quarter, at twice the size
        (448, 448)
    """

    mirrored: bool = False
    gain: float = 1.0
    scale: float = 1.0
    top: int = 0
    left: int = 0
    noise: float = 0.0
    seed: int = 0

    def enlarged(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width of the enlarged image."""
        return round(height * self.scale), round(width * self.scale)


Profile: TypeAlias = Literal["paper", "grad-cam", "torchcam", "captum"]
"""Convention that turns raw values into the intensities that are coloured."""

Sign: TypeAlias = Literal["positive", "negative", "both", "absolute"]
"""Values of a map that are shown."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """Threshold of shown values.

    Attributes:
        kind: "value" for a raw value; "quantile" for a quantile of the values on the pixels of the model's input;
            "mass" for the smallest of the strongest values that together have a share of the sum of all.
        value: the raw value, the quantile or the share.
    """

    kind: Literal["value", "quantile", "mass"]
    value: float


@dataclass(frozen=True, slots=True)
class RegionOptions:
    """Regions of a map to find.

    Attributes:
        threshold: the least value in a region.
        most: largest number of regions.
        draw: True to draw their outlines on the overlay.
        masks: True to return their masks.
    """

    threshold: Threshold = Threshold("quantile", 0.8)
    most: int = 8
    draw: bool = False
    masks: bool = False


@dataclass(frozen=True, slots=True)
class Rendering:
    """Requested pictures and maps of each explanation, and their style.

    Attributes:
        overlay: encoding of the overlay, or None for no overlay.
        heatmap_image: encoding of the heatmap alone, or None for no such picture.
        heatmap: True to return the raw map.
        colormap: name of the colour map.
        alpha: opacity of the heatmap, 0 to 1.
        max_side: largest length of the pictures' longer side, in pixels; None for the photo's own.
        quality: quality of JPEG and WebP, 1 to 100.
        profile: convention that turns raw values into intensities.
        intensity: True to return those intensities.
        sign: values that are shown.
        scale: raw value with the strongest colour; "own" for that of each map, "shared" for the largest of them.
        threshold: threshold below which nothing is painted; None to paint every value.
        contour_lines: number of contour lines.
        color_bar: True to add a colour bar to the right of each picture.
        fade: True to multiply the opacity by the intensity.
        regions: the regions to find, or None for none.
        bands: channels of the photo that are shown, one as grey or three as RGB; empty for the first three or one.
        window: the values of the photo that are shown black and white; None for the values of the type if they have 8
            bits, and otherwise for the smallest and largest value that is shown.
    """

    overlay: Literal["jpeg", "png", "webp"] | None = None
    heatmap_image: Literal["jpeg", "png", "webp"] | None = None
    heatmap: bool = False
    colormap: str = "jet"
    alpha: float = 0.5
    max_side: int | None = None
    quality: int = 90
    profile: Profile = "paper"
    intensity: bool = False
    sign: Sign = "positive"
    scale: float | Literal["own", "shared"] = "own"
    threshold: Threshold | None = None
    contour_lines: int = 0
    color_bar: bool = False
    fade: bool = False
    regions: RegionOptions | None = None
    bands: tuple[int, ...] = ()
    window: tuple[float, float] | None = None

    @property
    def pictures(self) -> int:
        """Number of requested pictures of each explanation."""
        return (self.overlay is not None) + (self.heatmap_image is not None)

    @property
    def derived(self) -> bool:
        """True if anything is made from the maps: pictures, intensities or regions."""
        return self.pictures > 0 or self.intensity or self.regions is not None


@dataclass(frozen=True, slots=True)
class RunLengths:
    """Mask in the compressed run-length encoding of COCO.

    Attributes:
        height: height of the mask.
        width: width of the mask.
        counts: the lengths of the runs, as text.
    """

    height: int
    width: int
    counts: str


@dataclass(frozen=True, slots=True)
class Region:
    """Connected part of a map whose values reach a threshold. All positions are in the photo's pixels.

    Attributes:
        box: the smallest box around its pixels.
        area: the number of its pixels.
        contour: corners of its outline without holes, x and y of each, int32 [n, 2].
        peak: x and y of its strongest value.
        peak_value: the raw value there: negative in a region of negative values.
        share: share of the sum of the map's shown values, 0 to 1.
        mask: its pixels; None if not requested.
    """

    box: Box
    area: int
    contour: NDArray[np.int32]
    peak: tuple[float, float]
    peak_value: float
    share: float
    mask: RunLengths | None = None


@dataclass(frozen=True, slots=True)
class Picture:
    """Encoded picture.

    Attributes:
        format: "jpeg", "png" or "webp".
        data: bytes of the file.
        width: width in pixels.
        height: height in pixels.
    """

    format: Literal["jpeg", "png", "webp"]
    data: bytes
    width: int
    height: int
