"""The rule that decides whether two models look at different things."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from camserve._core.errors import FailedPrecondition
from camserve.diff.values import Check, Interval

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from camserve.diff.calibration import MethodCalibration

MIN_PHOTOS: Final = 10
"""Fewest photos of a diff: with fewer, no rule can tell a change from chance."""

MIDDLE: Final = 0.5
"""Position that is as near to the ceiling as to the floor."""

_FLOOR_QUANTILE = 0.05
_TEST_LEVEL = 0.01
_RESAMPLES = 1000
_LEVEL = 0.95


def scale_of(calibration: MethodCalibration) -> tuple[float, float, float]:
    """Return the median of the floor, the lower end of its band, and the median of the ceiling.

    Raises:
        FailedPrecondition: The floor cannot be told from the ceiling.
    """
    floor = calibration.noise
    name = _name(calibration)
    if not floor or not calibration.random:
        raise FailedPrecondition(f"{name} cannot be calibrated: none of its maps can be read; choose another method")
    limit, ceiling = float(np.quantile(floor, _FLOOR_QUANTILE)), float(np.median(calibration.random))
    if limit <= ceiling:
        numbers = f"with random weights (rank correlation {ceiling:.3g}) as with a little noise ({limit:.3g})"
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
    median = bootstrap([value for value in correlations if math.isfinite(value)], np.median)
    own = float(np.mean([position(value, floor, ceiling) > MIDDLE for value in calibration.noise]))
    name = _name(calibration)
    reasons: list[str] = []
    if median.value < limit:
        band = f"95 % of the baseline's own are above {limit:.3g} with a little noise"
        reasons.append(f"{name}: the median rank correlation is {median.value:.3g}; {band}")
    if more_than(elsewhere, max(max_changed, own)):
        nearer = "of the maps are nearer to maps of random weights than to the baseline's"
        reasons.append(f"{name}: {np.mean(elsewhere):.0%} {nearer}; {_limit(max_changed, own)}")
    numbers = (len(correlations), median, floor, limit, ceiling, bootstrap(elsewhere, np.mean))
    return Check(calibration.method, calibration.layer, *numbers, bool(reasons), tuple(reasons))


def check_predictions(changed: Sequence[bool], own: float, max_changed: float) -> str:
    """Check the predicted classes; return why the check fails, or an empty text.

    Args:
        changed: True for each photo whose predicted class is another one.
        own: Share of the baseline's own predictions that a little noise changes.
        max_changed: The share of the photos that may change.
    """
    if not more_than(changed, max(max_changed, own)):
        return ""
    return f"the predicted class is another one for {np.mean(changed):.0%} of the photos; {_limit(max_changed, own)}"


def _limit(max_changed: float, own: float) -> str:
    if own > max_changed:
        return f"with a little noise it is {own:.0%} of the baseline's own"
    return f"at most {max_changed:.0%} may be"


def more_than(found: Sequence[bool], share: float) -> bool:
    """Return True if more than a share of the population has a property that was found in this sample.

    It is an exact one-sided binomial test at the level of 1 %: a few photos more than the share can be chance.
    """
    return binomial_tail(sum(found), len(found), share) <= _TEST_LEVEL if any(found) else False


def binomial_tail(count: int, trials: int, share: float) -> float:
    """Return the probability of at least ``count`` successes in independent trials with this probability each."""
    if share <= 0 or share >= 1:
        return float(count <= 0 or share >= 1)
    counts = np.arange(count, trials + 1)
    factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, trials + 1)))])  # logarithms
    ways = factorials[trials] - factorials[counts] - factorials[trials - counts]
    return float(np.exp(ways + counts * math.log(share) + (trials - counts) * math.log1p(-share)).sum())


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
