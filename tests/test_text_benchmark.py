"""Planted truth for texts: a toy CLIP, trained here, and the quadrant that a caption names."""

import numpy as np
import pytest
import torch
from benchmarks.texts import measure, toy

import needs

pytestmark = pytest.mark.slow
hf = pytest.importorskip("transformers", reason=needs.TRANSFORMERS)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_scene_shows_the_colour_of_each_caption_in_its_quadrant():
    made = toy.scenes(6, seed=3)
    for photo, captions in zip(made.photos, made.captions, strict=True):
        for place, caption in enumerate(captions):
            top, left = place // 2 * toy.QUADRANT, place % 2 * toy.QUADRANT
            part = photo[top : top + toy.QUADRANT, left : left + toy.QUADRANT].astype(int)
            colour = np.array(toy.COLOURS[toy.CAPTIONS[caption].split()[1]])
            distance = np.abs(photo.astype(int) - colour).sum(-1)

            assert np.abs(part - colour).sum(-1).min() < 60
            assert np.unravel_index(distance.argmin(), distance.shape)[0] // toy.QUADRANT == place // 2


def test_tokenizer_of_the_toy_has_a_token_for_each_word():
    _, processor = toy.build()
    tokens = processor.tokenizer([*toy.CAPTIONS])["input_ids"]

    assert {len(each) for each in tokens} == {5}
    assert len({tuple(each) for each in tokens}) == len(toy.CAPTIONS)


def test_peak_and_share_of_a_quadrant_are_those_of_its_values():
    heatmap = np.zeros((toy.SIDE, toy.SIDE), np.float32)
    heatmap[30, 5], heatmap[2, 40], heatmap[40, 40] = 3, 1, -9

    assert measure._in_quadrant(heatmap, 2) == (True, 0.75)
    assert measure._in_quadrant(heatmap, 1) == (False, 0.25)
    assert measure._in_quadrant(heatmap, 3) == (False, 0)


@pytest.mark.timeout(600)
def test_three_methods_find_the_quadrant_of_nine_captions_in_ten():
    with measure.served(steps=400) as client:  # the page's has 600
        found = measure.measure(client, ("gradient_rollout", "chefer", "occlusion", "random"), 6)
        recall = measure.recall(client, 15)

    assert recall > 0.9
    assert all(found[name].peak >= 0.9 for name in ("gradient_rollout", "chefer", "occlusion"))
    assert found["random"].peak == measure.CHANCE
