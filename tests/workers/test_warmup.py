"""Warm-up: the batches that run while a model is loaded, and copies that fail in them."""

import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

from camserve_server.core.config import Settings
from camserve_server.core.errors import FailedPrecondition, OutOfMemory, Unavailable
from camserve_server.engine import Engine
from camserve_server.engine.values import Row
from camserve_server.methods.values import MethodCall
from camserve_server.models import LoadedModel, parse
from camserve_server.models.values import Pass
from camserve_server.serving.pool_sizing import CPU_BATCH
from camserve_server.serving.worker_pool import WorkerPool
from camserve_server.targets import anything
from camserve_server.workers import InProcessWorker, Setup, Worker, fork_server, in_process
from fake_gpu import fake_gpu
from robustness.forking import running_fork_server

KINDS = ("cam", "saliency", "score")
IMAGE = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)


def tiny():
    """Return a model with a batch norm, which the accelerated copy folds into the convolution before it."""
    torch.manual_seed(0)
    features = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3))
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))


@pytest.fixture(autouse=True)
def nets(monkeypatch):
    """Module with a user's model."""
    module = ModuleType("warm_nets")
    module.tiny = tiny
    monkeypatch.setitem(sys.modules, "warm_nets", module)


@pytest.fixture
def gpu():
    with fake_gpu():
        yield


@pytest.fixture
def batches(monkeypatch):
    """List of the batches that run: their kind, and their number of distinct inputs."""
    ran, run = [], Engine.run

    def record(engine, pass_, rows):
        ran.append((pass_.kind, len({row.input for row in rows})))
        return run(engine, pass_, rows)

    monkeypatch.setattr(Engine, "run", record)
    return ran


@pytest.fixture
def small_memory(monkeypatch):
    """Function that sets how many rows of a kind fit in the device's memory."""
    limits, run = {}, Engine.run

    def full(engine, pass_, rows):
        if len(rows) > limits.get(pass_.kind, len(rows)):
            raise OutOfMemory("planted", retry_after=1.0)
        return run(engine, pass_, rows)

    monkeypatch.setattr(Engine, "run", full)
    return lambda kind, rows: limits.update({kind: rows})


def loaded(max_rows=8, precision="float32", **setup):
    engine = InProcessWorker(Setup("cpu", 1, max_rows=max_rows, **setup))
    info = engine.load("tiny@1", parse(f"tiny=warm_nets:tiny?size=32&precision={precision}"))
    return engine, info


def explained(engine, info):
    pass_ = Pass("tiny@1", "cam", (32, 32), (info.default_layer,))
    (result,) = engine.run(pass_, [Row(IMAGE, anything(info), (MethodCall("gradcam"),))])
    return result.maps[0][0]


# --- sizes ---


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("max_rows", "sizes"), [(1, [1]), (2, [1, 2]), (8, [1, 2, 4, 8]), (11, [1, 2, 4, 8, 11])])
def test_gpu_is_warmed_up_for_each_kind_and_size(batches, max_rows, sizes):
    loaded(max_rows)

    assert batches == [(kind, size) for kind in KINDS for size in sizes]


@pytest.mark.usefixtures("gpu")
def test_each_stream_of_a_gpu_is_warmed_up(batches):
    """Each stream has its own thread with its own convolution plans."""
    engine, _ = loaded(2, streams=True)

    assert engine._replicas.keys() == {"tiny@1"}
    assert batches == [(kind, size) for kind in KINDS for size in (1, 2)] * 2


def test_cpu_is_warmed_up_with_one_row_of_two_kinds(batches):
    loaded(8)

    assert batches == [("cam", 1), ("saliency", 1)]


@pytest.mark.usefixtures("gpu")
def test_warm_up_of_a_kind_ends_when_memory_does_and_is_logged(batches, small_memory, caplog):
    small_memory("saliency", 3)
    loaded(8)

    assert batches == [*(("cam", size) for size in (1, 2, 4, 8)), ("saliency", 1), ("saliency", 2)] + [
        ("score", size) for size in (1, 2, 4, 8)
    ]
    message = "model tiny: memory is enough for 2 images in a batch of saliency, and not for 4"
    assert [record.message for record in caplog.records if "memory is" in record.message] == [message]


@pytest.mark.usefixtures("gpu")
def test_model_is_refused_if_one_row_does_not_fit_in_memory(small_memory):
    small_memory("cam", 0)

    with pytest.raises(OutOfMemory):
        loaded()


@pytest.mark.parametrize(("setting", "rows"), [(0, CPU_BATCH), (3, 3)])
async def test_workers_know_the_size_of_the_largest_batch(setting, rows):
    pool = WorkerPool(Settings(device="cpu", isolation="thread", max_batch_rows=setting))

    assert [worker._setup.max_rows for worker in pool._workers] == [rows]


# --- worker processes ---

FAKE = """
from camserve_server.core import devices
from camserve_server.models.acceleration import onednn


class Fake(devices.Device):
    is_cpu = False


devices.KINDS["cpu"] = Fake
devices.device_for.cache_clear()
onednn.is_supported = lambda *_: False
"""
"""Program that replaces the CPU by a fake GPU."""
NETS = """
import threading
from pathlib import Path

import torch
from torch import nn


class Recording(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, 5)

    def forward(self, image):
        with open(Path(__file__).with_name("threads"), "a") as file:
            print(threading.current_thread().name, len(image), file=file)
        return self.head(self.conv(image).relu().mean((2, 3)))


def recording():
    torch.manual_seed(0)
    return Recording()


def broken():
    class Broken(Recording):
        def forward(self, image):
            if len(image) == 4 and threading.current_thread().name == "stream_0":
                raise ValueError("planted")
            return super().forward(image)

    return Broken()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with models."""
    place = tmp_path_factory.mktemp("gpu")
    (place / "thread_nets.py").write_text(NETS)
    return place


@pytest.fixture(scope="module")
def worker(folder):
    with running_fork_server(FAKE) as forks, pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server, "_fork_servers", [forks])
        process = Worker(Setup("cpu", 1, path=(str(folder), *sys.path), log_level="error", max_rows=4))
        yield process
        process.close()


@pytest.fixture
def calls(folder):
    """Function that returns the threads, and sizes, of the batches that ran since its last call."""
    (folder / "threads").write_text("")

    def since():
        lines = (folder / "threads").read_text().splitlines()
        (folder / "threads").write_text("")
        return [(name, int(size)) for name, size in map(str.split, lines)]

    return since


@pytest.mark.slow
def test_worker_warms_up_a_gpu_in_the_thread_that_runs_batches(worker, calls):
    info = worker.load("tiny@1", parse("tiny=thread_nets:recording?size=32"))
    loading = calls()
    explained(worker, info)

    assert [size for name, size in loading if name == "stream_0"] == [1, 2, 4] * len(KINDS)
    assert {name for name, _ in loading} == {"stream_0", "beside"}
    assert calls() == [("stream_0", 1)]


@pytest.mark.slow
def test_error_in_a_warm_up_refuses_the_model_and_others_are_served(worker):
    info = worker.load("tiny@1", parse("tiny=thread_nets:recording?size=32"))
    with pytest.raises(FailedPrecondition, match=r"broken failed in its own forward .Broken.: planted"):
        worker.load("broken@1", parse("broken=thread_nets:broken?size=32"))

    assert explained(worker, info).shape == (30, 30)


# --- copies that fail ---


@pytest.fixture
def failing_copy(monkeypatch):
    """Accelerated copies raise when they run."""
    load = in_process.load

    def load_with_failing_copy(*args, **options):
        model = load(*args, **options)
        model.accelerated.module.forward = fail
        return model

    monkeypatch.setattr(in_process, "load", load_with_failing_copy)


PLANTED = "FailedPrecondition: tiny failed in its own forward (Sequential): planted"


def fail(_images):
    raise RuntimeError("planted")


@pytest.mark.usefixtures("failing_copy")
@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_model_whose_accelerated_copy_fails_is_served_without_it(device, precision, request, caplog):
    if device == "gpu":
        request.getfixturevalue("gpu")
    engine, info = loaded(precision=precision)
    plain = LoadedModel(info, engine._models["tiny@1"].module)

    assert engine._models["tiny@1"].accelerated is None
    np.testing.assert_array_equal(explained(engine, info), explained(Engine({"tiny@1": plain}), info))
    message = f"model tiny runs without its accelerated copy, which failed to warm up ({PLANTED})"
    assert [record.message for record in caplog.records if "accelerated" in record.message] == [message]


@pytest.mark.usefixtures("failing_copy")
def test_model_that_fails_without_its_accelerated_copy_too_is_refused(monkeypatch, caplog):
    engine = InProcessWorker(Setup("cpu", 1))
    monkeypatch.setattr(Engine, "run", lambda *_: fail(None))
    with pytest.raises(RuntimeError, match="planted"):
        engine.load("tiny@1", parse("tiny=warm_nets:tiny?size=32"))

    assert "runs without" not in caplog.text
    with pytest.raises(Unavailable, match="lost"):
        engine.run(Pass("tiny@1", "cam", (32, 32)), [])


def test_replica_that_fails_is_not_used(monkeypatch, caplog):
    make = LoadedModel.replica

    def replica(model):
        copy = make(model)
        copy.accelerated.module.forward = fail
        return copy

    monkeypatch.setattr(LoadedModel, "replica", replica)
    engine, info = loaded(partitioned=True)

    assert engine._replicas == {}
    assert explained(engine, info).shape == (13, 13)
    message = f"model tiny runs one batch at a time: its replica failed to warm up ({PLANTED})"
    assert [record.message for record in caplog.records if "replica" in record.message] == [message]


def test_replica_is_warmed_up_too(batches):
    engine, _ = loaded(partitioned=True)

    assert engine._replicas.keys() == {"tiny@1"}
    assert batches == [("cam", 1), ("saliency", 1)] * 2
