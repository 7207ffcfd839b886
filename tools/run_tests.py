"""Run the tests in parts, several at the same time, and report them as one run.

Usage: `python -m tools.run_tests fast|slow|all [--seed N] [--coverage] [--record]`. A part is a process of pytest.
Those that test servers start first, then the longest, so that all cores have work until the end.
`tools/suite/seconds.json` has the time of each file that takes a second or more; `--record` measures it again.
"""

import argparse
import sys
import time
from pathlib import Path

from tools.suite import parts
from tools.suite.process import Settings
from tools.suite.results import clock
from tools.suite.run import Run, default_jobs, prepare, show

ROOT = Path(__file__).parents[1]
INTERRUPTED = 130


def run(settings: Settings, jobs: int) -> Run:
    """Run the tests that the settings choose, and print progress."""
    files, seconds = parts.find(settings.root, settings.choice), parts.expected_seconds(settings.root, settings.choice)
    chosen = parts.divide(files, seconds, settings.seed)
    order = "" if settings.seed is None else f", in the random order of SEED={settings.seed}"
    show(f"{settings.choice} tests in {len(chosen)} parts, {jobs} at a time{order}:")
    for part in chosen:
        show(f"  {part.title}" + (f" ({len(part.files)} files)" if len(part.files) > 1 else ""))
    running = Run(chosen, settings, jobs)
    running.run()
    return running


def main(arguments: list[str]) -> int:
    """Run the tests; return 0 if all passed, 1 if some failed, and 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("choice", choices=parts.CHOICES)
    parser.add_argument("--seed", type=int, help="number that determines a random order of the tests")
    parser.add_argument("--coverage", action="store_true", help="measure coverage")
    parser.add_argument("--record", action="store_true", help=f"write {parts.SECONDS}")
    parser.add_argument("--jobs", type=int, default=default_jobs(), help="number of parts at the same time")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of the project")
    options = parser.parse_args(arguments)
    prepare()
    began = time.monotonic()
    ran = run(Settings(options.root, options.choice, options.seed, options.coverage), options.jobs)
    results = ran.results
    for line in results.report():
        show(line)
    show(f"\n{results} in {clock(time.monotonic() - began)}{', stopped before the end' if ran.interrupted else ''}")
    if options.record and not ran.interrupted:
        parts.record_seconds(options.root, options.choice, results.seconds)
    return INTERRUPTED if ran.interrupted else int(bool(results.failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
