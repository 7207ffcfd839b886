"""Report the measurements and the choice as a table, as text and as settings."""

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
from camserve_server.tuning.survey import Measurement, Survey, Variant

HEADINGS = ("model", "precision", "threads", "batch", "ms/batch", "images/s", "× float32", "map cosine", "")

Similarities = Mapping[tuple[str, str], float | None]
"""Lowest cosine similarity of a model's maps to those in float32, by the model's name and precision."""


@dataclass(frozen=True, slots=True)
class TuningResult:
    """Measurements and the settings chosen from them.

    Attributes:
        survey: the measurements.
        choice: the chosen settings.
        similarities: similarity of each precision's maps to those in float32.
        models: models by name, in the format of the command line.
        processes: number of server processes that fit this machine.
    """

    survey: Survey
    choice: Choice
    similarities: Similarities
    models: Mapping[str, str]
    processes: int = 1

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table of the measurements, sorted by model, precision, threads and batch size."""
        by_key = {(measurement.variant, measurement.batch): measurement for measurement in self.survey.measurements}
        ordered = sorted(by_key.values(), key=lambda measurement: _sort_key(measurement.variant))
        return [self._row(measurement, by_key) for measurement in ordered]

    def _row(self, measurement: Measurement, by_key: Mapping[tuple[Variant, int], Measurement]) -> tuple[str, ...]:
        variant, rate = measurement.variant, measurement.rate
        exact = by_key.get((Variant(variant.model, "float32", variant.threads), measurement.batch))
        similarity = self.similarities.get((variant.model, variant.precision))
        chosen = self.choice.measurements[variant.model] == measurement
        return (
            *(variant.model, variant.precision, str(variant.threads), str(measurement.batch)),
            _number(1e3 * measurement.seconds) if math.isfinite(measurement.seconds) else "no memory",
            _number(rate),
            f"{rate / exact.rate:.2f}" if exact and exact.rate else "",
            "" if similarity is None else _rounded_down(similarity),
            "chosen" if chosen else "",
        )

    def summary(self) -> list[str]:
        """Explain the choice, the speed of other precisions, and the variants that were not measured."""
        lines = [self.choice.reason, *map(self._precision_line, self.models)]
        if left_out := self.survey.left_out:
            variants = ", ".join(_describe(variant, batch) for variant, batch in left_out)
            lines.append(f"Not measured, for lack of time: {variants}")
        if self.processes > 1:
            lines.append(f"Not measured: {self.processes} processes fit this machine, with --processes auto")
        return [f"{line}." for line in lines]

    def _precision_line(self, name: str) -> str:
        chosen = self.choice.measurements[name]
        others = [
            measurement
            for measurement in self.survey.measurements
            if measurement.batch == chosen.batch and _differ_in_precision(measurement.variant, chosen.variant)
        ]
        if chosen.variant.precision != "float32":
            exact = next((other for other in others if other.variant.precision == "float32"), None)
            speed = f", {chosen.rate / exact.rate:.1f} times as fast as float32" if exact else ""
            return f"{name}: {chosen.variant.precision}{speed}{self._similarity(chosen.variant)}"
        alternatives = (
            f"{other.variant.precision} would be {other.rate / chosen.rate:.1f} times as fast"
            f"{self._similarity(other.variant)}"
            for other in others
        )
        return "; ".join((f"{name}: float32, exact", *alternatives))

    def _similarity(self, variant: Variant) -> str:
        similarity = self.similarities.get((variant.model, variant.precision))
        if similarity is None:
            return ""
        return f" (cosine similarity of its maps to float32: at least {_rounded_down(similarity)})"

    def settings(self) -> dict[str, object]:
        """Return the chosen settings."""
        measurements = self.choice.measurements
        models = [_with_precision(text, measurements[name].variant.precision) for name, text in self.models.items()]
        return {"models": models, "threads": self.choice.threads, "max_batch_rows": self.choice.batch}


def _sort_key(variant: Variant) -> tuple[str, bool, str, int]:
    return variant.model, variant.precision != "float32", variant.precision, -variant.threads


def _describe(variant: Variant, batch: int) -> str:
    threads = "1 thread" if variant.threads == 1 else f"{variant.threads} threads"
    return f"{variant.model} in {variant.precision} with {threads} from batch size {batch} on"


def _differ_in_precision(variant: Variant, other: Variant) -> bool:
    """Return True if two variants differ in their precision only."""
    same = (variant.model, variant.threads) == (other.model, other.threads)
    return same and variant.precision != other.precision


def _rounded_down(cosine: float) -> str:
    """Format a cosine with four digits, rounded down: only identical maps have 1."""
    return f"{math.floor(1e4 * cosine) / 1e4:.4f}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"  # noqa: PLR2004 -- three digits


def _with_precision(text: str, precision: str) -> str:
    """Return a model in the format of the command line, with another precision."""
    if parse(text).precision == precision:
        return text
    model, _, options = text.partition("?")
    kept = [option for option in options.split("&") if option and not option.startswith("precision=")]
    return f"{model}?{'&'.join((*kept, f'precision={precision}'))}"


def toml(settings: Mapping[str, object]) -> str:
    """Return settings as TOML. Strings, numbers and lists in JSON are valid TOML."""
    return "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in settings.items())


def check_writable(path: Path, *, force: bool) -> None:
    """Check that a settings file can be written, before a minute of measurements.

    Raises:
        ConfigError: it cannot be written, or it exists.
    """
    if path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a folder")
    if path.exists() and not force:
        raise ConfigError(f"{path} exists: --force replaces the tuned settings in it and keeps the others")
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"cannot write {path}: permission denied")


def write(path: Path, tuned: Mapping[str, object], summary: Sequence[str]) -> None:
    """Write settings to a file for `serve --config`. Other settings in the file are kept; its comments are lost.

    Raises:
        ConfigError: the file cannot be written, or its settings are invalid.
    """
    settings = (config.read(path) if path.exists() else {}) | dict(tuned)
    config.load(flags=settings, environment={})
    comments = "".join(f"# {line}\n" for line in ("Tuned by `camserve-server tune`.", *summary))
    try:
        path.write_text(comments + toml(settings), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
