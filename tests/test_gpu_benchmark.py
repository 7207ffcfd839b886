"""`python -m benchmarks.gpu` runs in its smallest form without a GPU, and reports the parts that it cannot measure."""

import json
import sys
from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch
from benchmarks import photos as photos_of
from benchmarks import serving
from benchmarks.gpu import __main__ as program
from benchmarks.gpu import model, photos, scale, served
from benchmarks.gpu.scale import Clock, scale_of

import benchmark_programs
from camserve_server.core.limits import Limits
from camserve_server.imaging import images, render, scales
from camserve_server.imaging.values import Box, Rendering

pytestmark = pytest.mark.slow
NAME = "squeezenet1_1"
SHARES = {"event loop": 0.2, "engine's CPU": 0.4, "engine's time": 0.9, "image threads": 0.3, "GPU": 0.6, "cores": 0.5}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _small_model(monkeypatch):
    """Measure a model that loads in a moment, and one deployment: of two engines, which one engine is a part of."""
    quick = replace(scale.QUICK, models=(NAME,), deployments=scale.QUICK.deployments[1:])
    monkeypatch.setattr(scale, "QUICK", quick)


def number(cell):
    return float(cell.replace(",", ""))


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", *words])
    program.main()


def test_every_part_runs_and_is_written_to_the_report(monkeypatch, tmp_path, capsys):
    benchmark_programs.fork(monkeypatch, serving, served)
    monkeypatch.setattr(Clock, "allows", lambda *_: True)  # a busy machine measures all the same
    run(monkeypatch, "--device", "cpu", "--quick", "--out", str(tmp_path / "found.md"))
    kept = json.loads((tmp_path / "found.json").read_text())
    rows = {name: kept[name]["tables"][0]["rows"] for name in program.PARTS}

    assert (tmp_path / "found.md").read_text().count("\n## ") == len(program.PARTS)
    assert "Failed" not in capsys.readouterr().out
    assert all(float(gap) <= 1e-5 and float(cosine) > 0.99999 for _, _, gap, cosine, _ in rows["likeness"])
    assert all(number(speed) > 0 for speed in rows["engine"][0][2 : 2 + len(model.CONTESTANTS)])
    assert [number(row[2]) > 0 for row in rows["served"]] == [True]
    assert all(number(row[1]) > 0 for row in rows["photos"] if not row[0].startswith("upload"))
    assert [row[2] for row in rows["graphs"]] == ["eager"]
    assert kept["memory"]["tables"][0]["notes"] == ["Measured on a GPU only."]


def test_measurements_without_time_are_reported_as_left_out():
    part = model.engine(scale_of("cpu", quick=True), Clock.start(0.5))

    assert part.tables[0].rows == []
    assert part.tables[0].notes[0] == f"Left out for want of time: {NAME} at 2."


def test_failed_part_is_reported_and_the_others_are_measured(monkeypatch, capsys):
    def fail(_scale, _clock):
        raise ValueError("planted")

    monkeypatch.setattr(program, "PARTS", {"engine": fail, "memory": model.memory})
    run(monkeypatch, "--device", "cpu", "--quick")
    captured = capsys.readouterr()

    assert "Failed: ValueError: planted" in captured.out
    assert "## memory" in captured.out
    assert "Traceback" in captured.err


def test_missing_gpu_is_an_error_with_a_message(monkeypatch, capsys):
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
def test_bottleneck_is_the_busiest_part(changed, named):
    assert served.bottleneck(SHARES | changed) == named


@pytest.fixture
def stand_in(monkeypatch):
    """Treat the CPU as a GPU: calls that need a real GPU are replaced."""
    monkeypatch.setattr(type(scale_of("cpu", quick=True)), "gpu", True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 3 * 2**20)
    monkeypatch.setattr(model, "BATCHES", (2,))
    return scale_of("cpu", quick=True)


@pytest.mark.filterwarnings("ignore:The image decoding and encoding capabilities:DeprecationWarning")
def test_torch_decodes_fits_and_draws_photos(stand_in):
    part = photos.measure(stand_in, Clock.start(100))
    both = {row[0]: row[1:] for row in part.tables[0].rows}

    assert all(
        number(cell) > 0 for step in ("decode", "fit to the model's input", "draw and encode") for cell in both[step]
    )


def test_torch_draws_the_same_overlay_as_the_service(monkeypatch):
    """The times are comparable only if the work is the same."""
    drawn = []
    monkeypatch.setattr("torchvision.io.encode_jpeg", lambda each, **_: drawn.extend(each) or [])
    decoded = [images.decode(photo, Limits()) for photo in photos_of.photos()[:2]]
    scaled = scales.scale_map(np.random.default_rng(0).random((7, 7), np.float32), Rendering(), (224, 224))
    heats = torch.from_numpy(scaled.heat).expand(2, 1, 7, 7)
    photos.drawn_there([torch.from_numpy(each).permute(2, 0, 1) for each in decoded], heats)
    height, width = decoded[0].shape[:2]
    for one, there in zip(decoded, drawn, strict=True):
        (ours, _) = render.draw(one.copy(), scaled, Box(0, 0, width, height), Rendering(overlay="png"))
        expected = cv2.cvtColor(cv2.imdecode(np.frombuffer(ours.data, np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)
        assert np.abs(there.permute(1, 2, 0).numpy().astype(int) - expected.astype(int)).mean() < 2


def test_memory_is_the_peak_of_a_batch(stand_in):
    rows = model.memory(stand_in, Clock.start(100)).tables[0].rows

    assert rows == [(NAME, precision, "2", "2", "2", "1.00") for precision in ("float32", "bfloat16")]


def test_failed_launch_mode_is_reported_as_left_out(stand_in, monkeypatch):
    def fail(_module, _images):
        raise RuntimeError("cannot capture")

    monkeypatch.setattr(
        model, "_ways", lambda _scale: {"CUDA graph": fail, "as it is": lambda module, seen: lambda: module(seen)}
    )
    (table,) = model.graphs(stand_in, Clock.start(100)).tables

    assert [row[2] for row in table.rows] == ["eager", "as it is"]
    assert table.notes == (f"{NAME} at 2, CUDA graph: RuntimeError: cannot capture",)


def test_missing_gpu_timer_is_reported_and_other_parts_are_measured(stand_in, monkeypatch, capsys):
    def fail(_run, _scale):
        raise RuntimeError("no profiler")

    monkeypatch.setattr(model, "_profiled", fail)
    (table,) = model.engine(stand_in, Clock.start(1000)).tables

    assert table.rows[0][-1] == "nan%"
    assert "the GPU's time is not known: RuntimeError: no profiler" in capsys.readouterr().err
