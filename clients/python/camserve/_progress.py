"""A progress bar, for those who ask for one."""

from __future__ import annotations

import operator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Generator


@contextmanager
def progress_bar(images: object, *, shown: bool) -> Generator[Callable[[], None], None, None]:
    """Draw a bar on standard error; yield the function that moves it on by one image.

    Args:
        images: What is counted: its length is the total, where it has one.
        shown: Whether to draw at all.
    """
    if not shown:
        yield lambda: None
        return
    from rich import progress  # noqa: PLC0415 -- only who draws a bar waits for rich
    from rich.console import Console  # noqa: PLC0415 -- the same

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("explaining", total=operator.length_hint(images) or None)
        yield lambda: bar.advance(task)
