"""Channels, principal components, factors and attention heads of a layer: the results of each rank.

`find` computes them from the layer's feature maps, and `draw` makes their picture. Both run in a thread.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from camserve_server.core.arrays import Input, Map, Pixels
from camserve_server.imaging import components as component_pictures
from camserve_server.imaging import concepts, fitting, render, tiles
from camserve_server.imaging.values import Box, Picture
from camserve_server.methods import components, factors
from camserve_server.serving import memory
from camserve_server.serving.requests import FeaturesRequest, Rank
from camserve_server.serving.results import Channel, ModelPrediction, Prediction

if TYPE_CHECKING:
    from camserve_server.targets.values import FixedTarget

CONCEPT_SIDE = 224  # pixels of a tile with a concept: large enough for two labels below it
HEAD_WORDS = "share of attention on the patches"
NEAREST = 3
"""The number of classes that are returned for a concept."""


@dataclass(frozen=True, slots=True)
class Observed:
    """A photo as the model saw it, and what a layer returned for it.

    Attributes:
        image: the model's input.
        photo: the photo, reduced, to draw components on; None if nothing is drawn on it.
        seen: the part of the original photo that the model sees.
        size: height and width of the original photo.
        maps: the layer's feature maps [C,h,w], or its attention heads [heads,h,w].
        weights: mean gradient of the score over each channel [C]; zeros for heads, and without a score.
        prediction: the model's prediction.
        target: the target whose score was differentiated.
        score: its score.
        layer: name of the layer.
    """

    image: Input
    photo: Pixels | None
    seen: Box
    size: tuple[int, int]
    maps: Map
    weights: Map
    prediction: ModelPrediction
    target: "FixedTarget"
    score: float
    layer: str


@dataclass(frozen=True, slots=True)
class Found:
    """Channels of a layer, in the order in which they are returned.

    Attributes:
        channels: the channels, the highest-ranked first.
        basis: the principal components; None for other ranks.
        vectors: the features of each concept, at its strongest cell [k,C]; None for other ranks.
    """

    channels: Sequence[Channel]
    basis: components.Basis | None = None
    vectors: Map | None = None


def find(request: FeaturesRequest, photo: Observed, others: Sequence[Map]) -> Generator[None, None, Found]:
    """Compute the channels of a photo. The generator pauses so that other callers have their turn.

    Args:
        request: the rank, and the number of channels.
        photo: the photo and its feature maps.
        others: feature maps of the further photos that components are computed from.

    Raises:
        FailedPrecondition: the features have no components or factors.
    """
    if request.rank == "pca":
        return _find_components(request, photo, others)
    if request.rank == "factors":
        return (yield from _find_factors(request, photo))
    if request.rank == "heads":
        shares = photo.maps.sum((1, 2), dtype=np.float64)
        return Found([_channel(k, each, 0.0, share) for k, each, share in _numbered(photo.maps[: request.top], shares)])
    return Found(rank_channels(photo.maps, photo.weights, request))


def rank_channels(maps: Map, weights: Map, request: FeaturesRequest) -> list[Channel]:
    """Return the highest-ranked channels; equal ones stay in order, and those with NaN or infinite values are last.

    Args:
        maps: feature maps, float32 [C,h,w].
        weights: mean gradient of the score over each channel, float32 [C].
        request: the request, with the value to rank by and the number of channels to return.
    """
    means = maps.mean((1, 2), dtype=np.float64)
    keys = np.abs(weights) if request.rank == "gradient" else means
    keys = np.where(np.isfinite(keys), keys, -np.inf)
    first = np.argsort(-keys, kind="stable")[: request.top]
    return [Channel(int(k), float(means[k]), float(weights[k]), maps[k]) for k in first]


def _find_components(request: FeaturesRequest, photo: Observed, others: Sequence[Map]) -> Found:
    basis = request.basis or components.fit([photo.maps, *others], request.top, foreground=request.foreground)
    if request.top < len(basis.vectors):
        top = slice(request.top)
        basis = replace(basis, vectors=basis.vectors[top], shares=basis.shares[top], ranges=basis.ranges[top])
    weights = basis.vectors @ photo.weights
    maps = components.project(photo.maps, basis)
    channels = [_channel(k, each, weights[k], share) for k, each, share in _numbered(maps, basis.shares)]
    return Found(channels, basis)


def _find_factors(request: FeaturesRequest, photo: Observed) -> Generator[None, None, Found]:
    found = yield from factors.factorise(photo.maps, request.top)
    weights = found.vectors @ photo.weights
    channels = [_channel(k, each, weights[k], share) for k, each, share in _numbered(found.maps, found.shares)]
    return Found(channels, vectors=found.lowest + found.vectors * found.maps.max((1, 2))[:, None])


def _numbered(maps: Map, shares: Map) -> list[tuple[int, Map, float]]:
    return [(k, each, float(shares[k])) for k, each in enumerate(maps)]


def _channel(index: int, heatmap: Map, weight: float, share: float) -> Channel:
    known = heatmap[~np.isnan(heatmap)]  # cells of the background are NaN
    mean = float(known.mean(dtype=np.float64)) if known.size else 0.0
    return Channel(index, mean, float(weight), heatmap, share)


def with_nearest(found: Found, nearest: Sequence[Sequence[Prediction]]) -> Found:
    """Return the concepts with the classes that are nearest to each."""
    channels = [replace(channel, nearest=classes) for channel, classes in zip(found.channels, nearest, strict=True)]
    return replace(found, channels=channels)


def work_bytes(request: FeaturesRequest) -> int:
    """Return an upper bound, in bytes, of the memory to find the channels, without the feature maps themselves.

    In float64, a decomposition holds the features, a copy of them, and a product of at most that size.
    """
    if request.rank not in ("pca", "factors"):
        return 0
    return 3 * 2 * memory.feature_bytes(request)


def draw(request: FeaturesRequest, photo: Observed, found: Found) -> Picture:
    """Draw the channels in the picture of the request's rank.

    Args:
        request: the rank, and the encoding of the picture.
        photo: the photo.
        found: its channels.
    """
    kind, channels, basis = request.picture or "png", found.channels, found.basis
    if basis is not None and photo.photo is not None:
        down, across = (here / there for here, there in zip(photo.photo.shape[:2], photo.size, strict=True))
        seen = Box(photo.seen.left * across, photo.seen.top * down, photo.seen.right * across, photo.seen.bottom * down)
        maps = [channel.map for channel in channels]
        return component_pictures.draw(photo.photo, maps, basis.ranges, seen, kind)
    image = fitting.displayed(photo.image, request.model.preprocess)
    shown = _concept_tiles(image, channels) if request.rank == "factors" else _tiles(request, channels)
    side = CONCEPT_SIDE if request.rank == "factors" else tiles.SIDE
    colours = render.colormap(request.colormap)
    return tiles.draw(image, shown, _titles(request, photo, len(channels)), colours, kind, side)


def _tiles(request: FeaturesRequest, channels: Sequence[Channel]) -> list[tiles.Tile]:
    if request.rank == "heads":
        return [tiles.Tile(f"head {each.index}", f"{each.share:.0%}", each.map) for each in channels]
    return [tiles.Tile(f"#{each.index}", _rank_value(each, request.rank), each.map) for each in channels]


def _rank_value(channel: Channel, rank: Rank) -> float:
    return channel.weight if rank == "gradient" else channel.activation


def _concept_tiles(image: Pixels, channels: Sequence[Channel]) -> list[tiles.Tile]:
    """Return a tile of all concepts, and one of each: its likeliest classes, and its share."""
    maps, palette = np.stack([channel.map for channel in channels]), concepts.colours(len(channels))
    shown = [tiles.Tile("all concepts", "", maps[0], concepts.paint(image, maps, palette))]
    for k, channel in enumerate(channels):
        picture = concepts.paint(image, maps[k : k + 1], palette[k : k + 1])
        shown.append(tiles.Tile(_concept_name(channel), f"{channel.share:.0%}", channel.map, picture))
    return shown


def _concept_name(channel: Channel) -> str:
    names = [each.label or f"class {each.class_index}" for each in channel.nearest[:2]]
    return ", ".join(names) or f"concept {channel.index}"


def _titles(request: FeaturesRequest, photo: Observed, shown: int) -> tuple[str, str]:
    """Return the two lines above the picture: the model and layer, and the number and rank of the channels."""
    count, height, width = photo.maps.shape
    words: Mapping[Rank, Callable[[], str]] = {
        "factors": lambda: f"{shown} concept{'s' * (shown > 1)} in {count} channels, {height}×{width}, by share",
        "heads": lambda: f"{shown} of {count} heads, {height}×{width}, and the {HEAD_WORDS}",
        "gradient": lambda: f"{shown} of {count} channels, {height}×{width}, by gradient weight{_explained(photo)}",
    }
    plain = f"{shown} of {count} channels, {height}×{width}, by mean activation"
    return f"{request.model.name} · {photo.layer}", words[request.rank]() if request.rank in words else plain


def _explained(photo: Observed) -> str:
    target = photo.prediction.explained(photo.target, photo.score)
    contrast = photo.prediction.against(photo.target, photo.score)
    names = [each.label or f"class {each.class_index}" for each in (target, contrast) if each]
    return f" for {', not '.join(names)}"
