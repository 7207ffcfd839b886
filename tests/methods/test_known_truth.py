"""Every method finds the image regions that a model with known weights uses.

The score of class 0 is how much red there is, and of class 1 how much blue; the photo has a red square and a smaller,
paler blue one on grey. What a method says of class 0 is right where the red square is.
"""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from camserve_server.methods import METHODS, Attention
from camserve_server.targets.values import ClassTarget
from methods.tools import call, explain, job

SIDE = 48
RED = (slice(8, 24), slice(26, 42))
BLUE = (slice(30, 42), slice(6, 18))

DETECTING = [name for name in METHODS if METHODS[name].tasks == ("detect",)]
"""Methods that need a detector. They are tested on a detector with known weights in test_drise.py."""

EXEMPT = {
    "random": "it does not look at the image",
    "edges": "it does not look at the model: both squares have edges",
}
"""Methods that cannot find the region, with the reasons."""

ATTENTIVE = [name for name in METHODS if isinstance(METHODS[name], Attention)]
"""Methods that need a transformer. They are tested on a transformer with known weights."""

UNAIMED = ("attention_rollout",)
"""Attention methods whose maps are the same for every class."""


class Colours(nn.Module):
    """Two-stage network that scores class 0 by red, class 1 by blue and class 2 by brightness.

    Grey is below the thresholds of red and of blue by more than noise can make up for.
    """

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 3, 3, padding=1, padding_mode="replicate")
        self.second = nn.Conv2d(3, 3, 2, stride=2)
        self.head = nn.Linear(3, 3)
        self.relu = nn.ReLU()
        seen = torch.tensor([[1.0, -0.5, -0.5], [-0.5, -0.5, 1.0], [0.05, 0.05, 0.05]])  # red, blue, bright
        with torch.no_grad():
            self.first.weight.copy_((seen / 9)[:, :, None, None].expand(3, 3, 3, 3))
            self.first.bias.copy_(torch.tensor([-1.5, -1.5, 0.5]))
            self.second.weight.copy_((torch.eye(3) / 4)[:, :, None, None].expand(3, 3, 2, 2))
            self.second.bias.fill_(-0.1)
            self.head.weight.copy_(20 * torch.eye(3))
            self.head.bias.zero_()

    def forward(self, image):
        small = self.relu(self.second(self.relu(self.first(image))))
        return self.head(functional.adaptive_avg_pool2d(small.square(), 1).flatten(1))


class Attends(nn.Module):
    """Transformer for the same colours. Its class token attends to patches by how red or blue they are.

    A token is how red it is, how blue, and whether it is the class token. Only the class token asks for anything; the
    others take from every token alike.
    """

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 2, 8, stride=8)
        self.class_token = nn.Parameter(torch.tensor([[[0.0, 0.0, 1.0]]]))
        self.blocks = nn.Sequential(Takes(), Takes())
        self.head = nn.Linear(3, 2, bias=False)
        seen = torch.tensor([[1.0, -0.5, -0.5], [-0.5, -0.5, 1.0]]) / 64
        with torch.no_grad():
            self.patches.weight.copy_(seen[:, :, None, None].expand(2, 3, 8, 8))
            self.patches.bias.zero_()
            self.head.weight.copy_(20 * torch.eye(2, 3))

    def forward(self, image):
        colours = self.patches(image).flatten(2).mT
        tokens = torch.cat([self.class_token.expand(len(image), -1, -1), functional.pad(colours, (0, 1))], 1)
        return self.head(self.blocks(tokens)[:, 0])


class Takes(nn.Module):
    """A block of that transformer: a token's attention output is added to it."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(3, size, bias=False) for size in (1, 1, 3))
        with torch.no_grad():
            self.query.weight.copy_(torch.tensor([[0.0, 0.0, 2.0]]))
            self.key.weight.copy_(torch.tensor([[1.0, 1.0, 0.0]]))
            self.value.weight.copy_(torch.diag(torch.tensor([1.0, 1.0, 0.0])))

    def forward(self, tokens):
        return tokens + functional.scaled_dot_product_attention(
            self.query(tokens), self.key(tokens), self.value(tokens)
        )


@pytest.fixture(scope="module")
def image():
    photo = np.full((SIDE, SIDE, 3), (124, 116, 104), np.uint8)  # the mean colour
    photo[RED] = (230, 40, 40)
    photo[BLUE] = (60, 60, 200)
    return photo + np.random.default_rng(0).integers(-8, 9, photo.shape).astype(np.int8).view(np.uint8)


def share_in_red(heatmap):
    """Return the share of the map's highest tenth that lies in the red square."""
    large = functional.interpolate(torch.from_numpy(heatmap)[None, None], (SIDE, SIDE), mode="bilinear")[0, 0].numpy()
    hottest = np.argsort(-large, None, kind="stable")[: SIDE * SIDE // 10]
    inside = np.zeros((SIDE, SIDE), bool)
    inside[RED] = True
    return inside.flat[hottest].mean()


@pytest.mark.parametrize("name", [name for name in METHODS if name not in (*EXEMPT, *ATTENTIVE, *DETECTING)])
def test_highest_tenth_of_a_map_is_at_the_decisive_region(plant, image, name):
    model = plant(Colours, size=SIDE)
    (explanation,) = explain(model, image, job(model, [call(name)], [ClassTarget(0)], ["second"])).explanations
    assert share_in_red(explanation.heatmap) >= 0.5


@pytest.mark.parametrize("name", ATTENTIVE)
def test_highest_tenth_of_an_attention_map_is_at_the_decisive_region(plant, image, name):
    model = plant(Attends, size=SIDE)
    red, blue = explain(model, image, job(model, [call(name)], [ClassTarget(0), ClassTarget(1)])).explanations

    assert share_in_red(red.heatmap) >= 0.7
    hottest = np.unravel_index(blue.heatmap.argmax(), blue.heatmap.shape)
    assert (hottest == (4, 1)) == (name not in UNAIMED)  # the patch in the blue square's middle


@pytest.mark.parametrize("name", EXEMPT)
def test_exempt_methods_fail_the_known_truth_check(plant, image, name):
    """An exemption is removed when its reason no longer holds."""
    model = plant(Colours, size=SIDE)
    (explanation,) = explain(model, image, job(model, [call(name)], [ClassTarget(0)], ["second"])).explanations
    assert share_in_red(explanation.heatmap) < 0.5


def test_map_of_the_wrong_class_is_detected(plant, image):
    """A planted fault: the map for blue is not at the red square."""
    model = plant(Colours, size=SIDE)
    for name in ("gradcam", "saliency", "occlusion"):
        (explanation,) = explain(model, image, job(model, [call(name)], [ClassTarget(1)], ["second"])).explanations
        assert share_in_red(explanation.heatmap) < 0.2


@pytest.mark.slow
def test_512_masks_of_rise_are_enough(plant, image):
    model = plant(Colours, size=SIDE)
    few, many = (
        explain(model, image, job(model, [call("rise", samples=count)], [ClassTarget(0)], ["second"]))
        .explanations[0]
        .heatmap
        for count in (512, 4096)
    )
    assert np.corrcoef(few.ravel(), many.ravel())[0, 1] >= 0.95
