"""A Ray cluster on this machine: the client, two engines of which one is killed, and dataset jobs."""

import importlib.util
import os
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import camserve
import needs
from camserve.v1 import explain_pb2, explain_pb2_grpc
from server_process import reserved_port, server_process
from support import wait_until

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason=needs.RAY)

NETS = """
import os
import time
from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn


class Slow(nn.Module):
    def forward(self, x):
        time.sleep(0.05)  # real timeout: the model takes long, so that both engines get work
        with (Path(__file__).parent / "ran").open("a") as file:
            file.write(f"{os.getpid()}\\n" * len(x))
        return x


def slow():
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(
        features=nn.Conv2d(3, 4, 3, 2, 1), slow=Slow(), pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(),
        head=nn.Linear(4, 5),
    ))
"""
MODEL = "ray_nets:slow?size=32"
BROKEN = ("broken.jpg", "broken.png")
RAY_SERVE = ("ray", "serve")
PROGRAM = [sys.executable, "-c", "from camserve_server.cli import main; main()"]


IN_A_WORKER = """
from camserve_server.cluster.commands import Engines, cluster
with cluster(None, Engines(1, 1, 1, 1, 0), "cpu"):
    import ray
    print(ray.get(ray.remote(lambda: __import__("colorsys").__file__).remote()))
"""


def test_workers_import_nothing_from_the_current_folder(tmp_path):
    """By default Ray's workers search that folder first."""
    (tmp_path / "colorsys.py").touch()
    result = subprocess.run([sys.executable, "-P", "-c", IN_A_WORKER], cwd=tmp_path, capture_output=True, check=True)
    assert not result.stdout.decode().startswith(str(tmp_path))


ON_TWO_GPUS = """
import os
from camserve_server.cluster.application import _options
from camserve_server.cluster.commands import Settings, cluster, engines_of
with cluster(None, engines_of("2", 64, 1, -1), "auto") as engines:
    import ray
    class Engine:
        def seen(self):
            return os.environ["CUDA_VISIBLE_DEVICES"]
    actors = [ray.remote(Engine).options(**_options(Settings(), engines)["ray_actor_options"]).remote() for _ in "ab"]
    print(*sorted(ray.get([actor.seen.remote() for actor in actors])))
"""
GPUS = {"RAY_OVERRIDE_RESOURCES": '{"GPU": 2}'}
"""Environment in which Ray assumes that the machine has two GPUs."""


def test_ray_assigns_a_gpu_to_each_engine():
    command = [sys.executable, "-P", "-c", ON_TWO_GPUS]
    result = subprocess.run(command, env=os.environ | GPUS, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["0", "1"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the engine would serve: there is a GPU")
def test_engine_with_an_unusable_gpu_does_not_serve_from_the_cpu(folder):
    options = {"command": RAY_SERVE, "ready": False, "cwd": folder, "environment": GPUS}
    with reserved_port() as port, server_process((MODEL,), *serving_at(port), **options) as server:
        code = server.wait()

    assert code == 2, server.log
    assert 'device "cuda": torch sees 0 CUDA devices here' in server.log


def serving_at(port):
    """Return flags with a port. The proxies of all nodes have the same one, which must be known."""
    return "--insecure", "--address", f"127.0.0.1:{port}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with a module of models, 500 photos and two invalid ones."""
    folder = tmp_path_factory.mktemp("ray")
    (folder / "ray_nets.py").write_text(NETS)
    (folder / "photos").mkdir()
    for number in range(500):
        Image.new("RGB", (16, 12), (number % 256, number // 256, 9)).save(folder / "photos" / f"{number}.png")
    for name in BROKEN:
        (folder / "photos" / name).write_bytes(b"no photo")
    return folder


@pytest.fixture(scope="module")
def address(folder):
    """Address of Ray's proxy in front of two engines."""
    with reserved_port() as port:
        flags = ("--engines", "2", *serving_at(port))
        with server_process((MODEL,), *flags, command=RAY_SERVE, cwd=folder) as server:
            yield f"127.0.0.1:{port}"
            assert server.stop() == 0, server.log
        assert "fail" not in server.log.partition(" draining")[2]  # a clean stop logs no error


def engines(address, folder, calls=24):
    """Return the number of calls that each engine's process answers."""
    request = explain_pb2.ExplainRequest(image=(folder / "photos" / "1.png").read_bytes())
    with grpc.insecure_channel(address) as channel:
        explain = explain_pb2_grpc.ExplainServiceStub(channel).Explain
        waiting = [explain.future(request, timeout=600) for _ in range(calls)]
        names = [dict(call.trailing_metadata())["x-camserve-engine"] for call in waiting if call.result()]
    return Counter(int(name.rpartition("-")[2]) for name in names)


def ran(folder):
    """Return the number of rows that each engine's process has run, including those of loading the model."""
    return Counter(map(int, (folder / "ran").read_text().split()))


def test_two_engines_share_the_calls_and_streams_of_a_client(address, folder):
    photos = [folder / "photos" / f"{number}.png" for number in range(96)]
    with camserve.Client(address) as client:
        assert client.health() is camserve.Health.SERVING
        assert [model.name for model in client.models()] == ["slow"]
        result = client.explain(photos[0])
        with pytest.raises(camserve.NotFound, match='unknown layer "x"') as missing:
            client.explain(photos[0], layers="x")
        shared = engines(address, folder)
        before = ran(folder)
        many = list(client.explain_many(photos))
        worked = ran(folder) - before
        progress = []
        client.explain(
            photos[0], methods=[("smoothgrad", {"samples": 20})], on_progress=lambda *rows: progress.append(rows)
        )

    assert result.explanations[0].verdict is camserve.Verdict.OK
    assert missing.value.fields
    assert len(shared) == 2
    assert min(shared.values()) >= 4
    assert [each_result.photo.width for each_result in many] == [16] * 96
    assert worked.keys() == shared.keys()
    assert min(worked.values()) > 0.25 * worked.total() >= 24, "both engines should answer one stream"
    assert progress[-1][0] == progress[-1][1] >= 20
    print(f"calls by engine {dict(shared)}, rows of a stream of 96 {dict(worked)}")  # noqa: T201 -- figures to record


def read_proc(process, name):
    """Return a file of /proc about a process, or an empty text if the process has ended."""
    try:
        return Path(f"/proc/{process}/{name}").read_text()
    except OSError:
        return ""


def replicas(address, folder, kind):
    """Return the processes of this cluster's ingress or engines, by the names that Ray gives them."""
    parent = read_proc(next(iter(engines(address, folder))), "stat").rpartition(")")[2].split()[1]
    everything = (path.name for path in Path("/proc").glob("[0-9]*"))
    named = [pid for pid in everything if read_proc(pid, "cmdline").startswith(f"ray::ServeReplica:camserve:{kind}")]
    return [int(pid) for pid in named if parent in read_proc(pid, "stat").rpartition(")")[2].split()[1:2]]


def until_whole(address, folder):
    """Wait until Ray has replaced a killed process."""
    wait_until(lambda: len(engines(address, folder)) == len(replicas(address, folder, "ingress")) == 2)


@pytest.mark.parametrize("kind", ["engine", "ingress"])
def test_killed_replica_loses_only_calls_in_flight_which_the_sdk_retries(address, folder, kind):
    photo = (folder / "photos" / "1.png").read_bytes()

    def explain(client):
        try:
            return client.explain(photo).explanations[0].verdict
        except camserve.CamserveError as error:
            return type(error)

    outcomes = {}
    for retries in (camserve.Retry(), camserve.Retry(attempts=0)):
        until_whole(address, folder)
        victim = replicas(address, folder, kind)[0]
        with camserve.Client(address, retries=retries, timeout=600) as client, ThreadPoolExecutor(12) as pool:
            waiting = [pool.submit(explain, client) for _ in range(240)]
            wait_until(lambda waiting=waiting: sum(call.done() for call in waiting) >= 40)
            os.kill(victim, signal.SIGKILL)
            outcomes[retries.attempts] = Counter(call.result() for call in waiting)

    assert outcomes[4] == {camserve.Verdict.OK: 240}
    lost = outcomes[0].pop(camserve.Unavailable, 0)
    assert outcomes[0] == {camserve.Verdict.OK: 240 - lost}
    assert lost <= 12, "only calls in flight may be lost"
    print(f"{kind} killed: of 240 calls, 12 at a time, {lost} were lost; with retries none")  # noqa: T201 -- as above


@pytest.mark.parametrize("kind", ["engine", "ingress"])
def test_stream_of_a_killed_replica_has_an_answer_for_every_photo(address, folder, kind):
    until_whole(address, folder)
    victim = replicas(address, folder, kind)[0]
    photos = [folder / "photos" / f"{number}.png" for number in range(96)]
    with camserve.Client(address, timeout=600) as client:
        answers = []
        for answer in client.explain_many(photos):
            answers.append(answer)
            if len(answers) == 30:
                os.kill(victim, signal.SIGKILL)

    assert [answer.explanations[0].verdict for answer in answers] == [camserve.Verdict.OK] * 96


def test_killed_and_resumed_ray_job_has_every_photo_once(folder):
    out = folder / "out"
    command = [*PROGRAM, "ray", "explain", (folder / "photos").as_uri(), "-o", out.as_uri(), "--model", MODEL]
    killed = subprocess.Popen([*command, "--engines", "1"], cwd=folder, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: len(list(out.glob("results/part-*.parquet"))) >= 4 or killed.poll() is not None)
    finally:
        killed.kill()
        killed.wait()
    half = pq.read_table(out / "results").num_rows
    ended = subprocess.run([*command, "--engines", "2"], cwd=folder, capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stderr
    assert 0 < half < 502
    assert "502 photos are done" in ended.stdout
    rows = pq.read_table(out / "results").to_pylist()
    images = [row["image"] for row in rows]
    names = [*BROKEN, *(f"{number}.png" for number in range(500))]
    assert sorted(Path(row["image"]).name for row in rows if row["error"]) == sorted(BROKEN)
    assert Counter(images) == dict.fromkeys((f"file://{folder}/photos/{name}" for name in names), 1)
    assert len(list(out.rglob("*.jpg"))) == 500
    print(f"killed after {half} of 502 files, then all of them once")  # noqa: T201 -- as above
