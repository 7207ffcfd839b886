"""Executor: runs a batch on a worker, measures it, and recovers from its failure.

A batch that fails is split until the row at fault is alone, so that its neighbours are answered.

A batch that ran out of memory beside another batch on the same GPU may fit when it runs alone. It is run again with
nothing beside it, and split only if that fails too.

A worker process that ends takes its batch with it, and any request of the batch may be the cause. These requests are
run again before all others, each alone. So a lethal request takes no other one with it, and is identified. It is then
answered with an error and not run again, and so is a request that was alone in the first place.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from camserve_server.core import logs
from camserve_server.core.errors import Internal, OutOfMemory, Unavailable, WorkerLost
from camserve_server.engine.values import Partition, RowResult
from camserve_server.scheduling.capacity import Capacity
from camserve_server.scheduling.queue import RowRef, Stats, count_inputs, count_kinds, requests_of
from camserve_server.scheduling.worker_handle import WorkerHandle
from camserve_server.telemetry import BatchRun, TelemetrySink

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rerun:
    """Rows to run again, on a whole worker.

    Attributes:
        batch: rows of one request, which may have ended a worker; or those of a batch that ran out of memory.
        out_of_memory: True for a batch that ran out of memory beside another one.
    """

    batch: list[RowRef]
    out_of_memory: bool = False


class Executor:
    """Runs batches on workers.

    Args:
        capacity: limits of batches, updated with what each batch took.
        stats: counters, updated with every batch.
        notify: function that wakes the workers' tasks when rows are to be run again.
        streams: True if two batches that run at once each have the whole GPU, in a stream of its own.

    Attributes:
        telemetry: sink that every batch is reported to, or None.
        reruns: rows to run again, before all others.
        row_seconds: moving average of the seconds that one row takes on a whole worker.
    """

    def __init__(self, capacity: Capacity, stats: Stats, notify: Callable[[], None], *, streams: bool = False) -> None:
        self._capacity, self._stats, self._notify, self._streams = capacity, stats, notify, streams
        self.telemetry: TelemetrySink | None = None
        self.reruns: deque[Rerun] = deque()
        self.row_seconds = 0.01

    async def execute(self, worker: WorkerHandle, batch: list[RowRef], partition: Partition | None) -> None:
        """Run a batch, and answer its rows; on failure, split it or queue a rerun."""
        batch = [(request, index) for request, index in batch if not request.done.done()]
        if not batch:
            return
        try:
            results = await self._run(worker, batch, partition)
        except WorkerLost as error:
            worker.shared.clear()  # reruns go before all other batches
            self._isolate_requests(batch, error)
            return
        except Exception as error:  # noqa: BLE001 -- whatever a row raises, its neighbours are answered
            if isinstance(error, OutOfMemory) and self._streams and partition is not None:
                self._rerun_alone(worker, batch)
            else:
                await self._split(worker, batch, partition, error)
            return
        self._stats.answered += len(batch)
        self._capacity.record_success(batch[0][0].pass_, count_inputs(batch))
        for (request, index), result in zip(batch, results, strict=True):
            request.deliver(index, result)

    async def execute_rerun(self, worker: WorkerHandle, rerun: Rerun) -> None:
        """Run rows again on a whole, reserved worker."""
        failed = self._stats.failed
        await self.execute(worker, rerun.batch, None)
        if rerun.out_of_memory and self._stats.failed == failed:
            self._capacity.record_out_of_memory(rerun.batch[0][0].pass_, count_inputs(rerun.batch))

    async def _run(self, worker: WorkerHandle, batch: list[RowRef], partition: Partition | None) -> list[RowResult]:
        """Run a batch once, and measure it."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        rows, requests = [request.rows[index] for request, index in batch], requests_of(batch)
        for request in requests:
            request.timings.change(began, running=1)
        work = worker.count(began, 1)
        try:
            results = await worker.call(batch[0][0].pass_, rows, partition)
        except asyncio.CancelledError:
            for request in requests:
                request.fail(Unavailable("the server is shutting down"))
            raise
        finally:
            ended = loop.time()
            for request in requests:
                request.timings.change(ended, running=-1)
            work = worker.count(ended, -1) - work
            # Half of the cores do half of the work in the same time; a stream shares the whole GPU with the other one.
            seconds = work if self._streams else (ended - began) * (1 if partition is None else 0.5)
            self._report(batch, began, ended, seconds)
        if len(results) != len(rows):
            raise Internal(f"the worker returned {len(results)} results for {len(rows)} rows")
        self.row_seconds += 0.2 * (seconds / len(rows) - self.row_seconds)
        self._capacity.record_seconds(count_kinds(batch), seconds)
        for request in requests:
            request.stage_began = ended
        return results

    def _report(self, batch: list[RowRef], began: float, ended: float, seconds: float) -> None:
        if self.telemetry:
            pass_ = batch[0][0].pass_
            records = [request.record for request in requests_of(batch) if request.record]
            try:
                self.telemetry.batch_finished(
                    BatchRun(pass_.model, pass_.kind, len(batch), began, ended, records, seconds)
                )
            except Exception:  # whatever the sink raises, the rows are computed
                log.exception("a batch could not be reported to telemetry")

    async def _split(
        self, worker: WorkerHandle, batch: list[RowRef], partition: Partition | None, error: Exception
    ) -> None:
        """Run the two halves of a failed batch one after the other; a single row fails."""
        if len(batch) == 1:
            self._stats.failed += 1
            batch[0][0].fail(error)
            return
        middle, failed = len(batch) // 2, self._stats.failed
        await self.execute(worker, batch[:middle], partition)
        await self.execute(worker, batch[middle:], partition)
        if isinstance(error, OutOfMemory) and self._stats.failed == failed:
            # Both halves succeeded, so the size was at fault, and not a single row that takes all the memory.
            self._capacity.record_out_of_memory(batch[0][0].pass_, count_inputs(batch))

    def _rerun_alone(self, worker: WorkerHandle, batch: list[RowRef]) -> None:
        """Queue a batch that ran out of memory beside another one, before other batches fill the memory."""
        worker.shared.clear()
        self.reruns.append(Rerun(batch, out_of_memory=True))
        self._notify()

    def _isolate_requests(self, batch: list[RowRef], error: WorkerLost) -> None:
        """Queue each request of a lost batch to run again alone; fail a request that is known to be the cause."""
        requests = requests_of(batch)
        alone = len(requests) == 1 and not error.others
        for request in requests:
            rows = [row for row in batch if row[0] is request]
            ran = bool(error.process_id)  # if not, no process got the batch, and no request of it can be the cause
            if ran:
                request.lost_processes.add(error.process_id)
            if ran and (alone or len(request.lost_processes) > 1):
                self._stats.failed += len(rows)
                request.fail(Internal(f"{error.message}; the request is not run again", shed_reason=error.shed_reason))
            else:
                self.reruns.append(Rerun(rows))
        fields = logs.fields(rows=len(batch), again=len(self.reruns))
        log.warning("a batch was lost: %s", error.message, extra=fields)
        self._notify()
