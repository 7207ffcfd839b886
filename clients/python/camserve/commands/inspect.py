"""The commands `inspect` and `features`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from camserve._values.inspection import HEADINGS
from camserve.commands import tables
from camserve.commands.group import main
from camserve.commands.options import (
    Connect,
    connection_options,
    interventions_option,
    json_option,
    model_option,
    photo_argument,
    print_values,
    target_option,
    texts_option,
)

if TYPE_CHECKING:
    import camserve
    from camserve._values.options import InspectOptions


@main.command()
@photo_argument
@model_option
@target_option
@texts_option
@interventions_option
@click.option(
    "--layer", "layers", multiple=True, metavar="NAME", help="Layer to measure. Repeatable. Default: all layers."
)
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Also write a plot of the norms."
)
@connection_options
@json_option
def inspect(
    photo: Path, connect: Connect, *, plot: Path | None, as_json: bool, **flags: Unpack[InspectOptions]
) -> None:
    """Measure the output and the gradient of each layer for a photo."""
    with connect() as client:
        inspection = client.inspect(photo, **flags)
    print_values(inspection.layers, HEADINGS, tables.reading_rows(inspection.layers), as_json=as_json)
    if plot:
        inspection.save(plot)


class _FeaturesFlags(TypedDict):
    """Options of `features` that say which channels to return."""

    model: str | None
    target: camserve.TargetLike | None
    texts: tuple[str, ...]
    interventions: tuple[camserve.Intervention, ...]
    layer: str | None
    rank: str
    top: int | None
    foreground: bool
    fit: tuple[Path, ...]
    colormap: str


@main.command()
@photo_argument
@model_option
@target_option
@texts_option
@interventions_option
@click.option(
    "--layer", metavar="NAME", help="Layer. Default: the model's default layer; of heads, the last attention."
)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Picture with a tile for each channel (.png, .jpg, .webp), or the raw maps (.npy).",
)
@click.option(
    "--rank",
    default="activation",
    show_default=True,
    type=click.Choice(["activation", "gradient", "pca", "factors", "heads"]),
    help="Order the channels by their mean, or by the absolute value of their Grad-CAM weight. Or draw the principal "
    "components of the features, the concepts in them, or the heads of an attention.",
)
@click.option(
    "--top",
    default=16,
    show_default=True,
    metavar="N",
    help="Number of channels. The default of components is 3, that of concepts 5, and that of heads all.",
)
@click.option("--foreground", is_flag=True, help="Leave out the background. Only for --rank pca.")
@click.option(
    "--fit",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="PHOTO",
    help="Further photo whose features the components describe too. Repeatable. Only for --rank pca.",
)
@click.option("--colormap", default="viridis", show_default=True, metavar="NAME", help="Colour map of the tiles.")
@connection_options
@json_option
@click.pass_context
def features(
    context: click.Context,
    photo: Path,
    output: Path,
    connect: Connect,
    *,
    as_json: bool,
    **flags: Unpack[_FeaturesFlags],
) -> None:
    """Draw the strongest channels of a layer.

    These are the channels that are most active for the photo, or that have the largest Grad-CAM weights: see --rank.
    """
    if context.get_parameter_source("top") is click.core.ParameterSource.DEFAULT and flags["rank"] in tables.RANKED:
        flags["top"] = None  # the server knows the default of the rank
    with connect() as client:
        features = client.features(photo, maps=output.suffix.lower() == ".npy", **flags)
    features.save(output)
    print_values(features.channels, *tables.feature_table(features.channels, flags["rank"]), as_json=as_json)
