"""Detect the cores, memory and GPUs of this machine."""

import contextlib
import math
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
GROUPS_OF_THIS = Path("/proc/self/cgroup")  # control groups of this process
ROOT = Path("/")  # of the file system; tests replace it
NVIDIA, DISPLAY = "0x10de", "0x03"  # on the PCI bus: the ID of the vendor, and the prefix of its GPUs' class


def cores() -> int:
    """Return the number of cores that this process may use; in a container, its quota."""
    return max(1, int(min(allowed_cores(), quota())))


def allowed_cores() -> int:
    """Return the number of cores that this process may run on, without regard to a quota."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quota() -> float:
    """Return how many cores the control groups of this process may use at once; infinity without a limit."""
    return min(_quotas(), default=math.inf)


def _quotas() -> Iterator[float]:
    for folder, legacy in _groups("cpu"):
        with contextlib.suppress(OSError, ValueError):  # no such file here, or "max"
            if legacy:
                quota = int((folder / "cpu.cfs_quota_us").read_text(encoding="ascii"))
                period = int((folder / "cpu.cfs_period_us").read_text(encoding="ascii"))
            else:
                quota, period = map(int, (folder / "cpu.max").read_text(encoding="ascii").split())
            if quota > 0:  # version 1 has -1 for no quota
                yield quota / period


def throttled_seconds() -> float:
    """Return the seconds for which a quota has stopped this process's control group, or a group that contains it."""
    return max(_throttled(), default=0.0)


def _throttled() -> Iterator[float]:
    units = {"throttled_usec": 1e6, "throttled_time": 1e9}  # of the two versions of control groups
    for folder, _ in _groups("cpu"):
        with contextlib.suppress(OSError):
            for line in (folder / "cpu.stat").read_text(encoding="ascii").splitlines():
                name, _, value = line.partition(" ")
                if name in units:
                    yield int(value) / units[name]


def used_core_seconds() -> float:
    """Return the core-seconds that all programs have used since the start, on the cores that this process may run on.

    Time that a hypervisor gave to other machines counts as used.

    Raises:
        OSError: the system has no such counters; only Linux does.
    """
    names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    used = 0
    for line in (ROOT / "proc/stat").read_text(encoding="ascii").splitlines():
        name, *ticks = line.split(maxsplit=9)
        if name in names:
            user, nice, system, _idle, _waiting, interrupts, soft_interrupts, stolen = map(int, ticks[:8])
            used += user + nice + system + interrupts + soft_interrupts + stolen
    return used / os.sysconf("SC_CLK_TCK")


def processor() -> str:
    """Return the name of the processor's model, or of its architecture."""
    try:
        lines = (ROOT / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    return next((line for line in lines if line.startswith("model name")), platform.machine())


def memory_limit() -> int:
    """Return the bytes of memory that this process may use: the lowest limit of the machine and its control groups."""
    if not hasattr(os, "sysconf"):  # Windows
        return sys.maxsize
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_memory_limits()])


def _memory_limits() -> Iterator[int]:
    for folder, legacy in _groups("memory"):
        with contextlib.suppress(OSError, ValueError):  # no such file here, or "max"
            yield int((folder / ("memory.limit_in_bytes" if legacy else "memory.max")).read_text(encoding="ascii"))


def _groups(controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of this process's control groups and of their parents, for one controller.

    Each is yielded with True if it belongs to version 1 of control groups, in which every controller has its own tree.
    """
    try:
        lines = GROUPS_OF_THIS.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = CGROUPS / controller if controllers else CGROUPS
        inner = root / path.lstrip("/")
        for folder in (inner, *inner.parents):
            yield folder, bool(controllers)
            if folder == root:
                break


def has_nvidia_gpu() -> bool:
    """Return True if the machine has an NVIDIA GPU, usable by this process or not. No library or driver is loaded."""
    if any(ROOT.glob("proc/driver/nvidia/gpus/*")) or any(ROOT.glob("dev/nvidia[0-9]*")):
        return True
    return any(
        _first_line(vendor) == NVIDIA and _first_line(vendor.with_name("class")).startswith(DISPLAY)
        for vendor in ROOT.glob("sys/bus/pci/devices/*/vendor")
    )


def _first_line(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
