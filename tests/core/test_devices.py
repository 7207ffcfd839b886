"""A server with several devices has a worker for each, and one queue. Two workers on a CPU stand for two GPUs."""

import ast
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import camserve
from camserve_server.app import server
from camserve_server.core import device_names, devices, hardware
from camserve_server.core.errors import ConfigError
from camserve_server.models import parse
from rounding import check_same
from support import PHOTOS, serving, wait_until

NET = "timm:test_resnet?weights=none&size=64"
IMAGES = [path.read_bytes() for path in PHOTOS.values()][:3]


@pytest.fixture(scope="module")
def served():
    with serving(models=(NET,), device="cpu,cpu", threads=2, max_batch_rows=2) as running:
        yield running


@pytest.fixture(scope="module")
def client(served):
    with camserve.Client(served.address, timeout=60) as connected:
        yield connected


@pytest.fixture
def engines(served, monkeypatch):
    """Record the batch sizes of each worker. The functions in `before` are called before each batch."""
    sizes_of_batches, before = ([], []), []

    def recording(run, sizes):
        def recording_run(pass_, rows):
            for call in before:
                call(sizes, rows)
            sizes.append(len(rows))
            return run(pass_, rows)

        return recording_run

    for engine, sizes in zip(served.pipeline.batcher._workers, sizes_of_batches, strict=True):
        monkeypatch.setattr(engine, "run", recording(engine.run, sizes))
    return sizes_of_batches, before


def ask(client, image, target="class 3", **options):
    return client.explain(image, targets=int(target.split()[1]), overlay=None, heatmap=True, **options)


def test_both_workers_are_used_and_return_equal_results(client, engines):
    sizes_of_batches, before = engines
    alone = [ask(client, image).explanations[0].heatmap for image in IMAGES]
    meet = threading.Barrier(2)

    def meeting(sizes, _rows):
        if not sizes:
            meet.wait(60)

    for sizes in sizes_of_batches:
        sizes.clear()
    before.append(meeting)
    with ThreadPoolExecutor(6) as pool:
        first = pool.submit(ask, client, IMAGES[0])  # alone in its batch
        wait_until(lambda: meet.n_waiting)
        results = [first, *(pool.submit(ask, client, image) for image in (IMAGES * 4)[1:])]
        results = [each.result() for each in results]

    assert sum(map(sum, sizes_of_batches)) == 12
    assert all(sizes_of_batches)
    for result, expected in zip(results, alone * 4, strict=True):
        check_same(result.explanations[0].heatmap, expected, NET)


@pytest.mark.parametrize("faulty", [0, 1])
def test_worker_that_cannot_run_a_row_fails_that_request_only(client, engines, faulty):
    sizes_of_batches, before = engines

    def refuse(sizes, rows):
        if sizes is sizes_of_batches[faulty] and any(getattr(row.target, "index", None) == 7 for row in rows):
            raise RuntimeError("planted")

    before.append(refuse)

    def outcome(number):
        try:
            ask(client, IMAGES[number % 3], f"class {7 if number == 5 else 3}")
        except camserve.Internal:
            return "failed"
        return "answered"

    with ThreadPoolExecutor(6) as pool:
        outcomes = list(pool.map(outcome, range(12)))

    assert outcomes[:5] + outcomes[6:] == ["answered"] * 11


def test_long_method_returns_the_same_on_any_workers(client):
    """The completeness error is correct only if all rows are in order, with the baseline's row among them."""
    results = [ask(client, IMAGES[0], methods=camserve.Method("integrated_gradients", {"steps": 8})) for _ in range(2)]
    maps = [each.explanations[0].heatmap for each in results]

    check_same(*maps, NET, "integrated_gradients", steps=8)
    assert results[0].explanations[0].completeness_error < 0.2


def test_model_description_names_every_device_once(client):
    (model,) = client.models()

    assert model.device == "cpu"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Make the machine look like one with these files."""

    def has(**files):
        for name, text in files.items():
            file = tmp_path / name.replace("__", "/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        monkeypatch.setattr(hardware, "ROOT", tmp_path)

    has()
    return has


@pytest.fixture
def warnings(monkeypatch):
    """Return the logged warnings."""
    lines = []
    for module in (device_names, server):
        monkeypatch.setattr(module.log, "warning", lambda words, *values: lines.append(words % values))
    return lines


@pytest.mark.parametrize(
    ("names", "expected"),
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
def test_devices_are_named_one_by_one_or_all_at_once(gpus, names, expected):
    gpus((7, 5), (9, 0))

    assert device_names.parse_devices(names) == expected


@pytest.mark.parametrize("names", ["cuda:2", "cpu,gpu", "cuda:0,", "", "cuda:00"])
def test_missing_device_is_an_error_with_its_name(gpus, names):
    gpus((8, 0), (9, 0))
    with pytest.raises(ConfigError, match=f'device "{names.rpartition(",")[2]}".*cuda:0, cuda:1'):
        device_names.parse_devices(names)


def test_without_a_gpu_cuda_is_an_error_and_auto_is_the_cpu(gpus, machine, warnings):
    gpus()
    machine()

    assert device_names.parse_devices("auto") == ["cpu"]
    assert warnings == []
    with pytest.raises(ConfigError, match="torch sees 0 CUDA devices"):
        device_names.parse_devices("cuda")


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_other_accelerators_of_torch_can_be_named(monkeypatch, kind):
    with pytest.raises(ConfigError, match=f'device "{kind}": torch sees 0 {kind.upper()} devices here'):
        device_names.parse_devices(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)

    assert device_names.parse_devices(kind) == device_names.parse_devices(f"{kind}:0") == [f"{kind}:0"]
    with pytest.raises(ConfigError, match=f"torch sees cpu, {kind}:0 here"):
        device_names.parse_devices("gpu")


# --- a GPU that cannot be used ---


NVIDIA = {"sys__bus__pci__devices__0000:01:00.0__vendor": "0x10de\n"}
GRAPHICS = NVIDIA | {"sys__bus__pci__devices__0000:01:00.0__class": "0x030200\n"}


@pytest.mark.parametrize(
    ("files", "there"),
    [
        (GRAPHICS, True),
        ({"dev__nvidia0": ""}, True),
        ({"proc__driver__nvidia__gpus__0000:01:00.0": ""}, True),
        (NVIDIA | {"sys__bus__pci__devices__0000:01:00.0__class": "0x040300\n"}, False),  # its sound
        (GRAPHICS | {"sys__bus__pci__devices__0000:01:00.0__vendor": "0x8086\n"}, False),
        (NVIDIA, False),
        ({"dev__nvidiactl": ""}, False),
    ],
)
def test_gpu_is_detected_without_its_driver(machine, files, there):
    machine(**files)

    assert hardware.has_nvidia_gpu() is there


REASONS = {
    "a build for CPUs": "is built for CPUs only; install a build for CUDA",
    "a driver that is too old": "The NVIDIA driver on your system is too old (found version 12020)",
    "hidden GPUs": 'No CUDA GPUs are available (torch 9.9, built for CUDA 13.0; CUDA_VISIBLE_DEVICES is "")',
}


@pytest.mark.parametrize("why", REASONS)
def test_unusable_gpu_is_a_warning_for_auto_and_an_error_if_named(gpus, machine, warnings, monkeypatch, why):
    def fail():
        raise RuntimeError(REASONS[why].partition(" (torch")[0] + ".")

    gpus()
    machine(**GRAPHICS)
    monkeypatch.setattr(torch, "__version__", "9.9")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", fail)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: why != "a build for CPUs")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    assert device_names.parse_devices("auto") == ["cpu"]
    (line,) = warnings
    assert line.startswith("this machine has a GPU that cannot be used: ")
    assert REASONS[why] in line
    for named in ("cuda", "cuda:0"):
        with pytest.raises(ConfigError, match=re.escape(REASONS[why])):
            device_names.parse_devices(named)


OLD = "it has compute capability 6.1, and torch .* is built for 7.5 or more"


def test_auto_skips_a_gpu_that_is_too_old_for_torch(gpus, warnings):
    gpus((6, 1), (8, 0))

    assert device_names.parse_devices("auto") == ["cuda:1"]
    gpus((6, 1))
    assert device_names.parse_devices("auto") == ["cpu"]
    assert re.search(f"this machine has a GPU that cannot be used: cuda:0: {OLD}.* Models run on the CPU", warnings[-1])


@pytest.mark.parametrize("names", ["cuda", "cuda:1,cuda:0"])
def test_named_gpu_that_is_too_old_for_torch_is_an_error(gpus, names):
    gpus((6, 1), (8, 0))
    with pytest.raises(ConfigError, match=f'device "cuda:0": {OLD}'):
        device_names.parse_devices(names)


@pytest.mark.parametrize(
    ("capability", "slow"), [((7, 5), ["bfloat16"]), ((8, 0), []), ((9, 0), [])], ids=["7.5", "8.0", "9.0"]
)
def test_precision_without_native_instructions_is_a_warning(gpus, warnings, capability, slow):
    gpus((9, 0), capability)
    specs = [parse(f"in_{name}={NET}&precision={name}") for name in ("float32", "bfloat16", "float16")]
    server._warn_of_precisions(specs, ["cuda:1", "cuda:1"])

    expected = "model in_{0}: cuda:1 has no instructions for {0}, which is slow there: leave out precision="
    assert warnings == [expected.format(name) for name in slow]


def test_warning_about_a_precision_is_logged_once(tiny, warnings):
    with serving(models=(f"{tiny}&precision=float16",), device="cpu,cpu", threads=1):
        pass

    assert [line for line in warnings if "float16" in line] == [
        "model tiny: cpu has no instructions for float16, which is slow there: leave out precision="
    ]


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


@pytest.mark.parametrize(
    ("group", "files", "count"),
    [
        ("0::/", {"cpu.max": "250000 100000"}, 2),
        ("0::/a/b", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, 3),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("4:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "400000", "cpu/a/cpu.cfs_period_us": "100000"}, 4),
        ("4:cpu,cpuacct:/a", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("4:memory:/a", {"cpu/a/cpu.cfs_quota_us": "400000", "cpu/a/cpu.cfs_period_us": "100000"}, None),
        ("0::/", {"cpu.max": "9000000 100000"}, None),  # more than the machine has
    ],
)
def test_cores_are_limited_by_every_control_group_around_a_process(monkeypatch, tmp_path, group, files, count):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(hardware, "CGROUPS", tmp_path)
    monkeypatch.setattr(hardware, "GROUPS_OF_THIS", tmp_path / "cgroup")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    (tmp_path / "cgroup").write_text(f"1:name=systemd:/\n{group}\n")

    assert hardware.cores() == (count or 16)


def test_only_one_module_of_the_server_uses_cuda():
    """All other code calls a `devices.Device`. Strings of users and files may contain the word."""
    package = Path(devices.__file__).parents[1]
    words = {"cuda", "is_cuda", "mps", "xpu", "cudnn"}
    texts = {path: path.read_text(encoding="utf-8") for path in package.rglob("*.py")}
    naming = {
        path.relative_to(package).as_posix()
        for path, text in texts.items()
        if re.search(rf"\.\s*({'|'.join(words)})\b", text)  # few files: to parse all of them takes a second
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr in words
    }

    assert naming == {"core/devices.py"}
