"""Dispatcher: forms a batch whenever a worker is free, and gives it to that worker.

No timer holds a batch back unless `max_delay` asks for it: while a worker runs one batch, rows for the next one
accumulate.

A worker on a CPU may run two batches at once, each on a partition of half of its cores, and does so as soon as two
inputs wait, unless only full batches share (see `policy`). Two batches on half of the cores each take as long together
as one after the other on all cores. But a core that is interrupted by other work of the server delays only one of the
two, and a later request finds a free partition sooner. A single input gets all cores.

A GPU is not divided. Its partitions 0 and 1 are two CUDA streams, and each gets batches of full size: while the GPU
computes one, the inputs of the other are on their way to it, or its results on their way back.

Rows that are run again (see `executor`) go before all others, with no other batch on the worker.
"""

import asyncio

from camserve_server.engine.values import Partition
from camserve_server.scheduling import policy
from camserve_server.scheduling.capacity import Capacity
from camserve_server.scheduling.executor import Executor
from camserve_server.scheduling.queue import Queue, RowRef, count_inputs, requests_of
from camserve_server.scheduling.worker_handle import WorkerHandle


class Dispatcher:
    """Gives batches from the queue to free workers.

    Args:
        queue: the rows that wait.
        executor: executor that runs the batches.
        capacity: limits of batches.
        partitioned: True if each worker can run two batches at once, each on half of its cores.
        streams: True if each worker can run two batches at once, each in a CUDA stream of its own.
        max_delay: seconds that the oldest row may be held back until a batch is full; 0 for none.
    """

    def __init__(
        self,
        queue: Queue,
        executor: Executor,
        capacity: Capacity,
        *,
        partitioned: bool,
        streams: bool,
        max_delay: float,
    ) -> None:
        self._queue, self._executor, self._capacity = queue, executor, capacity
        self._partitioned, self._streams = partitioned, streams
        self._max_delay = max_delay

    def start(self, worker: WorkerHandle) -> list[asyncio.Task[None]]:
        """Start the tasks that give batches to a worker; one for each batch that it may run at once."""
        tasks = [asyncio.create_task(self._serve(worker))]
        if self._partitioned or self._streams:
            tasks.append(asyncio.create_task(self._serve_second(worker)))
        return tasks

    async def _serve(self, worker: WorkerHandle) -> None:
        """Run batches on partition 0, or on the whole worker if nothing should run beside them; run rows again."""
        while True:
            batch = await self._next_batch(worker, 0)
            if not batch:
                await self._rerun(worker)
            elif not self._capacity.may_share(batch[0][0].pass_):
                await worker.reserve()
                await self._executor.execute(worker, batch, None)
            elif self._streams:
                worker.shared.set()
                await self._executor.execute(worker, batch, 0)
            elif self._partitioned and (worker.inputs[1] or not self._gets_whole_worker(batch)):
                worker.shared.set()
                await self._executor.execute(worker, batch, 0)
                worker.shared.clear()
            else:
                await self._executor.execute(worker, batch, None)
            worker.inputs[0] = 0

    async def _serve_second(self, worker: WorkerHandle) -> None:
        """Run batches on partition 1 while `worker.shared` is set."""
        while True:
            batch = await self._next_batch(worker, 1, worker.shared)
            await self._executor.execute(worker, batch, 1)
            worker.inputs[1] = 0
            worker.second_idle.set()

    async def _next_batch(self, worker: WorkerHandle, partition: Partition, *required: asyncio.Event) -> list[RowRef]:
        """Wait until a partition may run a batch, and return it. An empty batch means that rows are to be run again."""
        required = (*required, worker.resumed)
        while True:
            for event in (*required, self._queue.work_available):
                await event.wait()
            if self._executor.reruns and partition == 0:
                return []
            await self._wait_for_full_batch()
            if not all(event.is_set() for event in required):
                # A worker was paused, or partition 0 took the whole worker, while this task waited. It starts over, and
                # sets the event that `_wait_for_full_batch` cleared, because other workers wait for it.
                self._queue.work_available.set()
                continue
            if batch := self._queue.form(self._max_inputs(worker, partition), _now(), in_parallel=partition == 1):
                worker.inputs[partition] = count_inputs(batch)
                if partition:
                    worker.second_idle.clear()
                self._queue.work_available.set()  # there may be more rows, for the next worker that is free
                return batch
            self._clear_event(worker, partition)

    def _clear_event(self, worker: WorkerHandle, partition: Partition) -> None:
        """Clear an event, as this partition may run none of the waiting rows: its task would loop without a pause."""
        if partition and (self._queue or self._executor.reruns):
            worker.shared.clear()  # the next rows may not run beside another batch: partition 0 takes them
        elif not self._executor.reruns:
            self._queue.work_available.clear()

    async def _rerun(self, worker: WorkerHandle) -> None:
        """Run rows again on the whole worker."""
        await worker.reserve()
        if not self._executor.reruns:  # another worker took them meanwhile
            return
        rerun = self._executor.reruns.popleft()
        self._queue.record_start(rerun.batch, _now())
        await self._executor.execute_rerun(worker, rerun)

    def _max_inputs(self, worker: WorkerHandle, partition: Partition) -> int:
        """Return the largest number of inputs in the next batch of a partition."""
        limit = self._capacity.inputs
        if not self._partitioned or self._only_full_share():
            return limit
        return policy.partition_inputs(self._queue.count_inputs(_now()), worker.inputs[1 - partition], limit)

    def _gets_whole_worker(self, batch: list[RowRef]) -> bool:
        waiting, only_full = self._queue.count_inputs(_now()), self._only_full_share(batch)
        return policy.gets_whole_worker(waiting, self._capacity.inputs, only_full=only_full)

    def _only_full_share(self, batch: list[RowRef] | None = None) -> bool:
        """Return True if only full batches share a worker.

        Long requests in `batch`, which has left the queue, count like those that wait: the rest of their rows follow.
        """
        return policy.only_full_batches_share(
            collects=self._max_delay > 0,
            has_long=self._queue.has_long or any(map(self._queue.is_long, requests_of(batch or []))),
            short_expected=self._queue.expects_short_request(_now()),
        )

    async def _wait_for_full_batch(self) -> None:
        """Wait for more rows until a batch is full, but no longer than the oldest row may be held back."""
        while self._max_delay and (next_batch := self._queue.peek(_now())):
            waiting_since, inputs = next_batch
            left = waiting_since + self._max_delay - _now()
            if left <= 0 or inputs >= self._capacity.inputs:
                return
            self._queue.work_available.clear()
            try:
                async with asyncio.timeout(left):
                    await self._queue.work_available.wait()
            except TimeoutError:
                return


def _now() -> float:
    return asyncio.get_running_loop().time()
