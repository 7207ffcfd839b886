"""Encode and decode interventions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import numpy as np
from google.protobuf import json_format

from camserve._codec.json_messages import from_tree
from camserve._core.checks import invalid
from camserve._values.interventions import Intervention
from camserve.v1 import explain_pb2


def encode_interventions(interventions: object) -> list[explain_pb2.Intervention]:
    """Encode the interventions of a request as protobuf.

    Raises:
        InvalidArgument: They are not a list of interventions, or a value in one has the wrong type.
    """
    if isinstance(interventions, Intervention | str) or not isinstance(interventions, Iterable):
        raise invalid("interventions", f"they must be a list, such as [silence('layer4')], not {interventions!r}")
    listed = enumerate(cast("Iterable[object]", interventions))
    return [_encode(intervention, f"interventions[{index}]") for index, intervention in listed]


def _encode(intervention: object, field: str) -> explain_pb2.Intervention:
    if not isinstance(intervention, Intervention):
        raise invalid(field, f"it must be made by silence, scale, …, not be a {type(intervention).__name__}")
    message = explain_pb2.Intervention(
        layer=intervention.layer, input=intervention.input, channels=intervention.channels
    )
    if intervention.change not in _WRITERS:
        raise invalid(field, f"unknown change {intervention.change!r}: expected one of {', '.join(_WRITERS)}")
    _WRITERS[intervention.change](message, intervention)
    return message


def _write_clamp(message: explain_pb2.Intervention, intervention: Intervention) -> None:
    message.clamp.CopyFrom(explain_pb2.Clamp(minimum=intervention.minimum, maximum=intervention.maximum))


_WRITERS: Mapping[str, Callable[[explain_pb2.Intervention, Any], None]] = {
    "silence": lambda message, _intervention: setattr(message, "silence", True),
    "scale": lambda message, intervention: setattr(message, "scale", intervention.factor),
    "clamp": _write_clamp,
    "replace_mean": lambda message, _intervention: setattr(message, "replace_mean", True),
    "clip_gradient": lambda message, intervention: setattr(message, "clip_gradient", intervention.limit),
}
"""For each change, a function that writes it into a message."""


def decode_intervention(message: explain_pb2.Intervention) -> Intervention:
    """Decode an intervention; one of a newer server that this client does not know has an empty change."""
    clamp = message.clamp
    return Intervention(
        message.WhichOneof("change") or "",
        message.layer,
        tuple(message.channels),
        message.input,
        factor=_number(message.scale) if message.HasField("scale") else None,
        minimum=_number(clamp.minimum) if clamp.HasField("minimum") else None,
        maximum=_number(clamp.maximum) if clamp.HasField("maximum") else None,
        limit=_number(message.clip_gradient) if message.HasField("clip_gradient") else None,
    )


def _number(value: float) -> float:
    """Return the shortest number that has the same float32 value: 0.3 and not 0.30000001192092896."""
    return float(str(np.float32(value)))


def intervention_to_json(intervention: Intervention) -> Mapping[str, Any]:
    """Encode an intervention for a receipt: in protobuf's JSON, with the field names of the .proto file."""
    return json_format.MessageToDict(_encode(intervention, "interventions"), preserving_proto_field_name=True)


def intervention_from_json(value: Any) -> Intervention:
    """Decode an intervention of a receipt.

    Raises:
        ValueError: It is not a valid one.
    """
    message = from_tree(value, explain_pb2.Intervention())
    if message.WhichOneof("change") is None:
        raise ValueError("it names no change")
    return decode_intervention(message)
