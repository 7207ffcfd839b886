"""Processes that tests leave behind: they are ended, and the test that started them is named.

Each process that a run of tests starts has the run's id in its environment, and in the variable of pytest the test
that ran at its start. The kernel shows the environment of every process, whoever its parent is by now. A process that
was forked from pytest itself without a program of its own shows pytest's; it is found as a child of pytest.

If the run itself is killed, a watcher ends its processes.
"""

import contextlib
import os
import re
import select
import signal
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

RUNS, KEPT, TEST = "TEST_RUNS", "TEST_RUN_KEEPS", "PYTEST_CURRENT_TEST"
"""Environment variables: ids of this run and of those that started it, and a mark of what outlives a module."""
UNTIL_THE_END, ENDS_ITSELF = "until the end", "ends itself"
"""Values of the mark: for processes of fixtures of the whole run, and for one that ends when pytest does."""
MARKS = (RUNS, KEPT, TEST)
SECONDS = 60  # real timeout: processes that are about to end have it, and one that was left does not end at all
LASTING = re.compile(r"multiprocessing\.(resource_tracker|forkserver)|_inductor.compile_worker")
"""Command lines of processes that Python and torch start once for a process, and end with it."""


@dataclass(frozen=True)
class Leftover:
    """A process that a test has left.

    Attributes:
        pid: its id.
        test: the test that ran when it was started.
        command: its command line.
    """

    pid: int
    test: str
    command: str

    def __str__(self):
        return f"{self.test} left process {self.pid}: {self.command[:200]}"


def begin():
    """Mark the processes that this run starts from now on; return the run's id."""
    run = uuid.uuid4().hex
    os.environ.pop(KEPT, None)  # of the run that started this one
    os.environ[RUNS] = f"{os.environ.get(RUNS, '')} {run}".strip()
    return run


def processes(run, *, kept=False):
    """Return the processes of a run, without those that are kept until its end, or with them."""
    result = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is somebody else's
            environment = variables_of(folder)
            own = run in environment.get(RUNS, "") or parent_of(folder) == os.getpid()
            command = (folder / "cmdline").read_text(errors="replace").replace("\0", " ").strip()
            counts = environment.get(KEPT) in ((None, UNTIL_THE_END) if kept else (None,))
            if own and counts and command and not LASTING.search(command):
                result.append(Leftover(int(folder.name), environment.get(TEST, "a test"), command))
    return result


def end_leftovers(run, *, kept=False):
    """End the processes of a run that do not end by themselves, and return them."""
    last = time.monotonic() + SECONDS
    while (left := processes(run, kept=kept)) and time.monotonic() < last:
        time.sleep(0.005)  # real timeout: only a pause between two looks
    end(left)
    return left


def watch(run):
    """Start a watcher, which ends the processes of a run when this process has ended."""
    environment = {name: value for name, value in os.environ.items() if name not in MARKS}
    command = [sys.executable, "-I", "-S", __file__, run, str(os.getpid())]
    os.waitpid(os.posix_spawn(sys.executable, command, environment, setsid=True), 0)


@contextlib.contextmanager
def keeping():
    """Keep the processes that are started inside the block until the end of the run."""
    before = os.environ.get(KEPT)
    os.environ[KEPT] = UNTIL_THE_END
    try:
        yield
    finally:
        if before is None:
            del os.environ[KEPT]


def variables_of(folder):
    """Return the environment that a process was started with, by its folder in /proc."""
    entries = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def parent_of(folder):
    return int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])


def end(processes):
    """End processes, and wait until each has ended: on a busy machine the next look would find it again."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError), os.fdopen(os.pidfd_open(process.pid)) as descriptor:
            signal.pidfd_send_signal(descriptor.fileno(), signal.SIGKILL)
            select.select([descriptor], [], [])


def end_with(run, process_id):
    """End the processes of a run when the process of that run has ended."""
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(process_id)], [], [])
    while left := processes(run, kept=True):
        end(left)
        time.sleep(0.05)  # real timeout: only a pause between two looks


if __name__ == "__main__":
    if not os.fork():
        end_with(sys.argv[1], int(sys.argv[2]))
