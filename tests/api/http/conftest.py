"""Servers with HTTP: one that the tests of a module share, and one for each test."""

import contextlib
import sys

import grpc
import pytest

from api.running_server import SETTINGS, write_nets
from support import serving as serving_in_thread


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The tiny model, as an argument of `--model`."""
    folder = tmp_path_factory.mktemp("nets")
    with pytest.MonkeyPatch.context() as patch:
        spec = write_nets(folder)
        patch.syspath_prepend(folder)
        patch.delitem(sys.modules, "camserve_nets", raising=False)
        yield spec
        sys.modules.pop("camserve_nets", None)


@pytest.fixture(scope="module")
def serve(model):
    """Start a server with settings, for the length of a block."""

    @contextlib.contextmanager
    def start(**settings):
        with serving_in_thread(**{**SETTINGS, "models": (model,), "http_address": "0", **settings}) as served:
            yield served

    return start


@pytest.fixture(scope="module")
def served(serve):
    with serve(admin=True) as server:
        yield server


@pytest.fixture(scope="module")
def port(served):
    return served.http_port


@pytest.fixture(scope="module")
def channel(served):
    with grpc.insecure_channel(served.address) as channel:
        yield channel
