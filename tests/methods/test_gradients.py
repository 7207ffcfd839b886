"""Saliency: equal to captum, and the same whatever the batch."""

import copy

import numpy as np
import pytest
import torch
from captum.attr import NoiseTunnel, Saliency

from camserve_server.methods.gradients import noisy
from camserve_server.types import ClassTarget, ContrastTarget, RankTarget, Row
from methods.tools import call, explain, gap, inputs, job, noise, run

CLOSE = 1e-4  # of the map's largest value
EXACT = 1e-5


def heatmap(model, image, method, target=ClassTarget(3), chunk=64):  # noqa: B008 -- frozen
    (finding,) = explain(model, image, job(model, [method], [target]), chunk).findings
    return finding.heatmap


def documented_noise(image, seed, index):
    """The noise of a copy: it depends on the seed and the copy's index alone."""
    return torch.randn(image.shape, generator=torch.Generator().manual_seed(seed * 100_003 + index))


def deviation(image, share):
    return share * float((image.max() - image.min()).detach())


@pytest.mark.parametrize("photo", ["chelsea", "coffee", "astronaut", "rocket", "china", "flower"])
def test_saliency_equals_captums(lite0, photos, photo):
    (ours,) = explain(lite0, photos[photo], job(lite0, ["saliency"], [RankTarget(0)])).findings
    image = inputs(lite0, photos[photo]).requires_grad_()
    theirs = Saliency(lite0.module).attribute(image, target=ours.target.index, abs=True)
    assert gap(ours.heatmap, theirs[0].amax(0)) <= CLOSE


def test_saliency_equals_the_papers_formula_in_float64(smooth):
    model = copy.deepcopy(smooth.module).double()
    image = inputs(smooth, noise(0, 16)).double().requires_grad_()
    (gradient,) = torch.autograd.grad(model(image)[0, 3], image)
    assert gap(heatmap(smooth, noise(0, 16), "saliency"), gradient[0].abs().amax(0)) <= CLOSE


def test_smoothgrad_equals_captums_noise_tunnel_on_the_same_noise(smooth, monkeypatch):
    samples, share, seed = 6, 0.15, 11
    image = inputs(smooth, noise(0, 16))
    planned = torch.stack([documented_noise(image[0], seed, i) for i in range(samples)])
    monkeypatch.setattr(torch, "normal", lambda mean, std: mean + std * planned)
    theirs = NoiseTunnel(Saliency(smooth.module)).attribute(
        image.requires_grad_(), nt_samples=samples, stdevs=deviation(image, share), target=3, abs=False
    )
    ours = heatmap(smooth, noise(0, 16), call("smoothgrad", samples=samples, noise=share, seed=seed))
    assert gap(ours, theirs[0].abs().amax(0)) <= CLOSE


def test_smoothgrad_is_the_mean_gradient_over_the_documented_copies(smooth):
    samples, share, seed = 5, 0.2, 3
    (image,) = inputs(smooth, noise(1, 16))
    gradients = []
    for index in range(samples):
        leaf = (image + deviation(image, share) * documented_noise(image, seed, index))[None].requires_grad_()
        gradients += torch.autograd.grad(smooth.module(leaf)[0, 3], leaf)
    ours = heatmap(smooth, noise(1, 16), call("smoothgrad", samples=samples, noise=share, seed=seed))
    assert gap(ours, torch.stack(gradients).mean(0)[0].abs().amax(0)) <= EXACT


def test_smoothgrad_is_the_same_map_however_its_copies_are_cut_into_batches(smooth):
    method = call("smoothgrad", samples=8, seed=5)
    whole = heatmap(smooth, noise(2, 16), method, chunk=8)
    for chunk in (1, 3):
        assert gap(heatmap(smooth, noise(2, 16), method, chunk=chunk), whole) <= EXACT


def test_smoothgrads_copies_share_a_batch_with_other_requests_unchanged(smooth):
    method, other = call("smoothgrad", samples=2, seed=5), call("smoothgrad", samples=2, seed=6, noise=0.4)
    rows = [
        Row(noise(0, 16), ClassTarget(3), (method,), 1),
        Row(noise(1, 16), ClassTarget(4), (call("saliency"),)),
        Row(noise(0, 16), ContrastTarget(1, 2), (other,), 1),
        Row(noise(2, 16), RankTarget(1), (method,), 0),
    ]
    for row, mixed in zip(rows, run(smooth, rows, kind="saliency"), strict=True):
        (alone,) = run(smooth, [row], kind="saliency")
        assert gap(mixed.maps[0][0], alone.maps[0][0]) <= EXACT
        assert mixed.target == alone.target


def test_the_same_seed_gives_the_same_map_and_another_seed_another(smooth):
    one, again, other = (heatmap(smooth, noise(3, 16), call("smoothgrad", samples=2, seed=seed)) for seed in (4, 4, 5))
    np.testing.assert_array_equal(one, again)
    assert gap(one, other) > 0.01


def test_no_two_copies_have_the_same_noise():
    image = torch.linspace(0, 1, 48).reshape(3, 4, 4)
    copies = [
        noisy(image, index, samples=9, noise=0.5, seed=seed).numpy().tobytes()
        for seed in (0, 1, 2**31 - 1)
        for index in range(9)
    ]
    assert len(set(copies)) == len(copies)


def test_the_noise_is_as_wide_as_the_share_of_the_images_range_says():
    image = torch.rand(3, 128, 128, generator=torch.Generator().manual_seed(0)) * 4 - 1
    added = noisy(image, 0, samples=1, noise=0.1, seed=0) - image
    assert added.std() == pytest.approx(0.4, rel=0.02)
    assert added.mean() == pytest.approx(0, abs=0.01)


def test_smoothgrad_without_noise_is_the_plain_gradient(smooth):
    plain = heatmap(smooth, noise(4, 16), "saliency")
    assert gap(heatmap(smooth, noise(4, 16), call("smoothgrad", samples=3, noise=0.0)), plain) <= EXACT


def test_saliency_maps_are_float32_of_the_inputs_size_and_never_negative(smooth):
    found = heatmap(smooth, noise(5, 16), "saliency")
    assert found.dtype == np.float32
    assert found.shape == (16, 16)
    assert found.min() >= 0
