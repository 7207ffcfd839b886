"""The kinds of metric, named by what they need to judge a map: a metric is a frozen value made of pure functions.

A function's docstring is its metric's documentation: the first line says what it measures, the rest gives the formula.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from camserve_server.core.arrays import Map
from camserve_server.imaging.values import Box, View
from camserve_server.methods.kinds import Parameter, Parameters
from camserve_server.methods.values import Edit

Array: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class MetricInput:
    """The input of a metric: one map, and what the metric needs to evaluate it.

    Attributes:
        image: the model's input, normalised, float32 [3,H,W].
        heatmap: raw, on its own grid, float32 [h,w].
        pixels: the same on the input's pixels, bilinearly, float32 [H,W].
        intensity: the same cut at zero and divided by the maximum, 0 to 1, on the input's pixels, float32 [H,W].
        probability: that the model gives the target for the image as it is.
        seen: the part of the photo that the map covers, in the photo's pixels.
        box: where the object is, in the photo's pixels; None where nobody says.
    """

    image: Array
    heatmap: Map
    pixels: Map
    intensity: Map
    probability: float
    seen: Box
    box: Box | None = None


@dataclass(frozen=True, slots=True)
class Curve:
    """How something changes: y at each x."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """What a metric says of a map.

    Attributes:
        value: the number; NaN where the map cannot be judged.
        curves: that it sums up.
        words: what the number does not say; may be empty.
    """

    value: float
    curves: tuple[Curve, ...] = ()
    words: str = ""


Try: TypeAlias = Callable[..., Generator[Sequence[Edit], Array, Reading]]
"""A metric's input, parameters by name -> a generator: it yields edits of the image, is sent the probabilities [n] that
the edited images have, and returns the reading."""


@dataclass(frozen=True, slots=True)
class PerturbationMetric:
    """A metric that edits the image as the map says, and looks at what becomes of the probability.

    Attributes:
        judge: says which edits to try, and reads their probabilities.
        paper: that defines it.
        count: parameters by name -> how many edits.
        higher_is_better: whether it is; lower is, otherwise.
        parameters: that it takes.
    """

    judge: Try
    paper: str
    count: Callable[..., int]
    higher_is_better: bool
    parameters: tuple[Parameter, ...] = ()

    boxed = False
    repeats = False

    @property
    def about(self) -> Callable[..., object]:
        """The function whose docstring is the metric's."""
        return self.judge

    def rows(self, parameters: Parameters, maps: int, _job_rows: int) -> int:
        """Return how many rows it costs: one for each edit of every map."""
        return maps * self.count(**parameters)


@dataclass(frozen=True, slots=True)
class StaticMetric:
    """A metric that looks at the map alone, or at the map and a box.

    Attributes:
        judge: a metric's input, parameters by name -> the reading.
        paper: that defines it.
        higher_is_better: whether it is; lower is, otherwise.
        parameters: that it takes.
        boxed: whether it needs to be told where the object is.
    """

    judge: Callable[..., Reading]
    paper: str
    higher_is_better: bool
    parameters: tuple[Parameter, ...] = ()
    boxed: bool = False

    repeats = False

    @property
    def about(self) -> Callable[..., object]:
        """The function whose docstring is the metric's."""
        return self.judge

    def rows(self, _parameters: Parameters, _maps: int, _job_rows: int) -> int:
        """Return how many rows it costs: none."""
        return 0


@dataclass(frozen=True, slots=True)
class Variation:
    """What is different when a map is computed again.

    Attributes:
        view: of the image; None for the image as it is.
        modules: share of the model's modules that have random weights, as the exponent s of n^s among n modules, so
            that 0 is the last one alone and 1 all; None for none.
        seed: of the weights.
    """

    view: View | None = None
    modules: float | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class RecomputationMetric:
    """A metric that has the map computed again under changed conditions, and compares.

    Attributes:
        compare: the map, the map that was computed again (on the same grid) -> how they compare.
        judge: the results of `compare`, the share of the model that was random each time (0 to 1), parameters by name
            -> the reading.
        vary: the input [3,H,W], parameters by name -> the conditions.
        paper: that defines it.
        count: parameters by name -> how many conditions.
        higher_is_better: whether it is; lower is, otherwise.
        parameters: that it takes.
    """

    compare: Callable[[Map, Map], float]
    judge: Callable[..., Reading]
    vary: Callable[..., Sequence[Variation]]
    paper: str
    count: Callable[..., int]
    higher_is_better: bool
    parameters: tuple[Parameter, ...] = ()

    boxed = False
    repeats = True

    @property
    def about(self) -> Callable[..., object]:
        """The function whose docstring is the metric's."""
        return self.judge

    def rows(self, parameters: Parameters, _maps: int, job_rows: int) -> int:
        """Return how many rows it costs: those of the method, for each time that its maps are computed again."""
        return job_rows * self.count(**parameters)


Metric: TypeAlias = PerturbationMetric | StaticMetric | RecomputationMetric
