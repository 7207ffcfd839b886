"""Heads of one attention, compared with the weights that the model computes itself, and softmax(QKᵀ/√d) by hand."""

import numpy as np
import pytest
import torch
from torchvision.models import VisionTransformer

import needs
from camserve_server.core.errors import FailedPrecondition
from camserve_server.engine.values import Row
from camserve_server.models import load, parse
from camserve_server.targets.values import RankTarget
from engine.test_attention import SIZE, vivid, vivid_model
from methods.tools import FACTOR, FLOOR, doubled, error_ratio, gap, inputs, noise, run


def vit():
    """Return torchvision's transformer with 12 heads as in vit_b_16, with fewer and narrower blocks."""
    return vivid(VisionTransformer(32, 16, num_layers=5, num_heads=12, hidden_dim=96, mlp_dim=96, num_classes=5))


@pytest.fixture(scope="module")
def model():
    return load(parse("vit=engine.test_heads:vit?size=32&accelerate=false"))


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

    assert found.layer == "encoder.layers.encoder_layer_4.self_attention"
    assert found.features[0].shape == (12, 2, 2)
    assert (found.features[0].sum((1, 2)) < 1 + 1e-6).all()
    assert np.isfinite(found.features[0]).all()


@pytest.mark.parametrize(("layer", "words"), [("encoder", "5 attentions: name a layer with one"), ("heads", "has no")])
def test_layer_without_exactly_one_attention_is_refused(model, layer, words):
    with pytest.raises(FailedPrecondition, match=words):
        run(model, [Row(noise(0, 32), RankTarget(0))], [layer], "heads")


def attention_by_hand(module, images, query, key, heads):
    """Return softmax(QKᵀ/√d) [B,heads,N,N] of an attention, from the outputs of its projections."""
    kept = []
    with torch.no_grad():
        for layer in (query, key):
            with layer.register_forward_hook(lambda _module, _args, output: kept.append(output)):
                module(images)
    if query is key:  # timm projects queries, keys and values in one layer
        kept = list(kept[0].chunk(3, -1))
    q, k = (each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in kept[:2])
    return (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)


def test_neighbours_in_a_batch_never_change_heads(model):
    rows = [[Row(noise(seed, 32), RankTarget(0)) for seed in seeds] for seeds in ((0, 1), (0, 2))]
    (mine, other), (same, another) = (run(model, each, [], "heads") for each in rows)

    assert np.array_equal(mine.features[0], same.features[0])
    assert not np.array_equal(other.features[0], another.features[0])


READ = {
    "class token": lambda matrix: matrix[:, :, 0, 1:],
    "distilled": lambda matrix: matrix[:, :, 0, 2:],
    "registers": lambda matrix: matrix[:, :, 0, 5:],
    "registers, mean of patches": lambda matrix: matrix[:, :, 4:, 4:].mean(2),
    "mean of patches": lambda matrix: matrix.mean(2),
}
"""For each model, the part of the attention [B,heads,N,N] that its heads are: [B,heads,16]."""


@pytest.mark.parametrize("name", READ)
def test_heads_of_timm_equal_the_attention_by_hand(name):
    model = vivid_model(name)
    (found,) = run(model, [Row(noise(4, SIZE), RankTarget(0))], ["blocks.1"], "heads")
    plain, truth = (
        READ[name](attention_by_hand(module, seen, *[module.blocks[1].attn.qkv] * 2, 2)).unflatten(-1, (4, 4))[0]
        for module in (model.module, doubled(model.module))
        for seen in [inputs(model, noise(4, SIZE)).to(next(module.parameters()))]
    )

    assert found.features[0].shape == (2, 4, 4)
    assert error_ratio(found.features[0], plain, truth) <= 1


@pytest.mark.parametrize("registers", [0, 3])
def test_heads_of_transformers_equal_the_attention_by_hand(plant, registers):
    hf = pytest.importorskip("transformers", reason=needs.TRANSFORMERS)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
    kind, config, options = (
        (hf.Dinov2WithRegistersForImageClassification, hf.Dinov2WithRegistersConfig, {"num_register_tokens": registers})
        if registers
        else (hf.ViTForImageClassification, hf.ViTConfig, {"intermediate_size": 64})
    )
    model = plant(lambda: vivid(kind(config(**sizes, **options, num_labels=5))), size=32, accelerate=False)
    (found,) = run(model, [Row(noise(4, 32), RankTarget(0))], [], "heads")

    def by_hand(module):
        projections = dict(module.get_submodule(found.layer).named_children())
        query, key = (projections.get(new) or projections[old] for new, old in (("q_proj", "query"), ("k_proj", "key")))
        seen = inputs(model, noise(4, 32)).to(next(module.parameters()))
        matrix = attention_by_hand(module, seen, query, key, 4)
        return matrix[0, :, 0, 1 + registers :].unflatten(-1, (4, 4))

    assert found.features[0].shape == (4, 4, 4)
    assert error_ratio(found.features[0], by_hand(model.module), by_hand(doubled(model.module))) <= 1
