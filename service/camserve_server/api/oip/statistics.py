"""How many inferences there were, and where their time went."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from camserve.v1 import explain_pb2
from camserve_server.api.oip.v2 import inference_pb2
from camserve_server.models.values import ModelInfo


@dataclass(slots=True)
class _Tally:
    """Of one version of a model.

    Attributes:
        version: its number.
        told: what is answered.
        batches: their parts, added up.
    """

    version: int
    told: inference_pb2.ModelStatistics = field(default_factory=inference_pb2.ModelStatistics)
    batches: float = 0.0


class Statistics:
    """The statistics of the versions that answer. Used on one event loop."""

    def __init__(self) -> None:
        self._tallies: dict[str, _Tally] = {}

    def of(self, model: ModelInfo) -> inference_pb2.ModelStatistics:
        """Return those of a model, since its version was loaded; none of a version that was replaced."""
        tally = self._tally(model)
        return tally.told if tally else _told(model)

    def succeeded(self, model: ModelInfo, seconds: float, answers: Sequence[explain_pb2.ExplainResponse]) -> None:
        """Count a message that was answered.

        Args:
            model: that answered.
            seconds: that it took.
            answers: one for each image.
        """
        tally, timings = self._tally(model), [answer.timing for answer in answers]
        if tally is None:
            return
        tally.batches += sum(1 / max(1, timing.batch_rows) for timing in timings)
        told, stats = tally.told, tally.told.inference_stats
        told.last_inference = round(1e3 * time.time())
        told.inference_count += len(answers)
        told.execution_count = max(1, round(tally.batches))
        _add(stats.success, seconds)
        for duration, stage in (
            (stats.queue, "queue_ms"),
            (stats.compute_input, "decode_ms"),
            (stats.compute_infer, "compute_ms"),
            (stats.compute_output, "render_ms"),
        ):
            _add(duration, sum(getattr(timing, stage) for timing in timings) / 1e3 / len(timings))

    def failed(self, model: ModelInfo, seconds: float) -> None:
        """Count a message that was not answered, after so many seconds."""
        if tally := self._tally(model):
            _add(tally.told.inference_stats.fail, seconds)

    def _tally(self, model: ModelInfo) -> _Tally | None:
        """Return that of a version; None if a newer one has been seen: what this one accepted may end after it came."""
        tally = self._tallies.get(model.name)
        if tally is None or tally.version < model.version:
            tally = self._tallies[model.name] = _Tally(model.version, _told(model))
        return tally if tally.version == model.version else None


def _told(model: ModelInfo) -> inference_pb2.ModelStatistics:
    return inference_pb2.ModelStatistics(name=model.name, version=str(model.version))


def _add(duration: inference_pb2.StatisticDuration, seconds: float) -> None:
    duration.count += 1
    duration.ns += round(1e9 * seconds)
