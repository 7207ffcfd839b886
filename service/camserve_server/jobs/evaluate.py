"""How explanations are judged: every metric, of every map that a job has."""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias, cast

import numpy as np
import torch
from torch.nn import functional

from camserve_server.jobs.report import reported, unheard
from camserve_server.jobs.runs import examine
from camserve_server.jobs.study import Desk, Study, Think, advanced, at_once
from camserve_server.jobs.values import Finding, Job, Outcome, Sheet, Submit
from camserve_server.metrics import METRICS, Edited, Exhibit, Looked, Reading, Repeated, Variation
from camserve_server.metrics.kinds import Array
from camserve_server.models.randomise import stack
from camserve_server.targets import metric_probability
from camserve_server.types import (
    Box,
    Edit,
    Map,
    MethodCall,
    ParameterValue,
    Pixels,
    Randomised,
    RowResult,
    Verdict,
)

Readings: TypeAlias = list[list[Reading]]
"""For each finding, one of each metric."""

_Numbers: TypeAlias = dict[tuple[int, int], float]
"""By layer and target."""

JUDGED = (Verdict.OK, Verdict.ALL_NEGATIVE)
"""Verdicts on maps that rank pixels."""


@dataclass(frozen=True, slots=True)
class MetricCall:
    """A metric and its parameters, by name, defaults filled in."""

    name: str
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Assessment:
    """What to explain, and what to judge the maps by.

    Attributes:
        job: what to explain.
        metrics: by which every map is judged.
        box: where the object is, in the photo's pixels; None where nobody says.
    """

    job: Job
    metrics: tuple[MetricCall, ...]
    box: Box | None = None

    @property
    def rows(self) -> int:
        """How many rows it costs: those of the job, and those of its metrics."""
        return self.job.rows + sum(_cost(self.job, call, metric) for call in self.job.calls for metric in self.metrics)


def _cost(job: Job, call: MethodCall, metric: MetricCall) -> int:
    kind, alone = METRICS[metric.name], replace(job, calls=(call,))
    if isinstance(kind, Looked):
        return 0
    count = kind.count(**metric.parameters)
    return count * (alone.rows if isinstance(kind, Repeated) else alone.explanations)


async def evaluate(
    asked: Assessment,
    image: Pixels,
    seen: Box,
    submit: Submit,
    *,
    chunk: int = 64,
    think: Think = at_once,
) -> tuple[Outcome, Readings]:
    """Run a job, and judge every map of it.

    Args:
        asked: what to explain, and the metrics.
        image: what the model sees, uint8 [h,w,3].
        seen: the part of the photo that this is, in the photo's pixels.
        submit: runs rows.
        chunk: rows under way at most.
        think: runs what takes a while beside them.

    Returns:
        What came of the job; and for each of its findings, a reading of each metric.
    """
    study, sheets = await examine(Study(asked.job, image, Desk(submit, chunk, asked.rows, unheard, think)))
    outcome = reported(study, sheets)
    places = [
        (call, layer, target)
        for call, layers in zip(asked.job.calls, sheets, strict=True)
        for layer in range(len(layers))
        for target in range(len(study.targets))
    ]
    findings = dict(zip(((*call.key, *at) for call, *at in places), outcome.findings, strict=True))
    court = _Court(asked, study, seen, findings)
    # One map after another: the edits of a few are enough to fill batches, those of all could fill the memory.
    return outcome, [
        await court.judged(finding, *place) for finding, place in zip(outcome.findings, places, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Court:
    """What maps are judged with.

    Attributes:
        asked: the metrics.
        study: the image, and what the model says of it.
        seen: the part of the photo that this is.
        findings: by method, layer and target.
        repeated: by method and metric, how the maps that were computed again compare: for each repetition, one number
            for each layer and target.
    """

    asked: Assessment
    study: Study
    seen: Box
    findings: Mapping[tuple[object, ...], Finding]
    repeated: dict[tuple[object, ...], list[_Numbers]] = field(default_factory=dict)

    async def judged(self, finding: Finding, call: MethodCall, layer: int, target: int) -> list[Reading]:
        """Take every metric's reading of one map."""
        if finding.verdict not in JUDGED:
            return [Reading(math.nan, words=finding.verdict.value)] * len(self.asked.metrics)
        exhibit, place = await self.study.desk.think(self._exhibit, finding, target), (call, layer, target)
        return await self.study.desk.gather(
            [(self._rows(one, call), partial(self._reading, one, exhibit, place)) for one in self.asked.metrics]
        )

    def _rows(self, metric: MetricCall, call: MethodCall) -> int:
        """Return how many rows a metric runs for one map; maps computed again count once for all layers and targets."""
        kind = METRICS[metric.name]
        return kind.count(**metric.parameters) if isinstance(kind, Edited) else _cost(self.asked.job, call, metric)

    def _exhibit(self, finding: Finding, target: int) -> Exhibit:
        image = self.study.input.numpy()
        likely = metric_probability(self.study.job.model.task, self.study.answers[target])
        return exhibit(image, finding.heatmap, likely, self.seen, self.asked.box)

    async def _reading(self, metric: MetricCall, exhibit: Exhibit, place: tuple[MethodCall, int, int]) -> Reading:
        return await _KINDS[type(METRICS[metric.name])](self, metric, exhibit, place)

    async def looked(self, metric: MetricCall, exhibit: Exhibit, _place: tuple[MethodCall, int, int]) -> Reading:
        """Read a metric that looks at the map alone."""
        return await self.study.desk.think(_judge_look, metric, exhibit)

    async def edited(self, metric: MetricCall, exhibit: Exhibit, place: tuple[MethodCall, int, int]) -> Reading:
        """Let a metric try one set of edits after another, until it has its reading."""
        judging = cast("Edited", METRICS[metric.name]).judge(exhibit, **metric.parameters)
        reading: Reading | None
        edits, reading = await self.study.desk.think(advanced, judging, None)
        while reading is None:
            found = await self._probabilities(edits, place[2])
            edits, reading = await self.study.desk.think(advanced, judging, found)
        return reading

    async def _probabilities(self, edits: Sequence[Edit], target: int) -> Array:
        found = np.zeros(len(edits), np.float32)

        def keep(index: int, result: RowResult) -> None:
            found[index] = metric_probability(self.study.job.model.task, result)

        rows = [replace(self.study.row(self.study.targets[target]), edit=edit) for edit in edits]
        await self.study.desk.run(self.study.pass_("score"), rows, keep)
        return found

    async def compared(self, metric: MetricCall, exhibit: Exhibit, place: tuple[MethodCall, int, int]) -> Reading:
        """Have a method's maps computed again, once for all layers and targets, and compare one of them."""
        call, layer, target = place
        kind, desk = cast("Repeated", METRICS[metric.name]), self.study.desk
        variations = kind.vary(exhibit.image, **metric.parameters)
        changes = [self._changed(call, one) for one in variations]
        key = (*call.key, metric.name, *sorted(metric.parameters.items()))
        if key not in self.repeated:
            parts = [(one.job.rows, partial(self._again, kind, call, one)) for one in changes]
            self.repeated[key] = await desk.gather(parts)
        numbers = [again[layer, target] for again in self.repeated[key]]
        total = len(stack(self.study.job.model))
        random = [one.randomised.modules / total if one.randomised else 0.0 for one in changes]
        return await desk.think(_judge_repeats, metric, numbers, random)

    async def _again(self, kind: Repeated, call: MethodCall, changed: Study) -> _Numbers:
        """Compute a method's maps again and compare them; only the numbers are kept, not the maps."""
        _, (sheets,) = await examine(changed)
        return await changed.desk.think(self._compared, kind, call, sheets)

    def _compared(self, kind: Repeated, call: MethodCall, sheets: Sequence[Sheet]) -> _Numbers:
        numbers: _Numbers = {}
        for layer, sheet in enumerate(sheets):
            for target, evidence in enumerate(sheet.evidence):
                finding = self.findings[(*call.key, layer, target)]
                if finding.verdict in JUDGED:
                    numbers[layer, target] = kind.compare(finding.heatmap, evidence.heatmap)
        return numbers

    def _changed(self, call: MethodCall, variation: Variation) -> Study:
        """Put one method, for the same targets, under study again in changed conditions."""
        views = (variation.view,) if variation.view else ()
        random = None
        if variation.modules is not None:
            random = Randomised(round(len(stack(self.study.job.model)) ** variation.modules), variation.seed)
        job = replace(self.study.job, calls=(call,), targets=self.study.targets)
        return replace(self.study, job=job, views=views, answers=(), randomised=random)


def _judge_look(metric: MetricCall, exhibit: Exhibit) -> Reading:
    return cast("Looked", METRICS[metric.name]).judge(exhibit, **metric.parameters)


def _judge_repeats(metric: MetricCall, numbers: Sequence[float], random: Sequence[float]) -> Reading:
    return cast("Repeated", METRICS[metric.name]).judge(numbers, random, **metric.parameters)


_KINDS: Mapping[type, Callable[[_Court, MetricCall, Exhibit, tuple[MethodCall, int, int]], Awaitable[Reading]]] = {
    Looked: _Court.looked,
    Edited: _Court.edited,
    Repeated: _Court.compared,
}


def exhibit(image: Array, heatmap: Map, likely: float, seen: Box, box: Box | None = None) -> Exhibit:
    """Put together what a map is judged by.

    Args:
        image: the model's input, normalised, float32 [3,H,W].
        heatmap: raw, float32 [h,w].
        likely: how probable the target is for the image as it is.
        seen: the part of the photo that the map covers.
        box: where the object is.
    """
    pixels, shown = (on_pixels(one, image.shape[1:]) for one in (heatmap, _intensity(heatmap)))
    return Exhibit(image, heatmap, pixels, shown, likely, seen, box)


def _intensity(heatmap: Map) -> Map:
    """Cut a map at zero and divide it by its maximum; zero everywhere where nothing is above that."""
    cut = heatmap.clip(min=0)
    greatest = cut.max()
    return cast("Map", cut / greatest) if greatest > 0 else cut


def on_pixels(heatmap: Map, size: tuple[int, ...]) -> Map:
    """Bring a signed map to the input's pixels, bilinearly between the cells' centres.

    Args:
        heatmap: float32 [h,w].
        size: height and width of the input.
    """
    found = functional.interpolate(
        torch.from_numpy(np.ascontiguousarray(heatmap))[None, None], tuple(size), mode="bilinear", align_corners=False
    )
    return cast("Map", found[0, 0].numpy())
