"""Explain and evaluate: a validated request in, a result out, and no protocol. What every border calls.

ExplainRequest -> images (decode, in a thread) -> batcher (wait for a batch) -> engine (capture) -> methods (map)
-> render (picture, in a thread) -> ExplainResult
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeAlias, TypeVar, overload

from camserve_server import jobs
from camserve_server.core.arrays import Input, Pixels
from camserve_server.core.errors import InvalidArgument
from camserve_server.core.limits import Limits
from camserve_server.engine.values import Row
from camserve_server.imaging import images, render
from camserve_server.imaging.values import Box, Rendering
from camserve_server.methods import METHODS
from camserve_server.models.values import KnownModel, ModelInfo, Pass
from camserve_server.scheduling import Batcher, Collect
from camserve_server.scheduling.admission import Admission, FairThreads, MemoryBudget, Stay
from camserve_server.scheduling.threads import in_thread
from camserve_server.serving import receipts
from camserve_server.serving.receipts import Receipt
from camserve_server.serving.repository import Lifecycle
from camserve_server.serving.requests import EvaluateRequest, ExplainRequest
from camserve_server.serving.results import ExplainResult, ModelPrediction, Timing
from camserve_server.targets import carried, kind_of, whole, with_box
from camserve_server.targets.values import SimilarityTarget, Target
from camserve_server.telemetry import IN_PROCESS, Origin, RequestTrace, Spent

P = ParamSpec("P")
T = TypeVar("T")

HELD = 3_000_000  # bytes of a decoded photo that are held while its request waits; larger ones are decoded again
PHOTO_BUDGET = 32 * 2**20  # bytes of decoded photos held together; where there is no room for one it is decoded again
DRAWING_LIMIT = 160 * 2**20  # bytes of all photos that are being decoded, and pictures being drawn; others wait
DRAWING_SHARE = 8 * 2**20  # bytes of it that each caller may have, however many there are
DRAWN_AT_ONCE = 1_000_000  # pixels of pictures drawn before others have a turn: some 5 ms
PICTURES = 32 * 2**20  # bytes of the pictures in a reply at most
REPLIES = 96 * 2**20  # bytes of all replies that are not sent yet, with their copies; others wait before they are drawn
CALLERS_REPLIES = 64 * 2**20  # bytes of them that one caller may have: one that reads nothing holds up nobody else
COPIES = 3  # of a reply: the message, its serialised form, and what gRPC holds until it is sent
RGB = 3  # bytes of a pixel
FLOAT = 4  # bytes of a number of a map
EDITED = FLOAT  # bytes of a pixel of what is edited in an image: a mask
PIXELWISE_TOP = 0.99  # quantile of a map of the input's pixels that has the strongest colour: Smilkov et al. 2017


@dataclass(frozen=True, slots=True)
class _View:
    """A photo, decoded.

    Attributes:
        photo: uint8 [height, width, 3]; None where it is too large to be held while its request waits.
        size: its height and width.
        image: what the model sees.
        seen: the part of the photo that this is.
        targets: what is explained, every box in the model's input and every other image as the model sees it.
        receipt: what was explained, by what and on what.
    """

    photo: Pixels | None
    size: tuple[int, int]
    image: Input
    seen: Box
    targets: tuple[Target, ...]
    receipt: Receipt


Work: TypeAlias = Callable[[_View, jobs.Submit], Awaitable[jobs.Outcome]]
"""What is done with a photo, and how rows are run meanwhile."""


def _unchanged(result: ExplainResult) -> ExplainResult:
    return result


@dataclass(frozen=True, slots=True)
class Pipeline:
    """All that a request goes through.

    Attributes:
        lifecycle: of the models.
        batcher: that runs rows.
        threads: that decode and draw, a step of each caller in turn.
        limits: on what one request may ask for.
        shelf: where decoded photos are held while their requests wait.
        easel: has room for so many bytes of photos that are being decoded, and of pictures that are being drawn.
        replies: has room for so many bytes of replies that are not sent yet.
        origin: where the requests come from that this pipeline is called for.
    """

    lifecycle: Lifecycle
    batcher: Batcher
    threads: FairThreads
    limits: Limits
    photo_budget: MemoryBudget = field(default_factory=lambda: MemoryBudget(PHOTO_BUDGET))
    drawing_limit: Admission = field(default_factory=lambda: Admission(DRAWING_LIMIT, DRAWING_SHARE, line=math.inf))
    replies: Admission = field(
        default_factory=lambda: Admission(REPLIES, DRAWING_SHARE, line=math.inf, most=CALLERS_REPLIES)
    )
    origin: Origin = IN_PROCESS

    def called_by(self, caller: str, record: RequestTrace | None) -> "Pipeline":
        """Return the same pipeline, for the requests of one caller.

        Args:
            caller: the name of a token, or an address.
            record: of the request; None where there is no telemetry.
        """
        return replace(self, origin=Origin(caller, record))

    @property
    def models(self) -> Mapping[str, KnownModel]:
        """The models that the configuration names; the first is the default."""
        return self.lifecycle.models

    @asynccontextmanager
    async def admitted(self, model: ModelInfo, rows: int, *, size: int, wait: bool = False) -> AsyncIterator[None]:
        """Hold room for a request inside the block, and the version of the model that it was read against.

        Args:
            model: that it is about.
            rows: that it will run at once.
            size: of its inputs and maps, in bytes.
            wait: for room, rather than refuse.
        """
        clock, (caller, record) = asyncio.get_running_loop().time, (self.origin.caller, self.origin.record)
        began = clock()
        with self.lifecycle.held(model):
            async with self.batcher.admit(rows, size=size, caller=caller, wait=wait):
                if record:
                    record.model = model.name
                    record.stage("admission", began, clock())
                yield

    @overload
    async def explain(
        self,
        request: ExplainRequest,
        unsent: ExitStack,
        *,
        deadline: float = ...,
        wait: bool = ...,
        progress: jobs.Progress = ...,
    ) -> ExplainResult: ...

    @overload
    async def explain(
        self,
        request: ExplainRequest,
        unsent: ExitStack,
        *,
        encode: Callable[[ExplainResult], T],
        deadline: float = ...,
        wait: bool = ...,
        progress: jobs.Progress = ...,
    ) -> T: ...

    async def explain(
        self,
        request: ExplainRequest,
        unsent: ExitStack,
        *,
        encode: Callable[[ExplainResult], Any] = _unchanged,
        deadline: float = math.inf,
        wait: bool = False,
        progress: jobs.Progress = jobs.unheard,
    ) -> Any:
        """Explain one image.

        Args:
            request: what to explain, and how to draw it.
            unsent: to be closed when the reply is sent: releases its memory.
            encode: makes the reply of the result, in the thread that drew the last picture.
            deadline: on the event loop's clock.
            wait: for room in the queue, rather than be refused.
            progress: is notified how many rows are done, and of how many.

        Returns:
            The reply; without `encode`, the result.

        Raises:
            ServiceError: whatever was wrong.
        """
        render.colormap(request.rendering.colormap)

        async def work(view: _View, submit: jobs.Submit) -> jobs.Outcome:
            return await jobs.explain(
                replace(request.job, targets=view.targets),
                view.image,
                submit,
                chunk=self.limits.chunk,
                think=self.in_thread,
                progress=progress,
            )

        rows = min(request.job.rows, self.limits.chunk)
        size = _images_of(request.job, rows) + _maps_of(request.job)
        async with self.admitted(request.job.model, rows, size=size, wait=wait):
            return await self._explained(request, work, encode, deadline, unsent)

    @overload
    async def evaluate(
        self, request: EvaluateRequest, unsent: ExitStack, *, deadline: float = ...
    ) -> tuple[ExplainResult, jobs.Readings]: ...

    @overload
    async def evaluate(
        self,
        request: EvaluateRequest,
        unsent: ExitStack,
        *,
        encode: Callable[[ExplainResult], T],
        deadline: float = ...,
    ) -> tuple[T, jobs.Readings]: ...

    async def evaluate(
        self,
        request: EvaluateRequest,
        unsent: ExitStack,
        *,
        encode: Callable[[ExplainResult], Any] = _unchanged,
        deadline: float = math.inf,
    ) -> tuple[Any, jobs.Readings]:
        """Explain one image, and evaluate every map.

        Args:
            request: what to explain, and by which metrics to evaluate it.
            unsent: to be closed when the reply is sent: releases its memory.
            encode: makes the reply of the explanations, in the thread that drew the last picture.
            deadline: on the event loop's clock.

        Returns:
            What `explain` returns; and for each explanation, one reading of each metric.

        Raises:
            ServiceError: whatever was wrong; its field is one of the request to explain.
        """
        asked, job = request.assessment, request.explain.job
        readings: jobs.Readings = []

        async def work(view: _View, submit: jobs.Submit) -> jobs.Outcome:
            asking = replace(asked, job=replace(job, targets=view.targets))
            outcome, found = await jobs.evaluate(
                asking, view.image, view.seen, submit, chunk=self.limits.chunk, think=self.in_thread
            )
            readings.extend(found)
            return outcome

        render.colormap(request.explain.rendering.colormap)
        rows = min(asked.rows, self.limits.chunk)
        size = EDITED * rows * math.prod(job.model.preprocess.size) + _maps_of(job)
        async with self.admitted(job.model, rows, size=size):
            return await self._explained(request.explain, work, encode, deadline, unsent), readings

    async def reserve_reply(self, size: int, unsent: ExitStack) -> None:
        """Reserve memory for a reply and its copies; wait until there is enough.

        Args:
            size: bytes of the reply.
            unsent: to be closed when the reply is sent: releases the memory.
        """
        room = min(COPIES * size, CALLERS_REPLIES)
        unsent.callback(await self.replies.hold(room, caller=self.origin.caller, wait=True))

    async def _explained(
        self,
        request: ExplainRequest,
        work: Work,
        encode: Callable[[ExplainResult], T],
        deadline: float,
        unsent: ExitStack,
    ) -> T:
        clock, spent, record = asyncio.get_running_loop().time, Spent(), self.origin.record

        async def submit(pass_: Pass, rows: Sequence[Row], collect: Collect) -> None:
            await self.batcher.submit(pass_, rows, collect, deadline, spent, self.origin)

        began = clock()
        async with self.decoding(request.image):
            view = await self._in_steps(_decoded(request, self.limits))
        decoded = clock()
        if record:
            record.stage("decode", began, decoded)
        with self.photo_budget.kept(0 if view.photo is None else view.photo.nbytes) as fits:
            view = view if fits else replace(view, photo=None)
            outcome = await work(view, submit)
            computed = clock()
            if record:
                record.explained += [(one.call.name, one.verdict.name) for one in outcome.explanations]

            def reply(explanations: list[jobs.Explanation]) -> T:
                rendering = clock() - computed
                timing = Timing(decoded - began, spent.queue, spent.compute, rendering, spent.batch_rows)
                prediction = ModelPrediction(request.job.model, outcome.logits, view.seen)
                return encode(ExplainResult(prediction, explanations, view.size, view.receipt, timing))

            await self.reserve_reply(_size_of_reply(request, view, outcome.explanations), unsent)
            if not (request.rendering.pictures or request.rendering.intensity):
                return reply(list(outcome.explanations))
            async with self._drawing(_memory_to_draw(request, view)):
                drawn = await self._in_steps(_drawn(request, view, outcome.explanations, self.limits, reply))
            if record:
                record.stage("render", computed, clock())
            return drawn

    def decoding(self, data: bytes) -> Stay:
        """Hold room for decoding a photo inside the block."""
        return self._drawing(images.memory_to_decode(data))

    def _drawing(self, size: int) -> Stay:
        return self.drawing_limit.admit(min(size, DRAWING_LIMIT), caller=self.origin.caller, wait=True)

    async def _in_steps(self, steps: Generator[None, None, T]) -> T:
        """Run what pauses now and then in a thread: others have their turn then, and it ends if its caller gave up."""
        while not (done := await self.in_thread(_advanced, steps)):
            pass
        return done[0]

    async def in_thread(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in one of the threads, when it is the caller's turn."""
        return await in_thread(self.threads.of(self.origin.caller), function, *args, **kwargs)


def _advanced(steps: Generator[None, None, T]) -> tuple[T] | None:
    """Go on to the next pause, or else to the end, and return what comes of it."""
    try:
        next(steps)
    except StopIteration as stop:
        return (stop.value,)
    return None


def _drawn(
    request: ExplainRequest,
    view: _View,
    found: Sequence[jobs.Explanation],
    limits: Limits,
    reply: Callable[[list[jobs.Explanation]], T],
) -> Generator[None, None, T]:
    """Draw the explanations, and make the reply in the same step; pause after every DRAWN_AT_ONCE pixels."""
    wants, photo, explanations = request.rendering, view.photo, list[jobs.Explanation]()
    if photo is None and wants.pictures:
        photo = images.decode(request.image, limits)
        yield
    together = max(1, round(DRAWN_AT_ONCE / (_pixels_of(wants, view.size) or math.prod(view.image.shape[:2]))))
    size = 0
    for explanation in found:
        if explanations and len(explanations) % together == 0:
            yield
        explanations.append(_pictured(explanation, photo, view, wants))
        size += sum(len(one.data) for one in (explanations[-1].overlay, explanations[-1].heatmap_image) if one)
        if size > PICTURES:
            raise InvalidArgument(
                f"the pictures take more than {PICTURES // 2**20} MiB: set max_side, ask for fewer, or for JPEG",
                field="rendering.max_side",
            )
    return reply(explanations)


def _memory_to_draw(request: ExplainRequest, view: _View) -> int:
    """Return an upper bound, in bytes, of the memory to draw a request's pictures, and to decode its photo again."""
    wants = request.rendering
    if not wants.pictures:
        return 0
    again = images.memory_to_decode(request.image) if view.photo is None else 0
    each = RGB * math.ceil(_pixels_of(wants, view.size))
    held = RGB * math.prod(view.size) * (view.photo is None) + each
    return max(again, held) + min(request.job.explanations * each, PICTURES)


def _size_of_reply(request: ExplainRequest, view: _View, explanations: Sequence[jobs.Explanation]) -> int:
    """Return about how many bytes the pictures and numbers of a reply take: a JPEG or WebP picture, a byte a pixel."""
    wants = request.rendering
    each = math.ceil(_pixels_of(wants, view.size)) * (RGB if "png" in (wants.overlay, wants.heatmap_image) else 1)
    pictures = min(len(explanations) * each, PICTURES)
    numbers = FLOAT * len(explanations) * math.prod(view.image.shape[:2]) * wants.intensity
    return pictures + numbers + sum(one.heatmap.nbytes for one in explanations) * wants.heatmap


def _pictured(explanation: jobs.Explanation, photo: Pixels | None, view: _View, wants: Rendering) -> jobs.Explanation:
    """Return an explanation with its pictures."""
    heatmap = explanation.heatmap
    size = (view.image.shape[0], view.image.shape[1])
    top = PIXELWISE_TOP if heatmap.shape == size else 1.0
    full = render.intensities(heatmap, wants.profile, size, top) if wants.whole else None
    if photo is None:
        return replace(explanation, intensity=full)
    # The papers' intensities are drawn from the layer's own grid: one interpolation, straight to the photo.
    drawn = render.intensity(heatmap, top) if full is None or wants.profile == "paper" else full
    overlay, heatmap_image = render.draw(photo, drawn, view.seen, wants)
    intensity = full if wants.intensity else None
    return replace(explanation, overlay=overlay, heatmap_image=heatmap_image, intensity=intensity)


def _decoded(request: ExplainRequest, limits: Limits) -> Generator[None, None, _View]:
    """Decode the photo, and the images of its targets; pause after each."""
    _check_pixels(request, limits)
    photo = images.decode(request.image, limits)
    size = (photo.shape[0], photo.shape[1])
    _check_drawing(request, size, limits)
    image, seen = images.prepared(photo, request.image, request.job.model.preprocess)
    kept = photo if request.rendering.pictures and photo.size <= HELD else None
    del photo  # while others have their turn
    targets = list[Target]()
    for place, target in enumerate(request.job.targets):
        if kind_of(target).compared(target):
            yield
        targets.append(_aimed(target, place, request, seen, limits))
    receipt = receipts.receipt_of(request.job.model, request.image, image)
    return _View(kept, size, image, seen, tuple(targets), receipt)


def _check_pixels(request: ExplainRequest, limits: Limits) -> None:
    """Refuse a request whose images have more pixels between them than one may have.

    Raises:
        InvalidArgument: they have, or one of them cannot be read.
    """
    others = [
        (place, one) for place, target in enumerate(request.job.targets) if (one := kind_of(target).compared(target))
    ]
    total = images.pixels_of(request.image, limits) if others else 0
    for place, target in others:
        with _field_of(place):
            total += images.pixels_of(target.file, limits)
            if total > limits.pixels:
                raise InvalidArgument(
                    f"the photo and the images of its targets have more than {limits.pixels:,} pixels between them: "
                    "send smaller ones"
                )


@contextmanager
def _field_of(place: int) -> Iterator[None]:
    """Name the field of a target's image in the errors of the block."""
    try:
        yield
    except InvalidArgument as error:
        raise InvalidArgument(error.message, field=f"targets[{place}].similarity.image") from error


def _aimed(target: Target, place: int, request: ExplainRequest, seen: Box, limits: Limits) -> Target:
    """Bring what a target says of photos to what the model sees of them."""
    preprocess = request.job.model.preprocess
    kind = kind_of(target)
    if other := kind.compared(target):
        with _field_of(place):
            photo = images.decode(other.file, limits)
            return SimilarityTarget(image=images.prepared(photo, other.file, preprocess)[0])
    if box := kind.box(target):
        field = f"targets[{place}].{kind.name}.{_BOX_FIELDS[kind.name]}"
        return with_box(target, _in_input(box, seen, preprocess.size, field))
    return target


_BOX_FIELDS = {"segment": "region", "detection": "box"}  # of the request, by the kind of target


def _in_input(box: Box, seen: Box, size: tuple[int, int], field: str) -> Box:
    """Carry a box from the photo to the model's input."""
    found = carried(box, seen, whole(size))
    if min(found.right, found.bottom) <= 0 or found.left >= size[1] or found.top >= size[0]:
        part = f"from {seen.left:.0f} to {seen.right:.0f} across and from {seen.top:.0f} to {seen.bottom:.0f} down"
        raise InvalidArgument(f"the box is outside of what the model sees: {part}", field=field)
    return found


def _images_of(job: jobs.Job, rows: int) -> int:
    """Return an upper bound, in bytes, of the inputs of a job while `rows` of its rows are under way.

    Noisy copies are made in the engine; edited images are made here, with a mask for each row.
    """
    edited = any(METHODS[call.name].edits_image for call in job.calls)
    return math.prod(job.model.preprocess.size) * (RGB + edited * EDITED * rows)


def _maps_of(job: jobs.Job) -> int:
    """Return at most how many bytes a job's maps take, but for the first, which is small beside a message.

    Where a method starts from feature maps, those of the job's layers are counted, too.
    """
    features = sum(math.prod(job.model.layers[name].shape) for name in job.layers) if job.features else 0
    return 4 * (math.prod(job.model.preprocess.size) * (job.explanations - 1) + features)


def _check_drawing(request: ExplainRequest, size: tuple[int, int], limits: Limits) -> None:
    drawn = request.job.explanations * _pixels_of(request.rendering, size)
    if drawn > limits.drawn_pixels:
        raise InvalidArgument(
            f"the pictures have {drawn / 1e6:,.0f} million pixels, and {limits.drawn_pixels / 1e6:,.0f} is the limit: "
            "set max_side, or ask for fewer",
            field="rendering.max_side",
        )


def _pixels_of(wants: Rendering, size: tuple[int, int]) -> float:
    """Count the pixels of all the pictures of one map on a photo of that height and width."""
    shrunk = min(1.0, (wants.max_side or math.inf) / max(size))
    return wants.pictures * size[0] * size[1] * shrunk**2
