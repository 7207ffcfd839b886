"""What `python -m benchmarks.watching` makes of what it finds; it starts three servers only there."""

from benchmarks import watching

ALONE = {watching.COUNTED: 19.6, watching.UNKEPT: 33.0, watching.TRACED: 150.4}
SERVED = {watching.ALONE: 2.0, watching.COUNTED: 2.031, watching.TRACED: 2.5}
HOLLOW = "before\n<!-- watching: how -->\n<!-- /watching -->\nafter\n"


def test_counting_costs_less_than_tracing_what_is_kept():
    found = watching.by_itself(rounds=3, times=50)

    assert 0 < found[watching.COUNTED] < found[watching.TRACED]
    assert 0 < found[watching.UNKEPT] < found[watching.TRACED]


def test_what_is_found_becomes_a_table_from_nothing_to_all():
    assert watching.table(ALONE, SERVED).splitlines()[2:] == [
        "| neither |  | 2.00 ms |",
        "| metrics | 20 µs | 2.03 ms |",
        "| metrics, and traces that are not kept | 33 µs |  |",
        "| metrics and traces | 150 µs | 2.50 ms |",
    ]


def test_the_page_is_written_between_its_marks_again_and_again():
    once = watching.page_with(HOLLOW, "| 1 |")

    assert once == HOLLOW.replace("-->\n<!-- /", "-->\n| 1 |\n<!-- /")
    assert watching.page_with(once, "| 1 |") == once
