"""Models are loaded and unloaded under load: the old version answers until the new one is warm, and nothing leaks."""

import contextlib
import hashlib
import logging
import os
import signal
import sys
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, product
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

import camserve
from camserve import cli
from camserve.v1 import models_pb2, models_pb2_grpc
from camserve_server.app import server
from camserve_server.core import config
from camserve_server.core.errors import ConfigError
from camserve_server.models.values import ModelInfo
from camserve_server.serving import repository, worker_pool
from robustness import error_checks, tree
from server_process import server_process
from support import alive, serving, wait_in_loop_until, wait_until

NETS = '''
import os
import time
from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).parent
LEAKED = []


class Waiting(nn.Module):
    """Waits while a file exists."""

    def forward(self, x):
        while (HERE / "hold").exists():
            time.sleep(0.01)  # real timeout: it only polls, until the test removes the file
        return x


def tiny():
    (HERE / "began").touch()
    while (HERE / "wait").exists():
        time.sleep(0.01)  # real timeout: it only polls, until the test removes the file
    layers = nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    return nn.Sequential(Waiting(), *layers)


def larger():
    """Return a network of 2 MB."""
    return nn.Sequential(tiny(), nn.Linear(5, 50_000), nn.ReLU(), nn.Linear(50_000, 5))


def leaking():
    LEAKED.extend(larger() for _ in range(4))
    return LEAKED[-1]


def broken():
    raise ValueError("in /secret/place")


def leaving():
    raise SystemExit


def fatal():
    os.abort()
'''
IMAGE = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
ENOUGH = 8  # answers, while a version serves: two of each caller
LONG = bool(os.environ.get("CAMSERVE_LONG"))  # takes half a minute more
DRAIN_SECONDS = 1  # real timeout: a load that the test holds up outlasts it


class ModelFolder:
    """Folder with a module of networks and their weight files."""

    def __init__(self, path):
        self.path, self.weights = path, path / "weights"
        self.weights.mkdir()
        (path / "coming_nets.py").write_text(NETS)
        for number in range(3):
            self.save(number, f"{number}.safetensors")
        self.choose(0)
        (self.weights / "cut.safetensors").write_bytes((self.weights / "0.safetensors").read_bytes()[:200])

    def save(self, seed, name):
        random = torch.Generator().manual_seed(seed)
        shapes = {"1.weight": (4, 3, 3, 3), "1.bias": (4,), "5.weight": (5, 4), "5.bias": (5,)}
        state = {key: torch.randn(shape, generator=random) for key, shape in shapes.items()}
        save_file(state, self.weights / name)

    def choose(self, name):
        """Replace the weights of the configured file."""
        new = self.weights / f"next-{threading.get_ident()}"
        new.write_bytes((self.weights / f"{name}.safetensors").read_bytes())
        new.replace(self.weights / "tiny.safetensors")

    @property
    def tiny(self):
        return f"tiny=coming_nets:tiny?size=32&weights={self.weights}/tiny.safetensors"

    @contextlib.contextmanager
    def with_file(self, name):
        (self.path / name).touch()
        try:
            yield
        finally:
            (self.path / name).unlink(missing_ok=True)

    def wait_for_load(self):
        wait_until((self.path / "began").exists)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "coming_nets", raising=False)
    yield ModelFolder(tmp_path)
    sys.modules.pop("coming_nets", None)


def served(folder, *models, **settings):
    models = models or (folder.tiny,)
    return serving(models=models, admin=True, model_folder=str(folder.weights), threads=1, device="cpu", **settings)


def start_server(**settings):
    """Start a server, which is expected to fail."""
    flags = {"address": "127.0.0.1:0", "isolation": "thread", "threads": 1, **settings}
    with server.serve_in_thread(config.load(flags=flags, environment={})):
        pass


def client_of(server, **options):
    return camserve.Client(getattr(server, "address", server), **{"retries": 0, "timeout": 600, **options})


@pytest.fixture
def client(folder):
    with served(folder) as running, client_of(running) as client:
        yield client


@pytest.fixture(scope="module")
def unchanged_client(tmp_path_factory):
    """Client of a server that tests share, because it refuses all that they ask of it."""
    folder = tmp_path_factory.mktemp("unchanged")
    (folder / "0.safetensors").touch()
    models = ("tiny=robustness.nets:tiny?size=32",)
    with (
        serving(models=models, admin=True, model_folder=str(folder), threads=1, device="cpu") as running,
        client_of(running) as client,
    ):
        yield client


def explain(client, **options):
    return client.explain(IMAGE, overlay=None, targets=[0], **options).explanations[0]


class Callers:
    """Callers that send requests all the time, and record each answer: digest and score, or the error code."""

    def __init__(self, address, count=4):
        self.answers, self._done = [], threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(address,)) for _ in range(count)]

    def _work(self, address):
        with client_of(address) as client:
            while not self._done.is_set():
                try:
                    explanation = explain(client, model="tiny")
                    self.answers.append((explanation.receipt.digest, explanation.score))
                except camserve.CamserveError as error:
                    self.answers.append((error.code.name, None))

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        self.wait_for_answers(ENOUGH)
        return self

    def __exit__(self, *_):
        self._done.set()
        for thread in self._threads:
            thread.join()

    def wait_for_answers(self, count):
        """Wait for `count` further answers."""
        enough = len(self.answers) + count
        wait_until(lambda: len(self.answers) >= enough)

    @property
    def scores(self):
        """The scores by digest; an error code takes the place of a digest."""
        scores = defaultdict(set)
        for digest, score in self.answers:
            scores[digest].add(score)
        return dict(scores)


# --- at startup ---


@pytest.mark.parametrize("factory", ["broken", "leaving"])
@pytest.mark.parametrize("first", [True, False])
def test_model_that_fails_to_load_does_not_affect_others(folder, factory, first, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("camserve_server"), "propagate", True)
    models = (f"bad=coming_nets:{factory}?size=32", folder.tiny)
    with served(folder, *(models if first else models[::-1])) as running, client_of(running) as client:
        listed = {model.name: model for model in client.models()}

        assert list(listed) == (["bad", "tiny"] if first else ["tiny", "bad"])
        assert (listed["bad"].state, listed["bad"].version) == ("FAILED", 0)
        assert (listed["tiny"].state, listed["tiny"].version) == ("READY", 1)
        assert client.model("bad").source == f"coming_nets:{factory}"
        assert explain(client, model="tiny").score
        for name in ["bad", ""] if first else ["bad"]:
            with pytest.raises(camserve.Unavailable, match=r"model bad could not be loaded; the server's log says why"):
                explain(client, model=name)
    assert [entry.levelname for entry in caplog.records if "could not be loaded: " in entry.getMessage()] == ["ERROR"]


def test_server_without_a_loadable_model_ends_with_every_reason(folder):
    bad, worse = (
        "bad=coming_nets:broken",
        f"worse=coming_nets:tiny?weights={folder.weights}/cut.safetensors&size=32",
    )
    with pytest.raises(ConfigError, match=r"^bad: .*secret.*; worse: .*the weights in cut.safetensors"):
        start_server(models=(bad, worse))


@pytest.mark.usefixtures("forked")
def test_model_that_ends_its_process_does_not_affect_the_next(folder):
    models = ("fatal=coming_nets:fatal?size=32", folder.tiny)
    with served(folder, *models, isolation="process") as running, client_of(running) as client:
        assert [model.state for model in client.models()] == ["FAILED", "READY"]
        assert explain(client, model="tiny").score


# --- loading again ---


def test_reload_fails_no_call_and_no_answer_mixes_two_versions(folder):
    with served(folder) as running, client_of(running) as client:
        digests = [client.model().digest]
        with Callers(running.address) as callers:
            for version in (2, 3):
                folder.choose(version - 1)
                model = client.load_model("tiny")
                assert (model.version, model.state) == (version, "READY")
                digests.append(model.digest)
                callers.wait_for_answers(ENOUGH)
        check_versions(callers.scores, digests)


def check_versions(scores, digests):
    assert set(scores) == set(digests)
    assert len(set(digests)) == 3
    by_version = [scores[digest] for digest in digests]
    assert all(max(own) - min(own) < 1e-5 for own in by_version)  # the size of a batch changes scores by less
    pairs = [pair for own, others in combinations(by_version, 2) for pair in product(own, others)]
    assert min(abs(first - second) for first, second in pairs) > 0.01


@pytest.mark.slow
def test_mixed_versions_are_detected(folder, monkeypatch):
    """Planted fault: all versions have one key, so that rows of the old version run on the new one."""
    load = worker_pool.WorkerPool.load

    async def load_over_old_version(self, _key, spec):
        info = await load(self, spec.name, spec)
        stats = self.batcher.stats
        if rows := stats.rows:
            await wait_in_loop_until(lambda: stats.rows > rows + ENOUGH)  # meanwhile the old version should answer
        return info

    async def keep(*_):
        pass

    monkeypatch.setattr(worker_pool.WorkerPool, "load", load_over_old_version)
    monkeypatch.setattr(worker_pool.WorkerPool, "drop", keep)
    monkeypatch.setattr(ModelInfo, "key", property(lambda self: self.name))
    with pytest.raises(AssertionError):
        test_reload_fails_no_call_and_no_answer_mixes_two_versions(folder)


def test_failed_reload_leaves_the_old_version_in_service(folder):
    with served(folder) as running, client_of(running) as client:
        before = client.model()
        with Callers(running.address) as callers:
            for weights in ("cut.safetensors", ""):
                if not weights:
                    folder.choose("cut")
                message = "model tiny could not be loaded again: version 1 goes on answering; the server's log says why"
                with pytest.raises(camserve.FailedPrecondition, match=f"^{message} "):
                    client.load_model("tiny", weights=weights)
                callers.wait_for_answers(ENOUGH)
        assert list(callers.scores) == [before.digest]
        assert client.model() == before


def test_failed_model_can_be_loaded_later(folder):
    folder.choose("cut")
    with (
        served(folder, folder.tiny, "other=robustness.nets:tiny?size=32") as running,
        client_of(running) as client,
    ):
        with pytest.raises(camserve.FailedPrecondition, match=r"^model tiny could not be loaded; the server's log"):
            client.load_model("tiny")
        assert client.models()[0].state == "FAILED"
        folder.choose(1)
        assert client.load_model("tiny").version == 1
        assert explain(client).score


def test_cancelled_load_finishes_if_it_started_and_is_skipped_otherwise(folder):
    with (
        served(folder) as running,
        client_of(running) as client,
        grpc.insecure_channel(running.address) as channel,
    ):
        load, lock = models_pb2_grpc.ModelServiceStub(channel).LoadModel.future, running.pipeline.repository._lock
        folder.choose(1)
        (folder.path / "began").unlink()
        with folder.with_file("wait"):
            started = load(models_pb2.LoadModelRequest(name="tiny"))
            folder.wait_for_load()
            started.cancel()
            waiting = load(models_pb2.LoadModelRequest(name="tiny", weights="2.safetensors"))
            wait_until(lambda: running.do(lambda: bool(lock._waiters)))
            waiting.cancel()
            wait_until(lambda: running.do(lambda: not lock._waiters))
            assert client.model().version == 1
        wait_until(lambda: client.model().version == 2)

        assert client.load_model("tiny").version == 3  # not 4, because the second load never started
        assert explain(client).receipt.digest == client.model().digest


# --- names of weight files ---


@pytest.mark.parametrize(
    "name",
    [
        "../tiny.safetensors",
        "weights/../../tiny.safetensors",
        "/etc/passwd",
        "/etc/passwd.pth",
        "..\\tiny.pth",
        "http://127.0.0.1/w.safetensors",
        "file:///etc/w.pth",
        ".hidden.pth",
        "-/./0.safetensors",
        "0.safetensors/",
        "tiny\0.pth",
        "tiny .pth",
        "\uff0e\uff0e/tiny.pth",
        "default",
        "none",
        "passwd",
    ],
)
def test_weights_outside_of_the_model_folder_are_refused(unchanged_client, name):
    with pytest.raises(camserve.InvalidArgument, match=r"^weights must be a path inside of the model folder") as caught:
        unchanged_client.load_model("tiny", weights=name)
    assert list(caught.value.fields) == ["weights"]
    assert unchanged_client.model().version == 1


def test_missing_file_and_link_to_outside_have_the_same_error(folder, client):
    """Otherwise callers could find out which files exist outside."""
    (folder.path / "outside.safetensors").write_bytes((folder.weights / "1.safetensors").read_bytes())
    (folder.weights / "link.safetensors").symlink_to(folder.path / "outside.safetensors")
    (folder.weights / "folder").symlink_to(folder.path)
    (folder.weights / "dangling.pth").symlink_to(folder.path / "nothing.pth")
    (folder.weights / "sub.pth").mkdir()
    names = ("link.safetensors", "folder/outside.safetensors", "dangling.pth", "nothing.pth", "sub.pth", "no/such.pth")
    for name in names:
        with pytest.raises(camserve.NotFound, match=r"^no such file in the model folder"):
            client.load_model("tiny", weights=name)
    (folder.weights / "inside").mkdir()
    (folder.weights / "inside" / "good.safetensors").symlink_to(folder.weights / "1.safetensors")

    assert client.load_model("tiny", weights="inside/good.safetensors").version == 2


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_file_replaced_by_a_link_before_opening_is_not_loaded(folder, isolation, monkeypatch):
    (folder.path / "outside.safetensors").write_bytes((folder.weights / "1.safetensors").read_bytes())
    resolve = repository._file

    def resolve_and_exchange(model_folder, name):
        path = resolve(model_folder, name)
        path.unlink()
        path.symlink_to(folder.path / "outside.safetensors")
        return path

    monkeypatch.setattr(repository, "_file", resolve_and_exchange)
    with served(folder, isolation=isolation) as running, client_of(running) as client:
        with pytest.raises(camserve.FailedPrecondition, match="version 1 goes on"):
            client.load_model("tiny", weights="2.safetensors")
        assert client.model().version == 1


def test_pinned_file_must_have_its_digest(folder, client):
    digest = hashlib.sha256((folder.weights / "1.safetensors").read_bytes()).hexdigest()
    with pytest.raises(camserve.FailedPrecondition, match="version 1 goes on"):
        client.load_model("tiny", weights="2.safetensors", sha256=digest)
    with pytest.raises(camserve.InvalidArgument, match="64 hexadecimal"):
        client.load_model("tiny", sha256="abc")

    assert client.load_model("tiny", weights="1.safetensors", sha256=digest.upper()).version == 2


def test_configured_digest_cannot_be_overridden(folder):
    digest = hashlib.sha256((folder.weights / "tiny.safetensors").read_bytes()).hexdigest()
    models = (f"{folder.tiny}&sha256={digest}", "other=robustness.nets:tiny?size=32")
    with served(folder, *models) as running, client_of(running) as client:
        with pytest.raises(camserve.InvalidArgument, match="the configuration of tiny has another sha256"):
            client.load_model("tiny", sha256="0" * 64)
        with pytest.raises(camserve.InvalidArgument, match="the configuration of other names none"):
            client.load_model("other", sha256=digest)
        assert client.load_model("tiny", sha256=digest).version == 2


def test_only_configured_models_can_be_loaded_by_name(unchanged_client):
    with pytest.raises(camserve.NotFound, match='unknown model "resnet18": the server has tiny'):
        unchanged_client.load_model("resnet18")
    with pytest.raises(camserve.InvalidArgument, match="name the model"):
        unchanged_client.load_model("")
    with pytest.raises(camserve.NotFound, match=r'unknown model "tinny".*did you mean "tiny"'):
        unchanged_client.unload_model("tinny")


def test_loading_and_unloading_need_the_admin_setting(folder):
    with serving(models=(folder.tiny,), threads=1) as running, client_of(running) as client:
        for call in (client.load_model, client.unload_model):
            with pytest.raises(camserve.FailedPrecondition, match="the server's setting admin is off"):
                call("tiny")
    with serving(models=(folder.tiny,), threads=1, admin=True) as running, client_of(running) as client:
        with pytest.raises(camserve.FailedPrecondition, match="the server's setting model_folder is empty"):
            client.load_model("tiny", weights="1.safetensors")
        assert client.load_model("tiny").version == 2
    with pytest.raises(ConfigError, match="there is no such folder"):
        start_server(models=(folder.tiny,), model_folder=str(folder.path / "nowhere"))


# --- unloading ---


def test_unloading_finishes_accepted_requests_and_refuses_new_ones(folder):
    with served(folder) as running, client_of(running) as client, ThreadPoolExecutor(3) as pool:
        with folder.with_file("hold"):
            accepted = pool.submit(explain, client)
            wait_until(lambda: running.do(lambda: running.pipeline.batcher.admitted))
            unloading = pool.submit(client.unload_model, "tiny")
            wait_until(lambda: client.models()[0].state == "UNLOADING")
            with pytest.raises(camserve.NotFound, match="model tiny is not loaded: it was unloaded"):
                explain(client)
            assert not any(call.done() for call in (accepted, unloading))
        assert accepted.result().score
        assert unloading.result().state == "UNLOADED"
        assert client.unload_model("tiny").state == "UNLOADED"  # unloading twice is not an error
        with pytest.raises(camserve.NotFound, match="model tiny is not loaded"):
            explain(client, model="tiny")
        assert client.load_model("tiny").version == 2
        assert explain(client).score


def test_model_can_be_loaded_while_its_old_version_finishes_requests(folder):
    with served(folder) as running, client_of(running) as client, ThreadPoolExecutor(3) as pool:
        with folder.with_file("hold"):
            accepted = pool.submit(explain, client)
            wait_until(lambda: running.do(lambda: running.pipeline.batcher.admitted))
            unloading = pool.submit(client.unload_model, "tiny")
            wait_until(lambda: client.models()[0].state == "UNLOADING")
            loading = pool.submit(client.load_model, "tiny")
            wait_until(lambda: client.models()[0].state == "LOADING")
        assert accepted.result().score
        assert loading.result().version == 2
        assert unloading.result().state in {"LOADING", "READY"}
        assert explain(client).score


# --- by the client and the command line ---


async def test_async_client_loads_and_unloads(folder):
    with served(folder) as running:
        async with camserve.AsyncClient(running.address, retries=0) as client:
            assert (await client.unload_model("tiny")).state is camserve.ModelState.UNLOADED
            loaded = await client.load_model("tiny", weights="1.safetensors")
            assert (loaded.state, loaded.version) == (camserve.ModelState.READY, 2)
            assert await client.models() == (loaded,)


def test_commands_load_unload_and_show_model_states(folder):
    with served(folder, folder.tiny, "bad=coming_nets:broken?size=32") as running:

        def run(*arguments):
            return CliRunner().invoke(cli.main, [*arguments, "--server", running.address])

        assert "unloaded, version 1" in run("unload", "tiny").stdout
        loaded = run("load", "tiny", "--weights", "1.safetensors")
        lines = run("models").stdout.splitlines()
        assert "ready, version 2" in loaded.stdout
        assert [line.rstrip().split("  ")[-1].strip() for line in lines[1:3]] == ["ready, version 2", "failed"]
        failed = run("load", "bad")
        assert failed.exit_code
        assert "model bad could not be loaded; the server's log says why" in failed.stderr


# --- load ---


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("threads", "times"), [(4, 2), pytest.param(8, 100 if LONG else 4, marks=pytest.mark.slow)])
def test_concurrent_loads_and_explanations_return_only_documented_codes(folder, threads, times):
    """Each thread has these turns: with CAMSERVE_LONG, 100."""

    def work(number):
        with client_of(running) as client:
            for turn in range(times):
                if (number + turn) % 3:
                    folder.choose((number + turn) % 3)
                    client.load_model("tiny", weights=f"{(number + turn) % 3}.safetensors" if turn % 2 else "")
                else:
                    client.unload_model("tiny")

    with served(folder, isolation="process") as running, client_of(running) as client:
        with Callers(running.address) as callers, ThreadPoolExecutor(threads) as pool:
            for task in [pool.submit(work, number) for number in range(threads)]:
                task.result()
        client.load_model("tiny")
        assert explain(client).score
        registry = running.pipeline.repository._registry
        wait_until(lambda: not (registry._holders or registry._waiting or running.pipeline.repository._tasks))
    codes = {key for key in callers.scores if key.isupper()}

    assert codes <= {"NOT_FOUND", "UNAVAILABLE"}
    assert all(max(scores) - min(scores) < 1e-5 for key, scores in callers.scores.items() if key not in codes)


def memory_of(process_id):
    """Return the private memory of a process in MB."""
    lines = Path(f"/proc/{process_id}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


@contextlib.contextmanager
def process(folder, *models, isolation="process"):
    """Serve in another process; yield it and a client."""
    flags = ("--admin", "--drain-seconds", DRAIN_SECONDS, "--isolation", isolation, "--threads", 1)
    with (
        server_process(models, *flags, forked=True, cwd=folder.path) as running,
        client_of(running) as client,
    ):
        yield running, client


@pytest.fixture(scope="module")
def cycling(tmp_path_factory):
    models = (f"{name}=coming_nets:{name}?size=32" for name in ("tiny", "larger", "leaking"))
    with process(ModelFolder(tmp_path_factory.mktemp("cycling")), *models) as server:
        yield server


def growth(cycling, name, warm, cycles):
    """Return the growth of the server and its worker in MB, over `cycles` loads and unloads after `warm` others."""
    running, client = cycling
    sizes = []
    for turns in (warm, cycles):
        for _ in range(turns):
            client.unload_model(name)
            client.load_model(name)
            explain(client, model=name)
        sizes.append(np.array([memory_of(pid) for pid in (running.pid, *running.workers())]))
    return sizes[1] - sizes[0]


@pytest.mark.slow
def test_unloading_releases_memory(cycling):
    """60 cycles of a model of 2 MB take at most 20 MB."""
    grown = growth(cycling, "larger", 10, 60)
    print(f"server {grown[0]:.1f} MB, worker {grown[1]:.1f} MB")  # noqa: T201 -- shown by pytest -s
    assert grown.max() <= 20


@pytest.mark.slow
def test_leaked_model_is_detected(cycling):
    """Planted fault: a factory that keeps its networks."""
    assert growth(cycling, "leaking", 1, 4).max() > 20


# --- stopping ---


@pytest.mark.parametrize("isolation", ["process", pytest.param("thread", marks=pytest.mark.slow)])
def test_server_stops_during_a_reload_and_leaves_no_process(folder, isolation):
    with (
        process(folder, folder.tiny, isolation=isolation) as (running, client),
        ThreadPoolExecutor(1) as pool,
    ):
        (folder.path / "began").unlink()
        with folder.with_file("wait"):
            loading = pool.submit(client.load_model, "tiny")
            folder.wait_for_load()
            started = tree.pids(running.pid)[1:]
            running.send_signal(signal.SIGTERM)
            assert running.wait() == 0  # while the model still loads
            wait_until(lambda: not any(map(alive, started)))
        with pytest.raises(camserve.Unavailable, match="the server is draining"):
            loading.result()


def test_errors_have_the_request_id_and_no_internals(folder):
    models = "bad=coming_nets:broken?size=32", folder.tiny
    with served(folder, *models) as running, grpc.insecure_channel(running.address) as channel:
        stub = models_pb2_grpc.ModelServiceStub(channel)
        for name, weights in (
            ("bad", ""),
            ("tiny", "cut.safetensors"),
            ("tiny", "/etc/passwd"),
            ("tiny", "no.pth"),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                stub.LoadModel(models_pb2.LoadModelRequest(name=name, weights=weights))
            assert not error_checks.faults(caught.value, sent=(weights,))
