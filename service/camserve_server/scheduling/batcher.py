"""Batcher: gathers rows of many requests into batches, and has workers run them.

Rows with the same `Pass` share a batch, whatever their methods and targets. A request passes through these parts:

1. `admission` accepts it, or refuses it when the queue is full.
2. `queue` stores its rows, and `policy` decides whose rows are next.
3. `capacity` limits a batch by memory and by expected time.
4. `dispatcher` gives batches to workers that are free, one or two at once.
5. `executor` runs a batch, and recovers from failures.
"""

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Self

from camserve_server.core.errors import InvalidArgument, ResourceExhausted, Unavailable
from camserve_server.engine.values import Row
from camserve_server.models.values import Pass
from camserve_server.scheduling import policy
from camserve_server.scheduling.admission import Admission, Reservation
from camserve_server.scheduling.capacity import Capacity
from camserve_server.scheduling.dispatcher import Dispatcher
from camserve_server.scheduling.executor import Executor
from camserve_server.scheduling.queue import Collect, PendingRequest, Queue, Stats
from camserve_server.scheduling.threads import ThreadPool
from camserve_server.scheduling.worker_handle import Run, WorkerHandle
from camserve_server.telemetry import IN_PROCESS, Origin, RequestTimings, TelemetrySink

BYTES_PER_ROW = 64 * 2**10  # bytes of inputs and maps of all requests, for each row that the queue has room for
MEMORY_RETRY_AFTER = 1.0  # seconds: earlier replies may have to be read before
_STRANGER = "a stranger"  # no token has a space in its name, and no address


class Batcher:
    """Runs rows in batches, and limits how many it has accepted.

    Args:
        runs: functions that run a batch, one for each worker. Any worker may run any row.
        max_batch_rows: largest number of inputs in a batch; rows of one input with several targets count once.
        max_queue_rows: largest number of rows that are accepted and not yet computed.
        max_delay: seconds that the oldest row may be held back until a batch is full; 0 for none.
        partitioned: True if each worker can run two batches at once, each on half of its cores.
        streams: True if each worker can run two batches at once, each with the whole GPU, in a stream of its own.
        max_batch_seconds: seconds after which a worker is killed for one batch; batches are kept far shorter.

    Attributes:
        limit: largest number of rows that are accepted and not yet computed.
        largest: bytes of inputs and maps that a request counts for at most. They fit beside a caller that holds as much
            as it may, and never lets go.
        stats: counters of batches and rows.
        learn: see `Capacity.learn`.
        allow: see `Capacity.allow`.
        forget: see `Capacity.forget`.
    """

    def __init__(
        self,
        *runs: Run,
        max_batch_rows: int = 8,
        max_queue_rows: int = 1024,
        max_delay: float = 0.0,
        partitioned: bool = False,
        streams: bool = False,
        max_batch_seconds: float = 60.0,
    ) -> None:
        self.stats, self.limit = Stats(), max_queue_rows
        self._capacity = capacity = Capacity(max_batch_rows, max_batch_seconds)
        self.learn, self.allow, self.forget = capacity.learn, capacity.allow, capacity.forget
        # Two batches, one that runs and one that gathers, keep a worker busy: each caller's share is at least that.
        self._admission = Admission(max_queue_rows, 2 * max_batch_rows, self._refuse)
        memory, unit = max_queue_rows * BYTES_PER_ROW, "bytes of inputs and maps"
        self._memory = Admission(memory, 0, self._refuse_memory, memory, headroom=True, unit=unit)
        self.largest = memory // 5
        self._queue = Queue(capacity, self.stats)
        self._executor = Executor(capacity, self.stats, self._queue.work_available.set, streams=streams)
        self._dispatcher = Dispatcher(
            self._queue,
            self._executor,
            capacity,
            partitioned=partitioned,
            streams=streams,
            max_delay=max_delay,
        )
        parallel = 2 if partitioned or streams else 1
        self._workers = [WorkerHandle(run, ThreadPool(parallel, "engine")) for run in runs]
        self._unavailable = ""  # the reason why no worker will be available soon
        self._tasks: list[asyncio.Task[None]] = []
        self.resume()

    async def __aenter__(self) -> Self:
        """Start to run batches."""
        self._tasks = [task for worker in self._workers for task in self._dispatcher.start(worker)]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop, and fail all requests that wait or run with Unavailable."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_waiting(Unavailable("the server is shutting down", shed_reason="draining"))
        for worker in self._workers:
            await asyncio.to_thread(worker.threads.close)  # not on the event loop: the batch that runs may hang

    @property
    def telemetry(self) -> TelemetrySink | None:
        """The sink that every batch is reported to, or None."""
        return self._executor.telemetry

    @telemetry.setter
    def telemetry(self, telemetry: TelemetrySink | None) -> None:
        self._executor.telemetry = telemetry

    @property
    def admitted(self) -> int:
        """Rows accepted and not yet computed."""
        return self._admission.taken

    @property
    def waiting(self) -> int:
        """Rows that wait for a batch."""
        return sum(request.waiting for request in self._queue)

    def pause(self, index: int | None = None) -> None:
        """Start no further batch on one worker, or on all, until `resume`; requests wait."""
        for worker in self._select(index):
            worker.resumed.clear()

    def resume(self, index: int | None = None) -> None:
        """Start batches again, on one worker or on all."""
        self._unavailable = ""
        for worker in self._select(index):
            worker.resumed.set()

    def _select(self, index: int | None) -> list[WorkerHandle]:
        return self._workers if index is None else self._workers[index : index + 1]

    def fail_pending(self, reason: str) -> None:
        """Fail all waiting requests, and new ones until `resume`, with Unavailable: no worker will be ready soon."""
        self._unavailable = reason
        self._fail_waiting(self._no_worker())

    def _fail_waiting(self, error: Unavailable) -> None:
        reruns = (request for rerun in self._executor.reruns for request, _ in rerun.batch)
        for request in itertools.chain(self._queue, reruns):
            request.fail(error)
        self._executor.reruns.clear()
        self._admission.turn_away(error)
        self._memory.turn_away(error)

    def _check_available(self) -> None:
        if self._unavailable:
            raise self._no_worker()

    def _no_worker(self) -> Unavailable:
        return Unavailable(self._unavailable, retry_after=policy.MAX_RETRY_AFTER, shed_reason="no_engine")

    def admit(self, rows: int, *, caller: str = "", wait: bool = False) -> Reservation:
        """Hold room in the queue for a request inside the block: until its rows are computed.

        Args:
            rows: number of rows that the request will run.
            caller: caller that sent the request.
            wait: True to wait for room rather than be refused.

        Raises:
            ResourceExhausted: the queue is full; `retry_after` estimates when it will not be.
            Unavailable: no worker is available.
            InvalidArgument: the request has more rows than the queue's limit.
        """
        self._check_available()
        if rows > self.limit:
            raise InvalidArgument(f"the request costs {rows} rows, and {self.limit} is the limit")
        return self._admission.admit(rows, caller=caller, wait=wait)

    def reserve(self, size: int, *, caller: str = "", wait: bool = False) -> Reservation:
        """Hold memory for the inputs and maps of a request inside the block: until its reply is made.

        A reply may have to wait until its caller reads others. Its rows and its model are released by then, and what it
        still holds leaves room for other callers.

        Args:
            size: bytes of the inputs and maps.
            caller: caller that sent the request.
            wait: True to wait for memory rather than be refused.

        Raises:
            ResourceExhausted: the caller's earlier requests hold as much as it may have.
            Unavailable: no worker is available.
        """
        self._check_available()
        return self._memory.admit(min(size, self.largest), caller=caller, wait=wait)

    @asynccontextmanager
    async def admit_stranger(self, size: int) -> AsyncIterator[None]:
        """Hold room for one row of a caller that is new, inside the block; wait until there is room.

        Args:
            size: bytes of the row's input.
        """
        try:
            async with self.reserve(size, caller=_STRANGER, wait=True), self.admit(1, caller=_STRANGER, wait=True):
                yield
        finally:
            self._memory.forget(_STRANGER)
            self._admission.forget(_STRANGER)

    def _refuse(self, message: str) -> ResourceExhausted:
        self.stats.refused += 1
        retry_after = policy.retry_after(self.admitted, self._executor.row_seconds, len(self._workers))
        return ResourceExhausted(message, retry_after=retry_after, shed_reason="queue_full")

    def _refuse_memory(self, message: str) -> ResourceExhausted:
        self.stats.refused += 1
        return ResourceExhausted(message, retry_after=MEMORY_RETRY_AFTER, shed_reason="queue_full")

    async def submit(
        self,
        pass_: Pass,
        rows: Sequence[Row],
        collect: Collect,
        deadline: float = math.inf,
        timings: RequestTimings | None = None,
        origin: Origin = IN_PROCESS,
    ) -> RequestTimings:
        """Run rows, and return where the time went.

        Args:
            pass_: pass that all rows share.
            rows: at least one row.
            collect: callback that receives the index of each row and its result, in the rows' order.
            deadline: time on the event loop's clock after which no further row runs.
            timings: time that the request spent so far, which is added to.
            origin: caller and trace of the request.

        Raises:
            DeadlineExceeded: the deadline passed before the last row was put in a batch.
            Unavailable: no worker is available.
            Internal: the worker that ran the rows ended, and they may be the cause.
            Exception: whatever the model raised for a row.
        """
        self._check_available()
        loop, timings = asyncio.get_running_loop(), timings or RequestTimings()
        request = PendingRequest(pass_, rows, collect, deadline, loop.time(), loop.create_future(), timings, origin)
        timings.change(request.arrived, submitted=1)
        self._queue.add(request)
        try:
            await request.done  # a cancelled caller cancels the future, and with it the rows that have not run yet
        except BaseException:
            self._queue.drop(request)  # now rather than with the next batch, because its rows hold images
            raise
        finally:
            timings.change(loop.time(), submitted=-1)
        return timings
