"""Run the fast tests many times beside busy programs and in random orders, and report every test that ever failed.

Usage: `python -m tools.find_flaky [--runs N] [--busy N] [--cores N] [--seed N]`.
"""

import argparse
import contextlib
import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tools.run_tests import INTERRUPTED, ROOT, run
from tools.suite.parts import CHOICES
from tools.suite.process import Settings
from tools.suite.results import Failure, clock
from tools.suite.run import default_jobs, prepare, show

BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
"""Program that uses a core until the program that started it ends, however that happens."""


@contextlib.contextmanager
def busy_programs(count: int) -> Iterator[None]:
    """Run programs that each use a core."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            program = stack.enter_context(subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=True))  # noqa: S603 -- our own program
            stack.callback(program.kill)
        yield


class History:
    """Failures of several runs."""

    def __init__(self) -> None:
        self._failures: dict[str, list[tuple[str, Failure]]] = defaultdict(list)

    def __bool__(self) -> bool:
        return bool(self._failures)

    def add(self, run_name: str, failures: list[Failure]) -> None:
        """Add the failures of a run."""
        for failure in failures:
            self._failures[failure.test].append((run_name, failure))

    def report(self, runs: int) -> Iterator[str]:
        """Yield the output of all failures, and last how often each test failed, and when."""
        for failures in self._failures.values():
            for name, failure in failures:
                yield f"\n{name}:\n{failure.details}"
        yield f"\nTests that failed in {runs} runs:" if self else f"\nNo test failed in {runs} runs."
        for test, failures in sorted(self._failures.items(), key=lambda item: -len(item[1])):
            names = list(dict.fromkeys(name for name, _ in failures))
            yield f"{len(names):3} of {runs}  {test}  ({'; '.join(names)})"


def main(arguments: list[str]) -> int:
    """Run the tests; return 0 if none failed, 1 if some did, and 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--busy", type=int, default=2, help="number of programs that use a core each")
    parser.add_argument("--cores", type=int, help="number of cores for everything; default: all")
    parser.add_argument("--seed", type=int, help="of the first run; the next runs count up; default: a random one")
    parser.add_argument("--choice", choices=CHOICES, default="fast")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of the project")
    options = parser.parse_args(arguments)
    if options.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    seed = random.randrange(1_000_000) if options.seed is None else options.seed  # noqa: S311 -- no secret
    prepare()
    with busy_programs(options.busy):
        return repeat(Settings(options.root, options.choice, seed), options.runs, options.busy)


def repeat(settings: Settings, runs: int, busy: int) -> int:
    """Run the tests with one seed after the other; return the exit code."""
    history, begun, interrupted = History(), 0, False
    while begun < runs and not interrupted:
        seed, began = (settings.seed or 0) + begun, time.monotonic()
        begun += 1
        name, cores = f"run {begun}, SEED={seed}", len(os.sched_getaffinity(0))
        show(f"\n{name}, of {runs} runs beside {busy} busy programs; usable cores: {cores}")
        ran = run(replace(settings, seed=seed), default_jobs())
        history.add(name, ran.results.failures)
        interrupted = ran.interrupted
        show(f"{name}: {ran.results} in {clock(time.monotonic() - began)}")
    for line in history.report(begun):
        show(line)
    if interrupted:
        show(f"Run {begun} of {runs} was stopped before its end.")
    return INTERRUPTED if interrupted else int(bool(history))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
