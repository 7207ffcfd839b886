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
    """The leaking model shows that the checks can fail."""
    report = soak.soak(server, model, SECONDS, every=0.2)
    broken = {line.partition(":")[0] for line in report.broken}

    assert broken - {soak.MEMORY} == detected  # the process's memory says little after so short a time
    assert {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED"} <= report.figures["answers"].keys()
