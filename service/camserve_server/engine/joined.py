"""Differentiate the scores of many targets of an image together, if only a small head follows the layer.

A backward pass through such a head for one image multiplies vectors by matrices, which takes as long as reading the
weights. Eight passes together take about as long as three. torch's `vmap` runs them over the graph of one forward pass.

Measured, Grad-CAM of 10 targets of mobilenet_v3_large as a multiple of one target, one thread: 1.34, and 1.60 with one
pass after the other. docs/decisions/041-many-targets-and-edits.md has the rest.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from camserve_server.core.devices import device_for
from camserve_server.engine.batch import BackwardPass, UniqueInputs, score_pass
from camserve_server.engine.values import Row
from camserve_server.models.hooks import Capture
from camserve_server.models.outputs import Outputs

AT_ONCE = 8
"""Backward passes that run together, for one image. Sixteen save little more time, and take twice the memory."""

MIN_TARGETS = 5
"""Passes of requests with fewer targets run one by one: two targets would take longer together."""

MAX_BYTES = 512 * 2**10  # 512 KiB
"""Size of the largest output of a layer for one image whose gradients are computed together.

With larger ones a backward pass takes longer than reading the weights, and AT_ONCE of them much memory.
"""

HEAD = frozenset(
    {
        "torch::autograd::AccumulateGrad",
        "AdaptiveAvgPool2DBackward0",
        "AddBackward0",
        "AddmmBackward0",
        "CloneBackward0",
        "DivBackward0",
        "GeluBackward0",
        "HardswishBackward0",
        "MeanBackward1",
        "MulBackward0",
        "NativeLayerNormBackward0",
        "PermuteBackward0",
        "ReluBackward0",
        "SelectBackward0",
        "SiluBackward0",
        "SliceBackward0",
        "SqueezeBackward1",
        "SumBackward1",
        "TBackward0",
        "TanhBackward0",
        "ToCopyBackward0",
        "TransposeBackward0",
        "UnsafeViewBackward0",
        "UnsqueezeBackward0",
        "ViewBackward0",
    }
)
"""Nodes of autograd's graph that a head may have: `vmap` computes these as such, and others one target at a time."""

MODULE_HOOK = "BackwardHookFunctionBackward"
"""Node of a module with a backward hook: one for its input and one for its output. One such module is the probe."""


def can_join(outputs: Outputs, unique: UniqueInputs, rows: Sequence[Row], capture: Capture) -> bool:
    """Return whether the backward passes of a batch run together: many for each of few images, through a small head.

    The number of targets is that of the whole request, so that a map does not depend on the rows that share its batch.
    """
    images, targets = len(unique.rows), max(len(unique.backward_rows), *(row.targets for row in rows))
    is_small = capture.activation.nbytes <= MAX_BYTES * images
    # A source that is not a leaf may be used elsewhere: its gradient is not only that of the layer's output.
    is_only_source = capture.source.is_leaf
    return targets >= MIN_TARGETS and 2 * images <= AT_ONCE and is_small and is_only_source and _is_head(outputs.values)


def _is_head(values: Tensor) -> bool:
    """Return whether autograd's graph has only nodes in HEAD, besides the probe of the layer."""
    seen, waiting = set[torch.autograd.graph.Node](), [values.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [above for above, _ in node.next_functions]
    names = Counter(node.name() for node in seen)
    return names.pop(MODULE_HOOK, 0) == 2 and HEAD.issuperset(names)  # noqa: PLR2004 -- the probe's


def run_joined_passes(
    outputs: Outputs, unique: UniqueInputs, rows: Sequence[Row], capture: Capture
) -> Iterator[tuple[BackwardPass, Tensor]]:
    """Differentiate every row's score, and yield several backward passes as one, with the gradient [b,...] of each row.

    Args:
        outputs: the outputs of the model.
        unique: the inputs of the batch.
        rows: the rows of the batch.
        capture: the capture of the layer, which `can_join` accepts.
    """
    device, images = device_for(outputs.values.device), len(unique.rows)
    for start in range(0, len(unique.backward_rows), AT_ONCE // images):
        passes = unique.backward_rows[start : start + AT_ONCE // images]
        backward, scores = score_pass(outputs, unique, rows, list(itertools.chain.from_iterable(passes)))
        numbers = [number for number, indices in enumerate(passes) for _ in indices]
        # Always the same number of passes: with another one, matrix products may round in another way.
        weights = torch.zeros(AT_ONCE // images, len(numbers), dtype=torch.float32)
        weights[numbers, range(len(numbers))] = 1
        gradients = _gradients(scores, capture.source, device.copied(weights))
        capture.gradient = None  # of the probe's hook; it cannot be used outside of `vmap`
        yield backward, gradients[device.tensor(numbers), device.tensor(backward.inputs)]


def _gradients(scores: Tensor, source: Tensor, weights: Tensor) -> Tensor:
    """Return the gradient [n,B,...] at a source of each sum of scores [b] with weights [n,b]."""

    def gradient(weight: Tensor) -> Tensor:
        (result,) = torch.autograd.grad(scores, source, weight, retain_graph=True)
        return result

    return torch.func.vmap(gradient)(weights)
