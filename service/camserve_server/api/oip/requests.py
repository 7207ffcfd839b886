"""Conversion of ModelInferRequests: each becomes one ExplainRequest for each of its images."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from camserve.v1 import explain_pb2
from camserve.web.connect import from_tree
from camserve_server.api import codec
from camserve_server.api.codec.checks import find_known, join_names, shorten
from camserve_server.api.codec.formats import FORMATS, PROFILES
from camserve_server.api.codec.requests import DEFAULT_METHOD
from camserve_server.api.oip.replies import OUTPUTS
from camserve_server.api.oip.tensors import check_tensor_parameters
from camserve_server.api.oip.v2 import inference_pb2
from camserve_server.core.errors import InvalidArgument, NotFound, ServiceError, did_you_mean
from camserve_server.core.limits import Limits
from camserve_server.methods import METHODS
from camserve_server.models.values import KnownModel, ModelInfo

T = TypeVar("T")

Value: TypeAlias = bool | int | float | str

RESERVED = ("triton_", "binary_data")
"""Prefixes of parameters that concern the protocol itself, and that the server ignores."""

FINAL = "triton_final_response"
ASKS_FOR_FINAL = "triton_enable_empty_final_response"


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A ModelInferRequest that was read, without its images.

    Attributes:
        model: the model to explain.
        template: the ExplainRequest of every image, without the image.
        outputs: names of the requested outputs, in order.
        timeout: timeout of the request in seconds, or infinity.
    """

    model: ModelInfo
    template: explain_pb2.ExplainRequest
    outputs: tuple[str, ...]
    timeout: float

    def for_image(self, image: bytes) -> explain_pb2.ExplainRequest:
        """Return the ExplainRequest of an image."""
        request = explain_pb2.ExplainRequest(image=image)
        request.MergeFrom(self.template)
        return request


def read_infer(
    request: inference_pb2.ModelInferRequest, models: Mapping[str, KnownModel], limits: Limits
) -> InferRequest:
    """Read a request without its images. Fields that become fields of an ExplainRequest are checked there.

    Args:
        request: the request.
        models: the models of the server by name.
        limits: limits on one request.

    Raises:
        ServiceError: a field is invalid; the error names it.
    """
    codec.check_sizes(request, limits)
    model = read_version(request.model_name, request.model_version, models, "model_")
    outputs = _read_outputs(request)
    parameters = [
        _InferParameter(name, value) for name, value in request.parameters.items() if not name.startswith(RESERVED)
    ]
    template = explain_pb2.ExplainRequest(model=model.name, max_predictions=0)
    template.methods.add(name=DEFAULT_METHOD)
    template.rendering.overlay = explain_pb2.IMAGE_FORMAT_JPEG
    # The method comes first, because unknown names are parameters of the method.
    for parameter in sorted(parameters, key=lambda parameter: parameter.name != "method"):
        _WRITERS.get(parameter.name, _write_method_parameter)(template, parameter, model)
    template.rendering.heatmap = "heatmap" in outputs
    if "overlay" not in outputs:
        template.rendering.overlay = explain_pb2.IMAGE_FORMAT_UNSPECIFIED
    return InferRequest(model, template, outputs, _read_timeout(parameters))


def read_version(name: str, version: str, models: Mapping[str, KnownModel], prefix: str = "") -> ModelInfo:
    """Return a model that is ready and has the requested version.

    Args:
        name: name of the model; empty for the first model.
        version: the requested version; empty for any.
        models: the models of the server by name.
        prefix: prefix of the request's fields for name and version.

    Raises:
        NotFound: no model has this name, or it has another version.
        Unavailable: the model is being loaded, or could not be loaded.
    """
    model = codec.read_model(name, models, f"{prefix}name")
    if version not in ("", str(model.version)):
        message = f'{model.name} has the version {model.version}, and not "{shorten(version)}"'
        raise NotFound(message, field=f"{prefix}version")
    return model


def _read_outputs(request: inference_pb2.ModelInferRequest) -> tuple[str, ...]:
    for index, output in enumerate(request.outputs):
        find_known("output", output.name, OUTPUTS, "there are", f"outputs[{index}].name")
        check_tensor_parameters(output.parameters, f"outputs[{index}].parameters")
    return tuple(dict.fromkeys(output.name for output in request.outputs)) or tuple(OUTPUTS)


class _InferParameter:
    """A parameter of a request.

    Args:
        name: name of the parameter.
        message: its value.
    """

    def __init__(self, name: str, message: inference_pb2.InferParameter) -> None:
        self.name, kind = name, message.WhichOneof("parameter_choice")
        self.value: Value | None = getattr(message, kind) if kind else None

    def error(self, expected: str) -> InvalidArgument:
        """Return the error for a value that is not as expected."""
        return InvalidArgument(f"{self.name} is {expected}", field=f'parameters["{shorten(self.name)}"]')

    def text(self) -> str:
        """Return the value as a text that is not empty."""
        if not isinstance(self.value, str) or not self.value:
            raise self.error("a text")
        return self.value

    def number(self) -> float:
        """Return the value as a number. It may be a text, because some clients can send only texts."""
        if isinstance(self.value, bool | None):
            raise self.error("a number")
        try:
            return float(self.value)
        except ValueError:
            raise self.error("a number") from None

    def uint32(self) -> int:
        """Return the value as a whole number of 32 bits."""
        number = self.number()
        if not 0 <= number < 2**32 or number != int(number):
            raise self.error("a whole number, 0 or more")
        return int(number)

    def flag(self) -> bool:
        """Return the value as a bool."""
        if not isinstance(self.value, bool) and self.value not in ("true", "false"):
            raise self.error("true or false")
        return self.value in (True, "true")


def _read_timeout(parameters: list[_InferParameter]) -> float:
    """Return the timeout in seconds; infinity without one."""
    microseconds = next((parameter.uint32() for parameter in parameters if parameter.name == "timeout"), 0)
    return microseconds / 1e6 or math.inf


Writer: TypeAlias = Callable[[explain_pb2.ExplainRequest, _InferParameter, ModelInfo], None]


def _write_method(template: explain_pb2.ExplainRequest, parameter: _InferParameter, _model: ModelInfo) -> None:
    template.methods[0].name = parameter.text()


def _write_target(template: explain_pb2.ExplainRequest, parameter: _InferParameter, model: ModelInfo) -> None:
    text = parameter.text() if isinstance(parameter.value, str) else str(parameter.uint32())
    template.targets.append(_read_target(text, parameter, model))


def _write_texts(template: explain_pb2.ExplainRequest, parameter: _InferParameter, _model: ModelInfo) -> None:
    template.texts.extend(parameter.text().splitlines())


def _write_interventions(template: explain_pb2.ExplainRequest, parameter: _InferParameter, _model: ModelInfo) -> None:
    try:
        from_tree({"interventions": json.loads(parameter.text())}, template)
    except (ValueError, RecursionError) as error:
        raise parameter.error("a list of Intervention messages of camserve.v1, as JSON") from error


def _write_layer(template: explain_pb2.ExplainRequest, parameter: _InferParameter, _model: ModelInfo) -> None:
    template.layers.append(parameter.text())


def _write_flag(template: explain_pb2.ExplainRequest, parameter: _InferParameter, _model: ModelInfo) -> None:
    setattr(template.methods[0], parameter.name, parameter.flag())


def _write_input_channel(template: explain_pb2.ExplainRequest, parameter: _InferParameter, _model: ModelInfo) -> None:
    template.methods[0].per_channel = True
    template.methods[0].input_channels.append(parameter.uint32())


def _write_overlay(template: explain_pb2.ExplainRequest, parameter: _InferParameter, _model: ModelInfo) -> None:
    template.rendering.overlay = _choice(parameter, {name: value for value, name in FORMATS.items() if name})


def _write_profile(template: explain_pb2.ExplainRequest, parameter: _InferParameter, _model: ModelInfo) -> None:
    template.rendering.profile = _choice(parameter, {name: value for value, name in PROFILES.items()})


def _write_look(template: explain_pb2.ExplainRequest, parameter: _InferParameter, _model: ModelInfo) -> None:
    value = {
        "colormap": parameter.text,
        "alpha": parameter.number,
        "max_side": parameter.uint32,
        "quality": parameter.uint32,
    }[parameter.name]
    setattr(template.rendering, parameter.name, value())


def _write_nothing(_template: explain_pb2.ExplainRequest, _parameter: _InferParameter, _model: ModelInfo) -> None:
    """Do nothing, for parameters that are read elsewhere or ignored."""


_WRITERS: Mapping[str, Writer] = {
    "method": _write_method,
    "target": _write_target,
    "texts": _write_texts,
    "layer": _write_layer,
    "interventions": _write_interventions,
    "augmentation_smoothing": _write_flag,
    "eigen_smoothing": _write_flag,
    "input_channel": _write_input_channel,
    "overlay": _write_overlay,
    "colormap": _write_look,
    "alpha": _write_look,
    "max_side": _write_look,
    "quality": _write_look,
    "profile": _write_profile,
    "timeout": _write_nothing,
    "priority": _write_nothing,  # ignored: the batcher orders rows by their deadlines
}
"""Functions that write a parameter of a request into an ExplainRequest. Other names are parameters of the method."""


def _write_method_parameter(
    template: explain_pb2.ExplainRequest, parameter: _InferParameter, _model: ModelInfo
) -> None:
    """Write a parameter of the method."""
    method = METHODS.get(template.methods[0].name)
    # An unknown method is refused later, so any parameter of it is accepted here.
    known = {definition.name: definition for definition in method.parameters} if method else {parameter.name: None}
    if parameter.name not in known:
        hint = did_you_mean(parameter.name, [*_WRITERS, *known])
        own = f"; {template.methods[0].name} has {join_names(known)}" if known else ""
        raise InvalidArgument(
            f'there is no parameter "{shorten(parameter.name)}"{hint}: a request has {", ".join(_WRITERS)}{own}',
            field="parameters",
        )
    message, definition = template.methods[0].parameters[parameter.name], known[parameter.name]
    if definition and definition.choices:
        message.text = parameter.text()
    else:
        message.number = parameter.number()


def _choice(parameter: _InferParameter, among: Mapping[str, T]) -> T:
    if parameter.value not in among:
        raise parameter.error(f"one of {', '.join(among)}{did_you_mean(str(parameter.value), among)}")
    return among[str(parameter.value)]


def _read_target(text: str, parameter: _InferParameter, model: ModelInfo) -> explain_pb2.Target:
    """Read a target: "tabby", "282", "tabby vs tiger cat", "probability:tabby", "finer:tabby", "text:a tabby"."""
    kind, colon, rest = text.partition(":")
    if colon and kind == "probability":
        target = explain_pb2.Target(softmax=True)
        target.MergeFrom(_class_target(_class_name(rest, parameter)))
        return target
    if colon and kind in ("finer", "text"):
        finer = kind == "finer" and explain_pb2.Finer(why=_class_name(rest, parameter))
        return explain_pb2.Target(finer=finer) if finer else explain_pb2.Target(text=rest)
    why, separator, why_not = text.partition(" vs ")
    name = _class_name(why, parameter)
    if separator:
        contrast = explain_pb2.Contrast(why=name, why_not=_class_name(why_not, parameter))
        return explain_pb2.Target(contrast=contrast)
    if model.task == "segment":
        return explain_pb2.Target(segment=explain_pb2.Segment(class_name=name))
    if model.task == "detect":
        return explain_pb2.Target(detection=explain_pb2.Detection(class_name=name))
    return _class_target(name)


def _class_target(name: explain_pb2.ClassName) -> explain_pb2.Target:
    if name.WhichOneof("kind") == "label":
        return explain_pb2.Target(label=name.label)
    return explain_pb2.Target(class_index=name.class_index)


def _class_name(text: str, parameter: _InferParameter) -> explain_pb2.ClassName:
    text = text.strip()
    if not re.fullmatch(r"\d+", text, re.ASCII):
        return explain_pb2.ClassName(label=text)
    if len(text) > len(str(2**32)) or int(text) >= 2**32:
        raise parameter.error("a label, or a class's index")
    return explain_pb2.ClassName(class_index=int(text))


@contextmanager
def convert_fields(index: int = 0, count: int = 1) -> Iterator[None]:
    """Convert the field paths of errors in the block to those of a ModelInferRequest, and add the number of the image.

    Args:
        index: index of the image, from 0.
        count: the number of images.
    """
    try:
        yield
    except ServiceError as error:
        if error.field:
            error.field = _field(error.field)
            if error.fault:
                error.message = f"{error.field} {error.fault}"
        if count > 1:
            error.message = f"image {index + 1} of {count}: {error.message}"
        raise


_FIELDS = {
    "methods": 'parameters["method"]',
    "targets": 'parameters["target"]',
    "top_k": 'parameters["target"]',
    "layers": 'parameters["layer"]',
    "texts": 'parameters["texts"]',
    "interventions": 'parameters["interventions"]',
    "image": "inputs[0]",
    "model": "model_name",
    "name": "model_name",
    "weights": 'parameters["weights"]',
    "sha256": 'parameters["sha256"]',
}


def _field(field: str) -> str:
    """Convert the path of a field of a camserve.v1 request."""
    last = field.rpartition(".")[2]
    if field.startswith('methods[0].parameters["'):
        return field.removeprefix("methods[0].")
    if field.startswith(("methods[0].per_channel", "methods[0].input_channels")):
        return 'parameters["input_channel"]'
    if last in _WRITERS:
        return f'parameters["{last}"]'
    return _FIELDS.get(re.split(r"[.\[]", field, maxsplit=1)[0], field)
