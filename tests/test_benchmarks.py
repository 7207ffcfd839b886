"""The harness of `make bench` runs in its smallest form, and its results are kept."""

import contextlib
import dataclasses
import functools
import json
import shutil
import sys

import pytest
import torch
from benchmarks import __main__ as program
from benchmarks import engine, memory, neighbours, page, results, served, serving, stage_server, stages
from benchmarks.diff import changes, toy
from benchmarks.diff import measure as diff
from benchmarks.scale import TINY

import benchmark_programs
import needs

pytestmark = pytest.mark.slow
(MODEL,) = TINY.models


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def server():
    """One server for all tests, because its start takes longer than its measurement."""
    with pytest.MonkeyPatch.context() as patch:
        benchmark_programs.fork(patch, serving)
        with serving.serving((TINY.spec(MODEL),), "--threads", "1", program=stages.PROGRAM) as running:
            yield running


@pytest.fixture(autouse=True)
def _one_server(monkeypatch, request):
    def reused(*_arguments, **_options):
        return contextlib.nullcontext(request.getfixturevalue("server"))

    for module in (served, stages, memory):
        monkeypatch.setattr(module, "serving", reused)


@pytest.fixture
def forking(monkeypatch):
    """Fork the other programs."""
    benchmark_programs.fork(monkeypatch, serving, neighbours)


def quietly(_words):
    pass


def rows_of(part):
    return {row[0]: row for table in part.tables for row in table.rows}


def test_engine_is_timed_together_with_a_plain_forward_pass():
    part = engine.measure(TINY, say=quietly)

    speeds = dict(zip(part.tables[0].columns, part.tables[0].rows[0], strict=True))
    assert all(float(speeds[name]) > 0 for name in (engine.PLAIN_LAST, engine.OURS, engine.OURS_HALF))


def test_server_is_measured_below_and_beyond_its_capacity():
    part = served.measure(TINY, say=quietly)

    closed, opened = part.tables
    assert [row[1] for row in closed.rows] == ["1", "8", "32", "32, one stream"]
    assert all(float(row[2]) > 0 for row in closed.rows)
    assert [row[1] for row in opened.rows] == ["50%", "80%", "120%"]
    assert any("120%" in bar.what for bar in part.bars)


def test_every_stage_of_a_request_has_its_time():
    part = stages.measure(TINY, say=quietly)

    micro = {row[1]: float(row[2].replace(",", "")) for row in part.tables[0].rows if row[2]}
    measured = ("decode", "fit to the model's input", "encode", "make the reply", "forward: trunk and head")
    assert all(micro[stage] > 0 for stage in measured)


@pytest.mark.parametrize("where", stage_server.STAGES.values())
def test_every_stage_exists_in_the_service(where):
    """The harness would not measure a renamed stage: put the new name into `stage_server.STAGES`."""
    module, names = stage_server.resolve(where)

    assert callable(functools.reduce(getattr, names, module))


@pytest.mark.usefixtures("forking")
def test_neighbours_benchmark_measures_a_callers_latency(monkeypatch):
    monkeypatch.setattr(neighbours, "STRETCHES", 1)
    monkeypatch.setattr(neighbours, "MODEL", "small=timm:test_resnet?weights=none&size=64")
    monkeypatch.setattr(neighbours, "FLOODS", {"stuck": ("20",), "silent": ("40",), "reset": ("50", "3600")})
    part = neighbours.measure(dataclasses.replace(TINY, calls=1), say=quietly)

    beside, refused = part.tables
    assert [len(table.rows) for table in (beside, refused)] == [2, 3]


def test_memory_is_measured_before_and_at_the_peak_of_a_batch(monkeypatch, capsys):
    def here(*arguments):
        memory.peak(*arguments)
        return tuple(map(float, capsys.readouterr().out.split()))

    monkeypatch.setattr(memory, "in_a_process", here)
    part = memory.measure(TINY, say=quietly)

    assert {MODEL, f"{MODEL} float32"} == set(rows_of(part))


def test_diff_finds_planted_changes_but_not_noise(monkeypatch):
    trained = functools.partial(toy.trained, count=200, epochs=4)
    copies = {
        "patch learnt": functools.partial(toy.patch_learnt, count=200),
        "last block random": lambda network, seed: changes.randomised(network, seed, "blocks.3"),
    }
    monkeypatch.setattr(toy, "Toy", functools.partial(toy.Toy, (4, 8, 16, 24)))
    monkeypatch.setattr(toy, "trained", trained)
    monkeypatch.setattr(
        toy, "copies", lambda network, seed: {name: copy(network, seed) for name, copy in copies.items()}
    )
    monkeypatch.setattr(diff, "METHODS", ("gradcam",))
    monkeypatch.setattr(diff, "PHOTOS", (12, 25))
    monkeypatch.setattr(diff, "toy_samples", functools.partial(diff.toy_samples, pool=max(diff.PHOTOS)))
    part = diff.measure(runs=1, draws=5, with_real=False, say=quietly)

    (table,) = part.tables
    found = {row[1]: row[-1] for row in table.rows}
    assert found == {"noise": "0.00", "patch learnt": "1.00", "last block random": "1.00", "not accelerated": "0.00"}


def test_results_are_kept_together_with_earlier_ones(monkeypatch, tmp_path, capsys):
    results.write(results.Part("cost", [results.Table("Replaced", ("a",), [("1",)])]), "a command", 0.0, tmp_path)
    results.write(results.Part("long_requests", [results.Table("Kept", ("a",), [("1",)])]), "a command", 0.0, tmp_path)
    words = ["benchmarks", "cost", "--scale", "tiny", "--write", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setenv("CAMSERVE_THREADS", "1")  # so that what the program says to its servers is taken back
    program.main()

    page = (tmp_path / "RESULTS.md").read_text()
    assert page.count("## cost") == 1
    assert page.index("## cost") < page.index("## long_requests")
    assert ("Replaced" not in page, "Kept" in page) == (True, True)
    assert set(json.loads((tmp_path / "results.json").read_text())) == {"cost", "long_requests"}
    assert "10 targets by 5 CAM methods" in page
    assert "10 targets by 5 CAM methods" in capsys.readouterr().out


def test_bar_reports_if_it_is_met():
    part = results.Part("engine")
    part.at_least("speed", 1.0, 0.99)
    part.at_most("lateness", 6.0, 5.0, " ms")

    assert [bar.met for bar in part.bars] == [False, True]
    assert "| **no**" in results.as_text(part)


@pytest.mark.skipif(not any(map(shutil.which, page.CHROMIUM)), reason=needs.CHROMIUM)
@pytest.mark.usefixtures("forking")
def test_page_is_timed_in_a_browser(monkeypatch):
    monkeypatch.setattr(page, "SECONDS", 0)  # every slider draws one frame
    monkeypatch.setattr(page, "ROUNDS", 1)
    monkeypatch.setattr(page, "OPENINGS", 1)
    monkeypatch.setattr(page, "MAPS", 2)
    part = page.measure(TINY, say=lambda _text: None)

    (table,) = part.tables
    assert len(table.rows) == 9
    assert all(float(cell) > 0 for row in table.rows for cell in row[2:])
    assert [bar.found.endswith(" s") for bar in part.bars] == [True, False]
