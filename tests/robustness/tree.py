"""What a process and all that it started hold, read from /proc: memory, descriptors, threads."""

import contextlib
import os
from collections import Counter
from pathlib import Path

PROC = Path("/proc")


def pids(root):
    """The process itself first."""
    found = [root]
    for pid in found:
        with contextlib.suppress(OSError):
            for task in (PROC / str(pid) / "task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def _sum(root, count):
    total = 0.0
    for pid in pids(root):
        with contextlib.suppress(OSError, StopIteration):  # it may end meanwhile
            total += count(PROC / str(pid))
    return total


def _status(folder, name):
    lines = (folder / "status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def memory(root):
    """MB in memory."""
    return _sum(root, lambda folder: _status(folder, "VmRSS:")) / 1024


def threads(root):
    """How many, by the names that the system has for them."""
    named = Counter()
    for pid in pids(root):
        with contextlib.suppress(OSError):  # one ends meanwhile
            named.update((task / "comm").read_text().strip() for task in (PROC / str(pid) / "task").iterdir())
    return named


def files(root):
    return int(_sum(root, lambda folder: len(list((folder / "fd").iterdir()))))


def busy():
    """Seconds of processor time that the whole machine has used."""
    user, nice, system, _, _, *interrupts = map(int, (PROC / "stat").read_text().splitlines()[0].split()[1:9])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def cpu(root):
    """Seconds of processor time that the process and all that it started have used."""

    def seconds(folder):
        fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime and stime of proc(5)

    return _sum(root, seconds)
