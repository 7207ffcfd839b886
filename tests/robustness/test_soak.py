"""Short forms of the long runs of `make soak`, which checks the figures that need more time."""

import pytest

from robustness import soak

pytestmark = pytest.mark.slow
SECONDS = 6


@pytest.fixture(scope="module")
def server():
    with soak.served(soak.MODEL, *map(soak.SOAK_MODEL.format, ("poisoned", "leaking"))) as server:
        yield server


def test_server_at_saturation_answers_or_refuses_and_leaks_nothing(server):
    """The speed is left to `make soak`, on an idle machine."""
    report = soak.saturation(server, 6, 1, rounds=1)

    assert [line for line in report.broken if line.partition(":")[0] not in soak.SPEED] == []
    assert report.figures["answers"].keys() == {"OK", "RESOURCE_EXHAUSTED"}


@pytest.mark.parametrize(
    ("model", "detected"),
    [
        ("poisoned", set()),
        ("leaking", {"hooks more than before", "heap of the engine in use more than before, MB"}),
    ],
)
def test_soak_leaks_nothing_and_detects_a_planted_leak(model, detected, server):
    """The leaking model shows that the checks can fail.

    A leak grows in every round of load. A cache that fills late, such as oneDNN's of a batch size that comes late on a
    busy machine, does not grow in the second round.
    """
    broken, answers = _broken(server, model)
    if broken:
        broken &= _broken(server, model)[0]

    assert broken == detected
    assert {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED"} <= answers


def _broken(server, model):
    """Return the names of the figures beyond their limit, and the codes of all answers."""
    report = soak.soak(server, model, SECONDS, every=0.2)
    names = {line.partition(":")[0] for line in report.broken}
    return names - {soak.MEMORY}, report.figures["answers"].keys()  # the memory says little after so short a time
