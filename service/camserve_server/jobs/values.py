"""Jobs, their raw maps and their explanations: plain values."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from camserve_server.core.arrays import Map
from camserve_server.engine.values import Row, RowResult
from camserve_server.imaging.values import Picture, Region
from camserve_server.jobs.cost import (
    channels_of,
    is_plain_gradient,
    rows_of,
    rows_shared,
    runs_unchanged,
    wants_features,
)
from camserve_server.jobs.verdict import Verdict
from camserve_server.methods import METHODS
from camserve_server.methods.values import Fusion, MethodCall
from camserve_server.models.values import Intervention, ModelInfo, Pass
from camserve_server.targets import kind_of
from camserve_server.targets.values import FixedTarget, Target

Collect: TypeAlias = Callable[[int, RowResult], None]
"""Takes the index of a row and its result."""


class Submit(Protocol):
    """Runs rows in batches with those of other requests; passes each result to `collect` when it is available."""

    def __call__(self, pass_: Pass, rows: Sequence[Row], collect: Collect) -> Awaitable[None]:
        """Return when every result is collected."""


@dataclass(frozen=True)
class Job:
    """Explanations to compute: every method, on every layer, for every target.

    What follows from these values is computed once: requests with the same options share a job.

    Attributes:
        model: the model to explain.
        calls: the methods, with their parameters.
        layers: the layers, for methods that use layers.
        targets: the targets to explain.
        fusion: the way to fuse the maps of several layers into one; None for one map of each layer.
        class_map: True to return the predicted class of each cell of a segmentation, too.
        pyramid: True if the layers are the model's pyramid.
        interventions: changes to what layers return in every row, except for those of `unchanged_model`.
        unchanged_model: True to return the outputs of the model without interventions, too.
    """

    model: ModelInfo
    calls: tuple[MethodCall, ...]
    layers: tuple[str, ...]
    targets: tuple[Target, ...]
    fusion: Fusion | None = None
    class_map: bool = False
    pyramid: bool = False
    interventions: tuple[Intervention, ...] = ()
    unchanged_model: bool = False

    def alone(self, call: MethodCall) -> "Job":
        """Return the job of one of its methods."""
        return replace(self, calls=(call,), class_map=False, unchanged_model=False)

    @cached_property
    def features(self) -> bool:
        """True if a method needs the layers' feature maps for the unchanged image."""
        return any(wants_features(call) for call in self.calls)

    @cached_property
    def clean(self) -> tuple[MethodCall, ...]:
        """The methods that one pass over the unchanged image answers: all plain CAMs, or else one plain gradient."""
        cams = tuple(call for call in self.calls if runs_unchanged(call))
        plain = tuple(call for call in self.calls if is_plain_gradient(call))
        return cams if cams or self.features else plain[:1]

    @cached_property
    def shared(self) -> tuple[tuple[MethodCall, ...], ...]:
        """The methods of `clean`, divided among the rows of a target: one row, or several if many methods are heavy."""
        return rows_shared(self.clean, len(self.layers))

    @cached_property
    def explanations(self) -> int:
        """The number of maps that the job returns."""
        return len(self.targets) * sum(map(self._maps_per_target, self.calls))

    def _maps_per_target(self, call: MethodCall) -> int:
        if not METHODS[call.name].layered:
            return len(call.input_channels) or 1
        return 1 if self.fusion else len(self.layers)

    @cached_property
    def rows(self) -> int:
        """The number of rows that the job runs."""
        channels, clean = channels_of(self.model, self.layers), self.clean
        others = (call for call in self.calls if call not in clean)
        per_target = len(self.shared) + sum(rows_of(call, channels, self.model.preprocess.size) for call in others)
        # The other image of a similarity target runs too.
        compared = sum(kind_of(target).compared(target) is not None for target in self.targets)
        more = self.class_map + self.unchanged_model + len(self.texts)
        return len(self.targets) * per_target + compared + more

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """The texts whose embeddings the job needs."""
        return texts_of(self.model, self.targets)


def texts_of(model: ModelInfo, targets: Sequence[Target]) -> tuple[str, ...]:
    """Return the texts whose embeddings are needed: the model's classes, and those of targets, each once."""
    named = (unread.text for target in targets if (unread := kind_of(target).text(target)))
    return tuple(dict.fromkeys((*model.texts, *named)))


@dataclass(frozen=True, slots=True)
class Explanation:
    """A raw map, the target it explains, and the pictures drawn from it.

    Attributes:
        call: the method.
        layer: name of the layer, the joined names of several, or PYRAMID; empty for methods of the input.
        target: the explained target, for example a class or a contrast of two classes.
        score: score of the target for the unchanged image, for example a logit or a difference of logits.
        heatmap: the raw map, float32 [h,w], signed, on the layer's grid.
        verdict: the verdict on the map.
        error: the difference between the sum of the map and the sum that the method promises, as a share of the latter;
            None if the method promises no sum.
        fusion: the way in which the maps of several layers were fused; None for the map of one layer.
        overlay: the map on the photo, once drawn; None if not requested.
        heatmap_image: the map alone, likewise.
        intensity: the values that are coloured, float32 [height,width] of the model's input, likewise.
        scale: raw value with the strongest colour, once drawn; 0 if no value is shown.
        regions: the regions of the map, likewise.
        input_channel: the channel of the model's input that the map is of; None for a map of all channels.
    """

    call: MethodCall
    layer: str
    target: FixedTarget
    score: float
    heatmap: Map
    verdict: Verdict
    error: float | None = None
    fusion: Fusion | None = None
    overlay: Picture | None = None
    heatmap_image: Picture | None = None
    intensity: Map | None = None
    scale: float = 0.0
    regions: tuple[Region, ...] = ()
    input_channel: int | None = None


@dataclass(frozen=True, slots=True)
class JobResult:
    """The result of a job.

    Attributes:
        logits: outputs of the model for the unchanged image, as in `RowResult.logits`.
        explanations: the explanations, in the order of the job.
        class_map: the predicted class of each cell of a segmentation, uint16 [h,w], if the job asks for it.
        unchanged_logits: outputs of the model without interventions, if the job asks for them.
    """

    logits: Map
    explanations: tuple[Explanation, ...]
    class_map: NDArray[np.uint16] | None = None
    unchanged_logits: Map | None = None


@dataclass(frozen=True, slots=True)
class RawMap:
    """A map without a verdict.

    Attributes:
        heatmap: the map, float32 [h,w].
        zero_gradient: True if the gradient that it was made from is zero everywhere.
        error: see `Explanation`.
    """

    heatmap: Map
    zero_gradient: bool = False
    error: float | None = None


@dataclass(frozen=True, slots=True)
class LayerMaps:
    """The maps of one method on one layer, or of one channel of the model's input.

    Attributes:
        layer: name of the layer; empty for methods of the input.
        maps: one map for each target.
        fusion: the way in which the maps of several layers were fused; None for the maps of one layer.
        input_channel: the channel; None for maps of all channels.
    """

    layer: str
    maps: list[RawMap]
    fusion: Fusion | None = None
    input_channel: int | None = None
