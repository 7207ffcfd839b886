"""Floods of unused connections, unfinished calls and cancelled calls: others are answered, and nothing leaks.

`python -m benchmarks neighbours` measures the latency of the other callers.
"""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import camserve
from robustness import nets, tree
from server_process import server_process
from support import wait_until

MODEL, TESTS = nets.TINY, Path(__file__).parents[1]
PHOTO = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
STUCK, SILENT, RESETS, SECONDS = 200, 400, 5000, 1
CALLS = 40


class Flood:
    """A flood by another process."""

    def __init__(self, process):
        self._process = process

    def figures(self):
        """Return the attacker's figures so far; of resets, once all are sent."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@contextlib.contextmanager
def flood(address, *arguments):
    """Flood inside the block."""
    command = [sys.executable, "-m", "robustness.http2_flood", address, *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=TESTS, **pipes) as process:
        assert process.stdout.readline() == "begun\n"
        try:
            yield Flood(process)
        finally:
            process.communicate()


def neighbour(client):
    """Make one call after the other; each must be answered."""
    for _ in range(CALLS):
        client.explain(PHOTO, overlay=None)


@pytest.mark.slow
def test_connections_of_a_flood_end():
    """The limits are short, and no other caller has to be faster than them."""
    limits = ("--idle-seconds", "1", "--connection-idle-seconds", "1")  # real timeout: the attackers send nothing
    with server_process((MODEL,), "--threads", "1", *limits, forked=True, cwd=TESTS) as server:
        before = tree.files(server.pid)
        with flood(server.address, "stuck", STUCK) as stuck, flood(server.address, "silent", SILENT) as silent:
            wait_until(lambda: stuck.figures() == {"ended": STUCK, "open": 0})
            wait_until(lambda: silent.figures() == {"open": 0})
            wait_until(lambda: tree.files(server.pid) <= before)


@pytest.mark.slow
def test_callers_are_answered_during_a_flood():
    """Control of the test above: this server has no limits, and keeps the calls that are stuck."""
    flags = ("--threads", "1", "--idle-seconds", "3600")
    with server_process((MODEL,), *flags, forked=True, cwd=TESTS) as server, patient_client(server) as client:
        neighbour(client)
        before = tree.files(server.pid)
        with flood(server.address, "stuck", STUCK) as stuck, flood(server.address, "silent", SILENT):
            with flood(server.address, "reset", RESETS, SECONDS) as resets:
                neighbour(client)
                with patient_client(server) as newcomer:
                    assert newcomer.health() is camserve.Health.SERVING
                assert resets.figures()["sent"] == RESETS * SECONDS
            neighbour(client)

            assert stuck.figures() == {"ended": 0, "open": STUCK // 100}
            assert tree.files(server.pid) >= before + STUCK // 100


def patient_client(server):
    return camserve.Client(server.address, retries=0, timeout=600)
