"""The rule that decides whether two models look at different things."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from camserve._errors import FailedPrecondition
from camserve.diff.values import Check, Interval

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from camserve.diff.calibration import MethodCalibration

MIN_PHOTOS: Final = 10
"""Fewest photos of a diff: with fewer, no rule can tell a change from chance."""

_FLOOR_QUANTILE = 0.05
_RESAMPLES = 1000
_LEVEL = 0.95


def scale_of(calibration: MethodCalibration) -> tuple[float, float, float]:
    """Return the median of the floor, the lower end of its band, and the median of the ceiling.

    Raises:
        FailedPrecondition: The floor cannot be told from the ceiling.
    """
    floor = [*calibration.noise, *calibration.mirrored]
    name = _name(calibration)
    if not floor or not calibration.random:
        raise FailedPrecondition(f"{name} cannot be calibrated: none of its maps can be read; choose another method")
    limit, ceiling = float(np.quantile(floor, _FLOOR_QUANTILE)), float(np.median(calibration.random))
    if limit <= ceiling:
        numbers = f"with random weights (rank correlation {ceiling:.2f}) as with a little noise ({limit:.2f})"
        advice = "choose another method or layer"
        raise FailedPrecondition(f"{name} cannot tell two models apart: its maps stay as similar {numbers}; {advice}")
    return float(np.median(floor)), limit, ceiling


def position(correlation: float, floor: float, ceiling: float) -> float:
    """Return where a rank correlation lies: 0 at the floor, 1 at the ceiling; NaN for NaN."""
    return (floor - correlation) / (floor - ceiling)


def check(
    correlations: Sequence[float],
    elsewhere: Sequence[bool],
    calibration: MethodCalibration,
    max_changed: float,
) -> Check:
    """Check the cases of one method on one layer.

    Args:
        correlations: Rank correlation of each case; NaN if the maps cannot be compared.
        elsewhere: True for each case that is nearer to the ceiling than to the floor.
        calibration: The calibration of the method.
        max_changed: The share of the cases that may be.

    Raises:
        FailedPrecondition: The method cannot be calibrated.
    """
    floor, limit, ceiling = scale_of(calibration)
    name = _name(calibration)
    comparable = [value for value in correlations if math.isfinite(value)]
    median = bootstrap(comparable, np.median)
    share = bootstrap(elsewhere, np.mean)
    reasons: list[str] = []
    if median.value < limit:
        own = f"with a little noise it is above {limit:.2f} for 95 % of the baseline's own maps"
        reasons.append(f"{name}: the median rank correlation with the baseline is {median.value:.2f}; {own}")
    if share.value > max_changed:
        nearer = "nearer to those of random weights than to the baseline's own"
        reasons.append(f"{name}: {share.value:.0%} of the maps are {nearer}; {max_changed:.0%} may be")
    numbers = (len(comparable), median, floor, limit, ceiling, share)
    return Check(calibration.method, calibration.layer, *numbers, bool(reasons), tuple(reasons))


def _name(calibration: MethodCalibration) -> str:
    return f"{calibration.method} on {calibration.layer}" if calibration.layer else calibration.method


def bootstrap(values: Sequence[float], statistic: Callable[[NDArray[np.float64]], Any]) -> Interval:
    """Return a statistic of values with its bootstrap interval of 95 %; NaN without values.

    Efron and Tibshirani 1993, An Introduction to the Bootstrap, section 13.3: percentiles of 1,000 resamples.
    """
    sample = np.asarray(values, np.float64)
    if not sample.size:
        return Interval(math.nan, math.nan, math.nan)
    generator = np.random.default_rng(0)
    drawn = [statistic(generator.choice(sample, sample.size)) for _ in range(_RESAMPLES)]
    low, high = np.quantile(drawn, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return Interval(float(statistic(sample)), float(low), float(high))
