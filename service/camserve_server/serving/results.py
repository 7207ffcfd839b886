"""Results of the use cases: plain values, the same for every protocol."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
from numpy.typing import NDArray

from camserve_server.core.arrays import Map
from camserve_server.engine.values import Reading
from camserve_server.imaging.values import Box, Picture
from camserve_server.jobs import Explanation
from camserve_server.methods.components import Basis
from camserve_server.models.values import ModelInfo, Task
from camserve_server.serving.receipts import Receipt
from camserve_server.targets import carried, class_probabilities, kind_of, objects_of, order_of_areas, whole
from camserve_server.targets.values import DetectionTarget, FixedTarget


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted class or object, and its probability.

    Attributes:
        label: label of the class; empty if the model has no labels. For a target without a class, the kind's own label.
        score: logit of a class, mean logit of a class in a segmentation, or score of an object.
        class_index: index of the class in the model's output.
        probability: 0 to 1; 0 if the model has no probabilities.
        area: share of the input that a class covers in a segmentation.
        box: box of an object, in the photo's pixels.
    """

    label: str
    score: float
    class_index: int = 0
    probability: float = 0.0
    area: float = 0.0
    box: Box | None = None


@dataclass(frozen=True)
class ModelPrediction:
    """All predictions of a model for an image.

    Attributes:
        model: the model.
        values: the outputs of the model, as in `RowResult.logits`.
        seen: the part of the photo that the model saw.
    """

    model: ModelInfo
    values: Map
    seen: Box

    def top(self, count: int) -> list[Prediction]:
        """Return at most `count` predictions, the likeliest first; for a segmentation, the largest first."""
        return _PREDICTIONS[self.model.task](self, count)

    def explained(self, target: FixedTarget, score: float) -> Prediction:
        """Return the prediction that a target explains."""
        kind = kind_of(target)
        index = kind.class_index(target)
        if index is None:
            return Prediction(kind.label(target), score)
        if isinstance(target, DetectionTarget):
            return self.object(index, score if target.against is None else self._score_of(target), target.box)
        return self.of_class(index)

    def against(self, target: FixedTarget, score: float) -> Prediction | None:
        """Return the prediction that a contrast compares the target with; None if the target is no contrast.

        Args:
            target: the target.
            score: its score.
        """
        index = kind_of(target).contrasted(target)
        if isinstance(target, DetectionTarget) and index is not None:
            return self.object(index, self._score_of(target) - score, target.box)
        return None if index is None else self.of_class(index)

    def _score_of(self, target: DetectionTarget) -> float:
        """Return the score of the object that was found for a target."""
        return float(self.values[cast("int", target.rank), 1])

    @cached_property
    def probabilities(self) -> Map:
        """The probability of each class, float32 [classes]; 0 if the model has no probabilities."""
        return class_probabilities(self.model.task, self.values)

    def of_class(self, index: int) -> Prediction:
        """Return the prediction of a class."""
        label = self.model.label(index)
        if self.model.task == "segment":
            share, probability, score = self.values[index].tolist()
            return Prediction(label, score, index, probability, share)
        return Prediction(label, float(self.values[index]), index, float(self.probabilities[index]))

    def object(self, index: int, score: float, box: Box | None) -> Prediction:
        """Return the prediction of an object.

        Args:
            index: index of its class.
            score: its score.
            box: its box in pixels of the model's input.
        """
        return Prediction(self.model.label(index), score, index, score, box=self.in_photo(box) if box else None)

    def in_photo(self, box: Box) -> Box:
        """Convert a box from pixels of the model's input to pixels of the photo."""
        return carried(box, whole(self.model.preprocess.size), self.seen)


def _top_classes(predicted: ModelPrediction, count: int) -> list[Prediction]:
    return [predicted.of_class(index) for index in _largest(predicted.values, count)]


def _largest(values: Map, count: int) -> list[int]:
    """Return the indices of the largest values, the largest first; of equal values the first is first, NaN is last."""
    keys = -values
    if 0 < count < keys.size:  # sort the candidates only: of 1,000 classes in a third of the time
        last = np.partition(keys, count - 1)[count - 1]
        candidates = np.flatnonzero(keys <= last)
        if candidates.size >= count:  # fewer, if a NaN is among the first
            return cast("list[int]", candidates[np.argsort(keys[candidates], kind="stable")][:count].tolist())
    return cast("list[int]", np.argsort(keys, kind="stable")[:count].tolist())


def _largest_areas(predicted: ModelPrediction, count: int) -> list[Prediction]:
    return [predicted.of_class(index) for index in order_of_areas(predicted.values, predicted.model)[:count]]


def _top_objects(predicted: ModelPrediction, count: int) -> list[Prediction]:
    objects = objects_of(predicted.values)[:count].tolist()
    return [predicted.object(int(index), score, Box(*box)) for index, score, *box in objects]


_PREDICTIONS: Mapping[Task, Callable[[ModelPrediction, int], list[Prediction]]] = {
    "classify": _top_classes,
    "multilabel": _top_classes,
    "regress": _top_classes,
    "segment": _largest_areas,
    "detect": _top_objects,
    "embed": lambda _predicted, _count: [],
}


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations of a request's stages, in seconds.

    Attributes:
        decode: time to decode the images.
        queue: time in which its rows waited and none of its batches ran.
        compute: time in which at least one of its batches ran.
        render: time to draw the pictures.
        batch_rows: the number of rows in its largest batch, those of other requests included.
    """

    decode: float
    queue: float
    compute: float
    render: float
    batch_rows: int


@dataclass(frozen=True, slots=True)
class ExplainResult:
    """The explanations of an image.

    Attributes:
        prediction: the model's prediction.
        explanations: the explanations, in the order of the request. An encoder may remove them from the list one by
            one, so that pictures and their encoded copies do not take memory at the same time.
        size: height and width of the photo.
        receipt: the model, the input and the software of the explanations.
        timing: durations of the request's stages.
        class_map: the predicted class of each cell of a segmentation, uint16 [h,w]; None if not requested.
        unchanged: the prediction of the model without interventions; None for a request without any.
    """

    prediction: ModelPrediction
    explanations: list[Explanation]
    size: tuple[int, int]
    receipt: Receipt
    timing: Timing
    class_map: NDArray[np.uint16] | None = None
    unchanged: ModelPrediction | None = None


@dataclass(frozen=True, slots=True)
class InspectResult:
    """Statistics of layers for an image.

    Attributes:
        prediction: the model's prediction.
        target: the target whose score was differentiated.
        score: score of the target.
        readings: one for each layer of the request; None if the layer's output is no tensor of numbers.
        timing: durations of the request's stages.
        unchanged: the prediction of the model without interventions; None for a request without any.
    """

    prediction: ModelPrediction
    target: FixedTarget
    score: float
    readings: Sequence[Reading | None]
    timing: Timing
    unchanged: ModelPrediction | None = None


@dataclass(frozen=True, slots=True)
class Channel:
    """One channel of a layer, or one component, concept or attention head.

    Attributes:
        index: index of the channel.
        activation: mean activation over the grid.
        weight: mean gradient of the score over the grid; 0 for a head.
        map: the activations, float32 [h,w].
        share: of the variance that a component explains; of a concept in the reconstructed features; of a head's
            attention that goes to the patches. 0 for a channel.
        nearest: the likeliest classes of a concept.
    """

    index: int
    activation: float
    weight: float
    map: Map
    share: float = 0.0
    nearest: Sequence[Prediction] = ()


@dataclass(frozen=True, slots=True)
class FeaturesResult:
    """The highest-ranked channels of a layer for an image.

    Attributes:
        prediction: the model's prediction.
        target: the target whose score gives the gradient weights.
        score: score of the target.
        layer: name of the layer.
        shape: number of channels, height and width of the layer's feature maps.
        channels: the channels, the highest-ranked first.
        picture: picture of their maps, or None.
        size: height and width of the photo.
        timing: durations of the request's stages.
        unchanged: the prediction of the model without interventions; None for a request without any.
        basis: the principal components, if requested.
    """

    prediction: ModelPrediction
    target: FixedTarget
    score: float
    layer: str
    shape: tuple[int, int, int]
    channels: Sequence[Channel]
    picture: Picture | None
    size: tuple[int, int]
    timing: Timing
    unchanged: ModelPrediction | None = None
    basis: Basis | None = None
