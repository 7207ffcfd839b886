"""A server with several devices: an engine for each, behind one queue. Two engines on a CPU stand in for two GPUs."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import camserve
from camserve_server import devices, hardware
from camserve_server.errors import ConfigError
from rounding import check_same
from support import PHOTOS, serving

NET = "torchvision:resnet18?weights=none&size=64"
IMAGES = [path.read_bytes() for path in PHOTOS.values()]


@pytest.fixture(scope="module")
def served():
    with serving(models=(NET,), device="cpu,cpu", threads=2, max_batch_rows=2) as one:
        yield one


@pytest.fixture(scope="module")
def client(served):
    with camserve.Client(served.address, timeout=60) as one:
        yield one


@pytest.fixture
def engines(served, monkeypatch):
    """The engines, each noting its batches; what is in `before` is called with each of them."""
    noted, before = ([], []), []

    def noting(run, mine):
        def noted_run(pass_, rows):
            for call in before:
                call(mine, rows)
            mine.append(len(rows))
            return run(pass_, rows)

        return noted_run

    for engine, mine in zip(served.pipeline.batcher._engines, noted, strict=True):
        monkeypatch.setattr(engine, "run", noting(engine.run, mine))
    return noted, before


def ask(client, image, target="class 3", **options):
    return client.explain(image, targets=int(target.split()[1]), overlay=None, heatmap=True, **options)


def test_both_engines_are_used_and_either_gives_the_answers_of_one(client, engines):
    noted, before = engines
    alone = [ask(client, image).explanations[0].heatmap for image in IMAGES]
    meet = threading.Barrier(2)

    def meeting(mine, _rows):
        if not mine:
            meet.wait(30)

    for mine in noted:
        mine.clear()
    before.append(meeting)
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda image: ask(client, image), IMAGES * 4))

    assert sum(map(sum, noted)) == 24
    assert all(noted)
    for result, expected in zip(found, alone * 4, strict=True):
        check_same(result.explanations[0].heatmap, expected, NET)


@pytest.mark.parametrize("faulty", [0, 1])
def test_an_engine_that_cannot_run_a_row_fails_that_request_alone(client, engines, faulty):
    noted, before = engines

    def refuse(mine, rows):
        if mine is noted[faulty] and any(getattr(row.target, "index", None) == 7 for row in rows):
            raise RuntimeError("planted")

    before.append(refuse)

    def outcome(number):
        try:
            ask(client, IMAGES[number % 6], f"class {7 if number == 5 else 3}")
        except camserve.Internal:
            return "failed"
        return "answered"

    with ThreadPoolExecutor(6) as pool:
        outcomes = list(pool.map(outcome, range(24)))

    assert outcomes[:5] + outcomes[6:] == ["answered"] * 23


def test_a_long_methods_answer_is_the_same_whichever_engine_ran_which_part(client):
    """Its completeness error is that of rows in their places: the baseline's among them."""
    found = [ask(client, IMAGES[0], methods=camserve.Method("integrated_gradients", {"steps": 24})) for _ in range(2)]
    maps = [one.explanations[0].heatmap for one in found]

    check_same(*maps, NET, "integrated_gradients", steps=24)
    assert found[0].explanations[0].completeness_error < 0.2


def test_what_is_told_of_a_model_names_every_device_once(client):
    (model,) = client.models()

    assert model.device == "cpu"


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("cpu", ["cpu"]),
        ("cpu,cpu", ["cpu", "cpu"]),
        ("cuda", ["cuda:0", "cuda:1"]),
        ("auto", ["cuda:0"]),
        ("cuda:1", ["cuda:1"]),
        ("cuda:1, cuda:0", ["cuda:1", "cuda:0"]),
        ("cuda:0,cuda:0", ["cuda:0", "cuda:0"]),
    ],
)
def test_devices_are_named_one_by_one_or_all_at_once(monkeypatch, names, found):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    assert devices.devices_named(names) == found


@pytest.mark.parametrize("names", ["cuda:2", "cpu,gpu", "cuda:0,", "", "cuda:00"])
def test_a_device_that_is_not_there_is_an_error_that_names_it(monkeypatch, names):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=f'device "{names.rpartition(",")[2]}"'):
        devices.devices_named(names)


def test_without_a_gpu_cuda_is_an_error_and_auto_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    assert devices.devices_named("auto") == ["cpu"]
    with pytest.raises(ConfigError, match="torch sees 0 CUDA devices"):
        devices.devices_named("cuda")


@pytest.mark.parametrize(
    ("group", "files", "limit"),
    [
        ("0::/a/b", {"a/memory.max": "3000", "a/b/memory.max": "max"}, 3000),
        ("0::/", {"memory.max": "2000"}, 2000),
        ("4:cpu,memory:/a", {"memory/memory.limit_in_bytes": "9000", "memory/a/memory.limit_in_bytes": "1000"}, 1000),
        ("4:cpu:/a", {"memory/a/memory.limit_in_bytes": "1000"}, None),
        ("0::/a", {}, None),
    ],
)
def test_memory_is_limited_by_every_control_group_around_a_process(monkeypatch, tmp_path, group, files, limit):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(hardware, "CGROUPS", tmp_path)
    monkeypatch.setattr(hardware, "GROUPS_OF_THIS", tmp_path / "cgroup")
    (tmp_path / "cgroup").write_text(f"1:name=systemd:/\n{group}\n")
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    assert hardware.memory_limit() == (limit or machine)
    (tmp_path / "cgroup").unlink()
    assert hardware.memory_limit() == machine
