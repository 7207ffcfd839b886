"""Number of processes of a server, and how they divide its settings."""

import json
import subprocess

import pytest

from camserve_server.app import gpu_probe, sharing
from camserve_server.app.sharing import Machine, fitting_processes, processes_of, share
from camserve_server.cluster import application
from camserve_server.core import config, hardware
from camserve_server.core.config import Settings
from camserve_server.core.devices import device_for
from camserve_server.core.errors import ConfigError
from camserve_server.serving import memory
from camserve_server.serving.pool_sizing import PoolSizing

GIB = 2**30

DIVIDED = {"threads", "max_batch_mib", "max_queue_rows", "max_connections", "processes"}
UNDIVIDED = {
    "of the whole server": {"address", "models", "device", "isolation", "metrics_address", "http_address", "traces"},
    "of a batch": {"max_batch_seconds", "max_batch_rows", "max_queue_delay_ms"},
    "of a request or a call": {
        "max_request_rows",
        "max_explanations",
        "max_drawn_pixels",
        "max_message_mib",
        "max_metadata_kib",
        "max_pixels",
        "max_side",
        "idle_seconds",
        "stream_in_flight",
    },
    "of a connection": {
        "max_streams",
        "connection_idle_seconds",
        "connection_age_seconds",
        "connection_grace_seconds",
    },
    "of access": {
        "tls_cert",
        "tls_key",
        "tls_client_ca",
        "tokens_file",
        "insecure",
        "admin",
        "model_folder",
        "http_origins",
    },
    "of stops and logs": {"access_log_share", "drain_seconds", "log_level", "log_format"},
}
"""Settings that every process gets unchanged, by what they are about."""


def settings(**flags):
    return config.load(flags=flags, environment={})


def test_every_setting_is_either_divided_or_not():
    """A new setting belongs to one of the two lists above."""
    assert DIVIDED.union(*UNDIVIDED.values()) == set(Settings.model_fields)


def test_totals_are_divided_and_nothing_else():
    whole = settings()
    part = share(whole, 4, cores=10)
    changed = {name: getattr(part, name) for name in DIVIDED}

    assert changed == {
        "processes": 4,
        "threads": 2,
        "max_batch_mib": 64,
        "max_queue_rows": 256,
        "max_connections": 250,
    }
    assert part.model_copy(update={name: getattr(whole, name) for name in DIVIDED}) == whole


@pytest.mark.parametrize(
    ("name", "value", "count", "part"),
    [
        ("threads", 6, 4, 1),
        ("threads", 1, 4, 1),
        ("max_batch_mib", 3, 4, 1),
        ("max_queue_rows", 1024, 32, 64),  # a request has up to 64 rows in the queue
        ("max_queue_rows", 40, 2, 40),  # a request has up to 40 rows then
        ("max_queue_rows", 1001, 2, 500),
        ("max_connections", 3, 2, 2),
        ("max_connections", 1, 8, 1),
    ],
)
def test_share_is_never_below_the_largest_request(name, value, count, part):
    assert getattr(share(settings(**{name: value}), count, cores=8), name) == part


def test_shares_are_valid_settings():
    for count in (1, 2, 64):
        part = share(settings(), count, cores=2)

        assert Settings.model_validate(part.model_dump()) == part


def test_memory_of_batches_and_kept_photos_is_divided(monkeypatch):
    monkeypatch.setattr("camserve_server.serving.pool_sizing.memory_limit", lambda: 6 * GIB)
    whole, part = settings(max_batch_mib=4096, threads=4), settings(max_batch_mib=4096, threads=4, processes=2)

    assert PoolSizing(whole, ("cpu",)).cpu_batch_bytes == 2 * PoolSizing(part, ("cpu",)).cpu_batch_bytes == GIB // 2
    assert memory.photo_budget(4).free == memory.PHOTO_BUDGET // 4
    assert memory.photo_budget(64).free == memory.MAX_WAITING_PHOTO


def test_free_memory_of_a_gpu_is_divided(monkeypatch):
    monkeypatch.setattr("camserve_server.serving.pool_sizing.device_for", lambda _: device_for("cpu"))
    whole, part = PoolSizing(settings(), ("cuda:0",)), PoolSizing(settings(processes=4), ("cuda:0",))

    assert whole.gpu_batch_bytes([40 * GIB]) == 4 * part.gpu_batch_bytes([40 * GIB])


CPU, GPU = (), (40 * GIB,)


@pytest.mark.parametrize(
    ("machine", "models", "count"),
    [
        (Machine(1, 4 * GIB, CPU), 1, 1),
        (Machine(2, 24 * GIB, CPU), 1, 1),
        (Machine(15, 64 * GIB, CPU), 1, 1),  # one process for 8 cores
        (Machine(16, 64 * GIB, CPU), 1, 2),
        (Machine(64, 256 * GIB, CPU), 1, 8),
        (Machine(64, 8 * GIB, CPU), 1, 3),  # 0.5 GiB shared, 2 GiB for each process
        (Machine(64, 8 * GIB, CPU), 5, 1),  # 4 GiB for each process
        (Machine(64, GIB // 4, CPU), 1, 1),  # never less
        (Machine(4, 32 * GIB, GPU), 1, 1),
        (Machine(16, 64 * GIB, GPU), 1, 4),  # one process for 4 cores
        (Machine(16, 64 * GIB, (12 * GIB,)), 1, 2),  # 5 GiB of a GPU for each process
        (Machine(16, 64 * GIB, (80 * GIB, 12 * GIB)), 1, 2),  # the smallest GPU decides
        (Machine(16, 64 * GIB, (80 * GIB,)), 16, 4),
        (Machine(16, 64 * GIB, (30 * GIB,)), 16, 1),
    ],
)
def test_number_of_processes_that_fit(machine, models, count):
    assert fitting_processes(machine, models) == count


@pytest.fixture
def machine(monkeypatch):
    """Set the machine's cores, memory and GPUs."""

    def have(cores, gib, gpus=None):
        monkeypatch.setattr(hardware, "cores", lambda: cores)
        monkeypatch.setattr(hardware, "memory_limit", lambda: gib * GIB)
        monkeypatch.setattr(hardware, "has_nvidia_gpu", lambda: gpus is not None)
        result = subprocess.CompletedProcess([], 0, json.dumps(gpus or {"free": []}).encode())
        monkeypatch.setattr(sharing.subprocess, "run", lambda *_, **__: result)

    return have


def test_auto_counts_cores_memory_and_gpus(machine):
    machine(32, 128)
    assert processes_of(settings(processes="auto")) == 4
    assert processes_of(settings(processes="auto", threads=8)) == 1
    machine(32, 128, {"free": [40 * GIB]})
    assert processes_of(settings(processes="auto")) == 8
    assert processes_of(settings(processes="auto", device="cpu")) == 4
    machine(32, 128, {"error": 'device "cuda": torch sees 0 CUDA devices here'})
    with pytest.raises(ConfigError, match="torch sees 0 CUDA devices"):
        processes_of(settings(processes="auto", device="cuda"))


def test_devices_of_auto_are_asked_only_if_there_may_be_a_gpu(machine, monkeypatch):
    machine(32, 128)
    monkeypatch.setattr(sharing.subprocess, "run", None)

    assert processes_of(settings(processes="auto")) == processes_of(settings(processes="auto", device="cpu")) == 4


def test_probe_that_fails_is_an_error(machine, monkeypatch):
    machine(32, 128, {"free": []})
    monkeypatch.setattr(sharing.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], -9))

    with pytest.raises(ConfigError, match="the probe ended with -9"):
        processes_of(settings(processes="auto"))


@pytest.mark.parametrize(
    ("device", "found"),
    [("cpu", {"free": []}), ("nope", {"error": 'device "nope": torch sees cpu here; name one'})],
)
def test_probe_prints_gpus_or_the_error(device, found, monkeypatch, capsys):
    monkeypatch.setattr(gpu_probe.process, "follow_parent", lambda: None)
    with pytest.raises(SystemExit):
        gpu_probe.run(device)
    printed = json.loads(capsys.readouterr().out)

    assert printed == found or printed["error"].startswith(found["error"])


def test_given_number_is_used_whatever_fits(machine):
    machine(1, 1)

    assert processes_of(settings(processes=3)) == 3
    assert processes_of(settings()) == 1


def test_unix_socket_has_one_process():
    with pytest.raises(ConfigError, match=r"^processes = 2: a Unix socket serves one process; listen on HOST:PORT$"):
        processes_of(settings(processes=2, address="unix:/run/camserve"))
    assert processes_of(settings(processes="auto", address="unix:/run/camserve")) == 1
    assert processes_of(settings(processes=1, address="unix:/run/camserve")) == 1


def test_several_processes_need_linux(monkeypatch):
    monkeypatch.setattr(sharing.sys, "platform", "darwin")

    with pytest.raises(ConfigError, match="on Linux only"):
        processes_of(settings(processes=2))
    assert processes_of(settings(processes="auto")) == 1


def test_only_the_command_starts_several_processes():
    from camserve_server import running  # noqa: PLC0415 -- the public function

    for count in (2, "auto"):
        with pytest.raises(ConfigError, match="only the command"), running(processes=count):
            pass
        with pytest.raises(ConfigError, match="not supported with Ray"):
            application.check(settings(processes=count, insecure=True))
