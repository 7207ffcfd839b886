"""Time under the interpreter's lock, by py-spy: an external program that samples which thread holds the lock."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.front.load import Window

RATE = 500  # samples a second
MISSING = "py-spy is missing: pip install py-spy"


@dataclass(frozen=True, slots=True)
class LockShare:
    """Share of an interval in which a process held its lock.

    Attributes:
        held: number of samples in which a thread held the lock.
        samples: number of all samples that succeeded.
        window: the interval.
    """

    held: int
    samples: int
    window: Window

    @property
    def share(self) -> float:
        """Share of the time, 0 to 1."""
        return self.held / self.samples

    @property
    def error(self) -> float:
        """Standard error of the share: samples are drawn at random times, so their number is binomial."""
        return float((self.share * (1 - self.share) / self.samples) ** 0.5)


def program() -> str | None:
    """Return the path of py-spy, beside this Python or on the path; None if it is missing."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def held_share(pid: int, seconds: int, rate: int = RATE) -> LockShare | None:
    """Sample a process for some seconds; None if py-spy is missing.

    Raises:
        RuntimeError: py-spy failed.
    """
    if (spy := program()) is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        stacks = Path(folder) / "stacks"
        command = [spy, "record", "--gil", "--nonblocking", "--format", "raw", "--output", str(stacks)]
        command += ["--rate", str(rate), "--duration", str(seconds), "--pid", str(pid)]
        words = _ran_at_once(command)
        until = time.perf_counter()
        held, failed = count_samples(stacks.read_text(encoding="utf-8")), count_errors(words)
    return LockShare(held, seconds * rate - failed, Window(until - seconds, until))


def _ran_at_once(command: Sequence[str]) -> str:
    """Run a command that gets a core whenever it wants one, if the system allows it; return what it printed.

    With an ordinary priority on busy cores, py-spy takes most of its samples when the other process has just gone to
    sleep: it found 0.23 to 0.28 where 0.32 was true, and with this one 0.32.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True) as process:  # noqa: S603 -- ours
        with contextlib.suppress(OSError):
            os.sched_setscheduler(process.pid, os.SCHED_FIFO, os.sched_param(1))
        words, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"py-spy failed: {words.strip()}")
    return words


def count_samples(stacks: str) -> int:
    """Return the number of samples in py-spy's raw format: lines of a stack and the number of its samples."""
    return sum(int(line.rpartition(" ")[2]) for line in stacks.splitlines() if line.strip())


def count_errors(words: str) -> int:
    """Return the number of samples that py-spy could not read, from what it prints at its end."""
    found = re.search(r"Errors: (\d+)", words)
    return int(found[1]) if found else 0
