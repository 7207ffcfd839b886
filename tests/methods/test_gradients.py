"""Saliency methods equal captum, and do not depend on the batch."""

import copy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from captum.attr import (
    Deconvolution,
    GradientShap,
    GuidedBackprop,
    GuidedGradCam,
    InputXGradient,
    IntegratedGradients,
    NoiseTunnel,
    Saliency,
)
from scipy.ndimage import gaussian_filter
from torch import nn
from torch.nn import functional

from camserve_server import models
from camserve_server.core.errors import FailedPrecondition
from camserve_server.engine.values import Row
from camserve_server.jobs.verdict import Verdict
from camserve_server.methods.gradients import noisy
from camserve_server.targets.values import ClassTarget, ContrastTarget, RankTarget
from methods.narrow import densenet121
from methods.tools import FACTOR, FLOOR, call, doubled, error_ratio, exact, explain, gap, inputs, job, noise, photo, run


def heatmap(model, image, method, target=ClassTarget(3), chunk=64):  # noqa: B008 -- frozen
    (finding,) = explain(model, image, job(model, [method], [target]), chunk).explanations
    return finding.heatmap


def both(oracle, model, *images):
    """Return the reference's results for a module and an input, in plain float32 and in float64."""
    image = inputs(model, *images)
    yield oracle(copy.deepcopy(model.module), image.clone().requires_grad_()).detach()
    yield oracle(doubled(model.module), image.double().requires_grad_()).detach()


def documented_noise(image, seed, index):
    """Return the noise of a copy, which depends only on the seed and the index of the copy."""
    drawn = torch.randn(image.shape, generator=torch.Generator().manual_seed(seed * 100_003 + index))
    return drawn.to(image.dtype)


def deviation(image, share):
    return share * float((image.max() - image.min()).detach())


def plain_saliency(module, image):
    (gradient,) = torch.autograd.grad(module(image)[0, 3], image)
    return gradient[0].abs().amax(0)


def test_saliency_equals_the_papers_formula(smooth):
    expected = both(plain_saliency, smooth, noise(0, 16))
    assert error_ratio(heatmap(smooth, noise(0, 16), "saliency"), *expected) <= 1


def test_smoothgrad_equals_captums_noise_tunnel_on_the_same_noise(smooth, monkeypatch):
    samples, share, seed = 6, 0.15, 11

    def theirs(module, image):
        planned = torch.stack([documented_noise(image[0], seed, i) for i in range(samples)])
        monkeypatch.setattr(torch, "normal", lambda mean, std: mean + std * planned)
        result = NoiseTunnel(Saliency(module)).attribute(
            image, nt_samples=samples, stdevs=deviation(image, share), target=3, abs=False
        )
        return result[0].abs().amax(0)

    ours = heatmap(smooth, noise(0, 16), call("smoothgrad", samples=samples, noise=share, seed=seed))
    assert error_ratio(ours, *both(theirs, smooth, noise(0, 16))) <= 1


def test_smoothgrad_is_the_mean_gradient_over_the_documented_copies(smooth):
    samples, share, seed = 5, 0.2, 3

    def theirs(module, image):
        drawn = planned(image, share, seed, samples)
        return gradients_at(module, image, drawn).mean(0).abs().amax(0)

    ours = heatmap(smooth, noise(1, 16), call("smoothgrad", samples=samples, noise=share, seed=seed))
    assert error_ratio(ours, *both(theirs, smooth, noise(1, 16))) <= 1


def gradients_at(module, image, changes):
    """Return the gradient of a class at each changed image, [N,3,H,W]."""
    results = []
    for change in changes:
        leaf = (image.detach() + change).requires_grad_()
        results += torch.autograd.grad(module(leaf)[0, 3], leaf)
    return torch.cat(results)


def test_smoothgrad_does_not_depend_on_the_batches_of_its_copies(smooth):
    method = call("smoothgrad", samples=8, seed=5)
    whole, truth = (heatmap(each, noise(2, 16), method, chunk=8) for each in (smooth, exact(smooth)))
    for chunk in (1, 3):
        assert error_ratio(heatmap(smooth, noise(2, 16), method, chunk=chunk), whole, truth) <= 1


def test_smoothgrads_copies_share_a_batch_with_other_requests_unchanged(smooth):
    method, other = call("smoothgrad", samples=2, seed=5), call("smoothgrad", samples=2, seed=6, noise=0.4)
    rows = [
        Row(noise(0, 16), ClassTarget(3), (method,), 1),
        Row(noise(1, 16), ClassTarget(4), (call("saliency"),)),
        Row(noise(0, 16), ContrastTarget(1, 2), (other,), 1),
        Row(noise(2, 16), RankTarget(1), (method,), 0),
    ]
    for row, mixed in zip(rows, run(smooth, rows, kind="saliency"), strict=True):
        (alone,), (truth,) = (run(each, [row], kind="saliency") for each in (smooth, exact(smooth)))
        assert error_ratio(mixed.maps[0][0], alone.maps[0][0], truth.maps[0][0]) <= 1
        assert mixed.target == alone.target


def test_maps_of_channels_do_not_change_those_of_neighbours(smooth):
    plain = [Row(noise(seed, 16), ClassTarget(3), (call("saliency"),)) for seed in range(3)]
    parted = [plain[0], replace(plain[1], calls=(replace(call("saliency"), input_channels=(2, 0)),)), plain[2]]

    for one, other in zip(*(run(smooth, rows, kind="saliency") for rows in (plain, parted)), strict=True):
        assert one.maps[0][0].tobytes() == other.maps[0][0].tobytes()


def test_same_seed_gives_the_same_map_and_another_seed_another(smooth):
    first, repeated, other_seed = (
        heatmap(smooth, noise(3, 16), call("smoothgrad", samples=2, seed=seed)) for seed in (4, 4, 5)
    )
    np.testing.assert_array_equal(first, repeated)
    assert gap(first, other_seed) > 0.01


def test_no_two_copies_have_the_same_noise():
    image = torch.linspace(0, 1, 48).reshape(3, 4, 4)
    copies = [
        noisy(image, index, samples=9, noise=0.5, seed=seed).numpy().tobytes()
        for seed in (0, 1, 2**31 - 1)
        for index in range(9)
    ]
    assert len(set(copies)) == len(copies)


def test_noise_has_the_requested_share_of_the_images_range():
    image = torch.rand(3, 128, 128, generator=torch.Generator().manual_seed(0)) * 4 - 1
    added = noisy(image, 0, samples=1, noise=0.1, seed=0) - image
    assert added.std() == pytest.approx(0.4, rel=0.02)
    assert added.mean() == pytest.approx(0, abs=0.01)


def test_smoothgrad_without_noise_is_the_plain_gradient(smooth):
    expected = (heatmap(each, noise(4, 16), "saliency") for each in (smooth, exact(smooth)))
    assert error_ratio(heatmap(smooth, noise(4, 16), call("smoothgrad", samples=3, noise=0.0)), *expected) <= 1


def test_saliency_maps_are_float32_of_the_inputs_size_and_never_negative(smooth):
    result = heatmap(smooth, noise(5, 16), "saliency")
    assert result.dtype == np.float32
    assert result.shape == (16, 16)
    assert result.min() >= 0


def planned(image, share, seed, samples):
    """Return the documented noise of all copies of a single image."""
    return deviation(image, share) * torch.stack([documented_noise(image[0], seed, i) for i in range(samples)])


def tunnel(kind):
    """Run captum's noise tunnel of a kind on the documented noise; return the absolute values of each channel."""

    def attribute(module, image, method, patch):
        own = method.parameters
        drawn = planned(image, own["noise"], own["seed"], own["samples"])
        patch.setattr(torch, "normal", lambda _mean, _std: drawn)
        result = NoiseTunnel(Saliency(module)).attribute(
            image, nt_type=kind, nt_samples=own["samples"], stdevs=1.0, target=3, abs=False
        )
        return result[0].abs()

    return attribute


def baselines(image):
    """Return the documented baselines: zero, the mean colour, a Gaussian blur of a twentieth of the side."""
    side = min(image.shape[2:])
    blurred = gaussian_filter(image[0].detach().double().numpy(), (0, side / 20, side / 20), mode="mirror", truncate=3)
    return {
        "zero": torch.zeros_like(image),
        "mean": image.mean((2, 3), keepdim=True).expand_as(image),
        "blur": torch.from_numpy(blurred).to(image.dtype)[None],
    }


def integrated(module, image, method, _patch):
    own = method.parameters
    start = baselines(image)[own["baseline"]]
    return IntegratedGradients(module).attribute(image, start, target=3, n_steps=own["steps"])[0]


def shap(module, image, method, patch):
    """Run captum's GradientShap with the documented random draws."""
    own = method.parameters
    ways, starts, noises = [], [], []
    for index in range(own["samples"]):
        dice = torch.Generator().manual_seed(own["seed"] * 100_003 + index)
        ways.append(float(torch.rand((), generator=dice)))
        starts.append(int(torch.randint(3, (), generator=dice)))
        noises.append(torch.randn(image[0].shape, generator=dice))
    if own["baseline"] != "any":
        starts = [("zero", "mean", "blur").index(own["baseline"])] * own["samples"]
    drawn = deviation(image, own["noise"]) * torch.stack(noises)
    patch.setattr(torch, "normal", lambda _mean, _std: drawn)
    patch.setattr(np.random, "uniform", lambda *_: np.array(ways))
    patch.setattr(np.random, "choice", lambda *_args, **_more: np.array(starts))
    theirs = GradientShap(module).attribute(
        image, torch.cat(list(baselines(image).values())), n_samples=own["samples"], stdevs=1.0, target=3
    )
    return theirs[0]


CAPTUM = {
    "saliency": lambda module, image, _m, _p: Saliency(module).attribute(image, target=3, abs=True)[0],
    "input_x_gradient": lambda module, image, _m, _p: InputXGradient(module).attribute(image, target=3)[0],
    "smoothgrad": tunnel("smoothgrad"),
    "squaregrad": tunnel("smoothgrad_sq"),
    "vargrad": tunnel("vargrad"),
    "integrated_gradients": integrated,
    "gradient_shap": shap,
}
SENSITIVITIES = ("saliency", "smoothgrad", "squaregrad", "vargrad")
"""Methods that take the largest value of a pixel's channels; others add them up."""


def attributions(method, patch, module, image):
    """Return captum's map of each channel."""
    return CAPTUM[method.name](module, image, method, patch)


def fold(name, by_channel):
    """Return the map of all channels that a method makes of the maps of each channel."""
    return by_channel.amax(0) if name in SENSITIVITIES else by_channel.sum(0)


CALLS = [
    call("saliency"),
    call("input_x_gradient"),
    call("smoothgrad", samples=6, noise=0.15, seed=11),
    call("squaregrad", samples=6, noise=0.15, seed=11),
    call("vargrad", samples=6, noise=0.15, seed=11),
    *(
        call("integrated_gradients", steps=9, baseline=each, quadrature="gauss-legendre")
        for each in ("zero", "mean", "blur")
    ),
    *(call("gradient_shap", samples=7, noise=0.1, seed=2, baseline=each) for each in ("zero", "mean", "blur", "any")),
]


@pytest.mark.parametrize("method", CALLS, ids=str)
def test_map_equals_captums_on_the_same_draws(curved, method, monkeypatch):
    theirs = both(partial(attributions, method, monkeypatch), curved, noise(6, 24))
    expected = [fold(method.name, each) for each in theirs]
    assert error_ratio(heatmap(curved, noise(6, 24), method), *expected) <= 1


@pytest.fixture
def curved(plant):
    """A deeper model without kinks, for images of 24 pixels."""
    return curved_for(plant, 3)


def curved_for(plant, channels):
    """Return such a model for images with this number of channels."""
    torch.manual_seed(1)
    layers = [nn.Conv2d(channels, 8, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(8, 12, 3), nn.Tanh(), nn.Flatten()]
    preprocess = models.Preprocess((24, 24), 24, "bilinear", (0.45,) * channels, (0.25,) * channels)
    return plant(lambda: models.Source(nn.Sequential(*layers, nn.Linear(12 * 9 * 9, 5)), preprocess), size=24)


@pytest.mark.parametrize("channels", [1, 3, pytest.param(12, marks=pytest.mark.slow)])
def test_maps_of_channels_equal_captums_and_make_up_the_map_of_all(plant, channels, monkeypatch):
    model = curved_for(plant, channels)
    image = np.random.default_rng(6).integers(0, 256, (24, 24, channels), np.uint8)
    for method in CALLS:
        oracle = partial(attributions, method, monkeypatch)
        theirs = list(both(oracle, model, image))
        ours = maps_by_channel(model, image, method)
        for channel in range(channels):
            assert error_ratio(ours[channel], *(each[channel] for each in theirs)) <= 1

        plain, truth = (fold(method.name, each) for each in theirs)
        whole = heatmap(model, image, method)
        assert gap(whole, fold(method.name, torch.from_numpy(ours))) <= FACTOR * gap(plain, truth) + FLOOR


def maps_by_channel(model, image, method, channels=None):
    """Return the maps of all channels or of some, stacked, and check how they are labelled."""
    channels = tuple(channels or range(image.shape[2]))
    asked = job(model, [replace(method, input_channels=channels)], [ClassTarget(3)])
    found = explain(model, image, asked).explanations
    assert [each.input_channel for each in found] == list(channels)
    assert len(found) == asked.explanations
    return np.stack([each.heatmap for each in found])


def test_some_channels_have_the_same_bytes_as_among_all(plant):
    model = curved_for(plant, 12)
    image = np.random.default_rng(6).integers(0, 256, (24, 24, 12), np.uint8)
    for method in (call("saliency"), call("integrated_gradients", steps=3)):
        some = maps_by_channel(model, image, method, (7, 2))
        assert some.tobytes() == maps_by_channel(model, image, method)[[7, 2]].tobytes()


def test_channel_that_the_model_ignores_has_a_flat_map(curved):
    curved.module[0].weight[:, 2] = 0
    names = ("saliency", "smoothgrad", "integrated_gradients", "gradient_shap")
    calls = [replace(call(name), input_channels=(0, 2)) for name in names]

    found = explain(curved, noise(6, 24), job(curved, calls, [ClassTarget(3)])).explanations
    verdicts = {(each.call.name, each.input_channel): each.verdict for each in found}
    assert {verdicts[name, 2] for name in names} == {Verdict.FLAT}
    assert {verdicts[name, 0] for name in names} == {Verdict.OK}


def test_matched_maps_of_channels_add_up_to_the_matched_map(curved):
    """Each channel alone would be corrected to the whole difference of the scores."""
    method = call("integrated_gradients", steps=6, baseline="mean")
    whole, truth = (heatmap(each, noise(6, 24), method) for each in (curved, exact(curved)))
    added = maps_by_channel(curved, noise(6, 24), method).astype(np.float64).sum(0)
    assert error_ratio(added, whole, truth) <= 1


@pytest.mark.parametrize("baseline", ["zero", "mean", "blur"])
def test_completeness_error_is_the_difference_from_the_score_difference(curved, baseline):
    method = call("integrated_gradients", steps=2, baseline=baseline, quadrature="cubic")
    (explanation,) = explain(curved, noise(6, 24), job(curved, [method], [ClassTarget(3)])).explanations
    image = inputs(curved, noise(6, 24))
    with torch.no_grad():
        there, here = (float(curved.module(each)[0, 3]) for each in (image, baselines(image)[baseline]))
    missed = abs(explanation.heatmap.sum(dtype=np.float64) - (there - here)) / abs(there - here)
    assert missed > 1e-3  # two steps are too few
    assert explanation.error == pytest.approx(missed, rel=1e-2)


@pytest.mark.parametrize(("quadrature", "bound"), [("cubic", 1e-3), ("gauss-legendre", 1e-5)])
def test_more_steps_reduce_the_completeness_error(curved, quadrature, bound):
    calls = [call("integrated_gradients", steps=n, quadrature=quadrature) for n in (1, 4, 16)]
    first, second, third = (
        explanation.error
        for explanation in explain(curved, noise(6, 24), job(curved, calls, [ClassTarget(3)])).explanations
    )
    assert first > 3 * second > 9 * third
    assert third < bound


@pytest.fixture(scope="module")
def on_smaller_photos():
    """The embedded model for photos of half the size, whose gradients take a quarter of the time."""
    return models.load(models.parse("smaller=efficientnet_lite0?size=112"))


@pytest.mark.slow
def test_cubic_steps_beat_gauss_legendre_if_the_score_changes_near_the_baseline(on_smaller_photos):
    """A photo reaches 90 % of its score in the first tenth of the path from the mean colour."""
    calls = [call("integrated_gradients", steps=10, quadrature=each) for each in ("cubic", "gauss-legendre")]
    asked = job(on_smaller_photos, calls, [RankTarget(0)])
    missed = [
        [explanation.error for explanation in explain(on_smaller_photos, photo(name, 112), asked).explanations]
        for name in ("coffee", "astronaut")
    ]
    cubic, gauss_legendre = np.mean(missed, 0)
    assert 2 * cubic < gauss_legendre


@pytest.mark.slow  # fewer steps of a small model are among the fast tests
def test_completeness_error_after_fifty_steps_is_within_one_percent(on_smaller_photos):
    model, image = on_smaller_photos, photo("coffee", 112)
    asked = job(model, [call("integrated_gradients", steps=50, baseline="mean")], [RankTarget(0)])
    (explanation,) = explain(model, image, asked, chunk=8).explanations
    with torch.no_grad():
        start = baselines(inputs(model, image))["mean"]
        promised = explanation.score - float(model.module(start)[0, explanation.target.index])
    assert abs(explanation.heatmap.sum(dtype=np.float64) - promised) <= 0.01 * abs(promised)
    assert explanation.error <= 1e-4


def test_matched_weights_change_least_and_integrate_the_slope(curved):
    """min Σ (v − w)² / w over v with Σ v = 1 and Σ v s = S(x) − S(x')."""
    steps = 6

    def solved(module, image):
        image, start = image.detach(), baselines(image)["mean"].detach()
        middles = (torch.arange(steps, dtype=image.dtype) + 0.5) / steps
        places, weights = middles**3, middles**2 / middles.square().sum()
        ways = (start + places[:, None, None, None] * (image - start)).requires_grad_()
        maps = ((image - start) * torch.autograd.grad(module(ways)[:, 3].sum(), ways)[0]).sum(1)
        rules = torch.stack((torch.ones_like(weights), maps.sum((1, 2))))
        gained = (module(image) - module(start))[0, 3].detach()
        missing = torch.stack((torch.zeros(()), gained - weights @ rules[1]))
        changed = weights + weights * (rules.T @ torch.linalg.solve((rules * weights) @ rules.T, missing))
        return torch.einsum("i,ihw->hw", changed, maps)

    method = call("integrated_gradients", steps=steps, baseline="mean", quadrature="matched")
    assert error_ratio(heatmap(curved, noise(6, 24), method), *both(solved, curved, noise(6, 24))) <= 1


@pytest.mark.parametrize("steps", [1, 2])
def test_matched_map_of_a_linear_model_is_its_exact_map(plant, steps):
    torch.manual_seed(2)
    linear = plant(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 22 * 22, 5)), size=24)

    def product(module, image):
        (gradient,) = torch.autograd.grad(module(image)[0, 3], image)
        return ((image - baselines(image)["blur"]) * gradient)[0].sum(0)

    method = call("integrated_gradients", steps=steps, baseline="blur")
    assert error_ratio(heatmap(linear, noise(6, 24), method), *both(product, linear, noise(6, 24))) <= 1


@pytest.mark.parametrize("name", ["saliency", "smoothgrad", "vargrad", "gradient_shap"])
def test_method_without_completeness_reports_no_completeness_error(curved, name):
    (explanation,) = explain(curved, noise(0, 24), job(curved, [name], [ClassTarget(3)])).explanations
    assert explanation.error is None


def test_input_x_gradient_adds_up_to_the_score_of_a_network_of_relus_without_biases(plant):
    """Euler's rule for functions that are homogeneous of degree one."""
    torch.manual_seed(3)
    layers = [
        nn.Conv2d(3, 6, 3, bias=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(6 * 49, 5, bias=False),
    ]
    model = plant(lambda: nn.Sequential(*layers))
    (explanation,) = explain(model, noise(7, 16), job(model, ["input_x_gradient"], [ClassTarget(3)])).explanations
    assert explanation.heatmap.sum(dtype=np.float64) == pytest.approx(explanation.score, rel=1e-5)


def test_vargrad_is_squaregrad_less_the_square_of_smoothgrad(curved):
    chance = {"samples": 5, "noise": 0.2, "seed": 4}
    means = {
        "vargrad": lambda each: each.var(0, correction=0).amax(0),
        "squaregrad": lambda each: each.square().mean(0).amax(0),
    }
    for name, mean in means.items():
        expected = both(
            lambda module, image, mean=mean: mean(gradients_at(module, image, planned(image, 0.2, 4, 5))),
            curved,
            noise(8, 24),
        )
        assert error_ratio(heatmap(curved, noise(8, 24), call(name, **chance)), *expected) <= 1


@pytest.mark.parametrize("name", ["smoothgrad", "squaregrad", "vargrad", "gradient_shap"])
def test_same_seed_gives_the_same_bytes(curved, name):
    method = {"samples": 3, "noise": 0.2}
    first, repeated, other_seed = (heatmap(curved, noise(3, 24), call(name, seed=seed, **method)) for seed in (4, 4, 5))
    assert first.tobytes() == repeated.tobytes()
    assert gap(first, other_seed) > 0.01


def with_relus(theirs):
    """Make a module ready for captum, which looks for ReLUs and sets hooks on them."""
    for module in theirs.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    return theirs


@pytest.fixture(
    scope="module",
    params=[
        "timm:test_resnet?weights=none&size=64",
        pytest.param("narrow=methods.narrow:resnet50?size=64", marks=pytest.mark.slow),  # a ReLU that is called often
    ],
)
def rectified(request):
    """Models whose ReLUs are modules."""
    return models.load(models.parse(request.param))


@pytest.mark.parametrize(("name", "peer"), [("guided_backprop", GuidedBackprop), ("deconvnet", Deconvolution)])
@pytest.mark.filterwarnings("ignore:Setting .*backward hooks on ReLU:UserWarning")
def test_changed_relu_gives_captums_map(rectified, name, peer):
    def theirs(module, image):
        return peer(with_relus(module)).attribute(image, target=3)[0].abs().amax(0)

    plain, truth = both(theirs, rectified, noise(0, 64))
    assert error_ratio(heatmap(rectified, noise(0, 64), name), plain, truth) <= 1
    assert gap(heatmap(rectified, noise(0, 64), "saliency"), truth) > 0.1


@pytest.mark.filterwarnings("ignore:Setting .*backward hooks on ReLU:UserWarning")
def test_guided_gradcam_is_captums_with_bilinear_upsampling(rectified):
    with torch.no_grad():
        top = int(rectified.module(inputs(rectified, noise(0, 64))).argmax())  # no class that Grad-CAM's ReLU cuts off

    def theirs(module, image):
        layer = with_relus(module).get_submodule(rectified.info.default_layer)
        result = GuidedGradCam(module, layer).attribute(image, target=top, interpolate_mode="bilinear")
        return result[0].abs().amax(0)

    expected = both(theirs, rectified, noise(0, 64))
    assert error_ratio(heatmap(rectified, noise(0, 64), "guided_gradcam", ClassTarget(top)), *expected) <= 1


class ByHand(torch.autograd.Function):
    """A ReLU with an explicit backward step: 1[x > 0] for the guided rule, max(g, 0) for both."""

    @staticmethod
    def forward(ctx, values, top, guided):
        ctx.kept = ((values > 0) & (values < top)) | (not guided)
        return values.clamp(0, top)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(min=0) * ctx.kept, None, None


class Bounded(nn.Module):
    """A network with a ReLU6 as a module, one as a function, and a ReLU as a function."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second, self.third = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)
        self.relu6 = nn.ReLU6(inplace=True)
        self.head = nn.Linear(8, 5)

    def forward(self, image):
        seen = functional.relu6(self.second(self.relu6(9 * self.first(image))))
        return self.head(functional.relu(self.third(seen)).mean((2, 3)))


@pytest.mark.parametrize("name", ["guided_backprop", "deconvnet"])
@pytest.mark.parametrize("arch", ["bounded", pytest.param("densenet", marks=pytest.mark.slow)])
def test_functional_relus_and_relu6_follow_the_rule(name, arch, plant, monkeypatch):
    if arch == "bounded":
        model, image = plant(Bounded, size=24), noise(0, 24)
    else:  # its last ReLU is a function
        model, image = plant(densenet121, size=64, accelerate=False), noise(0, 64)
    ours = heatmap(model, image, name)
    guided = name == "guided_backprop"
    monkeypatch.setattr(functional, "relu", lambda seen, inplace=False: ByHand.apply(seen, torch.inf, guided))  # noqa: ARG005
    monkeypatch.setattr(functional, "relu6", lambda seen, inplace=False: ByHand.apply(seen, 6.0, guided))  # noqa: ARG005
    monkeypatch.setattr(nn.ReLU6, "forward", lambda _self, seen: ByHand.apply(seen, 6.0, guided))
    assert error_ratio(ours, *both(plain_saliency, model, image)) <= 1


@pytest.mark.parametrize("name", ["guided_backprop", "deconvnet", "guided_gradcam"])
def test_model_without_relus_is_refused(curved, name):
    with pytest.raises(FailedPrecondition, match=r"the model has no ReLU, .* that of saliency"):
        heatmap(curved, noise(0, 24), name)


def test_chain_rule_passes_do_not_change_relus(rectified):
    """The planted fault is a rule that stays active after its pass."""
    before = heatmap(rectified, noise(0, 64), "saliency")
    heatmap(rectified, noise(0, 64), "guided_backprop")
    np.testing.assert_array_equal(heatmap(rectified, noise(0, 64), "saliency"), before)
