"""Has engines run batches: each pulls one whenever it is free, from the rows that wait.

Rows that have their `Pass` in common share a batch, whatever their methods and targets. No timer holds a batch back
unless one is asked for: while the engine works on one batch, the next one gathers.

An engine may run two batches at once, each with half of its cores, and does so as soon as two requests wait: they are
done as soon as they would be one after the other on all cores, a core that other work of the server has interrupted is
waited for by one batch of two, and what comes later finds a half that is free sooner. One that waits alone has all
cores.

A GPU is not divided: it is given two batches as large as they may be, each in a stream of its own. While it computes
one, the other is on its way to it, or what came of it on its way back.

A batch that finds no memory while another one runs on the same GPU may have found it alone. It is run again with
nothing beside it, and split only if that fails too.

A worker that ends takes its batch with it, and one request of that may be why. The requests of such a batch are run
again before any other, each alone, so that a lethal one takes no other with it and is known by it. It is then answered
with an error and not run again, and so is one that was alone in the first place.
"""

import asyncio
import itertools
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Self, TypeAlias

from camserve_server.core import logs
from camserve_server.core.errors import (
    Internal,
    InvalidArgument,
    OutOfMemory,
    ResourceExhausted,
    Unavailable,
    WorkerLost,
)
from camserve_server.engine.values import Partition, Row, RowResult
from camserve_server.models.values import Pass
from camserve_server.scheduling.admission import Admission, Stay
from camserve_server.scheduling.capacity import Capacity, RowKind
from camserve_server.scheduling.queue import Collect, PendingRequest, Queue, RowRef, Stats
from camserve_server.scheduling.threads import in_thread
from camserve_server.telemetry import IN_PROCESS, Origin, Ran, Spent, TelemetrySink

log = logging.getLogger(__name__)

Run: TypeAlias = Callable[..., list[RowResult]]
"""An engine, as the batcher knows it: a `Pass` and rows in, plain values out, in a thread of its own.

One that can run two batches at once is also told which half of it, or which stream, one may take, 0 or 1.
"""

PLACE = 64 * 2**10  # bytes of inputs and maps in one place of the queue; a request that needs more takes several
SHORTEST_RETRY = 0.05
LONGEST_RETRY = 5.0


@dataclass(slots=True, eq=False)
class _Engine:
    """What runs batches, one after another or two at once, unless it is paused.

    Attributes:
        run: it.
        threads: that wait for it, or compute; one for each batch that may run at once.
        resumed: cleared while it is paused.
        halved: set while its second half, or its second stream, may run a batch beside the first.
        inputs: that each half works on; those of a batch that has all of it are its first half's.
        second_idle: cleared while its second half runs a batch.
        running: batches that it runs.
        work: seconds of computing in the batches so far, all together: two that run at once have half of it each.
        since: when one of these two last changed.
    """

    run: Run
    threads: ThreadPoolExecutor
    resumed: asyncio.Event = field(default_factory=asyncio.Event)
    halved: asyncio.Event = field(default_factory=asyncio.Event)
    inputs: list[int] = field(default_factory=lambda: [0, 0])
    second_idle: asyncio.Event = field(default_factory=asyncio.Event)
    running: int = 0
    work: float = 0.0
    since: float = 0.0

    def __post_init__(self) -> None:
        self.second_idle.set()

    def count(self, now: float, batches: int) -> float:
        """Note that a batch begins or ends; return what a batch that runs from here on has of the engine's time so far.

        The difference of two such values is the time that a batch between them would have taken alone.
        """
        if self.running:
            self.work += (now - self.since) / self.running
        self.since = now
        self.running += batches
        return self.work

    async def ask(self, pass_: Pass, rows: Sequence[Row], partition: Partition | None) -> list[RowResult]:
        """Run a batch on all of it, or on a half."""
        more = () if partition is None else (partition,)
        return await in_thread(self.threads, _contained, self.run, pass_, rows, *more)


@dataclass(frozen=True, slots=True)
class _Again:
    """Rows that are run again, with nothing beside them.

    Attributes:
        batch: one request's rows, which may have ended a worker; or those of a batch that found no memory.
        crowded: whether it is such a batch, and another one ran beside it.
    """

    batch: list[RowRef]
    crowded: bool = False


class Batcher:
    """Runs rows in batches, within a limit on how many it has accepted.

    Args:
        runs: the engines; each pulls a batch whenever it is free, and any of them may run any row.
        max_batch_rows: inputs in a batch at most: rows of one input with several targets share it.
        max_queue_rows: rows accepted and not yet answered at most.
        max_delay: seconds that the oldest row may be held back for company; 0 for none.
        halves: whether each engine can run two batches at once, each on a half of it.
        streams: whether it can run two at once that each have all of it, as a GPU can.
        max_batch_seconds: after which an engine is killed for a batch; none comes near that by what is expected of it.

    Attributes:
        told: who hears of every batch, if somebody does.
        limit: rows accepted and not yet answered at most.
    """

    told: TelemetrySink | None = None

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
        self.stats = Stats()
        self._capacity = Capacity(max_batch_rows, max_batch_seconds)
        self.learn, self.allow = self._capacity.learn, self._capacity.allow
        self._queue = Queue(self._capacity, self.stats)
        at_once = 2 if partitioned or streams else 1
        self._engines = [_Engine(run, ThreadPoolExecutor(at_once, thread_name_prefix="engine")) for run in runs]
        self._max_batch = max_batch_rows
        self.limit = max_queue_rows
        # Two batches, one that runs and one that gathers, are what keeps an engine busy.
        self._door = Admission(max_queue_rows, 2 * max_batch_rows, self._refused)
        self._max_delay = max_delay
        self._partitioned, self._streams = partitioned, streams
        self._again: deque[_Again] = deque()
        self._row_seconds = 0.01
        self._arrived = asyncio.Event()
        self._gone = ""
        self._loops: list[asyncio.Task[None]] = []
        self.resume()

    async def __aenter__(self) -> Self:
        """Begin to pull batches."""
        serving = (self._serve, self._serve_second) if self._partitioned or self._streams else (self._serve,)
        self._loops = [asyncio.create_task(serve(engine)) for engine in self._engines for serve in serving]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop; whatever waits, or runs, is answered with Unavailable."""
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        self._fail_waiting(Unavailable("the server is shutting down", shed="draining"))
        for engine in self._engines:
            await asyncio.to_thread(engine.threads.shutdown)  # not on the loop: the batch that runs may hang

    def pause(self, place: int | None = None) -> None:
        """Form no further batch until `resume`, for one engine or for all; what arrives waits."""
        for engine in self._engines if place is None else self._engines[place : place + 1]:
            engine.resumed.clear()

    def resume(self, place: int | None = None) -> None:
        """Form batches again."""
        self._gone = ""
        for engine in self._engines if place is None else self._engines[place : place + 1]:
            engine.resumed.set()

    def fail_pending(self, why: str) -> None:
        """Answer all that waits, and whatever comes, with Unavailable until `resume`: no engine will be there soon."""
        self._gone = why
        self._fail_waiting(self._no_engine())

    def _check_there(self) -> None:
        if self._gone:
            raise self._no_engine()

    def _no_engine(self) -> Unavailable:
        return Unavailable(self._gone, retry_after=LONGEST_RETRY, shed="no_engine")

    def _fail_waiting(self, error: Unavailable) -> None:
        again = (request for one in self._again for request, _ in one.batch)
        for request in itertools.chain(self._queue, again):
            request.fail(error)
        self._again.clear()
        self._door.turn_away(error)

    def forget(self, model: str) -> None:
        """Forget what was found out about a model that is gone."""
        self._capacity.forget(model)

    @property
    def admitted(self) -> int:
        """Rows accepted and not yet answered, or places that as large messages take."""
        return self._door.taken

    @property
    def waiting(self) -> int:
        """Rows that wait for a batch."""
        return sum(request.waiting for request in self._queue)

    def admit(self, rows: int, *, size: int = 0, caller: str = "", wait: bool = False) -> Stay:
        """Hold room for so many rows inside the block.

        Args:
            rows: that the request will run.
            size: of its inputs and maps, in bytes.
            caller: that sent the request.
            wait: for room, rather than refuse.

        Raises:
            ResourceExhausted: there is no room; `retry_after` is a guess at when there will be.
            Unavailable: there is no engine.
            InvalidArgument: there never will be.
        """
        self._check_there()
        if rows > self.limit:
            raise InvalidArgument(f"the request costs {rows} rows, and {self.limit} is the limit")
        places = min(max(rows, -(-size // PLACE)), self.limit)
        return self._door.admit(places, caller=caller, wait=wait)

    def _refused(self, words: str) -> ResourceExhausted:
        self.stats.refused += 1
        return ResourceExhausted(words, retry_after=self._retry_after(), shed="queue_full")

    async def submit(
        self,
        pass_: Pass,
        rows: Sequence[Row],
        collect: Collect,
        deadline: float = math.inf,
        spent: Spent | None = None,
        origin: Origin = IN_PROCESS,
    ) -> Spent:
        """Run rows.

        Args:
            pass_: what they have in common.
            rows: at least one.
            collect: takes the index of a row and its result; called as they come, in the rows' order.
            deadline: on the event loop's clock; rows that have not run by then never will.
            spent: where the request's time went so far; it is added to.
            origin: where the request comes from.

        Returns:
            Where the time went.

        Raises:
            DeadlineExceeded: the deadline passed before the last row was put in a batch.
            Unavailable: there is no engine.
            Internal: the worker that ran them ended, and they may be why.
            Exception: whatever the engine raised for a row that it could not compute.
        """
        self._check_there()
        loop, spent = asyncio.get_running_loop(), spent or Spent()
        request = PendingRequest(pass_, rows, collect, deadline, loop.time(), loop.create_future(), spent, origin)
        spent.change(request.arrived, submitted=1)
        self._queue.add(request)
        self._arrived.set()
        try:
            await request.done  # a cancelled caller cancels the future, and with it the rows not yet run
        except BaseException:
            self._queue.drop(request)  # now, and not when the next batch is formed: its rows hold images
            raise
        finally:
            spent.change(loop.time(), submitted=-1)
        return spent

    async def _serve(self, engine: _Engine) -> None:
        """Pull batches for an engine, and share it with a second batch unless one is alone."""
        while True:
            batch = await self._pulled(engine, 0)
            if not batch:
                await self._run_again(engine)
            elif not self._capacity.may_share(batch[0][0].pass_):
                await self._begin_alone(engine)
                await self._execute(engine, batch, None)
            elif self._streams:
                engine.halved.set()
                await self._execute(engine, batch, 0)
            elif self._partitioned and (engine.inputs[1] or not self._is_alone(batch)):
                engine.halved.set()
                await self._execute(engine, batch, 0)
                engine.halved.clear()
            else:
                await self._execute(engine, batch, None)
            engine.inputs[0] = 0

    async def _serve_second(self, engine: _Engine) -> None:
        """Pull batches for the second half of an engine, or its second stream, whenever that may run one."""
        while True:
            batch = await self._pulled(engine, 1, engine.halved)
            await self._execute(engine, batch, 1)
            engine.inputs[1] = 0
            engine.second_idle.set()

    async def _pulled(self, engine: _Engine, partition: Partition, *may: asyncio.Event) -> list[RowRef]:
        """Wait until an engine, or half of it, may run a batch, and there is one; none where rows are run again."""
        needed = (*may, engine.resumed)
        while True:
            for event in (*needed, self._arrived):
                await event.wait()
            if self._again and partition == 0:
                return []
            await self._wait_for_batch()
            if not all(event.is_set() for event in needed):
                self._arrived.set()  # which waiting for company has cleared, and another engine waits for
                continue
            most = self._share(engine.inputs[1 - partition]) if self._partitioned else self._max_batch
            if batch := self._formed(most, in_parallel=partition == 1):
                engine.inputs[partition] = _inputs(batch)
                if partition:
                    engine.second_idle.clear()
                self._arrived.set()  # there may be more, for whichever engine is free next
                return batch
            self._wait_for_more(engine, partition)

    def _wait_for_more(self, engine: _Engine, partition: Partition) -> None:
        """Have an engine, or half of it, wait, as nothing is there that it may run."""
        if partition and (self._queue or self._again):
            engine.halved.clear()  # what is next may not run beside another batch: the first half takes it
        elif not self._again:
            self._arrived.clear()

    @staticmethod
    async def _begin_alone(engine: _Engine) -> None:
        """Wait until nothing runs on the second half of an engine, and let nothing begin there."""
        engine.halved.clear()
        await engine.second_idle.wait()

    async def _run_again(self, engine: _Engine) -> None:
        """Run rows again that were in a batch whose worker ended, or that found no memory, with nothing beside them."""
        await self._begin_alone(engine)
        if not self._again:
            return
        again, failed = self._again.popleft(), self.stats.failed
        self._account(again.batch)
        await self._execute(engine, again.batch, None)
        if again.crowded and self.stats.failed == failed:
            self._capacity.cut(again.batch[0][0].pass_, _inputs(again.batch))

    def _is_alone(self, batch: list[RowRef]) -> bool:
        """Tell whether a batch may have all of an engine, as nothing else waits that may have a half."""
        return self._queue.inputs < (self._max_batch if self._halves_are_full(list(dict(batch))) else 1)

    def _share(self, other: int) -> int:
        """Return how many inputs half of an engine takes: as many as the other has, which works on so many, or will."""
        share = self._max_batch if self._halves_are_full() else -(-(self._queue.inputs + other) // 2)
        return min(self._max_batch, share)

    def _halves_are_full(self, more: Sequence[PendingRequest] = ()) -> bool:
        """Tell whether only full batches share an engine.

        Rows are held back until a batch is full; or short requests come while long ones wait, and these shall not take
        a half that a short one would wait for.
        """
        has_long = self._queue.has_long or any(map(self._queue.is_long, more))
        return self._max_delay > 0 or (has_long and self._queue.short_requests_recent)

    async def _wait_for_batch(self) -> None:
        """Wait for more rows, no longer than the oldest may be held back, and not for a full batch."""
        while self._max_delay and (held := self._queue.held_back()):
            since, rows = held
            left = since + self._max_delay - asyncio.get_running_loop().time()
            if left <= 0 or rows >= self._max_batch:
                return
            self._arrived.clear()
            try:
                async with asyncio.timeout(left):
                    await self._arrived.wait()
            except TimeoutError:
                return

    def _formed(self, most: int, *, in_parallel: bool) -> list[RowRef]:
        """Form the next batch, of at most `most` inputs; return an empty one if no row may run now."""
        batch = self._queue.form(most, in_parallel=in_parallel)
        if batch:
            self._account(batch)
        return batch

    def _account(self, batch: list[RowRef]) -> None:
        now = asyncio.get_running_loop().time()
        self.stats.batches += 1
        self.stats.rows += len(batch)
        for request in dict(batch):
            if request.record:
                request.record.stage("queue", request.since, now)
            request.spent.batch_rows = max(request.spent.batch_rows, len(batch))
            request.since = now

    async def _execute(self, engine: _Engine, batch: list[RowRef], partition: Partition | None) -> None:
        """Run a batch; one that fails is split until the row at fault is alone."""
        batch = [(request, index) for request, index in batch if not request.done.done()]
        if not batch:
            return
        pass_ = batch[0][0].pass_
        try:
            results = await self._timed(engine, batch, partition)
        except WorkerLost as error:
            engine.halved.clear()  # what is run again goes before all others
            self._suspect(batch, error)
            return
        except Exception as error:  # noqa: BLE001 -- whatever a row raises, its neighbours are answered
            if isinstance(error, OutOfMemory) and self._streams and partition is not None:
                self._run_alone_later(engine, batch)
            else:
                await self._isolate(engine, batch, partition, error)
            return
        self.stats.answered += len(batch)
        self._capacity.went_well(pass_, _inputs(batch))
        for (request, index), result in zip(batch, results, strict=True):
            request.deliver(index, result)

    def _run_alone_later(self, engine: _Engine, batch: list[RowRef]) -> None:
        """Have a batch that found no memory beside another one run again alone, before others fill the memory."""
        engine.halved.clear()
        self._again.append(_Again(batch, crowded=True))
        self._arrived.set()

    def _suspect(self, batch: list[RowRef], error: WorkerLost) -> None:
        """Have the requests of a batch whose worker ended run again, each alone, unless it is known which was why."""
        alone = len(dict(batch)) == 1 and not error.others
        for request in dict(batch):
            places = [place for place in batch if place[0] is request]
            if error.process_id:
                request.lost.add(error.process_id)
            if len(request.lost) > 1 or (request.lost and alone):
                self.stats.failed += len(places)
                request.fail(Internal(f"{error.message}; the request is not run again", shed=error.shed))
            else:
                self._again.append(_Again(places))
        log.warning("a batch was lost: %s", error.message, extra=logs.fields(rows=len(batch), again=len(self._again)))
        self._arrived.set()

    async def _timed(self, engine: _Engine, batch: list[RowRef], partition: Partition | None) -> list[RowResult]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        rows, requests = [request.rows[index] for request, index in batch], dict(batch)
        for request in requests:
            request.spent.change(began, running=1)
        work = engine.count(began, 1)
        try:
            results = await engine.ask(batch[0][0].pass_, rows, partition)
        except asyncio.CancelledError:
            for request, _ in batch:
                request.fail(Unavailable("the server is shutting down"))
            raise
        finally:
            ended = loop.time()
            for request in requests:
                request.spent.change(ended, running=-1)
            work = engine.count(ended, -1) - work
            whole = work if self._streams else (ended - began) * (1 if partition is None else 0.5)
            self._tell(batch, (began, ended), whole)
        if len(results) != len(rows):
            raise Internal(f"the engine answered {len(rows)} rows with {len(results)}")
        self._row_seconds += 0.2 * (whole / len(rows) - self._row_seconds)
        self._capacity.measured(_kinds(batch), whole)
        for request in requests:
            request.since = ended
        return results

    def _tell(self, batch: list[RowRef], times: tuple[float, float], work: float) -> None:
        if self.told:
            pass_, (began, ended) = batch[0][0].pass_, times
            records = [request.record for request in dict(batch) if request.record]
            try:
                self.told.ran(Ran(pass_.model, pass_.kind, len(batch), began, ended, records, work))
            except Exception:  # whoever listens, the rows are computed
                log.exception("nobody could be told of a batch")

    async def _isolate(
        self, engine: _Engine, batch: list[RowRef], partition: Partition | None, error: Exception
    ) -> None:
        if len(batch) == 1:
            self.stats.failed += 1
            batch[0][0].fail(error)
            return
        middle = len(batch) // 2
        before = self.stats.failed
        await self._execute(engine, batch[:middle], partition)
        await self._execute(engine, batch[middle:], partition)
        if isinstance(error, OutOfMemory) and self.stats.failed == before:
            # Both halves went well: it was the size, and not one row that takes all there is.
            self._capacity.cut(batch[0][0].pass_, _inputs(batch))

    def _retry_after(self) -> float:
        seconds = self.admitted * self._row_seconds / len(self._engines)
        return min(max(seconds / 2, SHORTEST_RETRY), LONGEST_RETRY)


def _kinds(batch: Sequence[RowRef]) -> Counter[RowKind]:
    """Count the rows of each kind in a batch."""
    kinds = Counter[RowKind]()
    for request, rows in Counter(request for request, _ in batch).items():
        kinds[request.kind] += rows
    return kinds


def _inputs(batch: Sequence[RowRef]) -> int:
    """Count the distinct inputs of a batch."""
    return len({request.rows[index].input for request, index in batch})


def _contained(run: Run, *arguments: object) -> list[RowResult]:
    """Run a batch; a model that calls `sys.exit` fails its rows, and not the server."""
    try:
        return run(*arguments)
    except Exception:
        raise
    except BaseException as error:
        raise Internal("the model tried to end the server") from error
