"""Several maps into one: layers fused, a layer's map brought to the pixels."""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np
import torch
from torch.nn import functional

from camserve_server.core.arrays import Map
from camserve_server.jobs.values import LayerMaps, RawMap
from camserve_server.methods.cams import refinecam
from camserve_server.methods.values import Fusion
from camserve_server.models.values import ModelInfo

JOINT = " + "
"""Between the names of layers that were fused."""

FINEST = 4
"""Layers that are fused where one is named: it, and the last of each finer grid, up to so many."""


def fused(by_layer: Sequence[LayerMaps], how: Fusion) -> LayerMaps:
    """Fuse the maps of several layers, target by target.

    Each is cut at zero, scaled to 0 to 1 and brought to the finest grid among them bilinearly.
    """
    name = JOINT.join(layer_maps.layer for layer_maps in by_layer)
    maps = [_fuse(layers, how) for layers in zip(*(layer_maps.maps for layer_maps in by_layer), strict=True)]
    return LayerMaps(name, maps, how)


def _fuse(layers: tuple[RawMap, ...], how: Fusion) -> RawMap:
    finest = max((one.heatmap.shape for one in layers), key=lambda shape: shape[0] * shape[1])
    maps = np.stack([onto_pixels(_relative(one.heatmap), finest) for one in layers])
    return RawMap(_FUSIONS[how](maps), zero_gradient=any(one.zero_gradient for one in layers))


_FUSIONS: Mapping[Fusion, Callable[[Map], Map]] = {
    "mean": lambda maps: cast("Map", maps.mean(0)),
    "max": lambda maps: cast("Map", maps.max(0)),
    "product": refinecam,
}


def _relative(heatmap: Map) -> Map:
    """Cut a map at zero and scale it to 0 to 1; a map that is the same everywhere becomes 1 where it is positive."""
    cut = heatmap.clip(min=0)
    least, greatest = cut.min(), cut.max()
    scaled = (cut - least) / (greatest - least) if greatest > least else cut > 0
    return cast("Map", scaled.astype(np.float32))


def onto_pixels(heatmap: Map, size: tuple[int, ...]) -> Map:
    """Cut a map at zero and bring it to another grid, bilinearly between the cells' centres.

    Args:
        heatmap: float32 [h,w].
        size: height and width of the other grid.
    """
    cut = torch.from_numpy(np.ascontiguousarray(heatmap)).clamp(min=0)
    found = functional.interpolate(cut[None, None], tuple(size), mode="bilinear", align_corners=False)
    return cast("Map", found[0, 0].numpy())


def pyramid(model: ModelInfo, layer: str) -> tuple[str, ...]:
    """Return a layer and, before it, the last layer of each finer grid that comes before it, finest first."""
    names = list(model.layers)
    before = names[: names.index(layer) + 1]
    last: dict[tuple[int, int], str] = {}
    for name in before:
        if layout := model.layers[name].layout:
            last.pop((layout.height, layout.width), None)
            last[layout.height, layout.width] = name
    return tuple(last.values())[-FINEST:]
