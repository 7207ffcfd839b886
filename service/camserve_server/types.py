"""The values that pass between the rooms of the server: frozen, picklable, shapes in the docstrings."""

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Pixels: TypeAlias = NDArray[np.uint8]
"""RGB, uint8 [height, width, 3]."""

Map: TypeAlias = NDArray[np.float32]
"""A raw map, float32 [h, w]: signed, not normalised, on the layer's own grid."""

Input: TypeAlias = NDArray[np.uint8] | NDArray[np.float32]
"""What a model sees of an image: uint8 [h,w,3], to be normalised, or float32 [h,w,3], which is already normalised."""

Mask: TypeAlias = NDArray[np.bool_]
"""A part of an image, bool [h,w]."""

Precision: TypeAlias = Literal["float32", "bfloat16", "float16"]
"""Names of torch's dtypes that a model may compute in."""

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

ParameterValue: TypeAlias = float | str

Half: TypeAlias = Literal[0, 1]
"""Which of two batches that an engine runs at once: each has half of a CPU's cores, or one of two streams of a GPU."""

Task: TypeAlias = Literal["classify", "multilabel", "regress", "segment", "detect", "embed"]
"""What a model answers with: logits of classes that exclude each other, or that do not; numbers; logits of classes for
every pixel; boxes; or an embedding."""

Fusion: TypeAlias = Literal["mean", "max", "product"]
"""How the maps of several layers become one."""


class Verdict(Enum):
    """Whether a map can be read as an explanation."""

    OK = "the map has positive evidence"
    ALL_NEGATIVE = "no value of the map is above zero: nothing here speaks for the target"
    FLAT = "the map has the same value everywhere"
    ZERO_GRADIENT = "the gradient is zero everywhere: the score does not depend on this layer"
    NON_FINITE = "the map holds NaN or infinity"


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle in a photo's pixels, edges from its upper left corner; it may reach beyond the photo."""

    left: float
    top: float
    right: float
    bottom: float


@dataclass(frozen=True, slots=True)
class Preprocess:
    """How a model wants its input: resize, centre crop, normalise.

    Attributes:
        size: height and width of the input, in pixels.
        resize: the photo's shorter side before the crop; or an exact (height, width).
        interpolation: "nearest", or antialiased "bilinear" or "bicubic".
        mean: subtracted per channel from RGB values 0 to 1.
        std: divides each channel after that.
        floors: whether a crop that cannot be quite in the middle always begins half a pixel early, as transformers has
            it; else half a pixel is rounded to even, as torchvision has it.
        prepare: makes the input in place of all that, for a model of this process; see `Prepare`.
    """

    size: tuple[int, int]
    resize: int | tuple[int, int]
    interpolation: Literal["nearest", "bilinear", "bicubic"]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    floors: bool = False
    prepare: "Prepare | None" = None


Prepare: TypeAlias = Callable[[Pixels, bytes], tuple[Input, Box]]
"""Makes a model's input of a decoded photo and its file; returns the part of the photo that it shows, too."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may ask for; more is refused before it costs anything. SECURITY.md has them as a table.

    Attributes:
        pixels: of a photo.
        side: longer side of a photo, in pixels.
        rows: that it may cost.
        chunk: rows of it that may be under way at once: what it takes up of the queue, and how soon it stops when it is
            cancelled.
        explanations: maps.
        drawn_pixels: of all its pictures together.
        methods: named.
        metrics: named.
        parameters: of one method or metric.
        targets: named.
        against: classes that one target is told from.
        layers: named, to be explained.
        inspected: layers named, to be measured.
        predictions: told.
        channels: told of a layer.
        raw_bytes: of a layer's raw maps; what is larger belongs in smaller pieces than one message.
        text: characters of a name, a label or any other text.
        images: of one ModelInfer.
        tensors: of one ModelInfer, that go in or come out.
        axes: of a tensor's shape.
        asked: parameters of one ModelInfer.
    """

    pixels: int = 16_777_216
    side: int = 16_384
    rows: int = 16_384
    chunk: int = 64
    explanations: int = 64
    drawn_pixels: int = 200_000_000
    methods: int = 16
    metrics: int = 16
    parameters: int = 16
    targets: int = 16
    against: int = 8
    layers: int = 8
    inspected: int = 4096
    predictions: int = 1000
    channels: int = 256
    raw_bytes: int = 32 * 2**20
    text: int = 1000
    images: int = 8
    tensors: int = 16
    axes: int = 8
    asked: int = 32


@dataclass(frozen=True, slots=True)
class ClassTarget:
    """The logit of one class."""

    index: int


@dataclass(frozen=True, slots=True)
class RankTarget:
    """The logit of the class that the model itself ranks at this place, 0 being the most probable."""

    rank: int


@dataclass(frozen=True, slots=True)
class ContrastTarget:
    """The logit of one class minus that of another: why this and not that."""

    why: int
    why_not: int


@dataclass(frozen=True, slots=True)
class ProbabilityTarget:
    """The probability of one class.

    Attributes:
        index: of the class.
        apart: whether each class has a probability of its own (sigmoid), rather than one together (softmax).
    """

    index: int
    apart: bool = False


@dataclass(frozen=True, slots=True)
class FinerTarget:
    """The logit of one class minus those of classes that resemble it, weighted by their probabilities.

    Attributes:
        why: the class.
        against: the others; none before they are known: those whose logits are nearest.
        weight: how much the others count, 0 to 1.
    """

    why: int
    against: tuple[int, ...] = ()
    weight: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class SimilarityTarget:
    """The cosine of the angle between the image's embedding and another image's.

    Attributes:
        file: of the other image, until it is decoded.
        image: the other image as the model sees it, until it has been run; None for the row's own.
        reference: its embedding, float32 [E], then.
    """

    file: bytes = field(default=b"", repr=False)
    image: Input | None = field(default=None, repr=False)
    reference: NDArray[np.float32] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class SegmentTarget:
    """The mean logit of a class over a part of the image.

    Attributes:
        index: of the class.
        box: the part, in the photo's pixels until the photo is decoded, and in the input's then; None for where the
            model sees the class.
        mask: the part, bool [h,w] over the model's output, once it is known.
    """

    index: int
    box: Box | None = None
    mask: Mask | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class DetectionTarget:
    """The score of the object of one class that best matches a box.

    Attributes:
        index: of the class.
        box: in the photo's pixels until the photo is decoded, and in the input's then; None for that of the class's
            most certain object.
        found: whether the box is that of an object that was found in the image as it is.
    """

    index: int
    box: Box | None = None
    found: bool = False


FixedTarget: TypeAlias = (
    ClassTarget | ContrastTarget | ProbabilityTarget | FinerTarget | SimilarityTarget | SegmentTarget | DetectionTarget
)
"""A target that does not depend on what the model predicts; or one that did, once that is known."""

Target: TypeAlias = FixedTarget | RankTarget


@dataclass(frozen=True, slots=True)
class MethodCall:
    """A method and its parameters, defaults filled in.

    Attributes:
        name: of the method.
        parameters: by name.
        augmented: whether the map is the mean over mirrored and brightened copies of the image.
        eigen: whether the map is the first principal component of the channels' terms, rather than their sum.
    """

    name: str
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    augmented: bool = False
    eigen: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        """What makes two calls the same."""
        return self.name, self.augmented, self.eigen, *sorted(self.parameters.items())


@dataclass(frozen=True, slots=True)
class View:
    """A copy of the normalised input [3,H,W]: mirrored, its contrast changed, a window of an enlarged one.

    Attributes:
        mirrored: left to right.
        gain: that the values are multiplied by.
        scale: that the sides are enlarged by, bilinearly, before a window of the input's size is cut out.
        top: first row of the window, in pixels of the enlarged image.
        left: its first column.
        noise: standard deviation of what is added, in the input's normalised units.
        seed: of that noise.
    """

    mirrored: bool = False
    gain: float = 1.0
    scale: float = 1.0
    top: int = 0
    left: int = 0
    noise: float = 0.0
    seed: int = 0

    def enlarged(self, height: int, width: int) -> tuple[int, int]:
        """Return the size of an image, enlarged."""
        return round(height * self.scale), round(width * self.scale)


@dataclass(frozen=True, slots=True, eq=False)
class Edit:
    """A change to the normalised input [3,H,W], or to a layer's output: keep · x + (1 − keep) · fill.

    Attributes:
        keep: share of each pixel that stays, float32 [H,W]; None for all.
        fill: what takes its place, float32 [3,H,W]; None for zeros, which is the mean colour.
        silenced: channel of the pass's layer that is set to zero; None for none.
    """

    keep: NDArray[np.float32] | None = None
    fill: NDArray[np.float32] | None = None
    silenced: int | None = None


Profile: TypeAlias = Literal["paper", "grad-cam", "torchcam", "captum"]
"""By whose convention raw numbers become the intensities that are coloured."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """Which pictures and numbers to make, and how they look.

    Attributes:
        overlay: encoding of the overlay, or None for no overlay.
        heatmap_image: encoding of the heatmap alone, or None.
        heatmap: whether the raw map goes out.
        colormap: name of the colour map.
        alpha: opacity of the heatmap, 0 to 1.
        max_side: longer side of the pictures at most, in pixels; None for the photo's own.
        quality: of JPEG and WebP, 1 to 100.
        profile: by whose convention raw numbers become intensities.
        intensity: whether those intensities go out.
    """

    overlay: Literal["jpeg", "png", "webp"] | None = None
    heatmap_image: Literal["jpeg", "png", "webp"] | None = None
    heatmap: bool = False
    colormap: str = "jet"
    alpha: float = 0.5
    max_side: int | None = None
    quality: int = 90
    profile: Profile = "paper"
    intensity: bool = False

    @property
    def pictures(self) -> int:
        """How many pictures of each explanation are asked for."""
        return (self.overlay is not None) + (self.heatmap_image is not None)

    @property
    def whole(self) -> bool:
        """Whether the intensities are wanted on the pixels of the model's input."""
        return self.intensity or self.profile != "paper"


@dataclass(frozen=True, slots=True)
class Picture:
    """An encoded picture.

    Attributes:
        format: "jpeg", "png" or "webp".
        data: the file.
        width: in pixels.
        height: in pixels.
    """

    format: Literal["jpeg", "png", "webp"]
    data: bytes
    width: int
    height: int


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
class Absent:
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


KnownModel: TypeAlias = ModelInfo | Absent


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


@dataclass(frozen=True, slots=True)
class Row:
    """The unit of batching: one copy of an image with one target.

    The model's input is the image, normalised; then its views; then the method's copy of that; then edited.

    Attributes:
        image: what the model sees; rows of one request share the array.
        target: whose score is differentiated.
        calls: the methods that want this row: any number that take the image as it is, or one that makes copies.
        copy: which of the method's copies of the image this is; None for the image as it is.
        views: of the image, the second of the first and so on.
        edit: of the input; rows of one edit share it.
        features: whether the layers' feature maps are wanted, for "cam".
    """

    image: Input
    target: Target
    calls: tuple[MethodCall, ...] = ()
    copy: int | None = None
    views: tuple[View, ...] = ()
    edit: Edit | None = None
    features: bool = False

    @property
    def input(self) -> Hashable:
        """What the model's input is made of: rows that have it in common share one, and a forward pass of it."""
        copy = None if self.copy is None else (*(call.key for call in self.calls), self.copy)
        return id(self.image), self.views, copy, id(self.edit)


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a tensor's values are like; all but `zeros` and `non_finite` are of those that are finite, NaN if none is.

    Attributes:
        mean: of the values.
        std: standard deviation, dividing by their number.
        minimum: the least.
        maximum: the greatest.
        zeros: share of all values that are exactly zero, 0 to 1.
        norm: square root of the sum of squares.
        non_finite: how many are NaN or infinite.
    """

    mean: float
    std: float
    minimum: float
    maximum: float
    zeros: float
    norm: float
    non_finite: int


@dataclass(frozen=True, slots=True)
class Reading:
    """What a layer gave for one image in the last of its calls.

    Attributes:
        shape: of its output, the first being the batch of one.
        activation: what its output is like.
        gradient: what the score's gradient is like there.
    """

    shape: tuple[int, ...]
    activation: Statistics
    gradient: Statistics

    @property
    def elements(self) -> int:
        """How many values the output has."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class RowResult:
    """What came of one row.

    Attributes:
        logits: what the model says of the row's input: float32 [classes]; of a segmentation [classes, 3], the share of
            the image that each class covers, its mean probability there and its mean logit; of a detector [n, 6],
            class, score, left, top, right and bottom in the input's pixels of each object, class -1 being none; of a
            model without a head the embedding.
        target: the row's, fixed by what the model says.
        score: what was differentiated: the logit, or whatever else the target is.
        maps: by layer, then by call: float32 [h,w] each; of a method that makes copies what it adds to its mean, of any
            shape. What looks at no layer has one layer's place. For "features", one array: each channel's weight [C].
        zero_gradient: by layer, whether the gradient was zero everywhere.
        features: by layer, float32 [C,h,w], where the row asks for them.
        readings: by layer, for "inspect"; None of one that returned no tensor of numbers.
    """

    logits: NDArray[np.float32]
    target: FixedTarget
    score: float
    maps: tuple[tuple[NDArray[np.float32], ...], ...] = ()
    zero_gradient: tuple[bool, ...] = ()
    features: tuple[NDArray[np.float32], ...] = ()
    readings: tuple[Reading | None, ...] = ()
