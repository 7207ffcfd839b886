"""Comparisons of two explanations, against SciPy, scikit-image and plain formulas."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from scipy import stats
from skimage import measure
from skimage.metrics import structural_similarity

import camserve
import fork_server
from camserve import Box, Explanation, Photo, Prediction, Verdict
from camserve._values import map_numbers

PHOTO = Photo(100, 80, Box(0, 0, 100, 80))
rng = np.random.default_rng(0)


def explanation(heatmap: Any, photo: Photo = PHOTO, **changes: Any) -> Explanation:
    """Return an explanation of a cat with this map."""
    values = None if heatmap is None else np.asarray(heatmap, np.float32)
    cat = Prediction("cat", 0.75, 3, 2.0)
    none: Any = MappingProxyType({})
    plain = Explanation("gradcam", "layer4", cat, None, 2.0, Verdict.OK, "", none, photo, values, None, None)
    return replace(plain, **changes)


def noise(*shape: int) -> Any:
    return rng.normal(size=shape).astype(np.float32)


PAIRS = {
    "noise": (noise(7, 7), noise(7, 7)),
    "alike": ((base := noise(14, 14)), base + 0.2 * noise(14, 14)),
    "ties": (np.round(noise(9, 8)), np.round(noise(9, 8))),
    "opposite": (base, -base),
    "pixels": (noise(48, 64), noise(48, 64)),
    "positive": (np.abs(noise(7, 9)), np.abs(noise(7, 9))),
}


def ranked(values: Any) -> Any:
    """Return a map on the grid for ranks: blocks of at most 16 by 16."""
    rows, columns = (max(side // 16, 1) for side in values.shape)
    return measure.block_reduce(values, (rows, columns), np.mean).astype(np.float32).ravel()


@pytest.mark.parametrize("name", PAIRS)
def test_correlations_are_those_of_scipy(name: str) -> None:
    one, other = (values.astype(np.float64).ravel() for values in PAIRS[name])
    found = explanation(PAIRS[name][0]).compare(explanation(PAIRS[name][1]))
    expected = stats.spearmanr(*map(ranked, PAIRS[name])).statistic

    assert found.spearman == pytest.approx(expected, abs=1e-12)
    assert found.pearson == pytest.approx(stats.pearsonr(one, other).statistic, abs=1e-12)


@pytest.mark.parametrize("name", ["alike", "pixels"])
def test_structural_similarity_is_that_of_scikit_image(name: str) -> None:
    one, other = (values.astype(np.float64) / np.abs(values).max() for values in PAIRS[name])
    _, each = structural_similarity(
        one, other, data_range=2, gaussian_weights=True, sigma=1.5, use_sample_covariance=False, full=True
    )
    found = explanation(PAIRS[name][0]).compare(explanation(PAIRS[name][1]))

    assert found.ssim == pytest.approx(each[5:-5, 5:-5].mean(), abs=1e-6)


def test_structural_similarity_of_a_small_map_has_one_window() -> None:
    one, other = noise(7, 7), noise(7, 7)
    window = np.exp(-((np.arange(7) - 3) ** 2) / (2 * 1.5**2))
    weights = np.outer(window, window) / window.sum() ** 2
    x, y = (values.astype(np.float64) / np.abs(values).max() for values in (one, other))
    mean_x, mean_y = (weights * x).sum(), (weights * y).sum()
    covariance = (weights * (x - mean_x) * (y - mean_y)).sum()
    variances = (weights * (x - mean_x) ** 2).sum(), (weights * (y - mean_y) ** 2).sum()
    c1, c2 = 0.02**2, 0.06**2
    expected = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    expected /= (mean_x**2 + mean_y**2 + c1) * (sum(variances) + c2)

    assert explanation(one).compare(explanation(other)).ssim == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", PAIRS)
def test_divergence_is_that_of_scipy(name: str) -> None:
    p, q = (values.astype(np.float64).clip(min=0).ravel() for values in PAIRS[name])
    p, q = p / p.sum(), q / q.sum()
    found = explanation(PAIRS[name][0]).compare(explanation(PAIRS[name][1])).kl

    assert found == pytest.approx((p * np.log(1e-7 + p / (q + 1e-7))).sum(), abs=1e-12)
    if (q > 0).all():
        assert found == pytest.approx(stats.entropy(p, q), abs=1e-4)


@pytest.mark.parametrize("name", ["noise", "alike", "pixels"])
def test_overlap_of_the_hottest_fifth_is_that_of_the_sorted_cells(name: str) -> None:
    cells = [ranked(values) for values in PAIRS[name]]
    sets = [set(np.argsort(-values, kind="stable")[: round(0.2 * values.size)]) for values in cells]
    found = explanation(PAIRS[name][0]).compare(explanation(PAIRS[name][1]))

    assert found.iou == len(sets[0] & sets[1]) / len(sets[0] | sets[1])
    assert len(found.iou_curve) == 6


def test_equal_values_are_hot_together_and_the_smallest_never() -> None:
    mostly_zero = np.zeros((5, 5))
    mostly_zero[2, 2] = 1
    found = explanation(mostly_zero).compare(explanation(mostly_zero + np.eye(5)))

    assert found.iou_curve == (1, *[1 / 5] * 5)


def test_map_compared_with_itself_is_the_same() -> None:
    why = explanation(noise(7, 7))
    found = why.compare(why)

    assert found.spearman == found.pearson == found.iou == pytest.approx(1)
    assert found.ssim == pytest.approx(1)
    assert found.kl == pytest.approx(0, abs=1e-5)
    assert (found.shift, found.score_change, found.probability_change, found.verdict_changed) == (0, 0, 0, False)


def test_shift_is_the_distance_of_the_centres_in_percent_of_the_diagonal() -> None:
    left, right = np.zeros((4, 5)), np.zeros((4, 5))
    left[1, 0], right[1, 4] = 2, 7  # their centres are at 10 and 90 pixels, 30 pixels from the top

    assert explanation(left).compare(explanation(right)).shift == pytest.approx(100 * 80 / math.hypot(100, 80))


def test_equal_values_stay_equal_on_another_grid() -> None:
    assert math.isnan(explanation(np.full((7, 7), 0.1)).compare(explanation(noise(4, 5))).spearman)


def test_negative_values_have_no_mass() -> None:
    one = np.zeros((4, 4))
    one[0, 0] = 1
    other = one.copy()
    other[3, 3] = -5

    assert explanation(one).compare(explanation(other)).shift == 0


def test_maps_of_different_grids_are_compared_on_both_grids() -> None:
    coarse = noise(4, 5)
    fine = np.repeat(np.repeat(coarse, 2, axis=0), 2, axis=1)
    found = explanation(coarse).compare(explanation(fine))

    assert found.spearman == pytest.approx(1)  # the cells of the finer map are averaged
    assert found.iou == 1
    assert 0.8 < found.pearson < 1  # the cells of the coarser map are interpolated


LONG = 23_000


def compare_long_maps() -> Any:
    """Compare two maps that cross each other, and return the result with the most bytes that this takes."""
    values = np.random.default_rng(0).random(LONG, np.float32)
    maps = values[None], values[:, None]
    return fork_server.allocating(explanation(maps[0]).compare, explanation(maps[1]))


def test_hostile_maps_are_compared_in_bounded_memory() -> None:
    result, peak = fork_server.call(compare_long_maps)

    assert peak < 512 * 2**20  # all pairs of their cells take 4 GiB
    assert math.isfinite(result.ssim)


@pytest.mark.parametrize("shape", [(2, 5000), (5000, 2), (3000, 4097)])
def test_map_of_many_cells_has_their_means(shape: tuple[int, int]) -> None:
    steep = np.add.outer(np.linspace(0, 1, shape[0]), np.linspace(0, 2, shape[1])).astype(np.float32)
    found = map_numbers.bounded(steep)

    assert found.shape == tuple(min(side, map_numbers.MOST_CELLS) for side in shape)
    expected = np.add.outer(*(np.linspace(0, end, side) for end, side in zip((1, 2), found.shape, strict=True)))
    assert np.abs(found - expected).max() < 3 / map_numbers.MOST_CELLS  # the slopes of one cell along each axis


def test_map_of_ordinary_size_is_compared_as_it_is() -> None:
    values = noise(map_numbers.MOST_CELLS, 3)

    assert map_numbers.bounded(values) is values


def test_maps_are_compared_over_the_part_that_both_models_see() -> None:
    whole = noise(8, 8)
    crop = Photo(100, 80, Box(25, 20, 75, 60))
    found = explanation(whole).compare(explanation(whole[2:6, 2:6], crop))

    assert found.spearman == pytest.approx(1)
    assert found.pearson == pytest.approx(1)
    assert found.shift == pytest.approx(0, abs=1e-9)
    assert found.shift == explanation(whole[2:6, 2:6], crop).compare(explanation(whole)).shift


def test_energy_in_a_box_is_measured_on_the_pixels_of_the_photo() -> None:
    left, whole = np.zeros((4, 4)), np.ones((4, 4))
    left[:, 0] = 1
    crop = Photo(100, 80, Box(0, 0, 50, 80))
    found = explanation(left).compare(explanation(whole, crop), box=(0, 0, 50, 80))
    half = explanation(whole).compare(explanation(whole), camserve.Box(0, 0, 25, 80))

    assert found.box_energy == pytest.approx((1, 1))
    assert half.box_energy == pytest.approx((0.25, 0.25))


@pytest.mark.parametrize(
    ("heatmap", "undefined"),
    [
        (np.full((7, 7), np.nan), ("spearman", "iou", "shift", "ssim", "pearson", "kl")),
        (np.zeros((7, 7)), ("spearman", "shift", "ssim", "pearson", "kl")),
        (np.ones((7, 7)), ("spearman", "pearson")),
        (-np.abs(noise(7, 7)), ("shift", "kl")),
    ],
    ids=["not finite", "zero", "constant", "negative"],
)
def test_number_that_is_undefined_is_nan(heatmap: Any, undefined: tuple[str, ...]) -> None:
    found = explanation(heatmap).compare(explanation(noise(7, 7)), box=(0, 0, 10, 10))
    names = ("spearman", "iou", "shift", "ssim", "pearson", "kl")

    assert {name for name in names if math.isnan(getattr(found, name))} >= set(undefined)
    assert json.loads(json.dumps(found.plain(), allow_nan=False))[undefined[0]] is None


def test_scores_probabilities_and_verdicts_are_compared() -> None:
    one = explanation(noise(7, 7))
    dog = Prediction("dog", 0.5, 4, 1.5)
    found = one.compare(replace(one, score=1.5, target=dog, verdict=Verdict.FLAT))

    assert (found.score_change, found.probability_change) == (-0.5, -0.25)
    assert found.verdicts == (Verdict.OK, Verdict.FLAT)
    assert found.verdict_changed
    assert not found.same_target


@pytest.mark.parametrize(
    ("other", "box", "message"),
    [
        (explanation(None), None, "has no heatmap"),
        (explanation(np.ones((2, 2)), Photo(101, 80, Box(0, 0, 101, 80))), None, "different photos"),
        (explanation(np.ones((2, 2)), Photo(100, 80, Box(99, 0, 100, 80))), (1, 2, 3), "box: a box must be"),
    ],
)
def test_what_cannot_be_compared_is_refused(other: Explanation, box: Any, message: str) -> None:
    with pytest.raises(camserve.CamserveError, match=message):
        explanation(np.eye(2)).compare(other, box)


def test_models_that_see_different_parts_cannot_be_compared() -> None:
    one = explanation(np.eye(2), Photo(100, 80, Box(0, 0, 40, 80)))
    other = explanation(np.eye(2), Photo(100, 80, Box(60, 0, 100, 80)))

    with pytest.raises(camserve.InvalidArgument, match="no common part"):
        one.compare(other)


async def test_both_models_explain_the_classes_of_the_baseline(client: Any, server: Any) -> None:
    def answer(request: Any, request_id: str) -> Any:
        reply = server_answer(request, request_id)
        reply.predictions[0].class_index += request.model == "large"
        return reply

    server_answer, server.answer = server.answer, answer
    compared = await client.compare(b"\x07", "tiny", "large", methods=["gradcam", "layercam"], box=(0, 0, 3, 4))
    first, second = (call.request for call in server.calls)

    assert (first.model, list(first.targets)) == ("tiny", [])
    assert (second.model, [target.class_index for target in second.targets]) == ("large", [7])
    assert (compared.baseline.model, compared.candidate.model) == ("tiny", "large")
    assert [found.spearman for found in compared.comparisons] == pytest.approx([1, 1])
    assert not compared.same_prediction


async def test_named_targets_are_explained_with_both_models(client: Any, server: Any) -> None:
    compared = await client.compare(b"\x07", "tiny", "large", targets=["cat"], overlay=None)

    assert [call.request.targets[0].label for call in server.calls] == ["cat", "cat"]
    assert compared.same_prediction


async def test_models_with_different_numbers_of_explanations_are_refused(client: Any, server: Any) -> None:
    def answer(request: Any, request_id: str) -> Any:
        reply = server_answer(request, request_id)
        if request.model == "large":
            del reply.explanations[1:]
        return reply

    server_answer, server.answer = server.answer, answer
    with pytest.raises(camserve.Internal, match="different numbers of explanations"):
        await client.compare(b"\x07", "tiny", "large", methods=["gradcam", "layercam"])


async def test_server_without_resolved_targets_asks_for_names(client: Any, server: Any) -> None:
    def answer(request: Any, request_id: str) -> Any:
        reply = server_answer(request, request_id)
        reply.explanations[0].ClearField("resolved_target")
        return reply

    server_answer, server.answer = server.answer, answer
    with pytest.raises(camserve.FailedPrecondition, match="name the targets"):
        await client.compare(b"\x07", "tiny", "large")
