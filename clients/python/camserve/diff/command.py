"""The command ``diff``, for the client's and for the server's command line."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypedDict

from camserve import dataset, terminal
from camserve._core.errors import InvalidArgument
from camserve._core.files import read_regular
from camserve._core.text import brief
from camserve._values.targets import TargetLike, to_box
from camserve.diff import compare, outputs, run
from camserve.diff.recording import HEADER_FILE, options_of, read_header, refuse_link
from camserve.diff.values import DiffSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from camserve._values.methods import Method
    from camserve._values.options import ExplainOptions
    from camserve._values.picture import Box
    from camserve.diff.run import LiveModel, Side, Stage
    from camserve.diff.values import Report

    OpenModel: TypeAlias = Callable[[str, ExitStack], LiveModel]
    """Function that connects to the model that a user named; the stack closes the connection."""

SAME: Final = 0
CHANGED: Final = 1
COULD_NOT_COMPARE: Final = 2
"""Exit codes of the command."""


class DiffFlags(TypedDict):
    """Options of the command."""

    methods: tuple[Method, ...]
    targets: tuple[TargetLike, ...]
    layers: tuple[str, ...]
    fusion: str | None
    top_k: int
    boxes: Path | None
    sample: int
    seed: int
    max_changed: float
    skip_failed: bool


def diff(open_model: OpenModel, paths: tuple[str, ...], sides: tuple[str, str], output: Path, flags: DiffFlags) -> int:
    """Compare two models and print the outcome; return the exit code.

    Args:
        open_model: Function that connects to a model.
        paths: Photos, folders and globs.
        sides: The baseline and the candidate, as the user named them.
        output: Folder of the report.
        flags: Options.

    Raises:
        CamserveError: The two cannot be compared.
        OSError: The report cannot be written.
    """
    photos = run.photos_in(paths, output)
    with ExitStack() as stack, dataset.locked(output), _progress_bars() as stage:
        opened = tuple(_open(side, open_model, stack) for side in sides)
        report = run.run(photos, (opened[0], opened[1]), output, _settings(flags), stage)
    _print(report, output)
    return CHANGED if report.changed else SAME


def accept(open_model: OpenModel, paths: tuple[str, ...], sides: tuple[str, str], flags: DiffFlags) -> int:
    """Record a model as the new baseline; the arguments are those of ``diff``."""
    folder = Path(sides[0])
    if _folder(sides[0]) is None and folder.exists():
        raise InvalidArgument(f"--accept writes to the folder of --baseline, and {sides[0]} is a file")
    if _folder(sides[1]) is not None:
        raise InvalidArgument("--accept records a model, not a folder: name a model as the candidate")
    photos = run.photos_in(paths, folder)
    compare.check_number(len(photos))
    settings = _settings(flags)
    settings = replace(settings, options=_with_those_of(folder, settings.options or {}))
    refuse_link(folder / run.UNFINISHED)
    with ExitStack() as stack, dataset.locked(folder / run.UNFINISHED), _progress_bars() as stage:
        model = open_model(sides[1], stack)
        made = run.accept(photos, model, folder, settings, stage)
    terminal.echo(f"{folder} is the new baseline: {len(made.digests):,} photos, explained by {model.name}")
    return SAME


def _with_those_of(folder: Path, options: ExplainOptions) -> ExplainOptions:
    """Return options, with those of the baseline that a folder has, if any, in place of the missing ones."""
    try:
        recorded = read_header(folder)
    except InvalidArgument:  # there is none, or one that this client cannot read
        return options
    if "targets" in recorded.options and "targets" not in options:
        raise InvalidArgument(f"{folder} has targets of its own: name them, as when it was recorded")
    return {**options_of(recorded), **options}


def _open(side: str, open_model: OpenModel, stack: ExitStack) -> Side:
    folder = _folder(side)
    return open_model(side, stack) if folder is None else folder


def _folder(side: str) -> Path | None:
    """Return the folder that one side names; None if it names a model."""
    path = Path(side)
    is_folder = (path / HEADER_FILE).is_file() or side.endswith("/") or (path.is_dir() and ":" not in side)
    return path if is_folder else None


def _settings(flags: DiffFlags) -> DiffSettings:
    chosen: dict[str, Any] = {name: flags[name] for name in ("methods", "targets", "layers", "fusion")}
    options: ExplainOptions = {name: value for name, value in chosen.items() if value}  # type: ignore[assignment]
    if flags["top_k"] != 1:
        options["top_k"] = flags["top_k"]
    return DiffSettings(
        options=options or None,
        sample=flags["sample"],
        seed=flags["seed"],
        max_changed=flags["max_changed"],
        boxes=_read_boxes(flags["boxes"]),
        skip_failed=flags["skip_failed"],
    )


def _read_boxes(path: Path | None) -> dict[str, Box]:
    """Read a JSON object with left, top, right and bottom of a box by the name of the photo."""
    if path is None:
        return {}
    try:
        content = json.loads(read_regular(path))
        return {str(name): to_box(edges, f"boxes.{name}") for name, edges in content.items()}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise InvalidArgument(f"{path} is not a JSON object of boxes by the name of the photo: {error}") from error


def _print(report: Report, output: Path) -> None:
    terminal.echo(brief(outputs.headline(report)))
    for reason in report.reasons:
        terminal.echo(f"  {brief(reason)}")
    terminal.echo()
    terminal.print_table(outputs.CHECK_HEADINGS, outputs.check_rows(report))
    if report.groups:
        terminal.echo()
        terminal.print_table(outputs.GROUP_HEADINGS, outputs.group_rows(report))
    if report.failures:
        terminal.echo(f"\n{brief(outputs.left_out(report))}")
    terminal.echo(f"\nThe report is {output / run.REPORT}")


@contextmanager
def _progress_bars() -> Generator[Stage, None, None]:
    """Show a progress bar for each stage on standard error, if it is a terminal."""
    from rich import progress  # noqa: PLC0415 -- importing rich takes time, which only a bar needs
    from rich.console import Console  # noqa: PLC0415 -- the same

    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
    )
    bars = progress.Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())
    with bars:

        def stage(name: str, total: int) -> Callable[[], object]:
            task = bars.add_task(name, total=total)
            return lambda: bars.advance(task)

        yield stage
