"""Plain values from which metrics and traces are made. The rest of the server fills them in."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

MAX_SPANS = 100  # stages of one request that become spans: a long request is in thousands of batches
SEVERAL = "several"  # label of a request with more than one method


@dataclass(slots=True, eq=False)
class RequestTrace:
    """Telemetry of one request. Times are on the clock of the event loop.

    Attributes:
        rpc: name of the RPC, one that the code defines.
        request_id: ID that the caller sent, or a generated one.
        stream: True for a stream as a whole; its requests have records of their own.
        model: name of the model; empty until it is known to exist.
        method: name of the method, empty until it is known to exist; "several" for more than one.
        seconds: duration of each stage, in seconds; its parts are added up.
        explained: method and verdict of every map.
        reason: state of the server that made it refuse the request, in one word; empty if the server is not at fault.
        trace_id: ID of the request's trace, 32 hexadecimal digits; empty without a trace.
        span: span of OpenTelemetry, if the request is recorded.
        stages: parts of stages that become spans: name, start, end, and the span of the batch.
        dropped_stages: number of parts beyond MAX_SPANS.
        clock_offset: nanoseconds to add to the event loop's clock for the time since 1970.
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
    dropped_stages: int = 0
    clock_offset: int = 0

    def about(self, model: str, methods: Sequence[str]) -> None:
        """Set the model and the methods of the request."""
        self.model = model
        self.method = SEVERAL if len(set(methods)) > 1 else next(iter(methods), "")

    def stage(self, name: str, began: float, ended: float, batch: Any = None) -> None:
        """Add a part of a stage."""
        self.seconds[name] = self.seconds.get(name, 0.0) + ended - began
        if self.stages is None:
            return
        if len(self.stages) < MAX_SPANS:
            self.stages.append((name, began, ended, batch))
        else:
            self.dropped_stages += 1


@dataclass(frozen=True, slots=True)
class Origin:
    """Source of a request.

    Attributes:
        caller: name of the caller's token, or its address; empty in process. Callers take turns and share the queue.
        record: telemetry of the request; None without telemetry.
    """

    caller: str = ""
    record: RequestTrace | None = None


IN_PROCESS = Origin()
"""The origin of requests that do not come over a network."""


@dataclass(frozen=True, slots=True)
class BatchRun:
    """A batch that has run. Times are on the clock of the event loop.

    Attributes:
        model: version of the model, such as "resnet50@1".
        kind: kind of the pass, such as "cam".
        rows: number of rows in the batch.
        began: start of the batch.
        ended: end of the batch.
        records: telemetry of the requests with rows in the batch.
        work: seconds that the batch would have taken with the worker to itself.
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
    """Memory of a worker, in bytes.

    Attributes:
        resident: resident memory of its process; for a worker in a thread, of the server.
        allocated: GPU memory in tensors; 0 on a CPU.
        reserved: GPU memory that torch has reserved for present and later tensors.
        total: GPU memory in total.
        pinned: page-locked memory of the host that the GPU copies from; part of `resident`.
    """

    resident: int
    allocated: int = 0
    reserved: int = 0
    total: int = 0
    pinned: int = 0


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """State of a worker.

    Attributes:
        device: name of its device.
        up: True if it accepts batches.
        memory: use of memory; None if the worker has not reported it yet.
    """

    device: str
    up: bool
    memory: Memory | None


@dataclass(frozen=True, slots=True)
class ServerSnapshot:
    """State of a server.

    Attributes:
        ready: True if its health is SERVING.
        in_flight: number of calls in progress; a stream is one call.
        queue_rows: number of rows that are accepted and not yet computed.
        queue_limit: maximum of `queue_rows`.
        answered: number of rows that succeeded since the start.
        failed: number of rows whose batch failed since the start.
        models: name, version and readiness of each configured model.
        engines: state of each worker.
    """

    ready: bool
    in_flight: int
    queue_rows: int = 0
    queue_limit: int = 0
    answered: int = 0
    failed: int = 0
    models: Sequence[tuple[str, int, bool]] = ()
    engines: Sequence[WorkerSnapshot] = ()


class TelemetrySink(Protocol):
    """Receiver of events that are not requests."""

    def batch_finished(self, batch: BatchRun) -> None:
        """Record a batch."""

    def model_loaded(self, model: str, seconds: float, *, succeeded: bool) -> None:
        """Record a model that was loaded, or failed to load."""

    def worker_started(self, engine: int, device: str) -> None:
        """Record the start of a worker."""

    def worker_lost(self, engine: int, device: str) -> None:
        """Record that a worker's process ended, and another one is started in its place."""
