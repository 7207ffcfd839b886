"""Parity: every map of the catalogue is about as close to the truth as plain float32."""

from dataclasses import replace

import numpy as np
import pytest

from methods.parity import MODELS, Case, captured, subjects
from methods.parity.cams import grad_cam
from methods.parity.catalogue import CASES
from methods.tools import gap

FAST = ("resnet18, biases drawn", "efficientnet_lite0", "vit_b_16")
"""Models that are loaded fast, the fastest first; the last one is for the methods of attention."""


def fast():
    """Return one case for each method and oracle, without oracles of another formula."""
    result = {}
    for case in CASES:
        if case.model in FAST and case.least is None:
            key = case.method, case.oracle
            result[key] = min(result.get(key, case), case, key=lambda each: FAST.index(each.model))
    return list(result.values())


QUICK = fast()


def cases(*, alike):
    """Return the cases whose oracle computes another formula, or those whose oracle computes the same."""
    chosen = (case for case in CASES if (case.least is not None) == alike)
    return [pytest.param(case, id=str(case), marks=() if case in QUICK else pytest.mark.slow) for case in chosen]


@pytest.mark.parametrize("case", cases(alike=False))
def test_map_is_as_exact_as_plain_float32(case):
    """On the first photo of the model."""
    assert replace(case, photos=1).distances().ratio <= 1


SEVERAL = [case for case in CASES if case.least is None and min(case.photos, len(MODELS[case.model][2])) > 1]


@pytest.mark.slow
@pytest.mark.parametrize("case", SEVERAL, ids=str)
def test_map_is_as_exact_as_plain_float32_on_every_photo(case):
    assert case.distances().ratio <= 1


@pytest.mark.parametrize("case", cases(alike=True))
def test_map_correlates_with_an_oracle_of_another_formula(case):
    assert case.likeness() >= case.least


def test_no_case_is_listed_twice():
    assert len({str(case) for case in CASES}) == len(CASES)


GRAD_CAM = Case("gradcam", "efficientnet_lite0", "GradCAM", grad_cam("GradCAM"))
"""A case to plant faults in."""


def mirrored(subject):
    return subject.ours("gradcam")[:, ::-1]


def one_weight_wrong(subject):
    """Grad-CAM with one of 1,280 weights wrong by a hundredth, that of the channel which adds most to the map."""
    activations, gradients = captured(subject)
    weights = gradients.mean((1, 2))
    weights[np.abs(weights * activations.max((1, 2))).argmax()] *= 1.01
    return np.einsum("k,kij->ij", weights, activations)


def ten_times_worse(subject):
    """A map with ten times the largest error of plain float32, in another direction."""
    truth = GRAD_CAM.theirs(subject.exact)
    plain = max(GRAD_CAM.plain(subject), key=lambda each: gap(each, truth))
    return truth - 10 * (plain - truth)


@pytest.mark.parametrize("fault", [mirrored, one_weight_wrong, ten_times_worse])
def test_parity_rule_detects_a_planted_fault(fault):
    case = replace(GRAD_CAM, ours=fault)
    assert case.on(subjects(case.model)[0]).ratio > 1
