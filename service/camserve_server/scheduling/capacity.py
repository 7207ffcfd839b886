"""How much fits in a batch: inputs, by what the device's memory holds, and work, by how long its rows take.

A batch cannot be interrupted, so everyone who waits for an engine waits for all of it, and an engine that works on one
for longer than `max_batch_seconds` is killed. Rows cost what batches of the same kind took before. A kind that has not
run yet is given a small batch first, which measures it.
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

LONGEST = 2.0  # seconds that a batch is expected to take at most, unless one row takes longer
SHARE = 8  # of `max_batch_seconds`, a batch is expected to take no more than one part in so many
UNMEASURED = 16  # maps in a batch whose rows are of a kind that has not run yet
REMEMBERED = 1024  # kinds of row whose cost is known; callers choose layers, so there is no end of them
RETRY_LARGER = 64  # batches cut for want of memory may be one row larger again after so many that were full

RowKind: TypeAlias = tuple[Pass, tuple[Hashable, ...], int]
"""What rows must have in common to cost the same: their pass, methods, and how many maps these make of each row."""


def kind_of(pass_: Pass, row: Row) -> RowKind:
    """Return the kind of a row, for what it costs."""
    return pass_, tuple((call.name, call.eigen) for call in row.calls), maps_of(row.calls, pass_.layers)


@dataclass(slots=True, eq=False)
class BatchBudget:
    """What one batch has room for.

    Attributes:
        inputs: distinct inputs at most.
        seconds: that its rows are expected to take at most; the first row is taken whatever it costs.
        rows: taken so far.
        spent: seconds that these are expected to take.
        seen: their inputs.
    """

    inputs: int
    seconds: float
    rows: int = 0
    spent: float = 0.0
    seen: set[Hashable] = field(default_factory=set)

    @property
    def full(self) -> bool:
        """Whether it takes no further input."""
        return len(self.seen) >= self.inputs or self.spent >= self.seconds

    def takes(self, row: Row, seconds: float, most: int) -> bool:
        """Take a row that is expected to cost so many seconds, if there is room and no more than `most` inputs then."""
        if self.rows and self.spent + seconds > self.seconds:
            return False
        if row.input not in self.seen and len(self.seen) >= min(most, self.inputs):
            return False
        self.seen.add(row.input)
        self.rows += 1
        self.spent += seconds
        return True


@dataclass(slots=True, eq=False)
class _Cap:
    """Limit for the batches of one model and kind, set after a larger batch ran out of memory.

    Attributes:
        size: bytes by estimate, so that it holds for every layer; of a model that nothing is known of, inputs.
        well: batches that took all of it since it last changed.
    """

    size: int
    well: int = 0


class Capacity:
    """What batches have room for, and what a row takes of it.

    Args:
        inputs: distinct inputs in a batch at most.
        max_batch_seconds: after which an engine is killed.
    """

    def __init__(self, inputs: int, max_batch_seconds: float) -> None:
        self.inputs = inputs
        self._bytes = 0
        self._footprints: dict[str, Footprint] = {}
        self.seconds = min(LONGEST, max_batch_seconds / SHARE)
        self._caps: dict[tuple[str, Kind], _Cap] = {}
        self._costs: dict[RowKind, float] = {}  # seconds a row on a whole engine; the latest measured last

    def room(self, pass_: Pass, most: int) -> BatchBudget:
        """Return the room of a batch that should have at most so many inputs."""
        return BatchBudget(min(most, max(1, self._fitting(pass_))), self.seconds)

    def learn(self, key: str, model: ModelInfo, measured: Mapping[Kind, int] | None = None) -> None:
        """Note how much memory a model takes; rows mean it by this key.

        Args:
            key: of the model.
            model: what is known of it.
            measured: bytes that one input took in the typical pass of a kind; none on a CPU.
        """
        self._footprints[key] = Footprint.of(model, measured)

    def allow(self, batch_bytes: int) -> None:
        """Limit the memory that a batch may take by estimate, unless one input takes more; 0 for no limit.

        It may change: a GPU has less left for batches with every model.
        """
        self._bytes = batch_bytes

    def may_share(self, pass_: Pass) -> bool:
        """Say whether a batch may run beside another one: not if a single input takes more memory than a batch may."""
        return self._fitting(pass_) > 0

    def _fitting(self, pass_: Pass) -> int:
        """Return how many inputs the memory of a batch is enough for; 0 if one input takes more than that."""
        needed = self._input_bytes(pass_)
        fitting = self._bytes // needed if self._bytes and needed else self.inputs
        cap = self._caps.get((pass_.model, pass_.kind))
        return min(fitting, cap.size // max(1, needed)) if cap else fitting

    def _input_bytes(self, pass_: Pass) -> int:
        """Return how much memory an input takes in a batch of a pass; 0 where that is not known."""
        footprint = self._footprints.get(pass_.model)
        return footprint.input_bytes(pass_) if footprint else 0

    def seconds_of(self, kind: RowKind) -> float:
        """Return how long a row is expected to take."""
        return self._costs.get(kind) or kind[2] * self.seconds / UNMEASURED

    def measured(self, rows: Mapping[RowKind, int], seconds: float) -> None:
        """Learn from a batch of so many rows of each kind that took so long on a whole engine: costs are scaled.

        Of a kind that is known it falls at once and rises by half the way, as anything may hold up one batch.
        """
        factor = seconds / max(sum(self.seconds_of(kind) * count for kind, count in rows.items()), 1e-9)
        for kind in rows:
            known = self._costs.pop(kind, 0.0)
            change = (1 + factor) / 2 if known and factor > 1 else factor
            self._costs[kind] = (known or self.seconds_of(kind)) * change
        while len(self._costs) > REMEMBERED:
            del self._costs[next(iter(self._costs))]

    def went_well(self, pass_: Pass, inputs: int) -> None:
        """Let batches that were cut for want of memory grow, now and then."""
        cap, needed = self._caps.get((pass_.model, pass_.kind)), max(1, self._input_bytes(pass_))
        if cap is None or inputs < cap.size // needed:
            return
        cap.well += 1
        if cap.well == RETRY_LARGER:
            self._caps[pass_.model, pass_.kind] = _Cap(cap.size + needed)

    def cut(self, pass_: Pass, inputs: int) -> None:
        """Halve the limit after a batch ran out of memory. If it had one input, such inputs run alone from now on."""
        size = inputs * max(1, self._input_bytes(pass_)) // 2
        known = self._caps.get((pass_.model, pass_.kind))
        self._caps[pass_.model, pass_.kind] = _Cap(min(size, known.size) if known else size)
        log.warning("out of memory with %d inputs: batches have at most %d now", inputs, max(1, inputs // 2))

    def forget(self, model: str) -> None:
        """Forget what was learned about a model that is gone."""
        self._footprints.pop(model, None)
        self._caps = {key: cap for key, cap in self._caps.items() if key[0] != model}
        self._costs = {kind: cost for kind, cost in self._costs.items() if kind[0].model != model}
