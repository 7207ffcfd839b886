"""Measure memory: a batch relative to a plain forward pass, and a server before, during and after load."""

import contextlib
import ctypes
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import load
from benchmarks.engine import Ours, made, plain
from benchmarks.load import BATCH
from benchmarks.results import Part, Table
from benchmarks.scale import Scale, spec
from benchmarks.served import CLOSED, watched
from benchmarks.serving import serving
from benchmarks.timing import Run

MOST = 1.15
LEAST = 0.1  # MiB: a page or two are no growth
ALIVE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
"""To glibc: every array in pages of its own. A heap holds on to what is free, the more the less even the sizes are."""


def measure(scale: Scale, *, say: Callable[[str], None] = print) -> Part:
    """Measure batches of every model, each in a process of its own, and a server of the first one."""
    part, rows = Part("memory"), []
    for model in scale.models:
        for batch in [one for one in scale.batches if one > 1]:
            found = {kind: in_a_process(kind, model, batch, scale.size) for kind in _KINDS}
            grown = {kind: max(peak - before, LEAST) for kind, (before, peak) in found.items()}
            rows.append((model, str(batch), *(f"{value:.0f}" for value in grown.values()), *_ratios(found, grown)))
            what = f"{model}, batch {batch}: growth in memory, Grad-CAM / plain forward, float32"
            part.at_most(what, MOST, grown["camserve"] / grown["plain"])
            say(f"memory: {', '.join(rows[-1])}")
    columns = ("model", "batch", "plain MiB", "camserve MiB", "bfloat16 MiB", "growth, of plain", "whole, of plain")
    notes = (
        "What a batch adds at its peak to the memory of a process that has the model loaded; and that whole.",
        "Every array has pages of its own here, so that what counts is in use; a heap may hold twice of either.",
    )
    part.tables = [Table("Peak memory of a batch", columns, rows, notes), _of_a_server(scale)]
    return part


def _ratios(found: dict[str, tuple[float, float]], grown: dict[str, float]) -> tuple[str, str]:
    return f"{grown['camserve'] / grown['plain']:.2f}", f"{found['camserve'][1] / found['plain'][1]:.2f}"


def in_a_process(kind: str, model: str, batch: int, size: int) -> tuple[float, float]:
    """Return the MiB of a fresh process with the model loaded, and at the peak of a batch."""
    command = [sys.executable, "-m", "benchmarks.memory", kind, model, str(batch), str(size)]
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | ALIVE)  # noqa: S603 -- this file
    said = run.stdout.split()
    return float(said[-2]), float(said[-1])


_KINDS = ("plain", "camserve", "bfloat16")


def _runs(kind: str, model: str, size: int) -> Callable[[int], Run]:
    """Load a model; return what makes runs of a batch size of it."""
    if kind == "plain":
        theirs = made(model, size)
        return lambda rows: plain(theirs, torch.randn(rows, 3, size, size))
    return Ours.of(spec(model, "bfloat16" if kind == "bfloat16" else "float32", size)).batch


def _status(key: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key + ":"))


def _give_back() -> None:
    """Return to the system what loading the model freed: in a heap that keeps it, a batch seems to take nothing."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # no glibc
        ctypes.CDLL(None).malloc_trim(0)


def peak(kind: str, model: str, batch: int, size: int) -> None:
    """Run some batches, and print the MiB before and at the peak."""
    runs = _runs(kind, model, size)
    run = runs(batch)
    runs(1)()  # what is made on first use belongs to what is loaded
    _give_back()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak so far
    for _ in range(3):
        run()
    print(before, _status("VmHWM"))


def _of_a_server(scale: Scale) -> Table:
    model, precision = scale.served[0]
    with serving((scale.spec(model, precision),)) as server:
        idle = server.memory()
        load.closed(server.address, BATCH, scale.stretch)
        with watched(server) as seen:
            load.closed(server.address, CLOSED[-1], 2 * scale.stretch)
        time.sleep(scale.rest)
        after = server.memory()
    row = (f"{model} {precision}", f"{idle:.0f}", f"{max(seen):.0f}", f"{after:.0f}")
    title = f"Memory of a server: with {CLOSED[-1]} requests under way, and {scale.rest:g} s after"
    return Table(title, ("model", "idle MiB", "under load MiB", "after MiB"), [row])


if __name__ == "__main__":
    peak(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
