"""Memory, descriptors and threads of a process tree, read from /proc."""

import contextlib
import os
from collections import Counter
from pathlib import Path

PROC = Path("/proc")


def pids(root):
    """Return the ids of a process and its descendants, its own first."""
    result = [root]
    for pid in result:
        with contextlib.suppress(OSError):
            for task in (PROC / str(pid) / "task").iterdir():
                result += [int(child) for child in (task / "children").read_text().split()]
    return result


def _sum(root, count):
    total = 0.0
    for pid in pids(root):
        with contextlib.suppress(OSError, StopIteration):  # a process may end meanwhile
            total += count(PROC / str(pid))
    return total


def _status(folder, name):
    lines = (folder / "status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def memory(root):
    """Return the resident memory in MB."""
    return _sum(root, lambda folder: _status(folder, "VmRSS:")) / 1024


def threads(root):
    """Count the threads by the names that the system has for them."""
    counts = Counter()
    for pid in pids(root):
        with contextlib.suppress(OSError):  # a thread ended meanwhile
            counts.update((task / "comm").read_text().strip() for task in (PROC / str(pid) / "task").iterdir())
    return counts


def files(root):
    """Count the open file descriptors."""
    return int(_sum(root, lambda folder: len(list((folder / "fd").iterdir()))))


def busy():
    """Return the seconds of processor time that the whole machine has used."""
    user, nice, system, _, _, *interrupts = map(int, (PROC / "stat").read_text().splitlines()[0].split()[1:9])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def cpu(root):
    """Return the seconds of processor time that the process tree has used."""

    def seconds(folder):
        fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime and stime of proc(5)

    return _sum(root, seconds)
