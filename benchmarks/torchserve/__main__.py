"""Measure camserve and TorchServe in turn, print the tables and write RESULTS.md."""

import contextlib
import itertools
import os
import shutil
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from benchmarks.photos import photos
from benchmarks.torchserve import report
from benchmarks.torchserve.likeness import differences
from benchmarks.torchserve.load import (
    CAMSERVE_EXPLAIN,
    PREDICTIONS,
    Side,
    TimeWindow,
    camserve_side,
    measure,
    over_grpc,
    over_rest,
    torchserve_side,
)
from benchmarks.torchserve.servers import (
    ROOT,
    camserve_server,
    make_venv,
    torchserve,
    write_archives,
    write_weights,
)

HERE = Path(__file__).parent
CORES = len(os.sched_getaffinity(0))
CALLERS, QUICK_CALLERS, ROUNDS = (1, 8, 16), (1, 8), 3
SLOW = "TorchServe's own explain"  # it takes one photo at a time, so that more callers only wait
WARM_UP_SECONDS = 3.0


@contextlib.contextmanager
def sides(venv: Path, folder: Path, threads: int) -> Iterator[list[Side]]:
    """Run both servers inside the block; yield what can be asked."""
    weights = folder / "resnet50.pth"
    write_weights(weights)
    models = write_archives(venv, folder, weights)
    with contextlib.ExitStack() as stack:
        theirs = stack.enter_context(torchserve(venv, folder, models, threads))
        address, group = stack.enter_context(camserve_server(folder, weights, threads))
        explain = stack.enter_context(over_grpc(address, CAMSERVE_EXPLAIN))
        predict = stack.enter_context(over_grpc(theirs.grpc, PREDICTIONS))
        yield [
            *(camserve_side(explain, model, group) for model in ("float32", "bfloat16")),
            *(torchserve_side(predict, model, theirs.group) for model in ("hooks", "captum")),
            Side(SLOW, over_rest(theirs.rest, "/explanations/integrated"), photos(), theirs.group, None),
        ]


def in_turn(compared: Sequence[Side], callers: Sequence[int], seconds: float) -> report.Windows:
    """Measure one side after another, round after round, so that a noisy minute is noisy for all of them."""
    windows: dict[tuple[str, int], list[TimeWindow]] = defaultdict(list)
    for number, turn in itertools.product(callers, range(1, ROUNDS + 1)):
        for side in compared:
            if side.name == SLOW and number > 1:
                continue
            window = measure(side, number, seconds)
            windows[side.name, number].append(window)
            print(f"{number} at once, round {turn}: {side.name} {window.rate:.2f}/s", flush=True)
    return windows


def warm(compared: Sequence[Side]) -> dict[str, float]:
    """Keep every side busy for a while; return the bytes of a reply, in the mean over the photos."""
    sizes = {}
    for side in compared:
        measure(side, 1 if side.name == SLOW else max(CALLERS), WARM_UP_SECONDS)
        asked = side.requests[:1] if side.name == SLOW else side.requests  # all of its replies have the same numbers
        sizes[side.name] = sum(len(side.ask(request)) for request in asked) / len(asked)
    return sizes


@click.command()
@click.option("--quick", is_flag=True, help="Fewer callers and shorter windows: 3 minutes instead of 8.")
@click.option(
    "--venv",
    type=click.Path(file_okay=False, path_type=Path),
    default=ROOT / ".venv-torchserve",
    help="Made if it is not there: some minutes, and gigabytes.",
)
@click.option("--threads", default=CORES, show_default="one a core", help="Of torch, both sides.")
@click.option("--keep", type=click.Path(file_okay=False, path_type=Path), help="Folder to keep archives and logs in.")
@click.option("--out", type=click.Path(path_type=Path), default=HERE / "RESULTS.md", help="File to write.")
def main(*, quick: bool, venv: Path, threads: int, keep: Path | None, out: Path) -> None:
    """Measure camserve and TorchServe in turn: Grad-CAM of ResNet-50 for photos of 500 by 375, on loopback."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are ended too
    if not shutil.which("java"):
        raise click.ClickException("TorchServe needs Java 11 or later: there is no `java` in PATH")
    make_venv(venv)
    load = os.getloadavg()[0]
    callers, seconds = (QUICK_CALLERS, 3.0) if quick else (CALLERS, 8.0)
    with contextlib.ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ts")))
        folder.mkdir(parents=True, exist_ok=True)
        compared = stack.enter_context(sides(venv.absolute(), folder.absolute(), threads))
        apart, sizes = differences(compared), warm(compared)
        windows = in_turn(compared, callers, seconds)
    words = ["--quick"] * quick + [f"--threads {threads}"] * (threads != CORES)
    how = (
        f"`{' '.join(('python -m benchmarks.torchserve', *words))}`; {ROUNDS} windows of {seconds:.0f} s each, in turn"
    )
    text = report.page(report.Observation(windows, apart, sizes, threads, (load, os.getloadavg()[0]), how), venv)
    out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
