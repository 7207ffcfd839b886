"""Fuse the maps of several layers into one, and resize maps to another grid."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
"""Separator between the names of fused layers."""

MAX_PYRAMID_LAYERS = 4
"""Largest number of layers that `pyramid` returns."""


def fuse_layers(maps_by_layer: Sequence[LayerMaps], fusion: Fusion, name: str = "") -> LayerMaps:
    """Fuse the maps of several layers, target by target.

    For a sum, see `_add`. Otherwise each map goes through a ReLU, is min-max normalised, and is resized bilinearly to
    the finest grid among them.

    Args:
        maps_by_layer: the maps of each layer.
        fusion: the way to fuse them.
        name: name of the layers together; empty for their joined names.
    """
    joined = JOINT.join(layer_maps.layer for layer_maps in maps_by_layer)
    by_target = zip(*(layer_maps.maps for layer_maps in maps_by_layer), strict=True)
    fuse = _add if fusion == "sum" else partial(_fuse, fusion=fusion)
    return LayerMaps(name or joined, [fuse(raw_maps) for raw_maps in by_target], fusion)


def _finest(raw_maps: Sequence[RawMap]) -> tuple[int, int]:
    height, width = max((raw_map.heatmap.shape for raw_map in raw_maps), key=lambda shape: shape[0] * shape[1])
    return height, width


def _add(raw_maps: tuple[RawMap, ...]) -> RawMap:
    """Add up signed maps as densities: each value is divided by the number of finest cells that its cell covers.

    A map of feature maps times gradients is a first-order share of the score for each cell. Spread over the cell's
    area, the shares of several grids can be added. Normalised maps cannot: of a scale that hardly matters to the score,
    normalising shows the noise. A map on the finest grid is added as it is. The measurement is
    `python -m benchmarks.pyramid`.
    """
    finest = _finest(raw_maps)
    maps = [np.ascontiguousarray(raw_map.heatmap) for raw_map in raw_maps]
    densities = [_resize(torch.from_numpy(each), finest) * (each.size / math.prod(finest)) for each in maps]
    total = np.stack(densities).sum(0)
    return RawMap(cast("Map", total), zero_gradient=all(raw_map.zero_gradient for raw_map in raw_maps))


def _fuse(raw_maps: tuple[RawMap, ...], fusion: Fusion) -> RawMap:
    finest = _finest(raw_maps)
    maps = np.stack([resize_positive(_relative(raw_map.heatmap), finest) for raw_map in raw_maps])
    return RawMap(_FUSIONS[fusion](maps), zero_gradient=any(raw_map.zero_gradient for raw_map in raw_maps))


_FUSIONS: Mapping[Fusion, Callable[[Map], Map]] = {
    "mean": lambda maps: cast("Map", maps.mean(0)),
    "max": lambda maps: cast("Map", maps.max(0)),
    "product": refinecam,
}


def _relative(heatmap: Map) -> Map:
    """Apply a ReLU and min-max normalise the result; a constant map becomes 1 if it is positive, else 0."""
    cut = heatmap.clip(min=0)
    least, greatest = cut.min(), cut.max()
    scaled = (cut - least) / (greatest - least) if greatest > least else cut > 0
    return cast("Map", scaled.astype(np.float32))


def resize_positive(heatmap: Map, size: tuple[int, ...]) -> Map:
    """Apply a ReLU to a map and resize it to another grid, bilinearly between the cells' centres.

    Args:
        heatmap: the map, float32 [h,w].
        size: height and width of the other grid.
    """
    return _resize(torch.from_numpy(np.ascontiguousarray(heatmap)).clamp(min=0), size)


def _resize(heatmap: torch.Tensor, size: tuple[int, ...]) -> Map:
    resized = functional.interpolate(heatmap[None, None], tuple(size), mode="bilinear", align_corners=False)
    return cast("Map", resized[0, 0].numpy())


def pyramid(model: ModelInfo, layer: str) -> tuple[str, ...]:
    """Return the layers to fuse when only one is named: the last layer of each finer grid before it, and the layer.

    The finest grid is first. Only the MAX_PYRAMID_LAYERS layers nearest to the named one count.
    """
    names = list(model.layers)
    last: dict[tuple[int, int], str] = {}
    for name in names[: names.index(layer) + 1]:
        if layout := model.layers[name].layout:
            last.pop((layout.height, layout.width), None)
            last[layout.height, layout.width] = name
    return tuple(last.values())[-MAX_PYRAMID_LAYERS:]
