"""A server that is told to stop loses nothing that it accepted."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

import camserve
from support import PHOTOS

SERVE = [sys.executable, "-c", "from camserve_server.cli import main; main()", "serve", "--log-format", "json"]
MODEL = "small=torchvision:mobilenet_v3_small?weights=none&size=64"


@contextlib.contextmanager
def server(log):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    process = subprocess.Popen([*SERVE, "--model", MODEL, "--address", address], stderr=log)
    try:
        with camserve.Client(address, retries=0) as client:
            warm(client)
        yield process, address
    finally:
        process.kill()
        process.wait()


def warm(client):
    give_up = time.monotonic() + 60
    while time.monotonic() < give_up:
        with contextlib.suppress(camserve.Unavailable):
            if client.health() is camserve.Health.SERVING:
                return
        time.sleep(0.05)
    pytest.fail("the server did not start")


@pytest.mark.parametrize("_round", range(5))
def test_what_was_accepted_when_sigterm_came_is_answered(_round, tmp_path):
    """24 clients without retries: every request that the server completed reached its client, none failed midway."""
    photo = PHOTOS["rocket"].read_bytes()
    outcomes, done = [], threading.Event()

    def work(address):
        with camserve.Client(address, retries=0) as client:
            while not done.is_set():
                try:
                    client.explain(photo)
                    outcomes.append("OK")
                except camserve.CamserveError as error:
                    outcomes.append(type(error).__name__)
                    return

    log = tmp_path / "log"
    with log.open("wb") as file, server(file) as (process, address):
        threads = [threading.Thread(target=work, args=(address,)) for _ in range(24)]
        for thread in threads:
            thread.start()
        while outcomes.count("OK") < 30 + 10 * _round:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        code = process.wait(30)
        done.set()
        for thread in threads:
            thread.join()

    entries = [json.loads(line) for line in log.read_text().splitlines()]
    completed = [entry for entry in entries if entry["message"] == "Explain"]

    assert code == 0
    assert set(outcomes) == {"OK", "Unavailable"}
    assert sum(entry["code"] == "OK" for entry in completed) == outcomes.count("OK")
    assert {entry["code"] for entry in completed} <= {"OK", "UNAVAILABLE"}
