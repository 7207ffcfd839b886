"""On a Ray cluster of this machine: the SDK as it is, two engines, one of them killed, and the job over many photos."""

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
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

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason=needs.RAY),
    pytest.mark.timeout(300),
]

NETS = """
import os
import time
from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn


class Slow(nn.Module):
    def forward(self, x):
        time.sleep(0.05)
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
PROGRAM = [sys.executable, "-c", "from camserve_server.cli import main; main()"]


IN_A_WORKER = """
from camserve_server.cluster.commands import Engines, cluster
with cluster(None, Engines(1, 1, 1, 1, 0), "cpu"):
    import ray
    print(ray.get(ray.remote(lambda: __import__("colorsys").__file__).remote()))
"""


def test_workers_import_nothing_from_the_current_folder(tmp_path):
    """By default Ray makes its workers search that folder first."""
    (tmp_path / "colorsys.py").touch()
    done = subprocess.run([sys.executable, "-P", "-c", IN_A_WORKER], cwd=tmp_path, capture_output=True, check=True)
    assert not done.stdout.decode().startswith(str(tmp_path))


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
"""Ray believes that the machine has them."""


def test_ray_lets_each_engine_see_a_gpu_of_its_own():
    command = [sys.executable, "-P", "-c", ON_TWO_GPUS]
    done = subprocess.run(command, env=os.environ | GPUS, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "1"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the engine would serve: there is a GPU")
def test_an_engine_whose_gpu_cannot_be_used_says_so_and_does_not_serve_from_the_cpu(folder):
    arguments = ["ray", "serve", "--insecure", "--address", f"127.0.0.1:{free_port()}", "--model", MODEL]
    done = subprocess.run(
        [*PROGRAM, *arguments], cwd=folder, env=os.environ | GPUS, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert 'device "cuda": torch sees 0 CUDA devices here' in done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a module of models, and photos, 500 of them, and two files that are none."""
    folder = tmp_path_factory.mktemp("ray")
    (folder / "ray_nets.py").write_text(NETS)
    (folder / "photos").mkdir()
    for number in range(500):
        Image.new("RGB", (16, 12), (number % 256, number // 256, 9)).save(folder / "photos" / f"{number}.png")
    for name in BROKEN:
        (folder / "photos" / name).write_bytes(b"no photo")
    return folder


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture(scope="module")
def address(folder):
    """Two engines behind Ray's proxy."""
    port, log = free_port(), folder / "log.txt"
    arguments = ["ray", "serve", "--engines", "2", "--insecure", "--address", f"127.0.0.1:{port}", "--model", MODEL]
    with log.open("wb") as file:
        serving = subprocess.Popen([*PROGRAM, *arguments], cwd=folder, stdout=file, stderr=file)
    try:
        while not re.search(r" serving port=\d+", log.read_text()):
            assert serving.poll() is None, log.read_text()
            time.sleep(0.2)
        yield f"127.0.0.1:{port}"
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(90) == 0, log.read_text()
        assert "fail" not in log.read_text().partition(" draining")[2]  # a clean stop logs no error
    finally:
        serving.kill()
        serving.wait()


def engines(address, folder, calls=24):
    """The processes that answer calls, and how many each of them answers."""
    request = explain_pb2.ExplainRequest(image=(folder / "photos" / "1.png").read_bytes())
    with grpc.insecure_channel(address) as channel:
        ask = explain_pb2_grpc.ExplainServiceStub(channel).Explain
        waiting = [ask.future(request, timeout=60) for _ in range(calls)]
        names = [dict(each.trailing_metadata())["x-camserve-engine"] for each in waiting if each.result()]
    return Counter(int(name.rpartition("-")[2]) for name in names)


def ran(folder):
    """The number of rows that each engine's process has run; loading a model runs some as well."""
    return Counter(map(int, (folder / "ran").read_text().split()))


def test_the_sdk_works_as_it_is_and_two_engines_share_its_calls_and_its_streams(address, folder):
    photos = [folder / "photos" / f"{number}.png" for number in range(96)]
    with camserve.Client(address) as client:
        assert client.health() is camserve.Health.SERVING
        assert [model.name for model in client.models()] == ["slow"]
        one = client.explain(photos[0])
        with pytest.raises(camserve.NotFound, match='unknown layer "x"') as missing:
            client.explain(photos[0], layers="x")
        shared = engines(address, folder)
        before = ran(folder)
        many = list(client.explain_many(photos))
        worked = ran(folder) - before
        heard = []
        client.explain(
            photos[0], methods=[("smoothgrad", {"samples": 20})], on_progress=lambda *rows: heard.append(rows)
        )

    assert one.explanations[0].verdict is camserve.Verdict.OK
    assert missing.value.fields
    assert len(shared) == 2
    assert min(shared.values()) >= 4
    assert [each.photo.width for each in many] == [16] * 96
    assert worked.keys() == shared.keys()
    assert min(worked.values()) > 0.25 * worked.total() >= 24, "one stream is answered by both"
    assert heard[-1][0] == heard[-1][1] >= 20
    print(f"calls by engine {dict(shared)}, rows of a stream of 96 {dict(worked)}")  # noqa: T201 -- figures to record


def told(process, what):
    """What Linux tells of a process; nothing if it has just ended."""
    try:
        return Path(f"/proc/{process}/{what}").read_text()
    except OSError:
        return ""


def replicas(address, folder, kind):
    """The processes of this cluster's doors, or of its engines, which Ray names so."""
    parent = told(next(iter(engines(address, folder))), "stat").rpartition(")")[2].split()[1]
    everything = (path.name for path in Path("/proc").glob("[0-9]*"))
    ours = [each for each in everything if told(each, "cmdline").startswith(f"ray::ServeReplica:camserve:{kind}")]
    return [int(each) for each in ours if parent in told(each, "stat").rpartition(")")[2].split()[1:2]]


def until_whole(address, folder):
    """Wait until Ray has put another in its place."""
    while len(engines(address, folder)) < 2 or len(replicas(address, folder, "ingress")) < 2:
        time.sleep(0.5)


@pytest.mark.parametrize("kind", ["engine", "ingress"])
def test_killed_replica_loses_only_calls_in_flight_which_the_sdk_retries(address, folder, kind):
    photo = (folder / "photos" / "1.png").read_bytes()

    def ask(client):
        try:
            return client.explain(photo).explanations[0].verdict
        except camserve.CamserveError as error:
            return type(error)

    found = {}
    for retries in (camserve.Retry(), camserve.Retry(attempts=0)):
        until_whole(address, folder)
        victim = replicas(address, folder, kind)[0]
        with camserve.Client(address, retries=retries, timeout=60) as client, ThreadPoolExecutor(12) as pool:
            waiting = [pool.submit(ask, client) for _ in range(240)]
            while sum(each.done() for each in waiting) < 40:
                time.sleep(0.01)
            os.kill(victim, signal.SIGKILL)
            found[retries.attempts] = Counter(each.result() for each in waiting)

    assert found[4] == {camserve.Verdict.OK: 240}
    lost = found[0].pop(camserve.Unavailable, 0)
    assert found[0] == {camserve.Verdict.OK: 240 - lost}
    assert lost <= 12, "only those in flight"
    print(f"{kind} killed: of 240 calls, 12 at a time, {lost} were lost; with retries none")  # noqa: T201 -- as above


@pytest.mark.parametrize("kind", ["engine", "ingress"])
def test_a_stream_whose_replica_is_killed_ends_with_an_answer_for_every_photo(address, folder, kind):
    until_whole(address, folder)
    victim = replicas(address, folder, kind)[0]
    photos = [folder / "photos" / f"{number}.png" for number in range(96)]
    with camserve.Client(address, timeout=60) as client:
        answers = []
        for answer in client.explain_many(photos):
            answers.append(answer)
            if len(answers) == 30:
                os.kill(victim, signal.SIGKILL)

    assert [each.explanations[0].verdict for each in answers] == [camserve.Verdict.OK] * 96


def test_killed_and_resumed_ray_job_has_every_photo_once(folder):
    out = folder / "out"
    command = [*PROGRAM, "ray", "explain", (folder / "photos").as_uri(), "-o", out.as_uri(), "--model", MODEL]
    killed = subprocess.Popen([*command, "--engines", "1"], cwd=folder, stderr=subprocess.DEVNULL)
    try:
        while len(list(out.glob("results/part-*.parquet"))) < 4:
            assert killed.poll() is None
            time.sleep(0.02)
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
