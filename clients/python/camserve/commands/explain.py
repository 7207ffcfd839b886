"""The command `explain`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import click

import camserve
from camserve import dataset
from camserve._core.files import npy_file, write_file
from camserve._files.finding import images_in
from camserve._files.naming import UniqueNames, stem_of
from camserve.commands import tables
from camserve.commands.flags import ExplainFlags, explain_options, region_options
from camserve.commands.group import FAILED, main, print_error
from camserve.commands.jobs import run_job
from camserve.commands.options import (
    Connect,
    as_usage_errors,
    connection_options,
    fusion_option,
    interventions_option,
    layers_option,
    model_option,
    texts_option,
)
from camserve.commands.parsing import (
    ImagePath,
    LocalFolder,
    none_if_omitted,
    parse_bands,
    parse_method,
    parse_number_or_text,
    parse_target,
)
from camserve.terminal import echo, print_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.text import Text

_SUFFIXES = {"jpeg": ".jpg", "png": ".png", "webp": ".webp"}


@main.command()
@click.argument("paths", nargs=-1, required=True, type=ImagePath(), metavar="PATH...")
@click.option(
    "-o",
    "--output",
    required=True,
    type=LocalFolder(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder for the overlays, created if it is missing.",
)
@model_option
@click.option(
    "--method",
    "methods",
    multiple=True,
    default=("gradcam",),
    show_default=True,
    type=parse_method,
    metavar="NAME[:KEY=VALUE,...]",
    help="Method, such as smoothgrad:samples=32. These need no value: gradcam:eigen_smoothing, "
    "gradcam:augmentation_smoothing, and saliency:per_channel for a map of each channel of the input, or "
    "saliency:per_channel=3+7 for some. Repeatable.",
)
@click.option(
    "--target",
    "targets",
    multiple=True,
    type=parse_target,
    metavar="TARGET",
    help='Target: a label, a class index, "tabby vs tiger cat", "finer:tabby", "probability:tabby", "segment:cat", '
    '"mask:cat@MASK.png", "detection:dog@LEFT,TOP,RIGHT,BOTTOM", "similarity:OTHER.jpg" or "text:a cat". Repeatable. '
    "Default: the predicted class.",
)
@texts_option
@interventions_option
@layers_option
@fusion_option
@click.option(
    "--top-k",
    default=1,
    show_default=True,
    metavar="N",
    help="Number of predicted classes to explain if there is no --target.",
)
@click.option(
    "--colormap",
    default="jet",
    show_default="jet; coolwarm for --sign both",
    metavar="NAME",
    callback=none_if_omitted,
    help="Colour map of the heatmap.",
)
@click.option("--alpha", default=0.5, show_default=True, help="Opacity of the heatmap, 0 to 1.")
@click.option(
    "--format",
    "overlay",
    default="jpeg",
    show_default=True,
    type=click.Choice(["jpeg", "png", "webp"]),
    help="Format of the overlays.",
)
@click.option("--heatmaps", "heatmap", is_flag=True, help="Also write the raw maps, as .npy.")
@click.option(
    "--intensities", "intensity", is_flag=True, help="Also write the coloured intensities, as .intensity.npy."
)
@click.option(
    "--profile",
    default="paper",
    show_default=True,
    type=click.Choice(["paper", "grad-cam", "torchcam", "captum", "signed"]),
    help="Convention that converts raw values to colours. `signed` shows evidence for and against the target.",
)
@click.option(
    "--sign",
    type=click.Choice(["positive", "negative", "both", "absolute"]),
    help="Values to show. Default: positive; both with --profile signed.",
)
@click.option(
    "--scale",
    default="map",
    show_default=True,
    type=parse_number_or_text,
    metavar="map|request|VALUE",
    help="Raw value with the strongest colour: each map's own, the largest of the photo's maps, or a number.",
)
@click.option(
    "--threshold",
    type=float,
    metavar="QUANTILE",
    help="Paint only values above this quantile: 0.8 paints the strongest fifth.",
)
@click.option("--threshold-value", type=float, metavar="VALUE", help="Paint only raw values above this one.")
@click.option("--contour-lines", default=0, show_default=True, metavar="N", help="Number of contour lines, up to 16.")
@click.option("--color-bar", is_flag=True, help="Add a bar with the colours and their raw values.")
@click.option("--fade", is_flag=True, help="Show the photo where the map is weak.")
@click.option(
    "--regions", is_flag=True, help="Also write the regions of each map, as .regions.json, and print a table of them."
)
@click.option(
    "--region-quantile",
    type=float,
    metavar="QUANTILE",
    help="Regions are above this quantile. Default: 0.8. Implies --regions.",
)
@click.option(
    "--region-mass",
    type=float,
    metavar="SHARE",
    help="Regions are the strongest pixels with this share of the map's sum. Implies --regions.",
)
@click.option("--max-regions", type=int, metavar="N", help="Maximum number of regions. Default: 8. Implies --regions.")
@click.option("--draw-regions", is_flag=True, help="Draw the outlines of the regions. Implies --regions.")
@click.option("--receipts", is_flag=True, help="Also write receipts for `camserve replay`, as .receipt.json.")
@click.option("--max-side", type=int, metavar="PIXELS", help="Maximum length of an overlay's longer side.")
@click.option(
    "--value-range",
    type=float,
    nargs=2,
    metavar="LOW HIGH",
    help="Values of a TIFF or NPY file that the model takes as 0 and 1, such as 0 4095. Default: those of their type.",
)
@click.option(
    "--bands",
    default="",
    type=parse_bands,
    metavar="BAND|RED,GREEN,BLUE",
    help="Channels of the photo under the map, from 0. Default: the first three, or the first.",
)
@click.option(
    "--window",
    type=float,
    nargs=2,
    metavar="CENTRE WIDTH",
    help="Values of the photo under the map, from black to white. Default: all of 8 bits, or smallest to largest.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Run as a resumable job, for many photos, with the results as Parquet in DIR.",
)
@click.option(
    "--retry-failed",
    is_flag=True,
    help="With --resume: explain photos again whose row has an error.",
)
@click.option(
    "--column",
    default="",
    metavar="NAME",
    help='Column of a Parquet file with the photos, as bytes or paths. Default: "image", or the only one with bytes.',
)
@click.option(
    "--dry-run", is_flag=True, help="Print the cost in rows (copies of a photo through the model), and send no photo."
)
@click.option(
    "--allow-outside",
    is_flag=True,
    help="Also read photos outside of the named folders: through links, or by the paths in a Parquet file.",
)
@connection_options
def explain(  # noqa: PLR0913 -- every one is an option of the command
    paths: tuple[str, ...],
    output: Path,
    connect: Connect,
    *,
    resume: bool,
    retry_failed: bool,
    column: str,
    dry_run: bool,
    allow_outside: bool,
    **flags: Unpack[ExplainFlags],
) -> int:
    """Explain photos and write the overlays.

    PATH is a photo, a folder of photos, or a glob in quotes. Each overlay is named PHOTO.METHOD.CLASS.SUFFIX.

    With --resume, PATH can also be a Parquet file or a URI such as s3://BUCKET/PREFIX. To continue an interrupted
    job, run the same command again. The results have each photo once.
    """
    if retry_failed and not resume:
        raise click.UsageError("--retry-failed needs --resume")
    if resume:
        with as_usage_errors():
            photos = dataset.Photos(paths, column, str(output), allow_outside=allow_outside)
        if dry_run:
            return _print_cost(photos, connect, flags)
        return run_job(photos, output, connect, flags, retry_failed=retry_failed)
    with as_usage_errors():
        images, skipped = images_in(paths, output, allow_outside=allow_outside)
    for path in skipped:
        print_error(f"{path} is a link out of its folder: use --allow-outside to follow it")
    if dry_run:
        return _print_cost(images, connect, flags)
    return _explain_images(images, output, connect, flags) or (FAILED if skipped else 0)


def _print_cost(photos: Iterable[object], connect: Connect, flags: ExplainFlags) -> int:
    with as_usage_errors():
        client = connect()
    with client:
        with as_usage_errors():
            cost = client.estimate_cost(**explain_options(flags))
        count = sum(1 for _ in photos)
    print_table(tables.COST_HEADINGS, [tables.cost_row(cost, count)])
    return 0


def _explain_images(images: list[Path], output: Path, connect: Connect, flags: ExplainFlags) -> int:
    options = explain_options(flags)
    names = UniqueNames(output)
    rows: list[Sequence[str | Text]] = []
    region_rows: list[Sequence[str]] = []
    failed = 0
    with as_usage_errors():
        client = connect()
    with client:
        with as_usage_errors():
            outcomes = client.explain_many(images, progress=True, on_error="return", **options)
        output.mkdir(parents=True, exist_ok=True)
        try:
            for image, outcome in zip(images, outcomes, strict=True):
                if isinstance(outcome, camserve.CamserveError):
                    failed += print_error(f"{image}: {outcome}")
                    continue
                if odd := _unasked_methods(outcome, flags):
                    failed += print_error(f"{image}: the server answered with methods that were not asked for: {odd}")
                    continue
                written = _write_result(names, image, outcome, flags)
                rows += tables.result_rows(image, written, outcome)
                region_rows += tables.region_rows(written)
        finally:
            # Also after an error or Ctrl-C, list the files that were written.
            if rows:
                print_table(tables.RESULT_HEADINGS, rows)
            if region_rows:
                echo()
                print_table(tables.REGION_HEADINGS, region_rows)
    return FAILED if failed else 0


def _unasked_methods(result: camserve.Result, flags: ExplainFlags) -> str:
    """Return the methods of a result that were not asked for.

    The method is a part of the names of files. With another one the server could replace files of the user.
    """
    asked = {method.name for method in flags["methods"]}
    return ", ".join(sorted({explanation.method for explanation in result.explanations} - asked))


def _write_result(
    names: UniqueNames, image: Path, result: camserve.Result, flags: ExplainFlags
) -> list[tuple[camserve.Explanation, Path]]:
    written: list[tuple[camserve.Explanation, Path]] = []
    with_layer = len(flags["layers"]) > 1 and not flags["fusion"]
    for explanation in result.explanations:
        stem = stem_of(image, explanation, with_layer=with_layer)
        path = explanation.save(names.unique(stem, _SUFFIXES[flags["overlay"]]))
        _write_data(explanation, path, flags)
        written.append((explanation, path))
    return written


def _write_data(explanation: camserve.Explanation, path: Path, flags: ExplainFlags) -> None:
    if flags["heatmap"]:
        explanation.save(path.with_suffix(".npy"))
    if flags["receipts"]:
        explanation.receipt.save(path.with_suffix(".receipt.json"))
    if explanation.intensity is not None:
        write_file(path.with_suffix(".intensity.npy"), npy_file(explanation.intensity))
    if region_options(flags, masks=True):
        write_file(path.with_suffix(".regions.json"), tables.regions_as_json(explanation).encode())
