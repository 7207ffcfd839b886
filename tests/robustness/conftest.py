"""Fixtures that robustness tests share."""

import grpc
import pytest

from camserve_server.workers import worker
from robustness import nets
from support import serving


@pytest.fixture(scope="module", autouse=True)
def _late_heartbeats():
    """Let worker processes of this process be late, as on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "HEARTBEAT_TIMEOUT", 60)
        yield


@pytest.fixture(scope="module")
def tiny_server():
    """Server in this process with a model of 5 classes and default limits."""
    with serving(models=(nets.TINY,), device="cpu", threads=1) as server:
        yield server


@pytest.fixture(scope="module")
def channel(tiny_server):
    """Connection to the server; tests that need other settings override this fixture."""
    with grpc.insecure_channel(tiny_server.address) as channel:
        yield channel


@pytest.fixture
def ended(monkeypatch):
    """The errors that this process logs when worker processes end."""
    lines = []
    monkeypatch.setattr(worker.log, "error", lambda text, *values, **_: lines.append(text % values))
    return lines
