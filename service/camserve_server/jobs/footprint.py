"""Estimate the memory of a batch from the shapes of a model's layers.

The growth of the process on a CPU for each input, in MiB, measured / estimated:

- efficientnet_lite0: forward 13 to 25 / 23; saliency 78 / 81; Grad-CAM on one early layer 104 / 92, on four layers for
  16 targets 137 / 130; FullGrad 165 / 167; an inspection 153 / 161; ShapleyCAM on the first layer 186 / 239.
- resnet50: forward 8 / 15; Grad-CAM on the first layer 93 / 112.

In a pass that silences channels of a layer, an input is one edit of the layer's output. The modules before the layer
run for one image at a time, and those after it for all its edits.

A GPU uses other kernels and precisions. There, one pass of each kind is measured when the model is loaded. The estimate
of every other pass of that kind, at other layers, is scaled by that measurement.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate

from camserve_server.models.values import Kind, ModelInfo, Pass

FLOAT = 4  # bytes
LIVE_OUTPUTS = 5  # outputs of the largest layer that a forward pass holds, with the gaps of the allocator
KEPT = 0.85  # share of the outputs of all layers that is kept for a backward pass
KEPT_BY_KIND: Mapping[Kind, float] = {"bias": 1.75, "inspect": 1.75}  # the same for passes that look at every layer
LAYER_COPIES = 8  # copies of the outputs of a pass's layers: feature maps, gradients, and intermediates of methods
KEPT_FOR_CURVATURE = 2.5  # like KEPT, for a pass that differentiates twice

AT_LAYERS: frozenset[Kind] = frozenset({"cam", "curvature", "features"})
"""Kinds of pass that use the layers of the request, or the default layer."""

WITHOUT_GRAPH: frozenset[Kind] = frozenset({"score", "text", "classifier"})
"""Kinds of pass without gradients. A text takes less than an image in all known models, and so does a vector."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """The bytes that one input of a model takes in a batch.

    Attributes:
        forward: bytes of a forward pass that keeps nothing.
        layers: bytes of the outputs of all innermost modules.
        after: bytes of the outputs of the innermost modules after a layer, by the layer's name.
        outputs: bytes of a layer's own output, by its name.
        rows_after: `ModelInfo.rows_after`.
        scales: measured bytes as a share of the estimate, by kind of pass; empty on a CPU.
    """

    forward: int
    layers: int
    after: dict[str, int]
    outputs: dict[str, int]
    rows_after: dict[str, int]
    scales: Mapping[Kind, float] = field(default_factory=dict)

    @classmethod
    def of(cls, model: ModelInfo, measured: Mapping[Kind, int] | None = None) -> "Footprint":
        """Return the footprint of a model, from the shapes that its layers had when it was loaded.

        Args:
            model: the model.
            measured: measured bytes of one input in the typical pass of each kind; empty or None on a CPU.
        """
        outputs = {name: FLOAT * math.prod(layer.shape) for name, layer in model.layers.items()}
        inner = [FLOAT * size for size in model.inner_sizes()]
        sums = list(accumulate(reversed(inner), initial=0))
        after = dict(zip(reversed(outputs), sums, strict=False))
        plain = cls(LIVE_OUTPUTS * max(inner, default=0), sums[-1], after, outputs, model.rows_after())
        estimates = {kind: plain.input_bytes(typical(model, kind)) for kind in measured or ()}
        scales = {kind: size / estimates[kind] for kind, size in (measured or {}).items() if estimates[kind]}
        return replace(plain, scales=scales)

    def edits_per_image(self, pass_: Pass) -> int:
        """Return how many inputs of a pass take the memory of one image: more than 1 if they are edits of a layer."""
        return self.rows_after.get(pass_.layers[0], 1) if pass_.kind == "score" and pass_.layers else 1

    def input_bytes(self, pass_: Pass) -> int:
        """Return the bytes of one input in a batch of a pass; a kind without a measurement gets the largest scale."""
        estimate = self._estimate(pass_)
        return math.ceil(estimate * self.scales.get(pass_.kind, max(self.scales.values()))) if self.scales else estimate

    def _estimate(self, pass_: Pass) -> int:
        if pass_.kind in WITHOUT_GRAPH:
            return math.ceil(self.forward / self.edits_per_image(pass_))
        # An inspection takes the same for one layer and for all: its graph is whole. A pass over heads keeps no graph,
        # but computes attention step by step, with matrices that no module returns.
        if not pass_.layers or pass_.kind in ("inspect", "heads"):
            return max(self.forward, round(self.layers * KEPT_BY_KIND.get(pass_.kind, KEPT)))
        after = max(self.after.get(name, 0) for name in pass_.layers)
        kept = after * (KEPT_FOR_CURVATURE if pass_.kind == "curvature" else KEPT)
        return max(self.forward, round(kept)) + LAYER_COPIES * sum(self.outputs.get(name, 0) for name in pass_.layers)


def typical(model: ModelInfo, kind: Kind, name: str = "") -> Pass:
    """Return the pass by which a kind is measured: at the default layer, if the kind uses layers.

    Args:
        model: the model that runs it.
        kind: kind of the pass.
        name: the name of the model in rows; empty for the model's own.
    """
    layers = model.default_layers if kind in AT_LAYERS else ()
    return Pass(name or model.name, kind, model.preprocess.size, layers)
