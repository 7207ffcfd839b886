"""Results as tables and targets, on the terminal and in RESULTS.md. A measured part replaces only itself there."""

import datetime as dt
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

HERE = Path(__file__).parent
PARTS = ("engine", "served", "stages", "memory", "cost", "long_requests", "front", "page", "contention")
_VERSIONS = ("torch", "torchvision", "grad-cam", "torchcam", "captum", "grpcio", "opencv-python-headless")
_FLAGS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")

_INTRO = """# What camserve costs

Written by `make bench FULL=1` (`python -m benchmarks`); do not edit. How to read it:

- Whatever is compared was timed in turn in one run; a ratio is the median over the rounds of that run. Ratios hold on
  another machine far better than speeds do.
- "Plain" is the model's forward pass in torch, without an explanation, of a batch of ready float32 tensors; camserve is
  given uint8 images, and hands back maps. The peers are given the same batch and class.
- A bar is what was promised before it was measured. "Met: no" stands here until the code is faster, never until the bar
  is lower; what is measured on a small shared machine varies by some hundredths from run to run.
- Models have random weights; photos are those of scikit-image and scikit-learn at 500 by 375. A server is started as a
  user starts it, and the client that loads it runs in another process on the same cores.
"""


@dataclass(frozen=True, slots=True)
class Table:
    """Numbers in rows, as text."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Bar:
    """Target and result."""

    what: str
    bar: str
    found: str
    met: bool


@dataclass(slots=True)
class Part:
    """All that one part of the harness found."""

    name: str
    tables: list[Table] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)

    def at_least(self, what: str, least: float, found: float) -> None:
        """Hold a number, the larger the better, to a bar."""
        self.bars.append(Bar(what, f"≥ {least:g}", f"{found:.2f}", met=found >= least))

    def at_most(self, what: str, most: float, found: float, unit: str = "") -> None:
        """Hold a number, the smaller the better, to a bar."""
        self.bars.append(Bar(what, f"≤ {most:.4g}{unit}", f"{found:.2f}{unit}", met=found <= most))


def machine() -> str:
    """Say in words what this is measured on."""
    lines = _lines("/proc/cpuinfo")
    named = dict(line.split(":", 1) for line in lines if ":" in line)
    info = {key.strip(): value.strip() for key, value in named.items()}
    has = info.get("flags", "").split()
    flags = ", ".join(flag for flag in _FLAGS if flag in has) or "no vector extensions known here"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{info.get('model name', platform.machine())}, {os.cpu_count()} cores ({flags}), {memory:.0f} GiB"


def versions() -> str:
    """Name the versions of what is measured."""
    there = {one.metadata["Name"]: one.version for one in importlib.metadata.distributions()}
    found = ", ".join(f"{name} {there[name]}" for name in _VERSIONS if name in there)
    return f"Python {platform.python_version()}, {found}; torch computes with {torch.get_num_threads()} of the cores"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def as_text(part: Part) -> str:
    """Return a part as text."""
    return "\n\n".join(_body(part.tables, part.bars)) + "\n"


def _body(tables: Iterable[Table], bars: Sequence[Bar]) -> list[str]:
    blocks = []
    for table in tables:
        blocks += [f"### {table.title}", _grid(table.columns, table.rows), *table.notes]
    if bars:
        rows = [(one.what, one.bar, one.found, "yes" if one.met else "**no**") for one in bars]
        blocks += ["### Bars", _grid(("what", "bar", "found", "met"), rows)]
    return blocks


def _grid(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[place]) for row in (columns, *rows)) for place in range(len(columns))]
    lines = [columns, ["-" * width for width in widths], *rows]
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in padded)


def write(part: Part, command: str, load: float, folder: Path = HERE) -> None:
    """Keep a part beside those that were measured before, and write the page of all of them.

    Args:
        part: that was measured.
        command: by which.
        load: processes that wanted a core when it began, this one apart.
        folder: of the page.
    """
    path = folder / "results.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    today = dt.datetime.now(dt.UTC).date().isoformat()
    about = [
        f"`{command}`, {today}. The load before it began was {load:.1f}.",
        f"{machine()}. {versions()}.",
    ]
    kept[part.name] = {"about": about, **asdict(part)}
    path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "RESULTS.md").write_text(_page(kept), encoding="utf-8")


def _page(kept: dict[str, dict[str, list[dict[str, object]]]]) -> str:
    blocks = [_INTRO.rstrip()]
    for name in PARTS:
        if one := kept.get(name):
            tables = [_table(table) for table in one["tables"]]
            bars = [Bar(**bar) for bar in one["bars"]]  # type: ignore[arg-type]  # as they were written
            blocks += [f"## {name}", *map(str, one["about"]), *_body(tables, bars)]
    return "\n\n".join(blocks) + "\n"


def _table(kept: dict[str, object]) -> Table:
    return Table(**kept)  # type: ignore[arg-type]  # as it was written


def page_with(page: str, mark: str, text: str) -> str:
    """Return a page with a text between its comments `mark:` and `/mark`."""
    marked = re.compile(rf"(<!-- {mark}:[^\n]*-->\n).*?(<!-- /{mark} -->)", re.DOTALL)
    return marked.sub(lambda found: f"{found[1]}{text}\n{found[2]}", page)
