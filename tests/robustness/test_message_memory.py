"""Memory of a server that is sent many large messages at once, measured in a process of its own."""

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

import fork_server
from camserve_server.api import deserialization
from http_calls import EXPLAIN, post
from robustness import nets
from robustness import test_expansion as expansion
from server_process import server_process

MIB = 2**20
MODEL, TESTS = nets.TINY, Path(__file__).parents[1]
FLAGS = ("--threads", "1", "--http-address", "0")
MAX_GROWTH = 2 * deserialization.MESSAGE_MEMORY
PHOTO = json.dumps({"image": "A" * (10 * MIB)}).encode()
CALLERS = 8

UNLIMITED = f"""
from camserve_server.api import deserialization
deserialization.MAX_FIELDS = deserialization.MESSAGE_MEMORY = deserialization.MEMORY_FACTOR = 2**50
{fork_server.SERVER}
"""
"""Program of a server that has no limits on the memory of messages."""


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


def post_photos(server, count):
    """Post messages of 10 MiB, all at once; return the statuses."""
    with ThreadPoolExecutor(count) as callers:
        return Counter(callers.map(lambda _: post(server.http_port, EXPLAIN, PHOTO).status, range(count)))


def bombs():
    return [(expansion.EXPLAIN, expansion.methods()), (expansion.INFER, expansion.numbers(3 * MIB))]


@pytest.fixture(scope="module")
def server():
    with server_process((MODEL,), *FLAGS, forked=True, cwd=TESTS) as server:
        send_bombs(server, bombs())
        post_photos(server, 1)
        yield server


def test_many_small_messages_that_expand_stay_within_the_memory_limits(server):
    """Without the check, eight messages took 3.5 GiB of methods and 1.5 GiB of numbers."""
    codes, grown = growth(server, lambda: send_bombs(server, bombs() * (CALLERS // 2)))

    assert codes.keys() <= {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}
    assert codes.total() == CALLERS
    assert grown <= MAX_GROWTH


def test_many_large_messages_at_once_stay_within_the_memory_limits(server):
    statuses, grown = growth(server, lambda: post_photos(server, CALLERS))

    assert statuses == {400: CALLERS}
    assert grown <= MAX_GROWTH


@pytest.mark.slow
def test_server_without_the_limits_takes_more_memory():
    """Control: the measurement finds the memory of a single message of half the largest size."""
    with server_process((MODEL,), *FLAGS, forked=True, cwd=TESTS, program=UNLIMITED) as server:
        half = expansion.EXPLAIN, expansion.methods()[: 4 * MIB]
        _, grown = growth(server, lambda: send_bombs(server, [half]))

    assert grown > MAX_GROWTH
