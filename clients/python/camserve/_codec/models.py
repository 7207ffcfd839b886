"""Decode descriptions of models, layers and methods."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from camserve._codec.parameters import decode_parameter_info
from camserve._values.methods import MethodInfo
from camserve._values.models import Layer, Model, ModelState
from camserve.v1 import models_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable

_RGB = 3  # channels


def decode_model(message: models_pb2.Model, labels: Iterable[str] = ()) -> Model:
    """Decode the description of a model."""
    names = [field.name for field in fields(Model) if field.name not in {"labels", "state", "pyramid"}]
    values = {name: getattr(message, name) for name in names}
    values["input_channels"] = message.input_channels or _RGB  # an older server has models of RGB alone
    values["independent_rows"] = message.independent_rows or not message.HasField("independent_rows")
    pyramid, state = tuple(message.pyramid), _decode_model_state(message.state)
    return Model(labels=tuple(labels), state=state, pyramid=pyramid, **values)


def _decode_model_state(number: int) -> ModelState:
    try:
        return ModelState(models_pb2.ModelState.Name(number).removeprefix("MODEL_STATE_"))  # type: ignore[arg-type]
    except ValueError:  # a newer server may know more states than this client
        return ModelState.UNSPECIFIED


def decode_layer(message: models_pb2.Layer) -> Layer:
    """Decode the description of a layer."""
    return Layer(
        name=message.name,
        type=message.type,
        output_shape=tuple(message.output_shape),
        parameters=message.parameters,
        calls=message.calls,
        explainable=message.explainable,
        grid=(message.grid_height, message.grid_width) if message.grid_height else None,
        reason=message.reason,
        kinds=tuple(map(_decode_kind, message.kinds)),
    )


def decode_method(message: models_pb2.MethodInfo) -> MethodInfo:
    """Decode the description of a method."""
    return MethodInfo(
        name=message.name,
        kind=_decode_kind(message.kind),
        summary=message.summary,
        paper=message.paper,
        parameters=tuple(map(decode_parameter_info, message.parameters)),
        rows=message.rows,
        layered=message.layered,
        eigen_smoothing=message.eigen_smoothing,
        needs=message.needs,
        formula=message.formula,
        per_channel=message.per_channel,
    )


def _decode_kind(number: int) -> str:
    if number not in models_pb2.MethodKind.values():
        return str(number)
    name = models_pb2.MethodKind.Name(models_pb2.MethodKind.ValueType(number))
    return name.removeprefix("METHOD_KIND_")


def models_request() -> models_pb2.ListModelsRequest:
    """Return the request for the descriptions of all models."""
    return models_pb2.ListModelsRequest()


def model_request(name: str) -> models_pb2.GetModelRequest:
    """Return the request for the description of a model."""
    return models_pb2.GetModelRequest(name=name)


def load_request(name: str, weights: str, sha256: str) -> models_pb2.LoadModelRequest:
    """Return the request to load a model."""
    return models_pb2.LoadModelRequest(name=name, weights=weights, sha256=sha256)


def unload_request(name: str) -> models_pb2.UnloadModelRequest:
    """Return the request to unload a model."""
    return models_pb2.UnloadModelRequest(name=name)


def layers_request(model: str) -> models_pb2.ListLayersRequest:
    """Return the request for the layers of a model."""
    return models_pb2.ListLayersRequest(model=model)


def methods_request() -> models_pb2.ListMethodsRequest:
    """Return the request for the descriptions of all methods."""
    return models_pb2.ListMethodsRequest()
