"""Parity: every map of the catalogue is about as close to the truth as plain float32."""

from dataclasses import replace

import numpy as np
import pytest

from methods.parity import Case, captured, subjects
from methods.parity.cams import grad_cam
from methods.parity.catalogue import CASES
from methods.tools import gap

ALIKE = [case for case in CASES if case.least is not None]
SAME = [case for case in CASES if case.least is None]


@pytest.mark.parametrize("case", SAME, ids=str)
def test_our_map_is_as_exact_as_plain_float32(case):
    assert case.distances().ratio <= 1


@pytest.mark.parametrize("case", ALIKE, ids=str)
def test_our_map_correlates_with_an_oracle_of_another_formula(case):
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
    plain = max(GRAD_CAM.plain(subject), key=lambda one: gap(one, truth))
    return truth - 10 * (plain - truth)


@pytest.mark.parametrize("fault", [mirrored, one_weight_wrong, ten_times_worse])
def test_parity_rule_detects_a_planted_fault(fault):
    case = replace(GRAD_CAM, ours=fault)
    for subject in subjects(case.model):
        assert case.on(subject).ratio > 1
