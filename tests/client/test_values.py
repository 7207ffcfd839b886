"""Values that a client returns can be built from plain values, as in adapters and callers' tests."""

from __future__ import annotations

import inspect
import io
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

import camserve

if TYPE_CHECKING:
    import pathlib

PUBLIC = [getattr(camserve, name) for name in camserve.__all__]
TIMING = camserve.Timing(decode_ms=1, queue_ms=2, compute_ms=3, render_ms=4, batch_rows=5)
HEATMAP = np.arange(4, dtype=np.float32).reshape(2, 2)
SHA256 = "ca358758f6d27e6cf45272937977a748fd88391db679ceda7dc7bf1f005ee879"  # of the byte 7


def plain(value: Any) -> Any:
    """Return a value as lists and dictionaries, which can be compared."""
    if is_dataclass(value):
        # A result's source refers to the photo, which a built one does not have.
        left_out = {"source"} if isinstance(value, camserve.Result) else set()
        return {each.name: plain(getattr(value, each.name)) for each in fields(value) if each.name not in left_out}
    if isinstance(value, np.ndarray):
        return value.dtype, value.tolist()
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, tuple) else value


def encoded(kind: str) -> camserve.Picture:
    out = io.BytesIO()
    Image.new("RGB", (6, 4), "red").save(out, kind)
    return camserve.Picture(format=kind, data=out.getvalue(), width=6, height=4)


@pytest.fixture
def target() -> camserve.Prediction:
    return camserve.Prediction(label="class 7", probability=0.75, class_index=7, score=2.5)


@pytest.fixture
def receipt() -> camserve.Receipt:
    return camserve.Receipt(
        model="tiny",
        source="timm:tiny",
        weights="default",
        digest="ab" * 32,
        precision="float32",
        device="cpu",
        versions={"camserve": "1.0"},
        image_sha256=SHA256,
        input_sha256=SHA256,
        method="gradcam",
        parameters={"samples": 3.0},
        augmentation_smoothing=False,
        eigen_smoothing=False,
        layers=("features",),
        fusion=None,
        target={"class_index": 7},
        score=2.5,
        verdict=camserve.Verdict.OK,
        heatmap=HEATMAP,
    )


@pytest.fixture
def region() -> camserve.Region:
    return camserve.Region(
        box=camserve.Box(left=3, top=0, right=6, bottom=4),
        area=12,
        contour=np.array([[3, 0], [6, 0], [6, 4], [3, 4]], np.float32),
        peak=(4.5, 1.5),
        peak_value=2,
        share=0.75,
        mask={"size": [4, 6], "counts": "<<"},
    )


@pytest.fixture
def explanation(
    target: camserve.Prediction, receipt: camserve.Receipt, region: camserve.Region
) -> camserve.Explanation:
    return camserve.Explanation(
        method="gradcam",
        layer="features",
        target=target,
        contrast=None,
        score=2.5,
        verdict=camserve.Verdict.OK,
        verdict_message="",
        parameters={"samples": 3.0},
        photo=camserve.Photo(width=6, height=4, seen=camserve.Box(left=1, top=0, right=5, bottom=4)),
        heatmap=HEATMAP,
        overlay_picture=encoded("jpeg"),
        colored_picture=None,
        resolved=7,
        receipt_or_none=receipt,
        scale=2.5,
        regions=(region,),
    )


@pytest.fixture
def result(explanation: camserve.Explanation, target: camserve.Prediction) -> camserve.Result:
    return camserve.Result(
        predictions=(target,),
        explanations=(explanation,),
        model="tiny",
        request_id="id",
        photo=explanation.photo,
        timing=TIMING,
    )


@pytest.fixture
def evaluation(result: camserve.Result, explanation: camserve.Explanation) -> camserve.Evaluation:
    reading = camserve.Reading(
        explanation=explanation,
        metric="deletion",
        value=0.25,
        higher_is_better=False,
        message="",
        curves=(camserve.Curve(name="p", x=(0.0, 1.0), y=(0.75, 0.25)),),
        parameters={},
    )
    return camserve.Evaluation(explained=result, readings=(reading,))


@pytest.fixture
def inspection() -> camserve.Inspection:
    measured = {"minimum": -1.0, "maximum": 3.0, "non_finite": 0}
    seen = camserve.Statistics(mean=0.5, std=1.0, zeros=0.25, norm=20.0, **measured)
    slope = camserve.Statistics(mean=0.0, std=0.5, zeros=0.0, norm=0.5, **measured)
    layer = camserve.LayerReading(
        name="stem",
        type="Conv2d",
        output_shape=(1, 2, 2, 2),
        elements=8,
        activation=seen,
        gradient=slope,
        container=False,
    )
    return camserve.Inspection(
        layers=(layer,),
        model="tiny",
        target=camserve.Prediction(label="tabby", probability=0.5, class_index=7, score=2.5),
        contrast=None,
        score=2.5,
        request_id="id",
        timing=TIMING,
    )


@pytest.fixture
def features(target: camserve.Prediction) -> camserve.Features:
    return camserve.Features(
        channels=(camserve.Channel(index=5, mean_activation=2.0, gradient_weight=-0.5),),
        maps=HEATMAP[None],
        picture=encoded("png"),
        layer="features",
        channel_count=8,
        grid=(2, 2),
        model="tiny",
        target=target,
        contrast=None,
        score=2.5,
        photo=camserve.Photo(width=6, height=4, seen=camserve.Box(left=0, top=0, right=6, bottom=4)),
        request_id="id",
        timing=TIMING,
    )


@pytest.mark.parametrize("kind", [each for each in PUBLIC if is_dataclass(each)], ids=lambda kind: kind.__name__)
def test_no_parameter_of_a_public_value_is_private(kind: type) -> None:
    assert not [name for name in inspect.signature(kind).parameters if name.startswith("_")]


async def test_built_result_equals_a_received_one(client: Any, server: Any, result: camserve.Result) -> None:
    answer = server.answer
    server.answer = lambda request, _request_id: answer(request)

    received = await client.explain(b"\x07", methods=("gradcam", {"samples": 3}), heatmap=True, regions=True)

    assert plain(result) == plain(received)


def test_built_result_has_working_methods(result: camserve.Result, tmp_path: pathlib.Path) -> None:
    (why,) = result.explanations
    inside = slice(1, 5)

    assert result.size == (6, 4)
    assert "class 7 · gradcam" in result._repr_html_()
    assert (why.title, why.how) == ("class 7", "gradcam")
    assert why.image.size == (6, 4)
    assert why.save(tmp_path / "why.jpg").read_bytes() == why.overlay
    np.testing.assert_array_equal(np.load(why.save(tmp_path / "why.npy")), HEATMAP)
    assert np.isfinite(why.heatmap_on_image).tolist() == [[inside.start <= x < inside.stop for x in range(6)]] * 4


def test_built_receipt_is_unchanged_after_saving_and_loading(
    explanation: camserve.Explanation, receipt: camserve.Receipt, tmp_path: pathlib.Path
) -> None:
    read = camserve.Receipt.load(explanation.receipt.save(tmp_path / "why.receipt.json"))

    assert plain(read) == plain(receipt)


async def test_built_receipt_can_be_replayed(client: Any, receipt: camserve.Receipt) -> None:
    assert (await client.replay(receipt, b"\x07")).same


async def test_built_evaluation_equals_a_received_one(
    client: Any, evaluation: camserve.Evaluation, tmp_path: pathlib.Path
) -> None:
    received = await client.evaluate(
        b"\x07", metrics="deletion", methods=("gradcam", {"samples": 3}), heatmap=True, overlay="jpeg", regions=True
    )

    assert plain(evaluation) == plain(received)
    assert evaluation.table() == received.table()
    assert evaluation.plain() == received.plain()
    assert evaluation.save(tmp_path / "built.png").read_bytes() == received.save(tmp_path / "other.png").read_bytes()


def test_built_inspection_has_working_methods(inspection: camserve.Inspection, tmp_path: pathlib.Path) -> None:
    heads, line = inspection.table().splitlines()

    assert heads.split()[:2] == ["layer", "type"]
    assert line.split() == ["stem", "Conv2d", "1×2×2×2", "0.5", "1", "-1", "3", "25.0%", "20", "0.5"]
    assert inspection.title == "tiny · tabby"
    assert inspection.leaves == inspection.layers
    with Image.open(inspection.save(tmp_path / "depth.png")) as drawn:
        assert drawn.size == inspection.plot().size


def test_built_features_have_working_methods(features: camserve.Features, tmp_path: pathlib.Path) -> None:
    assert features.image.size == (6, 4)
    assert features.save(tmp_path / "tiles.png").read_bytes() == features.picture.data
    np.testing.assert_array_equal(np.load(features.save(tmp_path / "maps.npy")), HEATMAP[None])
    assert "1 of 8 channels · class 7" in features._repr_html_()
