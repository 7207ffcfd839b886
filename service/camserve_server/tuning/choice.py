"""Choose settings from measurements; pure functions."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from camserve_server.core.errors import ConfigError
from camserve_server.tuning.survey import MIN_GAIN, Measurement, Survey

Candidate = tuple[int, int]
"""Settings that apply to all models: the maximum of images in a batch, and the number of threads."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen settings.

    Attributes:
        batch: maximum of images in a batch.
        threads: number of threads.
        measurements: measurement of each model with these settings, in its chosen precision.
        reason: explanation for the operator.
    """

    batch: int
    threads: int
    measurements: Mapping[str, Measurement]
    reason: str


def choose(
    survey: Survey, precisions: Mapping[str, str], max_batch_seconds: float, *, any_precision: bool = False
) -> Choice:
    """Choose the settings that are best for the model which they slow down most, relative to that model's best speed.

    Among settings within 5 % of the best, the smallest batches win, as they have the shortest latency.

    Args:
        survey: the measurements.
        precisions: precision of each model by name.
        max_batch_seconds: time limit of a batch, if any batch is within it.
        any_precision: True to allow a faster precision. Accuracy is not traded for speed by default.

    Raises:
        ConfigError: no settings were measured with every model.
    """
    candidates = _fastest_by_candidate(
        measurement
        for measurement in survey.measurements
        if any_precision or measurement.variant.precision == precisions[measurement.variant.model]
    )
    complete = {candidate: models for candidate, models in candidates.items() if len(models) == len(precisions)}
    if not complete:
        raise ConfigError("there was no time to measure every model: allow more seconds")
    within_limit = [candidate for candidate, models in complete.items() if _longest(models) <= max_batch_seconds]
    allowed = within_limit or [min(complete, key=lambda candidate: _longest(complete[candidate]))]
    competitors = [complete[candidate] for candidate in allowed]
    scores = {candidate: _score(complete[candidate], competitors) for candidate in allowed}
    threshold = max(scores.values()) / MIN_GAIN
    good = (candidate for candidate in allowed if scores[candidate] >= threshold)
    batch, threads = min(good, key=lambda candidate: (candidate[0], -scores[candidate]))
    chosen = complete[batch, threads]
    reason = (
        _batch_reason((batch, threads), complete, max_batch_seconds)
        if within_limit
        else _slow_reason(chosen, max_batch_seconds)
    )
    settings = f"{_count(batch, 'image')} per batch and {_count(threads, 'thread')}"
    return Choice(batch, threads, chosen, f"{settings}: {reason}")


def _fastest_by_candidate(measurements: Iterable[Measurement]) -> dict[Candidate, dict[str, Measurement]]:
    """Return the fastest measurement of each model for all candidates."""
    candidates: dict[Candidate, dict[str, Measurement]] = defaultdict(dict)
    for measurement in measurements:
        name = measurement.variant.model
        models = candidates[measurement.batch, measurement.variant.threads]
        if name not in models or measurement.rate > models[name].rate:
            models[name] = measurement
    return candidates


def _longest(models: Mapping[str, Measurement]) -> float:
    return max(measurement.seconds for measurement in models.values())


def _score(models: Mapping[str, Measurement], competitors: Iterable[Mapping[str, Measurement]]) -> float:
    """Return the smallest share of its own best speed that any model reaches."""
    others = list(competitors)
    return min(measurement.rate / max(other[name].rate for other in others) for name, measurement in models.items())


def _batch_reason(
    candidate: Candidate, candidates: Mapping[Candidate, Mapping[str, Measurement]], max_batch_seconds: float
) -> str:
    batch, threads = candidate
    if (larger := candidates.get((2 * batch, threads))) is None:
        return "larger batches were not measured"
    if (duration := _longest(larger)) > max_batch_seconds:
        return f"{2 * batch} would take {_milliseconds(duration)}, and the limit is {_milliseconds(max_batch_seconds)}"
    gain = max(measurement.rate / candidates[candidate][name].rate for name, measurement in larger.items()) - 1
    return f"{2 * batch} would be {gain:.0%} faster" if gain > 0 else f"{2 * batch} would not be faster"


def _slow_reason(models: Mapping[str, Measurement], max_batch_seconds: float) -> str:
    duration, limit = _milliseconds(_longest(models)), _milliseconds(max_batch_seconds)
    return f"a batch takes {duration}, and no measured batch takes less than {limit}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
