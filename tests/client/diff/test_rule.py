"""The rule finds each kind of change alone, finds nothing where nothing changed, and refuses what it cannot decide."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from camserve import FailedPrecondition
from camserve.diff import rule
from client.diff.looks import calibration_of

FLOOR = tuple(np.linspace(0.8, 1, 41))
(SPREAD,) = calibration_of("gradcam", "layer4", FLOOR, (0.0, 0.1, 0.2)).methods


def check(correlations: list[float], elsewhere: list[bool] | None = None, max_changed: float = 0.05) -> rule.Check:
    return rule.check(correlations, elsewhere or [False] * len(correlations), SPREAD, max_changed)


def test_scale_is_that_of_the_calibration() -> None:
    floor, limit, ceiling = rule.scale_of(SPREAD)

    assert floor == pytest.approx(np.median(FLOOR))
    assert limit == pytest.approx(np.sort(FLOOR)[2])  # 5 % of the 41 values are below it
    assert ceiling == pytest.approx(0.1)


def test_position_is_0_at_the_floor_and_1_at_the_ceiling() -> None:
    assert [rule.position(value, 0.9, 0.1) for value in (0.9, 0.5, 0.1)] == pytest.approx([0, 0.5, 1])
    assert math.isnan(rule.position(math.nan, 0.9, 0.1))


def test_maps_like_the_baselines_own_are_the_same() -> None:
    found = check(list(FLOOR))

    assert (found.changed, found.reasons, found.cases) == (False, (), len(FLOOR))
    assert (found.method, found.layer) == ("gradcam", "layer4")


def test_median_below_the_band_is_a_change() -> None:
    found = check([0.7] * 20)

    assert found.changed
    assert [reason.split(":")[0] for reason in found.reasons] == ["gradcam on layer4"]
    assert "median rank correlation" in found.reasons[0]
    assert "is 0.7;" in found.reasons[0]


def test_share_of_maps_elsewhere_is_a_change() -> None:
    few, many = ([True] * count + [False] * (40 - count) for count in (2, 20))

    assert not check([0.9] * 40, few).changed
    found = check([0.9] * 40, many)
    assert found.changed
    assert len(found.reasons) == 1
    assert "50% of the maps are nearer to" in found.reasons[0]
    assert found.elsewhere.value == 0.5
    assert not check([0.9] * 40, many, max_changed=0.6).changed


def test_maps_that_cannot_be_compared_are_no_part_of_the_median() -> None:
    found = check([math.nan] * 5 + [0.9] * 20)

    assert (found.median.value, found.changed) == (0.9, False)


def test_check_without_a_map_that_can_be_compared_is_undefined() -> None:
    found = check([math.nan] * 12)

    assert all(map(math.isnan, (found.median.value, found.median.low, found.median.high)))


@pytest.mark.parametrize(
    ("name", "floor", "random", "words"),
    [
        ("flat", (), (), "flat cannot be calibrated"),
        ("flat", (0.9,), (), "flat cannot be calibrated"),
        ("flat", (), (0.1,), "flat cannot be calibrated"),
        ("guided", (0.5,) * 10, (0.5,) * 9, "guided cannot tell two models apart"),
        ("noisy", (0.9, -0.5, 0.9), (0.1,), "noisy cannot tell two models apart"),
    ],
)
def test_method_that_cannot_decide_is_refused(
    name: str, floor: tuple[float, ...], random: tuple[float, ...], words: str
) -> None:
    (method,) = calibration_of(name, "", floor, random).methods

    with pytest.raises(FailedPrecondition, match=f"{words}.*choose another method"):
        rule.check([0.9] * 20, [False] * 20, method, 0.05)


@pytest.mark.parametrize("share", [0.01, 0.05, 0.3])
@pytest.mark.parametrize("photos", [10, 100, 1000])
def test_share_is_exceeded_by_scipys_binomial_test(share: float, photos: int) -> None:
    for count in {0, 1, *(round(photos * share * factor) for factor in (0.5, 1, 1.5, 2, 3))}:
        expected = stats.binomtest(count, photos, share, alternative="greater").pvalue

        assert rule.binomial_tail(count, photos, share) == pytest.approx(expected, rel=1e-6)
        assert rule.more_than([True] * count + [False] * (photos - count), share) == (expected <= 0.01)


def test_changes_that_noise_makes_too_are_allowed() -> None:
    changed = [True] * 20 + [False] * 80

    assert "20%" in rule.check_predictions(changed, 0.0, 0.05)
    assert rule.check_predictions(changed, 0.2, 0.05) == ""
    assert rule.check_predictions(changed, 0.0, 0.2) == ""
    assert rule.check_predictions([False] * 100, 0.0, 0.0) == ""
    assert rule.check_predictions([True, *[False] * 99], 0.0, 0.0) != ""


@pytest.mark.parametrize("statistic", [np.mean, np.median])
@pytest.mark.parametrize("size", [25, *(pytest.param(size, marks=pytest.mark.slow) for size in (10, 200))])
def test_interval_is_scipys_percentile_bootstrap(statistic: object, size: int) -> None:
    sample = np.random.default_rng(size).beta(5, 1, size)
    found = rule.bootstrap(list(sample), statistic)  # type: ignore[arg-type]  # NumPy's functions have overloads
    expected = stats.bootstrap((sample,), statistic, n_resamples=20_000, method="percentile", rng=1)

    # The bounds of 1,000 resamples vary by at most this share of the interval: six standard errors.
    width = 0.15 * (expected.confidence_interval.high - expected.confidence_interval.low) * 2
    assert found.value == statistic(sample)  # type: ignore[operator]  # as above
    assert found.low == pytest.approx(expected.confidence_interval.low, abs=width)
    assert found.high == pytest.approx(expected.confidence_interval.high, abs=width)


def test_interval_depends_on_the_values_alone() -> None:
    values = list(np.random.default_rng(0).normal(size=30))

    assert rule.bootstrap(values, np.mean) == rule.bootstrap(values, np.mean)
    assert rule.bootstrap([True, False] * 50, np.mean).value == 0.5
    assert rule.bootstrap([1.0] * 9, np.median) == rule.Interval(1, 1, 1)


def test_interval_of_nothing_is_undefined() -> None:
    assert all(map(math.isnan, vars_of(rule.bootstrap([], np.mean))))


def vars_of(interval: rule.Interval) -> tuple[float, float, float]:
    return interval.value, interval.low, interval.high
