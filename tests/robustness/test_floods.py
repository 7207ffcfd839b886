"""Callers who open what they never use, or take back what they asked for: others hardly notice, and nothing stays."""

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from benchmarks.serving import serving

import camserve
from robustness import tree

MODEL = "small=torchvision:mobilenet_v3_small?weights=none&size=64"
PHOTO = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
STUCK, SILENT, RESETS = 200, 400, 5000
ROUNDS, STRETCH = 3, 1.0


@contextlib.contextmanager
def flood(address, *what):
    """Flood inside the block; yield a dict that has, behind it, what the attacker saw."""
    command = [sys.executable, "-m", "robustness.flood_it", address, *map(str, what)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    seen = {}
    with subprocess.Popen(command, cwd=Path(__file__).parents[1], **pipes) as process:
        assert process.stdout.readline() == "begun\n"
        try:
            yield seen
        finally:
            said, _ = process.communicate(timeout=60)
            seen |= json.loads(said)


def neighbour(client, seconds):
    """How long each call took of somebody who calls one after the other."""
    took, until = [], time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter()
        client.explain(PHOTO, overlay=None, timeout=10)
        took.append(time.perf_counter() - began)
    return took


def until_more(server, least, seconds):
    """How many open files the server has, once it has taken what is there for it to take."""
    until = time.monotonic() + seconds
    while (now := tree.files(server.pid)) < least and time.monotonic() < until:
        time.sleep(0.05)
    return now


def until_back(server, before, seconds):
    """How long it takes until the server has no more open files than before; None if longer than that."""
    began = time.monotonic()
    while time.monotonic() < began + seconds:
        if tree.files(server.pid) <= before:
            return time.monotonic() - began
        time.sleep(0.1)
    return None


def rounds(server, client, count=ROUNDS, rate=RESETS):
    """How long a neighbour's calls take while calls are opened and taken back, and while they are not, in turn."""
    flooded, quiet, made = [], [], []
    for _ in range(count):
        with flood(server.address, "reset", rate, STRETCH + 1) as resets:
            flooded += neighbour(client, STRETCH)
            with camserve.Client(server.address, retries=0) as newcomer:
                assert newcomer.health() is camserve.Health.SERVING
        made.append(resets["a second"])
        quiet += neighbour(client, STRETCH)
    return np.percentile(flooded, 99), np.percentile(quiet, 99), min(made)


def test_a_neighbour_of_stuck_calls_silent_connections_and_resets_hardly_notices_and_all_of_them_go():
    flags = ("--threads", "1", "--idle-seconds", "4", "--connection-idle-seconds", "6")
    with serving((MODEL,), *flags) as server, camserve.Client(server.address, retries=0) as client:
        neighbour(client, 1)
        before, began = tree.files(server.pid), time.monotonic()
        with flood(server.address, "stuck", STUCK) as stuck, flood(server.address, "silent", SILENT) as silent:
            held = until_more(server, before + SILENT, 10) - before
            flooded, quiet, made = rounds(server, client)
            back = until_back(server, before, began + 30 - time.monotonic())

    assert held >= SILENT
    assert made >= 0.9 * RESETS
    assert flooded <= 5 * quiet
    assert back is not None
    assert stuck == {"ended": STUCK, "open": 0}
    assert silent == {"open": 0}


def test_without_the_limits_the_same_flood_is_seen_to_harm_and_to_stay():
    """The detectors above are themselves shown a server that takes any number of calls, and waits for ever."""
    flags = ("--threads", "1", "--idle-seconds", "3600", "--max-streams", "10000")
    with serving((MODEL,), *flags) as server, camserve.Client(server.address, retries=0) as client:
        neighbour(client, 1)
        before = tree.files(server.pid)
        quiet = np.percentile(neighbour(client, STRETCH), 99)  # before: of such a flood it is long in recovering
        with flood(server.address, "stuck", STUCK) as stuck:
            try:
                flooded, _, _ = rounds(server, client, 1, 4 * RESETS)
            except camserve.CamserveError:  # a neighbour's call that does not get through
                flooded = np.inf
            back = until_back(server, before, 4)

    assert flooded > 5 * quiet
    assert back is None
    assert stuck == {"ended": 0, "open": STUCK // 100}
