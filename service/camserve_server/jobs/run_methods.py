"""Compute the raw maps of a method, by its kind: which rows it runs, and what it makes of their results."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, singledispatch
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray

from camserve_server.core.arrays import Map
from camserve_server.engine.values import RowResult
from camserve_server.imaging.values import View
from camserve_server.jobs.cost import AUGMENTED, default_call
from camserve_server.jobs.explanation_run import ExplanationRun
from camserve_server.jobs.fuse import fuse_layers, pyramid, resize_positive
from camserve_server.jobs.row_runner import next_edits
from camserve_server.jobs.values import LayerMaps, RawMap
from camserve_server.methods import (
    METHODS,
    Attention,
    Baseline,
    Cam,
    FullGradient,
    Fused,
    Method,
    Perturbation,
    Product,
    Saliency,
    Scene,
    Windows,
    wrong_shape,
)
from camserve_server.methods.kinds import Array, Count, itself, single_copy
from camserve_server.methods.values import Edit, MethodCall
from camserve_server.models.values import PYRAMID, Pass
from camserve_server.targets import seen_in, similarity_of_best, weight_probability

if TYPE_CHECKING:
    from camserve_server.targets.values import DetectionTarget

MapsByMethod: TypeAlias = list[list[LayerMaps]]
"""For each method of a job, its maps on each layer."""

_FloatArray: TypeAlias = NDArray[np.float32] | NDArray[np.float64]


async def run_job(run: ExplanationRun) -> tuple[ExplanationRun, MapsByMethod]:
    """Run a job: first the unchanged image, then every method that this does not answer.

    Returns:
        The run with the results for the unchanged image, and the maps of each method.
    """
    run = await run.run_unchanged()
    return run, [await maps_of_method(run, call) for call in run.job.calls]


async def run_jobs(runs: Sequence[ExplanationRun]) -> list[tuple[ExplanationRun, MapsByMethod]]:
    """Run several jobs of one request, as many at a time as its limit on rows under way allows."""
    return await runs[0].row_runner.gather([(run.job.rows, partial(run_job, run)) for run in runs])


async def maps_of_method(run: ExplanationRun, call: MethodCall) -> list[LayerMaps]:
    """Compute the maps of one method, after the unchanged image has run."""
    maps_by_layer = await (_run_augmented(run, call) if call.augmented else run_method(METHODS[call.name], run, call))
    _check_shapes(call.name, maps_by_layer, len(run.targets))
    fusion = run.job.fusion
    if fusion is None or len(maps_by_layer) == 1 or call.input_channels:
        return maps_by_layer
    return [await run.row_runner.execute(fuse_layers, maps_by_layer, fusion, PYRAMID if run.job.pyramid else "")]


def _check_shapes(name: str, maps_by_layer: Sequence[LayerMaps], targets: int) -> None:
    """Check that a method has returned one map for each target.

    Raises:
        Internal: it has not, or a map is not [h,w].
    """
    for layer_maps in maps_by_layer:
        for raw_map in layer_maps.maps:
            if raw_map.heatmap.ndim != 2 or len(layer_maps.maps) != targets:  # noqa: PLR2004 -- a map [h,w]
                shape = len(layer_maps.maps), *raw_map.heatmap.shape
                raise wrong_shape(name, shape, f"a map [h, w] for each target, [{targets}, h, w]")


async def _run_augmented(run: ExplanationRun, call: MethodCall) -> list[LayerMaps]:
    """Take the mean of a method's maps over flipped and rescaled views; the targets are the unchanged image's."""
    plain = replace(call, augmented=False)
    view_runs = [run.of(plain, view=view) for view in AUGMENTED]
    maps_by_view = [maps_by_method[0] for _, maps_by_method in await run_jobs(view_runs)]
    targets = range(len(run.targets))
    return [
        replace(views[0], maps=[_mean_of_views([view.maps[target] for view in views]) for target in targets])
        for views in zip(*maps_by_view, strict=True)
    ]


def _mean_of_views(raw_maps: list[RawMap]) -> RawMap:
    upright = [
        raw_map.heatmap[:, ::-1] if view.mirrored else raw_map.heatmap
        for raw_map, view in zip(raw_maps, AUGMENTED, strict=True)
    ]
    zero_gradient = all(raw_map.zero_gradient for raw_map in raw_maps)
    return RawMap(np.mean(upright, 0, dtype=np.float32), zero_gradient=zero_gradient)


@dataclass(slots=True)
class _MeanTerm:
    """Running mean of the terms of a method's copies, for one target on one layer.

    Attributes:
        squares: True to take the mean of the squares as well. A variance is a small difference of large numbers, so
            both means are then in float64.
        total: sum of the terms so far.
        copies: number of the terms so far.
        zero_gradient: True if every gradient so far was zero everywhere.
        scores: scores of the copies, in the order of their indices.
    """

    squares: bool = False
    total: _FloatArray | None = None
    copies: int = 0
    zero_gradient: bool = True
    scores: list[float] = field(default_factory=list)

    def add(self, term: Map, score: float, *, zero_gradient: bool) -> None:
        added = np.stack((term, np.square(term, dtype=np.float64))) if self.squares else term
        self.total = added.copy() if self.total is None else self.total.__iadd__(added)
        self.copies += 1
        self.zero_gradient = self.zero_gradient and zero_gradient
        self.scores.append(score)

    @property
    def value(self) -> torch.Tensor:
        return torch.from_numpy(cast("_FloatArray", self.total) / np.float32(self.copies))


async def _run_copies(
    method: Cam | Saliency, run: ExplanationRun, call: MethodCall, pass_: Pass
) -> list[list[_MeanTerm]]:
    """Run a method's copies of the image; return the mean term of each layer (one if it uses no layer) and target."""
    means = [[_MeanTerm(method.squares) for _ in run.targets] for _ in pass_.layers or ("",)]

    def add(index: int, result: RowResult) -> None:
        for by_target, maps, zero_gradient in zip(means, result.maps, result.zero_gradient, strict=True):
            by_target[index % len(run.targets)].add(maps[0], result.score, zero_gradient=zero_gradient)

    # The targets of one copy are next to each other, so that they share a forward pass.
    unchanged_only = method.copy is itself and method.count is single_copy
    copies: Sequence[int | None] = (None,) if unchanged_only else range(method.count(**call.parameters))
    rows = [run.row(target, (call,), copy) for copy in copies for target in run.targets]
    await run.row_runner.run(pass_, rows, add)
    return means


@singledispatch
async def run_method(method: Method, _run: ExplanationRun, call: MethodCall) -> list[LayerMaps]:
    """Compute a method's maps by its kind; no other function of this package depends on the kind."""
    raise TypeError(f"{call.name} is of an unknown kind: {type(method).__name__}")


@run_method.register
async def _run_cam(method: Cam, run: ExplanationRun, call: MethodCall) -> list[LayerMaps]:
    if call in run.job.clean:
        return _maps_of_answers(run, call)
    means = await _run_copies(method, run, call, run.pass_(method.pass_kind, run.job.layers))
    features = run.answers[0].features
    return [
        LayerMaps(
            layer,
            [await run.row_runner.execute(_finish_cam, method, call, mean, features, index) for mean in means[index]],
        )
        for index, layer in enumerate(run.job.layers)
    ]


def _maps_of_answers(run: ExplanationRun, call: MethodCall) -> list[LayerMaps]:
    """Return the maps of a method that the pass over the unchanged image has answered."""
    position = list(itertools.chain.from_iterable(run.job.shared)).index(call)
    differentiates = bool(METHODS[call.name].gradients)
    return [
        LayerMaps(
            layer,
            [
                RawMap(answer.maps[index][position], zero_gradient=differentiates and answer.zero_gradient[index])
                for answer in run.answers
            ],
        )
        for index, layer in enumerate(run.job.layers)
    ]


def _finish_cam(method: Cam, call: MethodCall, mean: _MeanTerm, features: Sequence[Map], layer_index: int) -> RawMap:
    options = {"features": torch.from_numpy(features[layer_index])} if features else {}
    return RawMap(to_map(method.finish(mean.value, **call.parameters, **options)), zero_gradient=mean.zero_gradient)


@run_method.register
async def _run_saliency(method: Saliency, run: ExplanationRun, call: MethodCall) -> list[LayerMaps]:
    if call in run.job.clean:
        means = [_MeanTerm(method.squares) for _ in run.answers]
        for mean, answer in zip(means, run.answers, strict=True):
            mean.add(answer.maps[0][0], answer.score, zero_gradient=answer.zero_gradient[0])
    else:
        (means,) = await _run_copies(method, run, call, run.pass_(method.pass_kind))
    finish = _finish_channels if call.input_channels else _finish_saliencies
    return await run.row_runner.execute(finish, method, run, call, means)


def _finish_saliencies(
    method: Saliency, run: ExplanationRun, call: MethodCall, means: Sequence[_MeanTerm]
) -> list[LayerMaps]:
    image = run.input
    raw_maps = [
        _finish_saliency(method, call, mean, image, answer.score)
        for mean, answer in zip(means, run.answers, strict=True)
    ]
    return [LayerMaps("", raw_maps)]


def _finish_channels(
    method: Saliency, run: ExplanationRun, call: MethodCall, means: Sequence[_MeanTerm]
) -> list[LayerMaps]:
    image = run.input
    by_target = [
        _finish_each(method, call, mean, image, answer.score) for mean, answer in zip(means, run.answers, strict=True)
    ]
    return [
        LayerMaps("", maps, input_channel=channel)
        for channel, *maps in zip(call.input_channels, *by_target, strict=True)
    ]


def _finish_each(
    method: Saliency, call: MethodCall, mean: _MeanTerm, image: torch.Tensor, score: float
) -> list[RawMap]:
    """Make a map of each channel that a call names; none of them promises a sum."""
    channels, value, options = call.input_channels, mean.value, dict(call.parameters)
    if method.baseline is not None:
        options["gained"] = _gained(method.baseline, call, mean, score)
    if method.split is not None:
        by_channel = method.split(value, image, **options)
        heatmaps = [by_channel[channel] for channel in channels]
    else:
        parts = [slice(channel, channel + 1) for channel in channels]
        heatmaps = [method.finish(value[..., part, :, :], image[part], **options) for part in parts]
    return [RawMap(to_map(heatmap), zero_gradient=mean.zero_gradient) for heatmap in heatmaps]


def _finish_saliency(method: Saliency, call: MethodCall, mean: _MeanTerm, image: torch.Tensor, score: float) -> RawMap:
    if method.baseline is None:
        return RawMap(to_map(method.finish(mean.value, image, **call.parameters)), zero_gradient=mean.zero_gradient)
    promised = _gained(method.baseline, call, mean, score)
    heatmap = to_map(method.finish(mean.value, image, gained=promised, **call.parameters))
    error = abs(float(heatmap.sum(dtype=np.float64)) - promised) / abs(promised) if promised else 0.0
    return RawMap(heatmap, mean.zero_gradient, error)


def _gained(baseline: Count, call: MethodCall, mean: _MeanTerm, score: float) -> float:
    """Return the score of the image minus that of the baseline among the copies."""
    return score - mean.scores[baseline(**call.parameters)]


@run_method.register
async def _run_perturbation(method: Perturbation, run: ExplanationRun, call: MethodCall) -> list[LayerMaps]:
    scores = np.array([answer.score for answer in run.answers], np.float32)
    image = run.input.numpy()
    if not method.layered:
        return [await _explore(method, run, call, Scene(image, scores), "")]
    return [
        await _explore(method, run, call, Scene(image, scores, run.answers[0].features[index]), layer)
        for index, layer in enumerate(run.job.layers)
    ]


async def _explore(method: Perturbation, run: ExplanationRun, call: MethodCall, scene: Scene, layer: str) -> LayerMaps:
    """Run the edits of a method, one set after another, until it returns its maps."""
    execute = run.row_runner.execute
    search = method.explore(scene, **call.parameters)
    edits, maps = await execute(next_edits, search, None)
    while maps is None:
        edits, maps = await execute(next_edits, search, await _scores(method, run, edits, layer))
    return LayerMaps(layer, [RawMap(np.asarray(heatmap, np.float32)) for heatmap in maps])


async def _scores(method: Perturbation, run: ExplanationRun, edits: Sequence[Edit], layer: str) -> Array:
    """Return the scores [n,T] of edits of the image, for every target."""
    scores = np.zeros((len(edits), len(run.targets)), np.float32)

    def keep(index: int, result: RowResult) -> None:
        scores.flat[index] = _similarity(run, result) if method.matches else result.score

    rows = [replace(run.row(target), edit=edit) for edit in edits for target in run.targets]
    silences = any(edit.silenced is not None for edit in edits)
    await run.row_runner.run(run.pass_("score", (layer,) if silences else ()), rows, keep)
    return scores


def _similarity(run: ExplanationRun, result: RowResult) -> float:
    """Return the similarity of a row's object, in the views of the run, with the best match that the row detects."""
    target = seen_in(result.target, run.views, run.job.model.preprocess.size)
    return similarity_of_best(result.logits, cast("DetectionTarget", target))


@run_method.register
async def _run_own_pass(method: Attention | FullGradient, run: ExplanationRun, call: MethodCall) -> list[LayerMaps]:
    """Run a method with a kind of pass of its own, which uses no layer."""
    results: dict[int, RowResult] = {}
    rows = [run.row(target, (call,)) for target in run.targets]
    await run.row_runner.run(run.pass_(method.pass_kind), rows, results.__setitem__)
    by_target = [results[index] for index in range(len(results))]
    raw_maps = [RawMap(result.maps[0][0], zero_gradient=result.zero_gradient[0]) for result in by_target]
    return [LayerMaps("", raw_maps)]


@run_method.register
async def _run_product(method: Product, run: ExplanationRun, _call: MethodCall) -> list[LayerMaps]:
    _, (pixels,) = await run_job(run.of(default_call(method.pixels)))
    _, (layers,) = await run_job(run.of(default_call(method.layer)))
    return [
        LayerMaps(
            layer_maps.layer,
            [
                RawMap(
                    a.heatmap * resize_positive(b.heatmap, a.heatmap.shape),
                    zero_gradient=a.zero_gradient or b.zero_gradient,
                )
                for a, b in zip(pixels[0].maps, layer_maps.maps, strict=True)
            ],
        )
        for layer_maps in layers
    ]


@run_method.register
async def _run_fused(method: Fused, run: ExplanationRun, _call: MethodCall) -> list[LayerMaps]:
    # An object's score may depend on one scale of a pyramid alone, so that the product of the scales' maps is zero.
    layers = (run.job.model.default_layer,) if run.job.pyramid else run.job.layers
    layers = layers if len(layers) > 1 else pyramid(run.job.model, layers[0])
    _, (maps_by_layer,) = await run_job(run.of(default_call(method.of), layers))
    return [await run.row_runner.execute(fuse_layers, maps_by_layer, method.how)]


@run_method.register
async def _run_windows(method: Windows, run: ExplanationRun, call: MethodCall) -> list[LayerMaps]:
    height, width = run.job.model.preprocess.size
    parameters = {**call.parameters, "height": height, "width": width}
    views = method.views(**parameters)
    window_runs = await run_jobs([run.of(default_call(method.of), view=view) for view in views])
    merged = []
    for index, layer in enumerate(run.job.layers):
        raw_maps = []
        for target in range(len(run.targets)):
            window_maps = [maps_by_method[0][index].maps[target] for _, maps_by_method in window_runs]
            maps = np.stack([raw_map.heatmap for raw_map in window_maps])
            weights = [weight_probability(run.job.model.task, window.answers[target]) for window, _ in window_runs]
            probabilities = np.array(weights, np.float32)
            heatmap = await run.row_runner.execute(_merge_windows, method, maps, probabilities, views, parameters)
            zero_gradient = all(raw_map.zero_gradient for raw_map in window_maps)
            raw_maps.append(RawMap(heatmap, zero_gradient=zero_gradient))
        merged.append(LayerMaps(layer, raw_maps))
    return merged


def _merge_windows(
    method: Windows, maps: Map, probabilities: Map, views: Sequence[View], parameters: Mapping[str, Any]
) -> Map:
    return method.merge(maps, probabilities, views, **parameters)


@run_method.register
async def _run_baseline(method: Baseline, run: ExplanationRun, call: MethodCall) -> list[LayerMaps]:
    heatmap = await run.row_runner.execute(_draw_baseline, method, call, run.input.numpy())
    return [LayerMaps("", [RawMap(heatmap)] * len(run.targets))]


def _draw_baseline(method: Baseline, call: MethodCall, image: Array) -> Map:
    return method.draw(image, **call.parameters)


def to_map(tensor: torch.Tensor) -> Map:
    """Return a map as a float32 array."""
    return cast("Map", tensor.float().numpy())
