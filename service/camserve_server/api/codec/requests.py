"""Codec of Explain requests, which are checked completely before anything is computed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from camserve.v1 import explain_pb2
from camserve_server.api.codec.checks import MAX_FLOAT, check_range, find_known, join_names, shorten
from camserve_server.api.codec.formats import FUSIONS
from camserve_server.api.codec.interventions import read_interventions
from camserve_server.api.codec.layers import find_layer, list_layers
from camserve_server.api.codec.rendering import read_rendering
from camserve_server.api.codec.sizes import check_sizes
from camserve_server.api.codec.targets import read_targets, with_texts
from camserve_server.core.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable, did_you_mean
from camserve_server.core.limits import Limits
from camserve_server.imaging.values import Rendering
from camserve_server.jobs import Job
from camserve_server.methods import METHODS, Method, Parameter
from camserve_server.methods.kinds import Perturbation
from camserve_server.methods.values import Fusion, MethodCall, ParameterValue
from camserve_server.models.values import PYRAMID, KnownModel, ModelInfo
from camserve_server.serving.requests import ExplainRequest
from camserve_server.targets import kind_of
from camserve_server.targets.values import Target

DEFAULT_METHOD = "gradcam"
DEFAULT_PREDICTIONS = 5
REMEMBERED_OPTIONS = 256  # requests whose checked options are kept for the next request with the same
MAX_REMEMBERED_BYTES = 512  # of the options of such a request
MAX_REMEMBERED_TARGETS = 8  # of such a request

Options: TypeAlias = tuple[Job, Rendering, int]
"""The options of a request: the job, the rendering, and the number of predictions to return."""


def read_explanation(
    request: explain_pb2.ExplainRequest, models: Mapping[str, KnownModel], limits: Limits
) -> ExplainRequest:
    """Check a request and resolve its names.

    Args:
        request: the request.
        models: the models of the server by name; the first is the default.
        limits: limits on one request.

    Raises:
        ServiceError: a field is invalid; the error names it.
    """
    model = models.get(request.model) if request.model else next(iter(models.values()))
    options = _options_of(request)
    if isinstance(model, ModelInfo) and options is not None and len(options) <= MAX_REMEMBERED_BYTES:
        return ExplainRequest(*_read_remembered(options, model, limits), request.image)
    return ExplainRequest(*_read_options(request, models, limits), request.image)


def _options_of(request: explain_pb2.ExplainRequest) -> bytes | None:
    """Return a request without its image, serialized; None if it is not worth remembering."""
    if len(request.targets) > MAX_REMEMBERED_TARGETS or any(
        target.HasField("similarity") or target.segment.mask for target in request.targets
    ):
        return None  # the image of such a target may be large
    options = explain_pb2.ExplainRequest()
    for field, value in request.ListFields():
        if field.name == "image":
            continue
        if hasattr(value, "MergeFrom"):  # a message, a list or a map
            getattr(options, field.name).MergeFrom(value)
        else:
            setattr(options, field.name, value)
    return options.SerializeToString()


@lru_cache(REMEMBERED_OPTIONS)
def _read_remembered(options: bytes, model: ModelInfo, limits: Limits) -> Options:
    """Read the options of a request, or return them as they were read before: most requests have the same."""
    return _read_options(explain_pb2.ExplainRequest.FromString(options), {model.name: model}, limits)


def _read_options(request: explain_pb2.ExplainRequest, models: Mapping[str, KnownModel], limits: Limits) -> Options:
    """Check everything but the image; return the job, the rendering and the number of predictions."""
    check_sizes(request, limits)
    model = with_value_range(with_texts(read_model(request.model, models, "model"), request.texts), request)
    fusion = _read_fusion(request.fusion)
    calls, layers = _read_calls(request.methods, model, limits), _read_layers(request.layers, model)
    targets = read_targets(request, model, limits)
    _check_contrasts(calls, targets)
    _check_gradients(calls, layers, model)
    pyramid = layers == model.pyramid and list(request.layers) in ([], [PYRAMID])
    interventions = read_interventions(request.interventions, model)
    job = Job(
        model=model,
        calls=calls,
        layers=layers,
        targets=targets,
        fusion=fusion or ("sum" if pyramid else None),
        pyramid=pyramid,
        class_map=_read_class_map(model, requested=request.class_map),
        interventions=interventions,
        unchanged_model=bool(interventions),
    )
    if job.rows > limits.rows:
        raise InvalidArgument(f"the request costs {job.rows} rows, and {limits.rows} is the limit", field="methods")
    if job.explanations > limits.explanations:
        raise InvalidArgument(
            f"the request asks for {job.explanations} explanations, and {limits.explanations} is the limit",
            field="methods",
        )
    predictions = request.max_predictions if request.HasField("max_predictions") else DEFAULT_PREDICTIONS
    check_range(predictions, 0, limits.predictions, "max_predictions")
    return job, read_rendering(request.rendering), predictions


def find_model(name: str, models: Mapping[str, KnownModel], field: str) -> KnownModel:
    """Return a model in whatever state, or the first model if the name is empty.

    Raises:
        NotFound: no model has this name.
    """
    if not name:
        return next(iter(models.values()))
    return find_known("model", name, models, "the server has", field)


def read_model(name: str, models: Mapping[str, KnownModel], field: str) -> ModelInfo:
    """Return a model that is ready, or the first model if the name is empty. No model replaces one that is not ready.

    Raises:
        NotFound: no model has this name, or it was unloaded.
        Unavailable: the model is being loaded, or could not be loaded.
    """
    model = find_model(name, models, field)
    if isinstance(model, ModelInfo):
        return model
    if model.state == "loading":
        raise Unavailable(f"model {model.name} is being loaded", retry_after=1.0, shed_reason="model_loading")
    if model.state == "failed":
        message = f"model {model.name} could not be loaded; the server's log says why"
        raise Unavailable(message, shed_reason="model_failed")
    raise NotFound(f"model {model.name} is not loaded: it was unloaded", field=field)


def with_value_range(model: ModelInfo, request: "_WithValues") -> ModelInfo:
    """Return a model that takes the values of a photo as the request says.

    Raises:
        InvalidArgument: the range is empty, or not finite.
    """
    if not request.HasField("value_range"):
        return model
    low, high = request.value_range.minimum, request.value_range.maximum
    check_range(low, -MAX_FLOAT, MAX_FLOAT, "value_range.minimum")
    check_range(high, -MAX_FLOAT, MAX_FLOAT, "value_range.maximum")
    if not 0 < np.float32(high - low) < math.inf:
        raise InvalidArgument.of_field("value_range", f"has a minimum below its maximum, and not {low:g} and {high:g}")
    return replace(model, preprocess=replace(model.preprocess, value_range=(low, high)))


_WithValues: TypeAlias = (
    explain_pb2.ExplainRequest | explain_pb2.InspectLayersRequest | explain_pb2.ExtractFeaturesRequest
)


def _read_calls(methods: Sequence[explain_pb2.Method], model: ModelInfo, limits: Limits) -> tuple[MethodCall, ...]:
    if not methods:
        return (MethodCall(DEFAULT_METHOD),)
    return tuple(_read_call(method, model, limits, f"methods[{index}]") for index, method in enumerate(methods))


def _read_call(message: explain_pb2.Method, model: ModelInfo, limits: Limits, field: str) -> MethodCall:
    method = find_known("method", message.name, METHODS, "there are", f"{field}.name")
    values = read_parameters(message.name, message.parameters, method.parameters, f"{field}.parameters")
    if method.tasks and model.task not in method.tasks:
        reason = f"{message.name} needs {method.needs}, and {model.name} is none"
        raise FailedPrecondition(reason, field=f"{field}.name")
    if message.eigen_smoothing and not method.smooths:
        others = join_names(name for name, other in METHODS.items() if other.smooths)
        raise FailedPrecondition(
            f"{message.name} does not add up channels, so it has no principal component; methods that do: {others}",
            field=f"{field}.eigen_smoothing",
        )
    channels = _read_input_channels(message, model, limits, field)
    return MethodCall(message.name, values, message.augmentation_smoothing, message.eigen_smoothing, channels)


def _read_input_channels(message: explain_pb2.Method, model: ModelInfo, limits: Limits, field: str) -> tuple[int, ...]:
    """Return the channels of the model's input to make a map of each; none for one map of all channels."""
    if message.per_channel and not METHODS[message.name].per_channel:
        others = join_names(name for name, other in METHODS.items() if other.per_channel)
        raise FailedPrecondition(
            f"{message.name} has no map of each channel of the input; methods that have: {others}",
            field=f"{field}.per_channel",
        )
    named = f"{field}.input_channels"
    if message.input_channels and not message.per_channel:
        raise InvalidArgument.of_field(named, "needs per_channel, which is false")
    if len(set(message.input_channels)) < len(message.input_channels):
        raise InvalidArgument("a channel of the input is named twice", field=named)
    for index, channel in enumerate(message.input_channels):
        check_range(channel, 0, model.channels - 1, f"{named}[{index}]")
    channels = tuple(message.input_channels or range(model.channels)) if message.per_channel else ()
    if len(channels) > limits.explanations:
        reason = f"{model.name} has {len(channels)} channels, and {limits.explanations} explanations is the limit"
        raise InvalidArgument(f"{reason}: choose some with input_channels", field=f"{field}.per_channel")
    return channels


def _check_gradients(calls: Sequence[MethodCall], layers: Sequence[str], model: ModelInfo) -> None:
    """Check that the model has what each method needs: a layer with a grid, and a gradient there or at the image."""
    for index, call in enumerate(calls):
        if lacking := _lacking(METHODS[call.name], layers, model):
            offered = join_names(name for name, method in METHODS.items() if not _lacking(method, layers, model))
            reason = f"{call.name} needs {lacking}; methods that need none: {offered}"
            raise FailedPrecondition(reason, field=f"methods[{index}].name")


def _lacking(method: Method, layers: Sequence[str], model: ModelInfo) -> str:
    """Return what a method needs and a model lacks, at some layers; empty for nothing."""
    if method.looks_inside and model.is_opaque:
        return f"to see every operation, and a part of {model.name} is a TorchScript program"
    if method.layered and not layers:
        return f"a layer with a grid over the image, and {model.name} has none"
    if "image" in method.gradients and not model.differentiable:
        return f"the gradient at the image, and none flows back to it in {model.name}"
    cut = [name for name in layers if not model.layers[name].differentiable]
    if "layer" in method.gradients and cut:
        return f'the gradient at layer "{cut[0]}", and none flows back to it in {model.name}'
    return ""


def _check_contrasts(calls: Sequence[MethodCall], targets: Sequence[Target]) -> None:
    """Check that no method that compares detected objects gets a contrast."""
    for index, call in enumerate(calls):
        method = METHODS[call.name]
        compares = isinstance(method, Perturbation) and method.matches
        if compares and any(kind_of(target).contrasted(target) is not None for target in targets):
            raise FailedPrecondition(
                f"{call.name} compares detected objects, which have one class each: use another method for contrasts",
                field=f"methods[{index}].name",
            )


def read_parameters(
    owner: str, given: Mapping[str, explain_pb2.Parameter], parameters: Sequence[Parameter], field: str
) -> dict[str, ParameterValue]:
    """Check the parameters of a method or metric, and fill in the defaults.

    Args:
        owner: name of the method or metric.
        given: the parameters in the request, by name.
        parameters: the parameters of the method or metric.
        field: path of the request's field.

    Raises:
        InvalidArgument: a parameter is unknown, or its value is out of range.
    """
    known = {parameter.name: parameter for parameter in parameters}
    for name in given:
        if name not in known:
            takes = f"it takes {join_names(known)}" if known else "it takes none"
            raise InvalidArgument(
                f'{owner} has no parameter "{shorten(name)}"{did_you_mean(name, known)}: {takes}', field=field
            )
    values: dict[str, ParameterValue] = {parameter.name: parameter.default for parameter in parameters}
    for name, value in given.items():
        values[name] = _read_parameter(known[name], value, f'{field}["{name}"]')
    return values


def _read_parameter(parameter: Parameter, value: explain_pb2.Parameter, field: str) -> ParameterValue:
    if parameter.choices:
        return _read_choice(parameter, value, field)
    if value.WhichOneof("value") != "number":
        raise InvalidArgument(f"{parameter.name} is a number", field=field)
    check_range(value.number, parameter.minimum, parameter.maximum, field)
    if parameter.integer and value.number != int(value.number):
        raise InvalidArgument(f"{parameter.name} is a whole number, not {value.number:g}", field=field)
    return value.number


def _read_choice(parameter: Parameter, value: explain_pb2.Parameter, field: str) -> str:
    if value.WhichOneof("value") != "text" or value.text not in parameter.choices:
        hint = did_you_mean(value.text, parameter.choices)
        raise InvalidArgument(f"{parameter.name} is one of {', '.join(parameter.choices)}{hint}", field=field)
    return value.text


def _read_fusion(value: "explain_pb2.Fusion.ValueType") -> Fusion | None:
    if value not in FUSIONS:
        raise InvalidArgument(f"unknown fusion {value}", field="fusion")
    return FUSIONS[value]


def _read_class_map(model: ModelInfo, *, requested: bool) -> bool:
    if requested and model.task != "segment":
        raise FailedPrecondition(
            f'{model.name} predicts no class of each pixel: its task is "{model.task}"', field="class_map"
        )
    return requested


def _read_layers(names: Sequence[str], model: ModelInfo) -> tuple[str, ...]:
    if PYRAMID in names and PYRAMID not in model.layers:
        return _read_pyramid(names, model)
    if len(set(names)) < len(names):
        raise InvalidArgument("a layer is named twice", field="layers")
    for index, name in enumerate(names):
        check_layer(name, model, f"layers[{index}]")
    return tuple(names) or model.pyramid or model.default_layers


def _read_pyramid(names: Sequence[str], model: ModelInfo) -> tuple[str, ...]:
    """Return the layers of a model's pyramid.

    Raises:
        InvalidArgument: the request names another layer beside it.
        FailedPrecondition: the model has none.
    """
    if len(names) > 1:
        raise InvalidArgument(f'"{PYRAMID}" is all scales in one map: name no layer beside it', field="layers")
    if not model.pyramid:
        reason = "its objects come from one grid" if model.task == "detect" else "it is no detector"
        raise FailedPrecondition(
            f'{model.name} has no pyramid: {reason}; name one of its layers; the default is "{model.default_layer}"',
            field="layers[0]",
        )
    return model.pyramid


def check_layer(name: str, model: ModelInfo, field: str) -> None:
    """Check that a layer exists and has a grid over the image.

    Raises:
        NotFound: no module that runs has this name.
        FailedPrecondition: the layer cannot be explained.
    """
    layer = find_layer(name, model, field)
    if not layer.layout:
        others = f'{list_layers(model)}, and the default is "{model.default_layer}"' if model.default_layer else "none"
        reason = f'layer "{name}" cannot be explained: {layer.reason}; {model.name} has {others}'
        raise FailedPrecondition(reason, field=field)
