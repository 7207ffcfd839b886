"""Values that requests are made of, predictions, and descriptions of a server's models, layers and methods."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from camserve._picture import Box


@dataclass(frozen=True, slots=True)
class Method:
    """A method and its parameters. Omitted parameters have the server's defaults.

    Attributes:
        name: Name of the method.
        parameters: Values of the parameters by name.
        augmentation_smoothing: True to average the maps of six copies of the image: the image itself
            and its mirror image, each at 0.9, 1 and 1.1 times its contrast.
        eigen_smoothing: True to use the first principal component of the weighted feature maps
            instead of their sum. ``MethodInfo.eigen_smoothing`` is true for methods that allow it.
        per_channel: True to get a map of each channel of the model's input, as separate
            explanations, or the indices of some channels. ``MethodInfo.per_channel`` is true for methods that
            allow it: those of the gradient at the input.

    Example:
        >>> method = camserve.Method("smoothgrad", {"samples": 4})
        >>> explanation = client.explain("cat.jpg", methods=[method]).explanations[0]
        >>> explanation.parameters["samples"]
        4.0
    """

    name: str
    parameters: Mapping[str, float | str] = field(default_factory=dict[str, float | str])
    augmentation_smoothing: bool = False
    eigen_smoothing: bool = False
    per_channel: bool | Sequence[int] = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionOptions:
    """The regions of a map to return: its connected parts above a threshold, strongest first.

    Attributes:
        quantile: Threshold as a quantile of the shown values, 0 to 1. Default: 0.8, unless there is
            a ``mass``.
        mass: Threshold as a share of the sum of the shown values, 0 to 1: the strongest pixels that
            together have at least this share.
        max_regions: Maximum number of regions, 1 to 64: those with the largest sums.
        draw: True to draw their outlines on the overlay.
        masks: True to return a mask of each region.

    Example:
        >>> options = camserve.RegionOptions(mass=0.5, max_regions=3)  # the strongest pixels with half of the evidence
        >>> regions = client.explain("cat.jpg", regions=options).explanations[0].regions
        >>> [round(region.share, 1) for region in regions]
        [0.5]
    """

    quantile: float | None = None
    mass: float | None = None
    max_regions: int = 8
    draw: bool = False
    masks: bool = False


RegionsLike: TypeAlias = "bool | float | RegionOptions | None"


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted class or object. It is also a target: pass it as one to explain it.

    Attributes:
        label: Label of the class; "class 7" if the model has no labels.
        probability: Probability, 0 to 1. Depending on the model's task it is the softmax, the sigmoid
            ("multilabel"), the mean softmax over the pixels with this class ("segment"), the score
            of an object ("detect"), or 0 ("regress").
        class_index: Index in the model's output, from 0.
        score: The logit; for a segmentation its mean over the pixels with this class, for an object
            its score.
        box: Box of a detected object in the photo, else None.
        area: For a class of a segmentation, the share of the model's input with this class, 0 to 1.

    Example:
        >>> prediction = client.explain("cat.jpg").predictions[0]
        >>> prediction.label, prediction.class_index, round(prediction.probability, 2), round(prediction.score, 1)
        ('Egyptian cat', 285, 0.38, 8.9)
        >>> client.explain("cat.jpg", targets=prediction).explanations[0].title
        'Egyptian cat'
    """

    label: str
    probability: float
    class_index: int
    score: float
    box: Box | None = None
    area: float = 0.0

    @property
    def name(self) -> str:
        """The label, or "class 7" if there is no label.

        Example:
            >>> camserve.Prediction(label="", probability=0.9, class_index=7, score=2.2).name
            'class 7'
        """
        return self.label or f"class {self.class_index}"


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a request.

    Attributes:
        rows: The number of rows (copies of the image through the model).
        explanations: The number of explanations.
        max_rows: The maximum number of rows of a request.

    Example:
        >>> cost = client.estimate_cost(methods=[("rise", {"samples": 1000})])
        >>> cost.rows, cost.explanations, cost.rows <= cost.max_rows
        (1001, 1, True)
    """

    rows: int
    explanations: int
    max_rows: int


class Health(StrEnum):
    """Health of a server or of one of its services.

    Attributes:
        UNKNOWN: The server does not know it.
        SERVING: It accepts requests.
        NOT_SERVING: It accepts no requests, for example while it starts or stops.
        SERVICE_UNKNOWN: The server has no such service.

    Example:
        >>> client.health() is camserve.Health.SERVING
        True
    """

    UNKNOWN = "UNKNOWN"
    SERVING = "SERVING"
    NOT_SERVING = "NOT_SERVING"
    SERVICE_UNKNOWN = "SERVICE_UNKNOWN"


class ModelState(StrEnum):
    """State of a model.

    Attributes:
        UNSPECIFIED: The server does not report states; the model answers requests.
        LOADING: It is being loaded.
        READY: It answers requests.
        FAILED: It could not be loaded; the server's log has the reason.
        UNLOADING: It answers its last requests.
        UNLOADED: It is not loaded, and ``Client.load_model`` loads it again.

    Example:
        >>> {model.state for model in client.models()}
        {<ModelState.READY: 'READY'>}
    """

    UNSPECIFIED = "UNSPECIFIED"
    LOADING = "LOADING"
    READY = "READY"
    FAILED = "FAILED"
    UNLOADING = "UNLOADING"
    UNLOADED = "UNLOADED"


@dataclass(frozen=True, slots=True)
class Model:
    """Description of one of the server's models.

    If the model is not ready, only its name, source, version and state are known.

    Attributes:
        name: Name of the model in requests.
        source: Origin of the network, such as "timm:resnet50".
        weights: Kind of weights: "default" for those of the source, or those that a function of yours left in its
            network; "file"; or "none" for random weights.
        digest: SHA-256 of the parameters and buffers, in hexadecimal.
        classes: The number of classes.
        input_height: Height of the input in pixels.
        input_width: Width of the input in pixels.
        default_layer: The layer that is explained if a request has no layers, unless there is a pyramid.
        parameters: The number of parameters.
        precision: "float32", "bfloat16" or "float16"; or "float64", if its weights are.
        device: The device that the model runs on, such as "cpu" or "cuda:0".
        task: Kind of output: "classify", "multilabel", "regress", "segment", "detect" or "embed".
        labels: Labels of all classes in the order of the output; empty in a list of models.
        version: The number of times it was loaded since the server started.
        state: State of the model. UNSPECIFIED, from a server that does not report states, means that
            the model answers.
        accepts_texts: True if it compares images with texts: ``texts=`` and ``text(...)`` are for such models.
        pyramid: The layers of a detector's scales, the finest first; empty without several.
        input_channels: The number of channels of the input, 3 for RGB.
        independent_rows: False if the output for an image depends on the other images of its batch, as with
            a batch norm without running statistics. The model then runs one image at a time.

    Example:
        >>> model = client.model("efficientnet_lite0")
        >>> model.task, model.classes, model.default_layer, model.labels[281]
        ('classify', 1000, 'bn2', 'tabby')
    """

    name: str
    source: str
    weights: str
    digest: str
    classes: int
    input_height: int
    input_width: int
    default_layer: str
    parameters: int
    precision: str
    device: str
    task: str = "classify"
    labels: tuple[str, ...] = ()
    version: int = 0
    state: ModelState = ModelState.UNSPECIFIED
    accepts_texts: bool = False
    pyramid: tuple[str, ...] = ()
    input_channels: int = 3
    independent_rows: bool = True


@dataclass(frozen=True, slots=True)
class Layer:
    """Description of one layer (module) of a model.

    Attributes:
        name: Name of the layer in requests.
        type: Class of the module, such as "Conv2d".
        output_shape: Shape of the output for one image, batch dimension first.
        parameters: The number of parameters.
        calls: The number of times that one pass through the model calls it.
        explainable: True if class activation methods can explain it.
        grid: Rows and columns of its grid over the image; None for a layer without a grid.
        reason: The reason why it cannot be explained; empty if it can.
        kinds: Kinds of methods that can explain it, such as "CAM" and "PERTURBATION".

    Example:
        >>> layers = {layer.name: layer for layer in client.layers()}
        >>> layers["bn2"].type, layers["bn2"].output_shape, layers["bn2"].grid
        ('BatchNormAct2d', (1, 1280, 7, 7), (7, 7))
        >>> layers["classifier"].explainable, layers["classifier"].reason
        (False, 'its output has no grid over the image')
    """

    name: str
    type: str
    output_shape: tuple[int, ...]
    parameters: int
    calls: int
    explainable: bool
    grid: tuple[int, int] | None
    reason: str
    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ParameterInfo:
    """Description of a parameter of a method or a metric.

    Attributes:
        name: Name of the parameter in requests.
        summary: Its effect, in a sentence.
        default: The default value; None if the server does not report it.
        minimum: The smallest allowed number.
        maximum: The largest allowed number.
        integer: True if it must be an integer.
        choices: The allowed words; empty if it is a number.

    Example:
        >>> methods = {method.name: method for method in client.methods()}
        >>> samples = methods["smoothgrad"].parameters[0]
        >>> samples.name, samples.default, samples.minimum, samples.maximum
        ('samples', 16.0, 1.0, 512.0)
    """

    name: str
    summary: str
    default: float | str | None
    minimum: float
    maximum: float
    integer: bool
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MethodInfo:
    """Description of one of the server's methods.

    Attributes:
        name: Name of the method in requests.
        kind: Kind of computation, such as "CAM" or "SALIENCY".
        summary: A description in one sentence.
        paper: The paper that defines it.
        parameters: The parameters that a request can set.
        rows: The number of rows (copies of the image through the model) that one target costs with the
            default parameters. If it depends on the layer's channels, it is given for 512 channels.
        layered: True if it uses layers; if False, it ignores the layers of a request.
        eigen_smoothing: True if ``Method.eigen_smoothing`` can be used.
        needs: Requirements on the model, in words; empty if it works with any model.
        formula: The formula in words and symbols.
        per_channel: True if ``Method.per_channel`` can be used.

    Example:
        >>> methods = {method.name: method for method in client.methods()}
        >>> methods["gradcam"].kind, methods["gradcam"].rows, methods["gradcam"].paper
        ('CAM', 1, 'Selvaraju et al. 2017, arXiv:1610.02391')
        >>> methods["chefer"].needs
        'global (not windowed) self-attention'
    """

    name: str
    kind: str
    summary: str
    paper: str
    parameters: tuple[ParameterInfo, ...]
    rows: int
    layered: bool
    eigen_smoothing: bool
    needs: str
    formula: str
    per_channel: bool = False
