"""OpenMP's threads stop spinning while other programs need the cores, and a caller's settings of torch come back."""

import logging
import math
import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

from camserve_server import Explainer
from camserve_server.core import hardware, spinning, torch_threads
from camserve_server.core.spinning import CpuUsage, SpinLimiter
from support import wait_until

START = CpuUsage(at=100.0, total=1000.0, own=50.0, throttled=7.0)
CORES = hardware.allowed_cores()
BUSY = "other programs use 1.0 of 2 cores"


@pytest.fixture(autouse=True)
def set_quota(monkeypatch):
    """A machine of two cores without a quota; the value sets another quota."""
    monkeypatch.setattr(hardware, "allowed_cores", lambda: 2)
    monkeypatch.setattr(hardware, "quota", lambda: math.inf)
    return lambda quota: monkeypatch.setattr(hardware, "quota", lambda: quota)


@pytest.mark.parametrize(
    ("total", "own", "throttled", "threads", "reason"),
    [
        (4.0, 2.0, 0.0, 2, BUSY),
        (1.0, 0.0, 0.0, 2, "other programs use 0.5 of 2 cores"),
        (4.0, 4.0, 0.0, 2, ""),  # only this process computes
        (2.5, 2.0, 0.0, 2, ""),  # background services
        (3.0, 1.0, 0.0, 1, ""),  # the other program has a core of its own
        (2.0, 2.0, 0.1, 2, "this process has used up its quota"),
        (2.0, 2.0, 0.01, 2, ""),
    ],
)
def test_contention_is_use_by_others_beyond_the_free_cores(total, own, throttled, threads, reason):
    end = CpuUsage(START.at + 2, START.total + total, START.own + own, START.throttled + throttled)

    assert end.contention(START, threads) == reason


def test_more_threads_than_the_quota_are_contention(set_quota):
    set_quota(1.5)
    end = replace(START, at=START.at + 1)

    assert end.contention(START, 2) == "the quota of this process is 1.5 cores"
    assert end.contention(START, 1) == ""


STAT = """cpu  9 9 9 9 9 9 9 9 9 9
cpu0 100 20 30 5000 600 7 8 9 50 0
cpu1 1000 200 300 5000 600 70 80 90 0 0
cpu2 1 1 1 1 1 1 1 1 1 1
intr 5
"""


def test_used_cores_are_those_that_the_process_may_run_on(monkeypatch, tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "stat").write_text(STAT)
    monkeypatch.setattr(hardware, "ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})

    ticks = 100 + 20 + 30 + 7 + 8 + 9 + 1000 + 200 + 300 + 70 + 80 + 90
    assert hardware.used_core_seconds() == ticks / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    ("group", "files", "seconds"),
    [
        ("0::/a", {"a/cpu.stat": "usage_usec 9\nthrottled_usec 2500000\n"}, 2.5),
        ("0::/a", {"a/cpu.stat": "throttled_usec 0\n", "cpu.stat": "throttled_usec 1000000\n"}, 1.0),
        ("4:cpu,cpuacct:/a", {"cpu/a/cpu.stat": "nr_throttled 3\nthrottled_time 1500000000\n"}, 1.5),
        ("0::/", {}, 0.0),
    ],
)
def test_throttled_time_is_that_of_every_control_group_around(monkeypatch, tmp_path, group, files, seconds):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(hardware, "CGROUPS", tmp_path)
    monkeypatch.setattr(hardware, "GROUPS_OF_THIS", tmp_path / "cgroup")
    (tmp_path / "cgroup").write_text(f"{group}\n")

    assert hardware.throttled_seconds() == seconds


class Readings:
    """Readings of a machine in which others use as many cores as `others` has, each half a second after the last."""

    def __init__(self, monkeypatch):
        self.others, self._usage, self._turn = 0.0, START, threading.Semaphore(0)
        self.taken = 0
        monkeypatch.setattr(CpuUsage, "read", self._read)
        monkeypatch.setattr(spinning, "INTERVAL", 1e-4)  # real timeout: its end is the next reading, early or late

    def _read(self):
        self.taken += 1
        usage = self._usage
        self._usage = replace(usage, at=usage.at + 0.5, total=usage.total + 0.5 * self.others)
        return usage

    def wait_for_more(self, count):
        wanted = self.taken + count
        wait_until(lambda: self.taken >= wanted)


@pytest.fixture
def readings(monkeypatch):
    return Readings(monkeypatch)


@pytest.fixture
def limiter(readings):  # noqa: ARG001 -- the limiter takes these readings
    limiter = SpinLimiter(2)
    yield limiter
    limiter.close()


def messages(caplog):
    return [record.getMessage() for record in caplog.records if record.name == spinning.__name__]


def test_spinning_is_limited_while_others_compute_and_logged_once(limiter, readings, caplog):
    caplog.set_level(logging.INFO)
    with limiter.watch():
        readings.wait_for_more(20)
        assert limiter.team is None  # the cores are free

        readings.others = 1.0
        wait_until(lambda: limiter.team)
        readings.wait_for_more(20)
        assert messages(caplog) == [f"threads that wait now sleep instead of spinning: {BUSY}"]

        readings.others = 0.0
        wait_until(lambda: limiter.team is None)
    assert len(messages(caplog)) == 2


def test_each_return_of_contention_doubles_the_quiet_time(limiter, readings, caplog):
    caplog.set_level(logging.INFO)
    with limiter.watch():
        for _ in range(3):
            readings.others = 1.0
            wait_until(lambda: limiter.team)
            readings.others = 0.0
            wait_until(lambda: limiter.team is None)

    ends = [text.rpartition("for ")[2] for text in messages(caplog)[1::2]]
    assert ends == ["3 s", "6 s", "12 s"]


def spin_limiters():
    return [thread for thread in threading.enumerate() if thread.name == "spin-limiter"]


def test_readings_end_some_time_after_the_last_batch(limiter, readings):
    for _ in range(2):
        with limiter.watch():
            readings.wait_for_more(5)
            assert len(spin_limiters()) == 1
        wait_until(lambda: not spin_limiters())


def test_limit_ends_with_the_limiter(limiter, readings):
    readings.others = 1.0
    with limiter.watch():
        wait_until(lambda: limiter.team)
        team = limiter.team
        limiter.close()
        assert limiter.team is None

    wait_until(lambda: not team.thread.is_alive() and not spin_limiters())
    with limiter.watch():
        assert spin_limiters() == []


def test_single_thread_is_not_watched():
    with SpinLimiter(1).watch():
        assert spin_limiters() == []


@pytest.mark.parametrize("missing", [FileNotFoundError, PermissionError])
def test_system_without_counters_is_not_watched(monkeypatch, missing):
    def read():
        raise missing

    monkeypatch.setattr(CpuUsage, "read", read)
    with SpinLimiter(2).watch():
        assert spin_limiters() == []


# `GOMP_SPINCOUNT=infinite` below: a thread that spins does so until the next loop, and one that sleeps has stopped.
SPINNING = """
import os
from pathlib import Path
import torch
from camserve_server.core import spinning

def wait_until(condition):  # to import `support` takes seconds
    while not condition():
        os.sched_yield()

def tasks():
    return [task for task in Path("/proc/self/task").iterdir() if task.name not in before]

def times():
    stats = {task.name: task.joinpath("stat").read_text().rpartition(")")[2].split() for task in tasks()}
    return {name: (stat[0], int(stat[11]) + int(stat[12])) for name, stat in stats.items()}

def spin():
    start = times()
    wait_until(lambda: any(used > start.get(name, ("", 0))[1] + 20 for name, (_, used) in times().items()))

def sleep():
    wait_until(lambda: all(state == "S" for state, _ in times().values()))

def compute():
    torch.ones(4096, 256).exp_()

torch.set_num_threads(2)
before = ()
before = {task.name for task in tasks()}
compute()
spin()
team = spinning._SleepingTeam()
wait_until(lambda: len(tasks()) >= 2 + torch.get_num_threads())
compute()
sleep()
team.end()
wait_until(lambda: len(tasks()) < torch.get_num_threads())  # OpenMP counts a team until its thread is gone
compute()
spin()
print("as expected")
"""


@pytest.mark.slow
@pytest.mark.skipif(CORES == 1, reason="with one core, threads of OpenMP never spin")
@pytest.mark.skipif(sys.platform != "linux", reason="reads the threads of a process from /proc")
def test_threads_that_wait_sleep_beside_a_sleeping_team():
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    result = subprocess.run(
        [sys.executable, "-c", SPINNING],
        env=environment | {"GOMP_SPINCOUNT": "infinite"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (result.stdout, result.stderr) == ("as expected\n", "")


def small_network():
    return nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def threads_of_torch():
    """Return torch's number of threads, in this thread and in a new one."""
    numbers = [torch.get_num_threads()]
    thread = threading.Thread(target=lambda: numbers.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return numbers


def test_callers_number_of_threads_returns_after_the_last_explainer(monkeypatch):
    # Those of other tests' servers, which may run in this process, do not count.
    monkeypatch.setattr(torch_threads, "restored", torch_threads._Restoration().block)
    before = threads_of_torch()
    explainers = [Explainer(small_network(), size=16, settings={"threads": before[1] + more}) for more in (1, 2)]
    assert threads_of_torch() == [before[0], before[1] + 2]

    for explainer in explainers:  # the first one closes first
        explainer.close()
    assert threads_of_torch() == before


def test_explainer_uses_no_more_threads_than_its_quota_allows(set_quota):
    set_quota(1.0)
    with Explainer(small_network(), size=16):
        assert threads_of_torch()[1] == 1


def test_number_that_nobody_changed_is_left_alone():
    before = threads_of_torch()
    with torch_threads.restored():
        pass
    assert threads_of_torch() == before
