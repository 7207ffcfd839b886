"""Parity: every map of the catalogue is about as close to the truth as plain float32."""

from dataclasses import replace

import numpy as np
import pytest

from methods.parity import MODELS, Case, captured, subjects
from methods.parity.cams import grad_cam
from methods.parity.catalogue import CASES
from methods.tools import gap

LARGE = ("densenet121", "resnet50", "convnext_tiny", "vgg16")
"""Models whose layers are like those of the others, and that take long to load and to run in float64."""


def slow():
    """Return the cases that other models of the table show as well, and those of vgg16, whose weights take seconds."""
    shown, result = {(case.method, case.oracle) for case in CASES if case.model not in LARGE}, []
    for case in sorted((case for case in CASES if case.model in LARGE), key=lambda case: LARGE.index(case.model)):
        if case.model == "vgg16" or (case.method, case.oracle) in shown:
            result.append(case)
        shown.add((case.method, case.oracle))
    return result


SLOW = slow()


def cases(*, alike):
    """Return the cases whose oracle computes another formula, or those whose oracle computes the same."""
    chosen = (case for case in CASES if (case.least is not None) == alike)
    return [pytest.param(case, id=str(case), marks=pytest.mark.slow if case in SLOW else ()) for case in chosen]


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
