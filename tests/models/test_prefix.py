"""After the last attention only the class token is computed, if the output depends on no other token."""

from functools import partial

import pytest
import timm
import torch
from torch import nn
from torchvision.models import VisionTransformer

from camserve_server.engine.values import Row
from camserve_server.models.acceleration.prefix import find_prefix_modules
from camserve_server.models.values import Pass
from camserve_server.targets.values import ClassTarget
from methods.tools import CAMS, call, inputs, noise, run, worst_error_ratio

GRID = 16


def vision_transformer():
    torch.manual_seed(0)
    return VisionTransformer(64, 16, num_layers=3, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=5)


def of_timm(name, **options):
    torch.manual_seed(0)
    return timm.create_model(name, img_size=64, **options)


class Tokens(nn.Module):
    """A class token and sixteen others, with one block; `last` is applied after its attention."""

    def __init__(self, last=lambda net, tokens: tokens + net.mlp(tokens), answer=lambda tokens: tokens[:, 0]):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Conv2d(3, 16, 16, 16)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.norm = nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.mixing = nn.Linear(GRID + 1, GRID + 1)
        self.head = nn.Linear(16, 5)
        self.last, self.answer = last, answer

    def forward(self, image):
        tokens = self.embed(image).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(tokens), -1, -1), tokens], 1)
        features = self.norm(tokens)
        tokens = features + self.attention(features, features, features, need_weights=False)[0]
        return self.head(self.answer(self.last(self, tokens)))


class Mixing(nn.Module):
    """A linear map that also mixes tokens, by a small share."""

    def __init__(self, share):
        super().__init__()
        self.map, self.share = nn.Linear(16, 16), share

    def forward(self, tokens):
        return self.map(tokens) + self.share * tokens.mean(1, keepdim=True)


def divided_by_norm(net, tokens):
    """Divide by a norm that is 0 for zero tokens: no score depends on the NaN, but its gradient is 0 times NaN."""
    mapped = net.mlp(tokens)
    return tokens * (mapped / mapped.pow(2).sum(-1, keepdim=True).sqrt())


def prefix_modules(model):
    image = inputs(model, noise(0, 64))
    attentions = [name for name, module in model.module.named_modules() if type(module) is nn.MultiheadAttention]
    return find_prefix_modules(model.module, model.info, image, attentions[-1:])


def answers(model, kind="cam"):
    rows = [Row(noise(seed, 64), ClassTarget(3), tuple(map(call, CAMS))) for seed in range(3)]
    layers = [] if kind == "score" else [model.info.default_layer]
    results = run(model, rows, layers, kind)
    return [heatmap for result in results for heatmap in (result.logits, *(result.maps[0] if layers else ()))]


def token_counts(model):
    """Count the tokens that each linear map of the accelerated copy receives."""
    counts = {}

    def record(name, args):
        counts[name] = args[0].shape[1]

    for name, module in model.accelerated.module.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _module, args, name=name: record(name, args))
    answers(model)
    return counts


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (vision_transformer, {"self_attention", "ln_2", "mlp", "encoder.ln"}),
        (partial(of_timm, "test_vit"), {"attn.proj", "norm2", "mlp", "norm"}),
        pytest.param(
            partial(of_timm, "deit_tiny_distilled_patch16_224", depth=2),
            {"attn.proj", "norm2", "mlp", "norm"},
            marks=pytest.mark.slow,
        ),
        (Tokens, {"attention", "mlp"}),
    ],
)
def test_results_equal_those_of_the_model(make, names, plant):
    model = plant(make, size=64, weights="none")
    prefix = 2 if "distilled" in str(make) else 1
    prefixes = prefix_modules(model)
    block = model.info.default_layer.rpartition(".")[0]
    assert {name.removeprefix(f"{block}.") for name in prefixes} == names
    assert set(prefixes.values()) == {prefix}
    for kind in ("cam", "score"):
        assert worst_error_ratio(answers, model, kind) <= 1


def test_only_the_class_token_goes_through_the_last_block(plant):
    counts = token_counts(plant(vision_transformer, size=64, weights="none"))
    last = {name: tokens for name, tokens in counts.items() if "encoder_layer_2.mlp" in name}
    assert len(last) == 2
    assert set(last.values()) == {1}
    assert {tokens for name, tokens in counts.items() if "encoder_layer_1.mlp" in name} == {GRID + 1}


@pytest.mark.parametrize(
    "make",
    [
        partial(of_timm, "test_vit", global_pool="avg"),
        partial(Tokens, answer=lambda tokens: tokens.mean(1)),
        partial(Tokens, answer=lambda tokens: tokens[:, 0] + 1e-6 * tokens[:, 1:].mean(1)),
        partial(Tokens, lambda net, tokens: tokens + net.mixing(net.mlp(tokens).mT).mT),
    ],
)
def test_nothing_is_skipped_if_other_tokens_matter(make, plant):
    model = plant(make, size=64, weights="none")
    assert model.info.layers[model.info.default_layer].layout.prefix == 1
    assert prefix_modules(model) == {}
    assert worst_error_ratio(answers, model) <= 1


@pytest.mark.parametrize("share", [1.0, 1e-9])
def test_modules_that_mix_tokens_receive_all_of_them(share, plant):
    def make():
        net = Tokens()
        net.mlp = Mixing(share)
        return net

    model = plant(make, size=64, weights="none")
    assert set(prefix_modules(model)) == {"mlp.map"}
    assert worst_error_ratio(answers, model) <= 1


def test_nothing_is_skipped_if_zeros_would_make_a_gradient_nan(plant):
    model = plant(partial(Tokens, divided_by_norm), size=64, weights="none")
    assert prefix_modules(model) == {}
    assert worst_error_ratio(answers, model) <= 1


def test_module_with_its_own_hook_is_not_changed(plant):
    def make():
        net = Tokens()
        net.mlp.register_forward_hook(lambda _module, _args, output: output)
        return net

    assert "mlp" not in prefix_modules(plant(make, size=64, weights="none"))


def test_layer_with_skipped_tokens_is_captured_in_the_model(plant):
    model = plant(vision_transformer, size=64, weights="none")
    block = "encoder.layers.encoder_layer_2"
    chosen = {name: model.for_pass(Pass(model.info.name, "cam", (64, 64), (name,))) for name in model.info.layers}
    assert chosen[f"{block}.ln_1"].module is model.accelerated.module
    for name in ("self_attention", "ln_2", "mlp", "mlp.0"):
        assert chosen[f"{block}.{name}"] is model
    assert chosen[block] is model


def test_copy_can_be_differentiated_twice(plant):
    model = plant(vision_transformer, size=64, weights="none")
    rows = [Row(noise(seed, 64), ClassTarget(3), (call("shapleycam"),)) for seed in range(2)]

    def maps(model):
        return [result.maps[0][0] for result in run(model, rows, [model.info.default_layer], "curvature")]

    assert worst_error_ratio(maps, model) <= 1
