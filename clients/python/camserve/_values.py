"""The values that say what to explain, and those that describe what a server can."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Method:
    """A method and its parameters; those left out have the server's defaults.

    >>> Method("smoothgrad", {"samples": 32}).parameters
    {'samples': 32}

    Attributes:
        name: Of the method.
        parameters: By name.
        augmentation_smoothing: Whether to take the mean of the maps of six copies of the image: as
            it is and mirrored, each at 0.9, 1 and 1.1 of its contrast.
        eigen_smoothing: Whether to take the first principal component of the weighted feature maps
            instead of their sum; for the methods whose ``MethodInfo`` says so.
    """

    name: str
    parameters: Mapping[str, float | str] = field(default_factory=dict[str, float | str])
    augmentation_smoothing: bool = False
    eigen_smoothing: bool = False


class Health(StrEnum):
    """Whether a server, or one of its services, takes requests."""

    UNKNOWN = "UNKNOWN"
    SERVING = "SERVING"
    NOT_SERVING = "NOT_SERVING"
    SERVICE_UNKNOWN = "SERVICE_UNKNOWN"


class ModelState(StrEnum):
    """Whether a model answers."""

    UNSPECIFIED = "UNSPECIFIED"
    LOADING = "LOADING"
    READY = "READY"
    FAILED = "FAILED"
    UNLOADING = "UNLOADING"
    UNLOADED = "UNLOADED"


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the server; of one that is not ready only the name, source, version and state are known.

    Attributes:
        name: Its name in requests.
        source: Where it comes from, such as "timm:resnet50".
        weights: Which weights it has: "default", "file", or "none" for random ones.
        digest: SHA-256 over its parameters and buffers, in hexadecimal.
        classes: How many classes it tells apart.
        input_height: Of its input, in pixels.
        input_width: Of its input, in pixels.
        default_layer: The layer explained when a request names none.
        parameters: How many it has.
        precision: "float32", "bfloat16" or "float16".
        device: Where it runs: "cpu", "cuda:0", …
        task: What it answers with: "classify", "multilabel", "regress", "segment", "detect" or "embed".
        labels: Of every class, in the order of the output; empty in a list of models.
        version: How often it was loaded since the server started.
        state: Whether it answers; UNSPECIFIED where the server does not say, as it answers then.
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


@dataclass(frozen=True, slots=True)
class Layer:
    """A module of a model.

    Attributes:
        name: Its name in requests.
        type: Its class, such as "Conv2d".
        output_shape: Of its output for one image, the batch first.
        parameters: How many it has.
        calls: How often one pass through the model calls it.
        explainable: Whether class activation methods can explain it.
        grid: Rows and columns of its grid over the image; None where it has none.
        reason: Why it cannot be explained; empty where it can.
        kinds: Of method that can explain it: "CAM", "PERTURBATION", …
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
    """A parameter of a method.

    Attributes:
        name: Its name in requests.
        summary: What it does, in a sentence.
        default: Its value when left out; None where the server does not say.
        minimum: Smallest number allowed.
        maximum: Largest number allowed.
        integer: Whether it must be a whole number.
        choices: Words allowed; empty where it is a number.
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
    """A method that the server knows.

    Attributes:
        name: Its name in requests.
        kind: What it computes from: "CAM", "SALIENCY", …
        summary: What it does, in a sentence.
        paper: The paper that defines it.
        parameters: What can be set.
        rows: Image copies that one target costs with the default parameters; where that depends on
            the layer's channels, for a layer of 512.
        layered: Whether it looks at layers; if not, the layers of a request do not matter to it.
        eigen_smoothing: Whether it can be smoothed by the first principal component.
        needs: What it needs of a model, in words; empty where it needs nothing.
        formula: In words and symbols.
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
