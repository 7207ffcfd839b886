"""Codec of Evaluate and ListMetrics."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from camserve.v1 import evaluate_pb2, explain_pb2
from camserve_server.api.codec.checks import find_known
from camserve_server.api.codec.replies import parameter_info, parameter_messages
from camserve_server.api.codec.requests import read_explanation, read_parameters
from camserve_server.api.codec.sizes import check_sizes
from camserve_server.api.codec.targets import read_box
from camserve_server.core.errors import FailedPrecondition, InvalidArgument, ServiceError
from camserve_server.core.limits import Limits
from camserve_server.jobs import EvaluationJob, Job, MetricCall
from camserve_server.methods.kinds import formula, summary
from camserve_server.metrics import METRICS, Reading
from camserve_server.models.values import KnownModel
from camserve_server.serving.requests import EvaluateRequest

DEFAULT_METRICS = ("deletion", "insertion")


def read_evaluation(
    request: evaluate_pb2.EvaluateRequest, models: Mapping[str, KnownModel], limits: Limits
) -> EvaluateRequest:
    """Check a request and resolve its names.

    Args:
        request: the request.
        models: the models of the server by name; the first is the default.
        limits: limits on one request.

    Raises:
        ServiceError: a field is invalid; the error names it.
    """
    check_sizes(request, limits)
    with within_explain():
        explain = read_explanation(request.explain, models, limits)
        _check_whole(explain.job)
    box = read_box(request.box, "box") if request.HasField("box") else None
    assessment = EvaluationJob(explain.job, _read_metrics(request.metrics), box)
    for index, call in enumerate(assessment.metrics):
        if METRICS[call.name].boxed and box is None:
            message = f"{call.name} compares the map with the object's place: set box to the box around the object"
            raise InvalidArgument(message, field=f"metrics[{index}].name")
    if assessment.rows > limits.rows:
        raise InvalidArgument(
            f"the request costs {assessment.rows} rows, {assessment.rows - explain.job.rows} of them for metrics, and "
            f"{limits.rows} is the limit: ask for fewer methods, metrics, steps or samples",
            field="metrics",
        )
    return EvaluateRequest(explain, assessment)


def _check_whole(job: Job) -> None:
    """Refuse maps of single channels: metrics change all channels of a pixel, or compare with maps that do."""
    for index, call in enumerate(job.calls):
        if call.input_channels:
            reason = "metrics change all channels of a pixel, and so evaluate maps of all channels"
            raise FailedPrecondition(reason, field=f"methods[{index}].per_channel")


@contextmanager
def within_explain() -> Iterator[None]:
    """Prefix the field paths of errors in the block with `explain.`."""
    try:
        yield
    except ServiceError as error:
        if error.field:
            error.field = f"explain.{error.field}"
        raise


def _read_metrics(metrics: Sequence[evaluate_pb2.Metric]) -> tuple[MetricCall, ...]:
    metrics = metrics or [evaluate_pb2.Metric(name=name) for name in DEFAULT_METRICS]
    return tuple(_read_metric(metric, f"metrics[{index}]") for index, metric in enumerate(metrics))


def _read_metric(message: evaluate_pb2.Metric, field: str) -> MetricCall:
    metric = find_known("metric", message.name, METRICS, "there are", f"{field}.name")
    values = read_parameters(message.name, message.parameters, metric.parameters, f"{field}.parameters")
    return MetricCall(message.name, values)


def evaluate_response(
    request: EvaluateRequest, explained: explain_pb2.ExplainResponse, readings: Sequence[Sequence[Reading]]
) -> evaluate_pb2.EvaluateResponse:
    """Encode the response to a request; the caller sets its id.

    Args:
        request: the request, which names the metrics.
        explained: the encoded explanations.
        readings: for each explanation, the reading of each metric.
    """
    return evaluate_pb2.EvaluateResponse(
        explained=explained,
        readings=[
            _reading(explanation, call, reading)
            for explanation, row in enumerate(readings)
            for call, reading in zip(request.assessment.metrics, row, strict=True)
        ],
    )


def _reading(explanation: int, call: MetricCall, reading: Reading) -> evaluate_pb2.Reading:
    return evaluate_pb2.Reading(
        explanation=explanation,
        metric=call.name,
        value=reading.value,
        higher_is_better=METRICS[call.name].higher_is_better,
        message=reading.words,
        curves=[evaluate_pb2.Curve(name=curve.name, x=curve.x, y=curve.y) for curve in reading.curves],
        parameters=parameter_messages(call.parameters),
    )


def describe_metric(name: str) -> evaluate_pb2.MetricInfo:
    """Describe a metric."""
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
