"""D-RISE equals the paper on a detector with known weights, finds the object, and moves with the views of a request.

xaitk-saliency 0.15.0 (DRISEScoring) was compared once, in an environment of its own, on the same masks and detections:
512 masks on `Finder`. Its boxes include their last pixel, so it got right and lower edges that are less by 1. Its map,
divided by its largest value, and ours plus the mean weight, divided likewise, differ by at most 2.7e-07.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from camserve_server.engine import normalise
from camserve_server.imaging.values import Box
from camserve_server.methods import METHODS, Scene
from camserve_server.targets import similarity_of_best
from camserve_server.targets.values import DetectionTarget, RankTarget
from coloured import Finder, painted
from methods.tools import call, error_ratio, exact, explain, job

PLACES = {"red": (8, 8, 24), "green": (36, 32, 20)}
TARGETS = (RankTarget(0), RankTarget(1))


@pytest.fixture
def finder(plant):
    return plant(Finder, size=64)


def masks_of(**chosen):
    """Return the masks of a call, [n, 64, 64]."""
    exploring = METHODS["drise"].explore(Scene(np.zeros((3, 64, 64), np.float32), np.zeros(1)), **chosen)
    masks, edits = [], next(exploring)
    while True:
        masks += [edit.keep for edit in edits]
        try:
            edits = exploring.send(np.zeros((len(edits), 1), np.float32))
        except StopIteration:
            return torch.from_numpy(np.stack(masks))


def papers_map(model, image, target, masks, divisor):
    """Return the paper's sum over masks in the model's precision; the vectors of probabilities are written out."""
    picture = normalise(torch.from_numpy(image)[None], model.info.preprocess).to(next(model.module.parameters()))
    classes, masks, weights = torch.eye(model.info.classes).to(picture), masks.to(picture), []
    box = torch.tensor([getattr(target.box, edge) for edge in ("left", "top", "right", "bottom")]).to(picture)
    for mask in masks:
        (found,) = model.module(picture * mask)
        low, high = torch.maximum(found["boxes"][:, :2], box[:2]), torch.minimum(found["boxes"][:, 2:], box[2:])
        both = (high - low).clamp(min=0).prod(1)
        areas = [(each[..., 2:] - each[..., :2]).prod(-1) for each in (found["boxes"], box)]
        cosines = classes[found["labels"]] @ classes[target.index]
        weights.append((both / (areas[0] + areas[1] - both) * cosines * found["scores"]).max().detach())
    weights = torch.stack(weights)
    total = torch.einsum("n,nhw->hw", weights, masks)
    return total / (len(masks) * 0.5) if divisor == "expected" else total / masks.sum(0) - weights.mean()


@pytest.mark.parametrize("divisor", ["shown", "expected"])
def test_map_is_the_papers_sum_over_masks(finder, divisor):
    asked, image = call("drise", samples=70, divisor=divisor), painted(**PLACES)
    masks = masks_of(**asked.parameters)
    for explanation in explain(finder, image, job(finder, [asked], TARGETS)).explanations:
        expected = (papers_map(each, image, explanation.target, masks, divisor) for each in (finder, exact(finder)))
        assert error_ratio(explanation.heatmap, *expected) <= 1


@pytest.mark.parametrize(
    ("rank", "place"),
    [pytest.param(*each, marks=pytest.mark.slow if each[0] else ()) for each in enumerate(PLACES.values())],
)
def test_highest_tenth_of_a_map_is_at_the_object(finder, rank, place):
    (explanation,) = explain(
        finder, painted(**PLACES), job(finder, [call("drise", samples=256)], [RankTarget(rank)])
    ).explanations
    top, left, side = place
    hot = explanation.heatmap >= np.quantile(explanation.heatmap, 0.9)

    assert hot[top : top + side, left : left + side].sum() >= 0.8 * hot.sum()


def test_request_runs_the_announced_rows_and_several_targets_are_as_each_alone(finder):
    asked, batches = [call("drise", samples=70)], []
    both = explain(finder, painted(**PLACES), job(finder, asked, TARGETS), batches=batches).explanations
    assert sum(size for _, size in batches) == job(finder, asked, TARGETS).rows == 2 * 71
    for explanation, target in zip(both, TARGETS, strict=True):
        (alone,) = explain(finder, painted(**PLACES), job(finder, asked, [target]), chunk=7).explanations
        np.testing.assert_allclose(explanation.heatmap, alone.heatmap, atol=1e-6)


def test_mirrored_copies_are_compared_with_the_mirrored_box(finder):
    """Otherwise the object of a mirrored copy would not overlap the box, and the mean map would be half as strong."""
    asked, image = call("drise", samples=200), painted(**PLACES)
    plain, smooth = (
        explain(finder, image, job(finder, [each], TARGETS[:1])).explanations[0].heatmap
        for each in (asked, replace(asked, augmented=True))
    )
    assert np.corrcoef(plain.ravel(), smooth.ravel())[0, 1] > 0.8
    assert smooth.max() > 0.8 * plain.max()


OBJECTS = np.array([(1, 0.5, 0, 0, 10, 10), (1, 0.9, 5, 0, 15, 10), (2, 1.0, 0, 0, 10, 10)], np.float32)


@pytest.mark.parametrize(
    ("index", "box", "expected"),
    [
        (1, Box(0, 0, 10, 10), 0.5),  # the object itself; the other one has 0.9 / 3
        (1, Box(5, 0, 15, 10), 0.9),
        (1, Box(4, 0, 14, 10), 0.9 * 9 / 11),  # the larger product counts, not the larger overlap or score
        (2, Box(0, 0, 20, 10), 0.5),
        (1, Box(40, 40, 50, 50), 0.0),
        (0, Box(0, 0, 10, 10), 0.0),
    ],
)
def test_similarity_is_the_largest_product_of_overlap_and_score(index, box, expected):
    assert similarity_of_best(OBJECTS, DetectionTarget(index, box)) == pytest.approx(expected)
    assert similarity_of_best(OBJECTS[:0], DetectionTarget(index, box)) == 0
