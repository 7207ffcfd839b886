"""Values of pictures: boxes, preprocessing, views, and how a map is drawn."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from camserve_server.core.arrays import Input, Pixels


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle in a photo's pixels, edges from its upper left corner; it may reach beyond the photo."""

    left: float
    top: float
    right: float
    bottom: float


@dataclass(frozen=True, slots=True)
class Preprocess:
    """How a model wants its input: resize, centre crop, normalise.

    Attributes:
        size: height and width of the input, in pixels.
        resize: the photo's shorter side before the crop; or an exact (height, width).
        interpolation: "nearest", or antialiased "bilinear" or "bicubic".
        mean: subtracted per channel from RGB values 0 to 1.
        std: divides each channel after that.
        floors: whether a crop that cannot be quite in the middle always begins half a pixel early, as transformers has
            it; else half a pixel is rounded to even, as torchvision has it.
        prepare: makes the input in place of all that, for a model of this process; see `Prepare`.
    """

    size: tuple[int, int]
    resize: int | tuple[int, int]
    interpolation: Literal["nearest", "bilinear", "bicubic"]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    floors: bool = False
    prepare: "Prepare | None" = None


Prepare: TypeAlias = Callable[[Pixels, bytes], tuple[Input, Box]]
"""Makes a model's input of a decoded photo and its file; returns the part of the photo that it shows, too."""


@dataclass(frozen=True, slots=True)
class View:
    """A copy of the normalised input [3,H,W]: mirrored, its contrast changed, a window of an enlarged one.

    Attributes:
        mirrored: left to right.
        gain: that the values are multiplied by.
        scale: that the sides are enlarged by, bilinearly, before a window of the input's size is cut out.
        top: first row of the window, in pixels of the enlarged image.
        left: its first column.
        noise: standard deviation of what is added, in the input's normalised units.
        seed: of that noise.
    """

    mirrored: bool = False
    gain: float = 1.0
    scale: float = 1.0
    top: int = 0
    left: int = 0
    noise: float = 0.0
    seed: int = 0

    def enlarged(self, height: int, width: int) -> tuple[int, int]:
        """Return the size of an image, enlarged."""
        return round(height * self.scale), round(width * self.scale)


Profile: TypeAlias = Literal["paper", "grad-cam", "torchcam", "captum"]
"""By whose convention raw numbers become the intensities that are coloured."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """Which pictures and numbers to make, and how they look.

    Attributes:
        overlay: encoding of the overlay, or None for no overlay.
        heatmap_image: encoding of the heatmap alone, or None.
        heatmap: whether the raw map goes out.
        colormap: name of the colour map.
        alpha: opacity of the heatmap, 0 to 1.
        max_side: longer side of the pictures at most, in pixels; None for the photo's own.
        quality: of JPEG and WebP, 1 to 100.
        profile: by whose convention raw numbers become intensities.
        intensity: whether those intensities go out.
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

    @property
    def pictures(self) -> int:
        """How many pictures of each explanation are asked for."""
        return (self.overlay is not None) + (self.heatmap_image is not None)

    @property
    def whole(self) -> bool:
        """Whether the intensities are wanted on the pixels of the model's input."""
        return self.intensity or self.profile != "paper"


@dataclass(frozen=True, slots=True)
class Picture:
    """An encoded picture.

    Attributes:
        format: "jpeg", "png" or "webp".
        data: the file.
        width: in pixels.
        height: in pixels.
    """

    format: Literal["jpeg", "png", "webp"]
    data: bytes
    width: int
    height: int
