"""Values that describe a model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from camserve_server.imaging.values import Preprocess

Kind: TypeAlias = Literal[
    "score",
    "cam",
    "curvature",
    "saliency",
    "guided",
    "deconvnet",
    "attention",
    "each",
    "bias",
    "inspect",
    "features",
]
"""What a pass computes.

score: logits only. cam: a layer's feature maps and gradients. curvature: their second derivatives too. saliency: the
gradient at the input. guided, deconvnet: the same by another rule for each ReLU. attention: that of every block, and
its gradients. each: the same, of each block's own score. bias: the gradients at the input and at every bias. inspect:
statistics of every layer. features: a layer's feature maps and the weights that Grad-CAM gives them.
"""

Task: TypeAlias = Literal["classify", "multilabel", "regress", "segment", "detect", "embed"]
"""What a model answers with: logits of classes that exclude each other, or that do not; numbers; logits of classes for
every pixel; boxes; or an embedding."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the image's grid is in a layer's output.

    Attributes:
        axes: "nchw" [B,C,h,w], "nhwc" [B,h,w,C] or "tokens" [B,prefix+h*w,C].
        height: rows of the grid.
        width: columns of the grid.
        prefix: class and register tokens before the grid's first.
    """

    axes: Literal["nchw", "nhwc", "tokens"]
    height: int
    width: int
    prefix: int = 0


@dataclass(frozen=True, slots=True)
class LayerInfo:
    """A module of a model, as one forward and one backward pass showed it.

    Attributes:
        name: as `named_modules` gives it.
        type: its class's name.
        shape: of its output for one image, the first being the batch.
        parameters: how many it has.
        calls: how often one forward pass calls it; the last call is what is captured.
        layout: where its grid is; None if it cannot be explained.
        reason: why it cannot be explained; empty if it can.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    parameters: int
    calls: int
    layout: Layout | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """All that is known of a loaded model, without the model.

    Attributes:
        name: in requests.
        source: where it comes from, as "timm:resnet50".
        weights: "default", "file" or "none".
        digest: SHA-256 of its parameters and buffers, hexadecimal.
        labels: one per class, or none at all.
        classes: how many logits it has; how long its embedding is.
        parameters: how many it has.
        preprocess: how it wants its input.
        layers: every module that runs, by name, in the order in which they finish.
        default_layer: explained when a request names none.
        precision: "float32", "bfloat16" or "float16".
        device: "cpu", "cuda:0", ….
        task: what it answers with.
        embedding: the linear layer whose input is the image's embedding; empty where there is none, and where the
            embedding is what it answers with.
        version: how often a model of that name was loaded, this time included; 0 outside of a server.
        channels_last: whether its input has that memory layout, or is contiguous.
    """

    name: str
    source: str
    weights: str
    digest: str
    labels: tuple[str, ...]
    classes: int
    parameters: int
    preprocess: Preprocess
    layers: Mapping[str, LayerInfo]
    default_layer: str
    precision: str
    device: str
    task: Task = "classify"
    embedding: str = ""
    version: int = 0
    channels_last: bool = True

    @property
    def key(self) -> str:
        """By which rows mean it: versions of one model are apart."""
        return f"{self.name}@{self.version}" if self.version else self.name

    def label(self, index: int) -> str:
        """Return the label of a class, or nothing where the model has none."""
        return self.labels[index] if index < len(self.labels) else ""


@dataclass(frozen=True, slots=True)
class UnavailableModel:
    """A model that the configuration names and that does not answer.

    Attributes:
        name: in requests.
        source: where it comes from, as "timm:resnet50".
        state: why it does not answer.
        version: how often it was loaded so far.
    """

    name: str
    source: str
    state: Literal["loading", "failed", "unloading", "unloaded"]
    version: int = 0


KnownModel: TypeAlias = ModelInfo | UnavailableModel


@dataclass(frozen=True, slots=True)
class Randomised:
    """What of a model has random weights while a batch runs.

    Attributes:
        modules: how many of those that have parameters, counted from the output.
        seed: of the weights.
    """

    modules: int
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Pass:
    """What rows must have in common to share a batch: never the method, never the target.

    Attributes:
        model: its key.
        kind: what is computed.
        size: height and width of the input.
        layers: whose feature maps and gradients are captured.
        randomised: what of the model has random weights; None for nothing.
    """

    model: str
    kind: Kind
    size: tuple[int, int]
    layers: tuple[str, ...] = ()
    randomised: Randomised | None = None
