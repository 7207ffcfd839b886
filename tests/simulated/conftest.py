"""The simulated GPU, for tests that have a process of their own."""

from pathlib import Path

import pytest

import needs
from camserve_server import models
from simulated import device

HERE = Path(__file__).parent


@pytest.fixture(scope="session", autouse=True)
def _simulated(request):
    if any(HERE not in item.path.parents for item in request.session.items):
        pytest.skip(needs.SIMULATED)
    device.register()


@pytest.fixture(scope="session")
def pair():
    """Return a function that loads a model on the CPU and on the simulated GPU, each once."""
    known = {}

    def loaded(spec):
        if spec not in known:
            known[spec] = tuple(models.load(models.parse(spec), place) for place in ("cpu", f"{device.NAME}:0"))
        return known[spec]

    return loaded


@pytest.fixture
def record():
    """Operations of the simulated GPU, from the start of the test on."""
    device.RECORD.clear()
    return device.RECORD
