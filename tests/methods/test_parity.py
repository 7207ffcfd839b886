"""Parity: every map of the catalogue is about as close to the truth as plain float32."""

from dataclasses import replace

import numpy as np
import pytest

from methods.parity import NARROW, SMALL, Case, captured, subjects
from methods.parity.cams import grad_cam
from methods.parity.catalogue import CASES
from methods.tools import gap

ON_SMALL = ("resnet18, biases drawn", "efficientnet_lite0")
"""Models of which a small one takes the place in fast tests; attention has such tests in `engine/test_attention.py`."""


def needs_channels(case):
    """Return True if a map is empty or nearly so on the few channels of the small model, so that oracles disagree."""
    return case.method in ("fullgrad", "refinecam") or "three layers" in case.oracle


def fast():
    """Return one case for each method and oracle, on the small model if possible; none with another formula.

    On the small model FEM has too few channels, and `test_stated_formulas.py` has it.
    """
    known = sorted(
        (case for case in CASES if case.least is None and case.method != "fem"),
        key=lambda case: case.model == ON_SMALL[0],
    )
    cases = {(case.method, case.oracle): case for case in known if case.model in ON_SMALL}.values()
    cases = [replace(case, photos=1, model=case.model if needs_channels(case) else SMALL) for case in cases]
    return sorted(cases, key=lambda case: case.model)


def cases(*, alike):
    """Return the cases whose oracle computes another formula, or those whose oracle computes the same."""
    return [case for case in CASES if (case.least is not None) == alike]


@pytest.mark.parametrize("case", fast(), ids=str)
def test_map_of_a_small_model_is_as_exact_as_plain_float32(case):
    assert case.distances().ratio <= 1


EMBEDDED, DRAWN = ON_SMALL[1], ON_SMALL[0]


def each_on_main_models():
    """Return every method and oracle on the embedded model and ViT, or else on one; and Grad-CAM on every architecture.

    All methods read a layer in the same way, so that an architecture whose layers are misread fails with Grad-CAM. What
    the fast tests have on a model of random weights is left out, and SESS, which takes longest of all.
    """
    known = [case for case in cases(alike=False) if case.model != DRAWN and case.method != "sess"]
    chosen = {(case.method, case.oracle): case for case in reversed(known)}.values()
    fast_ones = {(case.method, case.oracle) for case in fast()}
    return on_narrow(
        case
        for case in known
        if case.model in (EMBEDDED, "vit_b_16")
        or (case in chosen and (case.method, case.oracle) not in fast_ones)
        or (case.method == "gradcam" and case.oracle.endswith(" GradCAM"))
    )


def on_narrow(cases):
    """Put cases on one photo, and on smaller models of the same architectures; `make parity` has whole ones."""
    return [replace(case, photos=1, model=NARROW.get(case.model, case.model)) for case in cases]


def alike_on_one_model():
    """Return the cases whose oracle computes another formula, each on one model."""
    chosen = {(case.method, case.oracle): case for case in reversed(cases(alike=True))}.values()
    small = [replace(case, model=SMALL) if case.method == "scorecam" else case for case in chosen]
    return on_narrow(sorted(small, key=lambda case: case.model))


@pytest.mark.slow
@pytest.mark.parametrize("case", each_on_main_models(), ids=str)
def test_map_is_as_exact_as_plain_float32(case):
    assert case.distances().ratio <= 1


@pytest.mark.slow
@pytest.mark.parametrize("case", alike_on_one_model(), ids=str)
def test_map_correlates_with_an_oracle_of_another_formula(case):
    assert case.likeness() >= case.least


def test_no_case_is_listed_twice():
    assert len({str(case) for case in CASES}) == len(CASES)


GRAD_CAM = Case("gradcam", SMALL, "GradCAM", grad_cam("GradCAM"))
"""A case to plant faults in."""


def mirrored(subject):
    return subject.ours("gradcam")[:, ::-1]


def one_weight_wrong(subject):
    """Grad-CAM with the weight wrong by a hundredth of the channel that adds most to the map."""
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
