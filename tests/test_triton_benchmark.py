"""`make bench-triton` calls perf_analyzer and reads its report. These tests do not start that program."""

import base64
import json
import sys

import click
import pytest
from benchmarks import perf_analyzer
from benchmarks.photos import photos

pytestmark = pytest.mark.slow
REPORT = """Concurrency,Inferences/Second,Client Send,Network+Server Send/Recv,Server Queue,Server Compute Input,\
Server Compute Infer,Server Compute Output,Client Recv,p50 latency,p90 latency,p95 latency,p99 latency
16,80.25,12,3000,41000,900,150000,1200,9,190000,210000,215000,220500
1,22.5,12,900,60,800,40000,1100,9,43210,45000,46000,51000
"""


def program(text, code=0):
    """Return a command that writes this text in place of perf_analyzer's report."""
    script = f"import sys; open(sys.argv[sys.argv.index('-f') + 1], 'w').write({text!r}); sys.exit({code})"
    return f'{sys.executable} -c "{script}"'


def test_photos_are_elements_of_a_bytes_tensor(tmp_path):
    data = json.loads(perf_analyzer.question(tmp_path).read_text())["data"]
    first = base64.b64decode(data[0]["image"]["b64"])

    assert len(data) == len(photos())
    assert (int.from_bytes(first[:4], "little"), first[4:]) == (len(photos()[0]), photos()[0])


def test_report_becomes_a_table_in_milliseconds_sorted_by_callers():
    rows = perf_analyzer.measured(program(REPORT), "127.0.0.1:1", (1, 16, 15), streaming=False)
    lines = perf_analyzer.table(rows).splitlines()

    assert lines[0].startswith("| requests under way | explanations/s | median |")
    assert lines[2:] == [
        "| 1 | 22.5 | 43.2 ms | 51.0 ms | 0.1 ms | 0.8 ms | 40.0 ms | 1.1 ms |",
        "| 16 | 80.2 | 190.0 ms | 220.5 ms | 41.0 ms | 0.9 ms | 150.0 ms | 1.2 ms |",
    ]


def test_streaming_flag_is_passed_only_if_requested(tmp_path):
    asked = [perf_analyzer.command("tool", "host:1", tmp_path, (4, 4, 1), streaming=way) for way in (False, True)]

    assert asked[1] == [*asked[0], "--streaming"]


def test_failed_program_is_reported():
    with pytest.raises(click.ClickException, match="exited with 3"):
        perf_analyzer.measured(program(REPORT, 3), "127.0.0.1:1", (1, 1, 1), streaming=False)
