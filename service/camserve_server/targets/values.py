"""Targets: what of a model's output is explained."""

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
