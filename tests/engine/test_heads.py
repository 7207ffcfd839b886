"""Heads of one attention, compared with the weights that the model itself computes."""

import numpy as np
import pytest
import torch

from camserve_server.core.errors import FailedPrecondition
from camserve_server.engine.values import Row
from camserve_server.models import load, parse
from camserve_server.targets.values import RankTarget
from methods.tools import FACTOR, FLOOR, doubled, gap, inputs, noise, run

SPEC = "torchvision:vit_b_16?weights=none&size=32"


@pytest.fixture(scope="module")
def model():
    return load(parse(SPEC))


def weights(module, images, index):
    """Attention of each head from the class token to the patches [B,heads,h,w], by torch's own `need_weights`."""
    block, kept = module.encoder.layers[index], []
    with block.ln_1.register_forward_hook(lambda _module, _args, output: kept.append(output)), torch.no_grad():
        module(images)
        _, shares = block.self_attention(*kept * 3, need_weights=True, average_attn_weights=False)
    return shares[:, :, 0, 1:].unflatten(-1, (2, 2)).numpy()


def test_heads_equal_the_models_own_weights_in_a_batch(model):
    images = [noise(seed, 32) for seed in range(2)]
    name = "encoder.layers.encoder_layer_3"
    found = run(model, [Row(image, RankTarget(0)) for image in images], [name], "heads")
    seen = inputs(model, *images)
    plain, truth = weights(model.module, seen, 3), weights(doubled(model.module), seen.double(), 3)

    assert {result.layer for result in found} == {f"{name}.self_attention"}
    for place, result in enumerate(found):
        assert gap(result.features[0], truth[place]) <= FACTOR * gap(plain[place], truth[place]) + FLOOR


def test_last_attention_is_the_default(model):
    (found,) = run(model, [Row(noise(0, 32), RankTarget(0))], [], "heads")

    assert found.layer == "encoder.layers.encoder_layer_11.self_attention"
    assert found.features[0].shape == (12, 2, 2)
    assert (found.features[0].sum((1, 2)) < 1 + 1e-6).all()
    assert np.isfinite(found.features[0]).all()


@pytest.mark.parametrize(("layer", "words"), [("encoder", "12 attentions: name a layer with one"), ("heads", "has no")])
def test_layer_without_exactly_one_attention_is_refused(model, layer, words):
    with pytest.raises(FailedPrecondition, match=words):
        run(model, [Row(noise(0, 32), RankTarget(0))], [layer], "heads")
