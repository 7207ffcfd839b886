"""Segmentation models of transformers: the maps of classes and the instances of transformers itself, and exact maps."""

import itertools
import shutil
from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image

import camserve
import needs
from camserve_server import models
from camserve_server.engine import Engine, normalise
from camserve_server.engine.values import Row
from camserve_server.imaging import fitting
from camserve_server.models import parse
from camserve_server.models.huggingface import heads
from camserve_server.models.values import Pass
from camserve_server.targets.values import RankTarget, SegmentTarget
from methods.tools import call, error_ratio
from models.lazy_folders import Folders, Servers
from support import PHOTOS

hf = pytest.importorskip("transformers", reason=needs.TRANSFORMERS)

from docs.generate import small_transformers  # noqa: E402 -- after the check for transformers
from transformers.models.mask2former.modeling_mask2former import (  # noqa: E402
    Mask2FormerForUniversalSegmentationOutput,
)

pytestmark = pytest.mark.slow

SIMILAR = ("mobilevit_v2", "mobilenet_v2", "upernet", "data2vec")
"""Families of the same code as others here. The script of the table of architectures explains them."""
PLAIN = tuple(name for name in small_transformers.SEGMENTERS if name not in SIMILAR)
UNIVERSAL = tuple(small_transformers.UNIVERSAL)
FAMILIES = (*PLAIN, *UNIVERSAL)
BLUE_FIRST = ("mobilevit",)
FAST = ("segformer", "mask2former")
"""One family of each kind: of plain logits, and of queries."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a folder of each family, by name."""
    return Folders(small_transformers.save, tmp_path_factory.mktemp("segmenters"))


@pytest.fixture(scope="module")
def servers():
    with Servers() as running:
        yield running


@pytest.fixture(scope="module")
def served(folders, servers):
    """Return a function that returns the address of a server with the model of a spec, which it starts once."""
    return lambda family, options="": servers.address(f"hf:{folders[family]}{options}")


@pytest.fixture(scope="module")
def loaded(folders, servers):
    """Return a function that returns the model of a family's server."""
    return lambda family: servers.model(f"hf:{folders[family]}")


def photo(name):
    return np.asarray(Image.open(PHOTOS[name]).convert("RGB"))


@cache
def transformers_model(family, folder, precision=torch.float32):
    """Return transformers' own model of a folder; tests share it."""
    kind = hf.AutoModelForUniversalSegmentation if family in UNIVERSAL else hf.AutoModelForSemanticSegmentation
    return kind.from_pretrained(folder, dtype=precision, attn_implementation="eager").eval()


def output_of_transformers(family, folder, pixels):
    """Return the processor of a family, and its model's output for a photo."""
    processor = hf.AutoImageProcessor.from_pretrained(folder)
    prepared = processor(images=Image.fromarray(pixels), return_tensors="pt")
    with torch.no_grad():
        return processor, transformers_model(family, folder)(**prepared)


def class_map_of_transformers(family, folder, pixels):
    processor, output = output_of_transformers(family, folder, pixels)
    return processor.post_process_semantic_segmentation(output)[0].numpy()


PHOTO_OF = dict(zip(FAMILIES, itertools.cycle(["chelsea", "rocket"]), strict=False))


@pytest.mark.parametrize("family", FAMILIES)
def test_class_of_each_pixel_is_that_of_transformers(family, folders, served):
    name = PHOTO_OF[family]
    expected = class_map_of_transformers(family, folders[family], photo(name))
    with camserve.Client(served(family)) as client:
        result = client.explain(PHOTOS[name], model=family, class_map=True, overlay="png")

    assert result.class_map.shape == expected.shape
    assert (result.class_map != expected).mean() < 0.002  # cells in which two classes are nearly equal
    shares = {p.class_index: p.area for p in result.predictions}
    assert shares == pytest.approx({int(i): (expected == i).mean() for i in np.unique(expected)}, abs=0.002)
    (explanation,) = result.explanations
    assert explanation.target.label == result.predictions[0].label
    assert explanation.overlay
    assert explanation.verdict != "ZERO_GRADIENT"


@pytest.mark.parametrize(
    ("family", "against"),
    [*((family, None) for family in FAMILIES), ("segformer", 1), ("maskformer", 2)],
)
def test_map_of_the_largest_class_equals_that_of_autograd(family, against, folders, loaded):
    model = loaded(family)
    image = fitting.fit(photo("coffee"), model.info.preprocess)[0]
    largest = int(np.bincount(row_winners(model, image).ravel()).argmax())
    other = None if against is None else (largest + against) % 5
    target = RankTarget(0) if other is None else SegmentTarget(largest, against=other)
    pass_ = Pass(model.info.name, "cam", image.shape[:2], (model.info.default_layer,))
    (row,) = Engine({model.info.name: model}).run(pass_, [Row(image, target, (call("gradcam"),))])

    inputs = normalise(torch.from_numpy(image[None]), model.info.preprocess)
    inputs = inputs.flip(1) if family in BLUE_FIRST else inputs
    plain, truth = (
        gradcam_by_hand(family, folders[family], model.info.default_layer, inputs.to(precision), row.target)
        for precision in (torch.float32, torch.float64)
    )
    assert (row.target.index, row.target.against) == (largest, other)
    assert error_ratio(row.maps[0][0], plain, truth) <= 1


def row_winners(model, image):
    row = Row(image, RankTarget(0), class_map=True)
    (result,) = Engine({model.info.name: model}).run(Pass(model.info.name, "score", image.shape[:2]), [row])
    return result.class_map


def gradcam_by_hand(family, folder, layer, image, target):
    """Compute the map of a class over its own part by autograd and the paper's formula, on transformers' own model."""
    network, captured = transformers_model(family, folder, image.dtype), []

    def keep(_module, _args, output):
        captured.append(output)
        output.retain_grad()

    with network.get_submodule(layer).register_forward_hook(keep):
        output = network(image.clone().requires_grad_())
    if family in UNIVERSAL:
        masks, classes = output.masks_queries_logits, output.class_queries_logits
        if family == "mask2former":
            masks = torch.nn.functional.interpolate(masks, (384, 384), mode="bilinear", align_corners=False)
        scores = torch.einsum("qc,qhw->chw", classes[0].softmax(-1)[:, :-1], masks[0].sigmoid()).log()
    else:
        scores = output.logits[0]
    compared = 0 if target.against is None else scores[target.against]
    (scores[target.index] - compared)[torch.from_numpy(target.mask)].mean().backward()
    gradients = captured[-1].grad
    return (gradients.mean((2, 3), keepdim=True) * captured[-1].detach()).sum(1)[0]


def test_objects_of_masks_are_those_of_transformers():
    generator, size = torch.Generator().manual_seed(0), (96, 160)
    coarse = torch.randn((1, 12, 3, 5), generator=generator) - 1
    output = Mask2FormerForUniversalSegmentationOutput(
        class_queries_logits=torch.randn((1, 12, 6), generator=generator),
        masks_queries_logits=torch.nn.functional.interpolate(coarse, (24, 40), mode="bilinear"),
    )
    processor = hf.Mask2FormerImageProcessor()
    (expected,) = processor.post_process_instance_segmentation(output, threshold=0, return_binary_maps=True)
    (found,) = heads.instances(processor)(output, size)

    theirs = []
    for segment, mask in zip(expected["segments_info"], expected["segmentation"], strict=True):
        rows, columns = (np.flatnonzero(mask.any(axis).numpy()) for axis in (1, 0))
        edges = np.divide([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1], [*mask.shape[::-1]] * 2)
        theirs.append([segment["score"], segment["label_id"], *edges * [160, 96, 160, 96]])
    ours = torch.cat([found["scores"][:, None], found["labels"][:, None], found["boxes"]], 1).tolist()
    assert len(theirs) > 6
    np.testing.assert_allclose(sorted(ours), sorted(theirs), atol=1e-5)


@pytest.mark.parametrize(("family", "name"), [("mask2former", "chelsea"), ("maskformer", "rocket")])
def test_instances_are_those_of_transformers_with_boxes_around_their_masks(family, name, folders, served):
    processor, output = output_of_transformers(family, folders[family], photo(name))
    (expected,) = processor.post_process_instance_segmentation(output, threshold=0, return_binary_maps=True)
    with camserve.Client(served(family, "?task=detect")) as client:
        result = client.explain(PHOTOS[name], model=family, max_predictions=100, overlay="png")

    found = {(p.class_index, round(p.score, 4)): p.box for p in result.predictions}
    info = [(segment["label_id"], round(segment["score"], 4)) for segment in expected["segments_info"]]
    height, width = photo(name).shape[:2]
    assert [p.score for p in result.predictions] == sorted((p.score for p in result.predictions), reverse=True)
    assert len(result.predictions) == len(info)
    assert {label for label, _ in found} == {label for label, _ in info}
    for (label, score), mask in zip(info, expected["segmentation"], strict=True):
        box = next(box for key, box in found.items() if key[0] == label and abs(key[1] - score) < 2e-4)
        rows, columns = (np.flatnonzero(mask.any(axis).numpy()) for axis in (1, 0))
        cell = max(height / mask.shape[0], width / mask.shape[1])
        assert box.top == pytest.approx(rows[0] * height / mask.shape[0], abs=1.5 * cell)
        assert box.bottom == pytest.approx((rows[-1] + 1) * height / mask.shape[0], abs=1.5 * cell)
        assert box.left == pytest.approx(columns[0] * width / mask.shape[1], abs=1.5 * cell)
        assert box.right == pytest.approx((columns[-1] + 1) * width / mask.shape[1], abs=1.5 * cell)
    assert result.explanations[0].target.label == result.predictions[0].label
    assert result.explanations[0].overlay


@pytest.mark.parametrize("family", FAMILIES)
def test_region_and_class_name_a_segment_of_any_family(family, served):
    box = camserve.Box(100, 50, 220, 160)
    with camserve.Client(served(family)) as client:
        whole, part = client.explain(
            PHOTOS["chelsea"], model=family, methods=["hirescam"], heatmap=True,
            targets=[camserve.segment("thing 1", camserve.Box(0, 0, 451, 300)), camserve.segment("thing 1", box)],
        ).explanations  # fmt: skip
    assert whole.target.label == part.target.label == "thing 1"
    assert not np.array_equal(whole.heatmap, part.heatmap)


@pytest.mark.parametrize("family", FAST)
def test_contrast_names_both_classes_and_replays(family, served):
    with camserve.Client(served(family)) as client:
        predictions = client.explain(PHOTOS["chelsea"], model=family, max_predictions=5).predictions
        why, why_not = predictions[0].label, f"thing {(predictions[0].class_index + 1) % 5}"
        (explanation,) = client.explain(
            PHOTOS["chelsea"], model=family, targets=[camserve.contrast(why, why_not)]
        ).explanations
        replay = client.replay(explanation.receipt, PHOTOS["chelsea"])

    assert (explanation.target.label, explanation.contrast.label) == (why, why_not)
    assert replay.same, replay.differences


def test_probability_of_a_query_based_class_is_its_share_of_all_scores(folders, served):
    """The logarithm of a score serves as logit, so that the softmax of the classes gives their shares."""
    family = "mask2former"
    processor, output = output_of_transformers(family, folders[family], photo("chelsea"))
    (part,) = processor.post_process_semantic_segmentation(output, return_segmentation_scores=True)
    shares = part.segmentation_scores / part.segmentation_scores.sum(0)
    winner = part.segmentation.flatten().bincount().argmax()
    with camserve.Client(served(family)) as client:
        first = client.explain(PHOTOS["chelsea"], model=family).predictions[0]

    assert first.class_index == winner
    assert first.probability == pytest.approx(float(shares[winner][part.segmentation == winner].mean()), abs=1e-3)


def test_model_that_takes_blue_first_gets_the_photo_in_that_order(folders, tmp_path):
    """MobileViT takes blue first, as its processor says. A smaller network with that processor does too."""
    folder, side = shutil.copytree(folders["segformer"], tmp_path / "blue"), {"height": 64, "width": 64}
    processor = hf.MobileViTImageProcessor(size={"shortest_edge": 72}, crop_size=side)
    processor.save_pretrained(folder)
    model = models.load(parse(f"hf:{folder}"))
    pixels = photo("chelsea")
    prepared = processor(images=Image.fromarray(pixels), return_tensors="pt")["pixel_values"]
    image = fitting.fit(pixels, model.info.preprocess)[0]
    inputs = normalise(torch.from_numpy(image[None]), model.info.preprocess)

    assert (inputs.flip(1) - prepared).abs().max() < 2 / 255
    with torch.no_grad():
        ours = model.module(inputs).logits
        theirs = transformers_model("segformer", folders["segformer"])(inputs.flip(1)).logits
    torch.testing.assert_close(ours, theirs)
