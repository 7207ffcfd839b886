"""A lone request beside other programs: in this process and served, with camserve's defaults and with passive threads.

    python -m benchmarks.contention (in-process|served) SPEC CALLS [rate]

is one measurement in a process of its own. It prints its `Sample` as JSON.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import camserve
from benchmarks.photos import photos
from benchmarks.results import Part, Table
from benchmarks.scale import RESNET, Scale
from benchmarks.serving import START_TIMEOUT, environment_of, serving

WAYS = ("in-process", "served")
EMBEDDED = "efficientnet_lite0"
DEFAULT, PASSIVE = "default", "passive"
POLICIES: Mapping[str, Mapping[str, str]] = {DEFAULT: {}, PASSIVE: {"OMP_WAIT_POLICY": "PASSIVE"}}
BUSY = ("-c", "print('begun', flush=True)\nwhile True: pass")  # a program that uses a whole core
QUIET, QUOTA = "quiet", "a quota of one core"
PROGRAMS = {QUIET: 0, "one program": 1, "two programs": 2, QUOTA: 0}
UNDER_WAY = 8
MOST_TIMES_QUIET, MOST_TIMES_PASSIVE, LEAST_SPEED = 2.5, 1.15, 0.99

_NOTE = (
    "Each number is the median of {rounds} processes, which took turns. A program beside it uses a whole core. p50 is "
    "of {calls} Grad-CAMs of a photo, one after the other. “passive” has `OMP_WAIT_POLICY=PASSIVE`."
)
_AGAINST = (
    "{rounds} pairs of new processes on free cores, in turn (ABBA). A ratio is this checkout's speed / the other's "
    "within a pair: the median, and all pairs. The rate has {under_way} requests under way."
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement.

    Attributes:
        ready: seconds from the start of the server, or the import of `camserve_server`, until the first answer.
        p50: median seconds of a request alone.
        rate: answers a second with several requests under way; 0 if that was not measured.
    """

    ready: float
    p50: float
    rate: float = 0.0


@dataclass(frozen=True, slots=True)
class Subject:
    """Model and way to explain with it.

    Attributes:
        way: one of `WAYS`.
        spec: spec of the model.
        tree: another checkout to measure; None for this one.
    """

    way: str
    spec: str
    tree: Path | None = None

    @property
    def name(self) -> str:
        """The model's name and the way."""
        return f"{self.spec.partition('?')[0].rpartition(':')[2]}, {self.way}"

    def sample(
        self, calls: int, environment: Mapping[str, str], prefix: tuple[str, ...] = (), *, rate: bool = False
    ) -> Sample:
        """Measure in a new process, started through the command `prefix`."""
        command = (*prefix, sys.executable, "-m", "benchmarks.contention", self.way, self.spec, str(calls))
        result = subprocess.run(  # noqa: S603 -- our own program
            (*command, "rate") if rate else command,
            env={**environment_of(self.tree), **environment},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return Sample(**json.loads(result.stdout.splitlines()[-1]))


def measure(scale: Scale, *, say: Callable[[str], None] = print) -> Part:
    """Measure requests beside other programs, or compare this checkout with another one on free cores."""
    models = [EMBEDDED, scale.spec(RESNET)] if scale.peers else [scale.spec(name) for name in scale.models]
    subjects = [Subject(way, spec) for spec in models for way in WAYS]
    calls = min(scale.calls, 100)
    if scale.against:
        return _against(subjects, scale.against.resolve(), calls, scale.rounds, say)
    samples: dict[tuple[Subject, str, str], list[Sample]] = {}
    for number in range(scale.rounds):
        for subject in subjects:
            for condition, programs in PROGRAMS.items():
                with _busy(programs), _quota(wanted=condition == QUOTA) as prefix:
                    if prefix is None:
                        continue
                    for policy, environment in POLICIES.items():
                        sample = subject.sample(calls, environment, prefix)
                        samples.setdefault((subject, condition, policy), []).append(sample)
                        say(f"contention: round {number + 1}: {subject.name}, {condition}, {policy}: {sample}")
    return _part(samples, _NOTE.format(rounds=scale.rounds, calls=calls))


def _part(samples: Mapping[tuple[Subject, str, str], list[Sample]], note: str) -> Part:
    medians = {
        key: Sample(*(statistics.median(asdict(sample)[name] for sample in each) for name in Sample.__slots__))
        for key, each in samples.items()
    }
    columns = ("", "beside", "ready s", "passive", "p50 ms", "passive", "p50 / quiet", "p50 / passive")
    part, rows = Part("contention"), []
    for subject, condition in dict.fromkeys(key[:2] for key in medians):
        ours, passive = (medians[subject, condition, policy] for policy in POLICIES)
        quiet, times = medians[subject, QUIET, DEFAULT], ours.p50 / passive.p50
        slower = ours.p50 / quiet.p50
        figures = (f"{each:.1f}" for each in (ours.ready, passive.ready, 1e3 * ours.p50, 1e3 * passive.p50))
        rows.append((subject.name, condition, *figures, f"{slower:.2f}", f"{times:.2f}"))
        name = f"{subject.name}, {condition}: "
        if condition != QUIET:
            part.at_most(name + "p50 / quiet", MOST_TIMES_QUIET, slower)
            part.at_most(name + "ready / quiet", MOST_TIMES_QUIET, ours.ready / quiet.ready)
        part.at_most(name + "p50 / passive", MOST_TIMES_PASSIVE, times)
    part.tables.append(Table("A lone request beside other programs", columns, rows, (note,)))
    return part


def _against(subjects: list[Subject], tree: Path, calls: int, rounds: int, say: Callable[[str], None]) -> Part:
    part, rows = Part("contention"), []
    for subject in subjects:
        pairs = []
        other = Subject(subject.way, subject.spec, tree)
        for number in range(rounds):
            order = (subject, other) if number % 2 else (other, subject)
            found = {each: each.sample(calls, {}, rate=True) for each in order}
            pairs.append((found[subject], found[other]))
            say(f"contention: pair {number + 1}: {subject.name}: {found[subject]}, other checkout {found[other]}")
        speeds = {
            "p50": [theirs.p50 / ours.p50 for ours, theirs in pairs],
            "rate": [ours.rate / theirs.rate for ours, theirs in pairs],
        }
        for name, ratios in speeds.items():
            rows.append((subject.name, name, f"{statistics.median(ratios):.3f}", " ".join(f"{r:.2f}" for r in ratios)))
            part.at_least(f"{subject.name}: {name}", LEAST_SPEED, statistics.median(ratios))
    note = _AGAINST.format(rounds=rounds, under_way=UNDER_WAY)
    part.tables.append(Table(f"This checkout / {tree}", ("", "figure", "ratio", "all pairs"), rows, (note,)))
    return part


@contextlib.contextmanager
def _busy(programs: int) -> Iterator[None]:
    """Run programs that use a whole core each inside the block."""
    with contextlib.ExitStack() as stack:
        for _ in range(programs):
            command = (sys.executable, *BUSY)
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))  # noqa: S603 -- ours
            stack.callback(process.kill)
            if process.stdout:
                process.stdout.readline()
        yield


@contextlib.contextmanager
def _quota(*, wanted: bool) -> Iterator[tuple[str, ...] | None]:
    """Make a control group with a quota of one core inside the block.

    Yields:
        The words before a command that run it in the group, or none if no quota is wanted; None if no control group can
        be made here.
    """
    if not wanted:
        yield ()
        return
    legacy = Path("/sys/fs/cgroup/cpu")
    group = (legacy if legacy.exists() else legacy.parent) / f"camserve-contention-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        yield None
        return
    try:
        if legacy.exists():
            (group / "cpu.cfs_quota_us").write_text("100000")
        else:
            (group / "cpu.max").write_text("100000 100000")
        yield "sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$0" "$@"'
    except OSError:
        yield None
    finally:
        group.rmdir()


@contextlib.contextmanager
def _client(way: str, spec: str) -> Iterator[camserve.Client]:
    if way == "served":
        with serving((spec,)) as server, camserve.Client(server.address, timeout=START_TIMEOUT) as client:
            yield client
    else:
        from camserve_server import Explainer  # noqa: PLC0415 -- imports torch

        with Explainer(spec) as explainer:
            yield explainer


def _sample(way: str, spec: str, calls: int, *, rate: bool = False) -> Sample:
    """Measure in this process."""
    file, began = photos()[0], time.perf_counter()
    with _client(way, spec) as client:
        explain = partial(client.explain, file, methods=["gradcam"])
        explain()
        ready, took = time.perf_counter() - began, []
        for _ in range(calls):
            start = time.perf_counter()
            explain()
            took.append(time.perf_counter() - start)
        return Sample(ready, statistics.median(took), _rate(explain, 2 * calls) if rate else 0.0)


def _rate(explain: Callable[[], object], calls: int) -> float:
    with ThreadPoolExecutor(UNDER_WAY) as threads:
        start = time.perf_counter()
        for each in [threads.submit(explain) for _ in range(calls)]:
            each.result()
        return calls / (time.perf_counter() - start)


if __name__ == "__main__":
    way_given, spec_given, calls_given, *others = sys.argv[1:]
    print(json.dumps(asdict(_sample(way_given, spec_given, int(calls_given), rate="rate" in others))))
