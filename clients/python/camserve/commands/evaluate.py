"""The commands `evaluate` and `metrics`."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict, Unpack

import click

import camserve
from camserve._core.text import brief
from camserve.commands import tables
from camserve.commands.group import main
from camserve.commands.options import (
    Connect,
    as_usage_errors,
    connection_options,
    interventions_option,
    json_option,
    layers_option,
    model_option,
    photo_argument,
    print_values,
    texts_option,
)
from camserve.commands.parsing import parse_box, parse_method, parse_target
from camserve.terminal import echo, print_table


def _parse_metric(text: str) -> camserve.Metric:
    method = parse_method(text)
    return camserve.Metric(method.name, method.parameters)


class _EvaluateFlags(TypedDict):
    """Options of `evaluate` that say what to evaluate."""

    model: str | None
    methods: tuple[camserve.Method, ...]
    metrics: tuple[camserve.Metric, ...]
    targets: tuple[camserve.TargetLike, ...]
    texts: tuple[str, ...]
    interventions: tuple[camserve.Intervention, ...]
    layers: tuple[str, ...]
    box: camserve.Box | None


@main.command()
@photo_argument
@model_option
@click.option(
    "--method",
    "methods",
    multiple=True,
    default=("gradcam",),
    show_default=True,
    type=parse_method,
    metavar="NAME[:KEY=VALUE,...]",
    help="Method to evaluate. Repeatable.",
)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    default=("deletion", "insertion"),
    show_default=True,
    type=_parse_metric,
    metavar="NAME[:KEY=VALUE,...]",
    help="Metric, such as deletion:steps=50; see `camserve metrics`. Repeatable.",
)
@click.option(
    "--target",
    "targets",
    multiple=True,
    type=parse_target,
    metavar="CLASS[ vs CLASS]",
    help="Target: a label or a class index. Repeatable. Default: the predicted class.",
)
@texts_option
@interventions_option
@layers_option
@click.option(
    "--box",
    type=parse_box,
    metavar="LEFT,TOP,RIGHT,BOTTOM",
    help="Box of the object, in pixels of the photo, for pointing_game and energy_in_box.",
)
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Also write a plot of the results."
)
@connection_options
@json_option
def evaluate(
    photo: Path, plot: Path | None, connect: Connect, *, as_json: bool, **flags: Unpack[_EvaluateFlags]
) -> None:
    """Compare explanation methods on a photo by metrics."""
    with connect() as client, as_usage_errors():
        evaluation = client.evaluate(photo, heatmap=False, overlay="jpeg" if plot else None, max_side=640, **flags)
    if as_json:
        echo(tables.as_json(evaluation.plain()))
    else:
        print_table(evaluation.cells()[0], tables.evaluation_rows(evaluation))
        for label, remark in evaluation.remarks():
            echo(brief(f"{label}: {remark}"), err=True)
    if plot:
        with as_usage_errors():
            evaluation.save(plot)


@main.command()
@connection_options
@json_option
def metrics(connect: Connect, *, as_json: bool) -> None:
    """List the metrics, with their parameters and defaults."""
    with connect() as client:
        infos = client.metrics()
    headings = ("metric", "better", "rows", "parameters", "description")
    print_values(infos, headings, tables.metric_rows(infos), as_json=as_json)
