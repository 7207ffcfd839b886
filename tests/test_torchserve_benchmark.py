"""`make bench-torchserve` counts calls correctly. These tests do not start its servers."""

import io
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from benchmarks.photos import photos
from benchmarks.torchserve import likeness, load, report, servers
from PIL import Image

from support import wait_until

pytestmark = pytest.mark.slow
NOBODY = servers.Group(0)


def side(ask, name="some", picture=bytes):
    return load.Side(name, ask, photos(), NOBODY, picture)


@pytest.mark.parametrize("edge", np.linspace(3.05, 3.95, 9))
def test_rate_of_bursts_of_eight_is_independent_of_the_window(edge):
    times = [second + place / 1000 for second in range(20) for place in range(8)]
    assert load.rate(times, -1.0, edge, edge + 8.3) == pytest.approx(8, rel=1e-12)


def test_batch_slower_than_the_window_counts_as_a_whole():
    """Eight callers get their responses together, every ten seconds; they stop after five, or after fifteen."""
    batch = [10 + place / 1000 for place in range(8)]
    assert load.rate(batch, 0.0, 1.5, 5.0) == pytest.approx(0.8, rel=1e-3)
    assert load.rate([*batch, *(10 + at for at in batch)], 0.0, 11.5, 15.0) == pytest.approx(0.8, rel=1e-3)


def test_given_number_of_callers_send_requests_concurrently(monkeypatch):
    now, together, most, lock = 0.0, 0, 0, threading.Condition()
    monkeypatch.setattr(load, "time", SimpleNamespace(perf_counter=lambda: now))

    def ask(_request):
        nonlocal now, together, most
        with lock:
            together += 1
            most = max(most, together)
            lock.notify_all()
            lock.wait_for(lambda: most == 5)  # the first ones wait for the others
            together -= 1
            now += 1  # the clock stands still until all have called
        return b""

    load.measure(side(ask), callers=5, seconds=60)
    assert most == 5


def test_request_matches_torchserves_inference_proto():
    request, response = load._messages()
    packed = request(model_name="hooks", input={"data": b"photo"}).SerializeToString()
    assert packed == b"\x0a\x05hooks" + b"\x1a\x0d" + b"\x0a\x04data" + b"\x12\x05photo"
    assert response.FromString(b"\x0a\x03cat").prediction == b"cat"


def test_server_that_draws_a_different_overlay_is_detected():
    def inverted(request):
        out = io.BytesIO()
        Image.fromarray(255 - np.asarray(Image.open(io.BytesIO(request)))).save(out, "JPEG", quality=90)
        return out.getvalue()

    same = likeness.differences([side(bytes), side(bytes, "the same")])
    assert same == {"the same": 0.0}
    with pytest.raises(ValueError, match="negative"):
        likeness.differences([side(bytes), side(inverted, "negative")])


def test_server_and_its_children_are_measured_and_stopped_together(tmp_path):
    busy = "while True: pass"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"
    with servers.running((sys.executable, "-c", child), tmp_path, {}) as group:
        servers.until(lambda: group.cpu() > 0.3, "the child")
        assert _members(group.leader) == 2
    wait_until(lambda: _members(group.leader) == 0)


def _members(leader):
    result = 0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            result += os.getpgid(int(path.name)) == leader
        except ProcessLookupError:
            continue
    return result


def test_ratios_are_medians_over_rounds_of_windows_next_to_each_other():
    """A machine that is half as fast in one round changes no ratio."""
    windows = {
        ("camserve float32", 8): [load.TimeWindow(rate, 0.1, 0.02) for rate in (30, 15, 30)],
        ("TorchServe, hooks", 8): [load.TimeWindow(rate, 0.4, 0.06) for rate in (10, 5, 10)],
    }
    seen = report.Observation(windows, {}, {}, 2, (0.0, 0.0), "by hand")
    assert report.ratios(seen).splitlines()[-1] == "| camserve float32 / TorchServe, hooks | 3.00 (3.00) |"


def test_bar_applies_to_the_worst_result_of_eight_or_more_callers():
    rates = {"camserve float32": (9, 30, 28), "camserve bfloat16": (9, 70, 69)}
    rates |= {"TorchServe, captum": (9, 10, 11), "TorchServe, hooks": (9, 10, 10)}
    windows = {
        (name, callers): [load.TimeWindow(rate, 0.1, 0.1)]
        for name, some in rates.items()
        for callers, rate in zip((1, 8, 16), some, strict=True)
    }
    seen = report.Observation(windows, {}, {}, 2, (0.0, 0.0), "by hand")
    results = [line.split("|")[3:5] for line in report.bars(seen).splitlines()[2:]]
    assert results == [[" 2.55 ", " yes "], [" 2.80 ", " yes "], [" 6.27 ", " **no** "], [" 6.90 ", " **no** "]]
