"""Lines of native libraries on standard error become records of the log: callers cannot write into it."""

import contextlib
import io
import json
import logging
import os

import numpy as np
import pytest
from PIL import Image

import camserve
from camserve_server.core import native_output
from server_process import server_process
from support import wait_until

MESSAGE = "a native library wrote to standard error"


def corrupt():
    """Return a JPEG with bytes of which libjpeg says that they are extraneous."""
    file, noise = io.BytesIO(), np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(file, "JPEG")
    data = bytearray(file.getvalue())
    start = data.index(b"\xff\xda") + 200
    data[start : start + 400] = os.urandom(4) * 100
    return bytes(data)


def test_callers_do_not_write_into_the_log():
    flags = ("--log-format", "json", "--device", "cpu", "--threads", 1)
    with (
        server_process(["timm:test_resnet?weights=none&size=64"], *flags, forked=True) as server,
        camserve.Client(server.address, retries=0) as client,
    ):
        for _ in range(2 * native_output.LINES):
            with contextlib.suppress(camserve.InvalidArgument):
                client.explain(corrupt())
        wait_until(lambda: len(server.entries(MESSAGE)) >= 1)
        lines = server.log.splitlines()

    entries = [json.loads(line) for line in lines]
    said = [entry["text"] for entry in entries if entry["message"] == MESSAGE]
    assert all("JPEG" in text for text in said)
    assert len(said) <= native_output.LINES


@pytest.fixture
def logged(monkeypatch, caplog):
    """Return a function that lets bytes arrive on standard error, and returns the fields of the records."""
    monkeypatch.setattr(logging.getLogger("camserve_server"), "propagate", True)

    def log_all(data):
        reading, writing = os.pipe()
        with os.fdopen(writing, "wb") as file:
            file.write(data)
        native_output._log_lines(reading)
        os.close(reading)
        return [record.fields for record in caplog.records]

    return log_all


def test_lines_beyond_a_number_are_counted(logged, monkeypatch):
    times = iter([0.0] * 25 + [native_output.INTERVAL] * 2)
    monkeypatch.setattr(native_output.time, "monotonic", lambda: next(times))
    fields = logged(b"".join(b"line %d\n" % number for number in range(27)))

    assert [each["text"] for each in fields] == [f"line {number}" for number in (*range(10), 25, 26)]
    assert [each.get("suppressed") for each in fields] == [None] * 10 + [15, None]


def test_long_and_odd_lines_are_cut_and_escaped(logged):
    (first, second) = logged(b"\xff" + b"x" * 5000 + b"\n\n" + b"y" * 3 + b"\n" + b"an unfinished line")

    assert first["text"] == "\\xff" + "x" * (native_output._LENGTH - 4)
    assert second["text"] == "yyy"
