"""How much memory a batch takes on a CPU, estimated from the shapes of a model's layers.

Measured against what the process grows by for each input, in MiB, measured / estimated: efficientnet_lite0 forward
13 to 25 / 23, saliency 78 / 81, Grad-CAM on one early layer 104 / 92, on four for 16 targets 137 / 130, FullGrad
165 / 167, ShapleyCAM on the first layer 186 / 239; resnet50 forward 8 / 15, Grad-CAM on its first layer 93 / 112.
"""

import math
from dataclasses import dataclass
from itertools import accumulate

from camserve_server.types import ModelInfo, Pass

FLOAT = 4  # bytes
AT_ONCE = 5  # outputs of the largest layer that a forward pass holds, with what the allocator keeps between them
KEPT = 0.85  # of what all layers give, so much is kept for a backward pass
BIASES = 1.75  # of the same, in a pass that has the gradient at every bias too
HELD = 8  # copies of what the layers of a pass give: the maps and their gradients, and what methods make of both
TWICE = 2.5  # of the same, to differentiate twice


@dataclass(frozen=True, slots=True)
class Footprint:
    """The bytes that one input of a model takes in a batch.

    Attributes:
        forward: a forward pass that keeps nothing.
        layers: what all innermost modules give.
        behind: what those after a layer give, by the layer's name.
        outputs: a layer's own output, by its name.
    """

    forward: int
    layers: int
    behind: dict[str, int]
    outputs: dict[str, int]

    @classmethod
    def of(cls, model: ModelInfo) -> "Footprint":
        """Estimate it from the shapes that the model's layers had when it was loaded."""
        outputs = {name: FLOAT * math.prod(layer.shape) for name, layer in model.layers.items()}
        outer = {name.rpartition(".")[0] for name in outputs}
        inner = [0 if name in outer else size for name, size in outputs.items()]
        sums = list(accumulate(reversed(inner), initial=0))
        behind = dict(zip(reversed(outputs), sums, strict=False))
        return cls(AT_ONCE * max(inner, default=0), sums[-1], behind, outputs)

    def input_bytes(self, pass_: Pass) -> int:
        """Return what one input takes in a batch of a pass."""
        if pass_.kind == "score":
            return self.forward
        if not pass_.layers or pass_.kind == "inspect":  # which keeps nothing of what it measures
            return max(self.forward, round(self.layers * (BIASES if pass_.kind == "bias" else KEPT)))
        behind = max(self.behind.get(name, 0) for name in pass_.layers)
        kept = behind * (TWICE if pass_.kind == "curvature" else KEPT)
        return max(self.forward, round(kept)) + HELD * sum(self.outputs.get(name, 0) for name in pass_.layers)
