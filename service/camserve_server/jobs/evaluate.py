"""How explanations are judged: every metric, of every map that a job has."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, singledispatch
from typing import TypeAlias, cast

import numpy as np
import torch
from torch.nn import functional

from camserve_server.jobs.report import reported, unheard
from camserve_server.jobs.runs import examine
from camserve_server.jobs.study import Desk, Study, Think, advanced, at_once
from camserve_server.jobs.values import Finding, Job, Outcome, Sheet, Submit
from camserve_server.metrics import METRICS, Edited, Exhibit, Looked, Metric, Reading, Repeated, Variation
from camserve_server.metrics.kinds import Array
from camserve_server.models.randomise import stack
from camserve_server.targets import metric_probability
from camserve_server.types import (
    Box,
    Edit,
    Input,
    Map,
    MethodCall,
    ParameterValue,
    Randomised,
    RowResult,
    Verdict,
)

Readings: TypeAlias = list[list[Reading]]
"""For each finding, one of each metric."""

_Numbers: TypeAlias = dict[tuple[int, int], float]
"""By layer and target."""

_Place: TypeAlias = tuple[MethodCall, int, int]
"""The method, layer and target of one map."""

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
    alone = replace(job, calls=(call,))
    return METRICS[metric.name].rows(metric.parameters, alone.explanations, alone.rows)


async def evaluate(
    asked: Assessment,
    image: Input,
    seen: Box,
    submit: Submit,
    *,
    chunk: int = 64,
    think: Think = at_once,
) -> tuple[Outcome, Readings]:
    """Run a job, and judge every map of it.

    Args:
        asked: what to explain, and the metrics.
        image: what the model sees.
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
        alone = replace(self.asked.job, calls=(call,))
        return METRICS[metric.name].rows(metric.parameters, 1, alone.rows)

    def _exhibit(self, finding: Finding, target: int) -> Exhibit:
        image = self.study.input.numpy()
        likely = metric_probability(self.study.job.model.task, self.study.answers[target])
        return exhibit(image, finding.heatmap, likely, self.seen, self.asked.box)

    async def _reading(self, metric: MetricCall, exhibit: Exhibit, place: _Place) -> Reading:
        return await run(METRICS[metric.name], self, metric, exhibit, place)

    async def probabilities(self, edits: Sequence[Edit], target: int) -> Array:
        """Return the probability of a target in each of some edits of the image."""
        found = np.zeros(len(edits), np.float32)

        def keep(index: int, result: RowResult) -> None:
            found[index] = metric_probability(self.study.job.model.task, result)

        rows = [replace(self.study.row(self.study.targets[target]), edit=edit) for edit in edits]
        await self.study.desk.run(self.study.pass_("score"), rows, keep)
        return found

    async def again(self, kind: Repeated, call: MethodCall, changed: Study) -> _Numbers:
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

    def changed(self, call: MethodCall, variation: Variation) -> Study:
        """Put one method, for the same targets, under study again in changed conditions."""
        views = (variation.view,) if variation.view else ()
        random = None
        if variation.modules is not None:
            random = Randomised(round(len(stack(self.study.job.model)) ** variation.modules), variation.seed)
        job = replace(self.study.job, calls=(call,), targets=self.study.targets)
        return replace(self.study, job=job, views=views, answers=(), randomised=random)


@singledispatch
async def run(metric: Metric, court: _Court, call: MetricCall, exhibit: Exhibit, place: _Place) -> Reading:  # noqa: ARG001 -- as every kind's
    """Take a metric's reading of one map by its kind, which is the only place that depends on it."""
    raise TypeError(f"{call.name} is of an unknown kind: {type(metric).__name__}")


@run.register
async def _looked(metric: Looked, court: _Court, call: MetricCall, exhibit: Exhibit, _place: _Place) -> Reading:
    """Read a metric that looks at the map alone."""
    return await court.study.desk.think(partial(metric.judge, **call.parameters), exhibit)


@run.register
async def _edited(metric: Edited, court: _Court, call: MetricCall, exhibit: Exhibit, place: _Place) -> Reading:
    """Let a metric try one set of edits after another, until it has its reading."""
    judging = metric.judge(exhibit, **call.parameters)
    reading: Reading | None
    edits, reading = await court.study.desk.think(advanced, judging, None)
    while reading is None:
        found = await court.probabilities(edits, place[2])
        edits, reading = await court.study.desk.think(advanced, judging, found)
    return reading


@run.register
async def _repeated(metric: Repeated, court: _Court, call: MetricCall, exhibit: Exhibit, place: _Place) -> Reading:
    """Have a method's maps computed again, once for all layers and targets, and compare one of them."""
    method, layer, target = place
    desk = court.study.desk
    changes = [court.changed(method, one) for one in metric.vary(exhibit.image, **call.parameters)]
    key = (*method.key, call.name, *sorted(call.parameters.items()))
    if key not in court.repeated:
        parts = [(one.job.rows, partial(court.again, metric, method, one)) for one in changes]
        court.repeated[key] = await desk.gather(parts)
    numbers = [again[layer, target] for again in court.repeated[key]]
    total = len(stack(court.study.job.model))
    random = [one.randomised.modules / total if one.randomised else 0.0 for one in changes]
    return await desk.think(partial(metric.judge, **call.parameters), numbers, random)


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
