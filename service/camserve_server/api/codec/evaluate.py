"""Requests to judge explanations, and the replies."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from camserve.v1 import evaluate_pb2, explain_pb2
from camserve_server.api.codec.checks import find_known
from camserve_server.api.codec.replies import parameter_info, parameter_messages
from camserve_server.api.codec.requests import read_order, read_parameters
from camserve_server.api.codec.sizes import check_sizes
from camserve_server.api.codec.targets import read_box
from camserve_server.core.errors import InvalidArgument, ServiceError
from camserve_server.core.limits import Limits
from camserve_server.jobs import Assessment, MetricCall
from camserve_server.methods.kinds import formula, summary
from camserve_server.metrics import METRICS, Reading
from camserve_server.models.values import KnownModel
from camserve_server.serving.requests import EvaluateRequest

DEFAULT_METRICS = ("deletion", "insertion")


def read_evaluation(
    request: evaluate_pb2.EvaluateRequest, models: Mapping[str, KnownModel], limits: Limits
) -> EvaluateRequest:
    """Check a request and resolve every name in it.

    Args:
        request: as it came.
        models: that there are; the first is the default.
        limits: on what one request may ask for.

    Raises:
        ServiceError: a field is wrong; the error names it.
    """
    check_sizes(request, limits)
    with within_explain():
        explain = read_order(request.explain, models, limits)
    box = read_box(request.box, "box") if request.HasField("box") else None
    assessment = Assessment(explain.job, _read_metrics(request.metrics), box)
    for place, call in enumerate(assessment.metrics):
        if METRICS[call.name].boxed and box is None:
            raise InvalidArgument(
                f"{call.name} needs to be told where the object is: give a box", field=f"metrics[{place}].name"
            )
    if assessment.rows > limits.rows:
        raise InvalidArgument(
            f"the request costs {assessment.rows} rows, {assessment.rows - explain.job.rows} of them for metrics, and "
            f"{limits.rows} is the limit: ask for fewer methods, metrics, steps or samples",
            field="metrics",
        )
    return EvaluateRequest(explain, assessment)


@contextmanager
def within_explain() -> Iterator[None]:
    """Say of errors in the block that their field lies in `explain`."""
    try:
        yield
    except ServiceError as error:
        if error.field:
            error.field = f"explain.{error.field}"
        raise


def _read_metrics(metrics: Sequence[evaluate_pb2.Metric]) -> tuple[MetricCall, ...]:
    wanted = metrics or [evaluate_pb2.Metric(name=name) for name in DEFAULT_METRICS]
    return tuple(_read_metric(metric, f"metrics[{place}]") for place, metric in enumerate(wanted))


def _read_metric(message: evaluate_pb2.Metric, field: str) -> MetricCall:
    metric = find_known("metric", message.name, METRICS, "there are", f"{field}.name")
    values = read_parameters(message.name, message.parameters, metric.parameters, f"{field}.parameters")
    return MetricCall(message.name, values)


def evaluate_response(
    request: EvaluateRequest, explained: explain_pb2.ExplainResponse, readings: Sequence[Sequence[Reading]]
) -> evaluate_pb2.EvaluateResponse:
    """Encode the reply to a request; the caller sets its id.

    Args:
        request: says which metrics were evaluated.
        explained: the encoded explanations.
        readings: for each explanation, one of each metric.
    """
    return evaluate_pb2.EvaluateResponse(
        explained=explained,
        readings=[
            _reading(place, call, one)
            for place, row in enumerate(readings)
            for call, one in zip(request.assessment.metrics, row, strict=True)
        ],
    )


def _reading(explanation: int, call: MetricCall, reading: Reading) -> evaluate_pb2.Reading:
    return evaluate_pb2.Reading(
        explanation=explanation,
        metric=call.name,
        value=reading.value,
        higher_is_better=METRICS[call.name].higher_is_better,
        message=reading.words,
        curves=[evaluate_pb2.Curve(name=one.name, x=one.x, y=one.y) for one in reading.curves],
        parameters=parameter_messages(call.parameters),
    )


def describe_metric(name: str) -> evaluate_pb2.MetricInfo:
    """Describe the metric of that name."""
    metric = METRICS[name]
    defaults = {parameter.name: parameter.default for parameter in metric.parameters}
    return evaluate_pb2.MetricInfo(
        name=name,
        summary=summary(metric),
        formula=formula(metric),
        paper=metric.paper,
        parameters=[parameter_info(parameter) for parameter in metric.parameters],
        rows=metric.rows(defaults, 1, 1),
        higher_is_better=metric.higher_is_better,
        needs_box=metric.boxed,
        repeats=metric.repeats,
    )
