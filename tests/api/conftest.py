"""Servers of the API's tests: one for each test, and one that the tests of a module share."""

import sys

import grpc
import pytest

from api.running_server import SETTINGS, RunningServer, run_server, write_nets
from support import serving as serving_in_thread


@pytest.fixture
def nets(tmp_path, monkeypatch):
    """The tiny model, as an argument of `--model`. Every test gets a fresh module."""
    spec = write_nets(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "camserve_nets", raising=False)
    yield spec
    sys.modules.pop("camserve_nets", None)


@pytest.fixture
def serving(nets):
    """Start a server with settings, for the length of a block."""
    return lambda **settings: run_server(**{"models": (nets,), **settings})


@pytest.fixture
async def server(serving):
    """A server with the default settings, for one test."""
    async with serving() as running:
        yield running


@pytest.fixture(scope="module")
def server_thread(tmp_path_factory):
    """A server with the default settings, in a thread, for all tests of a module."""
    folder = tmp_path_factory.mktemp("nets")
    with pytest.MonkeyPatch.context() as patch:
        spec = write_nets(folder)
        patch.syspath_prepend(folder)
        patch.delitem(sys.modules, "camserve_nets", raising=False)
        with serving_in_thread(**SETTINGS, models=(spec,)) as served:
            yield served
        sys.modules.pop("camserve_nets", None)


@pytest.fixture
async def shared_server(server_thread):
    """The module's server. Tests that pause it, patch it or count its rows take `server` instead."""
    async with grpc.aio.insecure_channel(server_thread.address) as channel:
        yield RunningServer(int(server_thread.address.rpartition(":")[2]), server_thread.pipeline, channel)
