"""Results: the plain values that the use cases return, whatever protocol carries them further."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from camserve_server.core.arrays import Map
from camserve_server.engine.values import Reading
from camserve_server.imaging.values import Box, Picture
from camserve_server.jobs import Explanation
from camserve_server.models.values import ModelInfo, Task
from camserve_server.serving.receipts import Receipt
from camserve_server.targets import carried, class_probabilities, kind_of, objects_of, order_of_areas, whole
from camserve_server.targets.values import FixedTarget

SIMILARITY = "similarity"
"""The label where two images are compared."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A class or an object, and how probable the model finds it.

    Attributes:
        label: of the class; empty where the model has none.
        score: the logit; of a class in a segmented image its mean; the score of an object.
        class_index: index in the model's output.
        probability: 0 to 1; 0 where the model has no probabilities.
        area: of a class in a segmented image, the share of the input that it covers.
        box: of an object, in the photo's pixels.
    """

    label: str
    score: float
    class_index: int = 0
    probability: float = 0.0
    area: float = 0.0
    box: Box | None = None


@dataclass(frozen=True)
class ModelPrediction:
    """All that a model predicted for an image.

    Attributes:
        model: that predicted it.
        values: its outputs, as `RowResult.logits`.
        seen: the part of the photo that the model saw.
    """

    model: ModelInfo
    values: Map
    seen: Box

    def top(self, most: int) -> list[Prediction]:
        """Return the model's first predictions, the likeliest (of a segmentation, the largest) first."""
        return _PREDICTIONS[self.model.task](self, most)

    def explained(self, target: FixedTarget, score: float) -> Prediction:
        """Return the prediction that a target explains."""
        kind = kind_of(target)
        index = kind.class_index(target)
        if index is None:
            return Prediction(SIMILARITY, score)
        return self.object(index, score, kind.box(target)) if self.model.task == "detect" else self.of_class(index)

    def against(self, target: FixedTarget) -> Prediction | None:
        """Return the prediction that a contrast is explained against."""
        index = kind_of(target).contrasted(target)
        return None if index is None else self.of_class(index)

    @cached_property
    def probabilities(self) -> Map:
        """The probability of each class, float32 [classes]; 0 where the model has none."""
        return class_probabilities(self.model.task, self.values)

    def of_class(self, index: int) -> Prediction:
        """Return the prediction of a class."""
        label = self.model.label(index)
        if self.model.task == "segment":
            share, probability, score = self.values[index].tolist()
            return Prediction(label, score, index, probability, share)
        return Prediction(label, float(self.values[index]), index, float(self.probabilities[index]))

    def object(self, index: int, score: float, box: Box | None) -> Prediction:
        """Return the prediction of an object; its box is given in the input's pixels."""
        return Prediction(self.model.label(index), score, index, score, box=self.in_photo(box) if box else None)

    def in_photo(self, box: Box) -> Box:
        """Carry a box from the model's input to the photo."""
        return carried(box, whole(self.model.preprocess.size), self.seen)


def _classes(predicted: ModelPrediction, most: int) -> list[Prediction]:
    return [predicted.of_class(index) for index in np.argsort(-predicted.values, kind="stable")[:most].tolist()]


def _areas(predicted: ModelPrediction, most: int) -> list[Prediction]:
    return [predicted.of_class(index) for index in order_of_areas(predicted.values, predicted.model)[:most]]


def _objects(predicted: ModelPrediction, most: int) -> list[Prediction]:
    found = objects_of(predicted.values)[:most].tolist()
    return [predicted.object(int(index), score, Box(*box)) for index, score, *box in found]


_PREDICTIONS: Mapping[Task, Callable[[ModelPrediction, int], list[Prediction]]] = {
    "classify": _classes,
    "multilabel": _classes,
    "regress": _classes,
    "segment": _areas,
    "detect": _objects,
    "embed": lambda _predicted, _most: [],
}


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the time of a request went, in seconds; and the rows of the largest batch that it was part of."""

    decode: float
    queue: float
    compute: float
    render: float
    batch_rows: int


@dataclass(frozen=True, slots=True)
class ExplainResult:
    """The explanations of an image.

    Attributes:
        prediction: what the model predicted.
        explanations: in the order of the request. An encoder may take them from the list one by one, so that pictures
            and their encoded copies do not take memory at the same time.
        size: height and width of the photo.
        receipt: what the explanations were computed with.
        timing: where the time went.
    """

    prediction: ModelPrediction
    explanations: list[Explanation]
    size: tuple[int, int]
    receipt: Receipt
    timing: Timing


@dataclass(frozen=True, slots=True)
class InspectResult:
    """Statistics of layers for an image.

    Attributes:
        prediction: what the model predicted.
        target: whose score was differentiated.
        score: that score.
        readings: one for each layer of the request; None for one whose output is no tensor of numbers.
        timing: where the time went.
    """

    prediction: ModelPrediction
    target: FixedTarget
    score: float
    readings: Sequence[Reading | None]
    timing: Timing


@dataclass(frozen=True, slots=True)
class Channel:
    """One channel of a layer.

    Attributes:
        index: its number.
        activation: its mean over the grid.
        weight: the mean of the score's gradient over the grid.
        map: float32 [h,w].
    """

    index: int
    activation: float
    weight: float
    map: Map


@dataclass(frozen=True, slots=True)
class FeaturesResult:
    """The highest-ranked channels of a layer for an image.

    Attributes:
        prediction: what the model predicted.
        target: whose score the gradient weights are for.
        score: that score.
        shape: of the layer's feature maps: channels, height, width.
        channels: in rank.
        picture: of their maps, or None.
        size: height and width of the photo.
        timing: where the time went.
    """

    prediction: ModelPrediction
    target: FixedTarget
    score: float
    shape: tuple[int, int, int]
    channels: Sequence[Channel]
    picture: Picture | None
    size: tuple[int, int]
    timing: Timing
