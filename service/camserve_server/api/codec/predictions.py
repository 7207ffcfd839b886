"""Conversion of predictions and resolved targets to protobuf."""

from collections.abc import Callable, Mapping
from typing import Any

from camserve.v1 import explain_pb2
from camserve_server.imaging.values import Box
from camserve_server.serving.results import ModelPrediction, Prediction
from camserve_server.targets import kind_of
from camserve_server.targets.values import (
    ContrastTarget,
    DetectionTarget,
    FinerTarget,
    FixedTarget,
    MaskTarget,
    SegmentTarget,
)


def prediction_message(prediction: Prediction) -> explain_pb2.Prediction:
    """Convert a prediction to protobuf."""
    return explain_pb2.Prediction(
        class_index=prediction.class_index,
        label=prediction.label,
        probability=prediction.probability,
        score=prediction.score,
        area=prediction.area,
        box=box_message(prediction.box) if prediction.box else None,
    )


def prediction_messages(prediction: ModelPrediction | None, count: int) -> list[explain_pb2.Prediction]:
    """Return the first predictions of a model as protobuf; none without a prediction."""
    return [] if prediction is None else [prediction_message(each) for each in prediction.top(count)]


def box_message(box: Box) -> explain_pb2.Box:
    """Convert a box to protobuf."""
    return explain_pb2.Box(left=box.left, top=box.top, right=box.right, bottom=box.bottom)


def explained_message(prediction: ModelPrediction, target: FixedTarget, score: float) -> explain_pb2.Prediction:
    """Return the prediction that a target explains, as protobuf."""
    return prediction_message(prediction.explained(target, score))


def contrast_message(prediction: ModelPrediction, target: FixedTarget, score: float) -> explain_pb2.Prediction | None:
    """Return the class that a contrast with a score compares with, as protobuf; None for other targets."""
    against = prediction.against(target, score)
    return prediction_message(against) if against else None


def target_message(prediction: ModelPrediction, target: FixedTarget) -> explain_pb2.Target:
    """Convert a resolved target to protobuf, so that it can be requested again."""
    return _TARGETS[kind_of(target).name](prediction, target)


def _name(index: int) -> explain_pb2.ClassName:
    return explain_pb2.ClassName(class_index=index)


def _contrast(_prediction: ModelPrediction, target: ContrastTarget) -> explain_pb2.Target:
    return explain_pb2.Target(contrast=explain_pb2.Contrast(why=_name(target.why), why_not=_name(target.why_not)))


def _finer(_prediction: ModelPrediction, target: FinerTarget) -> explain_pb2.Target:
    against = [_name(index) for index in target.against]
    return explain_pb2.Target(finer=explain_pb2.Finer(why=_name(target.why), against=against, weight=target.weight))


def _segment(prediction: ModelPrediction, target: SegmentTarget) -> explain_pb2.Target:
    if target.against is not None:
        return explain_pb2.Target(contrast=explain_pb2.Contrast(why=_name(target.index), why_not=_name(target.against)))
    region = box_message(prediction.in_photo(target.box)) if target.box else None
    return explain_pb2.Target(segment=explain_pb2.Segment(class_name=_name(target.index), region=region))


def _mask(_prediction: ModelPrediction, target: MaskTarget) -> explain_pb2.Target:
    # An empty mask is refused, unlike none, which would stand for another part.
    return explain_pb2.Target(segment=explain_pb2.Segment(class_name=_name(target.index), mask=b""))


def _detection(prediction: ModelPrediction, target: DetectionTarget) -> explain_pb2.Target:
    if target.against is not None:
        return explain_pb2.Target(contrast=explain_pb2.Contrast(why=_name(target.index), why_not=_name(target.against)))
    box = box_message(prediction.in_photo(target.box)) if target.box else None
    return explain_pb2.Target(detection=explain_pb2.Detection(class_name=_name(target.index), box=box))


_TARGETS: Mapping[str, Callable[[ModelPrediction, Any], explain_pb2.Target]] = {
    "class": lambda _prediction, target: explain_pb2.Target(class_index=target.index),
    "probability": lambda _prediction, target: explain_pb2.Target(class_index=target.index, softmax=True),
    "contrast": _contrast,
    "finer": _finer,
    # Without the other photo, which may be large, and which the caller has.
    "similarity": lambda _prediction, _target: explain_pb2.Target(similarity=explain_pb2.Similarity()),
    "text": lambda _prediction, target: explain_pb2.Target(text=target.text),
    "segment": _segment,
    "mask": _mask,
    "detection": _detection,
}
