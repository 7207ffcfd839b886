"""Encode requests for explanations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard, cast

from camserve._codec.images import image_bytes
from camserve._codec.interventions import encode_interventions
from camserve._codec.parameters import encode_parameter
from camserve._codec.rendering import encode_rendering
from camserve._codec.targets import encode_target
from camserve._core.checks import check_range, indices, invalid, look_up
from camserve._core.errors import InvalidArgument
from camserve._values.methods import Method
from camserve._values.options import ExplainArguments, MethodLike
from camserve._values.targets import as_iterable
from camserve.v1 import explain_pb2

ExplainRequest: TypeAlias = explain_pb2.ExplainRequest

_FUSIONS: Mapping[str | None, explain_pb2.Fusion.ValueType] = {
    None: explain_pb2.FUSION_UNSPECIFIED,
    "mean": explain_pb2.FUSION_MEAN,
    "max": explain_pb2.FUSION_MAX,
    "product": explain_pb2.FUSION_PRODUCT,
    "sum": explain_pb2.FUSION_SUM,
}
_FUSION_NAMES = {number: name for name, number in _FUSIONS.items() if name}
MAX_PREDICTIONS = 1000


def explain_request(**options: Any) -> explain_pb2.ExplainRequest:
    """Return a request without its image.

    Args:
        **options: The options: see ``ExplainOptions``.

    Raises:
        InvalidArgument: An option is out of range or has the wrong type.
        TypeError: There is no such option.
    """
    arguments = ExplainArguments(**options)
    try:
        check_range("top_k", arguments.top_k, 1, 16)
        check_range("max_predictions", arguments.max_predictions, 0, MAX_PREDICTIONS)
        return _encode(arguments)
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidArgument(f"an option has the wrong type: {error}") from error


def _encode(options: ExplainArguments) -> explain_pb2.ExplainRequest:
    return explain_pb2.ExplainRequest(
        model=options.model or "",
        methods=[_encode_method(method) for method in _methods_as_sequence(options.methods)],
        targets=[
            encode_target(target, f"targets[{index}]", image_bytes)
            for index, target in enumerate(as_iterable(options.targets))
        ],
        top_k=options.top_k,
        layers=[options.layers] if isinstance(options.layers, str) else options.layers or (),
        rendering=encode_rendering(options),
        max_predictions=options.max_predictions,
        fusion=look_up(_FUSIONS, options.fusion, "fusion"),
        class_map=options.class_map,
        texts=texts_of(options.texts),
        value_range=range_of(options.value_range),
        interventions=encode_interventions(options.interventions),
    )


def cost_request(**options: Any) -> explain_pb2.EstimateCostRequest:
    """Return the request for the cost of a request; options and errors are those of ``explain_request``."""
    return explain_pb2.EstimateCostRequest(explain=explain_request(**options))


def range_of(values: tuple[float, float] | None) -> explain_pb2.ValueRange | None:
    """Return a range of values as a message.

    Raises:
        InvalidArgument: It is not two numbers, the smaller one first.
    """
    if values is None:
        return None
    low, high = values
    if not low < high:
        raise invalid("value_range", f"{low} is not below {high}")
    return explain_pb2.ValueRange(minimum=low, maximum=high)


def texts_of(texts: object) -> list[str]:
    """Return the texts of a request as a list.

    Raises:
        InvalidArgument: They are one string, whose letters would be the texts, or they are not strings.
    """
    if isinstance(texts, str):
        raise invalid("texts", f"they must be a list of strings, such as [{texts!r}]")
    listed: list[str] = []
    for index, text in enumerate(cast("Iterable[object]", texts)):
        if not isinstance(text, str):
            raise invalid(f"texts[{index}]", f"it must be a str, not {type(text).__name__}")
        listed.append(text)
    return listed


def fusion_name(number: explain_pb2.Fusion.ValueType) -> str | None:
    """Return the name of a fusion; None for no fusion."""
    return _FUSION_NAMES.get(number)


def with_image(template: explain_pb2.ExplainRequest, image: object) -> explain_pb2.ExplainRequest:
    """Return a copy of a request, with an image.

    Raises:
        InvalidArgument: The image cannot be read, or is not an image.
    """
    request = explain_pb2.ExplainRequest(image=image_bytes(image))
    request.MergeFrom(template)
    return request


def _methods_as_sequence(methods: MethodLike | Sequence[MethodLike]) -> Sequence[MethodLike]:
    if isinstance(methods, str | Method) or _is_name_with_parameters(methods):
        return (methods,)
    return cast("Sequence[MethodLike]", methods)


def _is_name_with_parameters(value: Sequence[object]) -> TypeGuard[tuple[str, Mapping[str, float | str]]]:
    # A tuple of two names is two methods.
    return isinstance(value, tuple) and bool(value) and isinstance(value[-1], Mapping)


def _encode_method(value: MethodLike) -> explain_pb2.Method:
    if isinstance(value, str):
        return explain_pb2.Method(name=value)
    method = value if isinstance(value, Method) else Method(*value)
    parameters = {name: encode_parameter(name, number_or_text) for name, number_or_text in method.parameters.items()}
    channels = () if isinstance(method.per_channel, bool) else indices(method.per_channel, "methods.per_channel")
    return explain_pb2.Method(
        name=method.name,
        parameters=parameters,
        augmentation_smoothing=method.augmentation_smoothing,
        eigen_smoothing=method.eigen_smoothing,
        per_channel=method.per_channel is True or bool(channels),
        input_channels=channels,
    )
