"""Scales of a detector: the feature maps of several grids that its objects are computed from."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils import _pytree as pytree  # flattens every output structure that torch knows

from camserve_server.models.values import LayerInfo

MAX_SCALES = 8
"""Largest number of scales, as many as a request may name layers. The finest ones beyond it are left out."""


@dataclass(frozen=True, slots=True)
class ObjectGraph:
    """The autograd graph of a detector's objects in one image.

    Attributes:
        scores: the node of the scores.
        layers: the nodes of the outputs of layers that are not part of a head, by the layers' names.
        collectors: the names of the layers that return several tensors.
    """

    scores: Node | None = None
    layers: Mapping[str, Node] = field(default_factory=dict)
    collectors: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, objects: Mapping[str, Tensor], outputs: Mapping[str, Tensor | None], collectors: set[str]
    ) -> "ObjectGraph":
        """Return the graph of one image's objects.

        Boxes and scores have heads of their own, and what both depend on is not part of a head.

        Args:
            objects: the scores and boxes, on the graph.
            outputs: the output of each layer, on the graph, by name.
            collectors: the names of the layers that return several tensors.
        """
        scores, boxes = objects["scores"].grad_fn, objects["boxes"].grad_fn
        shared = ancestors(scores) & ancestors(boxes) if boxes else ancestors(scores)
        nodes = {name: output.grad_fn for name, output in outputs.items() if output is not None}
        before_heads = {name: node for name, node in nodes.items() if node in shared}
        return cls(scores, before_heads, frozenset(collectors))


@contextmanager
def record_collectors(model: nn.Module) -> Iterator[set[str]]:
    """Record the names of the modules that return several tensors inside the block, such as a backbone's maps."""
    collectors: set[str] = set()

    def record(name: str, output: Any) -> None:
        parts = pytree.tree_leaves(output)
        if sum(isinstance(part, Tensor) and part.is_floating_point() for part in parts) > 1:  # a mask is no map
            collectors.add(name)

    with ExitStack() as stack:
        for name, module in model.named_modules():
            hook = module.register_forward_hook(lambda _module, _args, output, name=name: record(name, output))
            stack.enter_context(hook)
        yield collectors


def find_scales(
    graph: ObjectGraph, layers: Mapping[str, LayerInfo], is_trunk: Callable[[LayerInfo], bool]
) -> tuple[str, ...]:
    """Return the layers from which a detector's heads compute its objects, one for each grid, the finest first.

    The graph is followed from the scores back to the first layers that are not part of a head. Earlier layers, such as
    a backbone's, reach the scores only through these.

    Args:
        graph: the autograd graph of the objects; empty for a model that is no detector.
        layers: the description of each layer, by name, in the order in which they finish.
        is_trunk: returns True for a layer that is a feature map of the image.

    Returns:
        The names of the layers; empty if there are fewer than two grids.
    """
    candidates = {
        graph.layers[name]: name
        for name, layer in layers.items()
        if layer.layout
        and layer.layout.cells > 1
        and layer.calls == 1  # a head is called for every scale
        and name in graph.layers
        and name not in graph.collectors
        and is_trunk(layer)
    }
    nearest = {candidates[node] for node in _walk(graph.scores, set(candidates)) if node in candidates}
    by_grid: dict[tuple[int, int], str] = {}
    for name, layer in layers.items():
        if layer.layout and name in nearest:
            # Of several on one grid the first to finish, on which the others may depend. A scale of one cell, which is
            # no grid, is computed from a layer that is computed from the map of the scale before.
            by_grid.setdefault((layer.layout.height, layer.layout.width), name)
    finest_first = sorted(by_grid, key=lambda grid: grid[0] * grid[1], reverse=True)
    return tuple(by_grid[grid] for grid in finest_first[-MAX_SCALES:]) if len(by_grid) > 1 else ()


def ancestors(node: Node | None) -> set[Node]:
    """Return a node of the autograd graph and all nodes that it was computed from."""
    return set(_walk(node, set()))


def _walk(node: Node | None, ends: set[Node]) -> Iterator[Node]:
    """Yield a node and the nodes that it was computed from, but none before one of the ends."""
    visited: set[Node] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        if current is not None and current not in visited:
            visited.add(current)
            yield current
            if current not in ends:
                pending += [parent for parent, _ in current.next_functions]
