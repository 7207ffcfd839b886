"""Values that the engine receives and returns: rows and their results."""

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
"""Number of one of the two batches that an engine runs at a time.

Each uses half of a CPU's cores, or one of two streams of a GPU.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """The unit of batching: one copy of an image with one target.

    The model's input is the normalised image, with the views, then the method's copy, then the edit.

    Attributes:
        image: the model's input before normalisation; rows of one request share the array.
        target: the target whose score is differentiated.
        calls: the methods of this row: any number that use the unchanged image, or one that makes copies.
        copy: index of the method's copy of the image; None for the unchanged image.
        views: views of the image, applied one after the other.
        edit: edit of the input; rows with the same edit share the object.
        features: True to return the layers' feature maps, in a "cam" pass.
        targets: the number of targets that its request explains; their rows may be in different batches.
        class_map: True to return the predicted class of each cell of a segmentation, in a "score" pass.
        texts: embeddings of the texts that are the classes of its request, of length 1, float32 [n,E]; None if the
            classes are the model's own. Rows of one request share the array.
        vector: input of the last linear layer, float32 [E], in a "classifier" pass.
    """

    image: Input
    target: Target
    calls: tuple[MethodCall, ...] = ()
    copy: int | None = None
    views: tuple[View, ...] = ()
    edit: Edit | None = None
    features: bool = False
    targets: int = 1
    class_map: bool = False
    texts: NDArray[np.float32] | None = None
    vector: NDArray[np.float32] | None = None

    @property
    def input(self) -> Hashable:
        """Key of the model's input: rows with the same key share the input and its forward pass."""
        copy = None if self.copy is None else (*(call.key for call in self.calls), self.copy)
        return id(self.image), self.views, copy, id(self.edit)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of a tensor.

    All but `zeros` and `non_finite` are statistics of the finite values, and NaN if no value is finite.

    Attributes:
        mean: mean.
        std: standard deviation, divided by the number of values (not one less).
        minimum: minimum.
        maximum: maximum.
        zeros: share of all values that are exactly zero, 0 to 1.
        norm: square root of the sum of squares.
        non_finite: number of values that are NaN or infinite.
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
    """Statistics of a layer for one image, in the last call of the layer.

    Attributes:
        shape: shape of its output, with a batch axis of one.
        activation: statistics of its output.
        gradient: statistics of the score's gradient there.
    """

    shape: tuple[int, ...]
    activation: Statistics
    gradient: Statistics

    @property
    def elements(self) -> int:
        """The number of values of the output."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class RowResult:
    """Result of one row.

    Attributes:
        logits: the model's outputs for the row's input, float32. Of a classifier [classes]. Of a segmentation
            [classes, 3]: for each class the share of the image that it covers, its mean probability there, and its mean
            logit. Of a detector [n, 6]: for each object the class, score, left, top, right and bottom in the input's
            pixels; class -1 marks no object. Of a model without a head the embedding; with texts, the score of each.
            For "text", the embedding of the row's text. For "classifier", the outputs of the last linear layer.
        target: the row's target, fixed by the model's outputs.
        score: score of the target: the value that was differentiated, for example a logit.
        maps: maps by layer, then by method: float32 [h,w] each. For a method that makes copies, the terms of its mean,
            of any shape. A pass without layers has one entry. For "features", one array: each channel's weight [C].
        zero_gradient: by layer, True if the gradient was zero everywhere.
        features: feature maps by layer, float32 [C,h,w], if the row asks for them. For "heads", one array: the heads
            [heads,h,w].
        readings: statistics by layer, for "inspect"; None for a layer that returned no tensor of numbers.
        class_map: the predicted class of each cell of a segmentation, uint16 [h,w], if the row asks for it.
        layer: for "heads", the name of the module that computed the attention.
    """

    logits: NDArray[np.float32]
    target: FixedTarget
    score: float
    maps: tuple[tuple[NDArray[np.float32], ...], ...] = ()
    zero_gradient: tuple[bool, ...] = ()
    features: tuple[NDArray[np.float32], ...] = ()
    readings: tuple[Reading | None, ...] = ()
    class_map: NDArray[np.uint16] | None = None
    layer: str = ""
