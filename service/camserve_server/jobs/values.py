"""A request as the engine sees it, and what comes of it."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from camserve_server.core.arrays import Map
from camserve_server.engine.values import Row, RowResult
from camserve_server.imaging.values import Picture
from camserve_server.jobs.cost import (
    channels_of,
    is_clean,
    is_plain_gradient,
    rows_of,
    rows_shared,
    wants_features,
)
from camserve_server.jobs.verdict import Verdict
from camserve_server.methods import METHODS
from camserve_server.methods.values import Fusion, MethodCall
from camserve_server.models.values import ModelInfo, Pass
from camserve_server.targets import kind_of
from camserve_server.targets.values import FixedTarget, Target

Collect: TypeAlias = Callable[[int, RowResult], None]


class Submit(Protocol):
    """Runs rows in batches with others' and hands over each result, by the row's index, as it is there."""

    def __call__(self, pass_: Pass, rows: Sequence[Row], collect: Collect) -> Awaitable[None]:
        """Return when every result was collected."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to explain: every method, on every layer, for every target.

    Attributes:
        model: that is explained.
        calls: the methods, with their parameters.
        layers: for the methods that look at layers.
        targets: what is explained.
        fusion: how the maps of several layers become one; None for one map each.
    """

    model: ModelInfo
    calls: tuple[MethodCall, ...]
    layers: tuple[str, ...]
    targets: tuple[Target, ...]
    fusion: Fusion | None = None

    @property
    def features(self) -> bool:
        """Whether a method starts from the layers' feature maps."""
        return any(wants_features(call) for call in self.calls)

    @property
    def clean(self) -> tuple[MethodCall, ...]:
        """The methods that one pass over the image as it is can answer: all plain CAMs, or else one plain gradient."""
        cams = tuple(call for call in self.calls if is_clean(call))
        plain = tuple(call for call in self.calls if is_plain_gradient(call))
        return cams if cams or self.features else plain[:1]

    @property
    def shared(self) -> tuple[tuple[MethodCall, ...], ...]:
        """The same methods, divided among the rows that run for each target: one row, or several for heavy methods."""
        return rows_shared(self.clean, len(self.layers))

    @property
    def explanations(self) -> int:
        """How many maps come of it."""
        layered = sum(METHODS[call.name].layered for call in self.calls)
        return len(self.targets) * (layered * (1 if self.fusion else len(self.layers)) + len(self.calls) - layered)

    @property
    def rows(self) -> int:
        """How many rows it costs."""
        channels, clean = channels_of(self.model, self.layers), self.clean
        others = (call for call in self.calls if call not in clean)
        each = len(self.shared) + sum(rows_of(call, channels, self.model.preprocess.size) for call in others)
        # The other image of a likeness is run too.
        compared = sum(kind_of(target).compared(target) is not None for target in self.targets)
        return len(self.targets) * each + compared


@dataclass(frozen=True, slots=True)
class Explanation:
    """One raw map, what it explains, and the pictures that are drawn of it.

    Attributes:
        call: the method.
        layer: its name, or those of several joined; empty for methods that look at the input.
        target: the class, or contrast, explained.
        score: its logit, or difference of logits, for the image as it is.
        heatmap: float32 [h,w], signed, on the layer's grid.
        verdict: whether it can be read as an explanation.
        error: by how much the map fails to add up to what it must, as a share of that; None where nothing is promised.
        fusion: how the maps of several layers became one; None where there is one layer.
        overlay: the map on the photo, once it is drawn; None where it is not asked for.
        heatmap_image: the map alone, likewise.
        intensity: what is coloured, float32 [height,width] of the model's input, likewise.
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a job: what the model says of the image, as `RowResult.logits`; the maps, as they were asked for."""

    logits: Map
    explanations: tuple[Explanation, ...]


@dataclass(frozen=True, slots=True)
class RawMap:
    """One map, before it is judged.

    Attributes:
        heatmap: float32 [h,w].
        zero_gradient: whether the gradient that it was made from is zero everywhere.
        error: as in `Explanation`.
    """

    heatmap: Map
    zero_gradient: bool = False
    error: float | None = None


@dataclass(frozen=True, slots=True)
class LayerMaps:
    """One method's maps on one layer: one for each target.

    Attributes:
        layer: its name; empty for methods that look at the input.
        maps: of each target.
        fusion: how the maps of several layers became these; None where they are one layer's.
    """

    layer: str
    maps: list[RawMap]
    fusion: Fusion | None = None
