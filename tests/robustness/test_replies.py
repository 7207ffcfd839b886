"""Messages of a worker process arrive unchanged, and no message can run code in the server."""

import dataclasses
import json
import os
import pickle
import struct
import threading
from multiprocessing.connection import Connection

import numpy as np
import pytest

from camserve_server.core import errors
from camserve_server.core.errors import Internal, WorkerLost
from camserve_server.engine.values import Reading, RowResult, Statistics
from camserve_server.imaging.values import Box, Preprocess
from camserve_server.models.pickles import CorruptFileError
from camserve_server.models.values import LayerInfo, Layout, ModelInfo
from camserve_server.targets.values import ClassTarget, MaskTarget, SegmentTarget, SimilarityTarget
from camserve_server.telemetry import Memory
from camserve_server.workers import Setup, replies, worker
from camserve_server.workers.messages import Heartbeat, Response

PREPROCESS = Preprocess((4, 4), 4, "bilinear", (0.1, 0.2, 0.3), (1.0, 1.0, 1.0))
LAYERS = {"a.b": LayerInfo("a.b", "Conv2d", (1, 2, 3, 3), 7, 1, Layout("nchw", 3, 3))}
INFO = ModelInfo("n", "s", "file", "d", ("ä", "\ud800"), 2, 9, PREPROCESS, LAYERS, "a.b", "float32", "cpu")
STATISTICS = Statistics(1.5, np.nan, -np.inf, 2.0, 0.0, 3.0, 0)
SHARED = np.arange(6, dtype=np.float32).reshape(2, 3)
RESULTS = (
    RowResult(SHARED, ClassTarget(3), 0.1, ((SHARED, SHARED.T),), (True,)),
    RowResult(SHARED, SegmentTarget(1, Box(0, 1, 2, 3), SHARED > 2), np.float32(0.5)),
    RowResult(SHARED, MaskTarget(1, mask=SHARED > 2), 2.5),
    RowResult(
        np.empty((0, 6), np.float32),
        SimilarityTarget(reference=SHARED[0]),
        -0.0,
        readings=(None, Reading((1, 2), STATISTICS, STATISTICS)),
    ),
)


def comparable(value):
    """Return a value in a form that can be compared: arrays become their dtype, shape and bytes."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if type(value) in replies.CLASSES:
        return type(value).__name__, [comparable(getattr(value, each.name)) for each in dataclasses.fields(value)]
    if isinstance(value, tuple):
        return [comparable(item) for item in value]
    return {key: comparable(item) for key, item in value.items()} if isinstance(value, dict) else repr(value)


@pytest.mark.parametrize(
    "message", [Response(1, RESULTS), Response(2, INFO), Response(3), Heartbeat(), Heartbeat(True, Memory(1, 2))]
)
def test_message_arrives_unchanged(message):
    expected = comparable(message).__repr__().replace("np.float32(0.5)", "0.5")

    assert repr(comparable(replies.deserialize(replies.serialize(message)))) == expected


def test_shared_array_is_sent_once_and_arrives_writable():
    data = replies.serialize(Response(1, RESULTS[:2]))
    first, second = replies.deserialize(data).value

    assert data.count(SHARED.tobytes()) == 1
    assert first.logits is second.logits
    assert first.logits.flags.writeable


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.OutOfMemory("no room", retry_after=1.5), errors.OutOfMemory),
        (errors.InvalidArgument("wrong", field="image"), errors.InvalidArgument),
        (CorruptFileError("cut short"), errors.ConfigError),
        (ZeroDivisionError("of a model"), RuntimeError),
    ],
)
def test_error_arrives_as_one_of_our_classes(error, kind):
    received = replies.deserialize(replies.serialize(Response(1, error=error))).error

    assert type(received) is kind
    assert str(received) == str(error)
    for name in ("field", "retry_after", "shed_reason"):
        assert getattr(received, name, None) == getattr(error, name, None)


@dataclasses.dataclass(frozen=True, slots=True)
class NoFields:
    """A value without fields, such as a target that is the same for every image."""


@dataclasses.dataclass(frozen=True, slots=True)
class OneField:
    value: int


@pytest.mark.parametrize("value", [NoFields(), OneField(3)])
def test_value_with_few_fields_arrives_unchanged(monkeypatch, value):
    kind = type(value)
    monkeypatch.setattr(replies, "_GETTERS", {**replies._GETTERS, kind: replies._getter(kind)})
    monkeypatch.setattr(replies, "_CLASSES_BY_NAME", {**replies._CLASSES_BY_NAME, kind.__name__: kind})

    assert replies.deserialize(replies.serialize(Response(1, value))).value == value


class RunsCode:
    """An object whose pickle ends the process that reads it."""

    def __reduce__(self):
        return os._exit, (3,)


def message(body, table=(), numbers=b""):
    body, table = json.dumps(body).encode(), json.dumps(table).encode()
    return struct.pack("<II", len(body), len(table)) + body + table + numbers


def row(logits=None, score=1.0, maps=None):
    return {"RowResult": [logits or {"array": 0}, {"ClassTarget": [1]}, score, maps or [], [], [], []]}


HOSTILE = {
    "a pickle": pickle.dumps(RunsCode()),
    "a pickle of a response": pickle.dumps(Response(1)),
    "nothing": b"",
    "noise": bytes(range(256)),
    "lengths beyond it": struct.pack("<II", 2**32 - 1, 2**32 - 1) + b"{}",
    "lists nested deeply": struct.pack("<II", 200_000, 2) + b"[" * 200_000 + b"[]",
    "a number of a million digits": struct.pack("<II", 1_000_000, 2) + b"9" * 1_000_000 + b"[]",
    "a foreign class": message({"Popen": [["true"]]}),
    "a value that is not a message": message({"Box": [0, 0, 1, 1]}),
    "too few fields": message({"Response": []}),
    "a response without a request": message({"Response": [77, None, None]}),
    "a request number that is a list": message({"Response": [[1], None, None]}),
    "an error that is a string": message({"Response": [1, None, "boo"]}),
    "an error of a foreign class": message({"Response": [1, None, {"error": ["SystemExit", "x"]}]}),
    "memory that is a string": message({"Heartbeat": [True, "much"]}),
    "an array of objects": message({"Response": [1, [row()], None]}, [["|O", [1]]], b"\0" * 8),
    "a missing array": message({"Response": [1, [row()], None]}),
    "an array longer than its bytes": message({"Response": [1, [row()], None]}, [["<f4", [10**12]]], b"\0" * 8),
    "an array of negative length": message({"Response": [1, [row()], None]}, [["<f4", [-1]]], b"\0" * 8),
    "a score that is a string": message({"Response": [1, [row(score="high")], None]}, [["<f4", [2]]], b"\0" * 8),
    "logits that are a list": message({"Response": [1, [row(logits=[1.0])], None]}),
}


class FakeProcess:
    """Worker process that sends what a test chooses."""

    pid = 0

    def __init__(self, number):
        self.connection = Connection(os.dup(number))

    def end(self):
        self.connection.close()
        return -9


@pytest.fixture
def process(monkeypatch):
    monkeypatch.setattr(worker.fork_server, "begin", FakeProcess)
    worker_process = worker._WorkerProcess(Setup("cpu", 1), lambda *_: None)
    reading = threading.Thread(target=worker_process.read)
    reading.start()
    worker_process.process.connection.send_bytes(replies.serialize(Heartbeat()))
    worker_process.ready.result()
    yield worker_process
    worker_process.close()
    reading.join()


@pytest.mark.parametrize("kind", HOSTILE)
def test_worker_that_sends_an_invalid_message_is_ended(process, kind):
    answer = process.request("drop", "x", seconds=60)
    process.process.connection.send_bytes(HOSTILE[kind])

    with pytest.raises(WorkerLost):
        answer.result()


@pytest.mark.parametrize("value", [None, "rows", (), RESULTS[:1], (*RESULTS[:1], INFO), RESULTS])
def test_response_without_a_result_for_each_row_fails_the_batch(value):
    with pytest.raises(Internal, match="a result for each row"):
        worker._check_results(value, 2)
    assert worker._check_results(RESULTS[:2], 2) == list(RESULTS[:2])
