"""Run of the parts of the test suite, several at the same time."""

import io
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.suite.parts import Part
from tools.suite.process import Process, Settings
from tools.suite.results import Failure, Results, clock

STOP_SECONDS = 60  # after Ctrl-C until the processes are killed
MOST_JOBS = 5  # each needs up to two GiB of memory
STOPPING = (signal.SIGINT, signal.SIGTERM)


def default_jobs() -> int:
    """Return two more than there are cores, because the parts that test servers often wait."""
    return min(len(os.sched_getaffinity(0)) + 2, MOST_JOBS)


def prepare() -> None:
    """Let SIGTERM do what Ctrl-C does, accept Ctrl-C even as a background process of a shell, and print any text."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    for number in STOPPING:
        signal.signal(number, signal.default_int_handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block: in the middle of reading results, it would lose some."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


class Run:
    """Run of parts, in their order.

    Attributes:
        results: results of the parts that have ended.
        interrupted: whether it was stopped before its end.
    """

    def __init__(self, parts: Iterable[Part], settings: Settings, jobs: int) -> None:
        self.results, self.interrupted = Results(), False
        self._waiting, self._running, self._ended = list(parts), list[Process](), 0
        self._settings, self._jobs = settings, jobs
        self._count = len(self._waiting)

    def run(self) -> None:
        """Run all parts; KeyboardInterrupt stops them."""
        with tempfile.TemporaryDirectory() as folder:
            try:
                while self._waiting or self._running:
                    self._start_more(Path(folder))
                    with uninterrupted():
                        self._show()
                    time.sleep(0.1)
            except KeyboardInterrupt:
                self.interrupted = True
            finally:
                self._stop()

    def _start_more(self, folder: Path) -> None:
        while self._waiting and len(self._running) < self._jobs:
            name = str(len(self._waiting))
            self._running.append(Process(self._waiting.pop(0), self._settings, folder / name))

    def _show(self) -> None:
        """Print what has happened."""
        for process in list(self._running):
            _print_failures(process.read())
            if process.has_ended():
                self._end(process)
        total = Results(outcomes=dict(self.results.outcomes))
        for process in self._running:
            total.add(process.results)
        show_status(f"{total}; {self._ended} of {self._count} parts have ended")

    def _end(self, process: Process) -> None:
        known = len(process.results.failures)
        if self.interrupted:
            process.read()
        else:
            process.check_end()
        _print_failures(process.results.failures[known:])
        process.close()
        self._running.remove(process)
        self._ended += 1
        self.results.add(process.results)
        name = f"[{self._ended:2}/{self._count}] {process.part.title}"
        show(f"{name}: {process.results} in {clock(process.elapsed)}")

    def _stop(self) -> None:
        """Stop the processes that still run."""
        until = time.monotonic() + STOP_SECONDS
        try:
            for process in self._running:
                process.interrupt()
            for process in self._running:
                process.wait(max(0, until - time.monotonic()))
        finally:  # also after another Ctrl-C
            with uninterrupted():
                for process in list(self._running):
                    process.kill()
                    self._end(process)


def _print_failures(failures: Iterable[Failure]) -> None:
    for failure in failures:
        show(str(failure))


def show(text: str) -> None:
    """Print a line."""
    print(f"\r\033[K{text}" if sys.stdout.isatty() else text, flush=True)


def show_status(text: str) -> None:
    """Show a line that the next one replaces, if this is a terminal."""
    if sys.stdout.isatty():
        print(f"\r\033[K{text[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)
