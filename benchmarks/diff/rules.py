"""Verdicts of `camserve diff` on random draws of photos, and those of the same limits without a test."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from benchmarks.diff.maps import Values
from camserve import FailedPrecondition
from camserve.diff import rule
from camserve.diff.calibration import MethodCalibration
from camserve.diff.values import MAX_CHANGED, Interval

LITERAL, DIFF = "without a test", "diff"
RULES = (LITERAL, DIFF)


@dataclass(frozen=True, slots=True)
class Sample:
    """Numbers of a candidate and of its baseline for some photos.

    Attributes:
        candidate: Rank correlations of the candidate's maps, [photos].
        verdict_changed: Whether the candidate's map has another verdict, [photos].
        changed: Whether the candidate predicts another class, [photos].
        noise: Rank correlations of the baseline with itself, with a little noise, [draws,photos].
        noise_changed: Whether noise changes the baseline's prediction, [draws,photos].
        random: Rank correlations of the baseline with random weights, [photos].
    """

    candidate: Values
    verdict_changed: NDArray[np.bool_]
    changed: NDArray[np.bool_]
    noise: Values
    noise_changed: NDArray[np.bool_]
    random: Values

    def of(self, places: NDArray[np.int64]) -> "Sample":
        """Return the sample of some of the photos."""
        return Sample(*(getattr(self, each.name)[..., places] for each in fields(self)))

    @property
    def calibration(self) -> MethodCalibration:
        """The calibration of the baseline."""
        noise, random = (tuple(values[np.isfinite(values)].tolist()) for values in (self.noise, self.random))
        return MethodCalibration("method", "", noise, random)


def verdicts(sample: Sample) -> dict[str, float]:
    """Return 1 for each rule that says that the candidate differs, 0 for the others; NaN if `diff` refuses to say."""
    calibration = sample.calibration
    try:
        floor, limit, ceiling = rule.scale_of(calibration)
    except FailedPrecondition:
        return dict.fromkeys(RULES, math.nan)
    positions = rule.position(sample.candidate, floor, ceiling)  # type: ignore[arg-type]  # element by element
    elsewhere = (positions > rule.MIDDLE) | (np.isnan(positions) & sample.verdict_changed)
    with mock.patch.object(rule, "bootstrap", _without_interval):  # intervals decide nothing, and take most of the time
        check = rule.check(sample.candidate.tolist(), elsewhere.tolist(), calibration, MAX_CHANGED)
    predictions = rule.check_predictions(sample.changed.tolist(), float(sample.noise_changed.mean()), MAX_CHANGED)
    shares = max(elsewhere.mean(), sample.changed.mean())
    return {
        LITERAL: float(np.nanmedian(sample.candidate) < limit or shares > MAX_CHANGED),
        DIFF: float(check.changed or bool(predictions)),
    }


def _without_interval(values: Sequence[float], statistic: Callable[[Values], Any]) -> Interval:
    value = float(statistic(np.asarray(values, np.float64))) if len(values) else math.nan
    return Interval(value, math.nan, math.nan)


def rates(sample: Sample, photos: int, draws: int, seed: int = 0) -> dict[str, float]:
    """Return how often each rule says that the candidate differs, over random draws of some photos."""
    rng = np.random.default_rng(seed)
    found = [verdicts(sample.of(rng.permutation(len(sample.candidate))[:photos])) for _ in range(draws)]
    decided = [one for one in found if not math.isnan(one[DIFF])]
    return {rule: float(np.mean([one[rule] for one in decided])) if decided else math.nan for rule in RULES}
