"""Descriptions of a server's models and their layers, and its health."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
