"""Encode metrics, and decode evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from camserve._codec.parameters import decode_parameter, decode_parameter_info, encode_parameter
from camserve._codec.results import decode_result
from camserve._codec.targets import encode_box
from camserve._core.errors import Internal, InvalidArgument
from camserve._values.evaluation import Curve, Evaluation, Metric, MetricInfo, MetricLike, Reading
from camserve.v1 import evaluate_pb2, explain_pb2

if TYPE_CHECKING:
    from camserve._values.result import Result
    from camserve._values.targets import BoxLike

_MAX_METRICS = 16  # of a request


def evaluation_request(
    question: explain_pb2.ExplainRequest, metrics: MetricLike | Sequence[MetricLike], box: BoxLike | None
) -> evaluate_pb2.EvaluateRequest:
    """Return the request for an evaluation.

    Raises:
        InvalidArgument: A metric or the box has the wrong type.
    """
    try:
        return evaluate_pb2.EvaluateRequest(
            explain=question,
            metrics=[_encode_metric(metric_like) for metric_like in _to_sequence(metrics)],
            box=None if box is None else encode_box(box, "box"),
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidArgument(f"an option is of a wrong kind: {error}") from error


def _to_sequence(metrics: MetricLike | Sequence[MetricLike]) -> Sequence[MetricLike]:
    if isinstance(metrics, str | Metric):
        return (metrics,)
    if isinstance(metrics, tuple) and metrics and isinstance(metrics[-1], Mapping):
        return (cast("tuple[str, Mapping[str, float | str]]", metrics),)
    return cast("Sequence[MetricLike]", metrics)


def _encode_metric(metric_like: MetricLike) -> evaluate_pb2.Metric:
    if isinstance(metric_like, str):
        return evaluate_pb2.Metric(name=metric_like)
    metric = metric_like if isinstance(metric_like, Metric) else Metric(*metric_like)
    parameters = {name: encode_parameter(name, value, "metrics") for name, value in metric.parameters.items()}
    return evaluate_pb2.Metric(name=metric.name, parameters=parameters)


def decode_evaluation(response: evaluate_pb2.EvaluateResponse) -> Evaluation:
    """Decode the response of an evaluation.

    Raises:
        Internal: A reading is invalid, or the readings do not have the order of ``Evaluation.readings``.
    """
    explained = decode_result(response.explained)
    _check_order(response.readings, len(explained.explanations))
    return Evaluation(explained, tuple(_decode_reading(reading, explained) for reading in response.readings))


def _check_order(readings: Sequence[evaluate_pb2.Reading], explanations: int) -> None:
    metrics, left = divmod(len(readings), explanations) if explanations else (0, len(readings))
    if metrics > _MAX_METRICS:
        raise Internal("the server sent more readings than a request can ask for")
    row = [(reading.metric, reading.higher_is_better) for reading in readings[:metrics]]
    expected = [(index, *column) for index in range(explanations) for column in row]
    found = [(reading.explanation, reading.metric, reading.higher_is_better) for reading in readings]
    if left or found != expected:
        raise Internal("the server did not evaluate every explanation by the same metrics, in their order")


def _decode_reading(message: evaluate_pb2.Reading, explained: Result) -> Reading:
    if not all(len(curve.x) == len(curve.y) and all(0 <= x <= 1 for x in curve.x) for curve in message.curves):
        raise Internal("the server sent an invalid curve")
    return Reading(
        explanation=explained.explanations[message.explanation],
        metric=message.metric,
        value=message.value,
        higher_is_better=message.higher_is_better,
        message=message.message,
        curves=tuple(Curve(curve.name, tuple(curve.x), tuple(curve.y)) for curve in message.curves),
        parameters={name: decode_parameter(value) for name, value in message.parameters.items()},
    )


def decode_metric(message: evaluate_pb2.MetricInfo) -> MetricInfo:
    """Decode the description of a metric."""
    return MetricInfo(
        name=message.name,
        summary=message.summary,
        formula=message.formula,
        paper=message.paper,
        parameters=tuple(map(decode_parameter_info, message.parameters)),
        rows=message.rows,
        higher_is_better=message.higher_is_better,
        needs_box=message.needs_box,
        repeats=message.repeats,
    )


def metrics_request() -> evaluate_pb2.ListMetricsRequest:
    """Return the request for the descriptions of all metrics."""
    return evaluate_pb2.ListMetricsRequest()
