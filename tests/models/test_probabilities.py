"""Networks that end in a softmax or a sigmoid: the probabilities are their own, and scores are their logits."""

import logging
import re

import numpy as np
import pytest
import torch
from torch import nn

import camserve
import camserve_server
from as_written import PREPROCESS, Plain, changed, plain
from camserve_server import Explainer
from camserve_server.core.errors import ConfigError
from camserve_server.models import Source, parse
from methods.tools import doubled, error_ratio
from models.test_as_written import IMAGE, OPTIONS, as_input, check_equal, gradcam, maps, offered


class Softmax(Plain):
    def forward(self, image):
        return super().forward(image).softmax(1)


class Sigmoid(Plain):
    def forward(self, image):
        return torch.sigmoid(super().forward(image))


class SoftmaxBeforeLogits(Plain):
    """As a classifier of YOLO returns them."""

    def forward(self, image):
        logits = super().forward(image)
        return logits.softmax(1), logits


class SigmoidBeforeLogits(Plain):
    def forward(self, image):
        logits = super().forward(image)
        return logits.sigmoid(), logits


class MeanOfMirrored(Plain):
    """The mean of the probabilities for an image and its mirror image."""

    def forward(self, image):
        first, second = super().forward(image), super().forward(image.flip(3))
        return torch.stack([first.softmax(1), second.softmax(1)]).mean(0)


class WithoutGradient(Plain):
    @torch.no_grad()
    def forward(self, image):
        return torch.sigmoid(super().forward(image))


def own(network):
    """Return the numbers of a network for the image."""
    with torch.no_grad():
        output = network(as_input(network).detach())
    return (output[0] if isinstance(output, tuple) else output)[0].numpy()


def predicted(result):
    return {each.class_index: each.probability for each in result.predictions}


NETWORKS = {
    "softmax": lambda: changed(Softmax),
    "softmax_module": lambda: nn.Sequential(plain(), nn.Softmax(1)),
    "softmax_and_logits": lambda: changed(SoftmaxBeforeLogits),
    "mean_of_softmaxes": lambda: changed(MeanOfMirrored),
    "sigmoid": lambda: changed(Sigmoid),
    "sigmoid_module": lambda: nn.Sequential(plain(), nn.Sigmoid()),
    "sigmoid_and_logits": lambda: changed(SigmoidBeforeLogits),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_probabilities_are_those_of_the_network(name, caplog):
    network, kind = NETWORKS[name](), name.split("_")[-1] if name.startswith("mean") else name.split("_")[0]
    task = "multilabel" if name.startswith("sigmoid") else "classify"
    with caplog.at_level(logging.WARNING, "camserve_server"), Explainer(network, **OPTIONS) as explainer:
        assert explainer.model().task == task
        found = predicted(explainer.explain(IMAGE, overlay=None))

    assert found == pytest.approx(dict(enumerate(own(network))), abs=1e-6)
    assert f"returns probabilities of a {kind.removesuffix('es')}: its scores are the log" in caplog.text


def test_probabilities_of_a_served_network_are_its_own():
    sources = {name: Source(make(), PREPROCESS) for name, make in NETWORKS.items()}
    with camserve_server.running(sources) as address, camserve.Client(address) as client:
        for name, make in NETWORKS.items():
            found = predicted(client.explain(IMAGE, model=name, overlay=None))
            assert found == pytest.approx(dict(enumerate(own(make()))), abs=1e-6)


@pytest.mark.parametrize(
    "last", [nn.Softmax(1), pytest.param(nn.Sigmoid(), marks=pytest.mark.slow)], ids=["softmax", "sigmoid"]
)
def test_maps_before_an_activation_are_those_of_the_logits_to_the_bit(last):
    task = {"task": "multilabel"} if isinstance(last, nn.Sigmoid) else {}
    with Explainer(nn.Sequential(plain(), nn.Identity()), accelerate=False, **task, **OPTIONS) as explainer:
        methods = offered(explainer)
        expected = maps(explainer, methods)
    network = nn.Sequential(plain(), last)
    with Explainer(network, accelerate=False, **OPTIONS) as explainer:
        check_equal(maps(explainer, methods), expected)

    assert network[1] is last  # the caller's own network is as it was


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SoftmaxBeforeLogits, SigmoidBeforeLogits])
def test_logits_beside_probabilities_are_explained(kind):
    task = {"task": "multilabel"} if kind is SigmoidBeforeLogits else {}
    with Explainer(plain(), accelerate=False, **task, **OPTIONS) as explainer:
        methods = offered(explainer)
        expected = maps(explainer, methods)
    with Explainer(changed(kind), accelerate=False, **OPTIONS) as explainer:
        check_equal(maps(explainer, methods), expected)


class LogSoftmax(Plain):
    def forward(self, image):
        return super().forward(image).log_softmax(1)


@pytest.mark.parametrize(
    ("kind", "logits"), [(Softmax, LogSoftmax), (Sigmoid, Plain)], ids=["logarithm of a softmax", "logit of a sigmoid"]
)
def test_maps_of_probabilities_are_those_of_their_logits(kind, logits):
    with Explainer(changed(kind), **OPTIONS) as explainer:
        (found,) = explainer.explain(IMAGE, targets=3, overlay=None).explanations
    reference, truth = (gradcam(network, network.body) for network in (changed(logits), doubled(changed(logits))))
    with torch.no_grad():
        score = changed(logits)(as_input(plain()))[0, 3].item()

    assert error_ratio(found.heatmap, reference, truth) <= 1
    assert found.score == pytest.approx(score, rel=1e-5)


def test_logits_from_0_to_1_are_no_probabilities(caplog):
    network = plain()
    with torch.no_grad():
        network.head.weight.mul_(1e-3)
        network.head.bias.fill_(0.5)
    with caplog.at_level(logging.WARNING, "camserve_server"), Explainer(network, **OPTIONS) as explainer:
        found = predicted(explainer.explain(IMAGE, overlay=None))

    assert found == pytest.approx(dict.fromkeys(range(5), 0.2), abs=1e-2)
    assert "probabilities" not in caplog.text


def test_sigmoid_of_one_number_is_one_class_or_two():
    network = nn.Sequential(plain(1), nn.Sigmoid())
    probability = own(network)[0]
    with Explainer(network, **OPTIONS) as explainer:
        assert predicted(explainer.explain(IMAGE, overlay=None)) == pytest.approx({0: probability}, abs=1e-6)
    with Explainer(network, task="binary", **OPTIONS) as explainer:
        found = predicted(explainer.explain(IMAGE, overlay=None))
    assert found == pytest.approx({0: 1 - probability, 1: probability}, abs=1e-6)


def segmenter(channels, *after):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        first, second = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, channels, 1)
    return nn.Sequential(first, nn.ReLU(), second, *after).eval()


@pytest.mark.parametrize("channels", [1, 4])
def test_probabilities_of_every_pixel_are_those_of_the_network(channels):
    last = nn.Sigmoid() if channels == 1 else nn.Softmax(1)
    network = segmenter(channels, last)
    probabilities = own(network)
    if channels == 1:
        probabilities = np.concatenate([1 - probabilities, probabilities])
    with Explainer(network, **OPTIONS) as explainer:
        assert explainer.model().task == "segment"
        result = explainer.explain(IMAGE, overlay=None)
    classes = probabilities.argmax(0)

    for prediction in result.predictions:
        inside = classes == prediction.class_index
        assert prediction.probability == pytest.approx(probabilities[prediction.class_index][inside].mean(), abs=1e-5)


def test_option_says_what_a_network_returns():
    with Explainer(changed(Softmax), activation="none", **OPTIONS) as explainer:
        twice = predicted(explainer.explain(IMAGE, overlay=None))
    expected = torch.from_numpy(own(changed(Softmax))).softmax(0).numpy()
    assert twice == pytest.approx(dict(enumerate(expected)), abs=1e-6)
    with Explainer(changed(WithoutGradient), activation="sigmoid", **OPTIONS) as explainer:
        found = predicted(explainer.explain(IMAGE, methods="occlusion", overlay=None))
    assert found == pytest.approx(dict(enumerate(own(changed(Sigmoid)))), abs=1e-6)


def test_option_of_a_spec_is_checked():
    assert parse("net=as_written:plain?activation=softmax").activation == "softmax"
    with pytest.raises(ConfigError, match=r"activation must be one of none, softmax, sigmoid$"):
        parse("net=as_written:plain?activation=tanh")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"activation": "soft"}, 'activation="soft" (did you mean "softmax"?): one of none, softmax, sigmoid'),
        ({"size": 32.5}, "size=32.5: it is a number of pixels, or (height, width)"),
        ({"size": (32, 32, 3)}, "size=(32, 32, 3): it is a number of pixels, or (height, width)"),
        ({"size": "32"}, "size='32': it is a number of pixels, or (height, width)"),
        ({"size": 0}, "size=0: an input has at least one pixel"),
        ({"accelerate": "no"}, "accelerate='no': True or False"),
        ({"text": nn.Linear(2, 2)}, "text is a Linear: give a camserve_server.models.TextTower"),
        ({"task": "multilable"}, 'task="multilable" (did you mean "multilabel"?): one of classify, multilabel'),
    ],
)
def test_option_of_a_network_is_checked(options, words):
    with pytest.raises(ConfigError, match=f"^{re.escape(words)}"):
        Explainer(plain(), **(OPTIONS | options))
