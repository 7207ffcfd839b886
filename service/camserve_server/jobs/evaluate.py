"""Evaluate the explanations of a job: rate every map by metrics."""

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
from camserve_server.jobs.explanation_run import ExplanationRun
from camserve_server.jobs.result import make_result
from camserve_server.jobs.row_runner import Executor, RowRunner, call_directly, ignore_progress, next_edits
from camserve_server.jobs.run_methods import run_job
from camserve_server.jobs.values import Explanation, Job, JobResult, LayerMaps, Submit
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
"""For each explanation, one reading of each metric."""

_Numbers: TypeAlias = dict[tuple[int, int], float]
"""Numbers by the indices of the layer and the target."""

_MapIndex: TypeAlias = tuple[MethodCall, int, int]
"""The method of one map, and the indices of its layer and target."""

EVALUATED = (Verdict.OK, Verdict.ALL_NEGATIVE)
"""Verdicts on maps that rank pixels, and so can be evaluated."""


@dataclass(frozen=True, slots=True)
class MetricCall:
    """A metric and its parameters, by name, with the defaults filled in."""

    name: str
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvaluationJob:
    """A job, and the metrics to evaluate its maps by.

    Attributes:
        job: the explanations to compute.
        metrics: the metrics to evaluate every map by.
        box: box of the object, in the photo's pixels; None if the caller gave none.
    """

    job: Job
    metrics: tuple[MetricCall, ...]
    box: Box | None = None

    @property
    def rows(self) -> int:
        """The number of rows of the job and of its metrics."""
        return self.job.rows + sum(
            _metric_rows(self.job, call, metric) for call in self.job.calls for metric in self.metrics
        )


def _metric_rows(job: Job, call: MethodCall, metric: MetricCall) -> int:
    """Return the number of rows that a metric runs for all maps of one method."""
    alone = job.alone(call)
    return METRICS[metric.name].rows(metric.parameters, alone.explanations, alone.rows)


async def evaluate(
    assessment: EvaluationJob,
    image: Input,
    seen: Box,
    submit: Submit,
    *,
    chunk: int = 64,
    execute: Executor = call_directly,
) -> tuple[JobResult, Readings]:
    """Run a job, and evaluate every map.

    Args:
        assessment: the job and the metrics.
        image: the model's input.
        seen: the part of the photo that the model sees, in the photo's pixels.
        submit: runs rows.
        chunk: maximum number of rows queued or running at a time.
        execute: runs slow functions without blocking the event loop.

    Returns:
        The result of the job; and for each of its explanations, one reading of each metric.
    """
    row_runner = RowRunner(submit, chunk, assessment.rows, ignore_progress, execute)
    run, maps_by_method = await run_job(ExplanationRun(assessment.job, image, row_runner))
    result = make_result(run, maps_by_method)
    indices = [
        (call, layer, target)
        for call, layers in zip(assessment.job.calls, maps_by_method, strict=True)
        for layer in range(len(layers))
        for target in range(len(run.targets))
    ]
    by_key = dict(zip(((*call.key, *place) for call, *place in indices), result.explanations, strict=True))
    runner = _MetricRunner(assessment, run, seen, by_key)
    # One map after another: the edits of a few maps are enough to fill batches, those of all could fill the memory.
    return result, [
        await runner.evaluate(explanation, *index)
        for explanation, index in zip(result.explanations, indices, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _MetricRunner:
    """Runs the metrics of a request, map by map.

    Attributes:
        assessment: the job and the metrics.
        run: the run of the unchanged image, with its results.
        seen: the part of the photo that the model sees.
        explanations: the explanations by key of the method, layer and target.
        repeated: results of recomputations, by method and metric: for each repetition, one number for each layer and
            target that compares the recomputed map with the original.
    """

    assessment: EvaluationJob
    run: ExplanationRun
    seen: Box
    explanations: Mapping[tuple[object, ...], Explanation]
    repeated: dict[tuple[object, ...], list[_Numbers]] = field(default_factory=dict)

    async def evaluate(self, explanation: Explanation, call: MethodCall, layer: int, target: int) -> list[Reading]:
        """Return every metric's reading of one map."""
        metrics = self.assessment.metrics
        if explanation.verdict not in EVALUATED:
            return [Reading(math.nan, words=explanation.verdict.value)] * len(metrics)
        row_runner, index = self.run.row_runner, (call, layer, target)
        metric_input = await row_runner.execute(self._metric_input, explanation, target)
        return await row_runner.gather(
            [(self._rows(metric, call), partial(self._read, metric, metric_input, index)) for metric in metrics]
        )

    def _rows(self, metric: MetricCall, call: MethodCall) -> int:
        """Return the number of rows of a metric for one map; a recomputation counts once for all layers and targets."""
        alone = self.assessment.job.alone(call)
        return METRICS[metric.name].rows(metric.parameters, 1, alone.rows)

    def _metric_input(self, explanation: Explanation, target: int) -> MetricInput:
        image = self.run.input.numpy()
        probability = metric_probability(self.run.job.model.task, self.run.answers[target])
        return make_metric_input(image, explanation.heatmap, probability, self.seen, self.assessment.box)

    async def _read(self, metric: MetricCall, metric_input: MetricInput, index: _MapIndex) -> Reading:
        return await run_metric(METRICS[metric.name], self, metric, metric_input, index)

    async def probabilities(self, edits: Sequence[Edit], target: int) -> Array:
        """Return the probability of a target for each edit of the image."""
        probabilities = np.zeros(len(edits), np.float32)

        def keep(index: int, result: RowResult) -> None:
            probabilities[index] = metric_probability(self.run.job.model.task, result)

        rows = [replace(self.run.row(self.run.targets[target]), edit=edit) for edit in edits]
        await self.run.row_runner.run(self.run.pass_("score"), rows, keep)
        return probabilities

    async def recompute(self, kind: RecomputationMetric, call: MethodCall, varied: ExplanationRun) -> _Numbers:
        """Recompute a method's maps and compare them with the original ones; keep the numbers, not the maps."""
        _, (maps_by_layer,) = await run_job(varied)
        return await varied.row_runner.execute(self._compare, kind, call, maps_by_layer)

    def _compare(self, kind: RecomputationMetric, call: MethodCall, maps_by_layer: Sequence[LayerMaps]) -> _Numbers:
        numbers: _Numbers = {}
        for layer, layer_maps in enumerate(maps_by_layer):
            for target, raw_map in enumerate(layer_maps.maps):
                explanation = self.explanations[(*call.key, layer, target)]
                if explanation.verdict in EVALUATED:
                    numbers[layer, target] = kind.compare(explanation.heatmap, raw_map.heatmap)
        return numbers

    def vary(self, call: MethodCall, variation: Variation) -> ExplanationRun:
        """Return a run of one method for the same targets, with a view of the image or with random weights."""
        views = (variation.view,) if variation.view else ()
        randomised = None
        if variation.modules is not None:
            randomised = Randomised(round(len(stack(self.run.job.model)) ** variation.modules), variation.seed)
        job = replace(self.run.job, calls=(call,), targets=self.run.targets, unchanged_model=False)
        return replace(self.run, job=job, views=views, answers=(), randomised=randomised)


@singledispatch
async def run_metric(
    metric: Metric, _runner: _MetricRunner, call: MetricCall, _input: MetricInput, _index: _MapIndex
) -> Reading:
    """Return a metric's reading of one map, by the metric's kind; no other function of this package depends on it."""
    raise TypeError(f"{call.name} is of an unknown kind: {type(metric).__name__}")


@run_metric.register
async def _run_static(
    metric: StaticMetric, runner: _MetricRunner, call: MetricCall, metric_input: MetricInput, _index: _MapIndex
) -> Reading:
    """Run a metric that needs only the map."""
    return await runner.run.row_runner.execute(partial(metric.judge, **call.parameters), metric_input)


@run_metric.register
async def _run_perturbation(
    metric: PerturbationMetric, runner: _MetricRunner, call: MetricCall, metric_input: MetricInput, index: _MapIndex
) -> Reading:
    """Run the edits of a metric, one set after another, until it returns its reading."""
    execute, target = runner.run.row_runner.execute, index[2]
    search = metric.judge(metric_input, **call.parameters)
    reading: Reading | None
    edits, reading = await execute(next_edits, search, None)
    while reading is None:
        probabilities = await runner.probabilities(edits, target)
        edits, reading = await execute(next_edits, search, probabilities)
    return reading


@run_metric.register
async def _run_recomputation(
    metric: RecomputationMetric, runner: _MetricRunner, call: MetricCall, metric_input: MetricInput, index: _MapIndex
) -> Reading:
    """Recompute a method's maps, once for all layers and targets, and compare one of them."""
    method, layer, target = index
    row_runner = runner.run.row_runner
    varied_runs = [runner.vary(method, variation) for variation in metric.vary(metric_input.image, **call.parameters)]
    key = (*method.key, call.name, *sorted(call.parameters.items()))
    if key not in runner.repeated:
        parts = [(varied.job.rows, partial(runner.recompute, metric, method, varied)) for varied in varied_runs]
        runner.repeated[key] = await row_runner.gather(parts)
    numbers = [repetition[layer, target] for repetition in runner.repeated[key]]
    total = len(stack(runner.run.job.model))
    shares = [varied.randomised.modules / total if varied.randomised else 0.0 for varied in varied_runs]
    return await row_runner.execute(partial(metric.judge, **call.parameters), numbers, shares)


def make_metric_input(image: Array, heatmap: Map, probability: float, seen: Box, box: Box | None = None) -> MetricInput:
    """Return the input of the metrics for one map.

    Args:
        image: the model's input, normalised, float32 [3,H,W].
        heatmap: the raw map, float32 [h,w].
        probability: probability of the target for the unchanged image.
        seen: the part of the photo that the map covers.
        box: box of the object, in the photo's pixels; None if unknown.
    """
    size = image.shape[1:]
    pixels, intensity = _resize(heatmap, size), _resize(_to_intensity(heatmap), size)
    return MetricInput(image, heatmap, pixels, intensity, probability, seen, box)


def _to_intensity(heatmap: Map) -> Map:
    """Cut a map at zero and divide it by its maximum; a map without positive values becomes zero."""
    cut = heatmap.clip(min=0)
    greatest = cut.max()
    return cast("Map", cut / greatest) if greatest > 0 else cut


def _resize(heatmap: Map, size: tuple[int, ...]) -> Map:
    """Resize a signed map to the input's pixels, bilinearly between the cells' centres.

    Args:
        heatmap: the map, float32 [h,w].
        size: height and width of the input.
    """
    resized = functional.interpolate(
        torch.from_numpy(np.ascontiguousarray(heatmap))[None, None], tuple(size), mode="bilinear", align_corners=False
    )
    return cast("Map", resized[0, 0].numpy())
