"""Progress of a call: passed to a callback, or drawn as a progress bar."""

from __future__ import annotations

import operator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from rich.progress import Progress, TaskID

Rows: TypeAlias = "tuple[int, int]"
"""Rows of one request: the number computed so far, and the total."""

OnProgress: TypeAlias = "Callable[[int, int], None]"

# Fewer rows than this are computed at once, so the bar does not show them.
_MIN_ROWS_SHOWN = 32


class ProgressReporter(Protocol):
    """Receiver of a call's progress."""

    def image_done(self) -> None:
        """Count one more image as done."""

    def rows_done(self, in_flight: Sequence[Rows]) -> None:
        """Receive the last known progress of the images in flight."""


class NullProgress:
    """Reporter that ignores progress."""

    def image_done(self) -> None:
        """Do nothing."""

    def rows_done(self, in_flight: Sequence[Rows]) -> None:
        """Do nothing."""


class CallbackProgress(NullProgress):
    """Reporter that passes the progress of a single image to a callback."""

    def __init__(self, on_progress: OnProgress) -> None:
        self._on_progress = on_progress

    def rows_done(self, in_flight: Sequence[Rows]) -> None:
        """Call the callback with the rows of the image."""
        self._on_progress(*in_flight[0])


class ProgressBar:
    """Progress bar that counts images; an image in flight counts by the share of its rows that is done."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task
        self._images = 0

    def image_done(self) -> None:
        """Advance by one image."""
        self._images += 1
        self._progress.update(self._task, completed=self._images, rows="")

    def rows_done(self, in_flight: Sequence[Rows]) -> None:
        """Show the progress of the images in flight."""
        done, total = (sum(counts) for counts in zip(*in_flight, strict=True))
        shares = sum(image_done / image_total for image_done, image_total in in_flight if image_total)
        text = f"{done}/{total} rows" if total >= _MIN_ROWS_SHOWN else ""
        self._progress.update(self._task, completed=self._images + shares, rows=text)


@contextmanager
def progress_bar(images: object, *, shown: bool) -> Generator[ProgressReporter, None, None]:
    """Draw a progress bar on standard error; yield the reporter that advances it.

    Args:
        images: The images to count. Their length, where they have one, is the total.
        shown: False to draw nothing.
    """
    if not shown:
        yield NullProgress()
        return
    from rich import progress  # noqa: PLC0415 -- rich is slow to import, and most callers draw no bar
    from rich.console import Console  # noqa: PLC0415 -- the same

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[rows]}"),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as bar:
        yield ProgressBar(bar, bar.add_task("explaining", total=operator.length_hint(images) or None, rows=""))
