"""Worker on a GPU: two batches at once in persistent threads, and measurement of the GPU's memory.

A fake device replaces the CPU's. It computes on the CPU, and reports what a GPU would.
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
from camserve_server.telemetry import ServerSnapshot, prometheus
from camserve_server.workers import InProcessWorker, Setup, Worker, in_process
from camserve_server.workers.messages import Response
from camserve_server.workers.replies import deserialize, serialize
from methods.tools import photo
from rounding import check_same
from support import GPU, PHOTOS, serving, wait_until

MIB = 2**20
IMAGE = 32 * 32 * 3  # bytes of the tiny model's input
IMAGES = [photo(name, 32) for name in PHOTOS]


@dataclass
class Gpu:
    """State of the fake device. The uploads of a batch take its memory until the batch ends.

    Attributes:
        room: size of its memory, in bytes.
        free: bytes that it reports as free.
        meet: barrier at which every batch waits, or None.
        used: bytes in use.
        peak: largest number of bytes in use.
        released: number of times that memory was given back.
        computed: number of batches of each thread.
        current: threads that made it their current device.
        streams: for each context, True if it has its own stream.
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
    local: threading.local = field(default_factory=threading.local)

    def __enter__(self):
        self.local.used = 0
        self.computed[threading.get_ident()] += 1

    def __exit__(self, *_):
        with self.lock:
            self.used -= self.local.used
        del self.local.used

    def take(self, size):
        if not hasattr(self.local, "used"):
            return  # outside of a batch
        with self.lock:
            if self.used + size > self.room:
                raise torch.OutOfMemoryError("out of memory")
            self.local.used += size
            self.used += size
            self.peak = max(self.peak, self.used)
        if self.meet:
            self.meet.wait(60)


class FakeDevice(devices.Device):
    """GPU that computes on the CPU."""

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
    """State of the fake device, which replaces the CPU's."""
    state = Gpu()
    monkeypatch.setattr(FakeDevice, "gpu", state)
    monkeypatch.setitem(devices.KINDS, "cpu", FakeDevice)
    devices.device_for.cache_clear()
    yield state
    devices.device_for.cache_clear()


@pytest.fixture
def local(gpu, tiny):
    worker = InProcessWorker(Setup("cpu", 1, streams=True))
    worker.load("tiny", parse(tiny))
    gpu.computed.clear()
    yield worker
    worker.close()


def batch(seed, rows=2):
    images = np.random.default_rng(seed).integers(0, 256, (rows, 32, 32, 3), np.uint8)
    pass_ = Pass("tiny", "cam", (32, 32), ("0",))
    return pass_, [Row(image, RankTarget(0), (MethodCall("gradcam"),)) for image in images]


def numbers(results):
    return [(result.logits.tolist(), result.maps[0][0].tolist()) for result in results]


# --- two batches at once ---


def test_two_batches_run_at_once_and_each_answers_as_alone(local, gpu):
    """Each waits on the device for the other one, so both must run at the same time."""
    batches = [batch(seed) for seed in range(2)]
    alone = [numbers(local.run(*arguments)) for arguments in batches]
    gpu.meet = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda partition: numbers(local.run(*batches[partition], partition)), (0, 1)))

    assert answers == alone
    assert set(gpu.streams) == {True}


def test_batches_of_one_stream_run_in_one_persistent_thread(local, gpu):
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


def test_batch_on_a_cpu_runs_in_the_calling_thread(tiny):
    local, threads = InProcessWorker(Setup("cpu", 1)), []
    local.load("tiny", parse(tiny))
    local._models["tiny"].module.register_forward_pre_hook(lambda *_: threads.append(threading.get_ident()))
    local.run(*batch(0))

    assert threads == [threading.get_ident()]


# --- memory ---


def test_batch_without_memory_frees_its_own_and_the_next_one_runs(local, gpu):
    expected, before = numbers(local.run(*batch(0))), gpu.released
    gpu.room = 2 * IMAGE
    with pytest.raises(OutOfMemory) as caught:
        local.run(*batch(1, rows=3), 1)

    assert gpu.released == before + 1
    assert caught.value.__context__ is None
    assert numbers(local.run(*batch(0), 1)) == expected


@pytest.mark.parametrize(
    ("error", "expected"),
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
def test_out_of_memory_errors_of_gpu_libraries_are_recognized(error, expected):
    assert devices.Cuda.is_out_of_memory(error) is expected


def test_memory_of_a_row_is_measured_for_every_kind_of_the_model(local):
    sizes = local.row_bytes("tiny")

    once = dict.fromkeys(("score", "cam", "curvature", "bias", "features"), IMAGE)
    twice = dict.fromkeys(("saliency", "guided", "deconvnet"), 2 * IMAGE)  # the input and its copy
    assert sizes == once | twice  # this model has no attention to measure


def test_memory_of_a_row_is_measured_while_no_batch_runs(local, gpu):
    gpu.meet = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(local.run, *batch(0), 1)
        wait_until(lambda: gpu.meet.n_waiting)
        measured = pool.submit(local.row_bytes, "tiny")
        wait_until(local._lanes[0].turn.locked)  # the measurement holds one stream, and waits for the other
        assert gpu.meet.n_waiting == 1  # the measured batch would be the second
        meet, gpu.meet = gpu.meet, None
        meet.wait(60)
        running.result()

    assert measured.result()["score"] == IMAGE


def test_memory_of_a_single_row_is_measured_if_eight_do_not_fit(local, gpu):
    gpu.room = 7 * IMAGE

    assert local.row_bytes("tiny")["score"] == IMAGE


def test_kind_of_which_no_row_fits_is_not_measured(local, gpu):
    gpu.room = IMAGE - 1

    assert local.row_bytes("tiny") == {}


def test_nothing_is_measured_if_the_device_does_not_report_its_memory(local, gpu):
    gpu.free = 0

    assert (local.row_bytes("tiny"), local.free_bytes()) == ({}, 0)


def test_free_memory_is_measured_after_unused_memory_was_released(local, gpu):
    before = gpu.released

    assert local.free_bytes() == gpu.free
    assert gpu.released == before + 1


def test_measured_memory_is_sent_from_a_worker_process_to_the_server():
    sizes = {"cam": 2**40, "saliency": 1}

    assert deserialize(serialize(Response(1, sizes))) == Response(1, sizes)


@pytest.mark.parametrize("answer", [None, [1], {"cam": "1"}, {"cam": True}, {"cam": -1}])
def test_invalid_sizes_from_a_worker_are_refused(answer, monkeypatch):
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
    """Worker on a real GPU."""
    worker = InProcessWorker(Setup("cuda:0", 1, streams=True))
    worker.load("tiny", parse(tiny))
    yield worker
    worker.close()


@pytest.mark.parametrize("device", [GPU])
def test_gpu_measures_peak_and_free_memory(device):
    gpu_ = devices.device_for(device)
    gpu_.initialize()
    gpu_.release_memory()
    before = gpu_.free_memory()

    assert gpu_.peak_of(lambda: torch.empty(64 * MIB, dtype=torch.uint8, device=device)) == 64 * MIB
    held = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
    assert before - gpu_.free_memory() >= 64 * MIB
    del held
    held = gpu_.host_buffer((64 * MIB,), torch.uint8)
    assert gpu_.memory().pinned >= len(held)


@pytest.mark.parametrize("device", [GPU])
def test_gpu_answers_two_batches_at_once_as_each_alone(device, real):  # noqa: ARG001 -- the device of `real`
    batches = [batch(seed) for seed in range(2)]
    alone = [real.run(*arguments) for arguments in batches]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda number: real.run(*batches[number % 2], number % 2), range(40)))

    for number, results in enumerate(answers):
        for result, expected in zip(results, alone[number % 2], strict=True):
            assert np.allclose(result.maps[0][0], expected.maps[0][0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", [GPU])
def test_gpu_measures_a_row_of_each_kind(device, real):  # noqa: ARG001 -- the device of `real`
    sizes = real.row_bytes("tiny")

    assert sizes["score"] <= sizes["saliency"] < real.free_bytes()


# --- in a server ---


def explain(client, image):
    (explanation,) = client.explain(image, overlay=None, heatmap=True).explanations
    return explanation.heatmap.tolist()


@pytest.fixture
def few_sizes(monkeypatch):
    """Warm models up with the smallest batches alone: `test_warmup.py` tests all sizes, which take a second."""
    warm_up = in_process.warm_up_all_sizes
    monkeypatch.setattr(in_process, "warm_up_all_sizes", lambda run, name, info, _: warm_up(run, name, info, 1))


@pytest.fixture(scope="module")
def expected(tiny):
    """Heatmaps of a CPU. They are computed before `gpu` replaces the device."""
    with serving(models=(tiny,), device="cpu", threads=1) as served, camserve.Client(served.address) as client:
        return [explain(client, image) for image in IMAGES]


def check_all(heatmaps, expected, spec):
    """Compare heatmaps. A GPU may use another memory layout and other batch sizes, and both change rounding."""
    for heatmap, reference in zip(heatmaps, expected, strict=True):
        check_same(np.array(heatmap), np.array(reference), spec)


@pytest.mark.usefixtures("few_sizes")
def test_server_runs_two_batches_at_once_and_answers_as_on_a_cpu(expected, gpu, tiny):
    with serving(models=(tiny,), device="cpu", max_batch_rows=1) as served, camserve.Client(served.address) as client:
        explain(client, IMAGES[0])
        gpu.meet = threading.Barrier(2)  # a single batch would wait forever
        with ThreadPoolExecutor(6) as pool:
            heatmaps = list(pool.map(lambda image: explain(client, image), IMAGES * 2))
        gpu.meet = None

    check_all(heatmaps, expected * 2, tiny)


@pytest.mark.usefixtures("few_sizes")
def test_server_answers_all_requests_with_memory_for_one_batch(expected, gpu, tiny):
    with serving(models=(tiny,), device="cpu") as served, camserve.Client(served.address) as client:
        gpu.room = 2 * IMAGE
        with ThreadPoolExecutor(12) as pool:
            heatmaps = list(pool.map(lambda image: explain(client, image), IMAGES * 2))
        stats = served.pipeline.batcher.stats

    check_all(heatmaps, expected * 2, tiny)
    assert stats.failed == 0


@pytest.mark.usefixtures("few_sizes")
@pytest.mark.parametrize(
    ("rows", "settings", "inputs"),
    [
        (1000, {}, 64),  # memory for more rows than a batch may have
        (1000, {"max_batch_rows": 5}, 5),
        (80, {}, 32),  # four fifths of the memory, for two batches
        pytest.param(80, {"max_batch_rows": 40}, 32, marks=pytest.mark.slow),
        (1, {}, 1),
        (80, {"device": "cpu,cpu"}, 16),  # two workers on one GPU
    ],
)
def test_rows_of_a_batch_follow_from_free_memory_and_memory_of_a_row(gpu, tiny, rows, settings, inputs):
    gpu.free = rows * IMAGE
    with serving(models=(tiny,), **({"device": "cpu"} | settings)) as served:
        key = served.pipeline.models["tiny"].key
        limit = served.do(lambda: served.pipeline.batcher._capacity.budget(Pass(key, "score", (32, 32)), 4096).inputs)
        limit = min(limit, served.pipeline.batcher._capacity.inputs)

    assert limit == inputs


@pytest.mark.usefixtures("few_sizes")
def test_rows_of_a_batch_change_as_models_are_loaded_and_unloaded(gpu, tiny):
    def inputs():
        capacity, key = served.pipeline.batcher._capacity, served.pipeline.models["tiny"].key
        return served.do(lambda: capacity.budget(Pass(key, "score", (32, 32)), 4096).inputs)

    gpu.free = 80 * IMAGE
    with (
        serving(models=(tiny, tiny.replace("tiny=", "other=")), device="cpu", admin=True) as served,
        camserve.Client(served.address) as client,
    ):
        limits = [inputs()]
        gpu.free = 60 * IMAGE
        client.load_model("other")
        limits.append(inputs())
        gpu.free = 100 * IMAGE
        client.unload_model("other")
        wait_until(lambda: inputs() == 40)

    assert limits == [32, 24]


@pytest.mark.usefixtures("gpu", "few_sizes")
def test_metrics_have_the_gpu_memory_of_each_worker(tiny):
    with serving(models=(tiny,), device="cpu,cpu") as served:
        engines = served.pipeline.repository.engines
        metrics = prometheus.PrometheusMetrics(lambda: ServerSnapshot(ready=True, in_flight=0, engines=engines()))
        _, text = metrics.encode("text/plain")
    (family,) = [
        metric
        for metric in text_string_to_metric_families(text.decode())
        if metric.name == "camserve_engine_memory_bytes"
    ]
    values = {(sample.labels["engine"], sample.labels["kind"]): sample.value for sample in family.samples}

    for engine in ("0", "1"):
        assert values.pop((engine, "resident")) > MIB
        sizes = {kind: values.pop((engine, kind)) for kind in ("allocated", "reserved", "total", "pinned")}
        assert sizes == {"allocated": 5 * MIB, "reserved": 7 * MIB, "total": 2048 * MIB, "pinned": 3 * MIB}
    assert not values
