"""One caller's heaviest requests take at most 400 MiB of memory more than an idle server has."""

import time

import pytest

from camserve_server.core.process import IDLE_TIMEOUT
from robustness import memory_loads, tree
from robustness.memory_loads import LOADS, MIB, Caller, Meter, explaining
from server_process import server_process

MAX_GROWTH = 400 * MIB
SLOW = {"forward passes", "layers measured", "64 maps of 3 megapixels", "large messages"}
"""The loads of every run of the slow tests; `make test-memory` runs all."""


def warm_up(process):
    """Send a few requests, and wait until the server has released the memory that it does not need at rest."""
    with Caller(process.address) as caller:
        caller.send(explaining(), 4)
    time.sleep(IDLE_TIMEOUT + 1)


@pytest.fixture
def resting():
    """A server of the test's own, since what a load leaves counts in the growth of the next; and its meter."""
    with server_process(()) as process:
        warm_up(process)
        yield process, Meter(process.pid)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "load", [pytest.param(load, marks=pytest.mark.slow if load in SLOW else pytest.mark.search) for load in LOADS]
)
def test_heavy_load_of_one_caller_takes_at_most_400_mib(resting, load):
    server, meter = resting
    meter.start()
    with Caller(server.address) as caller:
        outcomes = LOADS[load](caller)
    grown = meter.grown() / MIB

    assert set(outcomes) <= {"OK", "RESOURCE_EXHAUSTED"}
    assert outcomes["OK"] > 0
    assert grown <= MAX_GROWTH / MIB
    assert meter.processes() == tree.pids(server.pid)


@pytest.mark.slow
def test_server_without_batch_limits_takes_more_memory():
    with server_process((), "--max-batch-mib", "4096", "--max-batch-rows", "32", forked=True) as process:
        warm_up(process)
        meter = Meter(process.pid)
        meter.start()
        with Caller(process.address) as caller:
            caller.send(explaining(memory_loads.method("saliency")), 32)

        assert meter.grown() > MAX_GROWTH
