"""Errors of a model's own code: the caller learns which module raised what, and never reads "internal error"."""

import logging
import re

import numpy as np
import pytest
import torch
from torch import nn

import camserve
import camserve_server
from as_written import PREPROCESS, SIZE, Plain, changed, plain
from camserve_server import Explainer
from camserve_server.core.errors import ConfigError
from camserve_server.models import Source
from models.test_as_written import IMAGE, OPTIONS

DARK = np.zeros((SIZE, SIZE, 3), np.uint8)


class Strict(nn.Module):
    """Refuses dark images, with a message that has a path in it."""

    def forward(self, values):
        if values.mean() < -0.5:
            raise ValueError("the image is too dark:\nsee /home/somebody/secret/limits.toml")
        return values


class StrictStem(Plain):
    def __init__(self):
        super().__init__()
        self.check = Strict()

    def forward(self, image):
        return super().forward(self.check(image))


def strict():
    network = StrictStem()
    network.load_state_dict(plain().state_dict())
    return network.eval()


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(_context, values):
        return values.clone()

    @staticmethod
    def backward(_context, gradient):
        if gradient.abs().max() > 0 and gradient.shape[0] == 1 and NoBackward.fails:
            raise RuntimeError("this backward pass is not written yet")
        return gradient

    fails = False


class Custom(Plain):
    def features(self, image):
        return NoBackward.apply(super().features(image))


WORDS = "net failed in its module check (Strict): the image is too dark: see limits.toml"


@pytest.mark.parametrize("method", ["gradcam", "saliency", "occlusion"])
def test_error_of_a_module_names_the_module_and_quotes_its_message(method, caplog):
    with Explainer(strict(), accelerate=False, **OPTIONS) as explainer:
        with caplog.at_level(logging.WARNING), pytest.raises(camserve.FailedPrecondition) as caught:
            explainer.explain(DARK, methods=method)
        assert explainer.explain(IMAGE, methods=method).explanations
    assert WORDS.removeprefix("net") in caught.value.message
    assert "secret/limits.toml" in caplog.text  # the log has everything


def test_error_of_a_served_module_reaches_the_caller_and_nobody_else():
    with camserve_server.running({"net": Source(strict(), PREPROCESS)}) as address, camserve.Client(address) as client:
        results = [*client.explain_many([IMAGE, DARK, IMAGE], on_error="return", heatmap=True)]
    good, bad, other = results
    assert WORDS in str(bad)
    assert np.array_equal(good.explanations[0].heatmap, other.explanations[0].heatmap)


def test_error_of_a_backward_pass_is_quoted(monkeypatch):
    with Explainer(changed(Custom), accelerate=False, **OPTIONS) as explainer:
        monkeypatch.setattr(NoBackward, "fails", True)
        words = "failed in the gradient of its score: this backward pass is not written yet"
        with pytest.raises(camserve.FailedPrecondition, match=re.escape(words)):
            explainer.explain(IMAGE, layers="stem")


def test_network_that_does_not_run_says_where():
    words = "in its module 0 (Conv2d); its first convolution takes 2 channels: give mean and std a number for each"
    with pytest.raises(ConfigError, match=re.escape(words)):
        Explainer(nn.Sequential(nn.Conv2d(2, 3, 3), plain()), mean=(0.5,) * 3, std=(0.5,) * 3, size=SIZE)


class WithText(Plain):
    def forward(self, image, text, scale=1):
        return super().forward(image) * scale + text


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (
            nn.Sequential(nn.Conv3d(3, 4, 3), nn.AdaptiveAvgPool3d(1), nn.Flatten()),
            "; it takes videos or volumes: camserve_server.models.tiled gives it the tiles of one picture",
        ),
        (changed(WithText), "; its forward needs text besides the image: wrap it in a module that passes it on, or"),
    ],
    ids=["volumes", "several inputs"],
)
def test_network_of_other_inputs_is_refused_with_the_way_out(network, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        Explainer(network, size=SIZE)


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_channels_are_those_of_the_first_convolution(channels):
    network = nn.Sequential(
        nn.Conv2d(channels, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )
    with Explainer(network.eval(), size=SIZE) as explainer:
        assert explainer.model().input_channels == channels
        image = np.zeros((SIZE, SIZE, channels), np.uint8)
        assert explainer.explain(image[:, :, 0] if channels == 1 else image).explanations


def test_first_convolution_of_a_network_of_rgb_may_take_other_channels():
    ordered = nn.Sequential()
    ordered.head = nn.Conv2d(8, 5, 1)  # made before the stem, as people write them
    ordered.stem = plain().stem
    ordered.forward = lambda image: ordered.head(nn.functional.pad(ordered.stem(image), (0, 0, 0, 0, 0, 2))).mean(
        (2, 3)
    )
    with Explainer(ordered.eval(), size=SIZE) as explainer:
        assert explainer.model().input_channels == 3


@pytest.mark.parametrize("channels", [1, 2, 4, 12])
def test_preprocessed_tensor_has_the_channels_of_the_network(channels):
    network = nn.Sequential(
        nn.Conv2d(channels, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )
    image = torch.randn(channels, SIZE, SIZE, generator=torch.Generator().manual_seed(channels))
    with torch.no_grad():
        expected = network.eval()(image[None])[0, 1].item()
    with Explainer(network, size=SIZE) as explainer:
        (found,) = explainer.explain(image, targets=1).explanations

    assert found.score == pytest.approx(expected, rel=1e-5)
    assert found.image.size == (SIZE, SIZE)
