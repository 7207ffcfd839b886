"""Say what was measured and chosen: as a table, in words, and as settings."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from camserve_server.core import config
from camserve_server.core.errors import ConfigError
from camserve_server.models import parse
from camserve_server.tuning.choice import Choice
from camserve_server.tuning.survey import Cell, Line, Survey

HEADINGS = ("model", "precision", "threads", "batch", "ms a batch", "images/s", "× float32", "map cosine", "")

Likeness = Mapping[tuple[str, str], float | None]
"""Of a model's name and precision: the least cosine of its maps to those in float32."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """What was measured and chosen.

    Attributes:
        survey: the measurements.
        choice: from them.
        likeness: of the precisions.
        models: as they were named, by name.
    """

    survey: Survey
    choice: Choice
    likeness: Likeness
    models: Mapping[str, str]

    def rows(self) -> list[tuple[str, ...]]:
        """Describe what was measured, one batch a row; in the order of model, precision, threads and batch."""
        at = {(cell.line, cell.batch): cell for cell in self.survey.cells}
        cells = sorted(at.values(), key=lambda cell: _place(cell.line))
        return [self._row(cell, at) for cell in cells]

    def _row(self, cell: Cell, at: Mapping[tuple[Line, int], Cell]) -> tuple[str, ...]:
        line = cell.line
        exact = at.get((Line(line.model, "float32", line.threads), cell.batch))
        same = self.likeness.get((line.model, line.precision))
        return (
            *(line.model, line.precision, str(line.threads), str(cell.batch)),
            *(_number(1e3 * cell.seconds) if math.isfinite(cell.seconds) else "no memory", _number(cell.rate)),
            f"{cell.rate / exact.rate:.2f}" if exact and exact.rate else "",
            "" if same is None else _least(same),
            "chosen" if self.choice.cells[line.model] == cell else "",
        )

    def words(self) -> list[str]:
        """Say what was chosen and why, what another precision would bring, and what was left out."""
        lines = [self.choice.reason, *map(self._precision, self.models)]
        if left := self.survey.left_out:
            lines.append(f"Not measured, for want of time: {', '.join(_left(*one) for one in left)}")
        return [f"{line}." for line in lines]

    def _precision(self, name: str) -> str:
        chosen = self.choice.cells[name]
        others = [cell for cell in self.survey.cells if cell.batch == chosen.batch and self._other(cell, chosen)]
        if chosen.line.precision != "float32":
            exact = next((cell for cell in others if cell.line.precision == "float32"), None)
            faster = f", {chosen.rate / exact.rate:.1f} times as fast as float32" if exact else ""
            return f"{name}: {chosen.line.precision}{faster}{self._alike(chosen.line)}"
        told = (
            f"{cell.line.precision} would be {cell.rate / chosen.rate:.1f} times as fast{self._alike(cell.line)}"
            for cell in others
        )
        return "; ".join((f"{name}: float32, exact", *told))

    @staticmethod
    def _other(cell: Cell, chosen: Cell) -> bool:
        """Whether a cell differs from the chosen one in nothing but its precision."""
        mine, its = chosen.line, cell.line
        return (mine.model, mine.threads) == (its.model, its.threads) and mine.precision != its.precision

    def _alike(self, line: Line) -> str:
        same = self.likeness.get((line.model, line.precision))
        return "" if same is None else f" (its maps and float32's: cosine {_least(same)} or more)"

    def settings(self) -> dict[str, object]:
        """Return the settings that say what was chosen."""
        cells = self.choice.cells
        models = [_respelled(text, cells[name].line.precision) for name, text in self.models.items()]
        return {"models": models, "threads": self.choice.threads, "max_batch_rows": self.choice.batch}


def _place(line: Line) -> tuple[str, bool, str, int]:
    return line.model, line.precision != "float32", line.precision, -line.threads


def _left(line: Line, batch: int) -> str:
    return f"{line.model} in {line.precision} by {line.threads} from {batch} a batch on"


def _least(cosine: float) -> str:
    """Write a cosine in four digits, rounded down: 1 is said only of what is the same."""
    return f"{math.floor(1e4 * cosine) / 1e4:.4f}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"  # noqa: PLR2004 -- three digits


def _respelled(text: str, precision: str) -> str:
    """Name a model as before, but in a precision."""
    if parse(text).precision == precision:
        return text
    named, _, options = text.partition("?")
    kept = [option for option in options.split("&") if option and not option.startswith("precision=")]
    return f"{named}?{'&'.join((*kept, f'precision={precision}'))}"


def toml(settings: Mapping[str, object]) -> str:
    """Write settings as TOML: JSON's strings, numbers and lists are TOML's too."""
    return "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in settings.items())


def check_writable(path: Path, *, force: bool) -> None:
    """See before a minute of measuring whether its result can be written.

    Raises:
        ConfigError: it cannot, or a file is there.
    """
    if path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a folder")
    if path.exists() and not force:
        raise ConfigError(f"{path} is there: --force keeps its other settings and replaces those that are tuned")
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"cannot write {path}: permission denied")


def write(path: Path, tuned: Mapping[str, object], why: Sequence[str]) -> None:
    """Write settings into a file that `serve --config` reads; what else stands in it stays, but for comments.

    Raises:
        ConfigError: it cannot be written, or what stands in it is wrong.
    """
    settings = (config.read(path) if path.exists() else {}) | dict(tuned)
    config.load(flags=settings, environment={})
    comments = "".join(f"# {line}\n" for line in ("Tuned by `camserve-server tune`.", *why))
    try:
        path.write_text(comments + toml(settings), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
