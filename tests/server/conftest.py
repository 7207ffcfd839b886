"""A model that costs next to nothing, and GPUs that are not there."""

import logging
import sys

import pytest
import torch

from support import TINY


@pytest.fixture(autouse=True)
def _logger_as_before():
    """Undo `logs.configure` of commands: pytest's `caplog` gets what the server's logger hands on to the root."""
    logger = logging.getLogger("camserve_server")
    before = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A model that is there at once."""
    folder = tmp_path_factory.mktemp("nets")
    (folder / "server_nets.py").write_text(TINY)
    sys.path.insert(0, str(folder))
    yield "tiny=server_nets:tiny?size=32"
    sys.path.remove(str(folder))


@pytest.fixture
def gpus(monkeypatch):
    """Have torch see GPUs, by their compute capabilities."""

    def see(*capabilities):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90a", "compute_120"])

    return see
