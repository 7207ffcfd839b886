"""Detect the cores, memory and GPUs of this machine."""

import contextlib
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
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return max(1, min(allowed, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or "max" for no limit
        return allowed


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
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        groups = GROUPS_OF_THIS.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return machine
    return min([machine, *(limit for group in groups for limit in _limits_of(group))])


def _limits_of(group: str) -> Iterator[int]:
    """Yield the memory limits of a control group, as `/proc/self/cgroup` names it, and of its parent groups."""
    _, controllers, path = group.split(":", 2)
    if controllers and "memory" not in controllers.split(","):
        return
    root, name = (CGROUPS / "memory", "memory.limit_in_bytes") if controllers else (CGROUPS, "memory.max")
    inner = root / path.lstrip("/")
    for folder in (inner, *inner.parents):
        with contextlib.suppress(OSError, ValueError):  # no such file here, or "max"
            yield int((folder / name).read_text(encoding="ascii"))
        if folder == root:
            return


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
