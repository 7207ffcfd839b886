"""What metrics and traces are made of: plain values that the parts of a server fill in as they work."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

MOST_SPANS = 100  # stages of one request that become spans of their own: a long one is in thousands of batches
SEVERAL = "several"


@dataclass(slots=True, eq=False)
class RequestTrace:
    """One request. Times are on the clock of the event loop.

    Attributes:
        rpc: the RPC's name, one that the code knows.
        request_id: the caller's, or one of ours.
        stream: whether it is a stream as a whole, whose requests have records of their own.
        model: its name; empty until it is known that there is such a model.
        method: likewise; "several" where there are several.
        seconds: how long each stage took, its parts added up.
        explained: method and verdict of every map.
        reason: why the server would not do what it was asked, in a word; empty where it was not its doing.
        trace_id: of the trace that it is part of, 32 hexadecimal digits; empty where there is none.
        span: of OpenTelemetry, where it is recorded.
        stages: each part of a stage, for spans: its name, beginning, end, and the span of the batch.
        untold: how many parts more there were.
        wall: nanoseconds from the loop's clock to that of the world.
    """

    rpc: str
    request_id: str = ""
    stream: bool = False
    began: float = field(default_factory=time.monotonic)
    model: str = ""
    method: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    explained: list[tuple[str, str]] = field(default_factory=list)
    reason: str = ""
    trace_id: str = ""
    span: Any = None
    stages: list[tuple[str, float, float, Any]] | None = None
    untold: int = 0
    wall: int = 0

    def about(self, model: str, methods: Sequence[str]) -> None:
        """Note what is explained, and how."""
        self.model = model
        self.method = SEVERAL if len(set(methods)) > 1 else next(iter(methods), "")

    def stage(self, name: str, began: float, ended: float, batch: Any = None) -> None:
        """Note a part of a stage."""
        self.seconds[name] = self.seconds.get(name, 0.0) + ended - began
        if self.stages is None:
            return
        if len(self.stages) < MOST_SPANS:
            self.stages.append((name, began, ended, batch))
        else:
            self.untold += 1


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request comes from.

    Attributes:
        caller: the name of a token, or an address: callers share the server's room and take turns. Empty in process.
        record: of the request; None where there is no telemetry.
    """

    caller: str = ""
    record: RequestTrace | None = None


IN_PROCESS = Origin()
"""The origin of requests that come over no network."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A batch that ran.

    Attributes:
        model: the version of the model that ran it.
        kind: of its pass.
        rows: in it.
        began: on the event loop's clock.
        ended: likewise.
        records: of the requests that have rows in it.
        work: seconds that it would have taken with all of the engine.
    """

    model: str
    kind: str
    rows: int
    began: float
    ended: float
    records: Sequence[RequestTrace]
    work: float = 0.0


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that an engine has.

    Attributes:
        resident: of the process's memory; in a thread of the server, the server's.
        allocated: of the GPU's memory, in tensors; 0 on a CPU.
        reserved: of the GPU's memory, by torch, for those and for what comes.
        total: that the GPU has.
        pinned: of the host's memory, page-locked, from which the GPU fetches; part of what is resident.
    """

    resident: int
    allocated: int = 0
    reserved: int = 0
    total: int = 0
    pinned: int = 0


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine as it is now; the memory is None where it could not be told yet."""

    device: str
    up: bool
    memory: Memory | None


@dataclass(frozen=True, slots=True)
class State:
    """A server as it is now.

    Attributes:
        ready: whether its health is SERVING.
        in_flight: calls under way; a stream is one.
        queue_rows: accepted and not yet answered.
        queue_limit: of these.
        answered: rows, since it began.
        failed: rows whose batch failed.
        models: the version of each that the configuration names, and whether it answers.
        engines: each of them.
    """

    ready: bool
    in_flight: int
    queue_rows: int = 0
    queue_limit: int = 0
    answered: int = 0
    failed: int = 0
    models: Sequence[tuple[str, int, bool]] = ()
    engines: Sequence[Engine] = ()


class TelemetrySink(Protocol):
    """Who is told of what is no request."""

    def ran(self, batch: Ran) -> None:
        """Hear of a batch."""

    def loaded(self, model: str, seconds: float, *, well: bool) -> None:
        """Hear that a model was loaded, or could not be."""

    def begun(self, engine: int, device: str) -> None:
        """Hear that there is an engine."""

    def lost(self, engine: int, device: str) -> None:
        """Hear that an engine's process ended, and another is started in its place."""
