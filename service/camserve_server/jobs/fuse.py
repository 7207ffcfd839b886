"""Fuse the maps of several layers into one, and resize maps to another grid."""

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
"""Separator between the names of fused layers."""

MAX_PYRAMID_LAYERS = 4
"""Largest number of layers that `pyramid` returns."""


def fuse_layers(maps_by_layer: Sequence[LayerMaps], fusion: Fusion) -> LayerMaps:
    """Fuse the maps of several layers, target by target.

    Each map goes through a ReLU, is min-max normalised, and is resized bilinearly to the finest grid among them.
    """
    name = JOINT.join(layer_maps.layer for layer_maps in maps_by_layer)
    by_target = zip(*(layer_maps.maps for layer_maps in maps_by_layer), strict=True)
    return LayerMaps(name, [_fuse(raw_maps, fusion) for raw_maps in by_target], fusion)


def _fuse(raw_maps: tuple[RawMap, ...], fusion: Fusion) -> RawMap:
    finest = max((raw_map.heatmap.shape for raw_map in raw_maps), key=lambda shape: shape[0] * shape[1])
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
    cut = torch.from_numpy(np.ascontiguousarray(heatmap)).clamp(min=0)
    resized = functional.interpolate(cut[None, None], tuple(size), mode="bilinear", align_corners=False)
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
