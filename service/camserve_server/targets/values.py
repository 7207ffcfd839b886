"""Targets: what of a model's output is explained."""

import math
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from camserve_server.core.arrays import Input, Mask
from camserve_server.imaging.values import Box


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


@dataclass(frozen=True, slots=True)
class ProbabilityTarget:
    """The probability of one class.

    Attributes:
        index: of the class.
        apart: whether each class has a probability of its own (sigmoid), rather than one together (softmax).
    """

    index: int
    apart: bool = False


@dataclass(frozen=True, slots=True)
class FinerTarget:
    """The logit of one class minus those of classes that resemble it, weighted by their probabilities.

    Attributes:
        why: the class.
        against: the others; none before they are known: those whose logits are nearest.
        weight: how much the others count, 0 to 1.
    """

    why: int
    against: tuple[int, ...] = ()
    weight: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class SimilarityTarget:
    """The cosine of the angle between the image's embedding and another image's.

    Attributes:
        file: of the other image, until it is decoded.
        image: the other image as the model sees it, until it has been run; None for the row's own.
        reference: its embedding, float32 [E], then.
    """

    file: bytes = field(default=b"", repr=False)
    image: Input | None = field(default=None, repr=False)
    reference: NDArray[np.float32] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class SegmentTarget:
    """The mean logit of a class over a part of the image.

    Attributes:
        index: of the class.
        box: the part, in the photo's pixels until the photo is decoded, and in the input's then; None for where the
            model sees the class.
        mask: the part, bool [h,w] over the model's output, once it is known.
    """

    index: int
    box: Box | None = None
    mask: Mask | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class DetectionTarget:
    """The score of the object of one class that best matches a box.

    Attributes:
        index: of the class.
        box: in the photo's pixels until the photo is decoded, and in the input's then; None for that of the class's
            most certain object.
        found: whether the box is that of an object that was found in the image as it is.
    """

    index: int
    box: Box | None = None
    found: bool = False


FixedTarget: TypeAlias = (
    ClassTarget | ContrastTarget | ProbabilityTarget | FinerTarget | SimilarityTarget | SegmentTarget | DetectionTarget
)
"""A target that does not depend on what the model predicts; or one that did, once that is known."""

Target: TypeAlias = FixedTarget | RankTarget


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a tensor's values are like; all but `zeros` and `non_finite` are of those that are finite, NaN if none is.

    Attributes:
        mean: of the values.
        std: standard deviation, dividing by their number.
        minimum: the least.
        maximum: the greatest.
        zeros: share of all values that are exactly zero, 0 to 1.
        norm: square root of the sum of squares.
        non_finite: how many are NaN or infinite.
    """

    mean: float
    std: float
    minimum: float
    maximum: float
    zeros: float
    norm: float
    non_finite: int


@dataclass(frozen=True, slots=True)
class Reading:
    """What a layer gave for one image in the last of its calls.

    Attributes:
        shape: of its output, the first being the batch of one.
        activation: what its output is like.
        gradient: what the score's gradient is like there.
    """

    shape: tuple[int, ...]
    activation: Statistics
    gradient: Statistics

    @property
    def elements(self) -> int:
        """How many values the output has."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class RowResult:
    """What came of one row.

    Attributes:
        logits: what the model says of the row's input: float32 [classes]; of a segmentation [classes, 3], the share of
            the image that each class covers, its mean probability there and its mean logit; of a detector [n, 6],
            class, score, left, top, right and bottom in the input's pixels of each object, class -1 being none; of a
            model without a head the embedding.
        target: the row's, fixed by what the model says.
        score: what was differentiated: the logit, or whatever else the target is.
        maps: by layer, then by call: float32 [h,w] each; of a method that makes copies what it adds to its mean, of any
            shape. What looks at no layer has one layer's place. For "features", one array: each channel's weight [C].
        zero_gradient: by layer, whether the gradient was zero everywhere.
        features: by layer, float32 [C,h,w], where the row asks for them.
        readings: by layer, for "inspect"; None of one that returned no tensor of numbers.
    """

    logits: NDArray[np.float32]
    target: FixedTarget
    score: float
    maps: tuple[tuple[NDArray[np.float32], ...], ...] = ()
    zero_gradient: tuple[bool, ...] = ()
    features: tuple[NDArray[np.float32], ...] = ()
    readings: tuple[Reading | None, ...] = ()
