"""Grad-ECLIP on the last attention of transformers equals the formula written out, and other models are refused."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torchvision import models as zoo

from camserve_server.core.errors import FailedPrecondition
from camserve_server.engine.values import Row
from camserve_server.jobs.verdict import Verdict
from camserve_server.methods.values import MethodCall
from camserve_server.models import hooks
from camserve_server.targets.values import ClassTarget, ContrastTarget
from engine.test_attention import FACTORIES, SIZE, vivid, vivid_model
from methods.tools import call, doubled, error_ratio, exact, explain, gap, inputs, job, noise, run

METHOD = "gradeclip"
NAMES = ("class token", "distilled", "registers", "mean of patches", "attention pooling", "eva", "torchvision")


@pytest.fixture(scope="module")
def load():
    """Return the function that loads a model."""
    return vivid_model


def answer(model, image, target=None):
    (result,) = run(model, [Row(image, target or ClassTarget(1), (call(METHOD),))], (), "last")
    return result


def written_out(module, seen, prefix):
    """Return the map of the logit of class 1, token by token and patch by patch, from the last attention that ran."""
    calls, attend = [], functional.scaled_dot_product_attention

    def record(query, key, value, *args, **options):
        output = attend(query, key, value, *args, **options)
        output.retain_grad()
        calls.append((query, key, value, output))
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "scaled_dot_product_attention", record)
        module(seen.requires_grad_())[0, 1].backward()
    query, key, value, output = calls[-1]
    rows = [tensor[0].detach().transpose(0, 1).flatten(1).numpy() for tensor in (query, key, value)]
    gradient = output.grad[0].transpose(0, 1).flatten(1).numpy()
    queries, keys, values = rows
    total = np.zeros(len(keys) - prefix)
    for q, g in zip(queries, gradient, strict=True):
        cosines = np.array([q @ k / (np.linalg.norm(q) * np.linalg.norm(k)) for k in keys[prefix:]])
        loosened = (cosines - cosines.min()) / (cosines.max() - cosines.min())
        total += loosened * np.array([g @ v for v in values[prefix:]])
    return np.maximum(total, 0).reshape(4, 4)


@pytest.mark.parametrize("name", NAMES)
def test_map_equals_the_formula_written_out(load, name):
    model, image, prefix = load(name), noise(4, SIZE), FACTORIES[name][1]
    found = answer(model, image).maps[0][0]
    seen = inputs(model, image)
    plain = written_out(copy.deepcopy(model.module), seen.clone(), prefix)
    truth = written_out(doubled(model.module), seen.double(), prefix)

    assert (found > 0).any()
    assert error_ratio(found, plain, truth) <= 1
    assert hooks.hook_count(model.module) == 0


def test_targets_of_one_image_share_a_forward_pass_and_keep_their_maps(load):
    model, image = load("class token"), noise(4, SIZE)
    targets = [ClassTarget(1), ClassTarget(3), ContrastTarget(1, 3)]
    passes = []
    with model.module.register_forward_hook(lambda *_: passes.append(1)):
        results = run(model, [Row(image, target, (call(METHOD),)) for target in targets], (), "last")

    assert len(passes) == 1
    for result, target in zip(results, targets, strict=True):
        expected = (answer(each, image, target).maps[0][0] for each in (model, exact(model)))
        assert error_ratio(result.maps[0][0], *expected) <= 1


def test_smoothing_and_constant_scores_are_supported(load):
    model, image = load("class token"), noise(4, SIZE)
    smoothed = MethodCall(METHOD, {}, augmented=True)
    plain, smooth = explain(model, image, job(model, [METHOD, smoothed], [ClassTarget(1)])).explanations
    (constant,) = explain(model, image, job(model, [METHOD], [ContrastTarget(2, 2)])).explanations

    assert (plain.verdict, smooth.verdict, constant.verdict) == (Verdict.OK, Verdict.OK, Verdict.ZERO_GRADIENT)
    assert gap(smooth.heatmap, plain.heatmap) > 1e-3


def refusal(model):
    with pytest.raises(FailedPrecondition) as caught:
        answer(model, noise(4, SIZE))
    assert hooks.hook_count(model.module) == 0
    return caught.value.message


def by_hand(slow):
    """Return a transformer whose blocks compute attention with matrix products of their own."""
    module = vivid(FACTORIES["class token"][0]())
    for block in module.blocks:
        block.attn.fused_attn = not slow
    return module


class Windows(nn.Module):
    """A transformer's block whose tokens see only those of their own quarter."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 24, 16, 16)
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, 5)

    def forward(self, images):
        tokens = self.norm(self.patch(images).flatten(2).transpose(1, 2))
        windows = tokens.reshape(-1, 1, 4, 24)
        mixed = functional.scaled_dot_product_attention(windows, windows, windows)
        return self.head(tokens + mixed.reshape(tokens.shape)).mean(1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: zoo.resnet18(num_classes=5), "has none that torch computes"),
        (lambda: by_hand(slow=True), "has none that torch computes"),
        (lambda: vivid(Windows()), "the last one of planted is to 4 items that are not the patches of an image"),
    ],
)
def test_model_without_a_last_attention_to_all_patches_is_refused(plant, make, words):
    message = refusal(plant(make, size=SIZE))

    assert message.startswith("gradeclip needs global (not windowed) self-attention: ")
    assert words in message


class Averaged(nn.Module):
    """A transformer's block that also uses the attention's weights, which torch returns as a mean over heads."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 24, 16, 16)
        self.attention = nn.MultiheadAttention(24, 2, batch_first=True)
        self.head = nn.Linear(24, 5)

    def forward(self, images):
        tokens = self.patch(images).flatten(2).transpose(1, 2)
        output, weights = self.attention(tokens, tokens, tokens)
        return self.head(tokens + output + weights @ tokens).mean(1)


def test_weights_that_torch_returns_stay_the_same(plant):
    model, image = plant(lambda: vivid(Averaged()), size=SIZE), noise(4, SIZE)
    with torch.no_grad():
        expected = model.module(inputs(model, image))[0].numpy()

    assert gap(answer(model, image).logits, expected) < 1e-5
