"""A ModelInferRequest, checked: for each of its images a request as our own API has them."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from camserve.v1 import explain_pb2
from camserve_server.api import codec
from camserve_server.api.codec.checks import find_known, listed, short
from camserve_server.api.codec.formats import FORMATS, PROFILES
from camserve_server.api.codec.requests import DEFAULT_METHOD
from camserve_server.api.oip.replies import OUTPUTS
from camserve_server.api.oip.tensors import check_plain
from camserve_server.api.oip.v2 import inference_pb2
from camserve_server.core.errors import InvalidArgument, NotFound, ServiceError, did_you_mean
from camserve_server.core.limits import Limits
from camserve_server.methods import METHODS
from camserve_server.models.values import KnownModel, ModelInfo

T = TypeVar("T")

Value: TypeAlias = bool | int | float | str

RESERVED = ("triton_", "binary_data")
"""How the names of parameters begin by which clients speak of a protocol itself: ours to ignore."""

FINAL = "triton_final_response"
ASKS_FOR_FINAL = "triton_enable_empty_final_response"


@dataclass(frozen=True, slots=True)
class Asked:
    """A message, read, but for its images.

    Attributes:
        model: that it is for.
        question: the request to explain, without an image.
        outputs: their names, in the order in which they are wanted.
        seconds: that it may take, or infinity.
    """

    model: ModelInfo
    question: explain_pb2.ExplainRequest
    outputs: tuple[str, ...]
    seconds: float

    def about(self, image: bytes) -> explain_pb2.ExplainRequest:
        """Return the request to explain an image."""
        request = explain_pb2.ExplainRequest(image=image)
        request.MergeFrom(self.question)
        return request


def read_infer(request: inference_pb2.ModelInferRequest, models: Mapping[str, KnownModel], limits: Limits) -> Asked:
    """Check a message, but for its images and what the request to explain is checked for anyway.

    Args:
        request: as it came.
        models: that there are.
        limits: on what one request may ask for.

    Raises:
        ServiceError: a field is wrong; the error names it.
    """
    codec.check_sizes(request, limits)
    model = read_version(request.model_name, request.model_version, models, "model_")
    outputs = _read_outputs(request)
    given = [_Given(name, value) for name, value in request.parameters.items() if not name.startswith(RESERVED)]
    question = explain_pb2.ExplainRequest(model=model.name, max_predictions=0)
    question.methods.add(name=DEFAULT_METHOD)
    question.rendering.overlay = explain_pb2.IMAGE_FORMAT_JPEG
    for one in sorted(given, key=lambda one: one.name != "method"):  # whose parameters some of the others are
        _WRITERS.get(one.name, _write_own)(question, one, model)
    question.rendering.heatmap = "heatmap" in outputs
    if "overlay" not in outputs:
        question.rendering.overlay = explain_pb2.IMAGE_FORMAT_UNSPECIFIED
    return Asked(model, question, outputs, _read_timeout(given))


def read_version(name: str, version: str, models: Mapping[str, KnownModel], prefix: str = "") -> ModelInfo:
    """Return the model of that name, if that is the version that answers.

    Args:
        name: of the model; nothing for the first.
        version: that is wanted; nothing for any.
        models: that there are.
        prefix: of the fields in the request.

    Raises:
        NotFound: there is no such model, or another version answers.
        Unavailable: it is being loaded, or could not be.
    """
    model = codec.read_model(name, models, f"{prefix}name")
    if version not in ("", str(model.version)):
        words = f'{model.name} has the version {model.version}, and not "{short(version)}"'
        raise NotFound(words, field=f"{prefix}version")
    return model


def _read_outputs(request: inference_pb2.ModelInferRequest) -> tuple[str, ...]:
    for place, output in enumerate(request.outputs):
        find_known("output", output.name, OUTPUTS, "there are", f"outputs[{place}].name")
        check_plain(output.parameters, f"outputs[{place}].parameters")
    return tuple(dict.fromkeys(output.name for output in request.outputs)) or tuple(OUTPUTS)


class _Given:
    """A parameter that was given.

    Args:
        name: of it.
        message: its value.
    """

    def __init__(self, name: str, message: inference_pb2.InferParameter) -> None:
        self.name, kind = name, message.WhichOneof("parameter_choice")
        self.value: Value | None = getattr(message, kind) if kind else None

    def bad(self, what: str) -> InvalidArgument:
        """Return the refusal of a value that is not what it should be."""
        return InvalidArgument(f"{self.name} is {what}", field=f'parameters["{short(self.name)}"]')

    def text(self) -> str:
        """Return a text."""
        if not isinstance(self.value, str) or not self.value:
            raise self.bad("a text")
        return self.value

    def number(self) -> float:
        """Return a number; clients that can send texts alone may write it."""
        if isinstance(self.value, bool | None):
            raise self.bad("a number")
        try:
            return float(self.value)
        except ValueError:
            raise self.bad("a number") from None

    def whole(self) -> int:
        """Return a whole number that fits the wire."""
        number = self.number()
        if not 0 <= number < 2**32 or number != int(number):
            raise self.bad("a whole number, 0 or more")
        return int(number)

    def flag(self) -> bool:
        """Return true or false."""
        if not isinstance(self.value, bool) and self.value not in ("true", "false"):
            raise self.bad("true or false")
        return self.value in (True, "true")


def _read_timeout(given: list[_Given]) -> float:
    microseconds = next((one.whole() for one in given if one.name == "timeout"), 0)
    return microseconds / 1e6 or math.inf


Writer: TypeAlias = Callable[[explain_pb2.ExplainRequest, _Given, ModelInfo], None]


def _write_method(question: explain_pb2.ExplainRequest, given: _Given, _model: ModelInfo) -> None:
    question.methods[0].name = given.text()


def _write_target(question: explain_pb2.ExplainRequest, given: _Given, model: ModelInfo) -> None:
    text = given.text() if isinstance(given.value, str) else str(given.whole())
    question.targets.append(_read_target(text, given, model))


def _write_layer(question: explain_pb2.ExplainRequest, given: _Given, _model: ModelInfo) -> None:
    question.layers.append(given.text())


def _write_flag(question: explain_pb2.ExplainRequest, given: _Given, _model: ModelInfo) -> None:
    setattr(question.methods[0], given.name, given.flag())


def _write_overlay(question: explain_pb2.ExplainRequest, given: _Given, _model: ModelInfo) -> None:
    question.rendering.overlay = _named(given, {name: value for value, name in FORMATS.items() if name})


def _write_profile(question: explain_pb2.ExplainRequest, given: _Given, _model: ModelInfo) -> None:
    question.rendering.profile = _named(given, {name: value for value, name in PROFILES.items()})


def _write_look(question: explain_pb2.ExplainRequest, given: _Given, _model: ModelInfo) -> None:
    value = {"colormap": given.text, "alpha": given.number, "max_side": given.whole, "quality": given.whole}[given.name]
    setattr(question.rendering, given.name, value())


def _write_nothing(_question: explain_pb2.ExplainRequest, _given: _Given, _model: ModelInfo) -> None:
    """Leave it to another, or to nobody."""


_WRITERS: Mapping[str, Writer] = {
    "method": _write_method,
    "target": _write_target,
    "layer": _write_layer,
    "augmentation_smoothing": _write_flag,
    "eigen_smoothing": _write_flag,
    "overlay": _write_overlay,
    "colormap": _write_look,
    "alpha": _write_look,
    "max_side": _write_look,
    "quality": _write_look,
    "profile": _write_profile,
    "timeout": _write_nothing,
    "priority": _write_nothing,  # rows are taken by their deadlines
}
"""The parameters of a request; any other is one of its method."""


def _write_own(question: explain_pb2.ExplainRequest, given: _Given, _model: ModelInfo) -> None:
    """Write a parameter of the method."""
    method = METHODS.get(question.methods[0].name)
    takes = {one.name: one for one in method.parameters} if method else {given.name: None}  # else the method is refused
    if given.name not in takes:
        hint = did_you_mean(given.name, [*_WRITERS, *takes])
        own = f"; {question.methods[0].name} has {listed(takes)}" if takes else ""
        raise InvalidArgument(
            f'there is no parameter "{short(given.name)}"{hint}: a request has {", ".join(_WRITERS)}{own}',
            field="parameters",
        )
    parameter = question.methods[0].parameters[given.name]
    if (one := takes[given.name]) and one.choices:
        parameter.text = given.text()
    else:
        parameter.number = given.number()


def _named(given: _Given, among: Mapping[str, T]) -> T:
    if given.value not in among:
        raise given.bad(f"one of {', '.join(among)}{did_you_mean(str(given.value), among)}")
    return among[str(given.value)]


def _read_target(text: str, given: _Given, model: ModelInfo) -> explain_pb2.Target:
    """Read a target as it is written: "tabby", "282", "tabby vs tiger cat", "probability:tabby", "finer:tabby"."""
    kind, colon, rest = text.partition(":")
    if colon and kind == "probability":
        target = explain_pb2.Target(softmax=True)
        target.MergeFrom(_plain(_class_name(rest, given)))
        return target
    if colon and kind == "finer":
        return explain_pb2.Target(finer=explain_pb2.Finer(why=_class_name(rest, given)))
    why, against, why_not = text.partition(" vs ")
    name = _class_name(why, given)
    if against:
        contrast = explain_pb2.Contrast(why=name, why_not=_class_name(why_not, given))
        return explain_pb2.Target(contrast=contrast)
    if model.task == "segment":
        return explain_pb2.Target(segment=explain_pb2.Segment(class_name=name))
    if model.task == "detect":
        return explain_pb2.Target(detection=explain_pb2.Detection(class_name=name))
    return _plain(name)


def _plain(name: explain_pb2.ClassName) -> explain_pb2.Target:
    if name.WhichOneof("kind") == "label":
        return explain_pb2.Target(label=name.label)
    return explain_pb2.Target(class_index=name.class_index)


def _class_name(text: str, given: _Given) -> explain_pb2.ClassName:
    text = text.strip()
    if not re.fullmatch(r"\d+", text, re.ASCII):
        return explain_pb2.ClassName(label=text)
    if len(text) > len(str(2**32)) or int(text) >= 2**32:
        raise given.bad("a label, or a class's index")
    return explain_pb2.ClassName(class_index=int(text))


@contextmanager
def fields_named(place: int = 0, count: int = 1) -> Iterator[None]:
    """Say of errors in the block which field of a ModelInferRequest is at fault, and which image.

    Args:
        place: of the image, from 0.
        count: how many there are.
    """
    try:
        yield
    except ServiceError as error:
        if error.field:
            error.field = _field(error.field)
            if error.fault:
                error.message = f"{error.field} {error.fault}"
        if count > 1:
            error.message = f"image {place + 1} of {count}: {error.message}"
        raise


_FIELDS = {
    "methods": 'parameters["method"]',
    "targets": 'parameters["target"]',
    "top_k": 'parameters["target"]',
    "layers": 'parameters["layer"]',
    "image": "inputs[0]",
    "model": "model_name",
    "name": "model_name",
    "weights": 'parameters["weights"]',
    "sha256": 'parameters["sha256"]',
}


def _field(field: str) -> str:
    """Return what a field of a request of our own API is in one of this."""
    last = field.rpartition(".")[2]
    if field.startswith('methods[0].parameters["'):
        return field.removeprefix("methods[0].")
    if last in _WRITERS:
        return f'parameters["{last}"]'
    return _FIELDS.get(re.split(r"[.\[]", field, maxsplit=1)[0], field)
