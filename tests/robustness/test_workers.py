"""Workers in their own processes: their results, and the errors that callers get when one dies or hangs."""

import asyncio
import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import camserve
import fork_server
from camserve_server.api import grpc_server
from camserve_server.core import config
from camserve_server.core.errors import ConfigError, Unavailable, WorkerLost
from camserve_server.engine.values import Row
from camserve_server.methods.values import MethodCall
from camserve_server.models import parse
from camserve_server.models.values import Pass
from camserve_server.serving import pool_health, worker_pool
from camserve_server.targets import anything
from camserve_server.workers import InProcessWorker, Setup, Worker
from camserve_server.workers import worker as worker_module
from robustness import error_checks, tree
from server_process import server_process
from support import StoppedClock, alive, children, wait_until

NETS = '''
import os
import time
from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).parent


class Tiny(nn.Module):
    """Acts as a file in its folder demands; otherwise it classifies, and a white image kills its process."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Conv2d(3, 4, 3, 2)
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        act()
        if float(x.detach().mean((1, 2, 3)).max()) > 2:
            os.kill(os.getpid(), 9)
        return self.head(self.features(x).relu().mean((2, 3)))


FAILURES = {
    "exit": lambda: os._exit(7),
    "abort": os.abort,
    "kill": lambda: os.kill(os.getpid(), 9),
    "segv": lambda: os.kill(os.getpid(), 11),
    "sleep": lambda: time.sleep(3600),
}


def act():
    for name, fail in FAILURES.items():
        if (HERE / name).exists():
            (HERE / name).unlink()
            fail()


def tiny():
    return Tiny()


def fatal():
    os.abort()
'''
DEADLY = """

def once():
    with open(HERE / "loads", "a") as file:
        file.write("x")
    if os.path.getsize(HERE / "loads") > 1:
        os.abort()
    return Tiny()
"""
SAME = """

def same():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
"""
IMAGE = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
SIZE = "?size=32"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("nets")
    (path / "worker_nets.py").write_text(NETS)
    return path


def setup(folder, threads=1, **changes):
    return Setup("cpu", threads, path=(str(folder), *sys.path), log_level="error", **changes)


@dataclass
class StateEvents:
    """Listeners of a worker, as two events.

    Attributes:
        up: set while the worker is ready.
        down: set while it is not.
    """

    up: threading.Event = field(default_factory=threading.Event)
    down: threading.Event = field(default_factory=threading.Event)

    def on_ready(self):
        self.down.clear()
        self.up.set()

    def on_exit(self):
        self.up.clear()
        self.down.set()


@pytest.fixture(scope="module")
def worker(folder, forked):  # noqa: ARG001 -- must be set up before
    state = StateEvents()
    process = Worker(setup(folder), on_ready=state.on_ready, on_exit=state.on_exit)
    try:
        info = process.load("tiny", parse(f"tiny=worker_nets:tiny{SIZE}"))
        yield process, state, info
    finally:
        process.close()


def batch_of(info, kind="cam"):
    layers = (info.default_layer,) if kind == "cam" else ()
    method = MethodCall("gradcam" if kind == "cam" else "saliency")
    return Pass(info.name, kind, (32, 32), layers), [Row(IMAGE, anything(info), (method,))] * 3


@pytest.mark.parametrize("kind", ["cam", "saliency"])
def test_worker_process_answers_as_an_in_process_worker_to_the_bit(worker, folder, kind, monkeypatch):
    process, _, info = worker
    monkeypatch.syspath_prepend(folder)
    local = InProcessWorker(setup(folder))

    assert local.load("tiny", parse(f"tiny=worker_nets:tiny{SIZE}")) == info
    for expected, result in zip(local.run(*batch_of(info, kind)), process.run(*batch_of(info, kind)), strict=True):
        assert expected.score == result.score
        assert (expected.logits == result.logits).all()
        assert all((a[0] == b[0]).all() for a, b in zip(expected.maps, result.maps, strict=True))


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    "options", [{"partitioned": True, "threads": 2}, {"streams": True}], ids=["partitioned", "streams"]
)
def test_two_batches_at_once_are_answered_as_one_alone_to_the_bit(folder, options):
    process = Worker(setup(folder, **options))
    try:
        info = process.load("tiny", parse(f"tiny=worker_nets:tiny{SIZE}"))
        for kind in ("cam", "saliency"):
            alone = process.run(*batch_of(info, kind))
            with ThreadPoolExecutor(4) as pool:  # two run at once, and the others wait
                both = [pool.submit(process.run, *batch_of(info, kind), partition) for partition in (0, 1) * 3]
            for expected, result in itertools.product(
                alone, itertools.chain.from_iterable(call.result() for call in both)
            ):
                assert expected.score == result.score
                assert all((a[0] == b[0]).all() for a, b in zip(expected.maps, result.maps, strict=True))
        process.drop("tiny")
        for partition in (None, 0, 1):
            with pytest.raises(Unavailable, match="lost"):
                process.run(*batch_of(info), partition)
    finally:
        process.close()


def test_error_of_a_row_reaches_the_caller_and_the_worker_lives(worker):
    process, _, info = worker
    pass_, rows = batch_of(info)

    with pytest.raises(Exception, match="nowhere"):
        process.run(Pass(info.name, "cam", (32, 32), ("nowhere",)), rows)
    assert len(process.run(pass_, rows)) == 3


FAILURES = {
    "abort": "the worker aborted: exit -6",
    "exit": "the worker ended: exit 7",
    "kill": "the worker was killed, probably out of memory: exit -9",
    "segv": "the worker crashed with a segmentation fault: exit -11",
    "sleep": "the worker took longer than max_batch_seconds to run",
    "SIGSTOP": "the worker gave no sign of life for 60 s",
}


@pytest.mark.parametrize("failure", FAILURES)
def test_worker_that_dies_or_hangs_fails_its_batch_and_is_replaced(worker, folder, failure, monkeypatch):
    process, state, info = worker
    wait_until(state.up.is_set)
    before = process.process_id
    if failure == "SIGSTOP":
        process._ready._set_timeout(2)  # real timeout: a stopped process sends nothing
        process.run(*batch_of(info))  # its response ends the wait with the longer timeout
        os.kill(before, signal.SIGSTOP)
    else:
        (folder / failure).touch()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(process.run, *batch_of(info))
        if failure == "sleep":
            wait_until(lambda: not (folder / failure).exists())
            late = SimpleNamespace(monotonic=lambda: time.monotonic() + 61)
            monkeypatch.setattr(worker_module, "time", late)
        with pytest.raises(WorkerLost, match=FAILURES[failure]) as lost:
            call.result()
    assert (lost.value.process_id, lost.value.others) == (before, 0)
    assert state.down.is_set()
    wait_until(state.up.is_set)
    assert len(process.run(*batch_of(info))) == 3
    assert process.process_id != before
    assert not alive(before)


def test_model_that_kills_its_process_is_refused_and_others_return(worker):
    process, state, info = worker
    with pytest.raises(
        ConfigError, match=r"model bad \(worker_nets:fatal\): the worker process ended while it loaded the model"
    ):
        process.load("bad", parse("bad=worker_nets:fatal"))
    wait_until(state.up.is_set)

    assert len(process.run(*batch_of(info))) == 3


@pytest.mark.usefixtures("forked")
def test_model_whose_weights_changed_is_lost_when_it_is_loaded_again(tmp_path):
    state, lost = StateEvents(), []
    (tmp_path / "changing_nets.py").write_text(NETS.replace("manual_seed(0)", "manual_seed(os.getpid())"))
    process = Worker(setup(tmp_path), on_ready=state.on_ready, on_exit=state.on_exit, on_model_lost=lost.append)
    try:
        info = process.load("tiny", parse(f"tiny=changing_nets:tiny{SIZE}"))
        os.kill(process.process_id, signal.SIGKILL)
        wait_until(state.down.is_set)
        wait_until(state.up.is_set)
        with pytest.raises(Unavailable, match="the model tiny was lost"):
            process.run(*batch_of(info))
        assert lost == ["tiny"]
    finally:
        process.close()


@pytest.mark.usefixtures("forked")
def test_model_that_kills_every_new_process_is_no_longer_loaded(tmp_path):
    state, lost = StateEvents(), []
    (tmp_path / "deadly_nets.py").write_text(NETS + DEADLY)
    process = Worker(setup(tmp_path), on_ready=state.on_ready, on_exit=state.on_exit, on_model_lost=lost.append)
    try:
        process.load("once", parse(f"once=deadly_nets:once{SIZE}"))
        info = process.load("tiny", parse(f"tiny=deadly_nets:tiny{SIZE}"))
        os.kill(process.process_id, signal.SIGKILL)
        wait_until(state.down.is_set)
        wait_until(state.up.is_set)

        assert len(process.run(*batch_of(info))) == 3
        assert lost == ["once"]
        assert len((tmp_path / "loads").read_text()) == 1 + worker_module.MAX_FATAL_LOADS
    finally:
        process.close()


@pytest.mark.usefixtures("forked")
def test_model_that_raises_when_loaded_again_is_lost_and_others_can_be_loaded(tmp_path):
    state, lost = StateEvents(), []
    (tmp_path / "raising_nets.py").write_text(NETS + DEADLY.replace("os.abort()", "raise MemoryError"))
    process = Worker(setup(tmp_path), on_ready=state.on_ready, on_exit=state.on_exit, on_model_lost=lost.append)
    try:
        process.load("once", parse(f"once=raising_nets:once{SIZE}"))
        os.kill(process.process_id, signal.SIGKILL)
        wait_until(state.down.is_set)
        wait_until(state.up.is_set)

        assert lost == ["once"]
        info = process.load("tiny", parse(f"tiny=raising_nets:tiny{SIZE}"))
        assert len(process.run(*batch_of(info))) == 3
    finally:
        process.close()


def test_dropped_model_is_not_loaded_again_by_the_next_process(worker):
    process, _, info = worker
    dropped = process.load("dropped", parse(f"dropped=worker_nets:tiny{SIZE}"))
    process.drop("dropped")
    before = process.process_id
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: process.process_id not in (None, before))

    assert len(process.run(*batch_of(info))) == 3
    with pytest.raises(Unavailable, match="the model dropped was lost"):
        process.run(*batch_of(dropped))


@pytest.mark.parametrize("others", [(), pytest.param(("same",), marks=pytest.mark.slow)], ids=["alone", "not alone"])
def test_lost_model_is_listed_as_failed_and_unhealthy_if_it_was_the_last(tmp_path, others):
    (tmp_path / "worker_nets.py").write_text(NETS.replace("manual_seed(0)", "manual_seed(os.getpid())") + SAME)
    flags = [part for name in others for part in ("--model", f"{name}=worker_nets:{name}{SIZE}")]
    with served(tmp_path, *flags) as (server, client):
        client.explain(IMAGE, model="tiny", overlay=None)
        (worker_id,) = server.workers()
        os.kill(worker_id, signal.SIGKILL)
        wait_until(lambda: client.models()[0].state is camserve.ModelState.FAILED)
        wait_until(lambda: healthy(client) is bool(others))
        with pytest.raises(camserve.Unavailable, match="model tiny could not be loaded"):
            client.explain(IMAGE, model="tiny", overlay=None)
        for name in others:
            client.explain(IMAGE, model=name, overlay=None)


def test_worker_process_ends_when_its_server_is_killed(tmp_path):
    """The kernel kills the worker, even if it is stopped."""
    code = (
        "import sys, time; from camserve_server.workers import Setup, Worker\n"
        "up = __import__('threading').Event()\n"
        "worker = Worker(Setup('cpu', 1, path=tuple(sys.path)), on_ready=up.set)\n"
        "up.wait(); print(worker.process_id, flush=True); time.sleep(3600)"
    )
    with (tmp_path / "id").open("w") as file, fork_server.start(code, stdout=file) as parent:
        child = int(wait_until((tmp_path / "id").read_text))
        os.kill(child, signal.SIGSTOP)
        parent.kill()
    wait_until(lambda: not alive(child))


# --- a server with a worker, under load ---


@contextlib.contextmanager
def served(folder, *arguments):
    """Serve in another process; yield it and a client."""
    with server_process((f"tiny=worker_nets:tiny{SIZE}",), *arguments, forked=True, cwd=folder) as server:
        with camserve.Client(server.address, retries=0, timeout=600) as client:
            yield server, client
        assert server.stop() == 0


def healthy(client):
    with contextlib.suppress(camserve.Unavailable):
        return client.health() is camserve.Health.SERVING
    return False


def live(address):
    """Return True if the server reports that its event loop runs."""
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=grpc_server.LIVE)
        response = health_pb2_grpc.HealthStub(channel).Check(request)
    return response.status == health_pb2.HealthCheckResponse.SERVING


@contextlib.contextmanager
def another_worker(server, client):
    """Yield the id of a server's worker; wait until it has ended, another has started, and the server is healthy."""
    (worker_id,), before = server.workers(), set(tree.pids(server.pid))
    yield worker_id
    wait_until(lambda: not alive(worker_id))
    wait_until(lambda: set(tree.pids(server.pid)) - before)
    wait_until(lambda: healthy(client))


@pytest.mark.slow
def test_server_without_its_fork_server_still_starts_workers(folder):
    with served(folder) as (server, client):
        (forker,) = children(server.pid)
        with another_worker(server, client):
            os.kill(forker, signal.SIGKILL)
        client.explain(IMAGE, overlay=None)


def test_lethal_request_kills_at_most_two_workers_and_is_not_retried(folder):
    """The client would retry UNAVAILABLE. The other requests of the batch are answered."""
    white, outcomes = np.full_like(IMAGE, 255), []
    images = [IMAGE] * 4 + [white] + [IMAGE] * 4
    with (
        served(folder, "--max-batch-rows", "16") as (server, _),
        camserve.Client(server.address, timeout=600) as client,
    ):
        with another_worker(server, client), ThreadPoolExecutor(9) as pool:
            calls = [pool.submit(client.explain, image, overlay=None) for image in images]
            outcomes = [call.exception() for call in calls]
        lethal = outcomes.pop(4)
        assert isinstance(lethal, camserve.Internal)
        client.explain(IMAGE, overlay=None)
    log = server.log

    assert outcomes == [None] * 8
    assert "the worker was killed, probably out of memory: exit -9" in lethal.message
    assert error_checks.client_faults(lethal) == []
    assert 1 <= log.count("a worker process ended: the worker was killed, probably out of memory: exit -9") <= 2


def test_all_requests_are_answered_while_workers_are_killed_or_hang(folder):
    """Kill a worker, then stop one, while 16 callers have one request each in flight; CAMSERVE_TEST_ROUNDS times."""
    codes, done, rounds = [], threading.Event(), int(os.environ.get("CAMSERVE_TEST_ROUNDS", "1"))

    def work(client):
        while not done.is_set():
            try:
                client.explain(IMAGE, overlay=None)
                codes.append("OK")
            except camserve.CamserveError as error:
                codes.extend([error.code.name, *error_checks.client_faults(error)])

    with served(folder) as (server, client), ThreadPoolExecutor(16) as pool:
        for _ in range(16):
            pool.submit(work, client)
        for number in (signal.SIGKILL, signal.SIGSTOP) * rounds:
            count = len(codes)
            wait_until(lambda: len(codes) > count + 32)  # noqa: B023 -- called within this iteration
            with another_worker(server, client) as worker_id:
                os.kill(worker_id, number)
                assert live(server.address)
        count = len(codes)
        wait_until(lambda: len(codes) > count + 32)
        done.set()
        (last,) = server.workers()
    counts = Counter(codes)

    assert set(counts) <= {"OK", "INTERNAL"}
    assert counts["INTERNAL"] <= 2 * rounds  # a request may be alone when its worker is killed
    assert not alive(last)


# --- health ---


async def test_health_follows_the_canary_of_an_idle_server(folder, monkeypatch):
    """A pool whose worker lives, but returns only errors or scores that are not finite, is unhealthy."""
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(pool_health, "CANARY_INTERVAL", 0.02)  # real timeout: the test waits for each change
    settings = config.load(flags={"isolation": "thread", "device": "cpu", "threads": 1}, environment={})
    changes = asyncio.Queue()
    async with worker_pool.WorkerPool(settings, changes.put_nowait) as pool:
        pool.registry.models["tiny"] = await pool.load("tiny", parse(f"tiny=worker_nets:tiny{SIZE}"))
        handle = pool.batcher._workers[0]
        run = handle.run

        def not_numbers(pass_, rows):
            return [replace(result, score=float("nan")) for result in run(pass_, rows)]

        def failing(_pass, _rows):
            raise RuntimeError("a sticky error")

        for faulty in (failing, not_numbers):
            handle.run = faulty
            assert await changes.get() is False
            handle.run = run
            assert await changes.get() is True


@pytest.fixture
async def pool(folder, monkeypatch):
    """A pool with a single worker in this process, and a function that submits a batch to it."""
    monkeypatch.syspath_prepend(folder)
    settings = config.load(flags={"isolation": "thread", "device": "cpu", "threads": 1}, environment={})
    async with worker_pool.WorkerPool(settings) as workers:
        pass_, rows = batch_of(await workers.load("tiny", parse(f"tiny=worker_nets:tiny{SIZE}")))
        yield workers, lambda: asyncio.create_task(workers.batcher.submit(pass_, rows, lambda *_: None))


async def test_requests_wait_for_a_lost_worker_but_not_forever(pool):
    workers, submit = pool
    with StoppedClock() as clock:
        workers._on_worker_exit(0)
        waiting = submit()
        clock.advance(pool_health.RECOVERY_TIMEOUT - 1)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        clock.advance(1)
        for refused in (waiting, submit()):
            with pytest.raises(Unavailable, match="no worker is available"):
                await refused
    with pytest.raises(Unavailable, match="no worker is available"):
        async with workers.batcher.admit(1):
            pass
    workers._on_worker_ready(0)
    await submit()


async def test_requests_are_answered_long_after_a_lost_worker_returned(pool):
    workers, submit = pool
    with StoppedClock() as clock:
        workers._on_worker_exit(0)
        workers._on_worker_ready(0)
        clock.advance(pool_health.RECOVERY_TIMEOUT)
        for _ in range(5):
            await asyncio.sleep(0)
    async with workers.batcher.admit(1):
        await submit()
