"""`python -m benchmarks.telemetry` reports its measurements. These tests start none of its three servers."""

import pytest
from benchmarks import perf_analyzer, telemetry
from benchmarks.results import page_with

pytestmark = pytest.mark.slow
ALONE = {telemetry.COUNTED: 19.6, telemetry.UNKEPT: 33.0, telemetry.TRACED: 150.4}
SERVED = {telemetry.ALONE: 2.0, telemetry.COUNTED: 2.031, telemetry.TRACED: 2.5}


def test_counting_costs_less_than_tracing_what_is_kept():
    result = telemetry.by_itself(rounds=3, times=50)

    assert 0 < result[telemetry.COUNTED] < result[telemetry.TRACED]
    assert 0 < result[telemetry.UNKEPT] < result[telemetry.TRACED]


def test_measurements_become_a_table_in_increasing_order_of_telemetry():
    assert telemetry.table(ALONE, SERVED).splitlines()[2:] == [
        "| neither |  | 2.00 ms |",
        "| metrics | 20 µs | 2.03 ms |",
        "| metrics, and traces that are not kept | 33 µs |  |",
        "| metrics and traces | 150 µs | 2.50 ms |",
    ]


@pytest.mark.parametrize(("mark", "page"), [("telemetry", telemetry.PAGE), ("perf_analyzer", perf_analyzer.PAGE)])
def test_page_can_be_rewritten_between_its_marks(mark, page):
    before = page.read_text(encoding="utf-8")
    once = page_with(before, mark, "| 1 |")
    head, _, tail = once.partition("| 1 |")

    assert head.endswith("-->\n")
    assert tail.startswith(f"\n<!-- /{mark} -->")
    assert before.startswith(head)
    assert before.endswith(tail)
    assert page_with(once, mark, "| 1 |") == once
