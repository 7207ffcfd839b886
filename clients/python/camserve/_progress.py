"""How far a call has come: told to the caller, or drawn as a bar for those who ask for one."""

from __future__ import annotations

import operator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from rich.progress import Progress, TaskID

Rows: TypeAlias = "tuple[int, int]"
"""Rows of one request that are computed, and that it costs in all."""

OnProgress: TypeAlias = "Callable[[int, int], None]"

# Rows of the images under way from which on the bar shows them: fewer are done at once.
_MANY = 32


class Meter(Protocol):
    """Is told how far a call has come."""

    def image(self) -> None:
        """Count one more image as done."""

    def rows(self, under_way: Sequence[Rows]) -> None:
        """Take in how far each of the images under way has come, as far as that is known."""


class NullProgress:
    """A meter that nobody looks at."""

    def image(self) -> None:
        """Do nothing."""

    def rows(self, under_way: Sequence[Rows]) -> None:
        """Do nothing."""


class CallbackProgress(NullProgress):
    """Tells a caller how far its one image has come."""

    def __init__(self, on_progress: OnProgress) -> None:
        self._tell = on_progress

    def rows(self, under_way: Sequence[Rows]) -> None:
        """Tell of the one image."""
        self._tell(*under_way[0])


class Bar:
    """A bar that counts images; those under way count as far as they have come."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task
        self._images = 0

    def image(self) -> None:
        """Move on by one image."""
        self._images += 1
        self._progress.update(self._task, completed=self._images, rows="")

    def rows(self, under_way: Sequence[Rows]) -> None:
        """Show how far the images under way have come."""
        done, total = (sum(each) for each in zip(*under_way, strict=True))
        shares = sum(each / most for each, most in under_way if most)
        said = f"{done}/{total} rows" if total >= _MANY else ""
        self._progress.update(self._task, completed=self._images + shares, rows=said)


@contextmanager
def progress_bar(images: object, *, shown: bool) -> Generator[Meter, None, None]:
    """Draw a bar on standard error; yield the meter that moves it on.

    Args:
        images: What is counted: its length is the total, where it has one.
        shown: Whether to draw at all.
    """
    if not shown:
        yield NullProgress()
        return
    from rich import progress  # noqa: PLC0415 -- only who draws a bar waits for rich
    from rich.console import Console  # noqa: PLC0415 -- the same

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[rows]}"),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as bar:
        yield Bar(bar, bar.add_task("explaining", total=operator.length_hint(images) or None, rows=""))
