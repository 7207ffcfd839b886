"""Validated requests: the plain values that the use cases take, whatever protocol they came by."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from camserve_server.imaging.values import Rendering
from camserve_server.jobs import Assessment, Job
from camserve_server.models.values import ModelInfo
from camserve_server.targets.values import Target

Rank: TypeAlias = Literal["activation", "gradient"]
"""What the channels of a layer are ranked by."""


@dataclass(frozen=True, slots=True)
class ExplainRequest:
    """A request to explain an image.

    Attributes:
        job: what to explain.
        image: the photo's file.
        rendering: which pictures and numbers to return.
        predictions: how many of the model's predictions to return.
    """

    job: Job
    image: bytes
    rendering: Rendering
    predictions: int


@dataclass(frozen=True, slots=True)
class EvaluateRequest:
    """A request to explain an image and to evaluate every map.

    Attributes:
        explain: the explanations.
        assessment: the job of `explain`, with the metrics.
    """

    explain: ExplainRequest
    assessment: Assessment


@dataclass(frozen=True, slots=True)
class InspectRequest:
    """A request for statistics of layers.

    Attributes:
        model: whose layers.
        target: whose score is differentiated.
        layers: their names; empty for all layers.
        image: the photo's file.
    """

    model: ModelInfo
    target: Target
    layers: tuple[str, ...]
    image: bytes

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the layers to inspect."""
        return self.layers or tuple(self.model.layers)


@dataclass(frozen=True, slots=True)
class FeaturesRequest:
    """A request for the highest-ranked channels of a layer.

    Attributes:
        model: whose layer.
        target: whose score the gradient weights are for.
        layer: its name.
        image: the photo's file.
        rank: what the channels are ranked by.
        top: how many channels to return.
        raw: whether to return their maps.
        picture: encoding of the picture of their maps, or None for no picture.
        colormap: of that picture.
    """

    model: ModelInfo
    target: Target
    layer: str
    image: bytes
    rank: Rank
    top: int
    raw: bool
    picture: Literal["jpeg", "png", "webp"] | None
    colormap: str


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A request to load a model, or to load it again.

    Attributes:
        name: of a model in the configuration.
        weights: path of a file of weights inside the model folder; empty for the weights in the configuration.
        sha256: the digest that the file must have, in lower-case hexadecimal, or empty.
    """

    name: str
    weights: str = ""
    sha256: str = ""
