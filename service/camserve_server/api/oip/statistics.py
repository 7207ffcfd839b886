"""Statistics of inferences: their numbers, and the time spent in each stage."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from camserve.v1 import explain_pb2
from camserve_server.api.oip.v2 import inference_pb2
from camserve_server.models.values import ModelInfo


@dataclass(slots=True)
class _VersionStatistics:
    """Statistics of one version of a model.

    Attributes:
        version: number of the version.
        message: the statistics as protobuf.
        batches: number of batches, the sum of each inference's share of its batch.
    """

    version: int
    message: inference_pb2.ModelStatistics = field(default_factory=inference_pb2.ModelStatistics)
    batches: float = 0.0


class Statistics:
    """Statistics of the latest version of each model. Used on one event loop."""

    def __init__(self) -> None:
        self._by_model: dict[str, _VersionStatistics] = {}

    def of(self, model: ModelInfo) -> inference_pb2.ModelStatistics:
        """Return the statistics of a version of a model since it was loaded; empty if it was replaced."""
        current = self._current(model)
        return current.message if current else _empty_statistics(model)

    def count_success(self, model: ModelInfo, seconds: float, responses: Sequence[explain_pb2.ExplainResponse]) -> None:
        """Count a request that was answered.

        Args:
            model: the model that was explained.
            seconds: duration of the request.
            responses: the response for each image.
        """
        current, timings = self._current(model), [response.timing for response in responses]
        if current is None:
            return
        current.batches += sum(1 / max(1, timing.batch_rows) for timing in timings)
        message, stats = current.message, current.message.inference_stats
        message.last_inference = round(1e3 * time.time())
        message.inference_count += len(responses)
        message.execution_count = max(1, round(current.batches))
        _add(stats.success, seconds)
        for duration, stage in (
            (stats.queue, "queue_ms"),
            (stats.compute_input, "decode_ms"),
            (stats.compute_infer, "compute_ms"),
            (stats.compute_output, "render_ms"),
        ):
            _add(duration, sum(getattr(timing, stage) for timing in timings) / 1e3 / len(timings))

    def count_failure(self, model: ModelInfo, seconds: float) -> None:
        """Count a request that failed, and its duration."""
        if current := self._current(model):
            _add(current.message.inference_stats.fail, seconds)

    def _current(self, model: ModelInfo) -> _VersionStatistics | None:
        """Return the statistics of a version, or None if a newer version has any.

        Requests that a version has accepted may end after a newer version was loaded.
        """
        current = self._by_model.get(model.name)
        if current is None or current.version < model.version:
            current = self._by_model[model.name] = _VersionStatistics(model.version, _empty_statistics(model))
        return current if current.version == model.version else None


def _empty_statistics(model: ModelInfo) -> inference_pb2.ModelStatistics:
    return inference_pb2.ModelStatistics(name=model.name, version=str(model.version))


def _add(duration: inference_pb2.StatisticDuration, seconds: float) -> None:
    duration.count += 1
    duration.ns += round(1e9 * seconds)
