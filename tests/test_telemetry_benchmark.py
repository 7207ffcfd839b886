"""Figures and tables of `python -m benchmarks.telemetry`, which itself starts three servers."""

import pytest
from benchmarks import perf_analyzer, telemetry
from benchmarks.results import page_with

ALONE = {telemetry.COUNTED: 19.6, telemetry.UNKEPT: 33.0, telemetry.TRACED: 150.4}
SERVED = {telemetry.ALONE: 2.0, telemetry.COUNTED: 2.031, telemetry.TRACED: 2.5}


def test_counting_costs_less_than_tracing_what_is_kept():
    found = telemetry.by_itself(rounds=3, times=50)

    assert 0 < found[telemetry.COUNTED] < found[telemetry.TRACED]
    assert 0 < found[telemetry.UNKEPT] < found[telemetry.TRACED]


def test_what_is_found_becomes_a_table_from_nothing_to_all():
    assert telemetry.table(ALONE, SERVED).splitlines()[2:] == [
        "| neither |  | 2.00 ms |",
        "| metrics | 20 µs | 2.03 ms |",
        "| metrics, and traces that are not kept | 33 µs |  |",
        "| metrics and traces | 150 µs | 2.50 ms |",
    ]


@pytest.mark.parametrize(("mark", "page"), [("telemetry", telemetry.PAGE), ("perf_analyzer", perf_analyzer.PAGE)])
def test_a_page_is_written_between_its_marks_again_and_again(mark, page):
    before = page.read_text(encoding="utf-8")
    once = page_with(before, mark, "| 1 |")
    head, _, tail = once.partition("| 1 |")

    assert head.endswith("-->\n")
    assert tail.startswith(f"\n<!-- /{mark} -->")
    assert before.startswith(head)
    assert before.endswith(tail)
    assert page_with(once, mark, "| 1 |") == once
