"""Device of a worker: all its threads use it, and a process that can no longer use it is replaced."""

import os
import signal
import sys

import numpy as np
import pytest

import camserve
import fake_device
from camserve_server.app import server
from camserve_server.core import devices
from camserve_server.core.errors import ConfigError, WorkerLost
from camserve_server.engine.values import Row
from camserve_server.methods.values import MethodCall
from camserve_server.models import parse
from camserve_server.models.values import Pass
from camserve_server.serving import pool_health, worker_pool
from camserve_server.targets import anything
from camserve_server.workers import Setup, Worker, fork_server
from robustness.forking import running_fork_server
from support import TINY, serving, wait_until

NETS = (
    TINY.replace("return nn.Sequential(", "return nn.Sequential(Waits(), ")
    + '''

class Waits(nn.Module):
    """Waits for the device, as a model does that reads a number from it."""

    def forward(self, x):
        from camserve_server.core.devices import device_for

        device_for("cpu:1").synchronize()
        return x
'''
)
MODEL = "tiny=device_nets:tiny?size=32"
IMAGE = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("nets")
    (path / "device_nets.py").write_text(NETS)
    return path


@pytest.fixture(scope="module")
def fork_server_process(folder):
    with running_fork_server(f"import fake_device; fake_device.install({str(folder / 'log')!r})") as fork_server_:
        yield fork_server_


@pytest.fixture
def lost():
    """Names of the models that a worker could not load again."""
    return []


@pytest.fixture
def worker(folder, fork_server_process, monkeypatch, lost):
    """A worker with a model on the device, and the model's description."""
    monkeypatch.setattr(fork_server, "_fork_servers", [fork_server_process])
    (folder / "log").write_text("")
    setup = Setup(
        fake_device.NAME, 1, shares_device=True, path=(str(folder), *sys.path), log_level="critical", measure=True
    )
    process = Worker(setup, on_model_lost=lost.append)
    try:
        yield process, process.load("tiny", parse(MODEL))
    finally:
        process.close()
        (folder / "fatal").unlink(missing_ok=True)


def batch(info, layer=""):
    layers = (layer or info.default_layer,)
    return Pass(info.name, "cam", (32, 32), layers), [Row(IMAGE, anything(info), (MethodCall("gradcam"),))]


def threads_of(uses):
    """Return the threads that used the device, after checking that it was the current device of each."""
    assert [use for use in uses if use[1] != 1] == []
    return {thread for thread, _, _ in uses}


def test_all_threads_of_a_worker_use_its_device(worker, folder):
    process, info = worker
    for partition in (None, 1):  # these may run in different threads
        process.run(*batch(info), partition)
    process.drop("tiny")
    uses = fake_device.uses(folder / "log")

    assert len(threads_of(uses)) >= 2  # models are loaded and dropped in other threads than batches run in
    assert {use for _, _, use in uses} >= {"stream", "context", "upload", "synchronize", "release_memory"}
    assert uses[0][2] == "initialize"


def test_all_threads_of_a_server_with_an_in_process_worker_use_its_device(folder, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(pool_health, "CANARY_INTERVAL", 0.02)  # real timeout: the test waits for a canary
    for module in (server, worker_pool):
        monkeypatch.setattr(module, "parse_devices", lambda _: [fake_device.NAME])
    monkeypatch.setitem(devices.KINDS, "cpu", devices.KINDS["cpu"])  # restored after the test
    try:
        fake_device.install(tmp_path / "log")
        with serving(models=(MODEL,), device=fake_device.NAME) as served, camserve.Client(served.address) as client:
            client.explain(IMAGE, overlay=None)
            answered = served.pipeline.batcher.stats.answered
            wait_until(lambda: served.pipeline.batcher.stats.answered > answered)  # a canary
    finally:
        devices.device_for.cache_clear()
    uses = fake_device.uses(tmp_path / "log")

    assert len(threads_of(uses)) >= 2  # it is initialized in another thread than batches run in
    assert uses[0][2] == "initialize"


# --- after an error ---


def test_worker_that_fails_on_a_working_device_is_not_replaced(worker, folder):
    process, info = worker
    before = process.process_id
    for partition in (None, 1):
        with pytest.raises(Exception, match="nowhere"):
            process.run(*batch(info, "nowhere"), partition)
    with pytest.raises(ConfigError, match="nothing cannot be made"):
        process.load("other", parse("other=device_nets:nothing"))
    checks = [use for use in fake_device.uses(folder / "log") if use[2] == "check"]

    assert len(process.run(*batch(info))) == 1
    assert process.process_id == before
    assert len(threads_of(checks)) == len(checks) == 3


@pytest.mark.parametrize(
    ("use", "action"),
    [
        ("context", lambda process, info: process.run(*batch(info))),
        pytest.param("context", lambda process, info: process.run(*batch(info), 1), marks=pytest.mark.slow),
        ("synchronize", lambda process, _: process.load("other", parse(MODEL))),
        ("release_memory", lambda process, _: process.drop("other")),
    ],
    ids=["batch", "second batch at once", "load", "drop"],
)
def test_worker_whose_device_fails_is_replaced(worker, folder, ended, use, action):
    process, info = worker
    before = process.process_id
    (folder / "fatal").write_text(use)
    if use == "release_memory":
        action(process, info)  # its error is not reported to any caller
    else:
        with pytest.raises((WorkerLost, ConfigError), match=r"could not use its device|worker process ended while"):
            action(process, info)
    wait_until(lambda: process.process_id not in (None, before))

    assert len(process.run(*batch(info))) == 1
    assert ended == ["a worker process ended: the worker could not use its device: exit 69"]
    threads_of(fake_device.uses(folder / "log"))


def test_model_is_kept_if_the_device_fails_while_it_is_loaded_again(worker, folder, ended, lost):
    """An error of the model itself would look the same: the model does not run."""
    process, info = worker
    before = process.process_id
    (folder / "fatal").write_text("synchronize")
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: process.process_id not in (None, before))

    assert len(process.run(*batch(info))) == 1
    assert lost == []
    assert [line.rpartition("worker ")[2] for line in ended] == [
        "was killed, probably out of memory: exit -9", "could not use its device: exit 69",
    ]  # fmt: skip
