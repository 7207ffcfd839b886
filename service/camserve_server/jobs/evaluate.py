"""How explanations are judged: every metric, of every map that a job has."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, singledispatch
from typing import TypeAlias, cast

import numpy as np
import torch
from torch.nn import functional

from camserve_server.core.arrays import Input, Map
from camserve_server.engine.values import RowResult
from camserve_server.imaging.values import Box
from camserve_server.jobs.report import reported, unheard
from camserve_server.jobs.runs import examine
from camserve_server.jobs.study import Executor, ExplanationRun, RowRunner, advanced, at_once
from camserve_server.jobs.values import Explanation, Job, LayerMaps, Outcome, Submit
from camserve_server.jobs.verdict import Verdict
from camserve_server.methods.values import Edit, MethodCall, ParameterValue
from camserve_server.metrics import (
    METRICS,
    Metric,
    MetricInput,
    PerturbationMetric,
    Reading,
    RecomputationMetric,
    StaticMetric,
    Variation,
)
from camserve_server.metrics.kinds import Array
from camserve_server.models.randomise import stack
from camserve_server.models.values import Randomised
from camserve_server.targets import metric_probability

Readings: TypeAlias = list[list[Reading]]
"""For each finding, one of each metric."""

_Numbers: TypeAlias = dict[tuple[int, int], float]
"""By layer and target."""

_Place: TypeAlias = tuple[MethodCall, int, int]
"""The method, layer and target of one map."""

EVALUATED = (Verdict.OK, Verdict.ALL_NEGATIVE)
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
    think: Executor = at_once,
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
        What came of the job; and for each of its explanations, a reading of each metric.
    """
    explanation, by_method = await examine(
        ExplanationRun(asked.job, image, RowRunner(submit, chunk, asked.rows, unheard, think))
    )
    outcome = reported(explanation, by_method)
    places = [
        (call, layer, target)
        for call, layers in zip(asked.job.calls, by_method, strict=True)
        for layer in range(len(layers))
        for target in range(len(explanation.targets))
    ]
    explanations = dict(zip(((*call.key, *at) for call, *at in places), outcome.explanations, strict=True))
    runner = _MetricRunner(asked, explanation, seen, explanations)
    # One map after another: the edits of a few are enough to fill batches, those of all could fill the memory.
    return outcome, [
        await runner.evaluated(finding, *place) for finding, place in zip(outcome.explanations, places, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _MetricRunner:
    """Runs the metrics of a request, map by map.

    Attributes:
        asked: the metrics.
        explanation: the run of the image as it is, with its answers.
        seen: the part of the photo that this is.
        explanations: by method, layer and target.
        repeated: by method and metric, how the maps that were computed again compare: for each repetition, one number
            for each layer and target.
    """

    asked: Assessment
    explanation: ExplanationRun
    seen: Box
    explanations: Mapping[tuple[object, ...], Explanation]
    repeated: dict[tuple[object, ...], list[_Numbers]] = field(default_factory=dict)

    async def evaluated(self, finding: Explanation, call: MethodCall, layer: int, target: int) -> list[Reading]:
        """Take every metric's reading of one map."""
        if finding.verdict not in EVALUATED:
            return [Reading(math.nan, words=finding.verdict.value)] * len(self.asked.metrics)
        row_runner, place = self.explanation.row_runner, (call, layer, target)
        metric_input = await row_runner.execute(self._input, finding, target)
        return await row_runner.gather(
            [(self._rows(one, call), partial(self._reading, one, metric_input, place)) for one in self.asked.metrics]
        )

    def _rows(self, metric: MetricCall, call: MethodCall) -> int:
        """Return how many rows a metric runs for one map; maps computed again count once for all layers and targets."""
        alone = replace(self.asked.job, calls=(call,))
        return METRICS[metric.name].rows(metric.parameters, 1, alone.rows)

    def _input(self, finding: Explanation, target: int) -> MetricInput:
        image = self.explanation.input.numpy()
        likely = metric_probability(self.explanation.job.model.task, self.explanation.answers[target])
        return make_metric_input(image, finding.heatmap, likely, self.seen, self.asked.box)

    async def _reading(self, metric: MetricCall, metric_input: MetricInput, place: _Place) -> Reading:
        return await run_metric(METRICS[metric.name], self, metric, metric_input, place)

    async def probabilities(self, edits: Sequence[Edit], target: int) -> Array:
        """Return the probability of a target in each of some edits of the image."""
        found = np.zeros(len(edits), np.float32)

        def keep(index: int, result: RowResult) -> None:
            found[index] = metric_probability(self.explanation.job.model.task, result)

        rows = [replace(self.explanation.row(self.explanation.targets[target]), edit=edit) for edit in edits]
        await self.explanation.row_runner.run(self.explanation.pass_("score"), rows, keep)
        return found

    async def again(self, kind: RecomputationMetric, call: MethodCall, changed: ExplanationRun) -> _Numbers:
        """Compute a method's maps again and compare them; only the numbers are kept, not the maps."""
        _, (by_layer,) = await examine(changed)
        return await changed.row_runner.execute(self._compared, kind, call, by_layer)

    def _compared(self, kind: RecomputationMetric, call: MethodCall, by_layer: Sequence[LayerMaps]) -> _Numbers:
        numbers: _Numbers = {}
        for layer, layer_maps in enumerate(by_layer):
            for target, raw_map in enumerate(layer_maps.maps):
                finding = self.explanations[(*call.key, layer, target)]
                if finding.verdict in EVALUATED:
                    numbers[layer, target] = kind.compare(finding.heatmap, raw_map.heatmap)
        return numbers

    def changed(self, call: MethodCall, variation: Variation) -> ExplanationRun:
        """Return a run of one method, for the same targets, in changed conditions."""
        views = (variation.view,) if variation.view else ()
        random = None
        if variation.modules is not None:
            random = Randomised(round(len(stack(self.explanation.job.model)) ** variation.modules), variation.seed)
        job = replace(self.explanation.job, calls=(call,), targets=self.explanation.targets)
        return replace(self.explanation, job=job, views=views, answers=(), randomised=random)


@singledispatch
async def run_metric(
    metric: Metric, _runner: _MetricRunner, call: MetricCall, _input: MetricInput, _place: _Place
) -> Reading:
    """Take a metric's reading of one map by its kind, which is the only place that depends on it."""
    raise TypeError(f"{call.name} is of an unknown kind: {type(metric).__name__}")


@run_metric.register
async def _static(
    metric: StaticMetric, runner: _MetricRunner, call: MetricCall, metric_input: MetricInput, _place: _Place
) -> Reading:
    """Read a metric that looks at the map alone."""
    return await runner.explanation.row_runner.execute(partial(metric.judge, **call.parameters), metric_input)


@run_metric.register
async def _perturbation(
    metric: PerturbationMetric, runner: _MetricRunner, call: MetricCall, metric_input: MetricInput, place: _Place
) -> Reading:
    """Let a metric try one set of edits after another, until it has its reading."""
    judging = metric.judge(metric_input, **call.parameters)
    reading: Reading | None
    edits, reading = await runner.explanation.row_runner.execute(advanced, judging, None)
    while reading is None:
        found = await runner.probabilities(edits, place[2])
        edits, reading = await runner.explanation.row_runner.execute(advanced, judging, found)
    return reading


@run_metric.register
async def _recomputation(
    metric: RecomputationMetric, runner: _MetricRunner, call: MetricCall, metric_input: MetricInput, place: _Place
) -> Reading:
    """Have a method's maps computed again, once for all layers and targets, and compare one of them."""
    method, layer, target = place
    row_runner = runner.explanation.row_runner
    changes = [runner.changed(method, one) for one in metric.vary(metric_input.image, **call.parameters)]
    key = (*method.key, call.name, *sorted(call.parameters.items()))
    if key not in runner.repeated:
        parts = [(one.job.rows, partial(runner.again, metric, method, one)) for one in changes]
        runner.repeated[key] = await row_runner.gather(parts)
    numbers = [again[layer, target] for again in runner.repeated[key]]
    total = len(stack(runner.explanation.job.model))
    random = [one.randomised.modules / total if one.randomised else 0.0 for one in changes]
    return await row_runner.execute(partial(metric.judge, **call.parameters), numbers, random)


def make_metric_input(image: Array, heatmap: Map, likely: float, seen: Box, box: Box | None = None) -> MetricInput:
    """Make the input of the metrics for one map.

    Args:
        image: the model's input, normalised, float32 [3,H,W].
        heatmap: raw, float32 [h,w].
        likely: how probable the target is for the image as it is.
        seen: the part of the photo that the map covers.
        box: where the object is.
    """
    pixels, shown = (on_pixels(one, image.shape[1:]) for one in (heatmap, _intensity(heatmap)))
    return MetricInput(image, heatmap, pixels, shown, likely, seen, box)


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
