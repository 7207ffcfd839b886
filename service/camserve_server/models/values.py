"""Descriptions of models, layers and passes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
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
    "last",
    "bias",
    "inspect",
    "features",
    "text",
    "heads",
    "classifier",
]
"""The computation of a pass.

score: logits only. cam: a layer's feature maps and gradients. curvature: second derivatives too. saliency: the gradient
at the input. guided, deconvnet: the same with another backward rule for each ReLU. attention: the attention of every
block, and its gradients. each: the same, with gradients of each block's own score. last: the queries, keys and values
of the last attention, and the gradient at its output. bias: the gradients at the input and
at every bias. inspect: statistics of every layer. features: a layer's feature maps and Grad-CAM's weights for them.
text: the embeddings of texts, without images. heads: the attention of each head of one layer. classifier: the outputs
of the last linear layer for vectors, without images.
"""

Change: TypeAlias = Literal["silence", "scale", "clamp", "replace_mean", "clip_gradient"]
"""The change that an intervention makes.

silence: channels become 0. scale: they are multiplied by a factor. clamp: they are limited to a range. replace_mean:
each becomes its mean over the grid. clip_gradient: the gradient at the layer's output is limited to a range.
"""

Task: TypeAlias = Literal["classify", "multilabel", "regress", "segment", "detect", "embed"]
"""The output of a model: logits of exclusive classes, logits of independent classes, numbers, logits of classes for
every pixel, boxes, or an embedding."""

DeclaredTask: TypeAlias = Task | Literal["binary"]
"""A task as a user declares it. A binary model has one logit for two classes; two logits are made of it."""


Activation: TypeAlias = Literal["none", "softmax", "sigmoid"]
"""The function that a network applies to its own logits, so that its output are probabilities."""


PYRAMID = "pyramid"
"""Name, in requests and results, of all layers of a model's pyramid together."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The position of the image grid in a layer's output.

    Attributes:
        axes: "nchw" [B,C,h,w], "nhwc" [B,h,w,C] or "tokens" [B,prefix+h*w,C].
        height: rows of the grid.
        width: columns of the grid.
        prefix: the number of class and register tokens before the grid.
        suffix: the number of tokens after the grid, such as the detection tokens of YOLOS.
    """

    axes: Literal["nchw", "nhwc", "tokens"]
    height: int
    width: int
    prefix: int = 0
    suffix: int = 0

    @property
    def cells(self) -> int:
        """The number of cells of the grid."""
        return self.height * self.width

    @property
    def tokens(self) -> int:
        """The number of tokens, including those before and after the grid; 0 for layouts without tokens."""
        return self.prefix + self.cells + self.suffix if self.axes == "tokens" else 0

    def scaled(self, size: tuple[int, int], to: tuple[int, int]) -> "Layout":
        """Return the layout for inputs of another height and width, to within a row and a column.

        Args:
            size: height and width of the present input.
            to: height and width of the other input.
        """
        rows, columns = (
            max(1, round(cells * there / here))
            for cells, here, there in zip((self.height, self.width), size, to, strict=True)
        )
        return replace(self, height=rows, width=columns)


def channel_axis(dimensions: int, layout: Layout | None) -> int | None:
    """Return the axis of the channels in a tensor of a layer; None if no axis is known.

    Without a grid, the axis is that of torch's own modules: after the batch in a linear layer's [B,C] and a
    convolution's [B,C,h,w], and last in a transformer's [B,N,C].

    Args:
        dimensions: the number of the tensor's dimensions.
        layout: the layout of the layer's output; None without a grid.
    """
    if layout is not None and layout.axes == "nhwc" and dimensions == 4:  # noqa: PLR2004 -- [B,h,w,C]
        return 3
    return {2: 1, 3: 2, 4: 1}.get(dimensions)


@dataclass(frozen=True, slots=True)
class LayerInfo:
    """The description of a module, from one forward and one backward pass.

    Attributes:
        name: its name in `named_modules`.
        type: the name of its class.
        shape: the shape of its output for one image, with the batch first.
        parameters: the number of its parameters.
        calls: the number of its calls in a forward pass; the last call is captured.
        layout: the position of its grid; None if it cannot be explained.
        reason: the reason why it cannot be explained; empty if it can.
        unread: the position of its grid, if the score does not depend on it.
        differentiable: False if only methods without gradients can explain it, because no gradient flows back to it.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    parameters: int
    calls: int
    layout: Layout | None
    reason: str = ""
    unread: Layout | None = None
    differentiable: bool = True

    @property
    def grid(self) -> Layout | None:
        """The position of its grid, also of one that cannot be explained; None without one."""
        return self.layout or self.unread

    @property
    def channel_axis(self) -> int | None:
        """The axis of the channels in its output; None if no axis is known."""
        return channel_axis(len(self.shape), self.grid)

    def scaled(self, size: tuple[int, int], to: tuple[int, int]) -> "LayerInfo":
        """Return the description for inputs of another height and width; see `Layout.scaled`."""
        if self.grid is None:
            return self
        layout = self.grid.scaled(size, to)
        grid, batch, channels = (layout.height, layout.width), self.shape[:1], self.shape[-1:]
        by_axes = {
            "nchw": (*self.shape[:2], *grid),
            "nhwc": (*batch, *grid, *channels),
            "tokens": (*batch, layout.tokens, *channels),
        }
        shape = by_axes[layout.axes]
        return replace(self, shape=shape, layout=layout) if self.layout else replace(self, shape=shape, unread=layout)


@dataclass(frozen=True, slots=True)
class TextHead:
    """The score that a model gives an image and a text: the cosine of their embeddings, times `scale`, plus `bias`.

    Attributes:
        scale: factor of the cosine.
        bias: number that is added.
        exclusive: True if the texts of a request exclude each other (softmax), False if each has a probability of its
            own (sigmoid).
        length: the number of values of an embedding.
    """

    scale: float
    bias: float
    exclusive: bool
    length: int


@dataclass(frozen=True)  # without slots, which leave no room for a property that is kept
class ModelInfo:
    """The description of a loaded model, without the model itself.

    Attributes:
        name: its name in requests.
        source: its origin, such as "timm:resnet50".
        weights: "default", "file" or "none".
        digest: SHA-256 of its parameters and buffers, in hexadecimal.
        labels: one label per class; empty if unknown.
        classes: the number of its logits, or the length of its embedding.
        parameters: the number of its parameters.
        preprocess: the preprocessing of its input.
        layers: every module that runs, by name, in the order in which they finish.
        default_layer: the layer that is explained when a request names none, unless the model has a pyramid. Empty if
            no layer can be explained.
        precision: "float32", "bfloat16" or "float16"; "float64" for a network of which the weights are.
        device: "cpu", "cuda:0", ….
        task: the task, which says what its output is.
        embedding: the linear layer whose input is the image's embedding; empty without such a layer, or if the
            output itself is the embedding.
        version: the number of times that a model of that name was loaded, including this time; 0 outside a server.
        channels_last: True if its input has that memory layout, False if it is contiguous.
        text: the score of an image and a text; None if the model takes no texts. The labels of such a model are the
            texts of its entry, and it is one of embeddings until `with_texts` gives it classes.
        pyramid: the layers of a detector's scales, one for each grid, the finest first; empty without several.
        object_classes: the number of classes in which a detector scores each object; 0 if it scores only one.
        independent_rows: False if the output for an image depends on the others of its batch, so that the model runs
            one image at a time.
        differentiable: True if the score has a gradient at the image.
        is_opaque: True if a part of it is a TorchScript program, whose own modules and functions cannot be observed.
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
    text: TextHead | None = None
    pyramid: tuple[str, ...] = ()
    object_classes: int = 0
    independent_rows: bool = True
    differentiable: bool = True
    is_opaque: bool = False

    def __hash__(self) -> int:
        """Return a hash of the fields that tell models apart; the layers' mapping has none."""
        return hash((self.name, self.version, self.digest))

    @property
    def channels(self) -> int:
        """The number of channels of its input."""
        return self.preprocess.channels

    @property
    def key(self) -> str:
        """The identifier of the model in rows, different for each version."""
        return f"{self.name}@{self.version}" if self.version else self.name

    @cached_property  # folding 1,000 texts takes some milliseconds, and a request may name 144 of them
    def classes_by_label(self) -> Mapping[str, Sequence[int]]:
        """The classes of each label, by `fold_label`."""
        classes: dict[str, list[int]] = {}
        for index, label in enumerate(self.labels):
            classes.setdefault(fold_label(label), []).append(index)
        return classes

    @property
    def default_layers(self) -> tuple[str, ...]:
        """The default layer, or none if no layer can be explained."""
        return (self.default_layer,) if self.default_layer else ()

    @property
    def usual_pass(self) -> Kind:
        """The pass that most requests need: at the default layer, if there is one."""
        return "cam" if self.default_layer else "score"

    def has_gradient(self, layers: Iterable[str]) -> bool:
        """Return whether the score has a gradient at some of these layers."""
        return any(self.layers[name].differentiable for name in layers)

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts that are the classes of this model; none if it has other classes, or an embedding."""
        return self.labels if self.text is not None and self.task != "embed" else ()

    def with_texts(self, texts: tuple[str, ...]) -> "ModelInfo":
        """Return a model of embeddings as a classifier whose classes are texts; without texts, the model itself."""
        if self.text is None or not texts:
            return self
        task: Task = "classify" if self.text.exclusive else "multilabel"
        return replace(self, labels=texts, classes=len(texts), task=task, embedding="")

    def label(self, index: int) -> str:
        """Return the label of a class; empty if the model has no labels."""
        return self.labels[index] if index < len(self.labels) else ""

    def at_size(self, size: tuple[int, int]) -> "ModelInfo":
        """Return the description for inputs of this height and width, for models whose input's size varies."""
        return self if size == self.preprocess.size else _at_size(self, size)

    def inner_sizes(self) -> list[int]:
        """Return the number of values that each layer returns, in order; 0 for layers that contain others."""
        outer = {name.rpartition(".")[0] for name in self.layers}
        return [0 if name in outer else math.prod(layer.shape) for name, layer in self.layers.items()]

    def rows_after(self) -> dict[str, int]:
        """Return, by layer, how many copies of its output can continue in the memory of one image.

        It is the largest output of the whole model as a multiple of the largest one from the layer on.
        """
        inner = self.inner_sizes()
        largest_after = reversed(list(accumulate(reversed(inner), max)))
        largest, by_layer = max(inner, default=0), zip(self.layers.items(), largest_after, strict=True)
        return {name: max(1, largest // max(1, math.prod(layer.shape), after)) for (name, layer), after in by_layer}


def fold_label(label: str) -> str:
    """Return a label as labels are compared: without regard to case, outer spaces, and underscores for spaces."""
    return label.replace("_", " ").strip().casefold()


@lru_cache(32)
def _at_size(info: ModelInfo, size: tuple[int, int]) -> ModelInfo:
    nominal = info.preprocess.size
    layers = {name: layer.scaled(nominal, size) for name, layer in info.layers.items()}
    return replace(info, preprocess=replace(info.preprocess, size=size), layers=layers)


@dataclass(frozen=True, slots=True)
class UnavailableModel:
    """A model in the configuration that does not serve requests.

    Attributes:
        name: its name in requests.
        source: its origin, such as "timm:resnet50".
        state: the reason why it is unavailable.
        version: the number of times that it was loaded so far.
    """

    name: str
    source: str
    state: Literal["loading", "failed", "unloading", "unloaded"]
    version: int = 0


KnownModel: TypeAlias = ModelInfo | UnavailableModel


@dataclass(frozen=True, slots=True)
class Randomised:
    """The part of a model that has random weights while a batch runs.

    Attributes:
        modules: the number of modules with random weights, counted from the output, of those with parameters.
        seed: the seed of the weights.
    """

    modules: int
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Intervention:
    """A change to what a layer returns or receives, or to the gradient at its output, in every call of the layer.

    Attributes:
        layer: the name of the layer.
        change: the change.
        channels: the channels that change; empty for all.
        input: True to change the layer's input instead of its output.
        factor: the factor of "scale".
        minimum: the least value of "clamp" and "clip_gradient".
        maximum: the largest value of these.
    """

    layer: str
    change: Change
    channels: tuple[int, ...] = ()
    input: bool = False
    factor: float = 1.0
    minimum: float = -math.inf
    maximum: float = math.inf


@dataclass(frozen=True, slots=True)
class Pass:
    """The properties that the rows of a batch share. Method and target may differ.

    Attributes:
        model: the key of the model.
        kind: the computation.
        size: height and width of the input.
        layers: the names of the layers whose feature maps and gradients are captured.
        randomised: the part of the model that has random weights; None for no part.
        interventions: changes to what layers return, in the order in which they apply.
    """

    model: str
    kind: Kind
    size: tuple[int, int]
    layers: tuple[str, ...] = ()
    randomised: Randomised | None = None
    interventions: tuple[Intervention, ...] = ()
