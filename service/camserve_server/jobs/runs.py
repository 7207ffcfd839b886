"""How each kind of method gets its maps."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, singledispatch
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray

from camserve_server.core.arrays import Map
from camserve_server.engine.values import RowResult
from camserve_server.imaging.values import View
from camserve_server.jobs.cost import AUGMENTED, part
from camserve_server.jobs.fuse import fused, onto_pixels, pyramid
from camserve_server.jobs.study import ExplanationRun, advanced
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
)
from camserve_server.methods.kinds import Array, itself, one
from camserve_server.methods.values import Edit, MethodCall
from camserve_server.models.values import Pass
from camserve_server.targets import weight_probability

Sums: TypeAlias = NDArray[np.float32] | NDArray[np.float64]


async def examine(explanation: ExplanationRun) -> tuple[ExplanationRun, list[list[LayerMaps]]]:
    """Run an explanation: the image as it is first, then every method that this does not answer.

    Returns:
        The run with its answers, and for each method the maps of each layer.
    """
    explanation = await explanation.looked()
    return explanation, [await layer_maps_of(explanation, call) for call in explanation.job.calls]


async def examine_all(explanations: Sequence[ExplanationRun]) -> list[tuple[ExplanationRun, list[list[LayerMaps]]]]:
    """Run several explanations of one request, as many at a time as its limit on rows under way allows."""
    return await explanations[0].row_runner.gather([(one.job.rows, partial(examine, one)) for one in explanations])


async def layer_maps_of(explanation: ExplanationRun, call: MethodCall) -> list[LayerMaps]:
    """Run one method, once the answers for the unchanged image are known."""
    by_layer = await (
        _augmented(explanation, call) if call.augmented else run_method(METHODS[call.name], explanation, call)
    )
    how = explanation.job.fusion
    if how is None or len(by_layer) == 1:
        return by_layer
    return [await explanation.row_runner.execute(fused, by_layer, how)]


async def _each_view(explanation: ExplanationRun, call: MethodCall, views: Sequence[View]) -> list[list[LayerMaps]]:
    """Run one method on many views of the image; the targets stay those of the image as it is."""
    return [by_method[0] for _, by_method in await examine_all([explanation.of(call, view=view) for view in views])]


async def _augmented(explanation: ExplanationRun, call: MethodCall) -> list[LayerMaps]:
    """Take the mean of a method's maps over mirrored and brightened copies of the image."""
    plain = replace(call, augmented=False)
    seen = await _each_view(explanation, plain, AUGMENTED)
    places = range(len(explanation.targets))
    return [
        replace(layers[0], maps=[_mean([layer.maps[place] for layer in layers]) for place in places])
        for layers in zip(*seen, strict=True)
    ]


def _mean(copies: list[RawMap]) -> RawMap:
    upright = [
        one.heatmap[:, ::-1] if view.mirrored else one.heatmap for one, view in zip(copies, AUGMENTED, strict=True)
    ]
    return RawMap(np.mean(upright, 0, dtype=np.float32), zero_gradient=all(one.zero_gradient for one in copies))


@dataclass(slots=True)
class _Mean:
    """The mean of what a method's copies add to it, for one target on one layer.

    Attributes:
        squares: whether to take the mean of the squares as well. A variance is a small difference of large numbers, so
            both means are in float64.
        total: so far.
        copies: so far.
        zero_gradient: whether every gradient so far was zero everywhere.
        scores: of the copies, in the order of their indices.
    """

    squares: bool = False
    total: Sums | None = None
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
        return torch.from_numpy(cast("Sums", self.total) / np.float32(self.copies))


async def _means(
    method: Cam | Saliency, explanation: ExplanationRun, call: MethodCall, pass_: Pass
) -> list[list[_Mean]]:
    """Run a method's copies; return the mean of each layer (one where there is none) and target."""
    means = [[_Mean(method.squares) for _ in explanation.targets] for _ in pass_.layers or ("",)]

    def add(index: int, result: RowResult) -> None:
        for layer, maps, zero_gradient in zip(means, result.maps, result.zero_gradient, strict=True):
            layer[index % len(explanation.targets)].add(maps[0], result.score, zero_gradient=zero_gradient)

    # The targets of one copy stand side by side, so that they share a forward pass.
    itself_alone = method.copy is itself and method.count is one
    copies: Sequence[int | None] = (None,) if itself_alone else range(method.count(**call.parameters))
    rows = [explanation.row(target, (call,), copy) for copy in copies for target in explanation.targets]
    await explanation.row_runner.run(pass_, rows, add)
    return means


@singledispatch
async def run_method(method: Method, _explanation: ExplanationRun, call: MethodCall) -> list[LayerMaps]:
    """Run a method by its kind, which is the only place that depends on it."""
    raise TypeError(f"{call.name} is of an unknown kind: {type(method).__name__}")


@run_method.register
async def _cam(method: Cam, explanation: ExplanationRun, call: MethodCall) -> list[LayerMaps]:
    if call in explanation.job.clean:
        return _answered(explanation, call)
    means = await _means(method, explanation, call, explanation.pass_(method.pass_kind, explanation.job.layers))
    return [
        LayerMaps(
            layer,
            [
                await explanation.row_runner.execute(
                    _finish_cam, method, call, mean, explanation.answers[0].features, place
                )
                for mean in means[place]
            ],
        )
        for place, layer in enumerate(explanation.job.layers)
    ]


def _answered(explanation: ExplanationRun, call: MethodCall) -> list[LayerMaps]:
    """Take the maps of a method that the pass over the image as it is has answered."""
    slot = list(itertools.chain.from_iterable(explanation.job.shared)).index(call)
    return [
        LayerMaps(
            layer,
            [RawMap(one.maps[place][slot], zero_gradient=one.zero_gradient[place]) for one in explanation.answers],
        )
        for place, layer in enumerate(explanation.job.layers)
    ]


def _finish_cam(method: Cam, call: MethodCall, mean: _Mean, features: Sequence[Map], place: int) -> RawMap:
    more = {"features": torch.from_numpy(features[place])} if features else {}
    return RawMap(to_map(method.finish(mean.value, **call.parameters, **more)), zero_gradient=mean.zero_gradient)


@run_method.register
async def _saliency(method: Saliency, explanation: ExplanationRun, call: MethodCall) -> list[LayerMaps]:
    if call in explanation.job.clean:
        means = [_Mean(method.squares) for _ in explanation.answers]
        for mean, answer in zip(means, explanation.answers, strict=True):
            mean.add(answer.maps[0][0], answer.score, zero_gradient=answer.zero_gradient[0])
    else:
        (means,) = await _means(method, explanation, call, explanation.pass_(method.pass_kind))
    return [LayerMaps("", await explanation.row_runner.execute(_finish_saliencies, method, explanation, call, means))]


def _finish_saliencies(
    method: Saliency, explanation: ExplanationRun, call: MethodCall, means: Sequence[_Mean]
) -> list[RawMap]:
    seen = explanation.input
    return [
        _finish_saliency(method, call, mean, seen, answer.score)
        for mean, answer in zip(means, explanation.answers, strict=True)
    ]


def _finish_saliency(method: Saliency, call: MethodCall, mean: _Mean, seen: torch.Tensor, score: float) -> RawMap:
    if method.baseline is None:
        return RawMap(to_map(method.finish(mean.value, seen, **call.parameters)), zero_gradient=mean.zero_gradient)
    promised = score - mean.scores[method.baseline(**call.parameters)]
    heatmap = to_map(method.finish(mean.value, seen, gained=promised, **call.parameters))
    error = abs(float(heatmap.sum(dtype=np.float64)) - promised) / abs(promised) if promised else 0.0
    return RawMap(heatmap, mean.zero_gradient, error)


@run_method.register
async def _perturbation(method: Perturbation, explanation: ExplanationRun, call: MethodCall) -> list[LayerMaps]:
    scores = np.array([answer.score for answer in explanation.answers], np.float32)
    image = explanation.input.numpy()
    if not method.layered:
        return [await _explored(method, explanation, call, Scene(image, scores), "")]
    return [
        await _explored(method, explanation, call, Scene(image, scores, explanation.answers[0].features[place]), layer)
        for place, layer in enumerate(explanation.job.layers)
    ]


async def _explored(
    method: Perturbation, explanation: ExplanationRun, call: MethodCall, scene: Scene, layer: str
) -> LayerMaps:
    """Let a method try one set of edits after another, until it has its maps."""
    exploring = method.explore(scene, **call.parameters)
    edits, maps = await explanation.row_runner.execute(advanced, exploring, None)
    while maps is None:
        edits, maps = await explanation.row_runner.execute(
            advanced, exploring, await _scores(explanation, edits, layer)
        )
    return LayerMaps(layer, [RawMap(np.asarray(one, np.float32)) for one in maps])


async def _scores(explanation: ExplanationRun, edits: Sequence[Edit], layer: str) -> Array:
    """Return the scores [n,T] of the image, edited, for every target."""
    scores = np.zeros((len(edits), len(explanation.targets)), np.float32)

    def keep(index: int, result: RowResult) -> None:
        scores.flat[index] = result.score

    rows = [replace(explanation.row(target), edit=edit) for edit in edits for target in explanation.targets]
    silences = any(edit.silenced is not None for edit in edits)
    await explanation.row_runner.run(explanation.pass_("score", (layer,) if silences else ()), rows, keep)
    return scores


@run_method.register
async def _own_pass(method: Attention | FullGradient, explanation: ExplanationRun, call: MethodCall) -> list[LayerMaps]:
    """Run a method that one pass of its own kind answers, on no layer."""
    found: dict[int, RowResult] = {}
    rows = [explanation.row(target, (call,)) for target in explanation.targets]
    await explanation.row_runner.run(explanation.pass_(method.pass_kind), rows, found.__setitem__)
    answers = [found[place] for place in range(len(found))]
    return [LayerMaps("", [RawMap(one.maps[0][0], zero_gradient=one.zero_gradient[0]) for one in answers])]


@run_method.register
async def _product(method: Product, explanation: ExplanationRun, _call: MethodCall) -> list[LayerMaps]:
    _, (pixels,) = await examine(explanation.of(part(method.pixels)))
    _, (layers,) = await examine(explanation.of(part(method.layer)))
    return [
        LayerMaps(
            one.layer,
            [
                RawMap(
                    a.heatmap * onto_pixels(b.heatmap, a.heatmap.shape),
                    zero_gradient=a.zero_gradient or b.zero_gradient,
                )
                for a, b in zip(pixels[0].maps, one.maps, strict=True)
            ],
        )
        for one in layers
    ]


@run_method.register
async def _fused(method: Fused, explanation: ExplanationRun, _call: MethodCall) -> list[LayerMaps]:
    layers = (
        explanation.job.layers
        if len(explanation.job.layers) > 1
        else pyramid(explanation.job.model, explanation.job.layers[0])
    )
    _, (by_layer,) = await examine(explanation.of(part(method.of), layers))
    return [await explanation.row_runner.execute(fused, by_layer, method.how)]


@run_method.register
async def _windows(method: Windows, explanation: ExplanationRun, call: MethodCall) -> list[LayerMaps]:
    height, width = explanation.job.model.preprocess.size
    given = {**call.parameters, "height": height, "width": width}
    views = method.views(**given)
    explanations = await examine_all([explanation.of(part(method.of), view=view) for view in views])
    merged = []
    for place, layer in enumerate(explanation.job.layers):
        raw_maps = []
        for target in range(len(explanation.targets)):
            maps = np.stack([by_method[0][place].maps[target].heatmap for _, by_method in explanations])
            weights = [weight_probability(explanation.job.model.task, one.answers[target]) for one, _ in explanations]
            chances = np.array(weights, np.float32)
            zero_gradient = all(by_method[0][place].maps[target].zero_gradient for _, by_method in explanations)
            raw_maps.append(
                RawMap(
                    await explanation.row_runner.execute(_merged, method, maps, chances, views, given),
                    zero_gradient=zero_gradient,
                )
            )
        merged.append(LayerMaps(layer, raw_maps))
    return merged


def _merged(method: Windows, maps: Map, chances: Map, views: Sequence[View], given: Mapping[str, Any]) -> Map:
    return method.merge(maps, chances, views, **given)


@run_method.register
async def _baseline(method: Baseline, explanation: ExplanationRun, call: MethodCall) -> list[LayerMaps]:
    heatmap = await explanation.row_runner.execute(_drawn, method, call, explanation.input.numpy())
    return [LayerMaps("", [RawMap(heatmap)] * len(explanation.targets))]


def _drawn(method: Baseline, call: MethodCall, image: Array) -> Map:
    return method.draw(image, **call.parameters)


def to_map(tensor: torch.Tensor) -> Map:
    """Return a map as a plain array, float32."""
    return cast("Map", tensor.float().numpy())
