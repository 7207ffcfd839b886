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
from robustness import tree
from server_process import server_process
from support import wait_until

MODEL = "small=torchvision:mobilenet_v3_small?weights=none&size=64"
PHOTO = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
STUCK, SILENT, RESETS, SECONDS = 200, 400, 5000, 3
CALLS = 100


@contextlib.contextmanager
def flood(address, *arguments):
    """Flood inside the block; yield a dict that has the attacker's figures after the block."""
    command = [sys.executable, "-m", "robustness.http2_flood", address, *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    figures = {}
    with subprocess.Popen(command, cwd=Path(__file__).parents[1], **pipes) as process:
        assert process.stdout.readline() == "begun\n"
        try:
            yield figures
        finally:
            output, _ = process.communicate()
            figures |= json.loads(output)


def neighbour(client):
    """Make one call after the other; each must be answered."""
    for _ in range(CALLS):
        client.explain(PHOTO, overlay=None, timeout=60)


@pytest.mark.slow
def test_callers_are_answered_during_a_flood_and_its_connections_end():
    flags = ("--threads", "1", "--idle-seconds", "4", "--connection-idle-seconds", "6")
    with server_process((MODEL,), *flags) as server, camserve.Client(server.address, retries=0) as client:
        neighbour(client)
        before = tree.files(server.pid)
        with flood(server.address, "stuck", STUCK) as stuck, flood(server.address, "silent", SILENT) as silent:
            wait_until(lambda: tree.files(server.pid) >= before + SILENT)
            with flood(server.address, "reset", RESETS, SECONDS) as resets:
                neighbour(client)
                with camserve.Client(server.address, retries=0) as newcomer:
                    assert newcomer.health() is camserve.Health.SERVING
            neighbour(client)
            # Fewer than before: by then the client's own connection is idle too, and the server closes it.
            wait_until(lambda: tree.files(server.pid) < before)

    assert resets["sent"] == RESETS * SECONDS
    assert stuck == {"ended": STUCK, "open": 0}
    assert silent == {"open": 0}


@pytest.mark.slow
def test_without_the_limits_stuck_calls_are_detected():
    """Control: a server without the limits fails the checks above."""
    flags = ("--threads", "1", "--idle-seconds", "3600")
    with server_process((MODEL,), *flags) as server, camserve.Client(server.address, retries=0) as client:
        neighbour(client)
        before = tree.files(server.pid)
        with flood(server.address, "stuck", STUCK) as stuck:
            neighbour(client)
            open_files = tree.files(server.pid) - before

    assert open_files == STUCK // 100
    assert stuck == {"ended": 0, "open": STUCK // 100}
