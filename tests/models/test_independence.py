"""A model whose output for an image depends on other images of a batch runs one at a time; one that varies is named."""

import logging
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import camserve
import camserve_server
from as_written import PREPROCESS, Plain, changed, plain
from camserve_server import Explainer
from camserve_server.models import Source
from models.test_as_written import IMAGE, OPTIONS, check_equal, maps, offered

OTHERS = [np.random.default_rng(seed).integers(0, 64 * (seed + 1), IMAGE.shape, np.uint8) for seed in range(3)]


def normalised(kind, **options):
    """Return the network with norms of another kind, and the weights of its own."""
    network = plain()
    for part in (network.stem, network.body):
        norm = kind(part[1].num_features, affine=True, **options)
        norm.load_state_dict({name: part[1].state_dict()[name] for name in ("weight", "bias")}, strict=False)
        part[1] = norm.eval()
    return network


def without_statistics():
    return normalised(nn.BatchNorm2d, track_running_stats=False)


class Shifting(Plain):
    """A shift between neighbouring frames, as of networks for videos: here, of the images of a batch."""

    def features(self, image):
        features = self.stem(image)
        before = torch.cat([torch.zeros_like(features[:1]), features[:-1]])
        return self.body(torch.cat([before[:, :2], features[:, 2:]], 1))


class OverTheBatch(Plain):
    """The output of the batch has a mean of zero."""

    def forward(self, image):
        logits = super().forward(image)
        return logits - logits.mean(0, keepdim=True).detach() + 0.1 * logits


class OneAtATime(Plain):
    def forward(self, image):
        return self.head(self.features(image).mean((2, 3)).view(1, -1))


DEPENDENT = {
    "batch_norm": (
        without_statistics,
        "the output of its module stem.1 (BatchNorm2d) for an image depends on the other images",
    ),
    "shift": (
        lambda: changed(Shifting),
        "the output of its module body.0 (Conv2d) for an image depends on the other images",
    ),
    "batch_axis": (
        lambda: changed(OverTheBatch),
        "the output of its own forward (OverTheBatch) for an image depends on the other images",
    ),
    "one_image": (lambda: changed(OneAtATime), "it fails with several images: "),
}


@pytest.mark.parametrize("name", DEPENDENT)
def test_maps_of_dependent_rows_are_those_of_each_image_alone(name, caplog):
    make, words = DEPENDENT[name]
    methods = [("rise", {"samples": 16}), "occlusion", "smoothgrad", "integrated_gradients", "scorecam"]
    with caplog.at_level(logging.WARNING, "camserve_server"), Explainer(make(), **OPTIONS) as explainer:
        found = maps(explainer, methods)
        assert explainer.model().independent_rows is False
    with Explainer(make(), settings={"max_batch_rows": 1}, **OPTIONS) as explainer:
        check_equal(found, maps(explainer, methods))

    assert re.search(f"runs one image at a time, which is slower: {re.escape(words)}", caplog.text)


@pytest.mark.slow
def test_every_method_normalises_each_image_by_itself():
    with Explainer(without_statistics(), accelerate=False, **OPTIONS) as explainer:
        methods = offered(explainer)
        found = maps(explainer, methods)
    one = {"settings": {"max_batch_rows": 1}, "accelerate": False}
    with Explainer(normalised(nn.InstanceNorm2d), **one, **OPTIONS) as explainer:  # it computes the same for one image
        check_equal(found, maps(explainer, methods))
        assert explainer.model().independent_rows is True


def test_photos_of_other_requests_change_no_map():
    source = Source(without_statistics(), PREPROCESS)
    with camserve_server.running({"net": source}) as address, camserve.Client(address) as client:
        assert client.model("net").independent_rows is False
        images = [IMAGE, *OTHERS]
        alone = [client.explain(image, targets=3, heatmap=True, overlay=None) for image in images]
        for _ in range(4):
            together = client.explain_many(images, targets=3, heatmap=True, overlay=None)
            for one, other in zip(alone, together, strict=True):
                assert np.array_equal(one.explanations[0].heatmap, other.explanations[0].heatmap)


class AlwaysDropping(Plain):
    def features(self, image):
        return functional.dropout(super().features(image), 0.5, training=True)


class Drifting(Plain):
    """Keeps a count in an attribute that is no buffer."""

    count = 0

    def forward(self, image):
        self.count += 1
        return (1 + 0.01 * self.count) * super().forward(image)


@pytest.mark.parametrize(
    ("kind", "words"),
    [(AlwaysDropping, "its module head (Linear)"), (Drifting, "its own forward (Drifting)")],
    ids=["dropout", "count"],
)
def test_output_that_differs_in_each_run_is_named(kind, words, caplog):
    before = torch.random.get_rng_state()
    with caplog.at_level(logging.WARNING, "camserve_server"), Explainer(changed(kind), **OPTIONS) as explainer:
        assert explainer.model().independent_rows is True

    assert f"another output in each run, first in {words}" in caplog.text
    assert kind is AlwaysDropping or torch.equal(before, torch.random.get_rng_state())


SPECS = ("timm:test_resnet?weights=none&size=64", "efficientnet_lite0", "timm:test_vit?weights=none", "coloured:Finder")


@pytest.mark.parametrize("spec", SPECS)
def test_rows_of_other_models_are_independent(spec, caplog):
    with caplog.at_level(logging.WARNING, "camserve_server"), Explainer(spec) as explainer:
        assert explainer.model().independent_rows is True

    assert "one image at a time" not in caplog.text
    assert "another output" not in caplog.text
