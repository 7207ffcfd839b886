"""Speed and memory of `camserve diff`, compared with explaining the same photos with both models."""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np

from benchmarks.photos import QUALITY, photos
from benchmarks.results import Part, Table
from benchmarks.serving import serving

MODEL = "efficientnet_lite0"
NAMES = ("baseline", "candidate")
ROUNDS = 3
SPEED = 0.8
"""Least speed of a diff without its calibration, relative to explaining twice."""
GROWTH = 1.1
"""Most memory of a diff, relative to that of a third of the photos."""

_EXPLAIN = "from camserve.cli import main; main()"
_DIFF = """import sys, time
from camserve.cli import main
from camserve.diff import calibration
calibrate = calibration.calibrate
def timed(*words):
    start = time.perf_counter()
    measured = calibrate(*words)
    print(time.perf_counter() - start, file=sys.stderr)
    return measured
calibration.calibrate = timed
main()"""
"""The client, which says how long its calibration took."""

_PEAK = """import resource, subprocess, sys
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)
sys.exit(code if code != 1 else 0)  # 1 says that the models differ"""
"""A small program in between: otherwise the kernel counts the memory of this process as the command's."""


def measure(count: int = 300, rounds: int = ROUNDS, *, say: Callable[[str], None] = print) -> Part:
    """Time explaining twice and a diff in turn, and read the largest memory of a diff of a third and of all photos."""
    explained, compared, peaks = [], [], []
    with serving([f"{name}={MODEL}" for name in NAMES]) as server, tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        some, every = write_photos(work / "some", count // 3), write_photos(work / "all", count)
        smaller = diff(some, work / "report of some", server.address)[1]  # also warms the server up
        for turn in range(rounds):
            explained.append(sum(explain(every, work / f"{name} {turn}", server.address, name) for name in NAMES))
            seconds, peak = diff(every, work / f"report {turn}", server.address)
            compared.append(seconds)
            peaks.append(peak)
            say(f"diff: round {turn + 1} of {rounds}: explain twice {explained[-1]:.1f} s, diff {seconds:.1f} s")
    part = Part("diff")
    rows = [
        ("explain, twice", f"{statistics.median(explained):.1f}"),
        ("diff without its calibration", f"{statistics.median(compared):.1f}"),
    ]
    part.tables.append(Table(f"Seconds for {count} photos, medians of {rounds} rounds", ("command", "seconds"), rows))
    ratios = [one / other for one, other in zip(explained, compared, strict=True)]
    part.at_least("speed of a diff without its calibration / of explaining twice", SPEED, statistics.median(ratios))
    what = f"memory of a diff of {count} photos ({max(peaks):.0f} MiB) / of {count // 3} ({smaller:.0f} MiB)"
    part.at_most(what, GROWTH, max(peaks) / smaller)
    return part


def write_photos(folder: Path, count: int) -> Path:
    """Write that many different photos of 500 by 375 pixels into a folder."""
    folder.mkdir()
    whole = [np.asarray(cv2.imdecode(np.frombuffer(photo, np.uint8), cv2.IMREAD_COLOR)) for photo in photos()]
    for index in range(count):
        moved = np.roll(whole[index % len(whole)], index, axis=1)
        cv2.imwrite(str(folder / f"{index:04}.jpg"), moved, (cv2.IMWRITE_JPEG_QUALITY, QUALITY))
    return folder


def explain(folder: Path, output: Path, address: str, model: str) -> float:
    """Return the seconds in which the client explains a folder."""
    seconds, _, _ = _run(_EXPLAIN, "explain", str(folder), "-o", str(output), "--model", model, "--server", address)
    return seconds


def diff(folder: Path, output: Path, address: str) -> tuple[float, float]:
    """Return the seconds in which the client compares both models, without its calibration, and its MiB."""
    sides = [word for name in NAMES for word in (f"--{name}", name)]
    words = ("diff", str(folder), *sides, "-o", str(output), "--sample", "2", "--server", address)
    seconds, peak, errors = _run(_DIFF, *words)
    return seconds - float(errors.split()[-1]), peak


def _run(program: str, *words: str) -> tuple[float, float, str]:
    """Run the client; return its seconds, its largest resident memory in MiB, and what is on its standard error."""
    command = (sys.executable, "-c", _PEAK, sys.executable, "-c", program, *words)
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, check=False, text=True)  # noqa: S603 -- our own program
    seconds = time.perf_counter() - start
    if done.returncode:
        raise ChildProcessError(done.stderr)
    return seconds, float(done.stdout), done.stderr
