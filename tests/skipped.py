"""Summary of skipped tests at the end of a run of pytest: each reason once, with its number of tests.

`tests/conftest.py` has pytest load the hook. `make test` and its siblings print the summary of all their parts.
"""

from collections import Counter

import pytest
from tools.suite.pytest_part import reason
from tools.suite.results import skip_lines

TITLE = "tests that were skipped, and why"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the reasons."""
    if found := Counter(reason(report) for report in terminalreporter.stats.get("skipped", ())):
        terminalreporter.section(TITLE)
        for line in skip_lines(found):
            terminalreporter.line(line)
