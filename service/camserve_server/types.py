"""The values that pass between the rooms of the server: frozen, picklable, shapes in the docstrings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Pixels: TypeAlias = NDArray[np.uint8]
"""RGB, uint8 [height, width, 3]."""

Map: TypeAlias = NDArray[np.float32]
"""A raw map, float32 [h, w]: signed, not normalised, on the layer's own grid."""

Kind: TypeAlias = Literal["score", "cam", "saliency"]
"""What a pass computes: logits only; a layer's feature maps and gradients; the input's gradient."""

ParameterValue: TypeAlias = float | str


class Verdict(Enum):
    """Whether a map can be read as an explanation."""

    OK = "the map has positive evidence"
    ALL_NEGATIVE = "no value of the map is above zero: nothing here speaks for the target"
    FLAT = "the map has the same value everywhere"
    ZERO_GRADIENT = "the gradient is zero everywhere: the score does not depend on this layer"
    NON_FINITE = "the map holds NaN or infinity"


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle in a photo's pixels, edges from its upper left corner."""

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
        interpolation: "nearest", "bilinear" or "bicubic", always antialiased.
        mean: subtracted per channel from RGB values 0 to 1.
        std: divides each channel after that.
    """

    size: tuple[int, int]
    resize: int | tuple[int, int]
    interpolation: Literal["nearest", "bilinear", "bicubic"]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may ask for; more is refused before it costs anything."""

    pixels: int = 50_000_000
    side: int = 16_384
    rows: int = 1024
    methods: int = 16
    targets: int = 16
    layers: int = 8


@dataclass(frozen=True, slots=True)
class ClassTarget:
    """The logit of one class."""

    index: int


@dataclass(frozen=True, slots=True)
class RankTarget:
    """The logit of the class that the model itself ranks at this place, 0 being the most probable."""

    rank: int


@dataclass(frozen=True, slots=True)
class ContrastTarget:
    """The logit of one class minus that of another: why this and not that."""

    why: int
    why_not: int


Target: TypeAlias = ClassTarget | RankTarget | ContrastTarget


@dataclass(frozen=True, slots=True)
class MethodCall:
    """A method and its parameters, defaults filled in."""

    name: str
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)


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
    """

    overlay: Literal["jpeg", "png", "webp"] | None = None
    heatmap_image: Literal["jpeg", "png", "webp"] | None = None
    heatmap: bool = False
    colormap: str = "jet"
    alpha: float = 0.5
    max_side: int | None = None
    quality: int = 90


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
