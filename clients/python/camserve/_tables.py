"""What the commands print: tables for people, JSON for programs."""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

from rich.text import Text

from camserve import _inspection
from camserve._result import Verdict
from camserve._values import ModelState
from camserve.terminal import printable_json

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from camserve._evaluation import Evaluation, MetricInfo
    from camserve._inspection import LayerReading
    from camserve._replay import Check, Replay
    from camserve._result import Explanation, Result
    from camserve._values import Layer, MethodInfo, Model, ParameterInfo

MODEL_HEADINGS = ("model", "source", "weights", "task", "classes", "input", "default layer", "parameters", "", "state")
RESULT_HEADINGS = ("image", "prediction", "method", "target", "verdict", "file")

_STYLES = {Verdict.OK: "green", Verdict.UNSPECIFIED: "", Verdict.NON_FINITE: "red"}


def as_json(values: object) -> str:
    """Write values as JSON."""
    return printable_json(json.dumps(values, default=_plain, indent=2, ensure_ascii=False))


def _plain(value: object) -> dict[str, Any]:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} has no JSON")


def model_rows(models: Iterable[Model]) -> list[tuple[str, ...]]:
    """Describe models, one a row."""
    return [
        (
            each.name,
            each.source,
            *(_particulars(each) if each.digest else ("",) * 7),
            _state(each),
        )
        for each in models
    ]


def _particulars(model: Model) -> tuple[str, ...]:
    return (
        model.weights,
        model.task,
        f"{model.classes:,}",
        f"{model.input_height}×{model.input_width}",
        model.default_layer,
        _count(model.parameters),
        f"{model.precision} on {model.device}",
    )


def _state(model: Model) -> str:
    if model.state is ModelState.UNSPECIFIED:
        return ""
    return f"{model.state.lower()}, version {model.version}" if model.version else model.state.lower()


def layer_rows(layers: Iterable[Layer]) -> list[tuple[str, ...]]:
    """Describe layers, one a row."""
    return [
        (
            each.name,
            each.type,
            "×".join(map(str, each.output_shape)),
            _count(each.parameters),
            "yes" if each.explainable else f"no: {each.reason}",
        )
        for each in layers
    ]


def reading_rows(readings: Iterable[LayerReading]) -> list[tuple[str | Text, ...]]:
    """Describe what layers gave, one a row; what is wrong is red."""
    rows = [(each, _inspection.row(each)) for each in readings]
    return [tuple(Text(cell, style="red") for cell in cells) if each.trouble else cells for each, cells in rows]


def method_rows(methods: Iterable[MethodInfo]) -> list[tuple[str, ...]]:
    """Describe methods, one a row."""
    return [
        (
            each.name,
            each.kind.lower(),
            str(each.rows),
            " ".join(map(_parameter, each.parameters)),
            each.summary,
        )
        for each in methods
    ]


REPLAY_HEADINGS = ("compared", "receipt", "now", "")


def replay_rows(replay: Replay) -> list[tuple[str | Text, ...]]:
    """Describe what was compared, one thing a row."""
    return [(each.name, each.then, each.now, _agreement(each)) for each in replay.checks]


def _agreement(check: Check) -> Text:
    if check.same:
        return Text(check.words or "same", style="green")
    return Text(check.words, style="red") if check.matters else Text("differs, but the numbers agree", style="yellow")


PARAMETER_HEADINGS = ("parameter", "default", "allowed", "")


def method_page(method: MethodInfo) -> str:
    """Describe a method: what it does, by which formula, at what cost."""
    facts = {
        "kind": method.kind.lower(),
        "explains": "a layer" if method.layered else "the input",
        "paper": method.paper,
        "cost": f"{method.rows:,} row{'' if method.rows == 1 else 's'} for each target",
        "smoothing": "augmentation, eigen" if method.eigen_smoothing else "augmentation",
        "needs": method.needs,
    }
    lines = [f"{name:<10} {fact}" for name, fact in facts.items() if fact]
    head = f"{method.name}: {method.summary}"
    return "\n\n".join(filter(None, (head, method.formula, "\n".join(lines))))


def parameter_rows(parameters: Iterable[ParameterInfo]) -> list[tuple[str, ...]]:
    """Describe a method's parameters, one a row."""
    return [(each.name, _default(each), _allowed(each), each.summary) for each in parameters]


def _default(info: ParameterInfo) -> str:
    return f"{info.default:g}" if isinstance(info.default, float) else str(info.default)


def _allowed(info: ParameterInfo) -> str:
    if info.choices:
        return ", ".join(info.choices)
    whole = ", whole" if info.integer else ""
    return f"{info.minimum:.10g} to {info.maximum:.10g}{whole}"


def evaluation_rows(evaluation: Evaluation) -> list[tuple[str | Text, ...]]:
    """Describe what metrics say, one explanation a row, the best reading of each metric in green."""
    best = evaluation.best
    return [
        (
            line[0],
            *(Text(cell, style="bold green" if (row, place) in best else "") for place, cell in enumerate(line[1:])),
        )
        for row, line in enumerate(evaluation.cells()[1:])
    ]


def metric_rows(metrics: Iterable[MetricInfo]) -> list[tuple[str, ...]]:
    """Describe metrics, one a row."""
    return [
        (
            each.name,
            "higher" if each.higher_is_better else "lower",
            f"{each.rows} × the method's" if each.repeats else str(each.rows),
            " ".join(map(_parameter, each.parameters)),
            each.summary,
        )
        for each in metrics
    ]


def result_rows(
    image: Path, written: Iterable[tuple[Explanation, Path]], result: Result
) -> list[tuple[str | Text, ...]]:
    """Describe what came out for one image, one explanation a row."""
    best = result.predictions[0] if result.predictions else None
    said = f"{best.name} {best.probability:.1%}" if best else ""
    return [(str(image), said, each.how, each.title, _verdict(each), path.name) for each, path in written]


def _verdict(explanation: Explanation) -> Text:
    message = f": {explanation.verdict_message}" if explanation.verdict_message else ""
    return Text(f"{explanation.verdict}{message}", style=_STYLES.get(explanation.verdict, "yellow"))


def _parameter(info: ParameterInfo) -> str:
    return f"{info.name}={_default(info)}"


def _count(number: int) -> str:
    """Write a large number shortly: 4.65M."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return str(number)
