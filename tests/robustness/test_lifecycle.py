"""Models come and go under traffic: a version answers until the next one is warm, and nothing of it stays behind."""

import contextlib
import hashlib
import logging
import os
import signal
import socket
import sys
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

import camserve
import fork_server
from camserve import cli
from camserve.v1 import models_pb2, models_pb2_grpc
from camserve_server.app import server
from camserve_server.core import config
from camserve_server.core.errors import ConfigError
from camserve_server.models.values import ModelInfo
from camserve_server.serving import repository, worker_pool
from robustness import error_checks
from support import alive, children, serving, wait_in_loop_until, wait_until

NETS = '''
import os
import time
from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).parent
KEPT = []


class Waiting(nn.Module):
    """Waits as long as a file is there."""

    def forward(self, x):
        while (HERE / "hold").exists():
            time.sleep(0.01)
        return x


def tiny():
    (HERE / "began").touch()
    while (HERE / "wait").exists():
        time.sleep(0.01)
    layers = nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    return nn.Sequential(Waiting(), *layers)


def larger():
    """Takes 2 MB."""
    return nn.Sequential(tiny(), nn.Linear(5, 50_000), nn.ReLU(), nn.Linear(50_000, 5))


def leaking():
    KEPT.append(larger())
    return KEPT[-1]


def broken():
    raise ValueError("in /secret/place")


def leaving():
    raise SystemExit


def fatal():
    os.abort()
'''
IMAGE = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
LONG = bool(os.environ.get("CAMSERVE_LONG"))  # half a minute more
GRACE = 2


class Place:
    """A folder with nets, and files of weights beside them."""

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
        """Let that be the weights that the configuration names."""
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

    def began(self):
        wait_until((self.path / "began").exists)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "coming_nets", raising=False)
    yield Place(tmp_path)
    sys.modules.pop("coming_nets", None)


def served(place, *models, **settings):
    models = models or (place.tiny,)
    return serving(models=models, admin=True, model_folder=str(place.weights), threads=1, device="cpu", **settings)


def begun(**settings):
    """Begin to serve, which is expected to fail."""
    flags = {"address": "127.0.0.1:0", "isolation": "thread", "threads": 1, **settings}
    with server.serve_in_thread(config.load(flags=flags, environment={})):
        pass


def client_of(one, **options):
    return camserve.Client(getattr(one, "address", one), **{"retries": 0, "timeout": 60, **options})


@pytest.fixture
def line(place):
    with served(place) as one, client_of(one) as client:
        yield client


def explained(client, **options):
    return client.explain(IMAGE, overlay=None, targets=[0], **options).explanations[0]


class Crowd:
    """Callers that ask again and again, and note each answer: digest and score, or the code."""

    def __init__(self, address, count=4):
        self.answers, self._done = [], threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(address,)) for _ in range(count)]

    def _work(self, address):
        with client_of(address) as client:
            while not self._done.is_set():
                try:
                    one = explained(client, model="tiny")
                    self.answers.append((one.receipt.digest, one.score))
                except camserve.CamserveError as error:
                    self.answers.append((error.code.name, None))

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        self.more(20)
        return self

    def __exit__(self, *_):
        self._done.set()
        for thread in self._threads:
            thread.join()

    def more(self, count):
        """Wait for so many more answers."""
        enough = len(self.answers) + count
        wait_until(lambda: len(self.answers) >= enough)

    @property
    def found(self):
        """The scores by digest, and the codes that are none."""
        found = defaultdict(set)
        for digest, score in self.answers:
            found[digest].add(score)
        return dict(found)


# --- at the start ---


@pytest.mark.parametrize("factory", ["broken", "leaving"])
@pytest.mark.parametrize("first", [True, False])
def test_a_model_that_cannot_be_loaded_does_not_keep_the_others_from_it(place, factory, first, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("camserve_server"), "propagate", True)
    models = (f"bad=coming_nets:{factory}?size=32", place.tiny)
    with served(place, *(models if first else models[::-1])) as one, client_of(one) as client:
        listed = {model.name: model for model in client.models()}

        assert list(listed) == (["bad", "tiny"] if first else ["tiny", "bad"])
        assert (listed["bad"].state, listed["bad"].version) == ("FAILED", 0)
        assert (listed["tiny"].state, listed["tiny"].version) == ("READY", 1)
        assert client.model("bad").source == f"coming_nets:{factory}"
        assert explained(client, model="tiny").score
        for name in ["bad", ""] if first else ["bad"]:
            with pytest.raises(camserve.Unavailable, match=r"model bad could not be loaded; the server's log says why"):
                explained(client, model=name)
    assert [entry.levelname for entry in caplog.records if "could not be loaded: " in entry.getMessage()] == ["ERROR"]


def test_a_server_of_which_no_model_can_be_loaded_ends_and_says_why_of_each(place):
    bad, worse = "bad=coming_nets:broken", f"worse=coming_nets:tiny?weights={place.weights}/cut.safetensors&size=32"
    with pytest.raises(ConfigError, match=r"^bad: .*secret.*; worse: .*the weights in cut.safetensors"):
        begun(models=(bad, worse))


@pytest.mark.usefixtures("forked")
def test_a_model_that_ends_its_process_does_not_keep_the_next_from_being_loaded(place):
    models = ("fatal=coming_nets:fatal?size=32", place.tiny)
    with served(place, *models, isolation="process") as one, client_of(one) as client:
        assert [model.state for model in client.models()] == ["FAILED", "READY"]
        assert explained(client, model="tiny").score


# --- loading again ---


def test_reload_fails_no_call_and_no_answer_mixes_two_versions(place):
    with served(place) as one, client_of(one) as client:
        digests = [client.model().digest]
        with Crowd(one.address) as crowd:
            for version in (2, 3):
                place.choose(version - 1)
                model = client.load_model("tiny")
                assert (model.version, model.state) == (version, "READY")
                digests.append(model.digest)
                crowd.more(20)
        check_versions(crowd.found, digests)


def check_versions(found, digests):
    assert set(found) == set(digests)
    assert len(set(digests)) == 3
    scores = [found[digest] for digest in digests]
    assert all(max(own) - min(own) < 1e-5 for own in scores)  # which is what a batch's size may change
    assert min(abs(one - other) for own, others in combinations(scores, 2) for one in own for other in others) > 0.01


def test_versions_that_were_mixed_would_show(place, monkeypatch):
    """Planted: the versions of a model have one key, so that rows of the old one run on the new one."""
    load = worker_pool.WorkerPool.load

    async def loaded_over_the_old(self, _key, spec):
        info = await load(self, spec.name, spec)
        stats = self.batcher.stats
        if rows := stats.rows:
            await wait_in_loop_until(lambda: stats.rows > rows + 20)  # in which the old one should go on answering
        return info

    async def kept(*_):
        pass

    monkeypatch.setattr(worker_pool.WorkerPool, "load", loaded_over_the_old)
    monkeypatch.setattr(worker_pool.WorkerPool, "drop", kept)
    monkeypatch.setattr(ModelInfo, "key", property(lambda self: self.name))
    with pytest.raises(AssertionError):
        test_reload_fails_no_call_and_no_answer_mixes_two_versions(place)


def test_one_that_cannot_be_loaded_again_goes_on_answering_as_before(place):
    with served(place) as one, client_of(one) as client:
        before = client.model()
        with Crowd(one.address) as crowd:
            for weights in ("cut.safetensors", ""):
                if not weights:
                    place.choose("cut")
                words = "model tiny could not be loaded again: version 1 goes on answering; the server's log says why"
                with pytest.raises(camserve.FailedPrecondition, match=f"^{words} "):
                    client.load_model("tiny", weights=weights)
                crowd.more(20)
        assert list(crowd.found) == [before.digest]
        assert client.model() == before


def test_a_model_that_failed_is_loaded_once_it_can_be(place):
    place.choose("cut")
    with served(place, place.tiny, "other=robustness.nets:tiny?size=32") as one, client_of(one) as client:
        with pytest.raises(camserve.FailedPrecondition, match=r"^model tiny could not be loaded; the server's log"):
            client.load_model("tiny")
        assert client.models()[0].state == "FAILED"
        place.choose(1)
        assert client.load_model("tiny").version == 1
        assert explained(client).score


def test_cancelled_load_finishes_if_it_started_and_is_skipped_otherwise(place, line):
    place.choose(1)
    (place.path / "began").unlink()
    with place.with_file("wait"):
        with pytest.raises(camserve.DeadlineExceeded):
            line.load_model("tiny", timeout=0.5)
        place.began()
        with pytest.raises(camserve.DeadlineExceeded):
            line.load_model("tiny", weights="2.safetensors", timeout=0.5)
        assert line.model().version == 1
    wait_until(lambda: line.model().version == 2)

    assert line.load_model("tiny").version == 3  # and not 4: the second was never begun
    assert explained(line).receipt.digest == line.model().digest


# --- which weights may be named ---


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
def test_weights_that_are_no_path_inside_of_the_folder_are_refused(line, name):
    with pytest.raises(camserve.InvalidArgument, match=r"^weights must be a path inside of the model folder") as caught:
        line.load_model("tiny", weights=name)
    assert list(caught.value.fields) == ["weights"]
    assert line.model().version == 1


def test_what_is_not_there_is_told_as_what_a_link_outside_leads_to(place, line):
    """So that nobody learns what there is outside."""
    (place.path / "outside.safetensors").write_bytes((place.weights / "1.safetensors").read_bytes())
    (place.weights / "link.safetensors").symlink_to(place.path / "outside.safetensors")
    (place.weights / "folder").symlink_to(place.path)
    (place.weights / "dangling.pth").symlink_to(place.path / "nothing.pth")
    (place.weights / "sub.pth").mkdir()
    names = ("link.safetensors", "folder/outside.safetensors", "dangling.pth", "nothing.pth", "sub.pth", "no/such.pth")
    for name in names:
        with pytest.raises(camserve.NotFound, match=r"^no such file in the model folder"):
            line.load_model("tiny", weights=name)
    (place.weights / "inside").mkdir()
    (place.weights / "inside" / "good.safetensors").symlink_to(place.weights / "1.safetensors")

    assert line.load_model("tiny", weights="inside/good.safetensors").version == 2


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_file_replaced_by_a_link_before_opening_is_not_loaded(place, isolation, monkeypatch):
    (place.path / "outside.safetensors").write_bytes((place.weights / "1.safetensors").read_bytes())
    resolve = repository.ModelRepository._file

    def resolve_and_exchange(self, name):
        path = resolve(self, name)
        path.unlink()
        path.symlink_to(place.path / "outside.safetensors")
        return path

    monkeypatch.setattr(repository.ModelRepository, "_file", resolve_and_exchange)
    with served(place, isolation=isolation) as one, client_of(one) as client:
        with pytest.raises(camserve.FailedPrecondition, match="version 1 goes on"):
            client.load_model("tiny", weights="2.safetensors")
        assert client.model().version == 1


def test_a_pinned_file_is_loaded_by_its_digest_and_no_other(place, line):
    right = hashlib.sha256((place.weights / "1.safetensors").read_bytes()).hexdigest()
    with pytest.raises(camserve.FailedPrecondition, match="version 1 goes on"):
        line.load_model("tiny", weights="2.safetensors", sha256=right)
    with pytest.raises(camserve.InvalidArgument, match="64 hexadecimal"):
        line.load_model("tiny", sha256="abc")

    assert line.load_model("tiny", weights="1.safetensors", sha256=right.upper()).version == 2


def test_a_pin_of_the_configuration_stays_and_a_model_without_a_file_has_none(place):
    digest = hashlib.sha256((place.weights / "tiny.safetensors").read_bytes()).hexdigest()
    models = (f"{place.tiny}&sha256={digest}", "other=robustness.nets:tiny?size=32")
    with served(place, *models) as one, client_of(one) as client:
        with pytest.raises(camserve.InvalidArgument, match="the configuration of tiny has another sha256"):
            client.load_model("tiny", sha256="0" * 64)
        with pytest.raises(camserve.InvalidArgument, match="the configuration of other names none"):
            client.load_model("other", sha256=digest)
        assert client.load_model("tiny", sha256=digest).version == 2


def test_only_a_model_of_the_configuration_can_be_loaded_and_it_must_be_named(line):
    with pytest.raises(camserve.NotFound, match='unknown model "resnet18": the server has tiny'):
        line.load_model("resnet18")
    with pytest.raises(camserve.InvalidArgument, match="name the model"):
        line.load_model("")
    with pytest.raises(camserve.NotFound, match=r'unknown model "tinny".*did you mean "tiny"'):
        line.unload_model("tinny")


def test_nothing_of_it_is_possible_unless_a_setting_says_so(place):
    with serving(models=(place.tiny,), threads=1) as one, client_of(one) as client:
        for call in (client.load_model, client.unload_model):
            with pytest.raises(camserve.FailedPrecondition, match="the server's setting admin is off"):
                call("tiny")
    with serving(models=(place.tiny,), threads=1, admin=True) as one, client_of(one) as client:
        with pytest.raises(camserve.FailedPrecondition, match="the server's setting model_folder is empty"):
            client.load_model("tiny", weights="1.safetensors")
        assert client.load_model("tiny").version == 2
    with pytest.raises(ConfigError, match="there is no such folder"):
        begun(models=(place.tiny,), model_folder=str(place.path / "nowhere"))


# --- unloading ---


def test_unloading_finishes_what_was_accepted_and_refuses_what_comes(place):
    with served(place) as one, client_of(one) as client, ThreadPoolExecutor(3) as pool:
        with place.with_file("hold"):
            accepted = pool.submit(explained, client)
            wait_until(lambda: one.do(lambda: one.pipeline.batcher.admitted))
            going = pool.submit(client.unload_model, "tiny")
            wait_until(lambda: client.models()[0].state == "UNLOADING")
            with pytest.raises(camserve.NotFound, match="model tiny is not loaded: it was unloaded"):
                explained(client)
            assert not any(each.done() for each in (accepted, going))
        assert accepted.result().score
        assert going.result().state == "UNLOADED"
        assert client.unload_model("tiny").state == "UNLOADED"  # to do it twice is no error
        with pytest.raises(camserve.NotFound, match="model tiny is not loaded"):
            explained(client, model="tiny")
        assert client.load_model("tiny").version == 2
        assert explained(client).score


def test_model_can_be_loaded_while_its_old_version_finishes_requests(place):
    with served(place) as one, client_of(one) as client, ThreadPoolExecutor(3) as pool:
        with place.with_file("hold"):
            accepted = pool.submit(explained, client)
            wait_until(lambda: one.do(lambda: one.pipeline.batcher.admitted))
            going = pool.submit(client.unload_model, "tiny")
            wait_until(lambda: client.models()[0].state == "UNLOADING")
            loading = pool.submit(client.load_model, "tiny")
            wait_until(lambda: client.models()[0].state == "LOADING")
        assert accepted.result().score
        assert loading.result().version == 2
        assert going.result().state in {"LOADING", "READY"}
        assert explained(client).score


# --- by the client and the command line ---


async def test_the_async_client_loads_and_unloads_as_the_other_does(place):
    with served(place) as one:
        async with camserve.AsyncClient(one.address, retries=0) as client:
            assert (await client.unload_model("tiny")).state is camserve.ModelState.UNLOADED
            loaded = await client.load_model("tiny", weights="1.safetensors")
            assert (loaded.state, loaded.version) == (camserve.ModelState.READY, 2)
            assert await client.models() == (loaded,)


def test_the_commands_load_unload_and_show_how_each_model_stands(place):
    with served(place, place.tiny, "bad=coming_nets:broken?size=32") as one:

        def run(*arguments):
            return CliRunner().invoke(cli.main, [*arguments, "--server", one.address])

        assert "unloaded, version 1" in run("unload", "tiny").stdout
        loaded = run("load", "tiny", "--weights", "1.safetensors")
        lines = run("models").stdout.splitlines()
        assert "ready, version 2" in loaded.stdout
        assert [line.rstrip().split("  ")[-1].strip() for line in lines[1:3]] == ["ready, version 2", "failed"]
        failed = run("load", "bad")
        assert failed.exit_code
        assert "model bad could not be loaded; the server's log says why" in failed.stderr


# --- many of them ---


@pytest.mark.usefixtures("forked")
def test_concurrent_loads_and_explanations_return_only_documented_codes(place):
    """100 each with CAMSERVE_LONG, and 20 without."""
    times = 100 if LONG else 20

    def work(number):
        with client_of(one, timeout=600) as client:
            for turn in range(times):
                if (number + turn) % 3:
                    place.choose((number + turn) % 3)
                    client.load_model("tiny", weights=f"{(number + turn) % 3}.safetensors" if turn % 2 else "")
                else:
                    client.unload_model("tiny")

    with served(place, isolation="process") as one, client_of(one, timeout=600) as client:
        with Crowd(one.address) as crowd, ThreadPoolExecutor(8) as pool:
            for task in [pool.submit(work, number) for number in range(8)]:
                task.result()
        client.load_model("tiny")
        assert explained(client).score
        registry = one.pipeline.repository._registry
        wait_until(lambda: not (registry._holders or registry._waiting or one.pipeline.repository._tasks))
    codes = {what for what in crowd.found if what.isupper()}

    assert codes <= {"NOT_FOUND", "UNAVAILABLE"}
    assert all(max(scores) - min(scores) < 1e-5 for what, scores in crowd.found.items() if what not in codes)


def memory_of(process_id):
    """Return what a process has for itself, in MB."""
    lines = Path(f"/proc/{process_id}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


@contextlib.contextmanager
def process(place, *models, isolation="process"):
    """Serve in a process of its own; yield it and a client."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = ["--admin", "--address", address, "--drain-seconds", str(GRACE), "--isolation", isolation, "--threads", "1"]
    flags += [part for model in models for part in ("--model", model)]
    with (
        Path(os.devnull).open("w") as nowhere,
        fork_server.start(fork_server.SERVER, "serve", *flags, cwd=place.path, stderr=nowhere) as one,
        client_of(address) as client,
    ):
        try:
            wait_until(lambda: healthy(client))
            yield one, client
        finally:
            one.terminate()


def offspring(one):
    """Return the processes that a server has, and those that these have."""
    return [each for child in children(one.pid) for each in (child, *children(child))]


@pytest.fixture(scope="module")
def cycling(tmp_path_factory):
    models = (f"{name}=coming_nets:{name}?size=32" for name in ("tiny", "larger", "leaking"))
    with process(Place(tmp_path_factory.mktemp("cycling")), *models) as found:
        yield found


def growth(cycling, name, warm, cycles):
    """Return by how many MB the server and its worker grow in so many loads and unloads."""
    one, client = cycling
    found = []
    for turns in (warm, cycles):
        for _ in range(turns):
            client.unload_model(name)
            client.load_model(name)
            explained(client, model=name)
        found.append(np.array([memory_of(each) for each in (one.pid, offspring(one)[-1])]))
    return found[1] - found[0]


@pytest.mark.slow
def test_memory_is_given_back(cycling):
    """200 cycles of a model that takes 2 MB."""
    grown = growth(cycling, "larger", 10, 200)
    print(f"server {grown[0]:.1f} MB, worker {grown[1]:.1f} MB")  # noqa: T201 -- for those who ask with -s
    assert grown.max() <= 20


def test_a_model_that_stays_in_memory_would_show(cycling):
    """Planted: a factory that keeps what it made."""
    assert growth(cycling, "leaking", 2, 20).max() > 20


# --- stopping ---


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_server_stops_during_a_reload_and_leaves_no_process(place, isolation):
    with process(place, place.tiny, isolation=isolation) as (one, client), ThreadPoolExecutor(1) as pool:
        (place.path / "began").unlink()
        with place.with_file("wait"):
            loading = pool.submit(client.load_model, "tiny")
            place.began()
            started = offspring(one)
            one.send_signal(signal.SIGTERM)
            assert one.wait() == 0  # while that goes on loading
            wait_until(lambda: not any(map(alive, started)))
        with pytest.raises(camserve.Unavailable, match="the server is draining"):
            loading.result()


def healthy(client):
    with contextlib.suppress(camserve.Unavailable):
        return client.health() is camserve.Health.SERVING
    return False


def test_refusals_have_their_requests_id_and_tell_nothing_of_the_server(place):
    models = "bad=coming_nets:broken?size=32", place.tiny
    with served(place, *models) as one, grpc.insecure_channel(one.address) as channel:
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
