"""A progress bar for jobs."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from camserve.dataset.job import Tally


@contextmanager
def progress_bar(total: int) -> Generator[Callable[[Tally], None], None, None]:
    """Show the progress bar of a job on standard error; yield a function that updates it.

    Args:
        total: Number of photos, including those that earlier runs have done.
    """
    from rich import progress  # noqa: PLC0415 -- importing rich takes time, which only a bar needs
    from rich.console import Console  # noqa: PLC0415 -- the same

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[failed]}"),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("explaining", total=total, failed="")

        def update(tally: Tally) -> None:
            failed = tally.failed + tally.failed_before
            bar.update(task, completed=tally.total, failed=f"{failed} failed" if failed else "")

        yield update
