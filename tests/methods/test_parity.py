"""Parity: every case of the catalogue is within its bound."""

import numpy as np
import pytest

from methods.parity import Case, correlation, furthest
from methods.parity.catalogue import CASES


@pytest.mark.parametrize("case", CASES, ids=str)
def test_our_map_is_within_the_bound_of_the_oracles(case):
    assert case.holds(case.deviation())


def test_no_case_is_listed_twice():
    assert len({str(case) for case in CASES}) == len(CASES)


@pytest.mark.parametrize(("measure", "bound"), [("max", 1e-5), ("correlation", 0.999)])
def test_a_map_that_is_turned_round_is_caught(measure, bound):
    """A planted fault: either measure can tell a map from its mirror image."""
    case = Case(
        "gradcam",
        "efficientnet_lite0",
        "itself, mirrored",
        lambda subject: subject.ours("gradcam")[:, ::-1],
        bound,
        measure,
    )
    assert not case.holds(case.deviation())


def test_the_measures_are_what_they_say():
    ours, theirs = np.array([[1.0, 2.0], [3.0, 4.5]]), np.array([[1.0, 2.0], [3.0, 4.0]])
    assert furthest(ours, theirs) == pytest.approx(0.125)
    assert correlation(ours, -theirs) < -0.98
