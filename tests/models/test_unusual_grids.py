"""Layers whose grid is a single cell, or as large as the number of channels; heads that read the grid as a sequence."""

import pytest
import torch
from torch import nn
from torchvision.ops import SqueezeExcitation

import camserve
import camserve_server
from as_written import PREPROCESS
from camserve_server import Explainer
from camserve_server.models import Source
from methods.tools import doubled, error_ratio
from models.test_as_written import IMAGE, OPTIONS, gradcam, offered, saliency


def block(inputs, outputs, stride):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), nn.ReLU())


class Deep(nn.Module):
    """A network made for larger images: its last feature map of one of 32 x 32 pixels has one cell."""

    def __init__(self):
        super().__init__()
        self.stem = block(3, 6, 8)
        self.squeeze = SqueezeExcitation(6, 3)
        self.middle = block(6, 8, 2)
        self.last = block(8, 8, 2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, 5)

    def forward(self, image):
        features = self.last(self.middle(self.squeeze(self.stem(image))))
        return self.head(self.pool(features).flatten(1))


class Square(nn.Module):
    """A feature map of 16 channels on 16 rows and 16 columns."""

    def __init__(self):
        super().__init__()
        self.body = block(3, 16, 2)
        self.head = nn.Linear(16, 5)

    def forward(self, image):
        return self.head(self.body(image).mean((2, 3)))


class Reader(nn.Module):
    """A recurrent network over the columns of a feature map, as for reading texts."""

    def __init__(self, kind):
        super().__init__()
        self.body = block(3, 8, 4)
        self.reader = kind(8, 6, bidirectional=True, batch_first=True)
        self.head = nn.Linear(12, 5)

    def forward(self, image):
        columns = self.body(image).mean(2).transpose(1, 2)
        return self.head(self.reader(columns)[0].mean(1))


def seeded(make, *args):
    """Return a network, always the same, with statistics of a training in its batch norms."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        network = make(*args)
        for _ in range(5):
            network(torch.randn(8, 3, 32, 32) * 2 + 1)
    return network.eval()


def deep():
    return seeded(Deep)


def source():
    return Source(deep(), PREPROCESS)


def explained(client, method="gradcam", **options):
    (found,) = client.explain(IMAGE, methods=method, targets=3, overlay=None, heatmap=True, **options).explanations
    return found


def check_map(found, network, layer):
    reference, truth = (gradcam(each, each.get_submodule(layer)) for each in (network, doubled(network)))
    assert found.heatmap.shape == truth.shape
    assert error_ratio(found.heatmap, reference, truth) <= 1


@pytest.mark.parametrize("layer", ["last", "last.0", "pool"])
def test_map_of_one_cell_has_its_value_and_a_verdict(layer):
    network = deep()
    with Explainer(network, **OPTIONS) as explainer:
        found = explained(explainer, layers=layer)
    check_map(found, network, layer)
    assert found.verdict is camserve.Verdict.FLAT


def test_every_cam_explains_a_grid_of_one_cell():
    with Explainer(deep(), **OPTIONS) as explainer:
        kinds = {kind for layer in explainer.layers() if layer.name == "last" for kind in layer.kinds}
        names = {method.name for method in explainer.methods() if method.layered and method.kind in kinds}
        verdicts = {name: explained(explainer, name, layers="last") for name in names & {*offered(explainer)}}
    cams = {name: found.verdict for name, found in verdicts.items() if found.heatmap.shape == (1, 1)}
    assert {"gradcam", "layercam", "hirescam", "eigencam", "scorecam", "ablationcam", "fem"} <= {*cams}
    assert {*cams.values()} <= {camserve.Verdict.FLAT, camserve.Verdict.ZERO_GRADIENT}


def test_default_is_the_last_layer_of_more_than_one_cell():
    with Explainer(deep(), **OPTIONS) as explainer:
        assert explainer.model().default_layer == "middle"
        names = [layer.name for layer in explainer.layers() if layer.explainable and layer.grid == (1, 1)]
    assert names == ["last.0", "last.1", "last.2", "last", "pool"]  # factors of channels are no features of the image


def test_grid_of_one_cell_is_served():
    network = deep()
    with (
        camserve_server.running("deep=models.test_unusual_grids:source") as address,
        camserve.Client(address) as client,
    ):
        check_map(explained(client, layers="last"), network, "last")


def test_grid_may_be_as_large_as_the_number_of_channels():
    network = seeded(Square)
    with Explainer(network, **OPTIONS) as explainer:
        check_map(explained(explainer), network, "body")


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_head_may_be_recurrent(kind):
    network = seeded(Reader, kind)
    with Explainer(network, **OPTIONS) as explainer:
        check_map(explained(explainer), network, "body")
        found = explained(explainer, "saliency")
    assert error_ratio(found.heatmap, saliency(network), saliency(doubled(network))) <= 1
