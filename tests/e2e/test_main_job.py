"""Explanations of photos over gRPC: predictions, overlays and maps are right."""

import io
import random
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
import timm
import timm.data
import torch
from PIL import Image, ImageDraw
from safetensors.torch import save_file

import camserve
from camserve.v1 import explain_pb2, explain_pb2_grpc
from camserve_server.models import digest
from camserve_server.models.hooks import hook_count
from support import PHOTOS, jpeg, rows_waiting, serving, wait_until

METHODS = ["gradcam", "hirescam", "layercam", "saliency", ("smoothgrad", {"samples": 3})]


@pytest.fixture(scope="module")
def client(served):
    with camserve.Client(served.address, retries=0, timeout=600) as client:
        yield client


def cat_mask():
    """Return a hand-drawn mask of the cat's head and neck in the photo of 451 x 300 pixels."""
    mask = Image.new("1", (451, 300))
    outline = [
        (60, 0),
        (330, 0),
        (400, 0),
        (425, 35),
        (380, 90),
        (385, 160),
        (365, 235),
        (330, 299),
        (0, 299),
        (25, 120),
    ]
    ImageDraw.Draw(mask).polygon(outline, fill=1)
    return np.asarray(mask)


def test_cat_photo_is_classified_and_explained_by_the_cat(client):
    result = client.explain(PHOTOS["chelsea"])
    explanation = result.explanations[0]
    on_image = np.nan_to_num(explanation.heatmap_on_image, nan=-np.inf)
    hottest = on_image >= np.quantile(on_image[np.isfinite(on_image)], 0.9)

    assert result.predictions[0].label == "Egyptian cat"
    assert result.predictions[0].probability >= 0.3
    assert (explanation.method, explanation.layer, explanation.target.label) == ("gradcam", "bn2", "Egyptian cat")
    assert explanation.verdict == "OK"
    assert explanation.image.size == (451, 300)
    assert explanation.heatmap.shape == (7, 7)
    assert (hottest & cat_mask()).sum() >= 0.95 * hottest.sum()


def test_overlay_is_hot_where_the_raw_map_is(client):
    explanation = client.explain(PHOTOS["chelsea"], overlay="png", alpha=1.0, colormap="gray").explanations[0]
    drawn = np.asarray(explanation.image.convert("L"), np.float32)
    raw = explanation.heatmap_on_image
    visible = np.isfinite(raw) & (raw != 0)
    expected = np.clip(raw, 0, None) / explanation.heatmap.max() * 255

    assert np.abs(drawn - expected)[visible].max() <= 3


@pytest.mark.parametrize(
    "photo",
    [
        "chelsea",
        "astronaut",
        "china",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("coffee", "rocket", "flower")),
    ],
)
def test_predictions_equal_timms_own_evaluation(client, photo, lite0):
    """The expected values are from the embedded model with timm's transform."""
    preprocess = lite0.info.preprocess
    transform = timm.data.create_transform(
        (3, *preprocess.size),
        interpolation=preprocess.interpolation,
        mean=preprocess.mean,
        std=preprocess.std,
        crop_pct=1.0,
    )
    with torch.inference_mode():
        image = Image.open(PHOTOS[photo]).convert("RGB")
        expected = lite0.module(transform(image)[None]).softmax(1)[0].numpy()
    result = client.explain(PHOTOS[photo], max_predictions=1000)

    assert result.predictions[0].class_index == expected.argmax()
    assert max(abs(p.probability - expected[p.class_index]) for p in result.predictions) <= 0.02


def sharp():
    """Return a small model of timm's with random weights whose probabilities show any other transform.

    The crop changes them by 0.03, the interpolation by 0.06, and mean or deviation by more.
    """
    torch.manual_seed(4)
    model = timm.create_model("test_resnet")
    with torch.no_grad():
        model.fc.weight.mul_(200)
    return model


def real(lite0):
    """Return timm's own model with the real weights of the embedded one."""
    model = timm.create_model("tf_efficientnet_lite0")
    model.load_state_dict(lite0.module.state_dict())
    return model


@pytest.mark.parametrize("weights", ["random", pytest.param("real", marks=pytest.mark.slow)])
def test_timm_model_gets_timms_own_transform(weights, request, tmp_path):
    """A timm model with its weights in a file is evaluated as timm's configuration says."""
    reference = (sharp() if weights == "random" else real(request.getfixturevalue("lite0"))).eval()
    save_file(reference.state_dict(), tmp_path / "weights.safetensors")
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(reference))
    name = {"random": "test_resnet", "real": "tf_efficientnet_lite0"}[weights]
    spec = f"net=timm:{name}?weights={tmp_path / 'weights.safetensors'}"

    with serving(models=(spec,)) as served, camserve.Client(served.address) as client:
        for path in (PHOTOS["chelsea"], PHOTOS["astronaut"]):  # one wide, one square
            with torch.inference_mode():
                logits = reference(transform(Image.open(path).convert("RGB"))[None])
                expected = logits.softmax(1)[0].numpy()
            result = client.explain(path, max_predictions=1000, overlay=None)

            assert result.predictions[0].class_index == expected.argmax()
            assert max(abs(p.probability - expected[p.class_index]) for p in result.predictions) <= 0.02


def test_explanations_have_the_order_of_methods_layers_and_targets(client):
    layers = ["blocks.5", "bn2"]
    targets = ["tabby", 281 + 4, camserve.contrast("tiger cat", "tabby")]
    result = client.explain(PHOTOS["chelsea"], methods=["layercam", "saliency"], layers=layers, targets=targets)
    keys = [
        (e.method, e.layer, e.target.class_index, e.contrast and e.contrast.class_index) for e in result.explanations
    ]

    cams = [("layercam", layer, *t) for layer in layers for t in ((281, None), (285, None), (282, 281))]
    assert keys == cams + [("saliency", "", *t) for t in ((281, None), (285, None), (282, 281))]


def test_top_k_explains_what_the_model_predicts(client):
    result = client.explain(PHOTOS["chelsea"], top_k=3)

    assert [e.target for e in result.explanations] == list(result.predictions[:3])


def crops(count):
    """Yield different pictures: crops of the photos as JPEG files."""
    chance = random.Random(7)
    photos = [np.asarray(Image.open(path).convert("RGB")) for path in PHOTOS.values()]
    for number in range(count):
        photo = photos[number % len(photos)]
        height, width = photo.shape[:2]
        top, left = chance.randrange(height - 200), chance.randrange(width - 200)
        yield jpeg(photo[top : top + chance.randrange(120, 200), left : left + chance.randrange(120, 200)])


def explain(client, number, image, model="resnet"):
    methods = [METHODS[number % 3]] + ([METHODS[3 + number // 8 % 2]] if number % 8 == 0 else [])
    targets = [number * 13 % 1000] if number % 3 else [number % 1000, camserve.contrast(number % 1000, 999)]
    return client.explain(image, model=model, methods=methods, targets=targets, overlay=None)


def test_32_concurrent_requests_are_answered_as_if_alone(served, client):
    """Maps differ by at most 1e-5 of the maximum; images, targets and methods differ; the first batches are full."""
    images = list(crops(32))
    alone = [explain(client, number, image) for number, image in enumerate(images)]
    stats = served.pipeline.batcher.stats
    batches, rows = stats.batches, stats.rows
    served.do(served.pipeline.batcher.pause)
    with ThreadPoolExecutor(32) as threads:
        calls = [threads.submit(explain, client, number, images[number]) for number in range(32)]
        wait_until(lambda: rows_waiting(served) >= 32)
        served.do(served.pipeline.batcher.resume)
        together = [call.result() for call in calls]

    later = stats.rows - rows - 32  # of methods with several passes; at worst each had a batch of its own
    assert stats.batches - batches <= 32 / 8 + len(METHODS) + later
    for expected, other in zip(alone, together, strict=True):
        assert [p.class_index for p in expected.predictions] == [p.class_index for p in other.predictions]
        for first, second in zip(expected.explanations, other.explanations, strict=True):
            assert (first.method, first.target.class_index) == (second.method, second.target.class_index)
            assert np.abs(first.heatmap - second.heatmap).max() <= 1e-5 * np.abs(first.heatmap).max()


@pytest.mark.parametrize("requests", [60, pytest.param(150, marks=pytest.mark.slow)])
def test_responses_of_many_requests_are_not_swapped(client, requests):
    """Score and map of each response must be those of its picture and class."""
    distinct = requests // 10
    images = list(crops(20))
    options = {"model": "resnet", "overlay": None, "max_predictions": 1}

    def answer(number):
        picture, target = number % 20, number * 7 % 1000
        (explanation,) = client.explain(images[picture], targets=target, **options).explanations
        return (picture, explanation.target.class_index), explanation.score, explanation.heatmap

    def is_same(expected, other):
        return np.abs(expected - other).max() <= 1e-5 * np.abs(expected).max()

    first = [answer(number) for number in range(distinct)]  # one by one
    with ThreadPoolExecutor(48) as threads:
        concurrent = list(threads.map(lambda number: answer(number % distinct), range(requests)))

    assert len({heatmap.tobytes() for _, _, heatmap in first}) == distinct  # no two maps are equal
    for number, (key, score, heatmap) in enumerate(concurrent):
        expected_key, expected_score, expected_heatmap = first[number % distinct]
        assert key == expected_key
        assert is_same(expected_heatmap, heatmap)
        assert score == pytest.approx(expected_score, abs=1e-5 * np.ptp([score for _, score, _ in first]))


def cancelled_call(address, image, model, after):
    """Send a call and cancel it after some time; return the outcome by name."""
    request = explain_pb2.ExplainRequest(model=model, image=image, methods=[explain_pb2.Method(name="smoothgrad")])
    with grpc.insecure_channel(address) as channel:
        call = explain_pb2_grpc.ExplainServiceStub(channel).Explain.future(request)
        time.sleep(after)
        call.cancel()
        return "Cancelled" if call.cancelled() else "OK"


def random_request(served, client, images, chance, number):
    """Send a request, of the kind that its number has; return the outcome by name."""
    model = ("small", "resnet")[number % 2]
    kind = number // 2 % 10 / 10
    try:
        if kind < 0.1:
            client.explain(b"rubbish", model=model)
        elif kind < 0.2:
            client.explain(images[0], model=model, layers=["nowhere"])
        elif kind < 0.3:
            client.explain(images[0], model=model, methods="smoothgrad", timeout=0.02 * chance.random() + 1e-3)
        elif kind < 0.4:
            return cancelled_call(served.address, images[0], model, 0.05 * chance.random())
        else:
            explain(client, number, images[number % 12], model)
    except camserve.CamserveError as error:
        return type(error).__name__
    return "OK"


def test_mixed_requests_leave_the_models_as_they_were(served, client):
    """Also after errors and cancellations, no hook remains and no parameter has changed."""
    engine = served.pipeline.batcher._workers[0].run.__self__
    before = {name: digest(model.module) for name, model in engine._models.items()}
    images = list(crops(12))
    chance = random.Random(3)

    with ThreadPoolExecutor(24) as threads:
        outcomes = list(threads.map(lambda number: random_request(served, client, images, chance, number), range(60)))

    assert {"OK", "InvalidArgument", "NotFound", "DeadlineExceeded", "Cancelled"} == set(outcomes)
    for name, model in engine._models.items():
        assert hook_count(model.module) == hook_count(model.accelerated.module) == 0
        assert digest(model.module) == before[name] == model.info.digest
        assert not any(p.requires_grad or p.grad is not None for p in model.module.parameters())
        assert not any(part.training for part in model.module.modules())
    wait_until(lambda: served.pipeline.batcher.admitted == 0)


def test_remaining_hook_is_counted(served):
    """Control of the check above: a remaining hook is counted."""
    module = next(iter(served.pipeline.batcher._workers[0].run.__self__._models.values())).module
    with module.register_forward_hook(lambda *_: None):
        assert hook_count(module) == 1


def test_results_of_a_stream_are_in_order(client):
    images = list(crops(4))
    results = list(client.explain_many(images, overlay=None, max_predictions=1000, heatmap=False))
    alone = [client.explain(image, overlay=None, heatmap=False) for image in images[:3]]

    assert len(results) == 4
    for expected, other in zip(alone, results, strict=False):
        assert expected.predictions[0].class_index == other.predictions[0].class_index
        assert expected.predictions[0].score == pytest.approx(other.predictions[0].score, abs=1e-3)


def test_overlay_of_a_rotated_grey_photo_is_upright(client):
    """EXIF orientation 3: viewers rotate the photo by 180 degrees, and so must the overlay."""
    chelsea = Image.open(PHOTOS["chelsea"]).convert("L")
    rotated, exif = chelsea.transpose(Image.Transpose.ROTATE_180), Image.Exif()
    exif[0x0112] = 3
    packed = io.BytesIO()
    rotated.save(packed, "PNG", exif=exif)
    overlay = client.explain(packed.getvalue(), overlay="png", alpha=0.0).explanations[0].image

    assert np.abs(np.asarray(overlay.convert("L"), int) - np.asarray(chelsea, int)).max() <= 1
