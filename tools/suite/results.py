"""Results of tests, and how they are printed."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Failure:
    """A test that failed, or during which pytest ended.

    Attributes:
        test: its pytest id; if pytest ended between tests, the files.
        phase: "setup", "call", "teardown", "collect" or "process".
        reason: one line.
        text: the traceback, and what the test printed.
    """

    test: str
    phase: str
    reason: str
    text: str

    def __str__(self) -> str:
        phase = "" if self.phase == "call" else f" ({self.phase})"
        return f"FAILED {self.test}{phase} - {self.reason}"

    @property
    def details(self) -> str:
        """The text below a title."""
        return f"{f' {self.test} ({self.phase}) ':_^100}\n{self.text}"


@dataclass
class Results:
    """Results of the tests of one part, or of several.

    Attributes:
        outcomes: "passed", "failed", "skipped" or "xfailed" of each test.
        reasons: number of skipped tests for each reason.
        failures: what failed; a test may fail in two phases.
        seconds: time of the fast or slow tests of each file, by "fast" or "slow" and the file.
    """

    outcomes: dict[str, str] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    seconds: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))

    def __str__(self) -> str:
        counts = Counter(dict.fromkeys(("passed", "failed", "skipped"), 0))
        counts.update(self.outcomes.values())
        return ", ".join(f"{count} {outcome}" for outcome, count in counts.items())

    def add(self, other: "Results") -> None:
        """Add the results of other tests."""
        self.outcomes |= other.outcomes
        self.reasons += other.reasons
        self.failures += other.failures
        for key, seconds in other.seconds.items():
            self.seconds[key] += seconds

    def fail(self, failure: Failure) -> None:
        """Add a failure; it hides that an earlier phase of the test passed."""
        self.failures.append(failure)
        self.outcomes[failure.test] = "failed"

    def report(self) -> Iterator[str]:
        """Yield what the end of a run prints: the reasons of skips, the failures, and last their names."""
        if self.reasons:
            yield "\nSkipped tests, and why:"
            yield from skip_lines(self.reasons)
        for failure in self.failures:
            yield f"\n{failure.details}"
        if self.failures:
            yield "\nFailed tests:"
            yield from map(str, self.failures)


def skip_lines(reasons: Counter[str]) -> Iterable[str]:
    """Return a line for each reason."""
    return (f"{count:5}  {reason}" for reason, count in sorted(reasons.items()))


def clock(seconds: float) -> str:
    """Return a time in minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
