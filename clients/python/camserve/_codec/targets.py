"""Encode and decode targets."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, SupportsIndex

from google.protobuf import json_format

from camserve._codec.images import mask_file
from camserve._codec.json_messages import from_tree
from camserve._core.checks import invalid
from camserve._core.errors import InvalidArgument
from camserve._values.picture import Box
from camserve._values.prediction import Prediction
from camserve._values.targets import (
    ClassLike,
    Contrast,
    Detection,
    Finer,
    Mask,
    Probability,
    Segment,
    Similarity,
    TargetLike,
    Text,
    to_box,
)
from camserve.v1 import explain_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_MAX_CLASS_INDEX = 2**32 - 1  # uint32


def encode_target(target: TargetLike, field: str, read_image: Callable[[object], bytes]) -> explain_pb2.Target:
    """Encode a target as protobuf.

    Args:
        target: The target that the caller passed.
        field: Path of the field in the request, for errors.
        read_image: Function that returns the file of an image.

    Raises:
        InvalidArgument: The value is not a valid target.
    """
    for kind, encode_kind in _ENCODERS.items():
        if isinstance(target, kind):
            return encode_kind(target, field, read_image)
    if isinstance(target, str):
        return explain_pb2.Target(label=target)
    return explain_pb2.Target(class_index=_class_index(target, field))


def _encode_contrast(target: Contrast, field: str, _read_image: object) -> explain_pb2.Target:
    contrast = explain_pb2.Contrast(
        why=_class_name(target.why, f"{field}.contrast.why"),
        why_not=_class_name(target.why_not, f"{field}.contrast.why_not"),
    )
    return explain_pb2.Target(contrast=contrast)


def _encode_probability(target: Probability, field: str, _read_image: object) -> explain_pb2.Target:
    if isinstance(target.why, str):
        return explain_pb2.Target(label=target.why, softmax=True)
    return explain_pb2.Target(class_index=_class_index(target.why, field), softmax=True)


def _encode_finer(target: Finer, field: str, _read_image: object) -> explain_pb2.Target:
    finer = explain_pb2.Finer(
        why=_class_name(target.why, f"{field}.finer.why"),
        against=[_class_name(class_, f"{field}.finer.against[{index}]") for index, class_ in enumerate(target.against)],
        weight=target.weight,
    )
    return explain_pb2.Target(finer=finer)


def _encode_similarity(target: Similarity, field: str, read_image: Callable[[object], bytes]) -> explain_pb2.Target:
    try:
        return explain_pb2.Target(similarity=explain_pb2.Similarity(image=read_image(target.image)))
    except InvalidArgument as error:
        reason = next(iter(error.fields.values()), str(error))
        raise invalid(f"{field}.similarity.image", reason) from error


def _encode_text(target: Text, field: str, _read_image: object) -> explain_pb2.Target:
    if not isinstance(target.text, str):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers may not check types
        raise invalid(f"{field}.text", f"a text must be a str, not {type(target.text).__name__}")
    return explain_pb2.Target(text=target.text)


def _encode_segment(target: Segment, field: str, _read_image: object) -> explain_pb2.Target:
    field = f"{field}.segment"
    segment = explain_pb2.Segment(class_name=_class_name(target.why, f"{field}.class_name"))
    if target.region is not None:
        segment.region.CopyFrom(encode_box(target.region, f"{field}.region"))
    return explain_pb2.Target(segment=segment)


def _encode_mask(target: Mask, field: str, read_image: Callable[[object], bytes]) -> explain_pb2.Target:
    field = f"{field}.segment"
    name = _class_name(target.why, f"{field}.class_name")
    try:
        file = mask_file(target.image) or read_image(target.image)
    except InvalidArgument as error:
        reason = next(iter(error.fields.values()), str(error))
        raise invalid(f"{field}.mask", reason) from error
    return explain_pb2.Target(segment=explain_pb2.Segment(class_name=name, mask=file))


def _encode_detection(target: Detection, field: str, _read_image: object) -> explain_pb2.Target:
    field = f"{field}.detection"
    detection = explain_pb2.Detection(class_name=_class_name(target.why, f"{field}.class_name"))
    if target.box is not None:
        detection.box.CopyFrom(encode_box(target.box, f"{field}.box"))
    return explain_pb2.Target(detection=detection)


def _encode_prediction(target: Prediction, field: str, read_image: Callable[[object], bytes]) -> explain_pb2.Target:
    if target.box is not None:
        return _encode_detection(Detection(target.class_index, target.box), field, read_image)
    if target.area:  # only a segmentation has areas, and it takes no plain class
        return _encode_segment(Segment(target.class_index), field, read_image)
    return explain_pb2.Target(class_index=_class_index(target.class_index, field))


_ENCODERS: Mapping[type, Callable[[Any, str, Callable[[object], bytes]], explain_pb2.Target]] = {
    Contrast: _encode_contrast,
    Probability: _encode_probability,
    Finer: _encode_finer,
    Similarity: _encode_similarity,
    Text: _encode_text,
    Segment: _encode_segment,
    Mask: _encode_mask,
    Detection: _encode_detection,
    Prediction: _encode_prediction,
}


def _class_name(class_: ClassLike, field: str) -> explain_pb2.ClassName:
    if isinstance(class_, str):
        return explain_pb2.ClassName(label=class_)
    return explain_pb2.ClassName(class_index=_class_index(class_, field))


def _class_index(class_: object, field: str) -> int:
    if isinstance(class_, bool) or not isinstance(class_, SupportsIndex):
        kind = type(class_).__name__
        raise invalid(field, f"a class must be a label or an index, not {kind}")
    index = operator.index(class_)
    if not 0 <= index <= _MAX_CLASS_INDEX:
        raise invalid(field, f"{index} is not a class index: it must be between 0 and {_MAX_CLASS_INDEX}")
    return index


def encode_box(box: object, field: str) -> explain_pb2.Box:
    """Encode a ``BoxLike``.

    Raises:
        InvalidArgument: As for ``to_box``.
    """
    edges = to_box(box, field)
    return explain_pb2.Box(left=edges.left, top=edges.top, right=edges.right, bottom=edges.bottom)


def decode_target(message: explain_pb2.Target) -> TargetLike | None:
    """Decode the resolved target of a response; None if it is empty, or its image or mask is left out."""
    decoder = _DECODERS.get(message.WhichOneof("kind") or "")
    return decoder(message) if decoder else None


def _decode_class_index(message: explain_pb2.Target) -> TargetLike:
    return Probability(message.class_index) if message.softmax else message.class_index


def _decode_box(message: explain_pb2.Box) -> Box:
    return Box(message.left, message.top, message.right, message.bottom)


def _decode_contrast(message: explain_pb2.Target) -> Contrast:
    return Contrast(message.contrast.why.class_index, message.contrast.why_not.class_index)


def _decode_finer(message: explain_pb2.Target) -> Finer:
    finer = message.finer
    return Finer(finer.why.class_index, tuple(class_.class_index for class_ in finer.against), finer.weight)


def _decode_segment(message: explain_pb2.Target) -> Segment | Mask | None:
    segment = message.segment
    if segment.HasField("mask"):
        return Mask(segment.class_name.class_index, segment.mask) if segment.mask else None
    region = _decode_box(segment.region) if segment.HasField("region") else None
    return Segment(segment.class_name.class_index, region)


def _decode_detection(message: explain_pb2.Target) -> Detection:
    return Detection(message.detection.class_name.class_index, _decode_box(message.detection.box))


_DECODERS: Mapping[str, Callable[[explain_pb2.Target], TargetLike | None]] = {
    "class_index": _decode_class_index,
    "contrast": _decode_contrast,
    "finer": _decode_finer,
    "text": lambda message: Text(message.text),
    "segment": _decode_segment,
    "detection": _decode_detection,
}


def target_message(target: Mapping[str, Any]) -> explain_pb2.Target:
    """Decode a receipt's target.

    Raises:
        ValueError: The mapping is not a valid target.
    """
    message = from_tree(dict(target), explain_pb2.Target())
    if message.WhichOneof("kind") is None:
        raise ValueError("it names no target")
    return message


def target_json(target: explain_pb2.Target) -> Mapping[str, Any]:
    """Encode a target for a receipt: in protobuf's JSON, with the field names of the .proto file."""
    return json_format.MessageToDict(target, preserving_proto_field_name=True)
