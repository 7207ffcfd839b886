"""The embedded network and its labels are those of timm and torchvision, which a server need not import for them."""

import pytest
import timm
import torch
import torchvision

from camserve_server import models
from camserve_server.models import parse, sources
from camserve_server.models.efficientnet_lite import EfficientNet
from camserve_server.models.source import IMAGENET_LABELS


def theirs(classes=1000):
    torch.manual_seed(0)
    return timm.create_model("tf_efficientnet_lite0", num_classes=classes).eval()


def structure(network):
    """Names and classes of all modules, with the arguments of the leaves."""
    leaves = {name: str(module) for name, module in network.named_modules() if not any(module.children())}
    return [(name, type(module).__name__, leaves.get(name)) for name, module in network.named_modules()]


def test_embedded_network_has_the_modules_and_weights_of_timms():
    ours, network = EfficientNet(1000), theirs()

    assert structure(ours) == structure(network)
    assert [(name, value.shape, value.dtype) for name, value in ours.state_dict().items()] == [
        (name, value.shape, value.dtype) for name, value in network.state_dict().items()
    ]
    assert {name for name, _ in ours.named_parameters()} == {name for name, _ in network.named_parameters()}
    assert {name for name, _ in ours.named_buffers()} == {name for name, _ in network.named_buffers()}


@torch.no_grad()
def test_embedded_network_computes_the_bytes_that_timms_computes():
    weights = sources.build(parse("efficientnet_lite0")).module.state_dict()
    ours, network = EfficientNet(1000).eval(), theirs()
    ours.load_state_dict(weights)
    network.load_state_dict(weights)

    for size in ((96, 96), (65, 130)):
        images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
        assert torch.equal(ours(images), network(images))


def test_random_weights_of_the_embedded_network_are_those_that_timm_draws():
    ours, network = sources.build(parse("efficientnet_lite0?weights=none&classes=7")).module, theirs(7)

    assert all(map(torch.equal, ours.state_dict().values(), network.state_dict().values()))


@pytest.mark.slow
def test_embedded_model_folds_the_norms_that_are_folded_in_timms():
    lite0, network = models.load(parse("efficientnet_lite0?size=64")), theirs()
    network.load_state_dict(lite0.module.state_dict())
    source = models.Source(network, lite0.info.preprocess, IMAGENET_LABELS)
    model = models.load(models.spec_of_network("lite", source))

    assert model.info.layers == lite0.info.layers
    assert model.info.default_layer == lite0.info.default_layer
    assert model.accelerated.folded_norms == lite0.accelerated.folded_norms == 49
    assert [site.name for site in model.accelerated.onednn.sites] == [
        site.name for site in lite0.accelerated.onednn.sites
    ]


def test_imagenet_labels_are_those_of_torchvision():
    weights = torchvision.models.ResNet50_Weights.IMAGENET1K_V1
    assert tuple(weights.meta["categories"]) == IMAGENET_LABELS
