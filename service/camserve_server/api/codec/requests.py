"""Requests: everything in one is checked here, before it costs anything."""

from collections.abc import Mapping, Sequence
from typing import Literal

from camserve.v1 import explain_pb2
from camserve_server.api.codec.checks import LARGEST_SIDE, check_range, find_known, listed, short
from camserve_server.api.codec.formats import FORMATS, FUSIONS, PROFILES
from camserve_server.api.codec.sizes import check_sizes
from camserve_server.api.codec.targets import read_targets
from camserve_server.core.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable, did_you_mean
from camserve_server.core.limits import Limits
from camserve_server.imaging.values import Rendering
from camserve_server.jobs import Job
from camserve_server.methods import METHODS, Parameter
from camserve_server.methods.values import Fusion, MethodCall, ParameterValue
from camserve_server.models.values import KnownModel, LayerInfo, ModelInfo
from camserve_server.serving.requests import ExplainRequest

DEFAULT_METHOD = "gradcam"
DEFAULT_PREDICTIONS = 5
SMALLEST_SIDE = 16


def read_order(request: explain_pb2.ExplainRequest, models: Mapping[str, KnownModel], limits: Limits) -> ExplainRequest:
    """Check a request and resolve every name in it.

    Args:
        request: as it came.
        models: that there are; the first is the default.
        limits: on what one request may ask for.

    Raises:
        ServiceError: a field is wrong; the error names it.
    """
    check_sizes(request, limits)
    model = read_model(request.model, models, "model")
    job = Job(
        model=model,
        calls=_read_calls(request.methods),
        layers=_read_layers(request.layers, model),
        targets=read_targets(request, model, limits),
        fusion=_read_fusion(request.fusion),
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
    return ExplainRequest(job, request.image, _read_rendering(request.rendering), predictions)


def find_model(name: str, models: Mapping[str, KnownModel], field: str) -> KnownModel:
    """Return the model of that name, or the first where there is none.

    Raises:
        NotFound: there is no such model.
    """
    if not name:
        return next(iter(models.values()))
    return find_known("model", name, models, "the server has", field)


def read_model(name: str, models: Mapping[str, KnownModel], field: str) -> ModelInfo:
    """Return the model of that name, or the first where there is none; never another for one that does not answer.

    Raises:
        NotFound: there is no such model, or it was unloaded.
        Unavailable: it is being loaded, or could not be.
    """
    found = find_model(name, models, field)
    if isinstance(found, ModelInfo):
        return found
    if found.state == "loading":
        raise Unavailable(f"model {found.name} is being loaded", retry_after=1.0, shed="model_loading")
    if found.state == "failed":
        words = f"model {found.name} could not be loaded; the server's log says why"
        raise Unavailable(words, shed="model_failed")
    raise NotFound(f"model {found.name} is not loaded: it was unloaded", field=field)


def _read_calls(methods: Sequence[explain_pb2.Method]) -> tuple[MethodCall, ...]:
    if not methods:
        return (MethodCall(DEFAULT_METHOD),)
    return tuple(_read_call(method, f"methods[{place}]") for place, method in enumerate(methods))


def _read_call(message: explain_pb2.Method, field: str) -> MethodCall:
    method = find_known("method", message.name, METHODS, "there are", f"{field}.name")
    values = read_parameters(message.name, message.parameters, method.parameters, f"{field}.parameters")
    if message.eigen_smoothing and not method.smooths:
        smooth = listed(name for name, one in METHODS.items() if one.smooths)
        raise FailedPrecondition(
            f"{message.name} does not add up channels, so it has no principal component: {smooth} do",
            field=f"{field}.eigen_smoothing",
        )
    return MethodCall(message.name, values, message.augmentation_smoothing, message.eigen_smoothing)


def read_parameters(
    owner: str, given: Mapping[str, explain_pb2.Parameter], parameters: Sequence[Parameter], field: str
) -> dict[str, ParameterValue]:
    """Check the parameters of a method or metric, and fill in the defaults.

    Args:
        owner: name of the method or metric.
        given: as they came.
        parameters: that it takes.
        field: path of the request's field.

    Raises:
        InvalidArgument: there is no such parameter, or its value is out of range.
    """
    known = {parameter.name: parameter for parameter in parameters}
    for name in given:
        if name not in known:
            takes = f"it takes {listed(known)}" if known else "it takes none"
            raise InvalidArgument(
                f'{owner} has no parameter "{short(name)}"{did_you_mean(name, known)}: {takes}', field=field
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
        raise InvalidArgument(f"there is no fusion {value}", field="fusion")
    return FUSIONS[value]


def _read_layers(names: Sequence[str], model: ModelInfo) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise InvalidArgument("a layer is named twice", field="layers")
    for place, name in enumerate(names):
        check_layer(name, model, f"layers[{place}]")
    return tuple(names) or (model.default_layer,)


def find_layer(name: str, model: ModelInfo, field: str) -> LayerInfo:
    """Return a layer.

    Raises:
        NotFound: there is none of this name that runs.
    """
    if name not in model.layers:
        hint = did_you_mean(name, model.layers)
        raise NotFound(f'unknown layer "{short(name)}": {model.name} has {_with_a_grid(model)}{hint}', field=field)
    return model.layers[name]


def _with_a_grid(model: ModelInfo) -> str:
    """List layers that can be explained: the outermost, where there are some."""
    names = [name for name, layer in model.layers.items() if layer.layout]
    return listed([name for name in names if "." not in name] or names)


def check_layer(name: str, model: ModelInfo, field: str) -> None:
    """Check that a layer is there and has a grid over the image.

    Raises:
        NotFound: there is no such layer.
        FailedPrecondition: it cannot be explained.
    """
    layer = find_layer(name, model, field)
    if not layer.layout:
        raise FailedPrecondition(
            f'layer "{name}" cannot be explained: {layer.reason}; {model.name} has {_with_a_grid(model)}, '
            f'and the default is "{model.default_layer}"',
            field=field,
        )


def _read_rendering(message: explain_pb2.Rendering) -> Rendering:
    alpha = message.alpha if message.HasField("alpha") else 0.5
    check_range(alpha, 0.0, 1.0, "rendering.alpha")
    if message.max_side:
        check_range(message.max_side, SMALLEST_SIDE, LARGEST_SIDE, "rendering.max_side")
    check_range(message.quality, 0, 100, "rendering.quality")
    if message.profile not in PROFILES:
        raise InvalidArgument(f"there is no profile {message.profile}", field="rendering.profile")
    return Rendering(
        overlay=read_format(message.overlay, "rendering.overlay"),
        heatmap_image=read_format(message.heatmap_image, "rendering.heatmap_image"),
        heatmap=message.heatmap,
        colormap=message.colormap or "jet",
        alpha=alpha,
        max_side=message.max_side or None,
        quality=message.quality or 90,
        profile=PROFILES[message.profile],
        intensity=message.intensity,
    )


def read_format(value: "explain_pb2.ImageFormat.ValueType", field: str) -> Literal["jpeg", "png", "webp"] | None:
    """Return our name of a picture's encoding, None for no picture.

    Raises:
        InvalidArgument: there is no such encoding.
    """
    if value not in FORMATS:
        raise InvalidArgument(f"there is no image format {value}", field=field)
    return FORMATS[value]
