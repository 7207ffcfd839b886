"""Short forms of the long runs of `make soak`, which checks the figures that need more time."""

from collections import Counter

import pytest

from robustness import soak

pytestmark = pytest.mark.slow
SECONDS = 2  # real timeout: the load goes on until enough was answered
PLANTED = {"hooks more than before", "heap of the engine in use more than before, MB"}
NEED_MORE_TIME = {*soak.SPEED, soak.MEMORY}
"""Figures that `make soak` checks: the speed, on an idle machine, and the memory's slope."""


@pytest.fixture(scope="module")
def server():
    with soak.served(soak.MODEL, *map(soak.SOAK_MODEL.format, ("poisoned", "leaking"))) as server:
        yield server


def has_all(*codes, count=1):
    """Return a function that is true of answers with each of these codes, and with this number of OK."""

    def enough(answers):
        found = Counter(answer.code.name for answer in answers)
        return found["OK"] >= count and all(found[code] for code in codes)

    return enough


def test_server_at_saturation_answers_or_refuses_and_leaks_nothing(server):
    enough = has_all("OK", "RESOURCE_EXHAUSTED")
    broken, answers = _broken_twice(
        lambda: soak.saturation(server, SECONDS, rounds=1, enough=enough), lambda found: not found
    )

    assert broken == set()
    assert answers == {"OK", "RESOURCE_EXHAUSTED"}


@pytest.mark.parametrize(
    ("model", "batches", "detected", "possible"),
    [
        ("poisoned", 5, set(), set()),
        ("leaking", 12, PLANTED, {*PLANTED, "objects in the engine more than before"}),  # it adds a hook in each tenth
    ],
)
def test_soak_leaks_nothing_and_detects_a_planted_leak(model, batches, detected, possible, server):
    """The leaking model shows that the checks can fail. Many batches also leave many objects."""
    codes = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED"}
    enough = has_all(*codes, count=batches * soak.QUEUE)  # at least so many batches
    broken, answers = _broken_twice(
        lambda: soak.soak(server, model, SECONDS, every=0.2, enough=enough),
        lambda found: detected <= found <= possible,
    )

    assert detected <= broken <= possible
    assert codes <= answers


def _broken_twice(load, is_right):
    """Return the names of the figures beyond their limit in two rounds of load, and the codes of all answers.

    A leak grows in every round. A cache that fills late, such as oneDNN's of a batch size that comes late on a busy
    machine, does not grow in the second round. A first round with the right names needs no second one.
    """
    report = load()
    broken, answers = _names(report), set(report.figures["answers"])
    if not is_right(broken):
        report = load()
        broken &= _names(report)
        answers |= set(report.figures["answers"])
    return broken, answers


def _names(report):
    return {line.partition(":")[0] for line in report.broken} - NEED_MORE_TIME
