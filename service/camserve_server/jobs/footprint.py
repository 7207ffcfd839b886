"""How much memory a batch takes, estimated from the shapes of a model's layers.

Compared on a CPU with what the process grows by for each input, in MiB, measured / estimated: efficientnet_lite0
forward 13 to 25 / 23, saliency 78 / 81, Grad-CAM on one early layer 104 / 92, on four for 16 targets 137 / 130,
FullGrad 165 / 167, ShapleyCAM on the first layer 186 / 239; resnet50 forward 8 / 15, Grad-CAM on its first layer
93 / 112.

A GPU has other kernels and other precisions. There one pass of each kind is measured when the model is loaded, and the
estimate of every other pass of that kind, at other layers, is scaled by what came out.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate

from camserve_server.models.values import Kind, ModelInfo, Pass

FLOAT = 4  # bytes
AT_ONCE = 5  # outputs of the largest layer that a forward pass holds, with what the allocator keeps between them
KEPT = 0.85  # of what all layers give, so much is kept for a backward pass
BIASES = 1.75  # of the same, in a pass that has the gradient at every bias too
HELD = 8  # copies of what the layers of a pass give: the maps and their gradients, and what methods make of both
TWICE = 2.5  # of the same, to differentiate twice

AT_LAYERS: frozenset[Kind] = frozenset({"cam", "curvature", "features"})
"""Kinds of pass that look at layers which the request names, or at the default one."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """The bytes that one input of a model takes in a batch.

    Attributes:
        forward: a forward pass that keeps nothing.
        layers: what all innermost modules give.
        behind: what those after a layer give, by the layer's name.
        outputs: a layer's own output, by its name.
        scales: what an input was measured to take, as a share of the estimate, by kind; none on a CPU.
    """

    forward: int
    layers: int
    behind: dict[str, int]
    outputs: dict[str, int]
    scales: Mapping[Kind, float] = field(default_factory=dict)

    @classmethod
    def of(cls, model: ModelInfo, measured: Mapping[Kind, int] | None = None) -> "Footprint":
        """Estimate it from the shapes that the model's layers had when it was loaded.

        Args:
            model: whose it is.
            measured: bytes that one input took in the typical pass of a kind; none on a CPU.
        """
        outputs = {name: FLOAT * math.prod(layer.shape) for name, layer in model.layers.items()}
        outer = {name.rpartition(".")[0] for name in outputs}
        inner = [0 if name in outer else size for name, size in outputs.items()]
        sums = list(accumulate(reversed(inner), initial=0))
        behind = dict(zip(reversed(outputs), sums, strict=False))
        plain = cls(AT_ONCE * max(inner, default=0), sums[-1], behind, outputs)
        guesses = {kind: plain.input_bytes(typical(model, kind)) for kind in measured or ()}
        scales = {kind: size / guesses[kind] for kind, size in (measured or {}).items() if guesses[kind]}
        return replace(plain, scales=scales)

    def input_bytes(self, pass_: Pass) -> int:
        """Return what one input takes in a batch of a pass; a kind that was not measured is like the worst that was."""
        guess = self._estimated(pass_)
        return math.ceil(guess * self.scales.get(pass_.kind, max(self.scales.values()))) if self.scales else guess

    def _estimated(self, pass_: Pass) -> int:
        if pass_.kind == "score":
            return self.forward
        if not pass_.layers or pass_.kind == "inspect":  # which keeps nothing of what it measures
            return max(self.forward, round(self.layers * (BIASES if pass_.kind == "bias" else KEPT)))
        behind = max(self.behind.get(name, 0) for name in pass_.layers)
        kept = behind * (TWICE if pass_.kind == "curvature" else KEPT)
        return max(self.forward, round(kept)) + HELD * sum(self.outputs.get(name, 0) for name in pass_.layers)


def typical(model: ModelInfo, kind: Kind, name: str = "") -> Pass:
    """Return the pass that stands for a kind: at the default layer, if the kind looks at layers.

    Args:
        model: that runs it.
        kind: of the pass.
        name: by which rows mean the model, if not its own.
    """
    layers = (model.default_layer,) if kind in AT_LAYERS else ()
    return Pass(name or model.name, kind, model.preprocess.size, layers)
