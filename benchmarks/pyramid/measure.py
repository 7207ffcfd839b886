"""Measurement of pyramids: how well the maps of layers, alone and fused, find small and large objects."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

import camserve
from benchmarks.pyramid import toy
from benchmarks.results import Part, Table
from camserve_server import Explainer
from camserve_server.jobs import LayerMaps, RawMap
from camserve_server.jobs.fuse import fuse_layers

METHODS = ("gradcam", "hirescam", "layercam", "gradcam_plus_plus")
NECKS: dict[toy.Neck, str] = {
    "fpn": "the score depends on one scale",
    "pan": "fine maps continue to coarser ones",
    "mixed": "the score depends on all scales",
}
WAYS = ("one layer", "mean", "max", "gradient norm", "sum")
"""The model's default layer, and fusions of its pyramid."""
HEADINGS = ("small: energy", "small: pointing", "large: energy", "large: pointing")

Map: TypeAlias = NDArray[np.float32]
Numbers: TypeAlias = dict[tuple[str, str, bool], list[tuple[float, bool]]]
"""Energy in the box and hit of each object's map, by method, by way of explaining, and by whether it is small."""


@dataclass(frozen=True, slots=True)
class _Found:
    """An object that the detector found.

    Attributes:
        target: the target that explains it.
        box: its true box: left, top, right, bottom.
        small: True if it is small.
    """

    target: camserve.TargetLike
    box: NDArray[np.float32]
    small: bool


def measure(seeds: int, scenes: int, *, say: Callable[[str], None] = print) -> Part:
    """Measure all necks.

    Args:
        seeds: number of detectors of each neck, each trained from another seed.
        scenes: number of scenes that each explains.
        say: receives the progress.
    """
    part = Part("pyramid")
    for neck, words in NECKS.items():
        numbers: Numbers = {}
        for seed in range(seeds):
            collect(numbers, toy.trained(neck, seed), toy.scenes(scenes, 5000 + seed))
            say(f"pyramid: {neck}, detector {seed + 1} of {seeds}")
        part.tables.append(_table(f"{neck}: {words}", numbers))
    return part


def _table(title: str, numbers: Numbers) -> Table:
    rows = [(method, way, *summary(numbers, method, way)) for method in METHODS for way in WAYS]
    return Table(title, ("method", "layers", *HEADINGS), rows)


def summary(numbers: Numbers, method: str, way: str) -> tuple[str, ...]:
    """Return the mean energy and the share of hits, of small and of large objects, as text."""
    means = [means_of(numbers[method, way, small]) for small in (True, False)]
    return tuple(f"{value:.2f}" for pair in means for value in pair)


def means_of(pairs: Sequence[tuple[float, bool]]) -> tuple[float, float]:
    """Return the mean energy in the box and the share of hits."""
    return fmean(energy for energy, _ in pairs), fmean(hit for _, hit in pairs)


def collect(numbers: Numbers, network: toy.Detector, scenes: Sequence[toy.Scene]) -> None:
    """Explain every object that a detector finds in scenes, in all ways, and add the numbers."""
    with Explainer(network, **toy.options()) as explainer:
        layers = explainer.model().pyramid
        for scene in scenes:
            for found, ways in _explanations(explainer, network, scene, layers):
                for (method, way), heatmap in ways.items():
                    numbers.setdefault((method, way, found.small), []).append(energy_and_hit(heatmap, found.box))


def _explanations(
    explainer: Explainer, network: toy.Detector, scene: toy.Scene, layers: Sequence[str]
) -> Iterator[tuple[_Found, dict[tuple[str, str], Map]]]:
    """Yield each object that was found, and its maps by method and by way of explaining."""
    objects = _found(explainer, scene)
    if not objects:
        return
    one = _maps(explainer, scene, objects, [explainer.model().default_layer])
    scales = _maps(explainer, scene, objects, layers)
    for index, found in enumerate(objects):
        norms = gradient_norms(network, scene, found.box, layers)
        ways = {(method, WAYS[0]): one[method][index][0] for method in METHODS}
        ways |= {(method, way): fused(scales[method][index], way, norms) for method in METHODS for way in WAYS[1:]}
        yield found, ways


def _maps(
    explainer: Explainer, scene: toy.Scene, objects: Sequence[_Found], layers: Sequence[str]
) -> dict[str, list[list[Map]]]:
    """Return, by method, the maps of each object on each layer."""
    targets, maps = [found.target for found in objects], {}
    for method in METHODS:
        result = explainer.explain(scene.photo, methods=method, targets=targets, layers=[*layers], overlay=None)
        by_layer_and_target = [_map(explanation) for explanation in result.explanations]
        maps[method] = [by_layer_and_target[index :: len(targets)] for index in range(len(targets))]
    return maps


def _map(explanation: camserve.Explanation) -> Map:
    assert explanation.heatmap is not None  # noqa: S101 -- requested by default
    return explanation.heatmap.copy()  # torch takes no array that cannot be written to


def _found(explainer: Explainer, scene: toy.Scene) -> list[_Found]:
    """Return the objects of a scene that are among the predictions: the same label, and an overlap of one half."""
    predictions = explainer.explain(scene.photo, overlay=None, heatmap=False, max_predictions=50).predictions
    objects = []
    for box, label, small in zip(scene.boxes, scene.labels, scene.small, strict=True):
        name = toy.LABELS[label]
        for prediction in predictions:
            if prediction.label == name and prediction.box and _overlap(box, prediction.box) >= 0.5:  # noqa: PLR2004
                objects.append(_Found(camserve.detection(name, prediction.box), box, bool(small)))
                break
    return objects


def _overlap(box: NDArray[np.float32], other: camserve.Box) -> float:
    """Return the intersection of two boxes divided by their union."""
    edges = np.array([other.left, other.top, other.right, other.bottom])
    sides = (np.minimum(box[2:], edges[2:]) - np.maximum(box[:2], edges[:2])).clip(min=0)
    areas = [np.prod(each[2:] - each[:2]) for each in (box, edges)]
    return float(sides.prod() / (sum(areas) - sides.prod()))


def fused(maps: Sequence[Map], way: str, norms: Sequence[float]) -> Map:
    """Return the maps of the scales as one map.

    Args:
        maps: the signed map of each scale, the finest first.
        way: a fusion of camserve, or "gradient norm": the mean of the normalised maps, weighted by the norms.
        norms: the norm of the gradient at each scale.
    """
    by_layer = [LayerMaps(str(index), [RawMap(each)]) for index, each in enumerate(maps)]
    if way in ("mean", "max", "product", "sum"):
        return fuse_layers(by_layer, way).maps[0].heatmap  # type: ignore[arg-type]  # a fusion
    finest = [LayerMaps("", [RawMap(np.zeros_like(maps[0]))])]
    normalised = [2 * fuse_layers([each, *finest], "mean").maps[0].heatmap for each in by_layer]
    total = sum(weight * each for weight, each in zip(norms, normalised, strict=True)) / max(sum(norms), 1e-30)
    return np.asarray(total, np.float32)


def gradient_norms(
    network: toy.Detector, scene: toy.Scene, box: NDArray[np.float32], layers: Sequence[str]
) -> list[float]:
    """Return the norm of the gradient of an object's score at each layer."""
    kept: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, object, Tensor], Tensor]:
        def hook(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
            kept[name] = output if output.requires_grad else output.detach().requires_grad_()
            return kept[name].clone()

        return hook

    hooks = [network.get_submodule(name).register_forward_hook(keep(name)) for name in layers]
    with torch.enable_grad():
        (objects,) = network(toy.inputs([scene.photo]))
    for hook in hooks:
        hook.remove()
    nearest = int((objects["boxes"].detach() - torch.from_numpy(box)).abs().sum(1).argmin())
    outputs = [kept[name] for name in layers]
    gradients = torch.autograd.grad(objects["scores"][nearest], outputs, materialize_grads=True, allow_unused=True)
    return [float(gradient.norm()) for gradient in gradients]


def energy_and_hit(heatmap: Map, box: NDArray[np.float32]) -> tuple[float, bool]:
    """Return the share of a map's positive values in a box, and whether its highest value is in the box.

    Args:
        heatmap: the map on its layer's grid.
        box: left, top, right and bottom in pixels.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(heatmap))[None, None].clamp(min=0)
    size = (toy.SIDE, toy.SIDE)
    pixels = functional.interpolate(tensor, size, mode="bilinear", align_corners=False)[0, 0].numpy()
    middles = np.arange(toy.SIDE) + 0.5
    columns, rows = ((middles > box[axis]) & (middles < box[axis + 2]) for axis in (0, 1))
    inside = rows[:, None] & columns[None]
    total = float(pixels.sum())
    return (float(pixels[inside].sum()) / total, bool(inside.flat[pixels.argmax()])) if total > 0 else (0.0, False)
