"""Interventions in the client: their requests, their text, receipts, results and options on the command line."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import camserve
from camserve._codec.explain import explain_request
from camserve._codec.interventions import (
    decode_intervention,
    encode_interventions,
    intervention_from_json,
    intervention_to_json,
)
from camserve._codec.results import decode_result
from camserve.v1 import explain_pb2

EVERY = [
    (camserve.silence("a"), {"silence": True}, "silence('a')"),
    (
        camserve.silence("a", np.array([12, 40])),
        {"silence": True, "channels": [12, 40]},
        "silence('a', channels=[12, 40])",
    ),
    (camserve.scale("a", 0.3, input=True), {"scale": 0.3, "input": True}, "scale('a', factor=0.3, input=True)"),
    (camserve.scale("a", 0), {"scale": 0}, "scale('a', factor=0)"),
    (
        camserve.clamp("a", minimum=0, maximum=6, channels=range(2)),
        {"clamp": {"minimum": 0, "maximum": 6}, "channels": [0, 1]},
        "clamp('a', minimum=0, maximum=6, channels=[0, 1])",
    ),
    (camserve.clamp("a", maximum=-1), {"clamp": {"maximum": -1}}, "clamp('a', maximum=-1)"),
    (camserve.replace_mean("a", (3,)), {"replace_mean": True, "channels": [3]}, "replace_mean('a', channels=[3])"),
    (camserve.clip_gradient("a", 1.5), {"clip_gradient": 1.5}, "clip_gradient('a', limit=1.5)"),
]


@pytest.mark.parametrize(("intervention", "fields", "text"), EVERY, ids=[text for *_, text in EVERY])
def test_intervention_survives_the_wire_receipts_and_its_own_text(intervention: Any, fields: Any, text: str) -> None:
    (message,) = encode_interventions([intervention])

    assert message == explain_pb2.Intervention(layer="a", **fields)
    assert decode_intervention(message) == intervention
    assert intervention_from_json(json.loads(json.dumps(intervention_to_json(intervention)))) == intervention
    assert repr(intervention) == text
    assert eval(text, vars(camserve)) == intervention  # noqa: S307 -- the test's own text


async def test_every_call_sends_interventions(client: Any, server: Any) -> None:
    changes = [camserve.silence("a", channels=[1]), camserve.scale("b", 2)]
    options = {"interventions": changes}
    await client.explain(b"\x07", **options)
    await client.inspect(b"\x07", **options)
    await client.features(b"\x07", **options)
    await client.estimate_cost(**options)
    await client.evaluate(b"\x07", **options)

    sent = [getattr(call.request, "explain", call.request).interventions for call in server.calls]
    assert [list(each) for each in sent] == [encode_interventions(changes)] * 5


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: camserve.silence("a", channels=3), "channels: they must be a list of indices"),
        (lambda: camserve.silence("a", channels="12"), "channels"),
        (lambda: camserve.silence("a", channels=[1.5]), "not [1.5]"),
        (lambda: camserve.silence("a", channels=[-1]), "not [-1]"),
        (lambda: camserve.silence("a", channels=[True]), "not [True]"),
        (lambda: camserve.silence("a", channels=[2**32]), "channels"),
        (lambda: request(camserve.silence("a")), "interventions: they must be a list"),
        (lambda: request("silence"), "interventions: they must be a list"),
        (lambda: request(3), "interventions: they must be a list"),
        (lambda: request(["silence"]), "interventions[0]: it must be made by silence"),
        (lambda: request([camserve.Intervention("mute", "a")]), "interventions[0]: unknown change 'mute'"),
        (lambda: request([camserve.scale("a", "much")]), "an option has the wrong type"),
        (lambda: request([camserve.scale(3, 1)]), "an option has the wrong type"),
    ],
)
def test_value_of_a_wrong_type_is_refused_before_it_is_sent(make: Any, words: str) -> None:
    with pytest.raises(camserve.InvalidArgument) as caught:
        make()

    assert words in str(caught.value)


def request(interventions: Any) -> Any:
    return explain_request(interventions=interventions)


def test_result_has_the_predictions_of_both_models_and_the_receipt() -> None:
    tabby, tiger = (explain_pb2.Prediction(label=label, probability=0.5) for label in ("tabby", "tiger cat"))
    receipt = explain_pb2.Receipt(interventions=[explain_pb2.Intervention(layer="a", scale=0.1)])
    response = explain_pb2.ExplainResponse(
        predictions=[tabby],
        unchanged_predictions=[tiger],
        explanations=[explain_pb2.Explanation(layer="a", resolved_target=explain_pb2.Target(class_index=0))],
        receipt=receipt,
    )
    result = decode_result(response)

    assert [each.label for each in (*result.predictions, *result.unchanged_predictions)] == ["tabby", "tiger cat"]
    assert result.explanations[0].receipt.interventions == (camserve.scale("a", 0.1),)
    assert "tiger cat (unchanged model)" in result.html()


def test_more_unchanged_predictions_than_can_be_requested_are_refused() -> None:
    response = explain_pb2.ExplainResponse(unchanged_predictions=[explain_pb2.Prediction()] * 1001)

    with pytest.raises(camserve.Internal):
        decode_result(response)


def test_change_of_a_newer_server_is_read() -> None:
    assert decode_intervention(explain_pb2.Intervention(layer="a")) == camserve.Intervention("", "a")


@pytest.mark.parametrize(
    "stored",
    [[{}], [{"layer": "a"}], ["silence"], [5], {}, [{"layer": "a", "mute": True}], [{"layer": "a", "scale": 10**400}]],
)
def test_invalid_intervention_of_a_receipt_is_named(stored: Any) -> None:
    names = ("model", "source", "weights", "digest", "precision", "device", "image_sha256", "input_sha256", "method")
    content = {
        "format": "camserve receipt 1",
        **dict.fromkeys(names, ""),
        "versions": {},
        "parameters": {},
        "augmentation_smoothing": False,
        "eigen_smoothing": False,
        "layers": [],
        "fusion": None,
        "target": {"class_index": 0},
        "score": 0,
        "verdict": "OK",
        "heatmap": None,
    }
    receipt = camserve.Receipt.from_json(json.dumps(content))

    assert receipt.interventions == ()
    assert "interventions" not in json.loads(receipt.to_json())
    with pytest.raises(
        camserve.InvalidArgument, match='"interventions" of the receipt must be a list of interventions'
    ):
        camserve.Receipt.from_json(json.dumps({**content, "interventions": stored}))


def test_command_line_reads_every_change(run: Any, server: Any, tmp_path: Any) -> None:
    photo = tmp_path / "cat.jpg"
    photo.write_bytes(b"\xff\xd8\xff\x07")
    texts = {
        "silence:layer4:channels=12,40": camserve.silence("layer4", [12, 40]),
        "scale:layer3:factor=0.5:input": camserve.scale("layer3", 0.5, input=True),
        "clamp:layer2:minimum=0:maximum=6": camserve.clamp("layer2", 0, 6),
        "replace_mean:layer4": camserve.replace_mean("layer4"),
        "clip_gradient:layer3:limit=1:channels=2": camserve.clip_gradient("layer3", 1, [2]),
    }
    flags = [part for text in texts for part in ("--intervention", text)]
    for command in ("inspect", "evaluate"):
        done = run(command, photo, *flags)
        assert done.exit_code == 0, done.output
    done = run("features", photo, "-o", tmp_path / "out.png", *flags)
    assert done.exit_code == 0, done.output

    sent = [getattr(call.request, "explain", call.request).interventions for call in server.calls]
    assert [list(each) for each in sent] == [encode_interventions(texts.values())] * 3


def test_explain_prints_both_predictions(run: Any, server: Any, tmp_path: Any) -> None:
    def stream(requests: Any, _: Any) -> Any:
        for each in requests:
            reply = server.reply(each)
            if each.request.interventions:
                best = explain_pb2.Prediction(class_index=4, label="owl", probability=0.25)
                reply.response.unchanged_predictions.append(best)
            yield reply

    server.streams = [stream]
    photo = tmp_path / "cat.jpg"
    photo.write_bytes(b"\xff\xd8\xff\x01")
    done = run("explain", photo, "-o", tmp_path / "out", "--intervention", "silence:a")

    assert done.exit_code == 0, done.output
    assert "75.0% (unchanged: owl 25.0%)" in done.stdout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mute:layer4", "'mute' in 'mute:layer4' is not one of silence, scale"),
        ("silence:layer4:rows=1", "'rows' in"),
        ("silence:layer4:channels=one", "cannot read 'silence:layer4:channels=one'"),
        ("silence:layer4:factor=2", "cannot read"),
        ("scale:layer4", "scale needs factor="),
        ("clip_gradient:layer4:limit=1:input", "cannot read"),
    ],
)
def test_command_line_refuses_what_is_no_intervention(
    run: Any, server: Any, tmp_path: Any, text: str, words: str
) -> None:
    photo = tmp_path / "cat.jpg"
    photo.write_bytes(b"\xff\xd8\xff\x07")
    done = run("inspect", photo, "--intervention", text)

    assert done.exit_code == 2
    assert words in " ".join(done.output.split())
    assert not server.calls
