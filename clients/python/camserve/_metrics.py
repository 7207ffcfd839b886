"""Metrics to protobuf, and readings to values: pure, so that both clients share it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

from camserve import _codec
from camserve._errors import Internal, InvalidArgument
from camserve._evaluation import Curve, Evaluation, Metric, MetricInfo, Reading
from camserve._picture import Box
from camserve.v1 import evaluate_pb2, explain_pb2

if TYPE_CHECKING:
    from camserve._result import Result
    from camserve._targets import BoxLike

MetricLike: TypeAlias = "str | Metric | tuple[str, Mapping[str, float | str]]"

EDGES = 4


def request(
    question: explain_pb2.ExplainRequest, metrics: MetricLike | Sequence[MetricLike], box: BoxLike | None
) -> evaluate_pb2.EvaluateRequest:
    """Return the request, its image not yet in it.

    Raises:
        InvalidArgument: A metric or the box is of a wrong kind.
    """
    try:
        return evaluate_pb2.EvaluateRequest(
            explain=question,
            metrics=[_metric(each) for each in _several(metrics)],
            box=None if box is None else _box(box),
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidArgument(f"an option is of a wrong kind: {error}") from error


def _several(given: MetricLike | Sequence[MetricLike]) -> Sequence[MetricLike]:
    if isinstance(given, str | Metric):
        return (given,)
    if isinstance(given, tuple) and given and isinstance(given[-1], Mapping):
        return (cast("tuple[str, Mapping[str, float | str]]", given),)
    return cast("Sequence[MetricLike]", given)


def _metric(given: MetricLike) -> evaluate_pb2.Metric:
    if isinstance(given, str):
        return evaluate_pb2.Metric(name=given)
    metric = given if isinstance(given, Metric) else Metric(*given)
    parameters = {name: _codec.parameter(name, each, "metrics") for name, each in metric.parameters.items()}
    return evaluate_pb2.Metric(name=metric.name, parameters=parameters)


def _box(given: BoxLike) -> explain_pb2.Box:
    edges = (given.left, given.top, given.right, given.bottom) if isinstance(given, Box) else tuple(given)
    if len(edges) != EDGES:
        reason = f"a box is left, top, right, bottom, not {len(edges)} numbers"
        raise InvalidArgument(f"box: {reason}", fields={"box": reason})
    left, top, right, bottom = edges
    return explain_pb2.Box(left=left, top=top, right=right, bottom=bottom)


def evaluation(response: evaluate_pb2.EvaluateResponse) -> Evaluation:
    """Read a response.

    Raises:
        Internal: It judges an explanation that it does not have, or a reading is invalid.
    """
    explained = _codec.result(response.explained)
    if len(response.readings) % max(1, len(explained.explanations)):
        raise Internal("the server did not judge every explanation by the same metrics")
    return Evaluation(explained, tuple(_reading(each, explained) for each in response.readings))


def _reading(said: evaluate_pb2.Reading, explained: Result) -> Reading:
    if said.explanation >= len(explained.explanations):
        raise Internal("the server judged an explanation that it did not send")
    if not all(len(each.x) == len(each.y) and all(0 <= x <= 1 for x in each.x) for each in said.curves):
        raise Internal("the server sent an invalid curve")
    return Reading(
        explanation=explained.explanations[said.explanation],
        metric=said.metric,
        value=said.value,
        higher_is_better=said.higher_is_better,
        message=said.message,
        curves=tuple(Curve(each.name, tuple(each.x), tuple(each.y)) for each in said.curves),
        parameters={name: _codec.value(each) for name, each in said.parameters.items()},
    )


def metric(said: evaluate_pb2.MetricInfo) -> MetricInfo:
    """Read the description of a metric."""
    return MetricInfo(
        name=said.name,
        summary=said.summary,
        formula=said.formula,
        paper=said.paper,
        parameters=tuple(map(_codec.parameter_info, said.parameters)),
        rows=said.rows,
        higher_is_better=said.higher_is_better,
        needs_box=said.needs_box,
        repeats=said.repeats,
    )
