"""The command `diff`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import click

import camserve
from camserve.commands.group import main, print_error
from camserve.commands.options import Connect, connection_options, fusion_option, layers_option
from camserve.commands.parsing import ImagePath, LocalFolder, parse_method, parse_target
from camserve.diff import command, run, values

if TYPE_CHECKING:
    from contextlib import ExitStack


@main.command()
@click.argument("paths", nargs=-1, required=True, type=ImagePath(), metavar="PATH...")
@click.option(
    "--baseline",
    required=True,
    metavar="MODEL|DIR",
    help="The model to compare with, as NAME or NAME@HOST:PORT, or the folder of a baseline.",
)
@click.option(
    "--candidate", required=True, metavar="MODEL|DIR", help="The new model, as NAME or NAME@HOST:PORT, or a folder."
)
@click.option(
    "-o",
    "--output",
    type=LocalFolder(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder for the report, created if it is missing.",
)
@click.option("--accept", is_flag=True, help="Record the candidate as the new baseline, in the folder of --baseline.")
@click.option(
    "--method",
    "methods",
    multiple=True,
    type=parse_method,
    metavar="NAME[:KEY=VALUE,...]",
    help="Method. Repeatable. Default: that of a recorded baseline, or gradcam.",
)
@click.option(
    "--target",
    "targets",
    multiple=True,
    type=parse_target,
    metavar="TARGET",
    help="Target of both models. Repeatable. Default: the class that the baseline predicts.",
)
@layers_option
@fusion_option
@click.option("--top-k", default=1, show_default=True, metavar="N", help="Number of predicted classes to compare.")
@click.option(
    "--boxes",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help='JSON file with the box of the object in each photo: {"PHOTO": [LEFT, TOP, RIGHT, BOTTOM]}.',
)
@click.option(
    "--sample",
    default=values.SAMPLE,
    show_default=True,
    type=click.IntRange(min=2),
    metavar="N",
    help="Number of photos to calibrate with.",
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), help="Seed of the calibration.")
@click.option(
    "--max-changed",
    default=values.MAX_CHANGED,
    show_default=True,
    type=click.FloatRange(0, 1),
    metavar="SHARE",
    help="Share of the photos that may change.",
)
@click.option("--skip-failed", is_flag=True, help="Leave out photos that one of the models cannot explain.")
@connection_options
def diff(
    paths: tuple[str, ...],
    output: Path | None,
    connect: Connect,
    *,
    baseline: str,
    candidate: str,
    accept: bool,
    **flags: Unpack[command.DiffFlags],
) -> int:
    """Compare where two models look.

    PATH is a photo, a folder of photos, or a glob in quotes. Both models explain the class that the baseline predicts.
    The differences are compared with those that noise makes, and with those that random weights make. DIR gets
    index.html, report.json and junit.xml. The exit code is 0 if the models look at the same places, 1 if they differ,
    and 2 if they could not be compared.

    A baseline in a folder needs no model. --accept records it.
    """

    def open_model(text: str, stack: ExitStack) -> run.LiveModel:
        name, _, address = text.partition("@")
        return run.LiveModel(text, stack.enter_context(connect(*filter(None, [address]))), name)

    return run_diff(open_model, paths, (baseline, candidate), output, flags, accept=accept)


def run_diff(
    open_model: command.OpenModel,
    paths: tuple[str, ...],
    sides: tuple[str, str],
    output: Path | None,
    flags: command.DiffFlags,
    *,
    accept: bool,
) -> int:
    """Run the command ``diff``; report an error in one line and with its exit code.

    Args:
        open_model: Function that connects to a model.
        paths: Photos, folders and globs.
        sides: The baseline and the candidate.
        output: Folder of the report.
        flags: The other options.
        accept: True to record the candidate as the new baseline.
    """
    try:
        if accept:
            return command.accept(open_model, paths, sides, flags)
        if output is None:
            raise click.UsageError("Missing option '-o' / '--output'.")
        return command.diff(open_model, paths, sides, output, flags)
    except (camserve.CamserveError, OSError) as error:
        return print_error(str(error), command.COULD_NOT_COMPARE)
    except KeyboardInterrupt:
        return print_error("interrupted: run the same command again to go on", command.COULD_NOT_COMPARE)
