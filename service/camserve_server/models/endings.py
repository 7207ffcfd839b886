"""The end of a network: its output are logits, or probabilities that it makes of them itself.

A softmax or sigmoid at the end of a network would be applied a second time, and the probabilities would be wrong. The
probe's run shows it. A softmax leaves values that are not negative and add up to 1. Numbers from 0 to 1 are those of a
sigmoid only if the graph of the run shows one, because logits may be such numbers by chance.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils import _pytree as pytree  # flattens every output structure that torch knows

from camserve_server.models.values import DeclaredTask

Probabilities: TypeAlias = Literal["", "softmax", "sigmoid"]
"""The function that made probabilities of logits; empty for logits."""

ROUNDING = 1e-4
"""Largest difference of the sum of a softmax from 1, and of probabilities that are the same."""

SAME_VALUES = frozenset(
    f"{name}Backward{number}"
    for name in (
        *("Alias", "Clone", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Squeeze", "Transpose", "ToCopy"),
        *("T", "UnsafeView", "Unsqueeze", "View"),
    )
    for number in range(3)
)
"""Nodes of autograd's graph that only rearrange values."""

MIXTURES = frozenset(
    f"{name}Backward{number}"
    for name in ("Add", "Cat", "Div", "Mean", "Mul", "Neg", "Stack", "Sum")
    for number in range(3)
)
"""Nodes that average values, or that turn one value into two: `heads.two_classes`."""

SIGMOIDS = frozenset({"SigmoidBackward0", "HardsigmoidBackward0", "SoftmaxBackward0"})
"""Nodes whose values are from 0 to 1."""

MODULES = nn.Softmax, nn.Softmax2d, nn.Sigmoid
"""Modules whose input are the logits."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a network.

    Attributes:
        probabilities: what made probabilities of its logits; empty if its output are logits.
        module: the name of the module that did; empty if it is no module of its own.
        leaf: the index of the logits among the tensors of its output; None if they are not among them.
        task: the task of a model with such probabilities, if no task is declared; None to find it out.
    """

    probabilities: Probabilities = ""
    module: str = ""
    leaf: int | None = None
    task: DeclaredTask | None = None


def find(
    model: nn.Module,
    output: Any,
    values: Tensor,
    modules: Mapping[str, Tensor | None],
    declared: Probabilities | None = None,
) -> Ending:
    """Find out how a network ends.

    Args:
        model: the network.
        output: its output for an image.
        values: the values [1,C] or [1,C,h,w] of the output that are explained, on the graph.
        modules: the last tensor that each module returned, on the graph, by name, in the order in which they finish.
        declared: what made probabilities, if known.
    """
    kind = declared or _kind(values)
    if not kind:
        return Ending()
    task: DeclaredTask | None = None
    if kind == "sigmoid":
        is_vector = values.dim() == 2  # noqa: PLR2004 -- [1,C]
        task = "multilabel" if is_vector else "binary" if values.shape[1] == 1 else None
    same = [index for index, leaf in enumerate(pytree.tree_leaves(output)) if _are_logits(leaf, values, kind)]
    if same:
        return Ending(kind, leaf=same[0], task=task)
    end = _end(values.grad_fn)
    named = [name for name, tensor in modules.items() if tensor is not None and tensor.grad_fn is end is not None]
    named = [name for name in named if isinstance(model.get_submodule(name), MODULES)]
    return Ending(kind, named[0] if named else "", task=task)


def _kind(values: Tensor) -> Probabilities:
    values_only = values.detach()
    if not bool(((values_only >= 0) & (values_only <= 1 + ROUNDING)).all()) and not _is_halved(values_only):
        return ""
    if values.shape[1] > 1 and bool(((values_only.sum(1) - 1).abs() < ROUNDING).all()):
        return "softmax"
    ends = list(_ends(values.grad_fn))
    return "sigmoid" if ends and all(node.name() in SIGMOIDS for node in ends) else ""


def _is_halved(values: Tensor) -> bool:
    """Return whether two values are −p/2 and p/2 of a number p from 0 to 1: see `heads.two_classes`."""
    if values.shape[1] != 2:  # noqa: PLR2004 -- classes
        return False
    first, second = values[:, 0], values[:, 1]
    return bool(((first == -second) & (second >= 0) & (second <= 0.5)).all())  # noqa: PLR2004 -- half of 1


def _are_logits(leaf: Any, values: Tensor, kind: Probabilities) -> bool:
    """Return whether a tensor holds the logits of probabilities."""
    if not isinstance(leaf, Tensor) or leaf.shape != values.shape or not leaf.is_floating_point():
        return False
    probabilities = leaf.detach().softmax(1) if kind == "softmax" else leaf.detach().sigmoid()
    return bool(torch.allclose(probabilities, values.detach(), rtol=0, atol=ROUNDING))


def _ends(node: Node | None) -> Iterable[Node]:
    """Yield the nodes from which values were only rearranged and mixed."""
    waiting, seen = [node], set[Node]()
    while waiting:
        current = waiting.pop()
        if current is None or current in seen:
            continue
        seen.add(current)
        if current.name() in SAME_VALUES or current.name() in MIXTURES:
            waiting += [parent for parent, _ in current.next_functions]
        else:
            yield current


def _end(node: Node | None) -> Node | None:
    """Return the node from which values were only rearranged."""
    while node is not None and node.name() in SAME_VALUES:
        node = node.next_functions[0][0]
    return node
