"""The long runs of `make soak`, in a short form; what is too short here to be held is held there."""

import pytest

from robustness import soak

pytestmark = pytest.mark.slow
SECONDS = 6


@pytest.fixture(scope="module")
def server():
    with soak.served(soak.MODEL, *map(soak.WATCHED.format, ("poisoned", "leaking"))) as one:
        yield one


def test_server_at_saturation_answers_or_refuses_and_leaks_nothing(server):
    """How fast is for `make soak`, on a machine that does nothing else."""
    report = soak.saturation(server, 6, 1, rounds=1)

    assert [line for line in report.broken if line.partition(":")[0] not in soak.SPEED] == []
    assert report.figures["answers"].keys() == {"OK", "RESOURCE_EXHAUSTED"}


@pytest.mark.parametrize(
    ("model", "seen"),
    [
        ("poisoned", set()),
        ("leaking", {"hooks more than before", "heap of the engine in use more than before, MB"}),
    ],
)
def test_soak_leaves_nothing_behind_and_detects_a_planted_leak(model, seen, server):
    """The detector is itself shown a leak, which fails the check that a sound model keeps."""
    report = soak.soak(server, model, SECONDS, every=0.2)
    broken = {line.partition(":")[0] for line in report.broken}

    assert broken - {soak.MEMORY} == seen  # the system's own count of memory says little in so short a time
    assert {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED"} <= report.figures["answers"].keys()
