"""Let NVIDIA's perf_analyzer measure camserve as it measures any Triton server, with the server's own statistics.

python -m benchmarks.perf_analyzer [--perf-analyzer COMMAND] [--write]

It comes in a wheel: pip install perf-analyzer==2.60.0, where the C library is glibc 2.38 or newer. How to run it on an
older system: docs/triton-and-kserve.md.
"""

import base64
import csv
import json
import shlex
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from benchmarks.photos import photos
from benchmarks.results import machine, page_with
from benchmarks.serving import serving
from camserve_server.api.oip.tensors import element

MODEL = "efficientnet_lite0"
PAGE = Path(__file__).parents[1] / "docs" / "triton-and-kserve.md"

COLUMNS: Mapping[str, str] = {
    "Concurrency": "requests under way",
    "Inferences/Second": "explanations/s",
    "p50 latency": "median",
    "p99 latency": "99th percentile",
    "Server Queue": "waiting for a batch",
    "Server Compute Input": "decoding",
    "Server Compute Infer": "the model",
    "Server Compute Output": "drawing",
}
"""What is shown of perf_analyzer's report, and what it is called here; times are in microseconds there."""

UNTIMED = ("Concurrency", "Inferences/Second")


def question(folder: Path) -> Path:
    """Write the photos as perf_analyzer reads them: each as an element of a tensor of BYTES."""
    path = folder / "photos.json"
    images = [{"image": {"b64": base64.b64encode(element(photo)).decode()}} for photo in photos()]
    path.write_text(json.dumps({"data": images}), encoding="ascii")
    return path


def command(program: str, address: str, folder: Path, callers: Sequence[int], *, streaming: bool) -> list[str]:
    """Return the command that measures a server.

    Args:
        program: perf_analyzer, or what starts it.
        address: of the server.
        folder: for the photos and the report.
        callers: the least number of requests under way, the greatest, and the step between.
        streaming: whether to ask over streams.
    """
    least, most, step = callers
    return [
        *shlex.split(program),
        *("-m", MODEL, "-i", "grpc", "-u", address, "--async"),
        *("--input-data", str(question(folder)), "--request-parameter", "method:gradcam:string"),
        *("--concurrency-range", f"{least}:{most}:{step}", "--measurement-interval", "4000"),
        *("--stability-percentage", "30", "--max-trials", "8", "-f", str(folder / "report.csv")),
        *(("--streaming",) if streaming else ()),
    ]


def measured(program: str, address: str, callers: Sequence[int], *, streaming: bool) -> list[dict[str, str]]:
    """Run perf_analyzer; return the rows of its report.

    Raises:
        ClickException: it failed.
    """
    with tempfile.TemporaryDirectory() as name:
        words = command(program, address, Path(name), callers, streaming=streaming)
        run = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603 -- what was asked for
        if run.returncode:
            raise click.ClickException(f"perf_analyzer exited with {run.returncode}:\n{run.stdout}{run.stderr}")
        with Path(name, "report.csv").open(encoding="utf-8", newline="") as report:
            return sorted(csv.DictReader(report), key=lambda row: int(row["Concurrency"]))


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the report in Markdown, times in milliseconds."""
    lines = [f"| {' | '.join(COLUMNS.values())} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(_cell(column, row[column]) for column in COLUMNS)} |" for row in rows]
    return "\n".join(lines)


def _cell(column: str, value: str) -> str:
    if column == "Concurrency":
        return value
    return f"{float(value):.1f}" if column in UNTIMED else f"{float(value) / 1e3:.1f} ms"


@click.command()
@click.option("--perf-analyzer", "program", default="perf_analyzer", help="The program, or what starts it.")
@click.option("--most", default=16, help="Requests under way at most.")
@click.option("--write", is_flag=True, help=f"Write the table into docs/{PAGE.name}.")
def main(program: str, most: int, *, write: bool) -> None:
    """Measure a server that is started for it, by single calls and over streams."""
    with serving([MODEL]) as server:
        calls = measured(program, server.address, (1, most, max(1, most - 1)), streaming=False)
        streams = measured(program, server.address, (most, most, 1), streaming=True)
    text = f"{machine()}.\n\nSingle calls:\n\n{table(calls)}\n\nOver streams:\n\n{table(streams)}"
    print(text)
    if write:
        PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), "perf_analyzer", text), encoding="utf-8")


if __name__ == "__main__":
    main()
