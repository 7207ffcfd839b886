"""`python -m benchmarks.gpu` is alive: its smallest form runs without a GPU, and says in words what it could not do."""

import json
import sys

import numpy as np
import pytest
import torch
from benchmarks.gpu import __main__ as program
from benchmarks.gpu import model, served
from benchmarks.gpu.scale import Clock, scale_of

SHARES = {"event loop": 0.2, "engine's CPU": 0.4, "engine's time": 0.9, "image threads": 0.3, "GPU": 0.6, "cores": 0.5}

pytestmark = pytest.mark.timeout(300)  # servers are started, which on a busy machine takes its time


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def number(cell):
    return float(cell.replace(",", ""))


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", *words])
    program.main()


def test_every_part_runs_and_is_written_as_it_is_found(monkeypatch, tmp_path, capsys):
    run(monkeypatch, "--device", "cpu", "--quick", "--out", str(tmp_path / "found.md"))
    kept = json.loads((tmp_path / "found.json").read_text())
    rows = {name: kept[name]["tables"][0]["rows"] for name in program.PARTS}

    assert (tmp_path / "found.md").read_text().count("\n## ") == len(program.PARTS)
    assert "Failed" not in capsys.readouterr().out
    assert all(float(gap) <= 1e-5 and float(cosine) > 0.99999 for _, _, gap, cosine, _ in rows["likeness"])
    assert all(number(speed) > 0 for speed in rows["engine"][0][2 : 2 + len(model.CONTESTANTS)])
    assert [number(row[2]) > 0 for row in rows["served"]] == [True, True]
    assert all(number(row[1]) > 0 for row in rows["photos"] if not row[0].startswith("upload"))
    assert [row[2] for row in rows["graphs"]] == ["eager"]
    assert kept["memory"]["tables"][0]["notes"] == ["Measured on a GPU only."]


def test_what_there_is_no_time_for_is_left_out_in_words():
    part = model.engine(scale_of("cpu", quick=True), Clock.start(0.5))

    assert part.tables[0].rows == []
    assert part.tables[0].notes[0] == "Left out for want of time: resnet18 at 2."


def test_a_part_that_fails_says_how_and_the_others_are_measured(monkeypatch, capsys):
    def fail(_scale, _clock):
        raise ValueError("planted")

    monkeypatch.setattr(program, "PARTS", {"engine": fail, "memory": model.memory})
    run(monkeypatch, "--device", "cpu", "--quick")
    said = capsys.readouterr()

    assert "Failed: ValueError: planted" in said.out
    assert "## memory" in said.out
    assert "Traceback" in said.err


def test_without_a_gpu_the_whole_is_refused_in_words(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        run(monkeypatch)

    assert "--device cpu --quick" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({}, "engine's time"),
        ({"event loop": 0.97}, "event loop"),
        ({"GPU": 0.8}, "GPU"),
        ({"GPU": np.nan}, "engine's time"),
        ({"engine's time": 0.3}, "clients"),
        ({"cores": 0.99, "image threads": 0.8}, "cores"),
    ],
)
def test_the_bottleneck_is_what_is_busiest(changed, named):
    assert served.bottleneck(SHARES | changed) == named
