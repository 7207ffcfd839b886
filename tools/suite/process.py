"""Process of pytest that tests a part."""

import contextlib
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tools.suite.parts import CHOICES, Part
from tools.suite.results import Failure, Results

LOG_LINES = 60  # shown of a process that ended too early
REST_SECONDS = 5  # for what a part has started and left
OK, FAILED, NO_TESTS = 0, 1, 5  # exit codes of pytest
IMPORTED = "ignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning"  # by `start_early`
FORKED = "import os, runpy, sys; os.setsid(); sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
"""Program that runs the Python file in its arguments, in a session of its own."""
OPTIONS = ("-q", "--tb=short", "-W", IMPORTED, "-p", "no:cacheprovider", "--continue-on-collection-errors")


@dataclass(frozen=True)
class Settings:
    """Settings that all parts share.

    Attributes:
        root: folder with the tests.
        choice: key of CHOICES.
        seed: number that determines the order of the tests in a file; None for the order of the file.
        coverage: whether coverage.py measures it.
    """

    root: Path
    choice: str
    seed: int | None = None
    coverage: bool = False

    def start(self, part: Part, events: Path, log: IO[bytes]) -> Any:
        """Start the process that tests a part, and return it as a `subprocess.Popen`.

        It is a fork if that is possible, because a new process takes 8 s to import torch.
        """
        program = [str(Path(__file__).with_name("pytest_part.py")), str(events)]
        program += ["" if self.seed is None else str(self.seed), *OPTIONS, "-m", CHOICES[self.choice], *part.files]
        environment = os.environ | part.variables
        # Not every project has a fork server (tests/test_run_tests.py makes some); coverage.py measures no forks.
        if not self.coverage and (tests := self.root / "tests" / "fork_server.py").exists():
            return _imported(tests).start(
                *(FORKED, *program),
                cwd=self.root,
                environment=environment,
                stdout=log,
                stderr=log,
                imported_with=tuple(part.variables.items()),
            )
        measured = ("-m", "coverage", "run") if self.coverage else ()
        return subprocess.Popen(  # noqa: S603 -- our own program
            [sys.executable, *measured, *program],
            cwd=self.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@functools.cache
def _imported(path: Path) -> Any:
    sys.path.append(str(path.parent))
    return importlib.import_module(path.stem)


class Process:
    """Process that tests a part, and its results so far.

    It has a session of its own. So Ctrl-C in a terminal reaches only the program that runs all parts, which passes it
    on once; and all that the process leaves can be killed at once.
    """

    def __init__(self, part: Part, settings: Settings, folder: Path) -> None:
        self.part, self.results = part, Results()
        folder.mkdir()
        (folder / "events").touch()
        self._events, self._line = (folder / "events").open(encoding="utf-8"), ""
        self._log = folder / "log"
        self._test, self._waiting = "", 0
        self._began, self._ended = time.monotonic(), 0.0
        with self._log.open("wb") as log:
            self._process = settings.start(part, folder / "events", log)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def read(self) -> list[Failure]:
        """Read what happened; return the failures since the last call."""
        known = len(self.results.failures)
        for text in self._events:
            self._line += text
            if self._line.endswith("\n"):
                event = json.loads(self._line)
                self._line = ""
                getattr(self, f"_on_{event.pop('event')}")(**event)
        return self.results.failures[known:]

    def has_ended(self) -> bool:
        """Return True if pytest has ended, and all that it has started too: what remains after a while is killed."""
        code = self._process.poll()
        if code is None:
            return False
        self._ended = self._ended or time.monotonic()
        if code in (OK, FAILED, NO_TESTS) and time.monotonic() < self._ended + REST_SECONDS:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, 0)
                return False
        self.kill()
        return True

    def check_end(self) -> None:
        """Add a failure if pytest has ended before it had all results."""
        self.read()
        code, complete = self._process.returncode, not self._waiting
        if complete and (code in (OK, NO_TESTS) or (code == FAILED and self.results.failures)):
            return
        log = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
        reason = f"pytest ended with exit code {code} before {self._waiting} of its tests had a result"
        self.results.fail(Failure(self._test or ", ".join(self.part.files), "process", reason, "\n".join(log)))

    def interrupt(self) -> None:
        """Stop pytest as Ctrl-C does: its fixtures then stop what they have started."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    def wait(self, seconds: float) -> None:
        """Wait for the end of pytest, this long at most."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def kill(self) -> None:
        """Kill pytest and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()  # a fork has no session of its own at first
        self._process.wait()

    def close(self) -> None:
        """Close the file of events."""
        self._events.close()

    def _on_collected(self, count: int) -> None:
        self._waiting = count

    def _on_start(self, test: str) -> None:
        self._test = test

    def _on_end(self) -> None:
        self._test = ""
        self._waiting -= 1

    def _on_seconds(self, test: str, speed: str, seconds: float) -> None:
        self.results.seconds[speed, test.partition("::")[0]] += seconds

    def _on_result(self, test: str, outcome: str, reason: str, **details: Any) -> None:
        if outcome == "failed":
            self.results.fail(Failure(test, reason=reason, **details))
            return
        self.results.outcomes[test] = outcome
        if outcome == "skipped":
            self.results.reasons[reason] += 1
