"""examples/yolo.py: the objects are those of Ultralytics' own predict, and the maps those of autograd on its network.

The networks are built from Ultralytics' own YAML configurations, with random weights. Such weights give every anchor
the same score. So the batch norms are calibrated with noise, and the last layers of the scores are drawn again.
"""

import copy
import importlib.util
import io
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from skimage import data
from torch import nn

import camserve
import needs
from camserve_server import models, targets
from camserve_server.engine.values import Row
from camserve_server.imaging import fitting
from camserve_server.imaging.values import Box
from camserve_server.targets import objects_of
from camserve_server.targets.values import DetectionTarget, RankTarget
from methods.tools import call, error_ratio, exact, explain, gap, inputs, job, run
from models.test_pyramid import check_sum
from models.test_tasks import check, leaf
from support import serving

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ultralytics") is None, reason=needs.ULTRALYTICS)

EXAMPLES = Path(__file__).parents[2] / "examples"
KINDS = ("yolov5n", "yolov8n", "yolo11n")
SIZE = 320
WIDE = data.rocket()[:360, :480]  # a multiple of the input: no rounding of the scale
TALL = data.chelsea()[:, :200]
LAYERS = ["network.model.4", "network.model.9"]


@pytest.fixture(scope="module", autouse=True)
def example():
    """Make examples/yolo.py importable, as in the folder that it is served from."""
    sys.path.insert(0, str(EXAMPLES))
    yield
    sys.path.remove(str(EXAMPLES))


def random_network(kind):
    from ultralytics import YOLO  # noqa: PLC0415 -- only where it is installed

    torch.manual_seed(0)
    built = YOLO(f"{kind}.yaml")
    network = built.model
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    smooth = nn.functional.interpolate(torch.rand(2, 3, 20, 20), (SIZE, SIZE), mode="bicubic")
    with torch.no_grad():
        network.train()(torch.cat([smooth, 2 * torch.rand(2, 3, SIZE, SIZE) - 1]))
    for scale in network.model[-1].cv3:
        nn.init.normal_(scale[-1].weight, 0, 0.08)
        nn.init.constant_(scale[-1].bias, -1.42)
    return built


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return the file of each kind, as Ultralytics saves it."""
    folder = tmp_path_factory.mktemp("yolo")
    paths = {kind: str(folder / f"random_{kind[-3:]}.pt") for kind in KINDS}
    for kind, path in paths.items():
        random_network(kind).save(path)
    return paths


@pytest.fixture(params=KINDS)
def file(request, files, monkeypatch):
    monkeypatch.setenv("YOLO_MODEL", files[request.param])
    return files[request.param]


@pytest.fixture
def model(file):  # noqa: ARG001 -- it names the model
    return models.load(models.parse(f"yolo:build?size={SIZE}"))


def predicted(file, photo):
    """Return the boxes, scores and classes of Ultralytics' predict."""
    from ultralytics import YOLO  # noqa: PLC0415 -- only where it is installed

    (result,) = YOLO(file).predict(np.ascontiguousarray(photo[..., ::-1]), imgsz=SIZE, verbose=False, device="cpu")
    return tuple(values.numpy() for values in (result.boxes.xyxy, result.boxes.conf, result.boxes.cls))


def sized(model, photo):
    """Return the input of a photo, uint8 [h, w, 3]; the part of the photo in it; and the model with that size."""
    image, seen = fitting.make_input(photo, b"", model.info.preprocess)
    return image, seen, replace(model, info=model.info.at_size(image.shape[:2]))


def found(model, photo):
    """Return the boxes in the photo, the scores and the classes of a model's objects."""
    image, seen, model = sized(model, photo)
    (row,) = run(model, [Row(image, RankTarget(0))], kind="score")
    return objects_in(row.logits, model, seen, photo)


def objects_in(values, model, seen, photo):
    objects = objects_of(values)
    height, width = photo.shape[:2]
    corners = [targets.carried(Box(*each[2:]), targets.whole(model.info.preprocess.size), seen) for each in objects]
    edges = np.array([[box.left, box.top, box.right, box.bottom] for box in corners]).reshape(-1, 4)
    return edges.clip(0, [width, height, width, height]), objects[:, 1], objects[:, 0]


@pytest.mark.parametrize("photo", [WIDE, TALL], ids=["wide", "tall"])
def test_input_has_the_bytes_of_ultralytics_letterbox(model, photo):
    from ultralytics.data.augment import LetterBox  # noqa: PLC0415 -- only where it is installed

    image, _, _ = sized(model, photo)

    np.testing.assert_array_equal(image, LetterBox(SIZE, auto=True, stride=32)(image=photo))
    assert image.shape[:2] == {480: (256, 320), 200: (320, 224)}[photo.shape[1]]


def test_objects_are_those_of_ultralytics_predict(file, model):
    ours, theirs, truth = found(model, WIDE), predicted(file, WIDE), found(exact(model), WIDE)

    assert 5 < len(theirs[1]) < 300
    np.testing.assert_array_equal(ours[2], theirs[2])
    for mine, plain, true in zip(ours[:2], theirs[:2], truth[:2], strict=True):
        assert error_ratio(mine, plain, true) <= 1


def test_contrast_is_the_difference_of_the_scores_in_two_classes(model):
    image, _, model = sized(model, WIDE)
    (best,) = run(model, [Row(image, RankTarget(0))], kind="score")
    why, why_not = best.target.index, (best.target.index + 1) % 80
    (contrast,) = run(model, [Row(image, DetectionTarget(why, against=why_not))], kind="score")

    _, raw = model.module.network(inputs(model, image))
    scores = raw["scores"].sigmoid()[0]
    anchor = scores[why].argmax()
    assert contrast.score == pytest.approx(float(scores[why, anchor] - scores[why_not, anchor]), rel=1e-3)
    assert contrast.target.box == best.target.box


def test_objects_of_a_photo_with_rounded_sides_are_those_of_predict(file, model):
    """200 pixels become 213. Ultralytics divides the boxes by 1.0667 all the same, and camserve by 213 / 200."""
    ours, theirs = found(model, TALL), predicted(file, TALL)

    np.testing.assert_array_equal(ours[2], theirs[2])
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-3)
    assert np.abs(ours[0] - theirs[0]).max() < 0.5


def scored(model, image, name):
    """Return the highest score of all anchors of Ultralytics' own network, and the output of a layer, on the graph."""
    network = copy.deepcopy(model.module.network)
    output, activation = leaf(network, name.removeprefix("network."), inputs(model, image))
    return output[0][0, 4:].max(), activation


@pytest.mark.parametrize("photo", [WIDE, TALL], ids=["wide", "tall"])
def test_map_of_the_most_certain_object_equals_autograd(model, photo):
    image, _, model = sized(model, photo)
    for name in (*LAYERS, model.info.default_layer):
        (row,) = run(model, [Row(image, RankTarget(0), (call("gradcam"),))], [name])
        check(row, *(scored(each, image, name) for each in (model, exact(model))))


def test_score_depends_on_no_scale_but_its_own_and_those_before(model):
    """A planted fault of an explanation: the coarsest grid shows nothing of an object of a finer one."""
    image, _, model = sized(model, WIDE)
    scales = [f"network.model.{index}" for index in model.module.network.model[-1].f]
    (row,) = run(model, [Row(image, RankTarget(0), (call("gradcam"),))], scales)
    expected = []
    for name in scales:
        score, activation = scored(model, image, name)
        (gradient,) = torch.autograd.grad(score, activation, allow_unused=True)
        expected.append(gradient is None or not gradient.any())

    assert list(row.zero_gradient) == expected
    assert not expected[0]


@pytest.mark.parametrize("method", ["gradcam", "layercam"])
def test_map_of_all_scales_equals_autograds_sum(model, method):
    image, _, model = sized(model, WIDE)
    check_sum(model, method, image)


def test_gradient_at_the_input_equals_autograd(model):
    image, _, model = sized(model, WIDE)

    def theirs(model):
        picture = inputs(model, image).requires_grad_()
        score = copy.deepcopy(model.module.network)(picture)[0][0, 4:].max()
        return torch.autograd.grad(score, picture)[0][0].abs().amax(0)

    (explanation,) = explain(model, image, job(model, ["saliency"], [RankTarget(0)])).explanations
    assert error_ratio(explanation.heatmap, theirs(model), theirs(exact(model))) <= 1


def test_other_objects_of_a_batch_do_not_change_a_map(model):
    image, _, model = sized(model, WIDE)
    other = np.ascontiguousarray(image[:, ::-1])
    rows = [Row(photo, RankTarget(rank), (call("gradcam"),)) for photo in (image, other) for rank in (0, 3)]
    together = run(model, rows, [model.info.default_layer])
    for row, result in zip(rows, together, strict=True):
        (alone,) = run(model, [row], [model.info.default_layer])
        assert result.target.index == alone.target.index
        assert gap(result.maps[0][0], alone.maps[0][0]) < 1e-4


def test_pyramid_has_the_scales_and_the_default_layer_is_the_last_before_all(model):
    scales = model.module.network.model[-1].f

    assert (model.info.task, model.info.classes, model.info.label(0)) == ("detect", 80, "0")
    assert model.info.pyramid == tuple(f"network.model.{scale}" for scale in scales)
    assert model.info.default_layer == f"network.model.{scales[0]}"
    assert all(model.info.layers[name].layout for name in LAYERS)


def test_network_with_plain_random_weights_is_served(monkeypatch):
    """All its scores are below the threshold: the layers are probed without it."""
    monkeypatch.setenv("YOLO_MODEL", "yolo11n.yaml")
    torch.manual_seed(0)
    plain = models.load(models.parse("yolo:build?size=64"))

    assert plain.info.default_layer == "network.model.16"
    assert plain.info.pyramid == ("network.model.16", "network.model.19", "network.model.22")


def test_server_explains_an_object_with_no_layer_and_no_target_named(file):
    photo = io.BytesIO()
    Image.fromarray(WIDE).save(photo, "PNG")
    theirs = predicted(file, WIDE)
    with (
        serving(models=(f"yolo:build?size={SIZE}",), threads=1) as served,
        camserve.Client(served.address, retries=0, timeout=120) as client,
    ):
        result = client.explain(photo.getvalue(), methods=["gradcam", ("drise", {"samples": 8})])
        gradcam, drise = result.explanations
        smooth = client.explain(photo.getvalue(), methods=camserve.Method("gradcam", augmentation_smoothing=True))
        named = client.explain(photo.getvalue(), targets=gradcam.resolved).explanations[0]
        replay = client.replay(gradcam.receipt, photo.getvalue())
        readings = client.evaluate(photo.getvalue(), metrics="deletion").readings

    box = result.predictions[0].box
    edges = np.clip([box.left, box.top, box.right, box.bottom], 0, [480, 360] * 2)
    assert (result.photo.width, result.photo.height) == (480, 360)
    assert edges == pytest.approx(theirs[0][0], abs=0.01)
    assert result.predictions[0].score == pytest.approx(theirs[1][0], rel=1e-4)
    assert (gradcam.layer, gradcam.verdict.value in ("OK", "ALL_NEGATIVE")) == ("pyramid", True)
    assert drise.heatmap.shape == (256, 320)
    assert np.ptp(drise.heatmap) > 0
    assert np.ptp(smooth.explanations[0].heatmap) > 0
    np.testing.assert_array_equal(named.heatmap, gradcam.heatmap)
    assert replay.same, replay.differences
    assert np.isfinite(readings[0].value)
