"""The kinds of metric, named by what they need besides the map. A metric is a frozen value made of pure functions.

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
        heatmap: the raw map on its own grid, float32 [h,w].
        pixels: the raw map resized to the input's pixels bilinearly, float32 [H,W].
        intensity: the map cut at zero, divided by its maximum, and then resized likewise, 0 to 1, float32 [H,W].
        probability: probability of the target for the unchanged image.
        seen: the part of the photo that the map covers, in the photo's pixels.
        box: the object's box in the photo's pixels; None if the request names none.
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
    """Curve of a metric: y at each x."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """Result of a metric for one map.

    Attributes:
        value: the number; NaN if the metric is not defined for the map.
        curves: the curves that the number summarises.
        words: further information for people; may be empty.
    """

    value: float
    curves: tuple[Curve, ...] = ()
    words: str = ""


Try: TypeAlias = Callable[..., Generator[Sequence[Edit], Array, Reading]]
"""A metric's input, parameters by name -> a generator that yields edits of the image, receives the probabilities [n] of
the edited images, and returns the reading."""


@dataclass(frozen=True, slots=True)
class PerturbationMetric:
    """Metric of the probability of images that are edited according to the map.

    Attributes:
        judge: generator that yields the edits and computes the reading from their probabilities.
        paper: the metric's source.
        count: parameters by name -> the number of edits.
        higher_is_better: True if a higher value is better, False if a lower one is.
        parameters: the parameters of these functions.
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
        """Function whose docstring documents the metric."""
        return self.judge

    def rows(self, parameters: Parameters, maps: int, _job_rows: int) -> int:
        """Return the number of rows: one for each edit of each map."""
        return maps * self.count(**parameters)


@dataclass(frozen=True, slots=True)
class StaticMetric:
    """Metric of the map alone, or of the map and the object's box.

    Attributes:
        judge: a metric's input, parameters by name -> the reading.
        paper: the metric's source.
        higher_is_better: True if a higher value is better, False if a lower one is.
        parameters: the parameters of `judge`.
        boxed: True if the metric needs the object's box.
    """

    judge: Callable[..., Reading]
    paper: str
    higher_is_better: bool
    parameters: tuple[Parameter, ...] = ()
    boxed: bool = False

    repeats = False

    @property
    def about(self) -> Callable[..., object]:
        """Function whose docstring documents the metric."""
        return self.judge

    def rows(self, _parameters: Parameters, _maps: int, _job_rows: int) -> int:
        """Return the number of rows: zero."""
        return 0


@dataclass(frozen=True, slots=True)
class Variation:
    """Changed condition under which a map is computed again.

    Attributes:
        view: view of the image; None for the unchanged image.
        modules: exponent s for n^s random modules of the model's n, from the last: 0 for the last module alone, 1 for
            all; None for the unchanged model.
        seed: seed of the random weights.
    """

    view: View | None = None
    modules: float | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class RecomputationMetric:
    """Metric that compares the map with maps computed again under changed conditions.

    Attributes:
        compare: the map, a map computed again on the same grid -> a distance or a correlation.
        judge: the results of `compare`, the share of the model that was random each time (0 to 1), parameters by name
            -> the reading.
        vary: the input [3,H,W], parameters by name -> the conditions.
        paper: the metric's source.
        count: parameters by name -> the number of conditions.
        higher_is_better: True if a higher value is better, False if a lower one is.
        parameters: the parameters of these functions.
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
        """Function whose docstring documents the metric."""
        return self.judge

    def rows(self, parameters: Parameters, _maps: int, job_rows: int) -> int:
        """Return the number of rows: those of the method, for each condition."""
        return job_rows * self.count(**parameters)


Metric: TypeAlias = PerturbationMetric | StaticMetric | RecomputationMetric
