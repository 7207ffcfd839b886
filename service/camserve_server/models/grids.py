"""Find the grid over the image in the output of each layer."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from camserve_server.models import grid
from camserve_server.models.layout_probe import Reading
from camserve_server.models.values import Layout

NO_TENSOR = "it returns no tensor of numbers"
NO_GRID = "its output has no grid over the image"
NO_BATCH_AXIS = "its output has no grid over the image: its first axis is not the batch, but windows, heads or a table"
OTHER_ORDER = "its output has no grid over the image: its values are not in the order of the image's rows and columns"
UNKNOWN_GRID = "its output has no grid over the image that is certain: neither its shape nor a trial run shows one"
QUERIES = "its output has no grid over the image: it has one token per object, not per place"

GridOrReason: TypeAlias = Layout | str
"""The layout of a layer's grid, or the reason why it has no grid."""


@dataclass(frozen=True, slots=True)
class LayerObservation:
    """The result of one run of a layer on the images of the layout probe.

    Attributes:
        shape: the shape of its output; None if it returned no tensor.
        readings: the possible layouts of the output, and how well each fits.
        has_batch_axis: True if the first axis is the batch.
    """

    shape: tuple[int, ...] | None
    readings: tuple[Reading, ...] = ()
    has_batch_axis: bool = True


def find_grids(
    observations: Mapping[str, LayerObservation], size: tuple[int, int], queries: int = 0
) -> dict[str, GridOrReason]:
    """Find each layer's grid: from the probe, else from other layers of the same shape, else from its own shape.

    Args:
        observations: the observation of each layer, by name.
        size: height and width of the image.
        queries: the number of tokens that ask for one object each. They may follow the grid, or be alone.
    """
    certain = {
        name: observation.readings[-1].layout
        for name, observation in observations.items()
        if observation.readings and observation.readings[-1].is_right
    }
    common = _common_layouts((layout for layout in certain.values() if layout.axes == "tokens"), size)
    certain = {name: common.get(layout.tokens, layout) for name, layout in certain.items()}
    context = _ModelContext(
        size=size,
        queries=queries,
        layouts={(observations[name].shape or ())[1:]: layout for name, layout in certain.items()},
        prefixes={layout.prefix for layout in certain.values() if layout.axes == "tokens"},
        token_counts={layout.prefix + layout.height * layout.width + layout.suffix for layout in certain.values()}
        | {seen.shape[1] for seen in observations.values() if seen.shape and len(seen.shape) == 3},  # noqa: PLR2004 -- [B,N,C]
    )
    return {name: certain.get(name) or _infer_grid(observation, context) for name, observation in observations.items()}


def with_single_cells(
    grids: Mapping[str, GridOrReason], observations: Mapping[str, LayerObservation]
) -> dict[str, GridOrReason]:
    """Return the grids, and a grid of one cell for each layer [B,C,1,1] after the last larger grid.

    Such are the last layers of a network for small images, and pooled features. Their maps have one value, and a
    verdict that says so. Before the last larger grid they are factors of channels, as in squeeze-and-excitation.
    """
    names = list(grids)
    last = max((index for index, name in enumerate(names) if isinstance(grids[name], Layout)), default=len(names))
    cells = {
        name: Layout("nchw", 1, 1)
        for name in names[last + 1 :]
        if observations[name].has_batch_axis and (observations[name].shape or ())[2:] == (1, 1)
    }
    return {**grids, **cells}


def _common_layouts(layouts: Iterable[Layout], size: tuple[int, int]) -> dict[int, Layout]:
    """Return the layout of all layers with the same number of tokens, by that number.

    A part of a grid fits nearly as well as the whole: 16 tokens and one prefix token can be read as the last three rows
    of four, after five prefix tokens. This happens by chance in single layers, not in most of them. It is likelier the
    fewer places a grid has, so each layer's vote is weighted by the number of its places. Of the layouts with at least
    a quarter of the votes, those closest to the proportions of the image are kept, because patches are cut from the
    image in the same way in both directions.
    """
    votes: dict[int, Counter[Layout]] = {}
    for layout in layouts:
        votes.setdefault(layout.tokens, Counter())[layout] += layout.height * layout.width
    return {tokens: _choose_layout(counter, size) for tokens, counter in votes.items()}


def _choose_layout(votes: Counter[Layout], size: tuple[int, int]) -> Layout:
    frequent = [layout for layout, count in votes.items() if count * 4 >= votes.total()] or list(votes)
    least = min(grid.distortion(layout, size) for layout in frequent)
    return max((layout for layout in frequent if grid.distortion(layout, size) == least), key=votes.__getitem__)


@dataclass(frozen=True, slots=True)
class _ModelContext:
    """Facts about a model from the layers whose grids the probe shows.

    Attributes:
        size: height and width of the image.
        queries: the number of tokens that ask for one object each; 0 without such tokens.
        layouts: the layouts by output shape, without the batch.
        prefixes: the numbers of prefix tokens.
        token_counts: the numbers of tokens.
    """

    size: tuple[int, int]
    queries: int
    layouts: Mapping[tuple[int, ...], Layout]
    prefixes: Collection[int]
    token_counts: Collection[int]


def _infer_grid(observation: LayerObservation, context: _ModelContext) -> GridOrReason:
    """Find the grid of a layer for which the probe has no certain reading."""
    if observation.shape is None:
        return NO_TENSOR
    if not observation.has_batch_axis or not observation.shape:
        return NO_BATCH_AXIS if len(observation.shape) > 2 else NO_GRID  # noqa: PLR2004 -- [B,C] is no window
    possible = grid.candidates(observation.shape, context.size, context.queries)
    if not possible:
        return NO_GRID
    if context.queries and observation.shape[1] == context.queries:
        return QUERIES
    wrong = [reading.layout for reading in observation.readings if reading.is_wrong]
    if any(layout.axes == "tokens" for layout in wrong):  # tokens have the same order in every rectangle
        return OTHER_ORDER
    remaining = [
        layout for layout in possible if layout not in wrong and not _is_matrix(layout, observation.shape, context)
    ]
    return (_infer_from_shape(observation, remaining, context) or UNKNOWN_GRID) if remaining else OTHER_ORDER


def _infer_from_shape(observation: LayerObservation, possible: list[Layout], context: _ModelContext) -> Layout | None:
    """Return the layout of layers with the same shape, else the only possible one.

    A number of tokens fits several grids, each with another number of prefix tokens.
    """
    same_shape = context.layouts.get((observation.shape or ())[1:])
    if same_shape in possible:
        return same_shape
    if possible[0].axes == "tokens":
        blind = bool(observation.readings) and all(reading.is_blind for reading in observation.readings)
        possible = [layout for layout in possible if blind and layout.prefix in context.prefixes]
    return possible[0] if len(possible) == 1 else None


def _is_matrix(layout: Layout, shape: tuple[int, ...], context: _ModelContext) -> bool:
    """Return whether a grid is more likely attention: a row and a column per token, and fewer heads than tokens."""
    side = layout.height
    return side == layout.width and side in context.token_counts and math.prod(shape[1:]) < side**3
