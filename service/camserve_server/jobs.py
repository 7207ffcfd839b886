"""A request as the engine sees it: planned into rows, joined again into raw maps."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import torch

from camserve_server.engine import normalise
from camserve_server.methods import METHODS, Cam, Saliency
from camserve_server.methods.kinds import itself
from camserve_server.types import (
    FixedTarget,
    Map,
    MethodCall,
    ModelInfo,
    Pass,
    Pixels,
    Row,
    RowResult,
    Target,
    Verdict,
)

Collect = Callable[[int, RowResult], None]


class Submit(Protocol):
    """Runs rows in batches with others' and hands over each result, by the row's index, as it is there."""

    def __call__(self, pass_: Pass, rows: Sequence[Row], collect: Collect) -> Awaitable[None]:
        """Return when every result was collected."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to explain: every method, on every layer, for every target.

    Attributes:
        model: that is explained.
        calls: the methods, with their parameters.
        layers: for the methods that look at layers.
        targets: what is explained.
    """

    model: ModelInfo
    calls: tuple[MethodCall, ...]
    layers: tuple[str, ...]
    targets: tuple[Target, ...]

    @property
    def clean(self) -> tuple[MethodCall, ...]:
        """The methods that one pass over the image as it is can answer: all CAMs, or else one plain gradient."""
        cams = tuple(call for call in self.calls if isinstance(METHODS[call.name], Cam))
        plain = tuple(call for call in self.calls if is_plain(call))
        return cams or plain[:1]

    @property
    def explanations(self) -> int:
        """How many maps come of it."""
        cams = sum(isinstance(METHODS[call.name], Cam) for call in self.calls)
        return len(self.targets) * (cams * len(self.layers) + len(self.calls) - cams)

    @property
    def rows(self) -> int:
        """How many rows it costs."""
        others = (call for call in self.calls if call not in self.clean)
        return len(self.targets) * (1 + sum(copies(call) for call in others))


@dataclass(frozen=True, slots=True)
class Finding:
    """One raw map and what it explains.

    Attributes:
        call: the method.
        layer: its name; empty for methods that look at the input.
        target: the class, or contrast, explained.
        score: its logit, or difference of logits, for the image as it is.
        heatmap: float32 [h,w], signed, on the layer's grid.
        verdict: whether it can be read as an explanation.
    """

    call: MethodCall
    layer: str
    target: FixedTarget
    score: float
    heatmap: Map
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a job: the logits, float32 [classes], and the maps in the order of the request."""

    logits: Map
    findings: tuple[Finding, ...]


def copies(call: MethodCall) -> int:
    """Return how many rows a method takes for one target."""
    method = METHODS[call.name]
    return method.count(call.parameters) if isinstance(method, Saliency) else 1


def is_plain(call: MethodCall) -> bool:
    """Tell whether a method takes the gradient at the image as it is."""
    method = METHODS[call.name]
    return isinstance(method, Saliency) and method.copy is itself


async def explain(job: Job, image: Pixels, submit: Submit) -> Outcome:
    """Run a job.

    The image as it is goes first: what the model predicts for it fixes the targets given by rank, so that no noisy copy
    of the image decides by itself what is explained.

    Args:
        job: what to explain.
        image: what the model sees, uint8 [h,w,3].
        submit: runs rows.
    """
    clean: dict[int, RowResult] = {}
    await submit(_clean_pass(job), [Row(image, t, job.clean) for t in job.targets], clean.__setitem__)
    answers = [clean[place] for place in range(len(job.targets))]
    findings: list[Finding] = []
    for call in job.calls:
        if isinstance(METHODS[call.name], Cam):
            findings += _cam_findings(job, call, answers)
        elif call in job.clean:
            findings += _saliency_findings(job, call, image, answers, [a.maps[0][0] for a in answers])
        else:
            means = await _means(job, call, image, [a.target for a in answers], submit)
            findings += _saliency_findings(job, call, image, answers, means)
    return Outcome(answers[0].logits, tuple(findings))


def _clean_pass(job: Job) -> Pass:
    size = job.model.preprocess.size
    if not job.clean:
        return Pass(job.model.name, "score", size)
    if isinstance(METHODS[job.clean[0].name], Cam):
        return Pass(job.model.name, "cam", size, job.layers)
    return Pass(job.model.name, "saliency", size)


def _cam_findings(job: Job, call: MethodCall, answers: list[RowResult]) -> Iterator[Finding]:
    slot = job.clean.index(call)
    for place, layer in enumerate(job.layers):
        for answer in answers:
            heatmap = answer.maps[place][slot]
            verdict = judge(heatmap, dead=answer.dead[place])
            yield Finding(call, layer, answer.target, answer.score, heatmap, verdict)


async def _means(job: Job, call: MethodCall, image: Pixels, fixed: list[FixedTarget], submit: Submit) -> list[Map]:
    """Return, for each target, the mean of the method's terms over its copies, float32 [3,h,w]."""
    count, totals = copies(call), [np.zeros((3, *job.model.preprocess.size), np.float32) for _ in fixed]

    def add(index: int, result: RowResult) -> None:
        totals[index % len(fixed)] += result.maps[0][0]

    # The targets of one copy stand side by side, so that they share a forward pass.
    rows = [Row(image, target, (call,), copy) for copy in range(count) for target in fixed]
    await submit(Pass(job.model.name, "saliency", job.model.preprocess.size), rows, add)
    return [total / np.float32(count) for total in totals]


def _saliency_findings(
    job: Job, call: MethodCall, image: Pixels, answers: list[RowResult], means: list[Map]
) -> Iterator[Finding]:
    method = cast("Saliency", METHODS[call.name])
    seen = normalise(torch.from_numpy(image)[None], job.model.preprocess)[0]
    for answer, mean in zip(answers, means, strict=True):
        heatmap = method.finish(seen, torch.from_numpy(mean)).numpy()
        verdict = judge(heatmap, dead=not mean.any())
        yield Finding(call, "", answer.target, answer.score, heatmap, verdict)


def judge(heatmap: Map, *, dead: bool) -> Verdict:
    """Judge whether a raw map can be read as an explanation.

    Args:
        heatmap: float32 [h,w].
        dead: whether the gradient that it was made from is zero everywhere.
    """
    if not np.isfinite(heatmap).all():
        return Verdict.NON_FINITE
    if dead:
        return Verdict.ZERO_GRADIENT
    if heatmap.max() == heatmap.min():
        return Verdict.FLAT
    return Verdict.OK if heatmap.max() > 0 else Verdict.ALL_NEGATIVE
