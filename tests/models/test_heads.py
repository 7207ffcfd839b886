"""One output of several, and two classes made of one logit."""

import copy
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import camserve
from camserve_server import Explainer
from camserve_server.core.errors import ConfigError
from camserve_server.models import Preprocess, Source, load, parse, spec_of_network
from camserve_server.targets.values import ClassTarget, ContrastTarget, ProbabilityTarget, SegmentTarget
from methods.tools import error_ratio, explain, job, noise

INPUT = Preprocess((32, 32), (32, 32), "bilinear", (0, 0, 0), (1, 1, 1))


class Network(nn.Module):
    """Network with one or several outputs, which `form` puts together."""

    def __init__(self, form=lambda _colour, shape: shape, classes=(3, 4)):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Conv2d(3, 8, 5, 4, 2)
        self.colour, self.shape = nn.Linear(8, classes[0]), nn.Linear(8, classes[1])
        self.form = form

    def forward(self, image):
        features = (self.layer(image).tanh() ** 2).mean((2, 3))
        return self.form(self.colour(features), self.shape(features))


class Pixels(nn.Module):
    """Segmentation network with one logit for each pixel."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Sequential(nn.Conv2d(3, 8, 5, 4, 2), nn.Tanh())
        self.head = nn.Conv2d(8, 1, 1, bias=False)

    def forward(self, image):
        return self.head(self.layer(image))


def loaded(network, **options):
    return load(spec_of_network("net", Source(network, INPUT, **options)))


def gradcam(network, image, score):
    """Return Grad-CAM of a score of the network's output, by autograd, in the network's type of numbers."""
    outputs = []
    network.layer.register_forward_hook(lambda _layer, _args, output: outputs.append(output) or output.retain_grad())
    pixels = torch.from_numpy(image).permute(2, 0, 1)[None].to(next(network.parameters())) / 255
    score(network(pixels.requires_grad_())).backward()
    return (outputs[0].grad.mean((2, 3), keepdim=True) * outputs[0]).sum(1)[0].detach().numpy()


def check(model, network, target, score):
    """Check the Grad-CAM of a target with autograd's for a score of the network's own output."""
    image = noise(0, 32)
    result = explain(model, image, job(model, ["gradcam"], [target]))
    plain, truth = (gradcam(copy.deepcopy(network).to(dtype), image, score) for dtype in (torch.float32, torch.float64))
    assert error_ratio(result.explanations[0].heatmap, plain, truth) <= 1
    return result


FORMS = {
    "dict": (lambda colour, shape: {"colour": colour, "shape": shape}, "shape"),
    "attribute": (lambda colour, shape: SimpleNamespace(colour=colour, shape=shape), "shape"),
    "tuple": (lambda colour, shape: (colour, shape), 1),
    "list": (lambda colour, shape: [colour, shape], "1"),
    "function": (lambda colour, shape: [colour, shape], lambda output: output[1]),
}


@pytest.mark.parametrize("form", FORMS)
def test_output_chosen_by_name_or_index_has_autograds_map(form):
    make, choice = FORMS[form]
    model = loaded(Network(make), output=choice)

    assert (model.info.classes, model.info.default_layer) == (4, "layer")
    check(model, Network(), ClassTarget(2), lambda shape: shape[0, 2])


def test_factorys_output_is_chosen_by_the_spec_before_the_source(monkeypatch, tmp_path):
    (tmp_path / "heads_factory.py").write_text(
        "from camserve_server.models import Source\n"
        "from models.test_heads import FORMS, INPUT, Network\n"
        "network = Network(FORMS['dict'][0])\n"
        "def build():\n    return Source(network, INPUT, output='colour')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    classes = [
        load(parse(f"net=heads_factory:build{options}")).info.classes
        for options in ("", "?output=shape", "?output=shape", "")  # one network, as a factory may return it
    ]

    assert classes == [3, 4, 4, 3]


@pytest.mark.parametrize(
    ("network", "options", "words"),
    [
        (
            Network(FORMS["dict"][0]),
            {"output": "shap"},
            'no output "shap" .did you mean "shape"..: .*"colour", "shape"',
        ),
        (Network(FORMS["tuple"][0]), {"output": 2}, 'no output "2".*"0", "1"'),
        (Network(FORMS["dict"][0]), {}, r"several outputs \(colour, shape: name one with output=\)"),
        (Network(FORMS["list"][0]), {}, "2 outputs .name one by its index with output="),
        (Network(), {"task": "binary"}, r"needs one logit for two classes, \[B, 1\], and not \[1, 4\]"),
        (Network(classes=(3, 1)), {"labels": ("well", "ill")}, "2 labels for 1 classes; task=binary makes two"),
    ],
)
def test_unclear_output_is_refused_with_the_remedy(network, options, words):
    with pytest.raises(ConfigError, match=words):
        loaded(network, **options)


def test_single_logit_with_a_softmax_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING, "camserve_server"):
        loaded(Network(classes=(3, 1)))

    assert "has one output, whose softmax is always 1" in caplog.text


def test_two_classes_of_one_logit_have_its_sigmoid_and_autograds_maps():
    network, labels = Network(classes=(3, 1)), ("well", "ill")
    model = loaded(network, task="binary", labels=labels)
    targets = {
        ClassTarget(1): lambda logit: logit[0, 0] / 2,
        ClassTarget(0): lambda logit: -logit[0, 0] / 2,
        ContrastTarget(1, 0): lambda logit: logit[0, 0],
        ProbabilityTarget(1): lambda logit: logit[0, 0].sigmoid(),
    }
    for target, score in targets.items():
        check(model, network, target, score)


def test_probabilities_of_two_classes_of_one_logit_are_its_sigmoid():
    network, labels, image = Network(classes=(3, 1)), ("well", "ill"), noise(0, 32)

    def numbers(dtype):
        pixels = torch.from_numpy(image).permute(2, 0, 1)[None].to(dtype) / 255
        logit = copy.deepcopy(network).to(dtype)(pixels)[0, 0].detach()
        return torch.stack([logit.sigmoid(), (-logit).sigmoid(), logit]).numpy()

    options = {"size": 32, "crop": "whole", "mean": (0, 0, 0), "std": (1, 1, 1), "labels": labels}
    with Explainer(network, task="binary", **options) as explainer:
        result = explainer.explain(image, targets=camserve.contrast("ill", "well"), overlay=None)
        (entry,) = explainer.models()
    found = {each.label: each.probability for each in result.predictions}

    assert entry.task == "classify"
    answers = [found["ill"], found["well"], result.explanations[0].score]
    assert error_ratio(answers, numbers(torch.float32), numbers(torch.float64)) <= 1


def test_two_classes_of_one_logit_for_each_pixel_are_a_segmentation():
    network = Pixels()
    model = loaded(network, task="binary", labels=("ground", "lesion"))

    def score(logits):
        return logits[logits > 0].mean() / 2

    assert (model.info.task, model.info.classes) == ("segment", 2)
    result = check(model, network, SegmentTarget(1), score)
    shares = torch.from_numpy(noise(0, 32)).permute(2, 0, 1)[None] / 255
    assert np.allclose(result.logits[1, 0], (network(shares) > 0).float().mean().item())


def test_binary_task_of_a_spec_makes_two_classes():
    model = load(parse("timm:test_resnet?weights=none&classes=1&size=32&task=binary"))

    assert (model.info.task, model.info.classes) == ("classify", 2)
