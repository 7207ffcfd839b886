"""What a model said of an image, and what was explained of it, as protobuf."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from camserve.v1 import explain_pb2
from camserve_server.targets import carried, class_probabilities, kind_of, objects_of, order_of_areas, whole
from camserve_server.types import (
    Box,
    ContrastTarget,
    DetectionTarget,
    FinerTarget,
    FixedTarget,
    Map,
    ModelInfo,
    SegmentTarget,
    Task,
)

SIMILARITY = "similarity"
"""What stands for a label where two images are compared."""


@dataclass(frozen=True)
class Told:
    """What a model said of an image.

    Attributes:
        model: that said it.
        values: as `jobs.Outcome` has it.
        seen: the part of the photo that the model saw.
    """

    model: ModelInfo
    values: Map
    seen: Box

    def predictions(self, most: int) -> list[explain_pb2.Prediction]:
        """Return what the model predicts, the likeliest (of a segmentation, the largest) first."""
        return _PREDICTIONS[self.model.task](self, most)

    def explained(self, target: FixedTarget, score: float) -> explain_pb2.Prediction:
        """Return the prediction that a target is about."""
        kind = kind_of(target)
        index = kind.class_index(target)
        if index is None:
            return explain_pb2.Prediction(label=SIMILARITY, score=score)
        return self.object(index, score, kind.box(target)) if self.model.task == "detect" else self.of_class(index)

    def against(self, target: FixedTarget) -> explain_pb2.Prediction | None:
        """Return the prediction that a contrast is explained against."""
        index = kind_of(target).contrasted(target)
        return None if index is None else self.of_class(index)

    def resolved(self, target: FixedTarget) -> explain_pb2.Target:
        """Say a target so that it can be asked for again."""
        return _RESOLVED[kind_of(target).name](self, target)

    @cached_property
    def probabilities(self) -> Map:
        """Of each class, float32 [classes]; 0 where there are none."""
        return class_probabilities(self.model.task, self.values)

    def of_class(self, index: int) -> explain_pb2.Prediction:
        """Return what is said of a class."""
        label = self.model.label(index)
        if self.model.task == "segment":
            share, probability, score = self.values[index].tolist()
            return explain_pb2.Prediction(
                class_index=index, label=label, probability=probability, score=score, area=share
            )
        return explain_pb2.Prediction(
            class_index=index, label=label, probability=self.probabilities[index], score=self.values[index]
        )

    def object(self, index: int, score: float, box: Box | None) -> explain_pb2.Prediction:
        """Return an object, its box given in the input's pixels."""
        where = box_message(self.in_photo(box)) if box else None
        return explain_pb2.Prediction(
            class_index=index, label=self.model.label(index), probability=score, score=score, box=where
        )

    def in_photo(self, box: Box) -> Box:
        """Carry a box from the model's input to the photo."""
        return carried(box, whole(self.model.preprocess.size), self.seen)


def box_message(box: Box) -> explain_pb2.Box:
    """Return a box as protobuf."""
    return explain_pb2.Box(left=box.left, top=box.top, right=box.right, bottom=box.bottom)


def _classes(told: Told, most: int) -> list[explain_pb2.Prediction]:
    return [told.of_class(index) for index in np.argsort(-told.values, kind="stable")[:most].tolist()]


def _areas(told: Told, most: int) -> list[explain_pb2.Prediction]:
    return [told.of_class(index) for index in order_of_areas(told.values, told.model)[:most]]


def _objects(told: Told, most: int) -> list[explain_pb2.Prediction]:
    found = objects_of(told.values)[:most].tolist()
    return [told.object(int(index), score, Box(*box)) for index, score, *box in found]


_PREDICTIONS: Mapping[Task, Callable[[Told, int], list[explain_pb2.Prediction]]] = {
    "classify": _classes,
    "multilabel": _classes,
    "regress": _classes,
    "segment": _areas,
    "detect": _objects,
    "embed": lambda _told, _most: [],
}


def _name(index: int) -> explain_pb2.ClassName:
    return explain_pb2.ClassName(class_index=index)


def _contrast(_told: Told, target: ContrastTarget) -> explain_pb2.Target:
    return explain_pb2.Target(contrast=explain_pb2.Contrast(why=_name(target.why), why_not=_name(target.why_not)))


def _finer(_told: Told, target: FinerTarget) -> explain_pb2.Target:
    against = [_name(index) for index in target.against]
    return explain_pb2.Target(finer=explain_pb2.Finer(why=_name(target.why), against=against, weight=target.weight))


def _segment(told: Told, target: SegmentTarget) -> explain_pb2.Target:
    region = box_message(told.in_photo(target.box)) if target.box else None
    return explain_pb2.Target(segment=explain_pb2.Segment(class_name=_name(target.index), region=region))


def _detection(told: Told, target: DetectionTarget) -> explain_pb2.Target:
    box = box_message(told.in_photo(target.box)) if target.box else None
    return explain_pb2.Target(detection=explain_pb2.Detection(class_name=_name(target.index), box=box))


_RESOLVED: Mapping[str, Callable[[Told, Any], explain_pb2.Target]] = {
    "class": lambda _told, target: explain_pb2.Target(class_index=target.index),
    "probability": lambda _told, target: explain_pb2.Target(class_index=target.index, softmax=True),
    "contrast": _contrast,
    "finer": _finer,
    # Not the other photo again: it may be large, and whoever asks has it.
    "similarity": lambda _told, _target: explain_pb2.Target(similarity=explain_pb2.Similarity()),
    "segment": _segment,
    "detection": _detection,
}
