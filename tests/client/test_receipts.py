"""Receipts are saved and loaded unchanged, invalid ones are refused, and replays report differences."""

from __future__ import annotations

import json
import math
import os
import pickle
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import camserve
from camserve._codec.receipts import replay_request
from camserve._codec.results import decode_result
from camserve._core.files import MAX_TEXT_BYTES
from camserve._values.replay import compare_with_receipt
from camserve.v1 import explain_pb2

if TYPE_CHECKING:
    import pathlib


@pytest.fixture
def receipt() -> camserve.Receipt:
    return camserve.Receipt(
        model="tiny",
        source="timm:tiny",
        weights="default",
        digest="ab" * 32,
        precision="float32",
        device="cpu",
        versions={"camserve": "1.0", "torch": "2.14.1"},
        image_sha256="01" * 32,
        input_sha256="23" * 32,
        method="смуз",
        parameters={"samples": 32.0, "variant": "paper"},
        augmentation_smoothing=True,
        eigen_smoothing=False,
        layers=("a", "b"),
        fusion="max",
        target={"contrast": {"why": {"label": "tabby"}, "why_not": {"class_index": 0}}},
        score=2.5,
        verdict=camserve.Verdict.OK,
        heatmap=np.arange(6, dtype=np.float32).reshape(2, 3) / 7,
    )


def plain(receipt: camserve.Receipt) -> dict[str, Any]:
    return {each.name: getattr(receipt, each.name) for each in fields(receipt) if each.name != "heatmap"}


def explained(receipt: camserve.Receipt) -> camserve.Explanation:
    return camserve.Explanation(
        method=receipt.method,
        layer="",
        target=camserve.Prediction("", 0.5, 1, 1.0),
        contrast=None,
        score=receipt.score,
        verdict=receipt.verdict,
        verdict_message="",
        parameters=receipt.parameters,
        photo=camserve.Photo(1, 1, camserve.Box(0, 0, 1, 1)),
        heatmap=receipt.heatmap,
        overlay_picture=None,
        colored_picture=None,
        receipt_or_none=receipt,
    )


def compared(receipt: camserve.Receipt, **changes: Any) -> camserve.Replay:
    return compare_with_receipt(receipt, explained(replace(receipt, **changes)))


def test_receipt_is_unchanged_after_saving_and_loading(receipt: camserve.Receipt, tmp_path: pathlib.Path) -> None:
    path = receipt.save(tmp_path / "why.receipt.json")

    read = camserve.Receipt.load(path)

    assert plain(read) == plain(receipt)
    np.testing.assert_array_equal(read.heatmap, receipt.heatmap)
    assert read.heatmap.dtype == np.float32
    assert read.heatmap_sha256 == receipt.heatmap_sha256
    assert json.loads(path.read_text("utf-8"))["format"] == "camserve receipt 1"


def test_receipt_is_unchanged_after_pickling(receipt: camserve.Receipt) -> None:
    again = pickle.loads(pickle.dumps(receipt))  # noqa: S301 -- of our own making

    assert again.to_json() == receipt.to_json()


def test_json_of_a_receipt_has_the_map_in_base64(receipt: camserve.Receipt) -> None:
    import base64  # noqa: PLC0415 -- as another program would
    import hashlib  # noqa: PLC0415 -- the same

    stored = json.loads(receipt.to_json())["heatmap"]
    data = base64.b64decode(stored["data"])

    assert (stored["height"], stored["width"]) == (2, 3)
    np.testing.assert_array_equal(np.frombuffer(data, "<f4"), receipt.heatmap.ravel())
    assert stored["sha256"] == hashlib.sha256(data).hexdigest() == receipt.heatmap_sha256


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf, 0.1, -3e38])
def test_any_score_and_any_map_survive_as_json(receipt: camserve.Receipt, score: float) -> None:
    odd = replace(receipt, score=score, heatmap=np.array([[score, 1]], np.float32))

    read = camserve.Receipt.from_json(odd.to_json())

    json.loads(odd.to_json(), parse_constant=pytest.fail)
    np.testing.assert_array_equal(read.score, score)
    np.testing.assert_array_equal(read.heatmap, odd.heatmap)


def test_receipt_without_a_map_is_valid(receipt: camserve.Receipt) -> None:
    read = camserve.Receipt.from_json(replace(receipt, heatmap=None).to_json())

    assert read.heatmap is None
    assert read.heatmap_sha256 is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a camserve receipt: it is not JSON"),
        (b"\xff\xfe\xfd", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ("[]", "it is not a JSON object"),
        ("{}", "its \"format\" is not 'camserve receipt 1'"),
        ('{"format": 1}', 'its "format" is not'),
        ('{"format": "camserve receipt 2"}', "the receipt has the format 'camserve receipt 2'; this client reads"),
        ('{"format": "camserve receipt 1"}', 'the receipt has no "model"'),
    ],
)
def test_invalid_receipt_is_refused_with_a_reason(text: Any, words: str) -> None:
    with pytest.raises(camserve.InvalidArgument) as caught:
        camserve.Receipt.from_json(text)

    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("model", 3, "must be a string, not 3"),
        ("digest", None, "must be a string, not null"),
        ("versions", {"torch": 2}, "must be an object of strings"),
        ("versions", ["torch"], "must be an object of strings"),
        ("parameters", {"samples": [1]}, "must be an object of numbers and strings"),
        ("parameters", {"samples": True}, "must be an object of numbers and strings"),
        ("eigen_smoothing", 1, "must be true or false, not 1"),
        ("layers", "layer4", 'must be a list of names, not "layer4"'),
        ("layers", [4], "must be a list of names, not [4]"),
        ("fusion", "best", 'must be null, mean, max, product, sum, not "best"'),
        ("target", {"klass": 3}, "must be a target"),
        ("target", {}, "must be a target, not {} (it names no target)"),
        ("target", [], "must be a target, not [] (it names no target)"),
        ("target", 3, "must be a target, not 3"),
        ("score", "much", 'must be a number, not "much"'),
        ("score", None, "must be a number, not null"),
        ("verdict", "GOOD", "must be one of UNSPECIFIED, OK, "),
        ("heatmap", 3, "must be null or a map, not 3"),
        ("heatmap", {}, "must be null or a map, not {}"),
        ("heatmap", {"data": "!", "sha256": "", "height": 1, "width": 1}, "must be null or a map"),
        (
            "heatmap",
            {"data": "AAAAAA==", "sha256": "00", "height": 1, "width": 1},
            "its data does not match its SHA-256",
        ),
    ],
)
def test_field_of_a_wrong_type_is_named(receipt: camserve.Receipt, name: str, value: Any, words: str) -> None:
    changed = {**json.loads(receipt.to_json()), name: value}

    with pytest.raises(camserve.InvalidArgument) as caught:
        camserve.Receipt.from_json(json.dumps(changed))

    assert str(caught.value).startswith(f'"{name}" of the receipt ')
    assert words in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", ["heatmap", "fusion", "score", "method"])
def test_field_that_is_missing_is_named(receipt: camserve.Receipt, name: str) -> None:
    changed = json.loads(receipt.to_json())
    del changed[name]

    with pytest.raises(camserve.InvalidArgument, match=f'the receipt has no "{name}"'):
        camserve.Receipt.from_json(json.dumps(changed))


@pytest.mark.parametrize("path", ["no/such.json", "a\0b", "."])
def test_file_that_cannot_be_read_is_named(path: str) -> None:
    with pytest.raises(camserve.InvalidArgument, match="cannot read"):
        camserve.Receipt.load(path)


def test_large_file_and_a_pipe_are_not_read_as_a_receipt(tmp_path: pathlib.Path) -> None:
    (tmp_path / "large").write_text("{")
    os.truncate(tmp_path / "large", MAX_TEXT_BYTES + 1)
    os.mkfifo(tmp_path / "pipe")

    for name, words in {"large": "it has more than 67,108,864 bytes", "pipe": "not a regular file"}.items():
        with pytest.raises(camserve.InvalidArgument, match=words):
            camserve.Receipt.load(tmp_path / name)


def test_receipt_with_an_infinite_range_of_values_is_json(receipt: camserve.Receipt) -> None:
    odd = replace(receipt, value_range=(-math.inf, math.inf))

    assert camserve.Receipt.from_json(odd.to_json()).value_range == odd.value_range


def test_replay_requests_everything_in_the_receipt(receipt: camserve.Receipt) -> None:
    asked = replay_request(receipt)

    assert asked.model == "tiny"
    assert list(asked.layers) == ["a", "b"]
    assert asked.fusion == explain_pb2.FUSION_MAX
    assert asked.rendering.heatmap
    (method,) = asked.methods
    assert not method.per_channel
    assert (method.name, method.augmentation_smoothing, method.eigen_smoothing) == ("смуз", True, False)
    assert {name: value.number or value.text for name, value in method.parameters.items()} == receipt.parameters
    (target,) = asked.targets
    assert (target.contrast.why.label, target.contrast.why_not.class_index) == ("tabby", 0)


@pytest.mark.parametrize("channel", [0, 7])
def test_replay_requests_the_channel_of_the_receipt_alone(receipt: camserve.Receipt, channel: int) -> None:
    stored = replace(receipt, input_channel=channel).to_json()
    (method,) = replay_request(camserve.Receipt.from_json(stored)).methods

    assert json.loads(stored)["input_channel"] == channel
    assert (method.per_channel, list(method.input_channels)) == (True, [channel])


@pytest.mark.parametrize("channel", [-1, 1.0, True, "0", None, 2**32])
def test_channel_of_a_receipt_must_be_an_index(receipt: camserve.Receipt, channel: Any) -> None:
    stored = json.loads(receipt.to_json()) | {"input_channel": channel}

    with pytest.raises(camserve.InvalidArgument, match='"input_channel" of the receipt must be the index of a channel'):
        camserve.Receipt.from_json(json.dumps(stored))


def test_receipt_has_the_values_of_the_response() -> None:
    explanation = explain_pb2.Explanation(
        method="m",
        layer="a.b + c",
        fusion=explain_pb2.FUSION_MEAN,
        score=2.5,
        eigen_smoothing=True,
        input_channel=0,
        resolved_target=explain_pb2.Target(class_index=0),
        parameters={"n": explain_pb2.Parameter(number=3)},
    )
    response = explain_pb2.ExplainResponse(
        model="tiny", explanations=[explanation], receipt=explain_pb2.Receipt(source="s", versions={"torch": "2"})
    )

    receipt = decode_result(response).explanations[0].receipt

    assert (receipt.model, receipt.source, receipt.versions) == ("tiny", "s", {"torch": "2"})
    assert (receipt.layers, receipt.fusion, receipt.parameters) == (("a.b", "c"), "mean", {"n": 3.0})
    assert (receipt.target, receipt.eigen_smoothing) == ({"class_index": 0}, True)
    assert receipt.input_channel == 0
    assert receipt.heatmap is None


def test_old_server_gives_no_receipt() -> None:
    response = explain_pb2.ExplainResponse(explanations=[explain_pb2.Explanation()])

    with pytest.raises(camserve.FailedPrecondition, match="does not support them"):
        _ = decode_result(response).explanations[0].receipt


async def test_receipt_of_a_similarity_has_the_reference_image(client: Any, server: Any) -> None:
    def likeness(_request: Any, request_id: str = "") -> Any:
        similar = explain_pb2.Explanation(resolved_target=explain_pb2.Target(similarity=explain_pb2.Similarity()))
        plain = explain_pb2.Explanation(resolved_target=explain_pb2.Target(class_index=3))
        return explain_pb2.ExplainResponse(
            request_id=request_id, explanations=[plain, similar] * 2, receipt=explain_pb2.Receipt(source="s")
        )

    def stream(requests: Any, _: Any) -> Any:
        for each in requests:
            yield explain_pb2.ExplainStreamResponse(request_id=each.request_id, response=likeness(each.request))

    server.answer, server.streams = likeness, [stream]
    options = {"targets": [3, camserve.similarity(b"other")], "methods": ["a", "b"]}

    alone = await client.explain(b"photo", **options)
    (streamed,) = [each async for each in client.explain_many([b"photo"], **options)]

    for result in (alone, streamed):
        results = [each.receipt.target for each in result.explanations]
        assert results == [{"class_index": 3}, {"similarity": {"image": "b3RoZXI="}}] * 2


async def test_receipt_is_replayed(client: Any, server: Any) -> None:
    (first,) = (await client.explain(b"\x07", methods=("m", {"n": 2}))).explanations

    same = await client.replay(first.receipt, b"\x07")
    other = await client.replay(first.receipt, b"\x08", on_progress=print)

    assert same.same
    assert same.gap == 0
    assert [each[:9] for each in other.differences] == ["the photo", "the pixel"]
    asked = server.calls[1].request
    assert (asked.model, asked.targets[0].class_index, list(asked.layers)) == ("tiny", 7, ["features"])
    assert asked.methods[0].parameters["n"].number == 2
    assert [call.rpc for call in server.calls] == ["Explain", "Explain", "ExplainStream"]


def test_equal_results_have_no_differences(receipt: camserve.Receipt) -> None:
    replay = compared(receipt)

    assert replay.same
    assert replay.differences == ()
    assert [each.name for each in replay.checks] == [
        *("photo", "pixels seen", "weights", "score", "map"),
        *("camserve", "device", "precision", "source", "torch"),
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"image_sha256": "45" * 32}, "the photo differs (SHA-256 454545454545…, was 010101010101…)"),
        (
            {"input_sha256": "45" * 32},
            "the pixels that the model saw differ (SHA-256 454545454545…, was 232323232323…)",
        ),
        ({"digest": "4"}, "the weights differ (SHA-256 4, was abababababab…)"),
        ({"score": 2.5001}, "the score is 2.5001, was 2.5"),
        ({"heatmap": np.zeros((3, 2), np.float32)}, "the map has 3×2 cells, had 2×3"),
        ({"heatmap": np.zeros((2, 3), np.float32)}, "the map differs by 1 of its largest absolute value"),
        ({"heatmap": np.full((2, 3), np.nan, np.float32)}, "the map differs by inf of its largest absolute value"),
    ],
)
def test_each_difference_is_described(receipt: camserve.Receipt, change: Any, words: str) -> None:
    replay = compared(receipt, **change)

    assert replay.differences == (words,)
    assert not replay.same


def test_versions_are_a_cause_only_if_the_numbers_differ(receipt: camserve.Receipt) -> None:
    elsewhere = {"versions": {"camserve": "1.0", "timm": "1"}, "device": "cuda:0", "precision": "bfloat16"}

    well, ill = compared(receipt, **elsewhere), compared(receipt, score=3.0, **elsewhere)

    assert well.same
    assert [each.name for each in well.checks if not each.same] == ["device", "precision", "timm", "torch"]
    assert ill.differences == (
        "the score is 3, was 2.5",
        "device is cuda:0, was cpu",
        "precision is bfloat16, was float32",
        "timm is 1, was none",
        "torch is none, was 2.14.1",
    )


@pytest.mark.parametrize(("factor", "same"), [(1 + 5e-6, True), (1 + 2e-5, False)])
def test_differences_due_to_batch_neighbours_count_as_equal(
    receipt: camserve.Receipt, factor: float, *, same: bool
) -> None:
    replay = compared(receipt, heatmap=receipt.heatmap * np.float32(factor), score=receipt.score * factor)

    assert replay.same is same
    assert replay.gap == pytest.approx(factor - 1, rel=0.05)


def test_nan_equals_nan(receipt: camserve.Receipt) -> None:
    broken = replace(receipt, score=math.nan, heatmap=np.full((2, 3), np.nan, np.float32))

    assert compared(broken).same
    assert compared(broken).gap == 0
    assert not compared(broken, score=1.0).same


def test_difference_from_a_zero_map_is_not_relative(receipt: camserve.Receipt) -> None:
    blank = replace(receipt, heatmap=np.zeros((2, 3), np.float32))

    assert compared(blank).gap == 0
    assert compared(blank, heatmap=receipt.heatmap).gap == math.inf


def test_values_are_compared_if_one_side_has_no_map(receipt: camserve.Receipt) -> None:
    lost, new = compared(receipt, heatmap=None), compared(replace(receipt, heatmap=None))

    assert (lost.gap, new.gap) == (None, None)
    assert lost.differences == ("there is no map, had 2×3 cells",)
    assert new.same
    assert "map" not in [each.name for each in new.checks]
