"""Codec of the targets of a request, which must fit the model's task."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from camserve.v1 import explain_pb2
from camserve_server.api.codec.checks import MAX_LISTED, MAX_SIDE, check_range, shorten
from camserve_server.core.errors import FailedPrecondition, InvalidArgument, NotFound, did_you_mean
from camserve_server.core.limits import Limits
from camserve_server.imaging.values import Box
from camserve_server.models.text import fault_of, faults
from camserve_server.models.values import ModelInfo, Task, fold_label
from camserve_server.targets.values import (
    ClassTarget,
    ContrastTarget,
    DetectionTarget,
    FinerTarget,
    MaskTarget,
    ProbabilityTarget,
    RankTarget,
    SegmentTarget,
    SimilarityTarget,
    Target,
    TextTarget,
)

_HINTS: Mapping[Task, str] = {
    "classify": "classes: explain one by its label or index",
    "multilabel": "classes: explain one by its label or index",
    "regress": "numbers: explain one by its label or index",
    "segment": "a class for every pixel: explain one with segment(...) or mask(...)",
    "detect": "boxes: explain an object with detection(...)",
    "embed": "an embedding: explain the similarity of two images with similarity(...)",
}
"""The output of a model and its targets, for errors, by task."""


def read_targets(request: explain_pb2.ExplainRequest, model: ModelInfo, limits: Limits) -> tuple[Target, ...]:
    """Read the targets of a request; without any, they are the first predictions of the model.

    Raises:
        ServiceError: a field is invalid, or does not fit the model's task.
    """
    if request.targets:
        return tuple(read_target(target, model, f"targets[{index}]") for index, target in enumerate(request.targets))
    if model.task == "embed":
        raise unfit(model, "targets")
    top_k = request.top_k if request.HasField("top_k") else 1
    limit = limits.targets if model.task == "detect" else min(limits.targets, model.classes)
    check_range(top_k, 1, limit, "top_k")
    return tuple(RankTarget(rank) for rank in range(top_k))


def with_texts(model: ModelInfo, texts: Sequence[str]) -> ModelInfo:
    """Return a model with the texts of a request as its classes; without any, with the texts of its entry, if any.

    Raises:
        FailedPrecondition: the model takes no texts.
        InvalidArgument: there are too many texts, or one is too long or named twice.
    """
    if not texts:
        return model.with_texts(model.labels)
    if model.text is None:
        raise _without_text_side(model, "texts")
    for fault in faults(texts):
        field = "texts" if fault.index is None else f"texts[{fault.index}]"
        raise InvalidArgument(fault.message, field=field)
    return model.with_texts(tuple(texts))


def _without_text_side(model: ModelInfo, field: str) -> FailedPrecondition:
    return FailedPrecondition(
        f'{model.name} takes no texts: its task is "{model.task}", and only models such as CLIP and SigLIP compare '
        "images with texts",
        field=field,
    )


def read_target(target: explain_pb2.Target, model: ModelInfo, field: str) -> Target:
    """Read one target.

    Raises:
        ServiceError: a field is invalid, or does not fit the model's task; the error names the field.
    """
    kind = target.WhichOneof("kind")
    if kind is None:
        raise InvalidArgument("the target is empty: set class_index, label or another kind", field=field)
    if target.softmax and kind not in ("class_index", "label"):
        raise InvalidArgument("only a class has a probability", field=f"{field}.softmax")
    reader = _KINDS[kind]
    if model.task not in reader.tasks:
        raise unfit(model, f"{field}.{kind}")
    return reader.read(target, model, field)


def unfit(model: ModelInfo, field: str) -> FailedPrecondition:
    """Return the error for a request whose target is missing, or does not fit the output of its model."""
    if model.text is not None and model.task == "embed":
        return FailedPrecondition(
            f'{model.name} compares images with texts: name a target, such as text("a photo of a cat"), or texts=[...] '
            "that are the classes to predict",
            field=field,
        )
    return FailedPrecondition(f"{model.name} returns {_HINTS[model.task]}", field=field)


def _read_class_target(target: explain_pb2.Target, model: ModelInfo, field: str) -> Target:
    index = read_class(target, model, field)
    if not target.softmax:
        return ClassTarget(index)
    if model.task == "regress":
        raise FailedPrecondition(f"{model.name} returns numbers, not probabilities", field=f"{field}.softmax")
    return ProbabilityTarget(index, apart=model.task == "multilabel")


def _read_contrast(target: explain_pb2.Target, model: ModelInfo, field: str) -> Target:
    why = read_class(target.contrast.why, model, f"{field}.contrast.why")
    why_not = read_class(target.contrast.why_not, model, f"{field}.contrast.why_not")
    if why == why_not:
        raise InvalidArgument("a contrast needs two different classes", field=f"{field}.contrast.why_not")
    if model.task == "segment":
        return SegmentTarget(why, against=why_not)
    if model.task != "detect":
        return ContrastTarget(why, why_not)
    if why_not >= model.object_classes:
        raise FailedPrecondition(
            f"{model.name} does not score its objects in class {why_not}: a contrast needs a detector that returns "
            "class_scores",
            field=f"{field}.contrast",
        )
    return DetectionTarget(why, against=why_not)


def _read_finer(target: explain_pb2.Target, model: ModelInfo, field: str) -> Target:
    finer, field = target.finer, f"{field}.finer"
    why = read_class(finer.why, model, f"{field}.why")
    against = tuple(read_class(name, model, f"{field}.against[{index}]") for index, name in enumerate(finer.against))
    if why in against or len(set(against)) < len(against):
        raise InvalidArgument("a class may be named only once", field=f"{field}.against")
    if model.classes == 1:
        raise FailedPrecondition(f"{model.name} has only one class, so there is no similar class", field=field)
    weight = finer.weight if finer.HasField("weight") else 1.0
    check_range(weight, 0.0, 1.0, f"{field}.weight")
    return FinerTarget(why, against, weight)


def _read_similarity(target: explain_pb2.Target, model: ModelInfo, field: str) -> Target:
    if model.task != "embed" and not model.embedding:
        raise FailedPrecondition(
            f"{model.name} does not end in a linear layer, whose input would be the embedding: load a model without a "
            "head, such as timm:NAME?classes=0",
            field=f"{field}.similarity",
        )
    if not target.similarity.image:
        raise InvalidArgument("the other image is empty", field=f"{field}.similarity.image")
    return SimilarityTarget(file=target.similarity.image)


def _read_text(target: explain_pb2.Target, model: ModelInfo, field: str) -> Target:
    if model.text is None:
        raise _without_text_side(model, f"{field}.text")
    if message := fault_of(target.text):
        raise InvalidArgument(message, field=f"{field}.text")
    return TextTarget(target.text)


def _read_segment(target: explain_pb2.Target, model: ModelInfo, field: str) -> Target:
    segment, field = target.segment, f"{field}.segment"
    index = read_class(segment.class_name, model, f"{field}.class_name")
    if segment.HasField("mask"):
        return _read_mask(segment, index, field)
    return SegmentTarget(index, read_box(segment.region, f"{field}.region") if segment.HasField("region") else None)


def _read_mask(segment: explain_pb2.Segment, index: int, field: str) -> Target:
    if segment.HasField("region"):
        raise InvalidArgument("a segment has a region or a mask, not both", field=f"{field}.mask")
    if not segment.mask:
        raise InvalidArgument("the mask is empty: responses leave its file out", field=f"{field}.mask")
    return MaskTarget(index, segment.mask)


def _read_detection(target: explain_pb2.Target, model: ModelInfo, field: str) -> Target:
    detection, field = target.detection, f"{field}.detection"
    index = read_class(detection.class_name, model, f"{field}.class_name")
    return DetectionTarget(index, read_box(detection.box, f"{field}.box") if detection.HasField("box") else None)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Function that reads one kind of target, and the tasks that the kind fits."""

    read: Callable[[explain_pb2.Target, ModelInfo, str], Target]
    tasks: tuple[Task, ...]


_KINDS: Mapping[str, _Reader] = {
    "class_index": _Reader(_read_class_target, ("classify", "multilabel", "regress")),
    "label": _Reader(_read_class_target, ("classify", "multilabel", "regress")),
    "contrast": _Reader(_read_contrast, ("classify", "multilabel", "regress", "segment", "detect")),
    "finer": _Reader(_read_finer, ("classify", "multilabel")),
    "similarity": _Reader(_read_similarity, ("classify", "multilabel", "regress", "embed")),
    "text": _Reader(_read_text, ("classify", "multilabel", "regress", "segment", "detect", "embed")),
    "segment": _Reader(_read_segment, ("segment",)),
    "detection": _Reader(_read_detection, ("detect",)),
}


def read_box(box: explain_pb2.Box, field: str) -> Box:
    """Read a box in the photo's pixels; it may reach beyond the photo.

    Raises:
        InvalidArgument: an edge is out of range, or the box is empty.
    """
    edges = {name: getattr(box, name) for name in ("left", "top", "right", "bottom")}
    for name, value in edges.items():
        check_range(value, -MAX_SIDE, 2 * MAX_SIDE, f"{field}.{name}")
    for first, second in (("left", "right"), ("top", "bottom")):
        if edges[first] >= edges[second]:
            raise InvalidArgument(
                f"{first} is {edges[first]:g}, and {second} is {edges[second]:g}: the box is empty", field=field
            )
    return Box(**edges)


def read_class(name: explain_pb2.Target | explain_pb2.ClassName, model: ModelInfo, field: str) -> int:
    """Find a class by its index or label.

    Raises:
        NotFound: the model has no such class.
        InvalidArgument: neither index nor label is set, or several classes have that label.
    """
    kind = name.WhichOneof("kind")
    if kind is None:
        raise InvalidArgument("set class_index or label", field=field)
    if kind == "label":
        return _find_label(name.label, model, f"{field}.label")
    if name.class_index >= model.classes:
        raise NotFound(
            f"there is no class {name.class_index}: {model.name} has {model.classes}, from 0",
            field=f"{field}.class_index",
        )
    return name.class_index


def _find_label(label: str, model: ModelInfo, field: str) -> int:
    if not model.labels:
        raise NotFound(f"{model.name} has no labels: use the index of the class", field=field)
    matches = model.classes_by_label.get(fold_label(label), ())
    if not matches:
        # A search in a thousand texts would hold up the event loop, and the caller of such a model has its texts.
        hint = "" if model.text else did_you_mean(label.replace("_", " "), model.labels)
        raise NotFound(f'{model.name} has no label "{shorten(label)}"{hint}', field=field)
    if len(matches) > 1:
        classes = " and ".join(map(str, matches[:MAX_LISTED]))
        raise InvalidArgument(f'"{shorten(label)}" is the label of classes {classes}: use the index', field=field)
    return matches[0]
