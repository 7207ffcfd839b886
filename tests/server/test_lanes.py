"""A GPU's worker: two batches at once in threads that stay, and what the server learns of the GPU's memory.

A device of another kind takes the place of the CPU's. It computes on the CPU, and says of itself what a GPU would.
"""

import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import camserve
from camserve_server.core import devices
from camserve_server.core.errors import Internal, OutOfMemory
from camserve_server.engine.values import Row
from camserve_server.methods.values import MethodCall
from camserve_server.models import parse
from camserve_server.models.values import Pass
from camserve_server.targets.values import RankTarget
from camserve_server.telemetry import State, prometheus
from camserve_server.workers import InProcessWorker, Setup, Worker
from camserve_server.workers.messages import Response
from camserve_server.workers.replies import packed, unpacked
from rounding import check_same
from support import GPU, PHOTOS, serving, wait_until

MIB = 2**20
IMAGE = 32 * 32 * 3  # bytes of what the tiny model sees
IMAGES = [path.read_bytes() for path in PHOTOS.values()]


@dataclass
class Gpu:
    """State of the fake device. The uploads of a batch take its memory until the batch ends.

    Attributes:
        room: bytes that fit.
        free: bytes that it says are free.
        meet: what every batch waits at, or None.
        used: bytes.
        peak: of these.
        released: how often memory was given back.
        computed: batches by thread.
        current: threads that were told to use it.
        streams: of each context, whether it is to have a stream of its own.
    """

    room: int = 2**40
    free: int = 1024 * MIB
    meet: threading.Barrier | None = None
    used: int = 0
    peak: int = 0
    released: int = 0
    computed: Counter = field(default_factory=Counter)
    current: set = field(default_factory=set)
    streams: list = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    mine: threading.local = field(default_factory=threading.local)

    def __enter__(self):
        self.mine.used = 0
        self.computed[threading.get_ident()] += 1

    def __exit__(self, *_):
        with self.lock:
            self.used -= self.mine.used
        del self.mine.used

    def take(self, size):
        if not hasattr(self.mine, "used"):
            return  # no batch
        with self.lock:
            if self.used + size > self.room:
                raise torch.OutOfMemoryError("out of memory")
            self.mine.used += size
            self.used += size
            self.peak = max(self.peak, self.used)
        if self.meet:
            self.meet.wait(60)


class Fake(devices.Device):
    """A GPU that computes on the CPU."""

    is_cpu, has_streams, gpu = False, True, Gpu()

    def make_current(self):
        self.gpu.current.add(threading.get_ident())

    def context(self, *, own_stream):
        self.gpu.streams.append(own_stream)
        return self.gpu

    def upload(self, tensor):
        self.gpu.take(tensor.numel() * tensor.element_size())
        return tensor

    def memory(self):
        return devices.MemoryUse(5 * MIB, 7 * MIB, 2048 * MIB, 3 * MIB)

    def free_memory(self):
        return self.gpu.free

    def peak_of(self, work):
        self.gpu.peak = before = self.gpu.used
        work()
        return self.gpu.peak - before

    def release_memory(self):
        self.gpu.released += 1

    @staticmethod
    def is_out_of_memory(error):
        return devices.Accelerator.is_out_of_memory(error)


@pytest.fixture
def gpu(monkeypatch):
    """The fake device stands in for the CPU's."""
    one = Gpu()
    monkeypatch.setattr(Fake, "gpu", one)
    monkeypatch.setitem(devices.KINDS, "cpu", Fake)
    devices.device_of.cache_clear()
    yield one
    devices.device_of.cache_clear()


@pytest.fixture
def local(gpu, tiny):
    one = InProcessWorker(Setup("cpu", 1, streams=True))
    one.load("tiny", parse(tiny))
    gpu.computed.clear()
    yield one
    one.close()


def batch(seed, rows=2):
    images = np.random.default_rng(seed).integers(0, 256, (rows, 32, 32, 3), np.uint8)
    pass_ = Pass("tiny", "cam", (32, 32), ("0",))
    return pass_, [Row(image, RankTarget(0), (MethodCall("gradcam"),)) for image in images]


def numbers(results):
    return [(one.logits.tolist(), one.maps[0][0].tolist()) for one in results]


# --- two batches at once ---


def test_two_batches_are_on_the_device_at_once_and_each_answers_as_alone(local, gpu):
    """Each waits on the device for the other, or neither would end."""
    batches = [batch(seed) for seed in range(2)]
    alone = [numbers(local.run(*one)) for one in batches]
    gpu.meet = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda partition: numbers(local.run(*batches[partition], partition)), (0, 1)))

    assert found == alone
    assert set(gpu.streams) == {True}


def test_batches_of_one_stream_run_in_one_thread_that_stays(local, gpu):
    for partition in (0, 1, 0, 1, None):
        threading.Thread(target=local.run, args=(*batch(0), partition)).start()
    wait_until(lambda: sum(gpu.computed.values()) == 5)

    assert sorted(gpu.computed.values()) == [2, 3]
    assert set(gpu.computed) <= gpu.current


def test_model_is_warmed_up_in_the_threads_that_will_run_it(gpu, tiny):
    """cuDNN's plans belong to the thread that made them."""
    local = InProcessWorker(Setup("cpu", 1, streams=True))
    local.load("tiny", parse(tiny))
    warm = set(gpu.computed)
    gpu.computed.clear()
    for partition in (0, 1, None):
        local.run(*batch(0), partition)
    local.close()

    assert set(gpu.computed) == warm
    assert len(warm) == 2
    assert threading.get_ident() not in warm


def test_model_is_warmed_up_in_the_streams_that_will_run_it(gpu, tiny):
    local = InProcessWorker(Setup("cpu", 1, streams=True))
    local.load("tiny", parse(tiny))
    local.close()

    assert len(gpu.streams) == 2


def test_batch_on_a_cpu_runs_in_the_thread_that_asks_for_it(tiny):
    local, threads = InProcessWorker(Setup("cpu", 1)), []
    local.load("tiny", parse(tiny))
    local._models["tiny"].module.register_forward_pre_hook(lambda *_: threads.append(threading.get_ident()))
    local.run(*batch(0))

    assert threads == [threading.get_ident()]


# --- memory ---


def test_batch_that_finds_no_memory_gives_it_back_and_the_next_one_runs(local, gpu):
    expected, before = numbers(local.run(*batch(0))), gpu.released
    gpu.room = 2 * IMAGE
    with pytest.raises(OutOfMemory) as caught:
        local.run(*batch(1, rows=3), 1)

    assert gpu.released == before + 1
    assert caught.value.__context__ is None
    assert numbers(local.run(*batch(0), 1)) == expected


@pytest.mark.parametrize(
    ("error", "says_so"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True),
        (RuntimeError("GET was unable to find an engine to execute this computation"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_libraries_of_a_gpu_that_find_no_memory_are_understood(error, says_so):
    assert devices.Cuda.is_out_of_memory(error) is says_so


def test_memory_of_a_row_is_measured_for_every_kind_that_the_model_can_run(local):
    found = local.row_bytes("tiny")

    once = dict.fromkeys(("score", "cam", "curvature", "bias", "features"), IMAGE)
    twice = dict.fromkeys(("saliency", "guided", "deconvnet"), 2 * IMAGE)  # the input, and what it is a copy of
    assert found == once | twice  # a model without attention has none to measure


def test_memory_of_a_row_is_measured_while_no_batch_runs(local, gpu):
    gpu.meet = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(local.run, *batch(0), 1)
        wait_until(lambda: gpu.meet.n_waiting)
        measured = pool.submit(local.row_bytes, "tiny")
        wait_until(local._lanes[0].turn.locked)  # it has one stream, and waits for the other
        assert gpu.meet.n_waiting == 1  # the measured batch would be the second
        meet, gpu.meet = gpu.meet, None
        meet.wait(60)
        running.result()

    assert measured.result()["score"] == IMAGE


def test_memory_of_a_row_is_that_of_one_if_eight_do_not_fit(local, gpu):
    gpu.room = 7 * IMAGE

    assert local.row_bytes("tiny")["score"] == IMAGE


def test_kind_that_fits_not_even_once_is_not_measured(local, gpu):
    gpu.room = IMAGE - 1

    assert local.row_bytes("tiny") == {}


def test_nothing_is_measured_on_a_device_that_does_not_tell_its_memory(local, gpu):
    gpu.free = 0

    assert (local.row_bytes("tiny"), local.free_bytes()) == ({}, 0)


def test_free_memory_is_what_batches_have_after_what_they_left_was_given_back(local, gpu):
    before = gpu.released

    assert local.free_bytes() == gpu.free
    assert gpu.released == before + 1


def test_measured_memory_passes_from_a_workers_process_to_the_server():
    sizes = {"cam": 2**40, "saliency": 1}

    assert unpacked(packed(Response(1, sizes))) == Response(1, sizes)


@pytest.mark.parametrize("answer", [None, [1], {"cam": "1"}, {"cam": True}, {"cam": -1}])
def test_sizes_that_are_none_are_not_taken_from_a_worker(answer, monkeypatch):
    class Process:
        @staticmethod
        def request(*_, **__):
            done = Future()
            done.set_result(answer)
            return done

    worker = object.__new__(Worker)
    monkeypatch.setattr(worker, "_require_ready", Process, raising=False)

    with pytest.raises(Internal):
        worker.row_bytes("tiny")
    with pytest.raises(Internal):
        worker.free_bytes()


# --- on a GPU ---


@pytest.fixture
def real(tiny):
    """A worker's engine on a GPU."""
    one = InProcessWorker(Setup("cuda:0", 1, streams=True))
    one.load("tiny", parse(tiny))
    yield one
    one.close()


@pytest.mark.parametrize("device", [GPU])
def test_gpu_measures_what_some_work_takes_and_what_is_left(device):
    one = devices.device_of(device)
    one.initialize()
    one.release_memory()
    before = one.free_memory()

    assert one.peak_of(lambda: torch.empty(64 * MIB, dtype=torch.uint8, device=device)) == 64 * MIB
    held = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
    assert before - one.free_memory() >= 64 * MIB
    del held
    held = one.host_buffer((64 * MIB,), torch.uint8)
    assert one.memory().pinned >= len(held)


@pytest.mark.parametrize("device", [GPU])
def test_gpu_answers_two_batches_at_once_as_each_alone(device, real):  # noqa: ARG001 -- what `real` is on
    batches = [batch(seed) for seed in range(2)]
    alone = [real.run(*one) for one in batches]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda place: real.run(*batches[place % 2], place % 2), range(40)))

    for place, results in enumerate(found):
        for one, expected in zip(results, alone[place % 2], strict=True):
            assert np.allclose(one.maps[0][0], expected.maps[0][0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", [GPU])
def test_gpu_measures_a_row_of_each_kind(device, real):  # noqa: ARG001 -- what `real` is on
    found = real.row_bytes("tiny")

    assert found["score"] <= found["saliency"] < real.free_bytes()


# --- in a server ---


def explained(client, image):
    (found,) = client.explain(image, overlay=None, heatmap=True).explanations
    return found.heatmap.tolist()


@pytest.fixture
def expected(tiny):
    """The answers of a CPU."""
    with serving(models=(tiny,), device="cpu", threads=1) as served, camserve.Client(served.address) as client:
        return [explained(client, image) for image in IMAGES]


def check_all(found, expected, spec):
    """Compare maps; a GPU has the memory layout that was faster there, and batches of other sizes: both round."""
    for mine, its in zip(found, expected, strict=True):
        check_same(np.array(mine), np.array(its), spec)


def test_server_runs_two_batches_at_once_and_answers_as_on_a_cpu(expected, gpu, tiny):
    with serving(models=(tiny,), device="cpu", max_batch_rows=1) as served, camserve.Client(served.address) as client:
        explained(client, IMAGES[0])
        gpu.meet = threading.Barrier(2)  # one batch at a time would wait for ever
        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(lambda image: explained(client, image), IMAGES * 3))
        gpu.meet = None

    check_all(found, expected * 3, tiny)


def test_server_answers_all_while_memory_is_enough_for_one_batch_only(expected, gpu, tiny):
    with serving(models=(tiny,), device="cpu") as served, camserve.Client(served.address) as client:
        gpu.room = 2 * IMAGE
        with ThreadPoolExecutor(12) as pool:
            found = list(pool.map(lambda image: explained(client, image), IMAGES * 10))
        stats = served.pipeline.batcher.stats

    check_all(found, expected * 10, tiny)
    assert stats.failed == 0


@pytest.mark.parametrize(
    ("rows", "settings", "inputs"),
    [
        (1000, {}, 64),  # memory for more than a batch should have
        (1000, {"max_batch_rows": 5}, 5),
        (80, {}, 32),  # four fifths of it, and two batches
        (80, {"max_batch_rows": 40}, 32),
        (1, {}, 1),
        (80, {"device": "cpu,cpu"}, 16),  # two engines on one GPU
    ],
)
def test_rows_of_a_batch_follow_from_the_memory_that_is_free_and_a_measured_row(gpu, tiny, rows, settings, inputs):
    gpu.free = rows * IMAGE
    with serving(models=(tiny,), **({"device": "cpu"} | settings)) as served:
        key = served.pipeline.models["tiny"].key
        found = served.do(lambda: served.pipeline.batcher._capacity.budget(Pass(key, "score", (32, 32)), 4096).inputs)
        found = min(found, served.pipeline.batcher._capacity.inputs)

    assert found == inputs


def test_rows_of_a_batch_follow_the_memory_as_models_come_and_go(gpu, tiny):
    def inputs():
        capacity, key = served.pipeline.batcher._capacity, served.pipeline.models["tiny"].key
        return served.do(lambda: capacity.budget(Pass(key, "score", (32, 32)), 4096).inputs)

    gpu.free = 80 * IMAGE
    with (
        serving(models=(tiny, tiny.replace("tiny=", "other=")), device="cpu", admin=True) as served,
        camserve.Client(served.address) as client,
    ):
        found = [inputs()]
        gpu.free = 60 * IMAGE
        client.load_model("other")
        found.append(inputs())
        gpu.free = 100 * IMAGE
        client.unload_model("other")
        wait_until(lambda: inputs() == 40)

    assert found == [32, 24]


@pytest.mark.usefixtures("gpu")
def test_metrics_have_the_memory_of_each_engines_gpu(tiny):
    with serving(models=(tiny,), device="cpu,cpu") as served:
        engines = served.pipeline.lifecycle.engines
        told = prometheus.PrometheusMetrics(lambda: State(ready=True, in_flight=0, engines=engines()))
        _, text = told.written("text/plain")
    (family,) = [
        one for one in text_string_to_metric_families(text.decode()) if one.name == "camserve_engine_memory_bytes"
    ]
    found = {(one.labels["engine"], one.labels["kind"]): one.value for one in family.samples}

    for engine in ("0", "1"):
        assert found.pop((engine, "resident")) > MIB
        sizes = {kind: found.pop((engine, kind)) for kind in ("allocated", "reserved", "total", "pinned")}
        assert sizes == {"allocated": 5 * MIB, "reserved": 7 * MIB, "total": 2048 * MIB, "pinned": 3 * MIB}
    assert not found
