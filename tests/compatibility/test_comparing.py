"""The comparisons report removals and changes, but no additions."""

import copy

import numpy as np
import pytest

from camserve.v1 import explain_pb2
from compatibility import calls, comparing, storage
from compatibility.test_wire import KNOWN

pytestmark = pytest.mark.slow
RECORD = {"fields": ["name", "score=0.0"], "names": {"timeout": "=None", "box": "=None"}}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda now: now["names"].pop("box"), ".names.box: gone"),
        (lambda now: now["names"].update(box="=1"), ".names.box: '=1', and it was '=None'"),
        (lambda now: now["fields"].pop(), ".fields[1:]: gone"),
        (lambda now: now["fields"].insert(0, "new"), ".fields[0]: 'new', and it was 'name'"),
    ],
)
def test_removed_changed_and_reordered_names_are_reported(change, line):
    now = copy.deepcopy(RECORD)
    change(now)

    assert line in comparing.lost(RECORD, now)


def test_added_names_are_not_reported():
    now = {"fields": [*RECORD["fields"], "area=0.0"], "names": {**RECORD["names"], "seed": "=0"}, "more": {}}

    assert comparing.lost(RECORD, now) == []


@pytest.mark.parametrize(
    "name", ["wire", "client", "commands", "settings", "package", "imports", "telemetry", "plugin"]
)
def test_every_entry_of_a_record_is_reported_when_it_is_removed(name):
    for entries in objects(storage.read(name)):
        for key in entries:
            without = {other: each for other, each in entries.items() if other != key}

            assert comparing.lost(entries, without) == [f".{key}: gone"]


def objects(record):
    """Yield every object in a record."""
    yield record
    for inner in record.values():
        if isinstance(inner, dict):
            yield from objects(inner)


def reply():
    response = explain_pb2.ExplainResponse(model="net", request_id="then")
    response.predictions.add(label="fox", class_index=1, probability=0.5, score=2.0)
    explanation = response.explanations.add(method="gradcam", layer="3", verdict=explain_pb2.VERDICT_OK, score=2.0)
    explanation.heatmap.CopyFrom(explain_pb2.Heatmap(height=1, width=2, data=np.float32([1, -2]).tobytes()))
    explanation.overlay.CopyFrom(explain_pb2.Picture(format=1, width=24, height=16, data=calls.png(calls.PIXELS)))
    explanation.parameters["samples"].number = 4
    return response


def heat(now, *values):
    now.explanations[0].heatmap.data = np.float32(values).tobytes()


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda now: setattr(now, "model", "other"), ".model"),
        (lambda now: setattr(now.predictions[0], "score", 2.001), ".predictions[0].score"),
        (lambda now: now.predictions.add(), ".predictions"),
        (lambda now: heat(now, 1, -2.001), ".explanations[0].heatmap.data"),
        (lambda now: heat(now, 1, np.nan), ".explanations[0].heatmap.data"),
        (lambda now: now.explanations[0].ClearField("heatmap"), ".explanations[0].heatmap"),
        (lambda now: setattr(now.explanations[0].overlay, "data", calls.png(calls.MIRRORED)), ".overlay.data"),
        (lambda now: now.explanations[0].parameters.pop("samples"), ".parameters[samples]"),
        (lambda now: setattr(now.explanations[0].parameters["samples"], "number", 5), ".parameters[samples].number"),
        (lambda now: setattr(now.explanations[0], "verdict", explain_pb2.VERDICT_FLAT), ".verdict"),
    ],
)
def test_changed_field_of_a_reply_is_reported(change, path):
    then, now = reply(), reply()
    change(now)
    (line,) = comparing.differences(then, now, KNOWN)

    assert path in line


def test_rounding_wording_and_ids_of_a_reply_are_not_reported():
    then, now = reply(), reply()
    now.request_id = "now"
    now.explanations[0].verdict_message = "other words"
    now.predictions[0].score = np.nextafter(np.float32(2), np.float32(3))
    heat(now, 1 + 1e-6, -2)

    assert comparing.differences(then, now, KNOWN) == []
