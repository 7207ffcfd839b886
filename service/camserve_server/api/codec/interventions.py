"""Codec of interventions: changes to what layers return."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

from camserve.v1 import explain_pb2
from camserve_server.api.codec.layers import find_layer
from camserve_server.core.errors import FailedPrecondition, InvalidArgument
from camserve_server.models.interventions import check_channels
from camserve_server.models.values import Change, Intervention, LayerInfo, ModelInfo

Numbers: TypeAlias = Mapping[str, float]
"""Fields of an `Intervention` with numbers, by name."""


def read_interventions(messages: Sequence[explain_pb2.Intervention], model: ModelInfo) -> tuple[Intervention, ...]:
    """Check the interventions of a request, whose lists have passed `check_sizes`.

    Raises:
        ServiceError: a field is invalid; the error names it.
    """
    return tuple(_read(message, model, f"interventions[{index}]") for index, message in enumerate(messages))


def _read(message: explain_pb2.Intervention, model: ModelInfo, field: str) -> Intervention:
    layer = find_layer(message.layer, model, f"{field}.layer")
    change = message.WhichOneof("change")
    if change is None:
        raise InvalidArgument(f"name the change: one of {', '.join(_READERS)}", field=field)
    numbers = _READERS[change](message, f"{field}.{change}")
    intervention = Intervention(message.layer, change, tuple(message.channels), message.input, **numbers)
    if len(set(intervention.channels)) < len(intervention.channels):
        raise InvalidArgument("a channel is named twice", field=f"{field}.channels")
    if change == "replace_mean" and layer.grid is None:
        reason = f'layer "{layer.name}" has no grid to take the mean over: {layer.reason}'
        raise FailedPrecondition(reason, field=f"{field}.replace_mean")
    if not message.input:
        _check_output(intervention, layer, field)
    elif change == "clip_gradient":
        raise InvalidArgument("clip_gradient is at a layer's output: name the layer before", field=f"{field}.input")
    return intervention


def _check_output(intervention: Intervention, layer: LayerInfo, field: str) -> None:
    """Check that a layer's output has the channels; those of an input are known only when the model runs."""
    if not layer.shape:
        raise FailedPrecondition(f'layer "{layer.name}" cannot be changed: {layer.reason}', field=f"{field}.layer")
    if layer.channel_axis is None:
        reason = f'the channels of layer "{layer.name}" are unknown: its output has {len(layer.shape)} axes'
        raise FailedPrecondition(reason, field=f"{field}.layer")
    check_channels(intervention, layer.shape[layer.channel_axis], field)


def _read_flag(message: explain_pb2.Intervention, field: str) -> Numbers:
    if not getattr(message, field.rpartition(".")[2]):
        raise InvalidArgument.of_field(field, "is true, or not set")
    return {}


def _read_scale(message: explain_pb2.Intervention, field: str) -> Numbers:
    return {"factor": _finite(message.scale, field)}


def _read_clamp(message: explain_pb2.Intervention, field: str) -> Numbers:
    clamp = message.clamp
    numbers: dict[str, float] = {
        name: _finite(getattr(clamp, name), f"{field}.{name}") for name in _LIMITS if clamp.HasField(name)
    }
    if not numbers:
        raise InvalidArgument("clamp needs a minimum, a maximum or both", field=field)
    if numbers.get("minimum", -math.inf) > numbers.get("maximum", math.inf):
        reason = f"the minimum {clamp.minimum:g} is greater than the maximum {clamp.maximum:g}"
        raise InvalidArgument(reason, field=field)
    return numbers


def _read_clip(message: explain_pb2.Intervention, field: str) -> Numbers:
    limit = _finite(message.clip_gradient, field)
    if limit <= 0:
        raise InvalidArgument.of_field(field, f"is greater than 0, not {limit:g}")
    return {"minimum": -limit, "maximum": limit}


def _finite(number: float, field: str) -> float:
    if not math.isfinite(number):
        raise InvalidArgument.of_field(field, f"is a finite number, not {number:g}")
    return number


_LIMITS: tuple[Literal["minimum"], Literal["maximum"]] = ("minimum", "maximum")

_READERS: Mapping[Change, Callable[[explain_pb2.Intervention, str], Numbers]] = {
    "silence": _read_flag,
    "scale": _read_scale,
    "clamp": _read_clamp,
    "replace_mean": _read_flag,
    "clip_gradient": _read_clip,
}
"""For each change, a function that reads its numbers, given the path of its field."""


def intervention_message(intervention: Intervention) -> explain_pb2.Intervention:
    """Convert an intervention to protobuf."""
    message = explain_pb2.Intervention(
        layer=intervention.layer, input=intervention.input, channels=intervention.channels
    )
    _WRITERS[intervention.change](message, intervention)
    return message


def _write_clamp(message: explain_pb2.Intervention, intervention: Intervention) -> None:
    for name in _LIMITS:
        if math.isfinite(limit := getattr(intervention, name)):
            setattr(message.clamp, name, limit)


_WRITERS: Mapping[Change, Callable[[explain_pb2.Intervention, Intervention], None]] = {
    "silence": lambda message, _intervention: setattr(message, "silence", True),
    "scale": lambda message, intervention: setattr(message, "scale", intervention.factor),
    "clamp": _write_clamp,
    "replace_mean": lambda message, _intervention: setattr(message, "replace_mean", True),
    "clip_gradient": lambda message, intervention: setattr(message, "clip_gradient", intervention.maximum),
}
"""For each change, a function that writes it."""
