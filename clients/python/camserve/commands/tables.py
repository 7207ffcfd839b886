"""Format the output of the commands: rows of tables, and JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

from rich.text import Text

from camserve._core.text import printable_json
from camserve._values.inspection import reading_cells
from camserve._values.models import Layer, Model, ModelState
from camserve._values.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from camserve._values.evaluation import Evaluation, MetricInfo
    from camserve._values.inspection import Channel, LayerReading
    from camserve._values.methods import Cost, MethodInfo, ParameterInfo
    from camserve._values.prediction import Prediction
    from camserve._values.replay import Check, Replay
    from camserve._values.result import Explanation, Result

MODEL_HEADINGS = (
    "model",
    "source",
    "weights",
    "task",
    "classes",
    "input",
    "default layer",
    "parameters",
    "precision",
    "state",
)
RANKED: Mapping[str, str] = {"pca": "component", "factors": "concept", "heads": "head"}
"""By rank: what is returned instead of channels, with a share each."""

SOURCES_WITH_WEIGHTS = frozenset({"embedded", "torchvision", "timm", "hf"})
"""Sources that load weights of their own, which are the default ones."""

COST_HEADINGS = ("photos", "explanations of each", "rows of each", "rows in all", "most rows of a request")
REGION_HEADINGS = ("file", "region", "box", "area", "share", "peak", "value")
RESULT_HEADINGS = ("image", "prediction", "method", "target", "verdict", "file")

_STYLES = {Verdict.OK: "green", Verdict.UNSPECIFIED: "", Verdict.NON_FINITE: "red"}


def as_json(values: object) -> str:
    """Return values as JSON text, with control characters escaped."""
    return printable_json(json.dumps(values, default=_to_dict, indent=2, ensure_ascii=False))


def _to_dict(value: object) -> dict[str, Any]:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} cannot be converted to JSON")


def model_rows(models: Iterable[Model]) -> list[tuple[str, ...]]:
    """Return a row for each model; the details of a model that is not loaded are empty."""
    return [
        (
            model.name,
            model.source,
            *(_model_details(model) if model.digest else ("",) * 7),
            _model_state(model),
        )
        for model in models
    ]


def _model_details(model: Model) -> tuple[str, ...]:
    source, _, _ = model.source.partition(":")
    return (
        # A function or a plugin returns a network that has its weights already; no source loads default ones into it.
        "as built" if model.weights == "default" and source not in SOURCES_WITH_WEIGHTS else model.weights,
        model.task,
        f"{model.classes:,}",
        f"{model.input_height}×{model.input_width}",
        "pyramid" if model.pyramid else model.default_layer,
        _shorten_count(model.parameters),
        f"{model.precision} on {model.device}",
    )


def _model_state(model: Model) -> str:
    if model.state is ModelState.UNSPECIFIED:
        return ""
    return f"{model.state.lower()}, version {model.version}" if model.version else model.state.lower()


def layer_rows(layers: Iterable[Layer]) -> list[tuple[str, ...]]:
    """Return a row for each layer."""
    return [
        (
            layer.name,
            layer.type,
            "×".join(map(str, layer.output_shape)),
            _shorten_count(layer.parameters),
            "yes" if layer.explainable else f"no: {layer.reason}",
        )
        for layer in layers
    ]


def reading_rows(readings: Iterable[LayerReading]) -> list[tuple[str | Text, ...]]:
    """Return a row for each reading of a layer; readings with a problem are red."""
    rows = [(reading, reading_cells(reading)) for reading in readings]
    return [tuple(Text(cell, style="red") for cell in cells) if reading.trouble else cells for reading, cells in rows]


def feature_table(channels: Sequence[Channel], rank: str) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the headings and the rows of a table of channels, components, concepts or attention heads.

    Args:
        channels: The channels.
        rank: The rank by which they were requested.
    """
    share, nearest = rank in RANKED, rank == "factors"
    headings: tuple[str, ...] = (RANKED.get(rank, "channel"), "mean activation", "gradient weight")
    headings += ("share",) * share + ("nearest",) * nearest
    rows: list[tuple[str, ...]] = []
    for channel in channels:
        cells: tuple[str, ...] = (
            str(channel.index),
            f"{channel.mean_activation:.3g}",
            f"{channel.gradient_weight:.3g}",
        )
        cells += (f"{channel.share:.1%}",) * share
        cells += (", ".join(each.name for each in channel.nearest),) * nearest
        rows.append(cells)
    return headings, rows


def method_rows(methods: Iterable[MethodInfo]) -> list[tuple[str, ...]]:
    """Return a row for each method."""
    return [
        (
            method.name,
            method.kind.lower(),
            str(method.rows),
            " ".join(map(_parameter, method.parameters)),
            method.summary,
        )
        for method in methods
    ]


REPLAY_HEADINGS = ("check", "receipt", "now", "result")


def replay_rows(replay: Replay) -> list[tuple[str | Text, ...]]:
    """Return a row for each comparison of a replay."""
    return [(check.name, check.then, check.now, _agreement(check)) for check in replay.checks]


def _agreement(check: Check) -> Text:
    if check.same:
        return Text(check.words or "same", style="green")
    return Text(check.words, style="red") if check.matters else Text("differs, but the numbers agree", style="yellow")


PARAMETER_HEADINGS = ("parameter", "default", "allowed", "description")


def method_page(method: MethodInfo) -> str:
    """Return a text that describes a method: summary, formula and properties."""
    properties = {
        "kind": method.kind.lower(),
        "explains": "a layer" if method.layered else "the input",
        "paper": method.paper,
        "cost": f"{method.rows:,} row{'' if method.rows == 1 else 's'} for each target",
        "smoothing": "augmentation, eigen" if method.eigen_smoothing else "augmentation",
        "channels": "one map for each, with per_channel" if method.per_channel else "",
        "needs": method.needs,
    }
    lines = [f"{name:<10} {value}" for name, value in properties.items() if value]
    title = f"{method.name}: {method.summary}"
    return "\n\n".join(filter(None, (title, method.formula, "\n".join(lines))))


def parameter_rows(parameters: Iterable[ParameterInfo]) -> list[tuple[str, ...]]:
    """Return a row for each parameter of a method."""
    return [(info.name, _default(info), _allowed_values(info), info.summary) for info in parameters]


def _default(info: ParameterInfo) -> str:
    return f"{info.default:g}" if isinstance(info.default, float) else str(info.default)


def _allowed_values(info: ParameterInfo) -> str:
    if info.choices:
        return ", ".join(info.choices)
    integer = ", integer" if info.integer else ""
    return f"{info.minimum:.10g} to {info.maximum:.10g}{integer}"


def evaluation_rows(evaluation: Evaluation) -> list[tuple[str | Text, ...]]:
    """Return a row for each explanation, with the best reading of each metric in green."""
    best = evaluation.best
    return [
        (
            label,
            *(Text(cell, style="bold green" if (row, column) in best else "") for column, cell in enumerate(cells)),
        )
        for row, (label, *cells) in enumerate(evaluation.cells()[1:])
    ]


def metric_rows(metrics: Iterable[MetricInfo]) -> list[tuple[str, ...]]:
    """Return a row for each metric."""
    return [
        (
            metric.name,
            "higher" if metric.higher_is_better else "lower",
            f"{metric.rows} × the method's" if metric.repeats else str(metric.rows),
            " ".join(map(_parameter, metric.parameters)),
            metric.summary,
        )
        for metric in metrics
    ]


def result_rows(
    image: Path, written: Iterable[tuple[Explanation, Path]], result: Result
) -> list[tuple[str | Text, ...]]:
    """Return a row for each explanation of an image."""
    prediction = _first(result.predictions)
    if result.unchanged_predictions:
        prediction += f" (unchanged: {_first(result.unchanged_predictions)})"
    return [
        (str(image), prediction, explanation.how, explanation.title, _verdict(explanation), path.name)
        for explanation, path in written
    ]


def _first(predictions: Sequence[Prediction]) -> str:
    return f"{predictions[0].name} {predictions[0].probability:.1%}" if predictions else ""


def region_rows(written: Iterable[tuple[Explanation, Path]]) -> list[tuple[str, ...]]:
    """Return a row for each region of the explanations of an image."""
    return [
        (
            path.name,
            str(number),
            "{left:.0f},{top:.0f},{right:.0f},{bottom:.0f}".format(**asdict(region.box)),
            f"{region.area:,}",
            f"{region.share:.1%}",
            "{:.0f},{:.0f}".format(*region.peak),
            f"{region.peak_value:.3g}",
        )
        for explanation, path in written
        for number, region in enumerate(explanation.regions, 1)
    ]


def regions_as_json(explanation: Explanation) -> str:
    """Return the regions of an explanation as JSON, with the size of the photo."""
    photo = explanation.photo
    regions = [region.plain() for region in explanation.regions]
    return json.dumps({"width": photo.width, "height": photo.height, "regions": regions}, allow_nan=False)


def cost_row(cost: Cost, photos: int) -> tuple[str, ...]:
    """Return the row of the cost of explaining photos."""
    return tuple(f"{n:,}" for n in (photos, cost.explanations, cost.rows, photos * cost.rows, cost.max_rows))


def _verdict(explanation: Explanation) -> Text:
    message = f": {explanation.verdict_message}" if explanation.verdict_message else ""
    return Text(f"{explanation.verdict}{message}", style=_STYLES.get(explanation.verdict, "yellow"))


def _parameter(info: ParameterInfo) -> str:
    return f"{info.name}={_default(info)}"


def _shorten_count(number: int) -> str:
    """Abbreviate a large number, such as 4.65M."""
    for unit, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.3g}{letter}"
    return str(number)
