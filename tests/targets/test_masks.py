"""Masks of any shape: from the pixels of a photo to the cells of a model's output."""

import numpy as np
import pytest
import torch

from camserve_server import targets
from camserve_server.core.errors import FailedPrecondition
from camserve_server.engine.values import Row
from camserve_server.imaging.fitting import visible_box
from camserve_server.imaging.values import Box, Part, Preprocess, View
from camserve_server.targets.geometry import cells_of, inside
from camserve_server.targets.values import MaskTarget, SegmentTarget
from coloured import painted
from methods.tools import call, error_ratio, exact, explain, inputs, job, noise, run
from models.test_tasks import leaf, oracle
from support import loaded

METHODS = ("gradcam", "layercam", "saliency", call("occlusion", window=0.125, stride=0.125))


def part_of(pixels, seen=None):
    """Return a mask of a photo as a part; the model sees the whole photo by default."""
    height, width = pixels.shape
    return Part(np.packbits(pixels, axis=1), width, seen or Box(0, 0, width, height))


def rectangle(shape, top, bottom, left, right):
    pixels = np.zeros(shape, bool)
    pixels[top:bottom, left:right] = True
    return pixels


def geometry(rng):
    """Return a random photo's size, a model's input size, the part that it sees, and the grid of its output."""
    photo, size = (tuple(rng.integers(20, 200, 2).tolist()) for _ in range(2))
    resize = size if rng.random() < 0.5 else int(rng.integers(min(size) // 2, 2 * max(size)))
    seen = visible_box(photo, Preprocess(size, resize, "bilinear", (0, 0, 0), (1, 1, 1)))
    grid = size if rng.random() < 0.5 else tuple(rng.integers(3, 60, 2).tolist())
    return photo, size, seen, grid


@pytest.mark.parametrize("seed", [*range(40), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(40, 200))])
def test_rectangle_has_exactly_the_cells_of_its_box(seed):
    rng = np.random.default_rng(seed)
    photo, size, seen, grid = geometry(rng)
    top, left = (int(rng.integers(0, side)) for side in photo)
    bottom, right = (int(rng.integers(low + 1, side + 1)) for low, side in zip((top, left), photo, strict=True))
    box = targets.carried(Box(left, top, right, bottom), seen, targets.whole(size))

    found = cells_of(part_of(rectangle(photo, top, bottom, left, right), seen), grid, size)

    np.testing.assert_array_equal(found, inside(box, grid, size))


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 40))])
def test_cell_is_in_the_part_if_its_centres_pixel_is(seed):
    rng = np.random.default_rng(seed)
    photo, size, seen, grid = geometry(rng)
    pixels = rng.random(photo) < 0.5
    found = cells_of(part_of(pixels, seen), grid, size)

    ys = seen.top + (np.arange(grid[0]) + 0.5) * (seen.bottom - seen.top) / grid[0]
    xs = seen.left + (np.arange(grid[1]) + 0.5) * (seen.right - seen.left) / grid[1]
    for row, y in enumerate(ys):
        for column, x in enumerate(xs):
            if min(abs(y - round(y)), abs(x - round(x))) > 1e-9:  # not on the edge of two pixels
                exists = 0 <= y < photo[0] and 0 <= x < photo[1]
                assert found[row, column] == (exists and pixels[int(y), int(x)])


def test_part_smaller_than_a_cell_is_the_cell_at_its_centre():
    pixels = rectangle((64, 64), 9, 10, 20, 22)
    assert np.argwhere(cells_of(part_of(pixels), (8, 8), (64, 64))).tolist() == [[1, 2]]


@pytest.fixture(scope="module")
def colours():
    return loaded("coloured:Colours?size=64")


def test_part_without_any_cell_is_refused(colours):
    """The ring passes between the centres of the cells, and the centre of the box around it is not in the ring."""
    pixels = rectangle((640, 640), 91, 94, 91, 144)
    pixels |= rectangle((640, 640), 141, 144, 91, 144) | pixels.T | rectangle((640, 640), 91, 144, 141, 144)
    with pytest.raises(FailedPrecondition, match=r"the mask is thinner than the cells of .* 64 x 64 over what it sees"):
        run(colours, [Row(noise(1, 64), MaskTarget(0, part=part_of(pixels)))], kind="score")


def test_map_of_a_mask_equals_autograd(colours):
    image, pixels = noise(1, 64), np.random.default_rng(3).random((64, 64)) < 0.3

    def scored(model):
        output, activation = leaf(model.module, "smooth", inputs(model, image))
        score = output["out"][0, 2][torch.from_numpy(pixels)].mean()
        return float(score.detach()), oracle(score, activation)

    target = MaskTarget(2, part=part_of(pixels))
    (row,) = run(colours, [Row(image, target, (call("gradcam"),))], ["smooth"])
    (plain, plain_map), (truth, true_map) = scored(colours), scored(exact(colours))

    assert row.target.part is None
    np.testing.assert_array_equal(row.target.mask, pixels)
    assert error_ratio(row.score, plain, truth) <= 1
    assert error_ratio(row.maps[0][0], plain_map, true_map) <= 1


@pytest.mark.parametrize("method", METHODS, ids=lambda each: getattr(each, "name", each))
def test_mask_that_is_a_rectangle_gives_the_answer_of_its_box(colours, method):
    image, box = painted(red=(8, 8, 24)), Box(10, 12, 40, 33)
    part = part_of(rectangle((64, 64), 12, 33, 10, 40))
    of_mask, of_box = (
        explain(colours, image, job(colours, [method], [target])).explanations[0]
        for target in (MaskTarget(1, part=part), SegmentTarget(1, box))
    )
    assert of_mask.score == of_box.score
    np.testing.assert_array_equal(of_mask.heatmap, of_box.heatmap)


def test_neighbours_in_a_batch_do_not_change_the_answer(colours):
    image, calls = painted(red=(8, 8, 24)), (call("gradcam"),)
    masks = [MaskTarget(1, part=part_of(np.random.default_rng(seed).random((64, 64)) < 0.2)) for seed in range(3)]
    mixed = [*masks, SegmentTarget(1), SegmentTarget(1, Box(4, 4, 20, 20))]
    together = run(colours, [Row(image, target, calls) for target in mixed], ["smooth"])
    for target, row in zip(mixed, together, strict=True):
        (alone,) = run(colours, [Row(image, target, calls)], ["smooth"])
        assert row.score == alone.score
        np.testing.assert_array_equal(row.maps, alone.maps)


@pytest.mark.parametrize("view", [View(mirrored=True), View(scale=1.5, top=11, left=5), View(gain=0.5)])
def test_view_moves_a_mask_as_it_moves_a_segments(view):
    pixels = np.random.default_rng(0).random((16, 16)) < 0.5
    ours, theirs = (targets.seen_in(kind(1, mask=pixels), [view], (64, 64)) for kind in (MaskTarget, SegmentTarget))
    np.testing.assert_array_equal(ours.mask, theirs.mask)
