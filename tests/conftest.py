"""Hooks for every test run, and worker processes without the time that torch takes to import."""

import gc

import pytest

from camserve_server.workers import fork_server
from robustness.forking import running_fork_server
from skipped import pytest_terminal_summary

__all__ = ["pytest_terminal_summary"]


def pytest_collection_finish():
    """Take the libraries and pytest's own objects out of the garbage collector's rounds.

    Tests and the code under test run the collector themselves: it took 0.3 s each time with all of them.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def fork_server_process():
    """Fork server for all tests."""
    with running_fork_server() as server:
        yield server


@pytest.fixture(scope="module")
def forked(fork_server_process):
    """Worker processes of the tests start at once; otherwise each imports torch itself, which takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server, "_fork_servers", [fork_server_process])
        yield
