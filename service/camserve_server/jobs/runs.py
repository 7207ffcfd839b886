"""How each kind of method gets its maps."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, singledispatch
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray

from camserve_server.jobs.cost import AUGMENTED, part
from camserve_server.jobs.fuse import fused, onto_pixels, pyramid
from camserve_server.jobs.study import Study, advanced
from camserve_server.jobs.values import Evidence, Sheet
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
from camserve_server.targets import weight_probability
from camserve_server.types import (
    Edit,
    Map,
    MethodCall,
    Pass,
    RowResult,
    View,
)

Sums: TypeAlias = NDArray[np.float32] | NDArray[np.float64]


async def examine(study: Study) -> tuple[Study, list[list[Sheet]]]:
    """Run a study: the image as it is first, then every method that this does not answer.

    Returns:
        The study with its answers, and for each method a sheet for each layer.
    """
    study = await study.looked()
    return study, [await sheets_of(study, call) for call in study.job.calls]


async def examine_all(studies: Sequence[Study]) -> list[tuple[Study, list[list[Sheet]]]]:
    """Run several studies of one request, as many at a time as its limit on rows under way allows."""
    return await studies[0].desk.gather([(one.job.rows, partial(examine, one)) for one in studies])


async def sheets_of(study: Study, call: MethodCall) -> list[Sheet]:
    """Run one method of a study that knows what the model says of the image as it is."""
    sheets = await (_augmented(study, call) if call.augmented else run(METHODS[call.name], study, call))
    how = study.job.fusion
    if how is None or len(sheets) == 1:
        return sheets
    return [await study.desk.think(fused, sheets, how)]


async def _each_view(study: Study, call: MethodCall, views: Sequence[View]) -> list[list[Sheet]]:
    """Run one method on many views of the image; the targets stay those of the image as it is."""
    return [sheets[0] for _, sheets in await examine_all([study.of(call, view=view) for view in views])]


async def _augmented(study: Study, call: MethodCall) -> list[Sheet]:
    """Take the mean of a method's maps over mirrored and brightened copies of the image."""
    plain = replace(call, augmented=False)
    seen = await _each_view(study, plain, AUGMENTED)
    places = range(len(study.targets))
    return [
        replace(layers[0], evidence=[_mean([layer.evidence[place] for layer in layers]) for place in places])
        for layers in zip(*seen, strict=True)
    ]


def _mean(copies: list[Evidence]) -> Evidence:
    upright = [
        one.heatmap[:, ::-1] if view.mirrored else one.heatmap for one, view in zip(copies, AUGMENTED, strict=True)
    ]
    return Evidence(np.mean(upright, 0, dtype=np.float32), dead=all(one.dead for one in copies))


@dataclass(slots=True)
class _Mean:
    """The mean of what a method's copies add to it, for one target on one layer.

    Attributes:
        squares: whether to take the mean of the squares as well. A variance is a small difference of large numbers, so
            both means are in float64.
        total: so far.
        copies: so far.
        dead: whether every gradient so far was zero everywhere.
        scores: of the copies, in the order of their indices.
    """

    squares: bool = False
    total: Sums | None = None
    copies: int = 0
    dead: bool = True
    scores: list[float] = field(default_factory=list)

    def add(self, term: Map, score: float, *, dead: bool) -> None:
        added = np.stack((term, np.square(term, dtype=np.float64))) if self.squares else term
        self.total = added.copy() if self.total is None else self.total.__iadd__(added)
        self.copies += 1
        self.dead = self.dead and dead
        self.scores.append(score)

    @property
    def value(self) -> torch.Tensor:
        return torch.from_numpy(cast("Sums", self.total) / np.float32(self.copies))


async def _means(method: Cam | Saliency, study: Study, call: MethodCall, pass_: Pass) -> list[list[_Mean]]:
    """Run a method's copies; return the mean of each layer (one where there is none) and target."""
    means = [[_Mean(method.squares) for _ in study.targets] for _ in pass_.layers or ("",)]

    def add(index: int, result: RowResult) -> None:
        for layer, maps, dead in zip(means, result.maps, result.dead, strict=True):
            layer[index % len(study.targets)].add(maps[0], result.score, dead=dead)

    # The targets of one copy stand side by side, so that they share a forward pass.
    itself_alone = method.copy is itself and method.count is one
    copies: Sequence[int | None] = (None,) if itself_alone else range(method.count(**call.parameters))
    rows = [study.row(target, (call,), copy) for copy in copies for target in study.targets]
    await study.desk.run(pass_, rows, add)
    return means


@singledispatch
async def run(method: Method, study: Study, call: MethodCall) -> list[Sheet]:  # noqa: ARG001 -- as every kind's
    """Run a method by its kind, which is the only place that depends on it."""
    raise TypeError(f"{call.name} is of an unknown kind: {type(method).__name__}")


@run.register
async def _cam(method: Cam, study: Study, call: MethodCall) -> list[Sheet]:
    if call in study.job.clean:
        return _answered(study, call)
    means = await _means(method, study, call, study.pass_(method.pass_kind, study.job.layers))
    return [
        Sheet(
            layer,
            [
                await study.desk.think(_finish_cam, method, call, mean, study.answers[0].features, place)
                for mean in means[place]
            ],
        )
        for place, layer in enumerate(study.job.layers)
    ]


def _answered(study: Study, call: MethodCall) -> list[Sheet]:
    """Take the maps of a method that the pass over the image as it is has answered."""
    slot = list(itertools.chain.from_iterable(study.job.shared)).index(call)
    return [
        Sheet(layer, [Evidence(one.maps[place][slot], dead=one.dead[place]) for one in study.answers])
        for place, layer in enumerate(study.job.layers)
    ]


def _finish_cam(method: Cam, call: MethodCall, mean: _Mean, features: Sequence[Map], place: int) -> Evidence:
    more = {"features": torch.from_numpy(features[place])} if features else {}
    return Evidence(to_map(method.finish(mean.value, **call.parameters, **more)), dead=mean.dead)


@run.register
async def _saliency(method: Saliency, study: Study, call: MethodCall) -> list[Sheet]:
    if call in study.job.clean:
        means = [_Mean(method.squares) for _ in study.answers]
        for mean, answer in zip(means, study.answers, strict=True):
            mean.add(answer.maps[0][0], answer.score, dead=answer.dead[0])
    else:
        (means,) = await _means(method, study, call, study.pass_(method.pass_kind))
    return [Sheet("", await study.desk.think(_finish_saliencies, method, study, call, means))]


def _finish_saliencies(method: Saliency, study: Study, call: MethodCall, means: Sequence[_Mean]) -> list[Evidence]:
    seen = study.input
    return [
        _finish_saliency(method, call, mean, seen, answer.score)
        for mean, answer in zip(means, study.answers, strict=True)
    ]


def _finish_saliency(method: Saliency, call: MethodCall, mean: _Mean, seen: torch.Tensor, score: float) -> Evidence:
    if method.baseline is None:
        return Evidence(to_map(method.finish(mean.value, seen, **call.parameters)), dead=mean.dead)
    promised = score - mean.scores[method.baseline(**call.parameters)]
    heatmap = to_map(method.finish(mean.value, seen, gained=promised, **call.parameters))
    error = abs(float(heatmap.sum(dtype=np.float64)) - promised) / abs(promised) if promised else 0.0
    return Evidence(heatmap, mean.dead, error)


@run.register
async def _perturbation(method: Perturbation, study: Study, call: MethodCall) -> list[Sheet]:
    scores = np.array([answer.score for answer in study.answers], np.float32)
    image = study.input.numpy()
    if not method.layered:
        return [await _explored(method, study, call, Scene(image, scores), "")]
    return [
        await _explored(method, study, call, Scene(image, scores, study.answers[0].features[place]), layer)
        for place, layer in enumerate(study.job.layers)
    ]


async def _explored(method: Perturbation, study: Study, call: MethodCall, scene: Scene, layer: str) -> Sheet:
    """Let a method try one set of edits after another, until it has its maps."""
    exploring = method.explore(scene, **call.parameters)
    edits, maps = await study.desk.think(advanced, exploring, None)
    while maps is None:
        edits, maps = await study.desk.think(advanced, exploring, await _scores(study, edits, layer))
    return Sheet(layer, [Evidence(np.asarray(one, np.float32)) for one in maps])


async def _scores(study: Study, edits: Sequence[Edit], layer: str) -> Array:
    """Return the scores [n,T] of the image, edited, for every target."""
    scores = np.zeros((len(edits), len(study.targets)), np.float32)

    def keep(index: int, result: RowResult) -> None:
        scores.flat[index] = result.score

    rows = [replace(study.row(target), edit=edit) for edit in edits for target in study.targets]
    silences = any(edit.silenced is not None for edit in edits)
    await study.desk.run(study.pass_("score", (layer,) if silences else ()), rows, keep)
    return scores


@run.register
async def _own_pass(method: Attention | FullGradient, study: Study, call: MethodCall) -> list[Sheet]:
    """Run a method that one pass of its own kind answers, on no layer."""
    found: dict[int, RowResult] = {}
    rows = [study.row(target, (call,)) for target in study.targets]
    await study.desk.run(study.pass_(method.pass_kind), rows, found.__setitem__)
    answers = [found[place] for place in range(len(found))]
    return [Sheet("", [Evidence(one.maps[0][0], dead=one.dead[0]) for one in answers])]


@run.register
async def _product(method: Product, study: Study, _call: MethodCall) -> list[Sheet]:
    _, (pixels,) = await examine(study.of(part(method.pixels)))
    _, (layers,) = await examine(study.of(part(method.layer)))
    return [
        Sheet(
            one.layer,
            [
                Evidence(a.heatmap * onto_pixels(b.heatmap, a.heatmap.shape), dead=a.dead or b.dead)
                for a, b in zip(pixels[0].evidence, one.evidence, strict=True)
            ],
        )
        for one in layers
    ]


@run.register
async def _fused(method: Fused, study: Study, _call: MethodCall) -> list[Sheet]:
    layers = study.job.layers if len(study.job.layers) > 1 else pyramid(study.job.model, study.job.layers[0])
    _, (sheets,) = await examine(study.of(part(method.of), layers))
    return [await study.desk.think(fused, sheets, method.how)]


@run.register
async def _windows(method: Windows, study: Study, call: MethodCall) -> list[Sheet]:
    height, width = study.job.model.preprocess.size
    given = {**call.parameters, "height": height, "width": width}
    views = method.views(**given)
    studies = await examine_all([study.of(part(method.of), view=view) for view in views])
    merged = []
    for place, layer in enumerate(study.job.layers):
        evidence = []
        for target in range(len(study.targets)):
            maps = np.stack([sheets[0][place].evidence[target].heatmap for _, sheets in studies])
            weights = [weight_probability(study.job.model.task, one.answers[target]) for one, _ in studies]
            chances = np.array(weights, np.float32)
            dead = all(sheets[0][place].evidence[target].dead for _, sheets in studies)
            evidence.append(Evidence(await study.desk.think(_merged, method, maps, chances, views, given), dead=dead))
        merged.append(Sheet(layer, evidence))
    return merged


def _merged(method: Windows, maps: Map, chances: Map, views: Sequence[View], given: Mapping[str, Any]) -> Map:
    return method.merge(maps, chances, views, **given)


@run.register
async def _baseline(method: Baseline, study: Study, call: MethodCall) -> list[Sheet]:
    heatmap = await study.desk.think(_drawn, method, call, study.input.numpy())
    return [Sheet("", [Evidence(heatmap)] * len(study.targets))]


def _drawn(method: Baseline, call: MethodCall, image: Array) -> Map:
    return method.draw(image, **call.parameters)


def to_map(tensor: torch.Tensor) -> Map:
    """Return a map as a plain array, float32."""
    return cast("Map", tensor.float().numpy())
