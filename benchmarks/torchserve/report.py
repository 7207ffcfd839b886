"""The tables, in Markdown."""

import platform
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

from benchmarks.results import machine
from benchmarks.torchserve.load import TimeWindow
from benchmarks.torchserve.servers import BATCH, DELAY_MS

BARS = {"camserve float32": 2.5, "camserve bfloat16": 7.0}
"""Times as fast as a handler in TorchServe, which was Captum's with a PNG where this was promised."""

Windows = Mapping[tuple[str, int], Sequence[TimeWindow]]
"""What was seen of each side at each number of callers, a window for each round."""


@dataclass(frozen=True, slots=True)
class Observation:
    """All that a run found out.

    Attributes:
        windows: in turn.
        differences: of the pictures, by side.
        bytes: of a reply, in the mean, by side.
        threads: that both sides compute with.
        load: of the machine when the run began, and when it ended: processes that wait or run, over a minute.
        how: the command, and the length of a window.
    """

    windows: Windows
    differences: Mapping[str, float]
    bytes: Mapping[str, float]
    threads: int
    load: tuple[float, float]
    how: str

    @property
    def names(self) -> list[str]:
        """The sides, in turn."""
        return list(dict.fromkeys(name for name, _ in self.windows))

    @property
    def callers(self) -> list[int]:
        """Numbers of concurrent callers, in order."""
        return list(dict.fromkeys(number for _, number in self.windows))


def answers(seen: Observation) -> str:
    """Return replies a second, and the median of their milliseconds, for each side and number of callers."""
    return _table(seen, _answers, {name: (_size(count),) for name, count in seen.bytes.items()}, ("a reply",))


def processor(seen: Observation) -> str:
    """Return the milliseconds of processor time that a reply took the server, for each side and number of callers."""
    return _table(seen, lambda windows: f"{1e3 * statistics.median(window.cpu for window in windows):.0f}")


Cell = Callable[[Sequence[TimeWindow]], str]


def _table(
    seen: Observation,
    cell: Cell,
    more: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    heads: tuple[str, ...] = (),
) -> str:
    rows = [("", *(f"{number} at once" for number in seen.callers), *heads)]
    for name in seen.names:
        windows = (seen.windows.get((name, number)) for number in seen.callers)
        rows.append((name, *(cell(some) if some else "" for some in windows), *more.get(name, ())))
    return _markdown(rows)


def _answers(windows: Sequence[TimeWindow]) -> str:
    rate = statistics.median(window.rate for window in windows)
    least, most = (choose(window.rate for window in windows) for choose in (min, max))
    latency = statistics.median(window.latency for window in windows)
    return f"{rate:.1f}/s ({least:.1f} to {most:.1f}), {1e3 * latency:.0f} ms"


def _size(count: float) -> str:
    return f"{count / 1e6:.1f} MB" if count > 1e6 else f"{count / 1e3:.0f} kB"  # noqa: PLR2004 -- a million


def ratios(seen: Observation) -> str:
    """Return how many times as fast camserve is as each of the others, and how many times its processor time they take.

    Both are medians of the rounds' own ratios.
    """
    ours = [name for name in seen.names if name.startswith("camserve")]
    rows = [("", *(f"{number} at once" for number in seen.callers))]
    for other in (name for name in seen.names if name not in ours):
        for mine in ours:
            pairs = (_pairs(seen.windows, mine, other, number) for number in seen.callers)
            rows.append((f"{mine} / {other}", *map(_ratio, pairs)))
    return _markdown(rows)


def bars(seen: Observation) -> str:
    """Return what was promised beside a handler of Grad-CAM, and what was found: the worst of 8 callers and more."""
    rows = [("", "promised", "found", "met")]
    for mine, least in BARS.items():
        for other in ("TorchServe, captum", "TorchServe, hooks"):
            found = min(
                _faster(_pairs(seen.windows, mine, other, number)) for number in seen.callers if number >= BATCH
            )
            rows.append((f"{mine} / {other}", f"≥ {least}", f"{found:.2f}", "yes" if found >= least else "**no**"))
    return _markdown(rows)


def _pairs(windows: Windows, mine: str, other: str, callers: int) -> list[tuple[TimeWindow, TimeWindow]]:
    return list(zip(windows[mine, callers], windows.get((other, callers), ()), strict=False))


def _ratio(pairs: Sequence[tuple[TimeWindow, TimeWindow]]) -> str:
    if not pairs:
        return ""
    cheaper = statistics.median(other.cpu / mine.cpu for mine, other in pairs)
    return f"{_faster(pairs):.2f} ({cheaper:.2f})"


def _faster(pairs: Sequence[tuple[TimeWindow, TimeWindow]]) -> float:
    return statistics.median(mine.rate / other.rate for mine, other in pairs)


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join((lines[0], "|-" * len(rows[0]) + "|", *lines[1:]))


def versions(venv: Path) -> str:
    """Name the versions of what ran, on both sides."""
    ours = ("camserve", "torch", "torchvision", "opencv-python-headless", "grpcio")
    theirs = ("torchserve", "torch", "torchvision", "captum", "opencv-python-headless", "pillow")
    found = metadata.distributions(path=[str(next((venv / "lib").glob("python*/site-packages")))])
    installed = {one.metadata["Name"].lower(): one.version for one in found}
    # It says its version in the first line, on standard error.
    said = subprocess.run(("java", "-version"), check=True, capture_output=True, text=True)  # noqa: S607 -- the one in PATH
    return (
        f"{', '.join(f'{name} {metadata.version(name)}' for name in ours)}, Python {platform.python_version()}; "
        f"there {', '.join(f'{name} {installed[name]}' for name in theirs)}, {said.stderr.splitlines()[0]}"
    )


PAGE = """\
# camserve and TorchServe

One photo in, a Grad-CAM overlay out: ResNet-50, JPEGs of 500 by 375, on loopback, callers that each ask for the next
photo as soon as they have their answer. Written by `make bench-torchserve` ([how](__main__.py)).

- {machine}.
- {versions}.
- {how}.
- The machine's load, processes that run or want to in the minute before: {before:.1f} when it began, which was others'
  work, and {after:.1f} when it ended.

## Answers

Replies a second: the median of the windows (their least to their greatest), and the median time to a reply.

{answers}

## Processor time

Milliseconds of the server's processes for a reply. On a machine with other work it is the number to compare.

{processor}

## Ratios

How many times as fast camserve is; in brackets, how many times its processor time the other takes. Medians of the
ratios of windows next to each other.

{ratios}

## Bars

What was promised before it was measured, of 8 callers and more. The handler of that promise took its maps from
Captum's `LayerGradCam`, and was timed on a processor with AMX instructions for bfloat16; the one by hooks does no work
that could be left out.

{bars}

## What each side does

All load the same weights (random, seeded; the first class is always the most probable). Threads of torch: {threads} on
each side. Both servers get the allocator's settings of camserve's container. While one side is measured, the others are
idle.

- **camserve float32**, **camserve bfloat16**: `camserve-server serve` as it comes, the model named with
  `precision=bfloat16` for the second. Over gRPC: predictions, the overlay, and a receipt.
- **TorchServe, hooks**: [a handler](archive/handler.py) as one who knows PyTorch well would write it: PIL and
  torchvision's own transforms, one forward pass for a batch, one backward pass that ends at the layer, OpenCV for the
  overlay. One worker, `batchSize` {batch}, `maxBatchDelay` {delay} ms, asked through gRPC `Predictions`.
- **TorchServe, captum**: the same with Captum's `LayerGradCam`, and a forward pass before it to find the class.
- **TorchServe's own explain**: its `image_classifier` handler. Another method, not Grad-CAM: integrated gradients in
  15 steps (`ts/torch_handler/vision_handler.py`) for class 0, all gradients in the reply as JSON, no picture. Over
  REST: gRPC has no call for it (`inference.proto` in its `model-server.jar`). One worker, `batchSize` 1, the default.

That the pictures show the same was looked at before: mean difference from camserve's float32 overlay, in levels of
255, of the photo where it is greatest: {differences}.
"""


def page(seen: Observation, venv: Path) -> str:
    """Return the whole page: the tables, and what was compared with what."""
    return PAGE.format(
        machine=machine(),
        versions=versions(venv),
        how=seen.how,
        before=seen.load[0],
        after=seen.load[1],
        threads=seen.threads,
        answers=answers(seen),
        processor=processor(seen),
        ratios=ratios(seen),
        bars=bars(seen),
        batch=BATCH,
        delay=DELAY_MS,
        differences=", ".join(f"{name} {levels:.1f}" for name, levels in seen.differences.items()),
    )
