"""Run pytest on the files of a part, and write what happens to a file, as lines of JSON.

Usage: `pytest_part.py EVENTS_FILE SEED PYTEST_ARGUMENT...`; with an empty seed, tests run in the order of their files.
"""

import gc
import importlib
import itertools
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest

Report = pytest.TestReport | pytest.CollectReport


class Events:
    """Plugin of pytest that writes what happens, and shuffles the tests."""

    def __init__(self, path: Path, seed: str) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")
        self._seed = seed
        self._parent = os.getppid()
        self._slow: set[str] = set()

    @pytest.hookimpl(tryfirst=True)  # afterwards, pytest puts tests together that share an expensive fixture
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Shuffle the tests of each file; the order of the files is that of the arguments."""
        if self._seed:
            items[:] = shuffled(items, self._seed)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Write the number of tests; collect garbage from now on."""
        gc.enable()
        self._slow = {item.nodeid for item in session.items if item.get_closest_marker("slow")}
        self._write("collected", count=len(session.items))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Write that a file is skipped or cannot be imported."""
        if not report.passed:
            self._write_result(report, "collect")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Write which test starts; end the run if the program that started it has ended."""
        if os.getppid() != self._parent:
            pytest.exit("the program that started these tests has ended")
        self._write("start", test=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the result of a phase, if it is one of the test."""
        speed = "slow" if report.nodeid in self._slow else "fast"
        self._write("seconds", test=report.nodeid, speed=speed, seconds=report.duration)
        if report.when == "call" or not report.passed:
            self._write_result(report, report.when)

    def pytest_runtest_logfinish(self) -> None:
        """Write that a test has ended."""
        self._write("end")

    def _write_result(self, report: Report, phase: str | None) -> None:
        outcome = "xfailed" if report.skipped and hasattr(report, "wasxfail") else report.outcome
        details = {"phase": phase, "text": text(report)} if report.failed else {}
        self._write("result", test=report.nodeid, outcome=outcome, reason=reason(report), **details)

    def _write(self, event: str, **values: Any) -> None:
        self._file.write(json.dumps({"event": event, **values}) + "\n")


def shuffled(items: list[pytest.Item], seed: str) -> list[pytest.Item]:
    """Return the tests with those of each file in an order that the seed determines."""
    result = []
    for path, group in itertools.groupby(items, key=lambda item: item.path):
        tests = list(group)
        random.Random(f"{seed} {path.name}").shuffle(tests)  # noqa: S311 -- an order to repeat, no secret
        result += tests
    return result


def reason(report: Report) -> str:
    """Return why a test was skipped, or one line about the error of one that failed."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    if crash := getattr(report.longrepr, "reprcrash", None):
        return str(crash.message).strip().partition("\n")[0]
    lines = report.longreprtext.strip().splitlines() or [report.outcome]
    return next((line[1:].strip() for line in reversed(lines) if line.startswith("E ")), lines[0])


def text(report: Report) -> str:
    """Return the traceback, and what the test printed."""
    printed = (f"{f' {title} ':-^80}\n{content.rstrip()}" for title, content in report.sections)
    return "\n".join([report.longreprtext, *printed])


def main(events: str, seed: str, *arguments: str) -> int:
    """Run pytest with these arguments; return its exit code."""
    gc.disable()  # collections take a tenth of the time of the imports
    sys.path[0] = str(Path.cwd())  # as with `python -m pytest`
    # Not every project has one (tests/test_run_tests.py makes some), and forks would inherit the measuring of coverage.
    if Path("tests/fork_server.py").exists() and "coverage" not in sys.modules:
        sys.path.insert(1, str(Path("tests").resolve()))
        importlib.import_module("fork_server").start_early()
    return pytest.main(list(arguments), plugins=[Events(Path(events), seed)])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
