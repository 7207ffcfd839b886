"""Explain an image: the life of a request, from a validated `ExplainRequest` to its reply.

1. Admit: reserve memory and room in the queue, or refuse the request (`scheduling`).
2. Decode: make the model's input from the photo, in a thread (`photos`, `imaging`).
3. Run: divide the job into rows, and run them in batches with those of other requests (`jobs`, `scheduling`, `workers`,
   `engine`). Methods turn what the layers return into maps (`methods`).
4. Draw: colour the maps and encode the pictures, in a thread (`drawing`, `imaging.render`). This may have to wait until
   the caller reads earlier replies, so room in the queue and the model are released before.
5. Reply: make the reply from the `ExplainResult` with the given `encode`, in the same thread if anything was drawn.

This module knows no protocol: gRPC, the Open Inference Protocol and the in-process API all call `Pipeline.explain`.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ParamSpec, TypeAlias, TypeVar

from camserve_server import jobs
from camserve_server.core.limits import Limits
from camserve_server.engine.values import Row
from camserve_server.imaging import render
from camserve_server.models.values import KnownModel, ModelInfo, Pass
from camserve_server.scheduling import Batcher, Collect
from camserve_server.scheduling.admission import Admission, FairThreads, MemoryBudget, Reservation
from camserve_server.scheduling.threads import in_thread
from camserve_server.serving import memory
from camserve_server.serving.drawing import draw_and_reply, estimate_reply, memory_to_draw
from camserve_server.serving.photos import PreparedPhoto, memory_to_prepare, prepare_photo
from camserve_server.serving.replies import Replies, UntilSent
from camserve_server.serving.repository import ModelRepository
from camserve_server.serving.requests import ExplainRequest
from camserve_server.serving.results import ExplainResult, ModelPrediction, Timing
from camserve_server.serving.text_cache import TextCache
from camserve_server.telemetry import IN_PROCESS, Origin, RequestTimings, RequestTrace

P = ParamSpec("P")
T = TypeVar("T")

Compute: TypeAlias = Callable[[PreparedPhoto, jobs.Submit], Awaitable[jobs.JobResult]]
"""Computes the explanations of a photo. The second argument is the function that runs rows in batches."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request, or several to one model, for whose inputs and maps memory is held.

    Attributes:
        model: the model.
        arrived: time on the event loop's clock at which the request arrived.
        computed: function to call when its last row is computed; its version of the model may then be unloaded.
    """

    model: ModelInfo
    arrived: float
    computed: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Explained:
    """Explanations that are computed, and not drawn yet.

    Attributes:
        request: the pictures to draw.
        photo: the photo to draw on.
        result: the explanations.
        times: stopwatch of the request.
    """

    request: ExplainRequest
    photo: PreparedPhoto
    result: jobs.JobResult
    times: "_Times"

    @property
    def reply_bytes(self) -> int:
        """An upper bound of the bytes of the reply."""
        classes = 0 if self.result.class_map is None else self.result.class_map.nbytes
        return estimate_reply(self.request, self.photo, self.result.explanations) + classes

    def make_reply(self, encode: Callable[[ExplainResult], T], explanations: list[jobs.Explanation]) -> T:
        """Return the encoded reply with these explanations, which are drawn."""
        photo, result = self.photo, self.result
        timing = self.times.timing()
        prediction = ModelPrediction(photo.job.model, result.logits, photo.seen)
        others = result.unchanged_logits
        unchanged = None if others is None else replace(prediction, values=others)
        numbers = (photo.size, photo.receipt, timing, result.class_map, unchanged)
        return encode(ExplainResult(prediction, explanations, *numbers))


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The steps of a request, and the resources that all requests share.

    Attributes:
        repository: the models, and how to load and unload them.
        batcher: queue that runs rows in batches.
        threads: threads that decode and draw; callers take turns.
        limits: limits on one request.
        photo_budget: memory for decoded photos that are kept until their maps are drawn.
        image_memory: memory for photos being decoded and pictures being drawn.
        replies: memory for replies that are not sent yet.
        origin: the caller and the trace of the request; see `for_caller`.
        text_cache: embeddings of texts.
    """

    repository: ModelRepository
    batcher: Batcher
    threads: FairThreads
    limits: Limits
    photo_budget: MemoryBudget = field(default_factory=memory.photo_budget)
    image_memory: Admission = field(default_factory=memory.image_memory)
    replies: Replies = field(default_factory=Replies)
    origin: Origin = IN_PROCESS
    text_cache: TextCache = field(default_factory=TextCache)

    def for_caller(self, caller: str, trace: RequestTrace | None) -> "Pipeline":
        """Return a copy for one request, with the same resources.

        Args:
            caller: name of the caller's token, or its address.
            trace: trace of the request; None without telemetry.
        """
        shared = (self.repository, self.batcher, self.threads, self.limits)
        memory_limits = (self.photo_budget, self.image_memory, self.replies)
        return Pipeline(
            *shared, *memory_limits, Origin(caller, trace), self.text_cache
        )  # `replace` takes three times as long

    @property
    def models(self) -> Mapping[str, KnownModel]:
        """The models of the configuration, by name; the first is the default."""
        return self.repository.models

    async def explain(
        self,
        request: ExplainRequest,
        until_sent: UntilSent,
        *,
        encode: Callable[[ExplainResult], T],
        deadline: float = math.inf,
        wait: bool = False,
        progress: jobs.Progress = jobs.ignore_progress,
    ) -> T:
        """Explain one image.

        Args:
            request: the job, the photo, and the pictures to draw.
            until_sent: stack that the calling code closes when the reply is sent, to release the reply's memory.
            encode: makes the reply from the result; called in the thread of the last drawing step, or on the loop.
            deadline: time on the event loop's clock after which no row enters a batch. The other steps end when the
                call is cancelled.
            wait: True to wait for room in the queue instead of being refused.
            progress: called with the number of rows done and the number of all rows.

        Returns:
            The encoded reply.

        Raises:
            ServiceError: the request was refused, or failed.
        """
        async with (
            self.accept([request], wait=wait) as accepted,
            self.explained(request, accepted, deadline=deadline, wait=wait, progress=progress) as explained,
        ):
            accepted.computed()
            await self.reserve_reply(explained.reply_bytes, until_sent)
            return await self.draw(explained, encode)

    def accept(
        self, requests: Sequence[ExplainRequest], *, wait: bool = False
    ) -> AbstractAsyncContextManager[Accepted]:
        """Hold memory for the inputs and maps of requests to one model inside the block; see `hold`.

        Raises:
            ServiceError: a request is invalid, or there is no memory.
        """
        for request in requests:
            render.check_colormap(request.rendering.colormap)  # an unknown name is refused before it costs anything
        size = sum(self._job_bytes(request.job) for request in requests)
        return self.hold(requests[0].job.model, size, wait=wait)

    def _job_bytes(self, job: jobs.Job) -> int:
        return memory.input_bytes(job, self._rows(job)) + memory.map_bytes(job)

    def _rows(self, job: jobs.Job) -> int:
        return min(job.rows, self.chunk(job, edits=memory.edits_image(job)))

    def chunk(self, job: jobs.Job, *, edits: bool) -> int:
        """Return the largest number of rows that a job has in the queue.

        Args:
            job: the job.
            edits: True if its rows are edited images, of which there are as many as memory allows.
        """
        most = self.batcher.largest // memory.row_bytes(job) if edits else self.limits.chunk
        return min(self.limits.chunk, max(1, most))

    def explained(
        self,
        request: ExplainRequest,
        accepted: Accepted,
        *,
        deadline: float = math.inf,
        wait: bool = False,
        progress: jobs.Progress = jobs.ignore_progress,
    ) -> AbstractAsyncContextManager[Explained]:
        """Compute the explanations of one image, and keep them inside the block; the arguments are those of `explain`.

        Raises:
            ServiceError: the request was refused, or failed.
        """
        chunk = self.chunk(request.job, edits=memory.edits_image(request.job))

        async def compute(photo: PreparedPhoto, submit: jobs.Submit) -> jobs.JobResult:
            return await jobs.explain(
                photo.job, photo.image, submit, chunk=chunk, execute=self.in_thread, progress=progress
            )

        return self.run(request, compute, accepted, rows=self._rows(request.job), deadline=deadline, wait=wait)

    @asynccontextmanager
    async def run(
        self,
        request: ExplainRequest,
        compute: Compute,
        accepted: Accepted,
        *,
        rows: int,
        deadline: float,
        wait: bool = False,
    ) -> AsyncIterator[Explained]:
        """Admit a request, decode its photo and compute its explanations; keep them inside the block.

        Room in the queue is held until the explanations are computed.

        Args:
            request: the photo, and the pictures to draw.
            compute: computes the explanations.
            accepted: the request, for which memory is held.
            rows: the number of rows that the request runs at a time.
            deadline: time on the event loop's clock after which no row enters a batch. The other steps end when the
                call is cancelled.
            wait: True to wait for room instead of being refused.
        """
        clock, trace = asyncio.get_running_loop().time, self.origin.record
        with ExitStack() as kept:
            async with self.admit(rows, accepted, wait=wait):
                times = _Times(clock, began=clock())
                submit = submit_for(self, deadline, times.timings)
                async with self.reserve_drawing(memory_to_prepare(request, self.limits)):
                    photo = await self.run_in_steps(prepare_photo(request, self.limits))
                times.decoded = clock()
                if trace:
                    trace.stage("decode", times.began, times.decoded)
                pixels = 0 if photo.pixels is None else photo.pixels.nbytes
                fits = kept.enter_context(self.photo_budget.reserve(pixels, self.origin.caller))
                photo = photo if fits else replace(photo, pixels=None)
                result = await compute(photo, submit)
                times.computed = clock()
            if trace:
                trace.explained += [(each.call.name, each.verdict.name) for each in result.explanations]
            yield Explained(request, photo, result, times)

    @asynccontextmanager
    async def hold(self, model: ModelInfo, size: int, *, wait: bool = False) -> AsyncIterator[Accepted]:
        """Hold memory for inputs and maps inside the block, and a version of the model until they are computed.

        Args:
            model: the model of the request.
            size: bytes of the inputs and maps of the request.
            wait: True to wait for memory instead of being refused.
        """
        arrived = asyncio.get_running_loop().time()
        with ExitStack() as until_computed:
            until_computed.enter_context(self.repository.held(model))
            async with self.batcher.reserve(size, caller=self.origin.caller, wait=wait):
                yield Accepted(model, arrived, until_computed.close)

    @asynccontextmanager
    async def admit(self, rows: int, accepted: Accepted, *, wait: bool = False) -> AsyncIterator[None]:
        """Hold room in the queue until the block ends.

        Args:
            rows: the number of rows that the request runs at a time.
            accepted: the request.
            wait: True to wait for room instead of being refused.
        """
        async with self.batcher.admit(rows, caller=self.origin.caller, wait=wait):
            if trace := self.origin.record:
                trace.model = accepted.model.name
                trace.stage("admission", accepted.arrived, asyncio.get_running_loop().time())
            yield

    async def draw(self, explained: Explained, encode: Callable[[ExplainResult], T]) -> T:
        """Draw explanations and make the reply, for which memory is reserved.

        Args:
            explained: the explanations.
            encode: makes the reply from the result; called in the thread of the last drawing step, or on the loop.
        """
        request, photo, result = explained.request, explained.photo, explained.result
        make_reply = partial(explained.make_reply, encode)
        if not request.rendering.derived:
            return make_reply(list(result.explanations))
        async with self.reserve_drawing(memory_to_draw(request, photo, self.limits)):
            steps = draw_and_reply(request, photo, result.explanations, self.limits, make_reply)
            reply = await self.run_in_steps(steps)
        if trace := self.origin.record:
            trace.stage("render", explained.times.computed, explained.times.clock())
        return reply

    async def reserve_reply(self, size: int, until_sent: UntilSent) -> None:
        """Reserve memory for a reply and its copies; wait until there is enough.

        Args:
            size: bytes of the reply.
            until_sent: stack that the calling code closes when the reply is sent, to release the memory.

        Raises:
            ResourceExhausted: the caller has not read its earlier replies in time.
        """
        reserved = min(memory.REPLY_COPIES * size, memory.LARGEST_REPLY)
        await self.replies.reserve(reserved, self.origin.caller, until_sent)

    def reserve_drawing(self, size: int) -> Reservation:
        """Hold memory for photos, pictures or decompositions until the block ends; wait until there is enough."""
        return self.image_memory.admit(min(size, memory.IMAGE_MEMORY), caller=self.origin.caller, wait=True)

    async def run_in_steps(self, steps: Generator[None, None, T]) -> T:
        """Run a generator in threads, and return its result.

        At each pause other callers have their turn. If this call is cancelled, the generator stops at the next pause.
        """
        while not (result := await self.in_thread(_run_step, steps)):
            pass
        return result[0]

    async def in_thread(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in one of the threads, when it is the caller's turn."""
        return await in_thread(self.threads.of(self.origin.caller), function, *args, **kwargs)


def submit_for(pipeline: Pipeline, deadline: float, timings: RequestTimings) -> jobs.Submit:
    """Return the function that runs the rows of a request, or answers them from the cache of texts.

    Args:
        pipeline: the pipeline of the request.
        deadline: time on the event loop's clock after which no row enters a batch.
        timings: time in the queue and in batches, which is added to.
    """

    async def run(pass_: Pass, rows: Sequence[Row], collect: Collect) -> None:
        await pipeline.batcher.submit(pass_, rows, collect, deadline, timings, pipeline.origin)

    return pipeline.text_cache.before(run)


def _run_step(steps: Generator[None, None, T]) -> tuple[T] | None:
    """Run a generator up to its next pause and return None; at its end, return its result in a tuple."""
    try:
        next(steps)
    except StopIteration as stop:
        return (stop.value,)
    return None


@dataclass(slots=True)
class _Times:
    """Stopwatch of one request: the times at which its steps ended, on the event loop's clock.

    Attributes:
        clock: the event loop's clock.
        began: when decoding began.
        decoded: when the photo was decoded.
        computed: when all explanations were computed.
        timings: time in the queue and in batches.
    """

    clock: Callable[[], float]
    began: float
    decoded: float = 0.0
    computed: float = 0.0
    timings: RequestTimings = field(default_factory=RequestTimings)

    def timing(self) -> Timing:
        """Return the durations up to now."""
        drawing = self.clock() - self.computed
        return Timing(
            self.decoded - self.began, self.timings.queue, self.timings.compute, drawing, self.timings.batch_rows
        )
