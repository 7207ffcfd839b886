"""Fixtures that several test folders share, and hooks for every test run."""

import gc
import logging
import random
import shutil
import sys
import zlib
from types import ModuleType

import numpy as np
import pytest
import torch

import fork_server as programs
from camserve_server import models
from camserve_server.models import ModelSpec, probe_cache
from camserve_server.workers import fork_server
from methods.tools import Toy, photo
from robustness.forking import running_fork_server
from skipped import pytest_terminal_summary
from support import TINY, without_canaries

__all__ = ["pytest_terminal_summary"]


def pytest_collection_finish():
    """Exclude the objects of the libraries and of pytest from garbage collection.

    Tests and the code under test call the collector, and each call took 0.3 s with all of these objects.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef):
    seed(fixturedef.argname)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    seed(item.nodeid)


def seed(name):
    """Seed the global generators: random weights, some of which are unfit for a test, depend on no test before it."""
    number = zlib.crc32(name.encode())
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 -- libraries draw from it
    torch.manual_seed(number)


@pytest.fixture(scope="module", autouse=True)
def _objects_of_earlier_modules():
    """Exclude what earlier modules have imported, too: after them, test_poison.py took three times as long as alone."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def real_cache_folder(tmp_path_factory):
    """Give this run a cache of probed models, instead of the user's; the value is the function that this replaces."""
    folder, cache = probe_cache.folder, tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe_cache, "folder", lambda: cache / "camserve")
        patch.setitem(programs.CACHE, "XDG_CACHE_HOME", str(cache))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def _without_canaries():
    with without_canaries():
        yield


@pytest.fixture(scope="session")
def fork_server_process():
    """Fork server for all tests."""
    with running_fork_server() as server:
        yield server


@pytest.fixture(scope="module")
def forked(fork_server_process):
    """Start worker processes from the fork server: otherwise each imports torch, which takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server, "_fork_servers", [fork_server_process])
        yield


@pytest.fixture(autouse=True)
def _logger_as_before():
    """Undo `logs.configure` of commands: pytest's `caplog` needs the server's logger to propagate to the root."""
    logger = logging.getLogger("camserve_server")
    before = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


@pytest.fixture(scope="module")
def browser():
    """Chromium, for tests that are skipped without it."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 -- few tests need it

    with sync_playwright() as playwright:
        program = shutil.which("chromium") or shutil.which("chromium-browser")
        running = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A small model that loads immediately."""
    folder = tmp_path_factory.mktemp("nets")
    (folder / "server_nets.py").write_text(TINY)
    sys.path.insert(0, str(folder))
    yield "tiny=server_nets:tiny?size=32"
    sys.path.remove(str(folder))


@pytest.fixture
def gpus(monkeypatch):
    """Make torch report GPUs with these compute capabilities."""

    def see(*capabilities):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90a", "compute_120"])

    return see


@pytest.fixture(scope="session")
def lite0():
    """The embedded model with its ImageNet weights."""
    return models.load(models.parse("efficientnet_lite0"))


@pytest.fixture(scope="session")
def resnet():
    """A model with random weights, for small images."""
    return models.load(models.parse("torchvision:resnet18?weights=none&size=64"))


@pytest.fixture(scope="session")
def photos():
    """Photos by name, each uint8 [224,224,3]."""
    return {name: photo(name) for name in ("chelsea", "coffee", "astronaut", "rocket", "china", "flower")}


@pytest.fixture
def plant(monkeypatch):
    """Return a function that loads a model from a factory, as from a user's own module."""

    def load(factory, size=16, **options):
        module = ModuleType("planted")
        module.make = factory
        monkeypatch.setitem(sys.modules, "planted", module)
        return models.load(ModelSpec("planted", "planted", "make", size=size, **options))

    return load


@pytest.fixture
def smooth(plant):
    """A model without kinks.

    At a ReLU, rounding may move a value across zero, so that the gradient jumps. In the embedded model, float32 and
    float64 differ by 2 % of the largest value for noisy photos.
    """
    return plant(lambda: Toy(lambda net, images: torch.tanh(net.layer(images))))
