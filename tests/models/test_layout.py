"""Memory layout of images and weights: the faster one on a GPU, channels last without group norms on a CPU."""

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

from camserve_server import Explainer, models
from camserve_server.core import devices
from camserve_server.engine.values import Row
from camserve_server.imaging.values import View
from camserve_server.models.acceleration import layout
from camserve_server.targets.values import ClassTarget
from fake_gpu import Convolutions, FakeGpu, fake_gpu
from methods.tools import call, doubled, error_ratio, noise, run
from rounding import check_same
from support import loaded

SMALL = "models.test_layout:small?size=16&weights=none"
"""A model without convolutions of 1 by 1, whose weights are in both layouts: torch may choose either for the output."""

NET = "timm:test_resnet?weights=none&size=64"
HALF = f"{NET}&precision=bfloat16"
CONVNEXT = "timm:test_convnext?weights=none&size=64"
"""A model without batch norms: in float32 it has no accelerated copy."""

FORMATS = {True: torch.channels_last, False: torch.contiguous_format}


def small():
    """Return a network for tests in which the network does not matter."""
    first, second = (
        nn.Sequential(nn.Conv2d(*sizes, 3), nn.BatchNorm2d(sizes[1]), nn.Tanh()) for sizes in ((3, 4), (4, 8))
    )
    return nn.Sequential(first, second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def taking(channels_last, contiguous):
    """Make a GPU on which a batch takes these seconds, depending on the layout of its images."""

    class Timed(FakeGpu):
        def measure(self, function):
            with Convolutions() as seen:
                function()
            taken = channels_last if seen.are_channels_last() else contiguous
            return taken(seen.images) if callable(taken) else taken

    return Timed


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch):
    monkeypatch.setattr(layout, "ROUNDS", 1)


def load(spec=SMALL, rows=2):
    return models.load(models.parse(spec), rows=rows)


def images(model):
    """Return rows of different images, in the input size of a model."""
    return [Row(noise(seed, model.info.preprocess.size[0]), ClassTarget(1), (call("gradcam"),)) for seed in range(3)]


def heatmaps(model, **changes):
    rows = [replace(row, **changes) for row in images(model)]
    return [result.maps[0][0] for result in run(model, rows, [model.info.default_layer])]


@pytest.mark.parametrize(
    ("spec", "seconds", "channels_last"),
    [
        (CONVNEXT, (1.0, 0.5), False),
        (SMALL, (1.0, 0.5), False),
        (SMALL, (0.5, 1.0), True),
        (SMALL, (1.0, 1.0), True),
        (SMALL, (1.0, 0.97), True),
        (f"{SMALL}&precision=bfloat16", (1.0, 0.5), False),
    ],
)
def test_model_has_the_layout_that_was_faster(spec, seconds, channels_last):
    with fake_gpu(taking(*seconds)):
        model = load(spec)

    assert model.info.channels_last is channels_last


@pytest.mark.parametrize(
    ("spec", "channels_last"),
    [
        (NET, True),
        (SMALL, False),
        (HALF, True),
        (f"{SMALL}&precision=bfloat16", False),
    ],
)
def test_images_and_weights_follow_the_choice(spec, channels_last):
    with fake_gpu(taking(1.0, 2.0 if channels_last else 0.5)):
        model = load(spec)
        with Convolutions() as seen:
            heatmaps(model)

    assert len(seen.inputs) == sum(isinstance(part, torch.nn.Conv2d) for part in model.module.modules())
    for image, weight in seen.inputs:
        assert image.is_contiguous(memory_format=FORMATS[channels_last])
        assert weight.is_contiguous(memory_format=FORMATS[channels_last])


@pytest.mark.parametrize("channels_last", [True, False])
def test_edited_images_have_the_layout_of_others(channels_last):
    with fake_gpu(taking(1.0, 2.0 if channels_last else 0.5)):
        model = load()
        with Convolutions() as seen:
            heatmaps(model, views=(View(mirrored=True),))

    assert seen.images.is_contiguous(memory_format=FORMATS[channels_last])


@pytest.mark.parametrize(
    ("spec", "channels_last"),
    [(NET, False), (NET, True), (CONVNEXT, False), pytest.param(CONVNEXT, True, marks=pytest.mark.slow)],
)
def test_results_in_either_layout_equal_those_of_a_cpu(spec, channels_last):
    with fake_gpu(taking(1.0, 2.0 if channels_last else 0.5)):
        maps = heatmaps(load(spec))

    for actual, expected in zip(maps, heatmaps(loaded(spec)), strict=True):
        check_same(actual, expected, spec)


def test_one_disturbed_batch_does_not_change_the_choice(monkeypatch):
    monkeypatch.setattr(layout, "ROUNDS", 5)
    measured = []

    def disturbed(_images):
        measured.append(None)
        return 100.0 if len(measured) == 3 else 0.5

    with fake_gpu(taking(1.0, disturbed)):
        assert not load().info.channels_last
    assert len(measured) == 6


def test_layouts_are_timed_in_the_largest_batch_that_will_run(caplog):
    sizes = set()

    def noted(images):
        sizes.add(len(images))
        return 1.0

    with fake_gpu(taking(noted, noted)), caplog.at_level(logging.INFO):
        load(rows=5)

    assert sizes == {5}
    assert "model small runs channels_last: contiguous takes 1.00 times as long, in batches of 5" in caplog.text


def test_timed_batches_that_are_too_large_are_halved(caplog):
    def full(images):
        if len(images) > 3:
            raise torch.OutOfMemoryError("planted")
        return 1.0

    with fake_gpu(taking(full, lambda _images: 0.5)), caplog.at_level(logging.INFO):
        assert not load(rows=8).info.channels_last
    assert "runs contiguous: channels_last takes 2.00 times as long, in batches of 2" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError("planted"), torch.OutOfMemoryError("planted")])
def test_model_that_cannot_be_timed_stays_channels_last(caplog, error):
    def broken(_images):
        raise error

    with fake_gpu(taking(1.0, broken)):
        model = load()
        with Convolutions() as seen:
            heatmaps(model)

    assert model.info.channels_last
    assert all(weight.is_contiguous(memory_format=torch.channels_last) for _, weight in seen.inputs)
    assert f"the memory layouts could not be timed ({type(error).__name__}: planted)" in caplog.text


def test_nothing_is_timed_on_a_cpu(monkeypatch):
    monkeypatch.setattr(devices.Device, "measure", lambda *_: pytest.fail("timed on a CPU"))

    assert load().info.channels_last


def test_cudnn_does_not_time_its_algorithms_while_it_serves(plant):
    def careless():
        torch.backends.cudnn.benchmark = True
        return small()

    plant(careless)

    assert not torch.backends.cudnn.benchmark


def grouped():
    """Return a network with a group norm, whose mean is far from zero."""
    torch.manual_seed(2)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.GroupNorm(2, 8),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )
    nn.init.constant_(network[0].bias, 3)
    return network.eval()


def test_group_norms_run_contiguous_on_a_cpu():
    """torch's group norm of images that are channels last is a thousand times less precise."""
    network, photo = grouped(), noise(7, 64)
    with Explainer(network, size=64, crop="whole", mean=(0.5,) * 3, std=(0.25,) * 3) as explainer:
        (found,) = explainer.explain(photo, targets=3, overlay=None).explanations
        assert found.layer == "3"
    image = ((torch.from_numpy(photo) / 255 - 0.5) / 0.25).permute(2, 0, 1)[None]
    reference, truth = (gradcam(each, image.to(each[0].weight)) for each in (network, doubled(network)))

    assert error_ratio(found.heatmap, reference, truth) <= 1


def gradcam(network, image):
    features = network[:4](image)
    (gradient,) = torch.autograd.grad(network[4:](features)[0, 3], features)
    return (gradient.mean((2, 3), keepdim=True) * features).sum(1)[0].detach().numpy()
