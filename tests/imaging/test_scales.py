"""Signs and scales of maps: matplotlib's and Captum's normalisation, and values that can be used again."""

import cv2
import numpy as np
import pytest
from captum.attr import visualization
from matplotlib.colors import TwoSlopeNorm

from camserve_server.imaging import scales
from camserve_server.imaging.values import Rendering, Threshold

SIZE = (96, 64)
PROFILES = ("paper", "grad-cam", "torchcam", "captum")
SIGNS = ("positive", "negative", "absolute", "both")
COMBINATIONS = [(profile, sign) for profile in PROFILES for sign in SIGNS if sign != "both"] + [
    ("paper", "both"),
    ("captum", "both"),
]
CLOSE = 1e-6  # of values of -1 to 1


def random_map(seed, shape=(7, 5)):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) * 10.0 ** (seed % 5 - 3)


def intensities(raw, scale=None, **options):
    return scales.on_input(scales.scale_map(raw, Rendering(**options), SIZE, scale), SIZE)


def own_scale(raw, **options):
    return scales.own_scale(raw, Rendering(**options), SIZE)


def enlarged(raw):
    return cv2.resize(raw.astype(np.float64), SIZE[::-1], interpolation=cv2.INTER_LINEAR)


@pytest.mark.parametrize("shape", [(7, 5), (1, 1), SIZE])
@pytest.mark.parametrize("seed", range(5))
def test_signed_intensities_are_those_of_matplotlibs_two_slope_norm(seed, shape):
    raw = random_map(seed, shape)
    top = own_scale(raw, sign="both")
    expected = TwoSlopeNorm(0, -top, top)(enlarged(raw)).clip(0, 1)

    np.testing.assert_allclose((intensities(raw, sign="both") + 1) / 2, expected, atol=CLOSE, rtol=0)


def captums(large, outliers):
    """Return what Captum draws with sign="all", an array of -1 to 1."""
    _, axis = visualization.visualize_image_attr(large[..., None], sign="all", outlier_perc=outliers, use_pyplot=False)
    return np.asarray(axis.images[0].get_array())


@pytest.mark.parametrize("seed", range(5))
def test_signed_intensities_are_those_of_captum_without_outliers(seed):
    raw = random_map(seed, (16, 12))
    large = cv2.resize(raw, SIZE[::-1], interpolation=cv2.INTER_LINEAR)
    scale = float(np.abs(large).max())

    np.testing.assert_allclose(intensities(raw, scale, sign="both"), captums(large, 0), atol=CLOSE, rtol=0)


@pytest.mark.parametrize("seed", range(5))
def test_captum_profile_with_both_signs_is_that_of_captum(seed):
    raw = random_map(seed, (12, 8))  # an eighth of the size, so that both libraries repeat the same cells
    large = np.repeat(np.repeat(raw, 8, axis=0), 8, axis=1)

    found = intensities(raw, profile="captum", sign="both")
    np.testing.assert_allclose(found, captums(large, 2), atol=CLOSE, rtol=0)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("shape", [(7, 5), SIZE])
def test_profiles_run_on_the_values_that_the_sign_shows(profile, shape):
    raw = random_map(1, shape)
    plain = intensities(raw, profile=profile)

    assert np.array_equal(intensities(-raw, profile=profile, sign="negative"), plain)
    assert np.array_equal(intensities(raw.clip(0), profile=profile, sign="absolute"), plain)
    absolute = intensities(raw, profile=profile, sign="absolute")
    assert np.array_equal(absolute, intensities(np.abs(raw), profile=profile))


@pytest.mark.parametrize("profile", ["paper", "captum"])
def test_signed_intensities_change_sign_with_the_map(profile):
    raw = random_map(2)

    assert np.array_equal(
        intensities(-raw, profile=profile, sign="both"), -intensities(raw, profile=profile, sign="both")
    )


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize("profile", ["paper", "captum"])
@pytest.mark.parametrize("shape", [(7, 5), SIZE])
def test_scale_of_a_map_gives_the_same_intensities_when_it_is_requested(profile, sign, shape):
    raw = random_map(3, shape)
    scaled = scales.scale_map(raw, Rendering(profile=profile, sign=sign), SIZE)
    again = scales.scale_map(raw, Rendering(profile=profile, sign=sign), SIZE, float(np.float32(scaled.scale)))

    assert scaled.scale > 0
    assert np.array_equal(scaled.heat, again.heat)
    assert np.array_equal(scaled.values, again.values)


@pytest.mark.parametrize("factor", [0.25, 0.5, 3.0, 1e30, 1e-30])
def test_intensities_are_values_divided_by_the_scale_and_cut_at_1(factor):
    raw = random_map(0)
    scale = factor * own_scale(raw, sign="both")

    np.testing.assert_allclose(intensities(raw, scale, sign="both"), (enlarged(raw) / scale).clip(-1, 1), atol=CLOSE)


@pytest.mark.parametrize("profile", PROFILES)
def test_scale_is_the_raw_value_of_the_strongest_colour(profile):
    raw = random_map(4)
    scaled = scales.scale_map(raw, Rendering(profile=profile), SIZE)
    heat = scales.on_input(scaled, SIZE)
    values = scales.values_on_input(raw, Rendering(profile=profile), SIZE)
    units = (values - scaled.low) / (scaled.scale - scaled.low)

    np.testing.assert_allclose(units.clip(0, 1), heat.clip(0, 1), atol=2e-6)


def test_pixelwise_maps_are_cut_at_the_99th_percentile_of_the_shown_strengths():
    raw = random_map(0, SIZE)
    for sign, strengths in (("negative", -raw), ("absolute", np.abs(raw)), ("both", np.abs(raw))):
        expected = np.quantile(strengths, 0.99, method="nearest")
        assert own_scale(raw, sign=sign) == expected


@pytest.mark.parametrize(("profile", "sign"), COMBINATIONS)
@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, -np.inf])
def test_map_without_values_to_show_has_no_scale_and_no_intensities(profile, sign, value):
    raw = np.zeros((7, 5), np.float32)
    raw[3, 2] = value

    assert own_scale(raw, profile=profile, sign=sign) == 0
    assert not intensities(raw, profile=profile, sign=sign).any()
    assert not intensities(raw, 1.0, profile=profile, sign=sign).any()


@pytest.mark.parametrize("sign", SIGNS)
def test_fixed_scale_far_below_the_values_keeps_intensities_finite(sign):
    raw = random_map(0) * np.float32(1e30)

    for scale in (float(np.float32(1e-45)), 1e-30, 3e38):
        found = intensities(raw, scale, sign=sign)
        assert np.isfinite(found).all()
        assert np.abs(found).max() <= 1


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.999, 1.0])
def test_thresholds_are_quantiles_shares_of_the_sum_or_values(share):
    strengths = np.abs(random_map(0, SIZE))
    ordered = sorted(strengths.ravel().tolist(), reverse=True)
    total, taken = share * sum(ordered) * (1 - 1e-12), 0.0
    for least in ordered:
        taken += least
        if taken >= total:
            break

    assert scales.threshold_of(strengths, Threshold("quantile", share)) == np.quantile(strengths, share)
    assert scales.threshold_of(strengths, Threshold("mass", share)) == least
    assert scales.threshold_of(strengths, Threshold("value", share)) == share
