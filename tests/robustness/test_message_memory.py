"""Memory of a server that is sent many large messages at once, measured in a process of its own."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

import fork_server
from camserve_server.api import deserialization
from robustness import held_calls, nets
from robustness import test_expansion as expansion
from server_process import server_process

pytestmark = pytest.mark.slow  # servers that receive hundreds of MiB

MIB = 2**20
MODEL, TESTS = nets.TINY, Path(__file__).parents[1]
FLAGS = ("--threads", "1", "--http-address", "0")
MAX_GROWTH = 2 * deserialization.MESSAGE_MEMORY
MAX_HELD = deserialization.MESSAGE_MEMORY
CALLERS = 8
KINDS = [(held_calls.HttpCall, 12), (held_calls.GrpcCall, 24)]

UNLIMITED = f"""
from camserve_server.api import deserialization
deserialization.MAX_FIELDS = deserialization.MESSAGE_MEMORY = deserialization.MEMORY_FACTOR = 2**50
{fork_server.SERVER}
"""
"""Program of a server that has no limits on the memory of messages."""
PATIENT = """
from camserve_server.api import connection_limits
connection_limits.RECEIVE_TIMEOUT = 600.0
"""
"""Code that keeps the slots of messages that do not arrive: how many there are does not depend on the time."""
UNBOUNDED = """
from camserve_server.api import deserialization
deserialization.MAX_RECEIVING = 2**50
"""
"""Code that takes the limit on messages received at the same time away."""


def status_bytes(server, name):
    status = Path(f"/proc/{server.pid}/status").read_text()
    return 1024 * int(status.partition(f"{name}:")[2].split()[0])


def growth(server, act):
    """Return the result of a function, and the bytes by which the server's main process grew meanwhile at its peak."""
    Path(f"/proc/{server.pid}/clear_refs").write_text("5")  # resets the peak to the current size: proc(5)
    before = status_bytes(server, "VmRSS")
    result = act()
    return result, status_bytes(server, "VmHWM") - before


def send_bombs(server, bombs):
    """Send messages that are small only in compressed form, all at once; return the status codes."""
    with grpc.insecure_channel(server.address) as channel, ThreadPoolExecutor(CALLERS) as callers:
        return Counter(callers.map(lambda bomb: expansion.refusal(channel, *bomb).code().name, bombs))


def finish(calls):
    """Finish all calls at once; return how many were refused."""
    with ThreadPoolExecutor(len(calls)) as callers:
        return sum(callers.map(lambda call: call.finish(), calls))


def hold(server, kind, count, least):
    """Hold calls back just before their ends; return them, and the bytes by which the server grows with them."""
    finish([kind(server)])  # what the first call costs
    calls = [kind(server) for _ in range(count)]
    _, grown = growth(server, lambda: held_calls.hold(server, calls, least))
    return calls, grown


def bombs():
    return [(expansion.EXPLAIN, expansion.methods()), (expansion.INFER, expansion.numbers(3 * MIB))]


@pytest.fixture(scope="module")
def server():
    with server_process((MODEL,), *FLAGS, forked=True, cwd=TESTS, program=PATIENT + fork_server.SERVER) as server:
        send_bombs(server, bombs())
        yield server


def test_many_small_messages_that_expand_stay_within_the_memory_limits(server):
    """Without the check, eight messages took 3.5 GiB of methods and 1.5 GiB of numbers."""
    codes, grown = growth(server, lambda: send_bombs(server, bombs() * (CALLERS // 2)))

    assert codes.keys() <= {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}
    assert codes.total() == CALLERS
    assert grown <= MAX_GROWTH


@pytest.mark.parametrize(("kind", "count"), KINDS)
def test_many_large_messages_at_once_stay_within_the_memory_limits(kind, count, server):
    calls, held = hold(server, kind, count, least=deserialization.MAX_RECEIVING)
    refused, finished = growth(server, lambda: finish(calls))

    assert held <= MAX_HELD
    assert refused == count
    assert finished <= MAX_GROWTH


def test_server_without_the_limits_takes_more_memory():
    """Control: the measurement finds the memory of a single message of less than half the largest size."""
    with server_process((MODEL,), *FLAGS, forked=True, cwd=TESTS, program=UNLIMITED) as server:
        part = expansion.EXPLAIN, expansion.methods()[: 3 * MIB]
        _, grown = growth(server, lambda: send_bombs(server, [part]))

    assert grown > MAX_GROWTH


@pytest.mark.parametrize(("kind", "count"), KINDS)
def test_server_that_receives_any_number_of_messages_at_once_takes_more_memory(kind, count):
    """Control: without the limit on messages that are received, the server keeps them all."""
    program = f"{PATIENT}{UNBOUNDED}{fork_server.SERVER}"
    with server_process((MODEL,), *FLAGS, forked=True, cwd=TESTS, program=program) as server:
        calls, held = hold(server, kind, count, least=count)
        for call in calls:
            call.close()

    assert held > MAX_HELD
