"""Summary of skipped tests at the end of a run: each reason once, with its number of tests.

`tests/conftest.py` has pytest load the hook below. A run that is one of several writes its summary to the file that
SKIPPED_FILE names, and `python tests/skipped.py FILE...` prints the summaries of all of them as one, and removes them.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

TITLE = "tests that were skipped, and why"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the reasons, or write them to the file that SKIPPED_FILE names."""
    found = Counter(_reason(report) for report in terminalreporter.stats.get("skipped", ()))
    if path := os.environ.get("SKIPPED_FILE"):
        Path(path).write_text(json.dumps(found), encoding="utf-8")
    elif found:
        terminalreporter.section(TITLE)
        for line in lines(found):
            terminalreporter.line(line)


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return reason.removeprefix("Skipped: ")


def lines(found: Counter[str]) -> Iterable[str]:
    """Return a line for each reason."""
    return (f"{count:5}  {reason}" for reason, count in sorted(found.items()))


def main(paths: Iterable[str]) -> None:
    """Print the files of several runs as one summary."""
    found = Counter[str]()
    for path in map(Path, paths):
        if path.exists():
            found.update(json.loads(path.read_text(encoding="utf-8")))
            path.unlink()
    if found:
        print("", f"{TITLE}:", *lines(found), sep="\n")  # noqa: T201 -- a command prints


if __name__ == "__main__":
    main(sys.argv[1:])
