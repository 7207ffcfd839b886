"""Requests: everything in one is checked here, before it costs anything."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from camserve.v1 import explain_pb2
from camserve_server.errors import FailedPrecondition, InvalidArgument, NotFound, did_you_mean
from camserve_server.jobs import Job
from camserve_server.methods import METHODS, Parameter
from camserve_server.types import (
    ClassTarget,
    ContrastTarget,
    Fusion,
    Limits,
    MethodCall,
    ModelInfo,
    ParameterValue,
    RankTarget,
    Rendering,
    Target,
)
from camserve_server.wire.formats import FORMATS, FUSIONS, PROFILES

DEFAULT_METHOD = "gradcam"
DEFAULT_PREDICTIONS = 5
MOST_PREDICTIONS = 1000
SMALLEST_SIDE = 16
LARGEST_SIDE = 16_384
LONGEST_SHOWN = 64  # characters of a caller's own word that an error repeats
SHOWN = 12  # names that an error lists before it says how many more there are

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Order:
    """A request, checked.

    Attributes:
        job: what to explain.
        image: the photo's file.
        rendering: how it shall look.
        predictions: how many to return.
    """

    job: Job
    image: bytes
    rendering: Rendering
    predictions: int


def read_order(request: explain_pb2.ExplainRequest, models: Mapping[str, ModelInfo], limits: Limits) -> Order:
    """Check a request and resolve every name in it.

    Args:
        request: as it came.
        models: that are loaded; the first is the default.
        limits: on what one request may ask for.

    Raises:
        ServiceError: a field is wrong; the error names it.
    """
    model = read_model(request.model, models, "model")
    job = Job(
        model=model,
        calls=_read_calls(request.methods, limits),
        layers=_read_layers(request.layers, model, limits),
        targets=_read_targets(request, model, limits),
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
    _check_range(predictions, 0, MOST_PREDICTIONS, "max_predictions")
    return Order(job, request.image, _read_rendering(request.rendering), predictions)


def read_model(name: str, models: Mapping[str, ModelInfo], field: str) -> ModelInfo:
    """Return the model of that name, or the first where there is none.

    Raises:
        NotFound: there is no such model.
    """
    if not name:
        return next(iter(models.values()))
    return _known("model", name, models, "the server has", field)


def _read_calls(methods: Sequence[explain_pb2.Method], limits: Limits) -> tuple[MethodCall, ...]:
    _check_count(methods, limits.methods, "methods")
    if not methods:
        return (MethodCall(DEFAULT_METHOD),)
    return tuple(_read_call(method, f"methods[{place}]") for place, method in enumerate(methods))


def _read_call(message: explain_pb2.Method, field: str) -> MethodCall:
    method = _known("method", message.name, METHODS, "there are", f"{field}.name")
    known = {parameter.name: parameter for parameter in method.parameters}
    for name in message.parameters:
        if name not in known:
            takes = f"it takes {_listed(known)}" if known else "it takes none"
            raise InvalidArgument(
                f'{message.name} has no parameter "{_short(name)}"{did_you_mean(name, known)}: {takes}',
                field=f"{field}.parameters",
            )
    values: dict[str, ParameterValue] = {parameter.name: parameter.default for parameter in method.parameters}
    for name, value in message.parameters.items():
        values[name] = _read_parameter(known[name], value, f'{field}.parameters["{name}"]')
    if message.eigen_smoothing and not method.smooths:
        smooth = _listed(name for name, one in METHODS.items() if one.smooths)
        raise FailedPrecondition(
            f"{message.name} does not add up channels, so it has no principal component: {smooth} do",
            field=f"{field}.eigen_smoothing",
        )
    return MethodCall(message.name, values, message.augmentation_smoothing, message.eigen_smoothing)


def _read_parameter(parameter: Parameter, value: explain_pb2.Parameter, field: str) -> ParameterValue:
    if parameter.choices:
        return _read_choice(parameter, value, field)
    if value.WhichOneof("value") != "number":
        raise InvalidArgument(f"{parameter.name} is a number", field=field)
    _check_range(value.number, parameter.minimum, parameter.maximum, field)
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


def _read_layers(names: Sequence[str], model: ModelInfo, limits: Limits) -> tuple[str, ...]:
    _check_count(names, limits.layers, "layers")
    if len(set(names)) < len(names):
        raise InvalidArgument("a layer is named twice", field="layers")
    for place, name in enumerate(names):
        _check_layer(name, model, f"layers[{place}]")
    return tuple(names) or (model.default_layer,)


def _check_layer(name: str, model: ModelInfo, field: str) -> None:
    if name not in model.layers:
        top = [known for known, layer in model.layers.items() if layer.layout and "." not in known]
        some = top or [known for known, layer in model.layers.items() if layer.layout]
        hint = did_you_mean(name, model.layers)
        raise NotFound(f'unknown layer "{_short(name)}": {model.name} has {_listed(some)}{hint}', field=field)
    layer = model.layers[name]
    if not layer.layout:
        raise FailedPrecondition(
            f'layer "{name}" cannot be explained: {layer.reason}; the default is "{model.default_layer}"', field=field
        )


def _read_targets(request: explain_pb2.ExplainRequest, model: ModelInfo, limits: Limits) -> tuple[Target, ...]:
    _check_count(request.targets, limits.targets, "targets")
    if request.targets:
        return tuple(_read_target(one, model, f"targets[{place}]") for place, one in enumerate(request.targets))
    top_k = request.top_k if request.HasField("top_k") else 1
    _check_range(top_k, 1, min(limits.targets, model.classes), "top_k")
    return tuple(RankTarget(rank) for rank in range(top_k))


def _read_target(target: explain_pb2.Target, model: ModelInfo, field: str) -> Target:
    if target.WhichOneof("kind") != "contrast":
        return ClassTarget(_read_class(target, model, field))
    why = _read_class(target.contrast.why, model, f"{field}.contrast.why")
    why_not = _read_class(target.contrast.why_not, model, f"{field}.contrast.why_not")
    if why == why_not:
        raise InvalidArgument("a contrast needs two different classes", field=f"{field}.contrast.why_not")
    return ContrastTarget(why, why_not)


def _read_class(name: explain_pb2.Target | explain_pb2.ClassName, model: ModelInfo, field: str) -> int:
    kind = name.WhichOneof("kind")
    if kind is None:
        raise InvalidArgument("say a class_index or a label", field=field)
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
        raise NotFound(f"{model.name} has no labels: name classes by their index", field=field)
    wanted = _folded(label)
    found = [index for index, known in enumerate(model.labels) if _folded(known) == wanted]
    if not found:
        hint = did_you_mean(label.replace("_", " "), model.labels)
        raise NotFound(f'{model.name} has no label "{_short(label)}"{hint}', field=field)
    if len(found) > 1:
        which = " and ".join(map(str, found[:SHOWN]))
        raise InvalidArgument(f'"{_short(label)}" is the label of classes {which}: give the index', field=field)
    return found[0]


def _folded(label: str) -> str:
    return label.replace("_", " ").strip().casefold()


def _read_rendering(message: explain_pb2.Rendering) -> Rendering:
    alpha = message.alpha if message.HasField("alpha") else 0.5
    _check_range(alpha, 0.0, 1.0, "rendering.alpha")
    if message.max_side:
        _check_range(message.max_side, SMALLEST_SIDE, LARGEST_SIDE, "rendering.max_side")
    _check_range(message.quality, 0, 100, "rendering.quality")
    if message.profile not in PROFILES:
        raise InvalidArgument(f"there is no profile {message.profile}", field="rendering.profile")
    return Rendering(
        overlay=_read_format(message.overlay, "rendering.overlay"),
        heatmap_image=_read_format(message.heatmap_image, "rendering.heatmap_image"),
        heatmap=message.heatmap,
        colormap=message.colormap or "jet",
        alpha=alpha,
        max_side=message.max_side or None,
        quality=message.quality or 90,
        profile=PROFILES[message.profile],
        intensity=message.intensity,
    )


def _read_format(value: "explain_pb2.ImageFormat.ValueType", field: str) -> Literal["jpeg", "png", "webp"] | None:
    if value not in FORMATS:
        raise InvalidArgument(f"there is no image format {value}", field=field)
    return FORMATS[value]


def _known(kind: str, name: str, known: Mapping[str, T], there_are: str, field: str) -> T:
    if name in known:
        return known[name]
    hint = did_you_mean(name, known)
    raise NotFound(f'unknown {kind} "{_short(name)}": {there_are} {_listed(known)}{hint}', field=field)


def _check_count(items: Sequence[object], most: int, field: str) -> None:
    if len(items) > most:
        raise InvalidArgument(f"{len(items)} {field}, and {most} is the limit", field=field)


def _check_range(value: float, low: float, high: float, field: str) -> None:
    if not low <= value <= high:  # NaN fails this too
        raise InvalidArgument(f"{field} is {low:g} to {high:g}, not {value:g}", field=field)


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_SHOWN else name[: LONGEST_SHOWN - 1] + "…"
