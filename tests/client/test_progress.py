"""The bar: images count whole, those under way as far as they have come."""

from __future__ import annotations

import pytest
from rich.progress import Progress

from camserve import _progress


@pytest.fixture
def bar() -> _progress.ProgressBar:
    progress = Progress()
    return _progress.ProgressBar(progress, progress.add_task("explaining", total=4, rows=""))


def shown(bar: _progress.ProgressBar) -> tuple[float, str]:
    (task,) = bar._progress.tasks
    return task.completed, task.fields["rows"]


def test_an_image_under_way_counts_as_far_as_it_has_come(bar: _progress.ProgressBar) -> None:
    bar.image_done()
    bar.rows_done([(128, 512), (256, 512)])

    assert shown(bar) == (1.75, "384/1024 rows")


def test_an_image_that_is_done_counts_whole(bar: _progress.ProgressBar) -> None:
    bar.rows_done([(500, 512)])
    bar.image_done()

    assert shown(bar) == (1, "")


def test_quick_methods_leave_the_bar_as_it_is(bar: _progress.ProgressBar) -> None:
    bar.rows_done([(1, 1), (0, 0)])

    assert shown(bar) == (1, "")
