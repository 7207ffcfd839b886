"""Models that answer with more than logits of classes: pixels, boxes, embeddings, numbers."""

import copy
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torchvision import models as zoo

from camserve_server import models, targets
from camserve_server.core.errors import ConfigError, FailedPrecondition, InvalidArgument
from camserve_server.core.limits import Limits
from camserve_server.engine import normalise
from camserve_server.engine.values import Row
from camserve_server.imaging.values import Box, Rendering, View
from camserve_server.models.hooks import hook_count
from camserve_server.models.outputs import Outputs
from camserve_server.serving.photos import prepare_photo
from camserve_server.serving.requests import ExplainRequest
from camserve_server.targets import objects_of
from camserve_server.targets.values import (
    ClassTarget,
    DetectionTarget,
    ProbabilityTarget,
    RankTarget,
    SegmentTarget,
    SimilarityTarget,
)
from coloured import Colours, Finder, Pooled, painted
from methods.tools import Toy, call, doubled, error_ratio, exact, explain, inputs, job, noise, run
from support import jpeg, loaded

EXACT = 1e-5


METHODS = ("gradcam", "layercam", "saliency", call("occlusion", window=0.125, stride=0.125))


def leaf(module, layer, image):
    """Run a model on [1,3,H,W]; return its output and a layer's on the graph: the oracle's own hook."""
    kept = []

    def keep(_module, _args, output):
        kept.append(output.detach().requires_grad_())
        return kept[-1].clone()

    with torch.enable_grad(), module.get_submodule(layer).register_forward_hook(keep):
        output = module(image)
    return output, kept[-1]


def oracle(score, activation):
    """Grad-CAM of a score at an activation [1,C,h,w]."""
    (gradient,) = torch.autograd.grad(score, activation, retain_graph=True)
    return (gradient.mean((2, 3), keepdim=True) * activation).sum(1)[0].detach().numpy()


def check(found, *oracles):
    """Compare the score and the map of a row or a finding with those of plain float32 and float64."""
    heatmap = found.maps[0][0] if hasattr(found, "maps") else found.heatmap
    (plain, plain_map), (truth, true_map) = ((float(score.detach()), oracle(score, at)) for score, at in oracles)
    assert error_ratio(found.score, plain, truth) <= 1
    assert error_ratio(heatmap, plain_map, true_map) <= 1


def hottest_inside(heatmap, top, left, side, size=64):
    """The share of a map's hottest tenth, on the pixels, that is inside a square."""
    tensor = torch.from_numpy(np.ascontiguousarray(heatmap))[None, None]
    large = functional.interpolate(tensor, (size, size), mode="bilinear", align_corners=False)[0, 0].numpy()
    hot = large >= np.sort(large.ravel())[-size * size // 10]
    inside = np.zeros_like(hot)
    inside[top : top + side, left : left + side] = True
    return (hot & inside).sum() / hot.sum()


# ------------------------------------------------------------------------------------------------------- segmentation


@pytest.fixture
def colours(plant):
    return plant(Colours, size=64)


@pytest.fixture(scope="module")
def lraspp():
    return loaded("torchvision:lraspp_mobilenet_v3_large?weights=none&size=64")


def test_segmentation_is_detected_and_its_default_layer_precedes_the_classes(colours, lraspp):
    assert (colours.info.task, colours.info.classes, colours.info.default_layer) == ("segment", 3, "smooth")
    assert (lraspp.info.task, lraspp.info.classes, lraspp.info.default_layer) == ("segment", 21, "backbone.16")
    assert lraspp.info.label(8) == "cat"
    assert lraspp.info.preprocess.resize == (64, 64)  # the photo is seen whole


def test_segmentation_predictions_are_sorted_by_area(colours):
    image = painted(red=(8, 8, 16), green=(40, 32, 24))
    (row,) = run(colours, [Row(image, RankTarget(0))], kind="score")
    logits = colours.module(inputs(colours, image))["out"][0]
    winners, probabilities = logits.argmax(0), logits.softmax(0)
    for index in range(3):
        mask = winners == index
        expected = [
            float(mask.double().mean()),
            float(probabilities[index][mask].mean()),
            float(logits[index][mask].mean()),
        ]
        assert row.logits[index].tolist() == pytest.approx(expected, rel=EXACT)
    assert targets.order_of_areas(row.logits, colours.info) == [0, 2, 1]
    named = replace(colours.info, labels=("background", "red", "green"))
    assert targets.order_of_areas(row.logits, named) == [2, 1, 0]


@pytest.mark.parametrize(
    ("name", "box"),
    [
        ("lraspp_mobilenet_v3_large", None),
        ("lraspp_mobilenet_v3_large", Box(20, 10, 41.5, 50)),
        pytest.param("deeplabv3_mobilenet_v3_large", None, marks=pytest.mark.slow),
    ],
)
def test_map_of_a_segment_equals_autograd(name, box):
    model = loaded(f"torchvision:{name}?weights=none&size=64")
    image = noise(1, 64)
    logits = model.module(inputs(model, image))["out"][0]
    index = int(logits.argmax(0).flatten().mode().values)
    mask = logits.argmax(0) == index
    if box:
        mask = torch.zeros_like(mask)
        mask[10:50, 20:42] = True  # the centre of column 41 is at 41.5
        mask[:, 41] = False

    def scored(model):
        output, activation = leaf(model.module, "backbone.16", inputs(model, image))
        return output["out"][0][index][mask].mean(), activation

    (row,) = run(model, [Row(image, SegmentTarget(index, box), (call("gradcam"),))], ["backbone.16"])
    np.testing.assert_array_equal(row.target.mask, mask.numpy())
    check(row, scored(model), scored(exact(model)))


@pytest.mark.parametrize(("colour", "index"), [("red", 1), ("green", 2)])
@pytest.mark.parametrize("method", METHODS, ids=lambda each: getattr(each, "name", each))
def test_map_of_a_segment_is_highest_where_the_class_is(colours, colour, index, method):
    squares = {"red": (8, 32, 24), "green": (32, 8, 24)}
    (explanation,) = explain(colours, painted(**squares), job(colours, [method], [SegmentTarget(index)])).explanations
    assert hottest_inside(explanation.heatmap, *squares[colour]) >= 0.9


def test_copies_use_the_segment_of_the_clean_image(colours):
    image = painted(red=(8, 8, 24))
    (explanation,) = explain(colours, image, job(colours, ["gradcam"], [SegmentTarget(1)])).explanations
    fixed = explanation.target
    other = painted(green=(8, 8, 24))
    (row,) = run(colours, [Row(other, fixed)], kind="score")
    logits = colours.module(inputs(colours, other))["out"][0, 1]
    assert row.target is fixed
    assert row.score == pytest.approx(float(logits[torch.from_numpy(fixed.mask)].mean()), rel=EXACT)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (
            SegmentTarget(2),
            r"sees no class 2 in this image, but class 0, class 1: name the part to explain as a region",
        ),
        (RankTarget(2), r"sees only class 0, class 1 in this image"),
    ],
)
def test_class_missing_in_the_image_is_refused_with_the_present_ones(colours, target, words):
    with pytest.raises(FailedPrecondition, match=words):
        run(colours, [Row(painted(red=(8, 8, 24)), target)], kind="score")


def test_region_smaller_than_a_pixel_is_the_pixel_that_contains_it(colours):
    (row,) = run(colours, [Row(painted(), SegmentTarget(0, Box(10.6, 20.1, 10.9, 20.2)))], kind="score")
    assert np.argwhere(row.target.mask).tolist() == [[20, 10]]


# ---------------------------------------------------------------------------------------------------------- detection


@pytest.fixture
def finder(plant):
    return plant(Finder, size=64)


@pytest.fixture(scope="module")
def ssdlite():
    return loaded("torchvision:ssdlite320_mobilenet_v3_large?weights=none&size=128")


SQUARES = {"red": (4, 36, 24), "green": (40, 4, 16)}


def test_detector_is_detected_and_its_default_layer_feeds_every_scale(finder, ssdlite):
    assert (finder.info.task, finder.info.classes, finder.info.default_layer) == ("detect", 3, "smooth")
    assert (ssdlite.info.task, ssdlite.info.classes) == ("detect", 91)
    assert ssdlite.info.default_layer == "backbone.features.0"
    assert ssdlite.info.label(17) == "cat"


@pytest.mark.slow
def test_default_layer_of_a_detector_is_not_in_its_pyramid():
    info = loaded("torchvision:fasterrcnn_mobilenet_v3_large_320_fpn?weights=none&size=64").info
    assert (info.task, info.classes) == ("detect", 91)
    assert info.default_layer.startswith("backbone.body.")


def test_objects_are_sorted_by_confidence(finder):
    (row,) = run(finder, [Row(painted(**SQUARES), RankTarget(0))], kind="score")
    assert row.logits[:, 0].tolist() == [1, 2]
    assert row.logits[0, 1] > row.logits[1, 1] > 0.5
    assert row.logits[0, 2:].tolist() == pytest.approx([36, 4, 60, 28], abs=3)
    assert row.target == DetectionTarget(1, Box(*row.logits[0, 2:].tolist()), found=True, rank=0)


def test_images_with_different_numbers_of_objects_share_a_batch(finder):
    images = [painted(**SQUARES), painted(red=(8, 8, 16)), painted(green=(8, 8, 16))]
    together = run(finder, [Row(image, RankTarget(0), (call("gradcam"),)) for image in images], ["smooth"])
    for image, row in zip(images, together, strict=True):
        (alone,), (truth,) = (
            run(model, [Row(image, RankTarget(0), (call("gradcam"),))], ["smooth"]) for model in (finder, exact(finder))
        )
        np.testing.assert_array_equal(objects_of(row.logits), objects_of(alone.logits))
        assert row.target == alone.target
        assert error_ratio(row.maps[0][0], alone.maps[0][0], truth.maps[0][0]) <= 1


def detector(name, **options):
    """torchvision's detector as it comes, that finds something whatever its weights."""
    torch.manual_seed(0)
    net = getattr(zoo.detection, name)(weights=None, weights_backbone=None, **options)
    return net.eval().requires_grad_(requires_grad=False)


DETECTORS = {
    "ssdlite320_mobilenet_v3_large": {},
    "fasterrcnn_mobilenet_v3_large_320_fpn": {"box_score_thresh": 0.0, "num_classes": 4},
}


@pytest.mark.parametrize(
    "name",
    ["ssdlite320_mobilenet_v3_large", *(pytest.param(each, marks=pytest.mark.slow) for each in [*DETECTORS][1:])],
)
def test_map_of_a_detection_equals_autograd(plant, ssdlite, name):
    """The oracle is torchvision's detector, that resizes and normalises by itself."""
    theirs = detector(name, **DETECTORS[name])
    if name.startswith("ssdlite"):
        model = ssdlite
        theirs.load_state_dict(model.module.state_dict())
    else:
        model = plant(lambda: copy.deepcopy(theirs), size=128)
    image, layer = noise(2, 128), model.info.default_layer
    theirs.transform.min_size, theirs.transform.max_size = (128,), 128
    theirs.transform.fixed_size = (128, 128) if theirs.transform.fixed_size else None
    pixels = torch.from_numpy(image).permute(2, 0, 1)[None]
    (output,), activation = leaf(theirs, layer, pixels / 255)
    (known,), exactly = leaf(doubled(theirs), layer, pixels.double() / 255)
    for place in (0, 3):
        index, box = int(output["labels"][place]), Box(*output["boxes"][place].tolist())
        (row,) = run(model, [Row(image, DetectionTarget(index, box), (call("gradcam"),))], [layer])
        assert np.abs(np.subtract(_edges(row.target.box), _edges(box))).max() <= 0.01
        apart = (known["boxes"] - output["boxes"][place]).abs().sum(1)
        same = int(torch.where(known["labels"] == index, apart, torch.inf).argmin())
        check(row, (output["scores"][place], activation), (known["scores"][same], exactly))


def _edges(box):
    return box.left, box.top, box.right, box.bottom


@pytest.mark.parametrize(("colour", "index"), [("red", 1), ("green", 2)])
@pytest.mark.parametrize("method", METHODS, ids=lambda each: getattr(each, "name", each))
def test_map_of_a_detection_is_highest_where_the_object_is(finder, colour, index, method):
    squares = {"red": (8, 32, 24), "green": (32, 8, 24)}
    (explanation,) = explain(finder, painted(**squares), job(finder, [method], [DetectionTarget(index)])).explanations
    assert hottest_inside(explanation.heatmap, *squares[colour]) >= 0.9


def test_object_that_best_matches_the_box_is_explained(ssdlite):
    image = noise(3, 128)
    (row,) = run(ssdlite, [Row(image, RankTarget(0))], kind="score")
    objects = objects_of(row.logits)
    index = int(np.bincount(objects[:, 0].astype(int)).argmax())  # of one class there are many
    mine = objects[objects[:, 0] == index]
    assert len(mine) > 2
    for each in mine[:3]:
        box = Box(*(edge + off for edge, off in zip(each[2:].tolist(), (1, -1, 2, 1), strict=True)))
        (result,) = run(ssdlite, [Row(image, DetectionTarget(index, box))], kind="score")
        assert result.score == pytest.approx(each[1], rel=EXACT)
    (surest,) = run(ssdlite, [Row(image, DetectionTarget(index))], kind="score")
    assert surest.score == pytest.approx(mine[0, 1], rel=EXACT)


def test_copy_of_an_image_scores_the_same_object_or_none(finder):
    image = painted(**SQUARES)
    (row,) = run(finder, [Row(image, DetectionTarget(1))], kind="score")
    moved, gone = painted(red=(6, 34, 24)), painted(green=(4, 36, 24))
    elsewhere = painted(red=(40, 4, 24))
    scores = [each.score for each in run(finder, [Row(i, row.target) for i in (moved, gone, elsewhere)], kind="score")]
    assert scores[0] == pytest.approx(row.score, rel=0.05)
    assert scores[1:] == [0.0, 0.0]


def test_copy_without_the_object_has_no_gradient(finder):
    (row,) = run(finder, [Row(painted(**SQUARES), DetectionTarget(1))], kind="score")
    (gone,) = run(finder, [Row(painted(), row.target, (call("gradcam"),))], ["smooth"])
    assert gone.zero_gradient == (True,)
    assert not gone.maps[0][0].any()


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (DetectionTarget(2), "finds no class 2 in this image, but class 1"),
        (DetectionTarget(1, Box(50, 50, 60, 60)), "finds no class 1 that overlaps the box"),
        (RankTarget(1), "finds only 1 objects in this image"),
    ],
)
def test_missing_object_is_refused(finder, target, words):
    with pytest.raises(FailedPrecondition, match=words):
        run(finder, [Row(painted(red=(8, 8, 16)), target)], kind="score")


@pytest.mark.parametrize(
    ("shape", "box", "accepted"),
    [
        ((64, 96), Box(70, 20, 90, 40), True),  # to the right of a square as high as the input
        ((64, 96), Box(10, 50, 20, 60), False),  # below the 32 rows in the middle
        ((96, 64), Box(20, 70, 40, 90), True),
        ((96, 64), Box(50, 10, 60, 20), False),
    ],
)
def test_box_is_refused_if_an_oblong_input_does_not_show_it(finder, shape, box, accepted):
    size = tuple(32 if side == 64 else side for side in shape)
    info = replace(finder.info, preprocess=replace(finder.info.preprocess, size=size, resize=64))
    asked = replace(job(finder, ["gradcam"], [DetectionTarget(1, box)]), model=info)
    request = ExplainRequest(asked, Rendering(), 0, jpeg(np.zeros((*shape, 3), np.uint8)))
    refusal = pytest.raises(InvalidArgument, match="outside of what the model sees")
    with nullcontext() if accepted else refusal:
        list(prepare_photo(request, Limits()))


def test_image_without_objects_is_refused_with_a_reason(finder):
    with pytest.raises(FailedPrecondition, match="finds no object in this image"):
        run(finder, [Row(painted(), RankTarget(0))], kind="score")
    with pytest.raises(FailedPrecondition, match="finds no class 1 in this image, but no object at all"):
        run(finder, [Row(painted(), DetectionTarget(1))], kind="score")


def test_input_size_of_a_detector_is_a_multiple_of_its_strides():
    with pytest.raises(ConfigError, match="size= must be a multiple of 32 for this model, not 100"):
        models.load(models.parse("torchvision:fasterrcnn_mobilenet_v3_large_320_fpn?weights=none&size=100"))


def test_loading_a_detector_keeps_its_thresholds_and_leaves_no_hook(ssdlite):
    assert ssdlite.module.score_thresh == 0.001
    assert hook_count(ssdlite.module) == 0


# -------------------------------------------------------------------------------------------------------------- views

PARTS = {"mirrored": View(mirrored=True), "enlarged": View(scale=2, top=10, left=40), "both": View(True, 1, 2, 10, 40)}


@pytest.mark.parametrize("name", ["colours", "finder"])
def test_mirrored_image_has_the_mirrored_map(name, request):
    model = request.getfixturevalue(name)
    image, layer = painted(**SQUARES), "smooth"
    target = SegmentTarget(1) if name == "colours" else DetectionTarget(1)
    (row,) = run(model, [Row(image, target, (call("gradcam"),))], [layer])
    (flipped,) = run(model, [Row(image, row.target, (call("gradcam"),), views=(View(mirrored=True),))], [layer])
    (there,) = run(model, [Row(np.ascontiguousarray(image[:, ::-1]), target, (call("gradcam"),))], [layer])
    assert flipped.target is row.target
    (truth,) = run(exact(model), [Row(np.ascontiguousarray(image[:, ::-1]), target, (call("gradcam"),))], [layer])
    assert flipped.score == pytest.approx(there.score, rel=EXACT)
    assert error_ratio(flipped.maps[0][0], there.maps[0][0], truth.maps[0][0]) <= 1


@pytest.mark.parametrize("view", PARTS.values(), ids=PARTS)
def test_region_of_an_image_is_the_same_region_in_its_view(view):
    """The oracle enlarges and cuts a picture of the part."""
    picture = torch.from_numpy(painted(red=(12, 24, 16))).permute(2, 0, 1)[0:1] / 255
    large = functional.interpolate(picture[None], scale_factor=view.scale, mode="nearest")[0]
    cut = large[:, view.top : view.top + 64, view.left : view.left + 64]
    cut = (cut.flip(-1) if view.mirrored else cut)[0].numpy() > 0.5
    mask = picture[0].numpy() > 0.5
    segment = targets.seen_in(SegmentTarget(1, mask=mask), [view], (64, 64))
    detection = targets.seen_in(DetectionTarget(1, Box(24, 12, 40, 28), found=True), [view], (64, 64))
    np.testing.assert_array_equal(segment.mask, cut)
    rows, columns = np.nonzero(cut)
    edges = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
    clipped = np.clip(_edges(detection.box), 0, 64)
    assert clipped.tolist() == list(edges)


def test_view_without_the_region_has_a_score_of_zero(colours):
    (row,) = run(colours, [Row(painted(red=(4, 4, 16)), SegmentTarget(1))], kind="score")
    (away,) = run(
        colours,
        [Row(painted(red=(4, 4, 16)), row.target, (call("gradcam"),), views=(View(scale=2, top=60, left=60),))],
        ["smooth"],
    )
    assert (away.score, away.zero_gradient) == (0.0, (True,))


def test_targets_without_a_position_are_the_same_in_every_view():
    assert targets.seen_in(ClassTarget(3), [View(mirrored=True)], (8, 8)) == ClassTarget(3)


# --------------------------------------------------------------------------------------------------------- likeness


def compared(model, first, second, method="gradcam", layers=None):
    """Explain what makes the first image like the second."""
    return explain(model, first, job(model, [method], [SimilarityTarget(image=second)], layers)).explanations[0]


HEADLESS = "timm:test_resnet?weights=none&classes=0&size=64"


def test_model_without_a_head_returns_an_embedding():
    info = loaded(HEADLESS).info
    assert (info.task, info.classes, info.embedding, info.labels) == ("embed", 96, "", ())


def test_similarity_map_equals_autograd_for_a_model_without_a_head():
    model = loaded(HEADLESS)
    first, second = noise(4, 64), noise(5, 64)

    def cosine(model):
        output, activation = leaf(model.module, "layer4", inputs(model, first))
        other = model.module(inputs(model, second))
        return (output[0] @ other[0]) / (output[0].norm() * other[0].norm()), activation

    check(compared(model, first, second), cosine(model), cosine(exact(model)))


def test_similarity_map_equals_autograd_of_the_penultimate_features(resnet):
    first, second = noise(6, 64), noise(7, 64)

    def cosine(model):
        headless = copy.deepcopy(model.module)
        headless.fc = nn.Identity()
        output, activation = leaf(headless, "layer4", inputs(model, first))
        return functional.cosine_similarity(output, headless(inputs(model, second)))[0], activation

    assert resnet.info.embedding == "fc"
    check(compared(resnet, first, second), cosine(resnet), cosine(exact(resnet)))
    assert hook_count(resnet.module) == 0


def test_similarity_of_an_image_to_itself_is_one(resnet):
    result = compared(resnet, noise(8, 64), noise(8, 64))
    assert result.score == pytest.approx(1, abs=1e-6)


def test_similarity_map_is_highest_where_the_images_agree(plant):
    """The embedding is how red and how green an image is; the other image is red."""
    model = plant(Pooled, size=64, task="embed")
    squares = {"red": (8, 32, 24), "green": (32, 8, 24)}
    result = compared(model, painted(**squares), painted(red=(0, 0, 64)), layers=["smooth"])
    assert hottest_inside(result.heatmap, *squares["red"]) >= 0.9


def test_similarity_target_costs_one_more_row(resnet):
    asked = job(resnet, ["gradcam"], [SimilarityTarget(image=noise(1, 64)), ClassTarget(1)])
    batches = []
    explain(resnet, noise(2, 64), asked, batches=batches)
    assert asked.rows == sum(rows for _, rows in batches) == 3


def test_embedding_is_the_input_of_the_last_linear_layer(plant):
    tail = nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 5)  # both have an output for each class
    model = plant(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), *tail))
    assert model.info.embedding == "5"


def test_model_without_a_final_linear_layer_has_no_embedding(plant):
    model = plant(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    assert model.info.embedding == ""
    with pytest.raises(FailedPrecondition, match="planted gives no embedding"):
        run(model, [Row(noise(1, 16), SimilarityTarget())], kind="score")


# ------------------------------------------------------------------------------------------------ second derivatives


def test_score_that_is_linear_in_a_layer_has_no_curvature(colours):
    image = painted(red=(8, 32, 24), green=(32, 8, 24))
    asked = job(colours, ["gradcam", "shapleycam"], [SegmentTarget(1)])
    (plain, bent), (truth, _) = (explain(model, image, asked).explanations for model in (colours, exact(colours)))
    assert error_ratio(bent.heatmap, plain.heatmap, truth.heatmap) <= 1


def test_model_without_second_derivatives_is_refused_with_a_reason(plant):
    model = plant(lambda: Toy(lambda net, seen: functional.hardsigmoid(net.layer(seen))))
    with pytest.raises(FailedPrecondition, match=r"cannot be differentiated twice after this layer: .*hardsig"):
        explain(model, noise(1, 16), job(model, ["shapleycam"], [ClassTarget(1)], ["conv"]))


# ------------------------------------------------------------------------------------------ classes apart and numbers


@pytest.mark.parametrize("task", ["multilabel", "regress"])
def test_undetectable_task_is_the_declared_one(plant, task):
    model = plant(Toy, task=task)
    assert (model.info.task, model.info.classes, model.info.embedding) == (task, 5, "head")
    (row,) = run(model, [Row(noise(9, 16), RankTarget(0), (call("gradcam"),))], ["conv"])
    assert row.target == ClassTarget(int(row.logits.argmax()))
    assert row.score == pytest.approx(row.logits.max())


def test_probability_of_a_class_is_explained(plant):
    model = plant(Toy, task="multilabel")
    result = explain(
        model, noise(9, 16), job(model, ["gradcam"], [ProbabilityTarget(2, apart=True)], ["conv"])
    ).explanations[0]
    outputs = Outputs(model.info, model.module(normalise(torch.from_numpy(noise(9, 16))[None], model.info.preprocess)))
    assert result.score == pytest.approx(float(outputs.values[0, 2].sigmoid()), rel=EXACT)


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("task=detect", r"it is not a detector: it returns a tensor \[1, 5\], not boxes, labels and scores"),
        (
            "task=segment",
            r"it is not a segmentation model: it returns a tensor \[1, 5\], not \[batch, classes, h, w",
        ),
    ],
)
def test_model_whose_output_contradicts_its_declared_task_is_refused(plant, option, words):
    with pytest.raises(ConfigError, match=words):
        plant(Toy, task=option.partition("=")[2])


def test_output_without_finite_numbers_fails_only_its_row(plant):
    class Fickle(Toy):
        def forward(self, image):
            return "nothing" if image.mean() > 1 else super().forward(image)

    model = plant(Fickle)
    with pytest.raises(FailedPrecondition, match="the model returns no tensor of numbers"):
        run(model, [Row(np.full((16, 16, 3), 255, np.uint8), RankTarget(0))], kind="score")


@pytest.mark.parametrize(("factory", "task"), [(Colours, "classify"), (Finder, "multilabel")])
def test_model_declared_as_a_classifier_must_return_classes(plant, factory, task):
    with pytest.raises(ConfigError, match=r"it is not a classifier: it returns a tensor .*, not \[batch, class"):
        plant(factory, size=64, task=task)


def test_detector_without_its_number_of_classes_is_refused_with_a_hint(plant, tmp_path):
    class Silent(Finder):
        num_classes = None

    words = tmp_path / "words.txt"
    words.write_text("background\nred\ngreen\n")
    with pytest.raises(ConfigError, match="its number of classes is unknown: name them with labels=PATH"):
        plant(Silent, size=64)
    assert plant(Silent, size=64, labels=str(words)).info.label(2) == "green"


def test_detector_without_detections_in_noise_is_refused(plant):
    class Blind(Finder):
        def forward(self, images):
            return super().forward([image * 0 - 2 for image in images])

    with pytest.raises(ConfigError, match="it finds no object in an image of noise"):
        plant(Blind, size=64)


@pytest.mark.parametrize("shape", [(3,), (1, 2, 3)])
def test_scores_of_all_classes_in_another_shape_are_refused_with_theirs(plant, shape):
    class Confused(Finder):
        def forward(self, images):
            return [{**objects, "class_scores": torch.zeros(shape)} for objects in super().forward(images)]

    with pytest.raises(ConfigError, match=r"its class_scores are \[.*3\] and not \[objects, classes\]"):
        plant(Confused, size=64)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("timm:resnet18?task=multi", 'task must be one of .*did you mean "multilabel"'),
        (
            "torchvision:resnet18?weights=none&classes=0",
            "classes=0 replaces the head by an embedding, for timm models only",
        ),
        ("timm:resnet18?weights=none&classes=0&task=segment", "classes=0 replaces the head"),
    ],
)
def test_meaningless_option_is_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        models.parse(text)
