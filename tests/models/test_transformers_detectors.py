"""Object detectors of transformers: the objects, boxes and scores of transformers itself, and exact maps."""

import io
import itertools
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image

import camserve
import needs
from camserve_server import models, targets
from camserve_server.engine.values import Row
from camserve_server.imaging import fitting
from camserve_server.imaging.values import View
from camserve_server.models import parse
from camserve_server.models.grid import to_grid
from camserve_server.models.values import Pass
from camserve_server.targets.values import DetectionTarget, RankTarget
from methods.tools import call, error_ratio
from models.lazy_folders import Folders, Servers, marked_except
from support import PHOTOS

hf = pytest.importorskip("transformers", reason=needs.TRANSFORMERS)

from docs.generate import small_transformers  # noqa: E402
from transformers.models.detr.modeling_detr import DetrObjectDetectionOutput  # noqa: E402

from camserve_server.engine import Engine, normalise  # noqa: E402 -- after the check for transformers
from camserve_server.models.huggingface import heads  # noqa: E402

SIMILAR = ("table_transformer", "conditional_detr", "dab_detr", "lw_detr", "rt_detr_v2", "d_fine")
"""Families of the same code as others here. The script of the table of architectures explains them."""
FAMILIES = tuple(name for name in small_transformers.DETECTORS if name not in SIMILAR)
FAST = ("detr", "rf_detr", "yolos")
"""Families whose outputs and grids differ most: softmax or sigmoid, convolutions, tokens or windows of them."""
SERVED = ("detr", "yolos")
"""Those of the tests through a server."""
DIFFERENT = ("detr", "rt_detr", "yolos", "rf_detr")
QUERIES = small_transformers.QUERIES


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a folder of each family, by name."""
    return Folders(small_transformers.save, tmp_path_factory.mktemp("detectors"))


@pytest.fixture(scope="module")
def servers():
    with Servers() as running:
        yield running


@pytest.fixture(scope="module")
def served(folders, servers):
    """Return a function that returns the address of a server with a family, which it starts once."""
    return lambda family: servers.address(f"hf:{folders[family]}")


@pytest.fixture(scope="module")
def loaded(folders, servers):
    """Return a function that returns the model of a family's server."""
    return lambda family: servers.model(f"hf:{folders[family]}")


def photo(name, portrait=False):
    """Return a photo, uint8 [h,w,3], upright or on its side."""
    pixels = np.asarray(Image.open(PHOTOS[name]).convert("RGB"))
    return np.ascontiguousarray(np.rot90(pixels)) if portrait else pixels


def fitted(model, pixels):
    return fitting.fit(pixels, model.info.preprocess)[0]


def run(model, image, rows, kind="cam", layers=None):
    layers = (layers or (model.info.default_layer,)) if kind == "cam" else ()
    return Engine({model.info.name: model}).run(Pass(model.info.name, kind, image.shape[:2], layers), rows)


def explained(model, image, target=None, **row):
    (result,) = run(model, image, [Row(image, target or RankTarget(0), (call("gradcam"),), **row)])
    return result


@cache
def transformers_model(folder, precision=torch.float32):
    """Return transformers' own model of a folder; tests share it."""
    return hf.AutoModelForObjectDetection.from_pretrained(folder, dtype=precision, attn_implementation="eager").eval()


def objects_by_transformers(folder, pixels):
    """Return transformers' own objects [n,6] of a photo by descending score: class, score, box in its pixels."""
    processor = hf.AutoImageProcessor.from_pretrained(folder)
    prepared = processor(images=Image.fromarray(pixels), return_tensors="pt")
    with torch.no_grad():
        output = transformers_model(folder)(**prepared)
    (found,) = processor.post_process_object_detection(output, threshold=0, target_sizes=[pixels.shape[:2]])
    rows = torch.cat([found["labels"][:, None].float(), found["scores"][:, None], found["boxes"]], 1)
    return rows[(-found["scores"]).argsort(stable=True)].numpy()


PHOTO_OF = dict(zip(FAMILIES, itertools.cycle(["chelsea", "rocket"]), strict=False))


@pytest.mark.parametrize("family", marked_except(pytest.mark.slow, SERVED, FAMILIES))
def test_predictions_are_all_objects_that_transformers_returns(family, folders, served):
    name = PHOTO_OF[family]
    pixels = photo(name)
    expected = objects_by_transformers(folders[family], pixels)
    with camserve.Client(served(family)) as client:
        result = client.explain(PHOTOS[name], model=family, top_k=1, max_predictions=100, overlay="png")

    rounding = 1e-3 if family == "rf_detr" else 2e-5  # its processor does not round the resized photo to 8 bits
    found = [(p.class_index, p.score, *(getattr(p.box, edge) for edge in EDGES)) for p in result.predictions]
    assert len(found) == len(expected) >= QUERIES
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        ties = np.abs(expected[:, 1] - theirs[1]) < rounding  # objects with nearly the same score, in any order
        assert ours[1] == pytest.approx(theirs[1], abs=rounding), index
        assert min(np.abs(expected[ties][:, [0, 2, 3, 4, 5]] - [ours[0], *ours[2:]]).max(1)) < max(0.05, 1e3 * rounding)
    (explanation,) = result.explanations
    assert explanation.score == pytest.approx(expected[0, 1], abs=rounding)
    assert explanation.target.label == result.predictions[0].label
    assert explanation.overlay
    assert explanation.verdict != "ZERO_GRADIENT"


EDGES = ("left", "top", "right", "bottom")


@pytest.mark.parametrize("family", marked_except(pytest.mark.slow, FAST, FAMILIES))
def test_map_of_the_most_certain_object_equals_that_of_autograd(family, folders, loaded):
    model, pixels = loaded(family), photo("coffee", portrait=True)
    image = fitted(model, pixels)
    result = explained(model, image)

    layer = model.info.at_size(image.shape[:2]).layers[model.info.default_layer]
    inputs = normalise(torch.from_numpy(image[None]), model.info.preprocess)
    plain, truth = (
        gradcam_by_hand(folders[family], layer, inputs.to(precision)) for precision in (torch.float32, torch.float64)
    )
    assert error_ratio(result.maps[0][0], plain, truth) <= 1


@contextmanager
def default_dtype(dtype):
    """Compute embeddings of places, which some networks compute as they run, in another precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def gradcam_by_hand(folder, layer, image):
    """Compute the map of the most certain object, as `gradcam_of`."""
    processor = hf.AutoImageProcessor.from_pretrained(folder)

    def most_certain(output):
        (found,) = processor.post_process_object_detection(output, threshold=0, target_sizes=[image.shape[2:]])
        return found["scores"].max()

    return gradcam_of(most_certain, folder, layer, image)[1]


def gradcam_of(score, folder, layer, image):
    """Compute a score and its map by autograd and the paper's formula, on transformers' own model."""
    network, captured = transformers_model(folder, image.dtype), []

    def keep(_module, _args, output):
        first = next(part for part in leaves(output) if isinstance(part, torch.Tensor) and part.is_floating_point())
        captured.append(first)
        first.retain_grad()

    with default_dtype(image.dtype), network.get_submodule(layer.name).register_forward_hook(keep):
        output = network(image.clone().requires_grad_())
    value = score(output)
    value.backward()
    activations, gradients = (
        to_grid_in_full_precision(tensor, layer.layout) for tensor in (captured[-1].detach(), captured[-1].grad)
    )
    return value.item(), (gradients.mean((2, 3), keepdim=True) * activations).sum(1)[0]


def to_grid_in_full_precision(tensor, layout):
    if layout.axes != "tokens":
        return tensor if layout.axes == "nchw" else tensor.movedim(3, 1)
    grid = to_grid(tensor, layout)
    return tensor[:, layout.prefix : tensor.shape[1] - layout.suffix].transpose(1, 2).reshape(grid.shape)


def leaves(output):
    return torch.utils._pytree.tree_leaves(output)


@pytest.mark.parametrize("family", marked_except(pytest.mark.slow, FAST, DIFFERENT))
def test_batch_neighbours_never_change_a_detectors_answer(family, loaded):
    model = loaded(family)
    pictures = [fitted(model, photo(name)) for name in ("chelsea", "coffee", "flower")]
    size = min((picture.shape for picture in pictures), key=lambda shape: shape[0] * shape[1])[:2]
    pictures = [np.ascontiguousarray(picture[: size[0], : size[1]]) for picture in pictures]
    together = run(model, pictures[0], [Row(picture, RankTarget(1), (call("gradcam"),)) for picture in pictures])
    for picture, row in zip(pictures, together, strict=True):
        alone = explained(model, picture, RankTarget(1))
        assert row.score == pytest.approx(alone.score, rel=1e-4)
        assert row.target.rank == alone.target.rank == 1
        largest = np.abs(alone.maps[0][0]).max()
        np.testing.assert_allclose(row.maps[0][0], alone.maps[0][0], atol=1e-3 * largest)
    assert len({row.maps[0][0].tobytes() for row in together}) == len(pictures)


@pytest.mark.parametrize("family", marked_except(pytest.mark.slow, FAST, ["detr", "deformable_detr", "yolos"]))
def test_photos_of_other_proportions_at_the_same_time_get_their_own_grids(family, served):
    files = [png(photo("chelsea", portrait)) for portrait in (False, True)]
    with camserve.Client(served(family)) as client:
        alone = [client.explain(file, model=family, heatmap=True) for file in files]
        together = list(client.explain_many([*files, *reversed(files)], model=family, heatmap=True))

    grids = {result.explanations[0].heatmap.shape for result in alone}
    assert {(columns, rows) for rows, columns in grids} == grids
    assert len(grids) == 2
    for one, other in zip([*alone, *reversed(alone)], together, strict=True):
        (first,), (second,) = one.explanations, other.explanations
        assert first.score == pytest.approx(second.score, rel=1e-4)
        np.testing.assert_allclose(first.heatmap, second.heatmap, atol=1e-3 * np.abs(first.heatmap).max())


def png(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    return buffer.getvalue()


@pytest.mark.parametrize("family", ["detr", "rf_detr"])
def test_objects_with_one_box_and_class_keep_their_own_scores(family, loaded):
    """Queries are not suppressed, so two of them may find the same object."""
    model = loaded(family)
    image = fitted(model, photo("chelsea"))
    ranked = run(model, image, [Row(image, RankTarget(rank)) for rank in range(QUERIES)], "score")
    boxes = [DetectionTarget(row.target.index, row.target.box, found=True, rank=row.target.rank) for row in ranked]
    by_box = run(model, image, [Row(image, box) for box in boxes], "score")

    assert [row.score for row in ranked] == pytest.approx(ranked[0].logits[:, 1].tolist())
    assert [row.score for row in by_box] == [row.score for row in ranked]


def test_object_is_followed_by_its_box_in_a_mirrored_copy(loaded):
    model = loaded("rf_detr")
    image = fitted(model, photo("chelsea"))
    target = explained(model, image).target
    mirrored = explained(model, image, target, views=(View(mirrored=True),))

    objects, size = mirrored.logits, model.info.preprocess.size
    expected = targets.seen_in(target, [View(mirrored=True)], size).box
    overlap = iou(objects[:, 2:], expected) * (objects[:, 0] == target.index)
    assert mirrored.score == pytest.approx(objects[overlap.argmax(), 1] if overlap.max() >= 0.5 else 0, abs=1e-6)


def iou(boxes, box):
    left, top, right, bottom = boxes.T
    width = np.minimum(right, box.right) - np.maximum(left, box.left)
    height = np.minimum(bottom, box.bottom) - np.maximum(top, box.top)
    shared = width.clip(0) * height.clip(0)
    return shared / ((right - left) * (bottom - top) + (box.right - box.left) * (box.bottom - box.top) - shared)


@pytest.mark.parametrize("family", marked_except(pytest.mark.slow, FAST, DIFFERENT))
def test_layers_of_queries_have_no_grid(family, loaded):
    """Their tokens stand for objects, so that a map of them would not lie over the image."""
    layers = loaded(family).info.layers
    queries = [layer for layer in layers.values() if len(layer.shape) == 3 and layer.shape[1] == QUERIES]

    assert queries
    assert not any(layer.layout for layer in queries)
    assert loaded(family).info.default_layer not in {layer.name for layer in queries}


@pytest.mark.slow
def test_size_option_scales_the_shorter_and_the_longer_side(folders):
    preprocess = models.load(parse(f"hf:{folders['detr']}?size=48")).info.preprocess
    assert preprocess.size == (48, 80)
    assert replace(preprocess.resize, shortest=96, longest=160) == models.KeepAspect(96, 160)


def test_heads_are_of_the_last_attention_to_the_patches_not_to_the_objects(folders, loaded):
    """The 12 objects would fit a grid of 3 by 4, and the photo's grid is 3 by 5."""
    model = loaded("detr")
    image = fitted(model, photo("chelsea"))
    (result,) = run(model, image, [Row(image, RankTarget(0))], "heads")
    expected = []
    for precision in (torch.float32, torch.float64):
        seen = normalise(torch.from_numpy(image[None].copy()), model.info.preprocess).to(precision)
        with torch.no_grad():
            output = transformers_model(folders["detr"], precision)(pixel_values=seen, output_attentions=True)
        expected.append(output.encoder_attentions[-1][0].mean(1).reshape(4, 3, 5))

    assert result.layer == "model.encoder.layers.1.self_attn"
    assert error_ratio(result.features[0], *expected) <= 1


PROCESSORS = ("Detr", "ConditionalDetr", "DeformableDetr", "RTDetr", "RfDetr", "Yolos")


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PROCESSORS)
def test_scores_of_all_classes_belong_to_the_same_object_in_any_precision(name, precision):
    """Half precision rounds numbers above 256, and gives many queries the same score."""
    generator, queries = torch.Generator().manual_seed(0), 300
    output = DetrObjectDetectionOutput(
        logits=torch.randn(2, queries, 7, generator=generator).to(precision),
        pred_boxes=torch.rand(2, queries, 4, generator=generator).to(precision),
    )
    objects = heads.HEADS[1].convert(getattr(hf, f"{name}ImageProcessor")())(output, (480, 640))

    for image in objects:
        own = image["class_scores"].gather(1, image["labels"][:, None])[:, 0]
        assert len(own) >= 100
        assert torch.equal(own, image["scores"])


def probabilities_of_a_query(output, name):
    """Return the probabilities of the classes by which a family's processor finds objects, [Q,classes]."""
    return output.logits[0].softmax(-1)[:, :-1] if name in {"detr", "yolos"} else output.logits[0].sigmoid()


@pytest.mark.parametrize("family", marked_except(pytest.mark.slow, FAST, DIFFERENT))
def test_contrast_is_the_difference_of_an_objects_scores_in_two_classes(family, folders, loaded):
    model = loaded(family)
    image = fitted(model, photo("chelsea"))
    best = explained(model, image).target
    other = (best.index + 1) % (model.info.classes - 1)
    result = explained(model, image, DetectionTarget(best.index, against=other))

    inputs = normalise(torch.from_numpy(image[None]), model.info.preprocess)
    plain, truth = (
        contrast_by_hand(folders[family], model, family, (best.index, other), inputs.to(precision))
        for precision in (torch.float32, torch.float64)
    )
    assert result.target.box == best.box
    assert result.score == pytest.approx(truth[0], rel=1e-3)
    assert error_ratio(result.maps[0][0], plain[1], truth[1]) <= 1


def contrast_by_hand(folder, model, family, classes, image):
    """Return score and map of the contrast for the query that is most certain of the first class."""
    layer = model.info.at_size(tuple(image.shape[2:])).layers[model.info.default_layer]

    def score(output):
        found = probabilities_of_a_query(output, family)
        why, why_not = found[found[:, classes[0]].argmax(), list(classes)]
        return why - why_not

    return gradcam_of(score, folder, layer, image)


@pytest.mark.parametrize("family", marked_except(pytest.mark.slow, SERVED, ["detr", "rt_detr"]))
def test_contrast_of_objects_names_both_classes_and_replays(family, served):
    with camserve.Client(served(family)) as client:
        (first,) = client.explain(PHOTOS["chelsea"], model=family, max_predictions=1).predictions
        why_not = next(label for label in small_transformers.LABELS.values() if label != first.label)
        asked = {"model": family, "targets": [camserve.contrast(first.label, why_not)]}
        (explanation,) = client.explain(PHOTOS["chelsea"], **asked).explanations
        replay = client.replay(explanation.receipt, PHOTOS["chelsea"])
        with pytest.raises(camserve.FailedPrecondition, match="drise compares detected objects"):
            client.explain(PHOTOS["chelsea"], methods=["drise"], **asked)

    assert (explanation.target.label, explanation.contrast.label) == (first.label, why_not)
    assert (explanation.target.box, explanation.target.score) == (first.box, pytest.approx(first.score, abs=1e-5))
    assert explanation.contrast.score == pytest.approx(first.score - explanation.score, abs=1e-5)
    assert replay.same, replay.differences
