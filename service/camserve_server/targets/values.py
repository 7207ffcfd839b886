"""Targets: the part of a model's output that is explained."""

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from camserve_server.core.arrays import Input, Mask
from camserve_server.imaging.values import Box, Part


@dataclass(frozen=True, slots=True)
class ClassTarget:
    """Logit of one class."""

    index: int


@dataclass(frozen=True, slots=True)
class RankTarget:
    """Logit of the class at this rank of the model's prediction, 0 being the most probable."""

    rank: int


@dataclass(frozen=True, slots=True)
class ContrastTarget:
    """Logit of one class minus that of another: why this and not that."""

    why: int
    why_not: int


@dataclass(frozen=True, slots=True)
class ProbabilityTarget:
    """Probability of one class.

    Attributes:
        index: the class's index.
        apart: True for the class's own probability (sigmoid), False for its share among all classes (softmax).
    """

    index: int
    apart: bool = False


@dataclass(frozen=True, slots=True)
class FinerTarget:
    """Logit of one class minus those of similar classes, weighted by their probabilities.

    Attributes:
        why: index of the class.
        against: indices of the other classes; empty until resolved to those with the nearest logits.
        weight: factor of the other classes' logits, 0 to 1.
    """

    why: int
    against: tuple[int, ...] = ()
    weight: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class SimilarityTarget:
    """Cosine of the angle between the image's embedding and another image's.

    Attributes:
        file: file of the other image, until it is decoded.
        image: model input of the other image, until its embedding is computed; None for the row's own image.
        reference: embedding of the other image, float32 [E], once it is computed.
    """

    file: bytes = field(default=b"", repr=False)
    image: Input | None = field(default=None, repr=False)
    reference: NDArray[np.float32] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class TextTarget:
    """Score that the model gives the image and a text.

    Attributes:
        text: the text.
        embedding: embedding of the text, of length 1, float32 [E], once it is computed.
    """

    text: str
    embedding: NDArray[np.float32] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class SegmentTarget:
    """Mean logit of a class over a part of the image, or how far it is above that of another class.

    Attributes:
        index: the class's index.
        box: the part, in the photo's pixels until the photo is decoded and in the input's afterwards; None for the part
            where the model predicts the class.
        mask: the part, bool [h,w] on the grid of the model's output, once it is known.
        against: the index of the other class, whose mean logit is subtracted; None for no other class.
    """

    index: int
    box: Box | None = None
    mask: Mask | None = field(default=None, repr=False)
    against: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class MaskTarget:
    """Mean logit of a class over a part of the image that a picture shows.

    Attributes:
        index: the class's index.
        file: PNG file of the part, until it is decoded.
        part: the decoded part, until the grid of the model's output is known.
        mask: the part, bool [h,w] on the grid of the model's output, once it is known.
    """

    index: int
    file: bytes = field(default=b"", repr=False)
    part: Part | None = field(default=None, repr=False)
    mask: Mask | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class DetectionTarget:
    """Score of the object of one class that best matches a box, or how far it is above its score in another class.

    Attributes:
        index: the class's index.
        box: the box, in the photo's pixels until the photo is decoded and in the input's afterwards; None for the box
            of the class's object with the highest score.
        found: True if the box is that of an object that was detected in the unchanged image.
        rank: the object's place among those of the unchanged image, by descending score; None if unknown. It tells
            objects of one class with the same box apart, as a detector without suppression of duplicates returns them.
        against: the index of the other class, the object's score in which is subtracted; None for no other class.
    """

    index: int
    box: Box | None = None
    found: bool = False
    rank: int | None = None
    against: int | None = None


FixedTarget: TypeAlias = (
    ClassTarget
    | ContrastTarget
    | ProbabilityTarget
    | FinerTarget
    | SimilarityTarget
    | TextTarget
    | SegmentTarget
    | MaskTarget
    | DetectionTarget
)
"""Target that does not depend on the prediction, or has been resolved for it."""

Target: TypeAlias = FixedTarget | RankTarget
