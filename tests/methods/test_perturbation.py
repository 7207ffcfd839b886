"""Perturbation methods equal captum, torchcam or the paper, and yield the announced number of edits."""

import sys
from itertools import cycle

import numpy as np
import pytest
import torch
import torchcam.methods
from captum import attr
from skimage.filters import sobel_h, sobel_v
from torch import nn
from torch.nn import functional

import fork_server
from camserve_server.core.errors import FailedPrecondition, InvalidArgument
from camserve_server.methods import METHODS, Perturbation, Scene
from camserve_server.methods.perturbation import AT_ONCE
from camserve_server.targets.values import ClassTarget, ContrastTarget
from methods.tools import call, error_ratio, exact, explain, gap, inputs, job, noise
from support import loaded

SIDE = 24
INDEX = 3
TARGETS = (ClassTarget(INDEX),)

PERTURBATIONS = [name for name in METHODS if isinstance(METHODS[name], Perturbation)]
CLASSIFYING = [name for name in PERTURBATIONS if not METHODS[name].tasks]  # the others: test_drise.py
LAYERED = [name for name in PERTURBATIONS if METHODS[name].layered]
SEEDED = [name for name in METHODS if any(parameter.name == "seed" for parameter in METHODS[name].parameters)]


class Net(nn.Module):
    """Small, without kinks; `layer` has the input's own grid if `stride` is 1. Channel 2 is flat if wanted."""

    def __init__(self, stride=1, *, flat=False):
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv2d(3, 7, 3, stride=stride, padding=1)
        self.layer = nn.Softplus()
        self.head = nn.Linear(7 * 9, 5)
        if flat:
            nn.init.zeros_(self.conv.weight[2])

    def forward(self, image):
        return self.head(functional.adaptive_avg_pool2d(self.layer(self.conv(image)).square(), 3).flatten(1)) * 4


def coarse_net():
    return Net(4)


@pytest.fixture(scope="module")
def net():
    return loaded(f"methods.test_perturbation:Net?size={SIDE}")


@pytest.fixture(scope="module")
def coarse():
    return loaded(f"methods.test_perturbation:coarse_net?size={SIDE}")


def heatmaps(model, method, targets=TARGETS, image=None, chunk=64):
    image = noise(0, SIDE) if image is None else image
    return [
        explanation.heatmap
        for explanation in explain(model, image, job(model, [method], targets, ["layer"]), chunk).explanations
    ]


def error(model, method, oracle):
    """Return the error ratio of our map, with the reference in float32 as plain."""
    return error_ratio(heatmaps(model, method)[0], oracle(model), oracle(exact(model)))


def score(model, image, index=INDEX):
    with torch.no_grad():
        return model.module(image)[:, index].double().numpy()


def activations(model, image):
    with torch.no_grad():
        return model.module.layer(model.module.conv(image))[0].double().numpy()


# ------------------------------------------------------------------------------------------------------- every one


SCENE = Scene(
    np.random.default_rng(0).standard_normal((3, 20, 28)).astype(np.float32),
    np.float32([1.5, -0.5]),
    np.random.default_rng(1).standard_normal((130, 4, 5)).astype(np.float32),
)

CHOICES = [
    *((name, {}) for name in PERTURBATIONS),
    *(
        ("occlusion", {"window": w, "stride": s})
        for w, s in [(1, 1), (5, 3), (0.5, 0.9), (0.33, 0.1), (99, 99), (20, 7)]
    ),
    *(("rise", {"samples": n, "cells": c}) for n, c in [(1, 2), (64, 9), (65, 30)]),
    *((name, {"top_channels": top}) for name in LAYERED for top in (1, 64, 65, 1000)),
    *((name, {"top_channels": 0, "samples": 3}) for name in ("sscam", "iscam")),
    *((name, {"samples": 70, "cells": 3}) for name in ("kernel_shap", "lime")),
]


@pytest.mark.parametrize(("name", "parameters"), CHOICES)
def test_method_yields_the_announced_number_of_edits_at_most_64_at_a_time(name, parameters):
    method, chosen = METHODS[name], call(name, **parameters).parameters
    dice, exploring = np.random.default_rng(2), method.explore(SCENE, **chosen)
    edits, pieces, maps = next(exploring), [], None
    while maps is None:
        pieces.append(len(edits))
        assert all(each.keep is None or each.keep.shape == (20, 28) for each in edits)
        try:
            edits = exploring.send(dice.standard_normal((len(edits), 2)).astype(np.float32))
        except StopIteration as stop:
            maps = stop.value
    size = {"channels": 130} if method.layered else {"height": 20, "width": 28}
    assert sum(pieces) == method.count(**size, **chosen)
    assert max(pieces) <= AT_ONCE == 64
    assert maps.shape == (2, *((4, 5) if method.layered else (20, 28)))
    assert maps.dtype == np.float32
    assert np.isfinite(maps).all()


@pytest.mark.parametrize("name", CLASSIFYING)
def test_request_runs_the_announced_number_of_rows(net, name):
    batches, asked = [], job(net, [name], [ClassTarget(1), ContrastTarget(2, 3)], ["layer"])
    explain(net, noise(0, SIDE), asked, batches=batches)
    assert sum(size for _, size in batches) == asked.rows


@pytest.mark.parametrize("name", CLASSIFYING)
def test_maps_of_several_targets_equal_those_of_each_alone(net, name):
    method = call(name, **({"samples": 20} if "samples" in call(name).parameters else {}))
    targets = [ClassTarget(1), ContrastTarget(2, 3)]
    for heatmap_of_target, target in zip(heatmaps(net, method, targets), targets, strict=True):
        expected = (heatmaps(model, method, [target], chunk=7)[0] for model in (net, exact(net)))
        assert error_ratio(heatmap_of_target, *expected) <= 1


@pytest.mark.parametrize("name", [name for name in SEEDED if not METHODS[name].tasks])
def test_same_seed_gives_the_same_bytes_and_another_seed_another_map(net, name):
    few = {"samples": 20} if "samples" in call(name).parameters else {}
    first, repeated, other_seed = (heatmaps(net, call(name, seed=seed, **few))[0] for seed in (4, 4, 5))
    assert first.tobytes() == repeated.tobytes()
    assert gap(first, other_seed) > 1e-3


# ----------------------------------------------------------------------------------------------------------- pixels


@pytest.mark.parametrize(
    ("window", "stride"), [(6, 6), (5, 3), (7, 4), (24, 24), pytest.param(1, 1, marks=pytest.mark.slow)]
)
def test_occlusion_equals_captums(net, window, stride):
    def theirs(model):
        return attr.Occlusion(model.module).attribute(
            inputs(model, noise(0, SIDE)),
            (3, window, window),
            strides=(3, stride, stride),
            target=INDEX,
            perturbations_per_eval=32,
        )[0, 0]

    assert error(net, call("occlusion", window=window, stride=stride), theirs) <= 1


def test_window_below_one_is_a_share_of_the_side(net):
    (share,), (pixels,) = (
        heatmaps(net, call("occlusion", window=w, stride=s)) for w, s in [(0.25, 0.125), (SIDE // 4, SIDE // 8)]
    )
    np.testing.assert_array_equal(share, pixels)


def test_stride_longer_than_the_window_covers_every_pixel(net):
    (long,), (touching,) = (heatmaps(net, call("occlusion", window=6, stride=s)) for s in (20, 6))
    np.testing.assert_array_equal(long, touching)


@pytest.mark.parametrize("divisor", ["shown", "expected"])
def test_rise_is_the_papers_sum_over_the_documented_masks(net, divisor):
    samples, cells, probability, seed = 70, 5, 0.4, 3
    cell, masks = -(-SIDE // cells), []
    for index in range(samples):
        dice = torch.Generator().manual_seed(seed * 100_003 + index)
        grid = (torch.rand((cells, cells), generator=dice) < probability).double()
        # Written out: a pixel lies between the centres of two cells, or before the first, or after the last.
        at = ((np.arange((cells + 1) * cell) + 0.5) * cells / ((cells + 1) * cell) - 0.5).clip(0, cells - 1)
        weight = np.maximum(1 - np.abs(at[:, None] - np.arange(cells)), 0)
        top, left = (int(torch.randint(cell, (), generator=dice)) for _ in range(2))
        masks.append((weight @ grid.numpy() @ weight.T)[top : top + SIDE, left : left + SIDE])

    def theirs(model):
        image = inputs(model, noise(0, SIDE))
        drawn = torch.from_numpy(np.stack(masks)).to(image)
        scores = model.module(image * drawn[:, None])[:, INDEX].detach()
        total = torch.einsum("n,nhw->hw", scores, drawn)
        return total / drawn.sum(0) - scores.mean() if divisor == "shown" else total / (samples * probability)

    chosen = {"samples": samples, "cells": cells, "probability": probability, "seed": seed, "divisor": divisor}
    assert error(net, call("rise", **chosen), theirs) <= 1


def test_rise_masks_show_the_requested_share_of_the_image():
    exploring = METHODS["rise"].explore(SCENE, samples=400, cells=7, probability=0.3, seed=1, divisor="shown")
    masks, edits = [], next(exploring)
    for _ in range(6):
        masks += [each.keep for each in edits]
        edits = exploring.send(np.zeros((len(edits), 2), np.float32))
    assert np.mean(masks) == pytest.approx(0.3, abs=0.02)
    assert (np.min(masks), np.max(masks)) == (0, 1)


def test_constant_added_to_all_scores_does_not_change_rise():
    """A planted fault: with the paper's divisor the constant becomes a pattern."""
    constant = {}
    for divisor in ("shown", "expected"):
        exploring = METHODS["rise"].explore(SCENE, **call("rise", divisor=divisor).parameters)
        edits, maps = next(exploring), None
        while maps is None:
            try:
                edits = exploring.send(np.full((len(edits), 2), 9.5, np.float32))
            except StopIteration as stop:
                maps = stop.value
        constant[divisor] = maps
    np.testing.assert_allclose(constant["shown"], 0, atol=1e-5)
    assert np.ptp(constant["expected"]) > 1


# ---------------------------------------------------------------------------------------------------------- channels


def scaled(channel):
    return (channel - channel.min()) / (channel.max() - channel.min())


def test_scorecam_is_the_papers_formula(coarse):
    def theirs(model):
        image = inputs(model, noise(0, SIDE))
        scores = np.array([score(model, image * scaled(each))[0] for each in enlarged(model, image)])
        change = scores - score(model, torch.zeros_like(image))[0]
        weights = np.exp(change) / np.exp(change).sum()
        return np.tensordot(weights, activations(model, image), 1)

    assert error(coarse, "scorecam", theirs) <= 1


def enlarged(model, image):
    """Return the feature maps at the size of the input."""
    seen = torch.from_numpy(activations(model, image)).to(image)
    return functional.interpolate(seen[None], (SIDE, SIDE), mode="bilinear", align_corners=False)[0]


@pytest.mark.parametrize(("name", "peer"), [("scorecam", "ScoreCAM"), ("sscam", "SSCAM")])
def test_on_a_layer_of_the_inputs_own_grid_a_map_equals_torchcams(net, name, peer, monkeypatch):
    """Elsewhere torchcam scales to 0..1 before it brings a feature map to the pixels; the paper and its code, after."""
    options, more = {}, {}
    if name == "sscam":
        options, more = {"num_samples": 4, "std": 0.5}, {"samples": 4, "noise": 0.5, "seed": 2}
        drawn = [torch.Generator().manual_seed(2 * 100_003 + index) for index in range(7 * 4)]
        noises = torch.stack([torch.randn(SIDE, SIDE, generator=each) for each in drawn]).reshape(7, 4, SIDE, SIDE)
        turns = cycle(range(4))
        monkeypatch.setattr(torch.distributions.normal.Normal, "sample", lambda *_: 0.5 * noises[:, next(turns)][None])

    def theirs(model):
        with getattr(torchcam.methods, peer)(model.module, "layer", **options) as cam:
            return cam(INDEX, model.module(inputs(model, noise(0, SIDE))), normalized=False)[0][0]

    assert error(net, call(name, **more), theirs) <= 1


def test_iscam_is_the_papers_formula(coarse):
    def theirs(model):
        image = inputs(model, noise(0, SIDE))
        scores = [
            np.mean([score(model, image * scaled(each) * (i / 3))[0] for i in (1, 2, 3)])
            for each in enlarged(model, image)
        ]
        weights = np.exp(scores) / np.exp(scores).sum()
        return np.tensordot(weights, activations(model, image), 1)

    assert error(coarse, call("iscam", samples=3), theirs) <= 1


@pytest.mark.parametrize("name", ["scorecam", "sscam", "iscam"])
def test_constant_feature_map_has_no_weight(plant, name):
    model = plant(lambda: Net(4, flat=True), size=SIDE)
    image = inputs(model, noise(0, SIDE))
    seen = activations(model, image)
    assert np.ptp(seen[2]) == 0 < seen[2].max()
    (ours,) = heatmaps(model, name)
    without = np.delete(seen, 2, 0).reshape(6, -1).T
    assert np.linalg.lstsq(without, ours.ravel().astype(np.float64))[1] < 1e-8  # the other channels make it up alone


@pytest.mark.parametrize("name", ["scorecam", "ablationcam"])
def test_top_channels_have_the_largest_deviation(coarse, name):
    image = inputs(coarse, noise(0, SIDE))
    seen = activations(coarse, image)
    chosen = np.argsort(-seen.std((1, 2)))[:2]
    (ours,) = heatmaps(coarse, call(name, top_channels=2))
    _, left_over, *_ = np.linalg.lstsq(seen[chosen].reshape(2, -1).T, ours.ravel().astype(np.float64))
    assert left_over < 1e-8


@pytest.mark.parametrize("sign", [1, -1])
def test_ablationcam_is_the_papers_formula_by_a_loop_that_silences_channels(coarse, sign):
    image = inputs(coarse, noise(0, SIDE))
    index = next(i for i in range(5) if np.sign(score(coarse, image, i)[0]) == sign)

    def theirs(model):
        image = inputs(model, noise(0, SIDE))
        (whole,) = score(model, image, index)
        weights = []
        for channel in range(7):
            hook = model.module.layer.register_forward_hook(
                lambda _module, _args, output, channel=channel: output.index_fill(1, torch.tensor(channel), 0)
            )
            weights.append((whole - score(model, image, index)[0]) / abs(whole))
            hook.remove()
        return np.tensordot(weights, activations(model, image), 1)

    (ours,) = heatmaps(coarse, "ablationcam", [ClassTarget(index)])
    assert error_ratio(ours, theirs(coarse), theirs(exact(coarse))) <= 1


# --------------------------------------------------------------------------------------------------------- surrogates


def grid(cells):
    at = torch.arange(SIDE) * cells // SIDE
    return (at[:, None] * cells + at)[None]


def nearness(_original, _perturbed, cells, **_more):
    """Captum's default kernel, but between sets of cells instead of pixels."""
    alike = functional.cosine_similarity(torch.ones_like(cells).float(), cells.float()).item()
    return float(np.exp(-((1 - alike) ** 2) / 2))


@pytest.mark.parametrize(
    ("name", "peer", "options"),
    [("kernel_shap", attr.KernelShap, {}), ("lime", attr.Lime, {"similarity_func": nearness})],
)
def test_surrogate_equals_captums_own_over_the_same_cells(net, name, peer, options):
    def theirs(model):
        torch.manual_seed(6)
        return peer(model.module, **options).attribute(
            inputs(model, noise(0, SIDE)), target=INDEX, feature_mask=grid(4), n_samples=90
        )[0, 0]

    assert error(net, call(name, samples=90, cells=4, seed=6), theirs) <= 1


@pytest.mark.parametrize("name", ["kernel_shap", "lime"])
def test_surrogate_refuses_more_samples_than_fit_in_memory(name):
    count = METHODS[name].count

    assert count(samples=244, cells=64) == 244
    assert count(samples=16_000, cells=7) == 16_000
    with pytest.raises(InvalidArgument, match=r"at most 1,000,000: at most 244 samples with 64 cells"):
        count(samples=245, cells=64)


def test_values_of_kernel_shap_add_up_to_the_score_less_that_of_the_zero_input(net):
    (ours,) = heatmaps(net, call("kernel_shap", samples=60, cells=3))
    image = inputs(net, noise(0, SIDE))
    cells = ours[4::8, 4::8]
    assert cells.shape == (3, 3)
    assert cells.sum() == pytest.approx(score(net, image)[0] - score(net, torch.zeros_like(image))[0], rel=1e-3)


def test_surrogate_does_not_change_the_global_random_state(net):
    torch.manual_seed(9)
    expected = torch.rand(3)
    torch.manual_seed(9)
    heatmaps(net, call("lime", samples=10))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("missing", ["captum", "sklearn"])
@pytest.mark.parametrize("name", ["kernel_shap", "lime"])
def test_surrogate_without_captum_names_the_package_to_install(net, name, missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(FailedPrecondition, match=r'pip install "camserve\[captum\]"'):
        heatmaps(net, name)


def test_captum_is_imported_only_for_surrogates():
    """The import of captum takes seconds, and the server does not install it. A fork server imports no tests."""
    says = "import sys, camserve_server.methods; print('captum' in sys.modules, 'sklearn' in sys.modules)"
    assert fork_server.run(says).stdout.split() == ["False", "False"]


# ----------------------------------------------------------------------------------------------------------- baselines


def test_edges_equals_the_sobel_magnitude_of_scikit_image(net):
    def theirs(model):
        grey = inputs(model, noise(0, SIDE))[0].mean(0).numpy()
        return 4 * np.hypot(sobel_h(grey), sobel_v(grey))[1:-1, 1:-1]

    (ours,) = heatmaps(net, "edges")
    assert error_ratio(ours[1:-1, 1:-1], theirs(net), theirs(exact(net))) <= 1


def test_random_is_uniform_and_independent_of_the_image(net):
    (first,), (second,) = (heatmaps(net, "random", image=noise(seed, SIDE)) for seed in (0, 1))
    np.testing.assert_array_equal(first, second)
    assert 0 <= first.min() < 0.05
    assert 0.95 < first.max() <= 1
    assert first.mean() == pytest.approx(0.5, abs=0.05)
