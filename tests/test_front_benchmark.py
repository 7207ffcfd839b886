"""`python -m benchmarks front` counts, divides and skips as it says. Only slow tests start a server of camserve."""

import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from benchmarks import __main__ as program
from benchmarks import photos, results, serving
from benchmarks.front import against, bursts, echo, floor, load, lock, measure, models, tables
from benchmarks.front.bursts import Load, Sample, Server
from benchmarks.scale import TINY

import benchmark_programs
from camserve_server import Explainer
from camserve_server.imaging import fitting, render, scales
from camserve_server.imaging.values import Rendering
from camserve_server.models.source import DEFAULT_PREPROCESS

pytestmark = pytest.mark.slow
ROOT = Path(serving.HERE).parent
MANY = Load(measure.OVERLAY, bursts.SLEEPING, measure.MANY)
STACKS = "run (server.py:10);decode (images.py:80) 120\nrun (server.py:10);<listcomp> (a b.py:3) 30\n\n"
HELP = """  --model MODEL          Model to serve.
  --processes-at-once N  Another flag.
  -p, --processes, --procs N
"""
SOCKETS = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:C383 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 111 1 0 100 0 0 10 0
   1: 0100007F:C383 0100007F:B000 01 00000000:00000000 00:00000000 00000000     0        0 222 1 0 20 4 30 10 -1
   2: 0100007F:C384 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 333 1 0 100 0 0 10 0
"""


def sampled(front, *, workers=0.001, lock_time=0.002, rate=100.0):
    error = None if lock_time is None else lock_time / 10
    return Sample(rate, front, workers, 0.0005, 0.030, 0.040, lock_time, error, 30_000)


def rounds(*fronts, bare=0.0005, pictures=0.0015, kind=measure.OVERLAY):
    each = replace(MANY, kind=kind)
    return tables.Rounds(
        {each: [sampled(front) for front in fronts]},
        {each: [bare] * len(fronts)},
        {kind: [pictures] * len(fronts)},
    )


def test_samples_are_counted_at_the_end_of_each_stack():
    assert lock.count_samples(STACKS) == 150
    assert lock.count_samples("") == 0


@pytest.mark.parametrize(
    ("words", "errors"),
    [("py-spy> Wrote raw data to 'x'. Samples: 150 Errors: 12\n", 12), ("Samples: 1 Errors: 0", 0), ("", 0)],
)
def test_failed_samples_are_read_from_the_last_line(words, errors):
    assert lock.count_errors(words) == errors


def test_lock_share_has_the_standard_error_of_a_binomial():
    share = lock.LockShare(held=150, samples=600, window=load.Window(0, 3))

    assert share.share == 0.25
    assert share.error == pytest.approx((0.25 * 0.75 / 600) ** 0.5)


def fake_spy(tmp_path, monkeypatch, script):
    spy = tmp_path / "py-spy"
    spy.write_text(f'#!/bin/sh\nwhile [ "$1" != --output ]; do shift; done\n{script}\n')
    spy.chmod(0o755)
    monkeypatch.setattr(lock, "program", lambda: str(spy))


def test_failed_samples_are_left_out_of_the_share(tmp_path, monkeypatch):
    fake_spy(tmp_path, monkeypatch, f"printf '%s' '{STACKS}' > $2; echo 'py-spy> Samples: 150 Errors: 25'")
    found = lock.held_share(os.getpid(), seconds=100, rate=5)

    assert (found.held, found.samples) == (150, 475)


def test_failure_of_py_spy_is_reported_in_its_words(tmp_path, monkeypatch):
    fake_spy(tmp_path, monkeypatch, "echo 'Permission Denied' >&2; exit 1")

    with pytest.raises(RuntimeError, match="Permission Denied"):
        lock.held_share(os.getpid(), seconds=60)


def test_missing_py_spy_is_named_in_the_table(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    table = tables.load_table({MANY: [sampled(0.006, lock_time=None)]})

    assert lock.held_share(os.getpid(), seconds=60) is None
    assert dict(zip(table.columns, table.rows[0], strict=True))["lock ms"] == "no py-spy"
    assert lock.MISSING in table.notes[0]


def test_lock_time_per_request_uses_the_answers_of_its_own_interval():
    ended = [0.1 * number for number in range(1, 41)]  # ten a second
    answers = load.Answers(ended, [0.03] * len(ended), cpu=0.4, size=10.0)
    held = lock.LockShare(held=250, samples=1000, window=load.Window(1.95, 3.95))  # a quarter of two seconds
    found = bursts._of(answers, load.Window(0.95, 3.95), (0.3, 0.06), held)

    assert found.lock == pytest.approx(0.5 / 20)
    assert (found.rate, found.front, found.workers) == pytest.approx((10.0, 0.3 / 30, 0.06 / 30))
    assert found.client == pytest.approx(0.01)


def test_front_is_a_multiple_of_pictures_and_bare_grpc_together():
    found = rounds(0.004, 0.005, 0.009)

    assert found.floors(MANY) == pytest.approx([0.002] * 3)
    assert found.multiples(MANY) == pytest.approx([2.0, 2.5, 4.5])
    assert tables.floor_table(found).rows[0][1:] == ("1.50", "0.50", "2.00", "2.50", "100%", "1.00")


def test_bars_hold_overlays_raw_maps_and_streams():
    part, found = results.Part("front"), rounds(0.0027)  # 1.35 times its floor
    for kind, front in ((measure.RAW, 0.0030), (measure.STREAM, 0.0026)):
        more = rounds(front, kind=kind)
        found.server |= more.server
        found.bare |= more.bare
        found.pictures |= more.pictures
    measure.hold(part, found)

    assert [(bar.found, bar.met) for bar in part.bars] == [("1.35", True), ("1.50", False), ("0.96", True)]


@pytest.mark.parametrize(("flag", "known"), [("--processes", True), ("--process", False), ("--procs", True)])
def test_flag_is_known_if_the_help_has_the_whole_word(flag, known):
    assert bursts.knows(flag, HELP) is known


def test_unknown_flag_is_skipped_in_words(monkeypatch):
    said = []
    monkeypatch.setattr(measure, "serve_help", lambda: HELP.replace("--processes,", ""))

    assert measure.counts_of(replace(TINY, processes=(1, 2)), said.append) == []
    assert said == ["front: skipped --processes 2: this server has no such flag"]


def test_flag_is_passed_for_several_processes_only(monkeypatch):
    monkeypatch.setattr(measure, "serve_help", lambda: HELP)

    assert measure.counts_of(replace(TINY, processes=(1, 2, 4)), print) == [2, 4]
    assert [measure.flags_of(count) for count in (1, 2)] == [(), ("--processes", "2")]


def test_processor_time_of_a_process_is_exact():
    before = time.process_time()
    found = serving.cpu_of(os.getpid())

    assert before < found < time.process_time()


def test_only_listening_sockets_of_the_port_are_found():
    assert bursts.listening_sockets(SOCKETS, 0xC383) == {"socket:[111]"}


def test_process_that_listens_is_a_front():
    with socket.socket() as listener, socket.socket() as bound:
        for each in (listener, bound):
            each.bind(("127.0.0.1", 0))
        listener.listen()
        ports = [each.getsockname()[1] for each in (listener, bound)]

        assert [bursts.listening((os.getpid(), os.getppid()), port) for port in ports] == [(os.getpid(),), ()]


@pytest.mark.parametrize(
    ("processes", "lock_time", "used", "limits"),
    [
        (2, 0.004, 0.008, ("2", "500", "2000", "500", "locks")),
        (16, 0.004, 0.008, ("16", "4000", "2000", "2000", "cores")),
        (2, None, 0.008, ("2", "no py-spy", "2000", "2000", "unknown")),
    ],
)
def test_extrapolation_names_the_limit_that_is_reached_first(processes, lock_time, used, limits):
    assert tables.capped(processes, lock_time, used) == limits


def test_extrapolation_says_that_it_is_one():
    table = tables.cores_table([sampled(0.006)])

    assert "extrapolated" in table.title
    assert "not measured" in table.notes[0]


def turn(front, alone=0.030):
    return against.Turn(sampled(front, lock_time=front / 2), replace(sampled(0.01), p50=alone))


def test_comparison_takes_ratios_within_rounds():
    found = {against.THEIRS: [turn(0.004), turn(0.008)], against.OURS: [turn(0.002), turn(0.006)]}
    rows = {row[0]: row[1:] for row in against.rows(found)}

    assert rows["front ms"] == ("6.00", "4.00", "0.625", "0.50 0.75")
    assert rows["lock ms"] == ("3.00", "2.00", "0.625", "0.50 0.75")
    assert rows["p50 ms of one under way"][2:] == ("1.000", "1.00 1.00")


def test_comparison_alternates_as_abba():
    a, b = against.THEIRS, against.OURS

    assert [name for number in range(4) for name in against.order(number)] == [a, b, b, a, a, b, b, a]


def test_other_checkout_is_imported_before_this_one(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    changed = serving.environment_of(tmp_path)

    assert changed["PYTHONPATH"].split(os.pathsep) == [
        str(tmp_path / "service"),
        str(tmp_path / "clients" / "python"),
        str(ROOT),
    ]
    assert serving.environment_of(None)["PYTHONPATH"] == "/elsewhere"
    assert "MALLOC_TRIM_THRESHOLD_" not in changed
    (tmp_path / "service").mkdir()
    (tmp_path / "service" / "camserve_server.py").touch()
    command = [sys.executable, "-c", "import camserve_server; print(camserve_server.__file__)"]
    ran = subprocess.run(command, cwd=ROOT, env=changed, capture_output=True, text=True, check=True)
    assert ran.stdout == f"{tmp_path / 'service' / 'camserve_server.py'}\n"


@pytest.mark.parametrize("words", [("engine", "--against", "."), ("front", "--against", ".", "--write")])
def test_comparison_is_never_written_nor_mixed_with_other_parts(monkeypatch, capsys, words):
    monkeypatch.setattr(sys, "argv", ["benchmarks", *words])

    with pytest.raises(SystemExit):
        program.main()
    assert "--against" in capsys.readouterr().err


def test_sleeping_model_sleeps_by_the_size_of_the_batch(monkeypatch):
    slept = []
    monkeypatch.setattr(models.time, "sleep", slept.append)
    models.sleeping().module(models.torch.zeros(8, 3, 224, 224))

    assert slept == [pytest.approx(0.028)]


def test_models_grid_and_classes_are_those_of_common_models():
    source = models.instant()
    with Explainer(source.module, size=224, labels=source.labels) as explainer:
        result = explainer.explain(photos.photos()[0], methods=["gradcam"])

    assert result.explanations[0].heatmap.shape == (7, 7)
    assert result.explanations[0].heatmap.max() > 0
    assert len(source.labels) == 1000
    assert result.predictions[0].label in source.labels


@pytest.mark.parametrize("side", [0, 224])
def test_floor_draws_about_what_the_server_draws(side):
    photo = cv2.cvtColor(cv2.imdecode(np.frombuffer(photos.photos()[0], np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)
    seen = fitting.visible_box(photo.shape[:2], DEFAULT_PREPROCESS)
    scaled = scales.scale_map(floor.GRID, Rendering(), DEFAULT_PREPROCESS.size)
    expected, _ = render.draw(photo, scaled, seen, Rendering(overlay="jpeg", max_side=side or None))
    drawn, theirs = (
        cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR).astype(float)
        for data in (floor.overlay(photo, seen, side), expected.data)
    )

    assert np.abs(drawn - theirs).mean() < 1


def test_floor_of_raw_maps_has_no_drawing(monkeypatch):
    monkeypatch.setattr(floor, "overlay", lambda *_arguments: pytest.fail("a raw map is drawn"))

    assert [len(digest) for digest in floor.picture_work(measure.RAW)(photos.photos()[0])] == [64, 64]


def test_load_generator_counts_what_a_bare_server_answers():
    with load.generator() as clients, echo.echoing(5000) as process:
        server = Server.of(process)
        unary = bursts.sample(clients, server, MANY, 0.1)
        stream = bursts.sample(clients, server, replace(MANY, kind=measure.STREAM), 0.1)

    assert server.fronts == (process.pid,)
    assert unary.size == 5000
    assert stream.size == 5011  # with the id and a tag
    assert min(unary.rate, stream.rate, unary.p99 - unary.p50) > 0


@pytest.fixture
def smallest(monkeypatch):
    """The smallest scale, with bursts that do not become steady, and programs that are forked."""
    benchmark_programs.fork(monkeypatch, serving, load, echo)
    monkeypatch.setattr(bursts, "SETTLE", 0.05)
    return replace(TINY, stretch=0.1)


def test_front_is_measured_in_its_smallest_form(smallest, monkeypatch):
    monkeypatch.setattr(lock, "program", lambda: None)  # it takes a second of each load: the comparison below has it
    few = tuple(each for each in measure.LOADS if each.under_way == measure.MANY or each == measure.LOADS[0])
    monkeypatch.setattr(measure, "LOADS", few)
    part = measure.measure(smallest, say=lambda _words: None)

    loads, floors, cores = part.tables
    assert len(loads.rows) == len(floors.rows) == len(measure.LOADS)
    assert all(float(row[3]) > 0 for row in loads.rows)
    assert len(part.bars) == 3
    assert len(cores.rows) == 5


def test_checkout_is_compared_with_itself(smallest):
    part = measure.measure(replace(smallest, against=ROOT), say=lambda _words: None)

    assert [row[0] for row in part.tables[0].rows] == list(against.FIGURES)
    assert part.bars == []
