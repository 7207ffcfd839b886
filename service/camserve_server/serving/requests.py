"""Validated requests of the use cases: plain values, the same for every protocol."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from camserve_server.imaging.values import Rendering
from camserve_server.jobs import EvaluationJob, Job
from camserve_server.methods.components import Basis
from camserve_server.models.values import Intervention, ModelInfo
from camserve_server.targets.values import Target

Rank: TypeAlias = Literal["activation", "gradient", "pca", "factors", "heads"]
"""Value that ranks the channels of a layer: mean activation, or size of the mean gradient. Or what is returned instead
of channels: principal components, factors, or attention heads."""


@dataclass(frozen=True, slots=True)
class ExplainRequest:
    """A request to explain an image.

    Attributes:
        job: what to explain.
        rendering: the pictures and numbers to return.
        predictions: the number of the model's predictions to return.
        image: the encoded photo.
    """

    job: Job
    rendering: Rendering
    predictions: int
    image: bytes


@dataclass(frozen=True, slots=True)
class EvaluateRequest:
    """A request to explain an image and to evaluate every map.

    Attributes:
        explain: the explanations.
        assessment: the job of `explain`, with the metrics.
    """

    explain: ExplainRequest
    assessment: EvaluationJob


@dataclass(frozen=True, slots=True)
class InspectRequest:
    """A request for statistics of layers.

    Attributes:
        model: the model to inspect.
        target: the target whose score is differentiated.
        layers: names of the layers; empty for all layers.
        image: the encoded photo.
        interventions: changes to what layers return.
    """

    model: ModelInfo
    target: Target
    layers: tuple[str, ...]
    image: bytes
    interventions: tuple[Intervention, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the layers to inspect."""
        return self.layers or tuple(self.model.layers)


@dataclass(frozen=True, slots=True)
class FeaturesRequest:
    """A request for the highest-ranked channels of a layer.

    Attributes:
        model: the model to inspect.
        target: the target whose score gives the gradient weights.
        layer: name of the layer; empty for the last attention, if the heads of an attention are requested.
        image: the encoded photo.
        rank: the value to rank the channels by.
        top: the number of channels to return.
        raw: True to return their maps.
        picture: encoding of the picture of their maps, or None for no picture.
        colormap: name of that picture's colour map.
        interventions: changes to what layers return.
        fit_images: further photos, encoded, whose cells principal components are computed from.
        basis: principal components to project on; None to compute them.
        foreground: True to compute principal components of the foreground.
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
    interventions: tuple[Intervention, ...] = ()
    fit_images: tuple[bytes, ...] = ()
    basis: Basis | None = None
    foreground: bool = False


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A request to load or reload a model.

    Attributes:
        name: name of a model in the configuration.
        weights: path of a weights file inside the model folder; empty for the weights in the configuration.
        sha256: required SHA-256 digest of that file, in lower-case hexadecimal; empty for any.
    """

    name: str
    weights: str = ""
    sha256: str = ""
