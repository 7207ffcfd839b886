"""The run of an explanation of one image: what every method can ask for."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor

from camserve_server.core.arrays import Input
from camserve_server.engine import normalise, viewed
from camserve_server.engine.values import Row, RowResult
from camserve_server.imaging.values import View
from camserve_server.jobs.values import Collect, Job, Submit
from camserve_server.methods import METHODS
from camserve_server.methods.kinds import Array
from camserve_server.methods.values import Edit, MethodCall
from camserve_server.models.values import Kind, Pass, Randomised
from camserve_server.targets import kind_of
from camserve_server.targets.values import FixedTarget, SimilarityTarget, Target

T = TypeVar("T")

Progress = Callable[[int, int], None]


class Executor(Protocol):
    """Runs a function that takes a while, without blocking others."""

    def __call__(self, function: Callable[..., T], /, *args: object) -> Awaitable[T]:
        """Return what it returns."""


async def at_once(function: Callable[..., T], /, *args: object) -> T:
    """Run a function here and now."""
    return function(*args)


def advanced(trying: Generator[Sequence[Edit], Array, T], found: Array | None) -> tuple[Sequence[Edit], T | None]:
    """Send a method or a metric what came of its edits; return the next ones to try, or else what it has found."""
    try:
        return (next(trying) if found is None else trying.send(found)), None
    except StopIteration as stop:
        return (), stop.value


class RowRunner:
    """Runs a request's rows, a limited number at a time, and counts them.

    Args:
        submit: runs rows.
        chunk: rows under way at most.
        rows: that the request costs.
        progress: is told how many of them are done.
        think: runs what takes a while.
    """

    def __init__(self, submit: Submit, chunk: int, rows: int, progress: Progress, think: Executor) -> None:
        self.execute = think
        self._submit = submit
        self._rows = rows
        self._progress = progress
        self._done = 0
        self._chunk = chunk
        self._room = _Room(chunk)

    async def run(self, pass_: Pass, rows: Sequence[Row], collect: Collect) -> None:
        """Run rows; hand over each result, by the row's index, as it is there."""
        for start in range(0, len(rows), self._chunk):
            await self._some(pass_, rows[start : start + self._chunk], partial(_collect, collect, start))

    async def gather(self, parts: Sequence[tuple[int, Callable[[], Awaitable[T]]]]) -> list[T]:
        """Run parts of the request side by side, and return their results in order.

        A part makes its edits and maps while it runs. So parts run at the same time only if the sum of their rows is
        within the limit on rows under way; a part with more rows than that runs alone.

        Args:
            parts: the number of rows of each part, and the function that runs it.
        """
        room = _Room(self._chunk)

        async def run(rows: int, part: Callable[[], Awaitable[T]]) -> T:
            async with room.take(min(rows, self._chunk)):
                return await part()

        running = [asyncio.ensure_future(run(*one)) for one in parts]
        try:
            return await asyncio.gather(*running)
        finally:
            for one in running:
                one.cancel()

    async def _some(self, pass_: Pass, rows: Sequence[Row], collect: Collect) -> None:
        async with self._room.take(len(rows)):
            await self._submit(pass_, rows, collect)
        self._done += len(rows)
        self._progress(self._done, self._rows)


class _Room:
    """Semaphore of which several places are taken at a time, in the order of the requests.

    Args:
        places: the number of places.
    """

    def __init__(self, places: int) -> None:
        self._free = asyncio.Semaphore(places)
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def take(self, places: int) -> AsyncIterator[None]:
        """Hold places inside the block, at most as many as there are."""
        async with self._turn:  # two waiters that each held half of the places would wait for ever
            for _ in range(places):
                await self._free.acquire()
        try:
            yield
        finally:
            for _ in range(places):
                self._free.release()


def _collect(collect: Collect, start: int, index: int, result: RowResult) -> None:
    collect(start + index, result)


@dataclass(frozen=True, slots=True)
class ExplanationRun:
    """The explanation of one image, or of a view of it, while it runs.

    Attributes:
        job: what to find out.
        image: what the model sees.
        row_runner: runs rows.
        views: of the image.
        answers: for each target, the result of one pass over the unchanged image.
        randomised: what of the model has random weights; None for nothing.
    """

    job: Job
    image: Input
    row_runner: RowRunner
    views: tuple[View, ...] = ()
    answers: tuple[RowResult, ...] = ()
    randomised: Randomised | None = None

    @property
    def targets(self) -> tuple[FixedTarget, ...]:
        """The targets, fixed."""
        return tuple(answer.target for answer in self.answers)

    @property
    def input(self) -> Tensor:
        """What the model gets, normalised, [3,H,W]."""
        seen = normalise(torch.from_numpy(self.image)[None], self.job.model.preprocess)[0]
        for view in self.views:
            seen = viewed(seen, view)
        return seen

    def row(self, target: FixedTarget, calls: tuple[MethodCall, ...] = (), copy: int | None = None) -> Row:
        """Make a row of this image."""
        return Row(self.image, target, calls, copy, self.views)

    def pass_(self, kind: Kind, layers: Sequence[str] = ()) -> Pass:
        """Name a pass over this image's model."""
        return Pass(self.job.model.key, kind, self.job.model.preprocess.size, tuple(layers), self.randomised)

    def of(self, call: MethodCall, layers: Sequence[str] = (), view: View | None = None) -> "ExplanationRun":
        """Return the run of one method alone, for the same targets, on other layers or of a view."""
        job = replace(
            self.job, calls=(call,), layers=tuple(layers) or self.job.layers, targets=self.targets, fusion=None
        )
        return replace(self, job=job, views=(*self.views, view) if view else self.views, answers=())

    async def looked(self) -> "ExplanationRun":
        """Run the pass over the image as it is, and fix the targets by what it says."""
        targets = [cast("FixedTarget", await self._compared(target)) for target in self.job.targets]
        first, *more = self.job.shared
        answers = await self._answers(targets, first, features=self.job.features)
        for calls in more:
            others = await self._answers([one.target for one in answers], calls)
            answers = [_joined(one, other) for one, other in zip(answers, others, strict=True)]
        return replace(self, answers=tuple(answers))

    async def _answers(
        self, targets: Sequence[FixedTarget], calls: tuple[MethodCall, ...], *, features: bool = False
    ) -> list[RowResult]:
        """Run some of the methods that need only the unchanged image, for every target."""
        found: dict[int, RowResult] = {}
        rows = [self.row(target, calls) for target in targets]
        # Feature maps belong to the image and do not depend on the target: one row returns them for all.
        rows[0] = replace(rows[0], features=features)
        await self.row_runner.run(self._clean_pass(), rows, found.__setitem__)
        return [found[place] for place in range(len(rows))]

    async def _compared(self, target: Target) -> Target:
        """Run the other image of a likeness, so that its embedding is known."""
        other = kind_of(target).compared(target)
        if other is None or other.image is None:
            return target
        found: dict[int, RowResult] = {}
        await self.row_runner.run(self.pass_("score"), [Row(other.image, SimilarityTarget())], found.__setitem__)
        return found[0].target

    def _clean_pass(self) -> Pass:
        clean = self.job.clean
        if self.job.features or any(METHODS[call.name].layered for call in clean):
            return self.pass_("cam", self.job.layers)
        return self.pass_("saliency" if clean else "score")


def _joined(first: RowResult, second: RowResult) -> RowResult:
    """Join the maps of two rows of the same image and target, for each layer."""
    return replace(first, maps=tuple((*one, *other) for one, other in zip(first.maps, second.maps, strict=True)))
