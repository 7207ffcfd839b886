"""Values that the engine takes and returns: passes, rows and their results."""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from camserve_server.core.arrays import Input
from camserve_server.imaging.values import View
from camserve_server.methods.values import Edit, MethodCall
from camserve_server.targets.values import FixedTarget, Target

Partition: TypeAlias = Literal[0, 1]
"""Which of two batches that an engine runs at once: each has half of a CPU's cores, or one of two streams of a GPU."""


@dataclass(frozen=True, slots=True)
class Row:
    """The unit of batching: one copy of an image with one target.

    The model's input is the image, normalised; then its views; then the method's copy of that; then edited.

    Attributes:
        image: what the model sees; rows of one request share the array.
        target: whose score is differentiated.
        calls: the methods that want this row: any number that take the image as it is, or one that makes copies.
        copy: which of the method's copies of the image this is; None for the image as it is.
        views: of the image, the second of the first and so on.
        edit: of the input; rows of one edit share it.
        features: whether the layers' feature maps are wanted, for "cam".
    """

    image: Input
    target: Target
    calls: tuple[MethodCall, ...] = ()
    copy: int | None = None
    views: tuple[View, ...] = ()
    edit: Edit | None = None
    features: bool = False

    @property
    def input(self) -> Hashable:
        """What the model's input is made of: rows that have it in common share one, and a forward pass of it."""
        copy = None if self.copy is None else (*(call.key for call in self.calls), self.copy)
        return id(self.image), self.views, copy, id(self.edit)


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
