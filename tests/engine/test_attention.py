"""Attention methods equal the papers' formulas in float64 and torchcam, and unsupported models are refused."""

import copy
import functools
import sys
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from timm.models.beit import Beit
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torchcam.methods import LeGrad
from torchvision import models as zoo

from camserve_server import models
from camserve_server.core.errors import FailedPrecondition, Internal
from camserve_server.engine.attention import AttentionCapture
from camserve_server.engine.values import Row
from camserve_server.jobs.verdict import Verdict
from camserve_server.methods import METHODS, Attention
from camserve_server.methods.values import MethodCall
from camserve_server.models import hooks
from camserve_server.models.weights import digest
from camserve_server.targets.values import ClassTarget, ContrastTarget
from methods.attention_papers import blocks_of, paper, reference, rolled, without_lowest
from methods.tools import call, doubled, error_ratio, exact, explain, gap, inputs, job, noise, run

SIZE = 64
SHAPE = {"img_size": SIZE, "patch_size": 16, "embed_dim": 24, "depth": 3, "num_heads": 2, "num_classes": 5}
CLASS_ROW, PREFIX_ROWS, ALL_ROWS = slice(0, 1), slice(0, 2), slice(None)


def torchvision_vit():
    return zoo.VisionTransformer(
        image_size=SIZE, patch_size=16, num_layers=3, num_heads=2, hidden_dim=24, mlp_dim=48, num_classes=5
    )


FACTORIES = {
    "class token": (lambda: VisionTransformer(**SHAPE), 1, CLASS_ROW),
    "distilled": (lambda: VisionTransformerDistilled(**SHAPE), 2, PREFIX_ROWS),
    "registers": (lambda: VisionTransformer(**SHAPE, reg_tokens=4), 5, CLASS_ROW),
    "registers, mean of patches": (
        lambda: VisionTransformer(**SHAPE, reg_tokens=4, class_token=False, global_pool="avg"),
        4,
        slice(4, None),
    ),
    "mean of patches": (lambda: VisionTransformer(**SHAPE, class_token=False, global_pool="avg"), 0, ALL_ROWS),
    "attention pooling": (lambda: VisionTransformer(**SHAPE, class_token=False, global_pool="map"), 0, ALL_ROWS),
    "normalised queries": (lambda: VisionTransformer(**SHAPE, qk_norm=True, init_values=0.5), 1, CLASS_ROW),
    "beit": (lambda: Beit(**SHAPE, use_rel_pos_bias=True, use_abs_pos_emb=False), 1, slice(1, None)),
    "eva": (lambda: Eva(**SHAPE, use_rot_pos_emb=True, global_pool="token"), 1, CLASS_ROW),
    "torchvision": (torchvision_vit, 1, CLASS_ROW),
}
"""For each model: its factory, the number of tokens that are no patches, and the tokens that its head reads."""

ROLLING = ("attention_rollout", "gradient_rollout", "chefer")


def vivid(model):
    """Set random weights with uneven attention, in which each token still depends most on its own patch."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() in (2, 4):
                strength = 1.5 if "q" in name or "in_proj" in name else 0.7
                weight.copy_(torch.randn(weight.shape, generator=generator) * strength * weight[0].numel() ** -0.5)
            elif name.endswith(("bias", "token", "embed")):
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    return model


@functools.cache
def vivid_model(name):
    """Load one of the models above. Tests of several files share it, so they must not change it."""
    module = type("planted", (), {"make": staticmethod(lambda: vivid(FACTORIES[name][0]()))})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "planted", module)
        return models.load(models.ModelSpec(name, "planted", "make", size=SIZE, accelerate=False))


@pytest.fixture(scope="module")
def load():
    """Return the function that loads the models above."""
    return vivid_model


def answer(model, method, image, target=None, **parameters):
    """Return the map and the logits of one image."""
    kind = "each" if METHODS[method].each else "attention"
    (result,) = run(model, [Row(image, target or ClassTarget(1), (call(method, **parameters),))], (), kind)
    return result.maps[0][0], result


@pytest.mark.parametrize("method", [*ROLLING, "legrad"])
@pytest.mark.parametrize("name", FACTORIES)
def test_maps_are_those_of_the_papers_in_float64(load, name, method):
    model, (_, prefix, read) = load(name), FACTORIES[name]

    result, _ = answer(model, method, noise(4, SIZE))

    expected = []
    for each in both(name):
        relevance = paper(method, *each)
        row = relevance[0] if method == "legrad" else relevance[read].mean(0)
        expected.append(row[prefix:].reshape(4, 4))
    assert error_ratio(result, *expected) <= 1


@functools.cache
def both(name):
    """Return the inputs of the papers' formulas for a model, in plain float32 and in float64."""
    model = vivid_model(name)
    seen = inputs(model, noise(4, SIZE))
    return [reference(model.module, seen, dtype=each) for each in (torch.float32, torch.float64)]


def test_head_fusion_and_discard_ratio_follow_the_parameters(load):
    model, image = load("class token"), noise(4, SIZE)
    plain, truth = both("class token")

    for heads, fuse in (("max", np.max), ("min", np.min), ("mean", np.mean)):
        for share in (0.0, 0.5, 0.9):
            result, _ = answer(model, "attention_rollout", image, heads=heads, discard=share)
            expected = [
                rolled([without_lowest(fuse(block, axis=0), share) for block in attention])[0, 1:].reshape(4, 4)
                for attention, _, _ in (plain, truth)
            ]
            assert error_ratio(result, *expected) <= 1


def test_legrad_adds_up_the_requested_number_of_last_blocks(load):
    model, image = load("class token"), noise(4, SIZE)
    plain, truth = both("class token")

    for blocks in (1, 2, 3, 1000):
        result, _ = answer(model, "legrad", image, blocks=blocks)
        expected = [
            sum(g.clip(min=0).mean((0, 1)) for g in own[-blocks:])[1:].reshape(4, 4) for _, _, own in (plain, truth)
        ]
        assert error_ratio(result, *expected) <= 1


def test_legrad_equals_torchcams_up_to_the_number_of_blocks(load):
    model, image = load("torchvision"), noise(4, SIZE)

    result, _ = answer(model, "legrad", image)

    expected = []
    for module in (copy.deepcopy(model.module), doubled(model.module)):
        with LeGrad(module, blocks_of(module)) as theirs:
            logits = module(inputs(model, image).to(next(module.parameters()).dtype))
            expected.append(theirs(1, logits, normalized=False)[0][0])
    assert error_ratio(result / 3, *expected) <= 1


@pytest.mark.parametrize(
    "name", ["timm:test_vit", pytest.param("timm:deit_tiny_distilled_patch16_224", marks=pytest.mark.slow)]
)
def test_models_of_timm_are_explained_by_their_names(name):
    model = models.load(models.parse(f"{name}?weights=none&size=64&accelerate=false"))

    for method in (*ROLLING, "legrad"):
        heatmap, result = answer(model, method, noise(4, 64))
        assert heatmap.shape == (4, 4)
        assert heatmap.min() >= 0
        assert heatmap.max() > heatmap.min()
        assert not result.zero_gradient[0]


@pytest.mark.parametrize("name", FACTORIES)
def test_logits_equal_those_of_the_unchanged_model(load, name):
    model, image = load(name), noise(4, SIZE)
    with torch.no_grad():
        plain = model.module(inputs(model, image))[0]
        truth = doubled(model.module)(inputs(model, image).double())[0]

    for method in ("chefer", "legrad"):
        _, result = answer(model, method, image)
        assert error_ratio(result.logits, plain, truth) <= 1


@pytest.mark.parametrize("name", FACTORIES)
def test_model_is_unchanged_afterwards(load, name):
    model = load(name)
    before, attributes = digest(model.module), flags(model.module)

    for method in ("chefer", "legrad"):
        answer(model, method, noise(4, SIZE))

    assert hooks.hook_count(model.module) == 0
    assert digest(model.module) == before
    assert flags(model.module) == attributes
    assert not any(p.requires_grad or p.grad is not None for p in model.module.parameters())


def flags(module):
    return [(m.training, getattr(m, "fused_attn", None), "forward" in vars(m)) for m in module.modules()]


@pytest.mark.parametrize("method", [*ROLLING, "legrad"])
def test_batch_neighbours_and_other_targets_never_change_a_map(load, method):
    model = load("class token")
    images, targets = [noise(seed, SIZE) for seed in range(3)], [ClassTarget(1), ContrastTarget(0, 4)]
    rows = [Row(image, target, (call(method),)) for image in images for target in targets]

    in_float64 = exact(model)
    together = run(model, rows, (), "each" if method == "legrad" else "attention")

    for row, result in zip(rows, together, strict=True):
        (alone, single), (truth, known) = (answer(each, method, row.image, row.target) for each in (model, in_float64))
        assert error_ratio(result.maps[0][0], alone, truth) <= 1
        assert error_ratio(result.logits, single.logits, known.logits) <= 1


def test_methods_mix_in_a_batch(load):
    model, image = load("class token"), noise(4, SIZE)
    rows = [Row(image, ClassTarget(2), (call(method),)) for method in ROLLING]

    for row, result in zip(rows, run(model, rows, (), "attention"), strict=True):
        expected = (answer(each, row.calls[0].name, image, ClassTarget(2))[0] for each in (model, exact(model)))
        assert error_ratio(result.maps[0][0], *expected) <= 1


@pytest.mark.parametrize("method", ["chefer", "legrad"])
def test_attention_methods_support_targets_and_smoothing(load, method):
    model, image = load("class token"), noise(4, SIZE)
    smoothed = MethodCall(method, call(method).parameters, augmented=True)

    outcome = explain(model, image, job(model, [method, smoothed], [ClassTarget(1), ClassTarget(3)]))

    assert [finding.verdict for finding in outcome.explanations] == [Verdict.OK] * 4
    assert all(finding.heatmap.shape == (4, 4) and finding.layer == "" for finding in outcome.explanations)
    plain, _, smooth, _ = (finding.heatmap for finding in outcome.explanations)
    expected = (answer(each, method, image)[0] for each in (model, exact(model)))
    assert error_ratio(plain, *expected) <= 1
    assert gap(smooth, plain) > 1e-3


def test_error_for_values_of_all_tokens_names_the_method_and_both_shapes(load, monkeypatch):
    model = load("class token")
    method = Attention(lambda attention, _gradients, _prefix: attention[-1].mean(1)[:, 0], "a test")
    monkeypatch.setitem(METHODS, "wrong", method)

    with pytest.raises(Internal, match=r'"wrong" returned the shape \[1, 17\]; it must return a value .*, \[1, 16\]'):
        explain(model, noise(4, SIZE), job(model, ["wrong"], [ClassTarget(1)]))


@pytest.mark.parametrize("method", [*ROLLING, "legrad"])
def test_constant_score_has_a_zero_gradient(load, method):
    model = load("class token")

    outcome = explain(model, noise(4, SIZE), job(model, [method], [ContrastTarget(2, 2)]))

    assert outcome.explanations[0].verdict is Verdict.ZERO_GRADIENT


def test_slow_attention_gives_the_maps_of_fast_attention(load):
    model, image = load("class token"), noise(4, SIZE)
    slow = models.LoadedModel(model.info, copy.deepcopy(model.module))
    for block in slow.module.blocks:
        block.attn.fused_attn = False

    for method in (*ROLLING, "legrad"):
        assert error_ratio(*(answer(each, method, image)[0] for each in (model, slow, exact(slow)))) <= 1


def test_half_precision_maps_are_close_to_float32(load):
    model, image = load("class token"), noise(4, SIZE)
    half = models.LoadedModel(replace(model.info, precision="bfloat16"), model.module)

    for method in ("attention_rollout", "chefer", "legrad"):
        assert gap(answer(half, method, image)[0], answer(model, method, image)[0]) < 0.1


# What attention is computed instead, call by call.


@contextmanager
def watched():
    with torch.enable_grad(), AttentionCapture() as seen:
        yield seen


def tensors(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


MASKS = {
    "none": {},
    "boolean": {"attn_mask": torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(1)) > 0.3},
    "float": {"attn_mask": torch.randn(3, 6, 6, generator=torch.Generator().manual_seed(2))},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.7},
    "grouped": {"enable_gqa": True},
}


def in_float64(options):
    """Return the options with their floating tensors in float64."""
    return {
        name: each.double() if isinstance(each, torch.Tensor) and each.is_floating_point() else each
        for name, each in options.items()
    }


@pytest.mark.parametrize("mask", MASKS)
def test_attention_equals_that_of_torch(mask):
    heads = 1 if mask == "grouped" else 3
    q, k, v = tensors((2, 3, 6, 4), (2, heads, 6, 4), (2, heads, 6, 4))
    with sdpa_kernel(SDPBackend.MATH):
        expected = functional.scaled_dot_product_attention(q, k, v, **MASKS[mask])
        given = [each.double() for each in (q, k, v)]
        truth = functional.scaled_dot_product_attention(*given, **in_float64(MASKS[mask]))

    with watched() as seen:
        result = functional.scaled_dot_product_attention(q, k, v, **MASKS[mask])

    assert error_ratio(result.detach(), expected, truth) <= 1
    assert seen.attention.shape == (1, 2, 3, 6, 6)
    assert gap(seen.attention.sum(-1), torch.ones(1, 2, 3, 6)) < 1e-6


def test_attention_applies_its_dropout_probability():
    q, k, v = tensors((1, 1, 40, 4), (1, 1, 40, 4), (1, 1, 40, 4))
    with watched():
        dropped = functional.scaled_dot_product_attention(q, k, torch.ones_like(v), dropout_p=0.5)

    assert dropped.std() > 0.05  # without dropout every value is 1


MULTI_HEAD = {
    "plain": ({}, {}),
    "batch first": ({"batch_first": True}, {}),
    "weights of no interest": ({}, {"need_weights": False}),
    "weights of each head": ({}, {"average_attn_weights": False}),
    "padding": ({}, {"key_padding_mask": torch.tensor([[False] * 5, [False, True, False, False, True]])}),
    "mask": ({}, {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1)}),
    "added keys": ({"add_bias_kv": True, "add_zero_attn": True}, {}),
}


@pytest.mark.parametrize("case", MULTI_HEAD)
def test_multi_head_attention_equals_that_of_torch(case):
    made, asked = MULTI_HEAD[case]
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, **made).eval().requires_grad_(requires_grad=False)
    (tokens,) = tensors((2, 5, 8) if made.get("batch_first") else (5, 2, 8))
    expected, weights = layer(tokens, tokens, tokens, **asked)
    truth, exact_weights = doubled(layer)(*[tokens.double()] * 3, **asked)

    with watched() as seen:
        result, theirs = layer(tokens, tokens, tokens, **asked)

    assert error_ratio(result.detach(), expected, truth) <= 1
    assert (theirs is None) == (weights is None)
    assert weights is None or error_ratio(theirs.detach(), weights, exact_weights) <= 1
    assert len(seen.blocks) == (0 if case == "added keys" else 1)


# What is refused, and in which words.

BUILT = {
    "resnet": (lambda: timm.create_model("test_resnet", num_classes=5), "resnet has none"),
    "swin": (
        lambda: zoo.SwinTransformer([4, 4], 12, [1, 1], [2, 2], [4, 4], num_classes=5),
        "swin's blocks see windows of 16",
    ),
    "pvt": (
        lambda: timm.create_model("pvt_v2_b0", num_classes=5, depths=(1, 1, 1, 1)),
        "in pvt 256 tokens see 4 summaries of them",
    ),
    "levit": (
        lambda: timm.create_model("levit_128s", num_classes=5, img_size=SIZE, depth=(1, 1, 1)),
        "levit's blocks are not alike: 4 heads of 16 tokens, 6 heads of 4 tokens",
    ),
    "xcit": (
        lambda: timm.create_model("xcit_nano_12_p16_224", num_classes=5, depth=2),
        "xcit's attention is between 32 items that are not the patches of a known grid",
    ),
    "parallel": (
        lambda: VisionTransformer(**SHAPE, block_fn=timm.models.vision_transformer.ParallelThingsBlock),
        "parallel has blocks that do not follow one another",
    ),
}


def refusal(model, method):
    with pytest.raises(FailedPrecondition) as caught:
        answer(model, method, noise(4, SIZE))
    assert hooks.hook_count(model.module) == 0
    return caught.value.message


@pytest.mark.parametrize("name", BUILT)
def test_model_without_attention_between_all_patches_is_refused(plant, name):
    make, words = BUILT[name]
    model = plant(make, size=SIZE, accelerate=False)
    model = models.LoadedModel(replace(model.info, name=name), model.module)

    for method in ("chefer", "legrad"):
        assert refusal(model, method) == f"{method} needs global (not windowed) self-attention: {words}"


class Loose(VisionTransformer):
    """A transformer whose blocks are not modules: the model itself adds their outputs to the tokens."""

    def forward_features(self, image, **_more):
        tokens = self._pos_embed(self.patch_embed(image))
        for block in self.blocks:
            tokens = tokens + block.attn(block.norm1(tokens))
            tokens = tokens + block.mlp(block.norm2(tokens))
        return self.norm(tokens)


def test_legrad_refuses_blocks_that_are_no_modules_and_rollouts_do_not(plant):
    model = plant(lambda: vivid(Loose(**SHAPE)), size=SIZE)

    assert "pass their tokens on unchanged" in refusal(model, "legrad")
    for method in ROLLING:
        assert answer(model, method, noise(4, SIZE))[0].shape == (4, 4)


def test_legrad_refuses_a_single_block_and_rollouts_do_not(plant):
    model = plant(lambda: vivid(VisionTransformer(**SHAPE | {"depth": 1})), size=SIZE)

    assert "of several blocks" in refusal(model, "legrad")
    for method in ROLLING:
        assert answer(model, method, noise(4, SIZE))[0].shape == (4, 4)


class Pair(VisionTransformer):
    """A transformer whose head depends on the number of images."""

    def forward(self, image):
        return super().forward(image)[: len(image)]


def test_legrad_refuses_a_head_that_takes_no_other_tokens(plant):
    model = plant(lambda: vivid(Pair(**SHAPE)), size=SIZE)

    assert "does not accept other tokens" in refusal(model, "legrad")


def test_every_attention_method_states_its_requirements():
    for method in (*ROLLING, "legrad"):
        assert isinstance(METHODS[method], Attention)
        assert METHODS[method].needs == "global (not windowed) self-attention"
