"""Progress bar: an image in flight counts by the share of its rows that is done."""

from __future__ import annotations

import pytest
from rich.progress import Progress

from camserve._show.progress import ProgressBar


@pytest.fixture
def bar() -> ProgressBar:
    progress = Progress()
    return ProgressBar(progress, progress.add_task("explaining", total=4, rows=""))


def shown(bar: ProgressBar) -> tuple[float, str]:
    (task,) = bar._progress.tasks
    return task.completed, task.fields["rows"]


def test_image_in_flight_counts_by_its_share_of_rows(bar: ProgressBar) -> None:
    bar.image_done()
    bar.rows_done([(128, 512), (256, 512)])

    assert shown(bar) == (1.75, "384/1024 rows")


def test_finished_image_counts_as_one(bar: ProgressBar) -> None:
    bar.rows_done([(500, 512)])
    bar.image_done()

    assert shown(bar) == (1, "")


def test_few_rows_are_not_shown(bar: ProgressBar) -> None:
    bar.rows_done([(1, 1), (0, 0)])

    assert shown(bar) == (1, "")
