"""Limits of a batch: distinct inputs, by the device's memory, and seconds, by how long its rows take.

A batch cannot be interrupted, so everyone who waits for a worker waits for the whole batch. A worker that takes longer
than `max_batch_seconds` for one batch is killed. Rows are expected to cost what batches of the same kind took before. A
kind that has not run yet gets a small batch first, which measures it.
"""

import logging
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from camserve_server.engine.values import Row
from camserve_server.jobs.cost import maps_of
from camserve_server.jobs.footprint import Footprint
from camserve_server.models.values import Kind, ModelInfo, Pass

log = logging.getLogger(__name__)

MAX_EXPECTED_SECONDS = 2.0  # seconds that a batch is expected to take at most, unless one row takes longer
TIMEOUT_SHARE = 8  # a batch is expected to take at most this part, one eighth, of `max_batch_seconds`
UNMEASURED = 16  # maps in a batch whose rows are of a kind that has not run yet
MAX_REMEMBERED_KINDS = (
    1024  # kinds of row whose cost is remembered; callers choose layers, so their number is unbounded
)
RETRY_LARGER = 64  # full batches after which a limit that was reduced for want of memory grows by one row

RowKind: TypeAlias = tuple[Pass, tuple[Hashable, ...], int]
"""Cost class of a row: its pass, its methods, and the number of maps that these compute for it."""


def kind_of(pass_: Pass, row: Row) -> RowKind:
    """Return the cost class of a row."""
    return pass_, tuple((call.name, call.eigen) for call in row.calls), maps_of(row.calls, pass_.layers)


@dataclass(slots=True, eq=False)
class BatchBudget:
    """Room left in one batch.

    Attributes:
        inputs: largest number of distinct inputs.
        seconds: largest sum of the rows' expected seconds; the first row is taken whatever it costs.
        rows: number of rows taken so far.
        expected_seconds: sum of their expected seconds.
        seen: their distinct inputs.
    """

    inputs: int
    seconds: float
    rows: int = 0
    expected_seconds: float = 0.0
    seen: set[Hashable] = field(default_factory=set)

    @property
    def full(self) -> bool:
        """True if the batch has no room for another input."""
        return len(self.seen) >= self.inputs or self.expected_seconds >= self.seconds

    def take(self, row: Row, seconds: float, max_inputs: int) -> bool:
        """Add a row if it fits; return True if it did.

        Args:
            row: row to add.
            seconds: seconds that it is expected to take.
            max_inputs: largest number of distinct inputs in the batch after this row.
        """
        if self.rows and self.expected_seconds + seconds > self.seconds:
            return False
        if row.input not in self.seen and len(self.seen) >= min(max_inputs, self.inputs):
            return False
        self.seen.add(row.input)
        self.rows += 1
        self.expected_seconds += seconds
        return True


@dataclass(slots=True, eq=False)
class _MemoryCap:
    """Limit for the batches of one model and kind of pass, set after a larger batch ran out of memory.

    Attributes:
        size: estimated bytes, so that the limit holds for every layer; inputs, if the model's memory is unknown.
        full_batches: batches as large as the limit that succeeded since it last changed.
    """

    size: int
    full_batches: int = 0


class Capacity:
    """Memory and time limits of batches, learned from the batches that ran.

    Args:
        inputs: largest number of distinct inputs in a batch.
        max_batch_seconds: seconds after which a worker is killed for one batch.
    """

    def __init__(self, inputs: int, max_batch_seconds: float) -> None:
        self.inputs = inputs
        self.seconds = min(MAX_EXPECTED_SECONDS, max_batch_seconds / TIMEOUT_SHARE)
        self._batch_bytes = 0
        self._footprints: dict[str, Footprint] = {}
        self._caps: dict[tuple[str, Kind], _MemoryCap] = {}
        self._costs: dict[RowKind, float] = {}  # seconds for one row on a whole worker; the latest measured last

    def budget(self, pass_: Pass, max_inputs: int) -> BatchBudget:
        """Return the budget of a new batch that should have at most `max_inputs` distinct inputs.

        Inputs that are edits of a layer's output take less memory than images, so the batch may have more of them.
        """
        inputs = max_inputs * self._edits_per_image(pass_)
        return BatchBudget(min(inputs, max(1, self._fitting_inputs(pass_))), self.seconds)

    def learn(self, key: str, model: ModelInfo, measured: Mapping[Kind, int] | None = None) -> None:
        """Record how much memory a model takes.

        Args:
            key: key of the model version, as rows name it.
            model: description of the model.
            measured: bytes that one input took in the typical pass of each kind; None on a CPU.
        """
        self._footprints[key] = Footprint.of(model, measured)

    def allow(self, batch_bytes: int) -> None:
        """Limit the estimated memory of a batch, unless a single input takes more; 0 for no limit.

        The limit may change: each further model leaves less of a GPU's memory for batches.
        """
        self._batch_bytes = batch_bytes

    def may_share(self, pass_: Pass) -> bool:
        """Return True if a batch may run beside another one: not if a single image takes more memory than a batch may.

        Such an image runs alone.
        """
        return self._fitting_inputs(pass_) >= self._edits_per_image(pass_)

    def _fitting_inputs(self, pass_: Pass) -> int:
        """Return how many inputs fit in the memory of a batch; 0 if a single one does not."""
        needed = self._input_bytes(pass_)
        unlimited = self.inputs * self._edits_per_image(pass_)
        fitting = self._batch_bytes // needed if self._batch_bytes and needed else unlimited
        cap = self._caps.get((pass_.model, pass_.kind))
        return min(fitting, cap.size // max(1, needed)) if cap else fitting

    def _input_bytes(self, pass_: Pass) -> int:
        """Return how much memory an input takes in a batch of a pass; 0 if that is unknown."""
        footprint = self._footprints.get(pass_.model)
        return footprint.input_bytes(pass_) if footprint else 0

    def _edits_per_image(self, pass_: Pass) -> int:
        """Return how many inputs of a pass take the memory of one image; see `Footprint`."""
        footprint = self._footprints.get(pass_.model)
        return footprint.edits_per_image(pass_) if footprint else 1

    def seconds_of(self, kind: RowKind) -> float:
        """Return how many seconds a row is expected to take."""
        return self._costs.get(kind) or kind[2] * self.seconds / UNMEASURED

    def record_seconds(self, rows: Mapping[RowKind, int], seconds: float) -> None:
        """Update the expected costs from a batch that ran, by scaling them.

        A known cost falls at once and rises only half of the way, because anything may delay one batch.

        Args:
            rows: number of rows of each kind in the batch.
            seconds: seconds that the batch took, or would have taken, on a whole worker.
        """
        factor = seconds / max(sum(self.seconds_of(kind) * count for kind, count in rows.items()), 1e-9)
        for kind in rows:
            known = self._costs.pop(kind, 0.0)
            change = (1 + factor) / 2 if known and factor > 1 else factor
            self._costs[kind] = (known or self.seconds_of(kind)) * change
        while len(self._costs) > MAX_REMEMBERED_KINDS:
            del self._costs[next(iter(self._costs))]

    def record_success(self, pass_: Pass, inputs: int) -> None:
        """Record that a batch fit in memory; after `RETRY_LARGER` full batches, a reduced limit grows by one input."""
        cap, needed = self._caps.get((pass_.model, pass_.kind)), max(1, self._input_bytes(pass_))
        if cap is None or inputs < cap.size // needed:
            return
        cap.full_batches += 1
        if cap.full_batches == RETRY_LARGER:
            self._caps[pass_.model, pass_.kind] = _MemoryCap(cap.size + needed)

    def record_out_of_memory(self, pass_: Pass, inputs: int) -> None:
        """Halve the limit after a batch ran out of memory. If it had one input, such inputs run alone from now on."""
        size = inputs * max(1, self._input_bytes(pass_)) // 2
        known = self._caps.get((pass_.model, pass_.kind))
        self._caps[pass_.model, pass_.kind] = _MemoryCap(min(size, known.size) if known else size)
        log.warning("out of memory with %d inputs: batches have at most %d now", inputs, max(1, inputs // 2))

    def forget(self, model: str) -> None:
        """Forget everything learned about a model version that was dropped."""
        self._footprints.pop(model, None)
        self._caps = {key: cap for key, cap in self._caps.items() if key[0] != model}
        self._costs = {kind: cost for kind, cost in self._costs.items() if kind[0].model != model}
