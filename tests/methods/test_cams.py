"""The CAMs: equal to their papers in float64 and to three libraries, whatever else is in the batch."""

import copy

import cv2
import numpy as np
import pytest
import pytorch_grad_cam
import torch
import torchcam.methods
from captum.attr import LayerGradCam
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

from camserve_server.core.errors import FailedPrecondition
from camserve_server.engine import Engine
from camserve_server.engine.values import Row
from camserve_server.jobs.cost import runs_unchanged
from camserve_server.methods import METHODS, Cam, Parameter
from camserve_server.methods.cams import principal
from camserve_server.methods.values import MethodCall
from camserve_server.models.values import Pass
from camserve_server.targets.values import ClassTarget, ContrastTarget, RankTarget
from methods.tools import (
    CAMS,
    FACTOR,
    FLOOR,
    Toy,
    call,
    doubled,
    error_ratio,
    exact,
    explain,
    gap,
    inputs,
    job,
    maps,
    noise,
    run,
)
from methods.tools import plain as unaided
from support import loaded

SMALL = "timm:test_resnet?weights=none&size=64"

PAPERS = {
    "gradcam": lambda a, g: np.einsum("k,kij->ij", g.mean((1, 2)), a),
    "hirescam": lambda a, g: np.einsum("kij,kij->ij", g, a),
    "layercam": lambda a, g: np.einsum("kij,kij->ij", np.maximum(g, 0), a),
}


class Peers:
    """The same model for the peers, in one precision: its layer, the images and a class for each."""

    def __init__(self, module, layer, image, classes):
        self.model, self.layer = module, module.get_submodule(layer)
        self.image, self.classes = image.to(next(module.parameters()).dtype), classes


@pytest.fixture(scope="module")
def seen():
    """Our raw maps of noise by method; the same model for the peers, in float32 and in float64."""
    model, layer, classes = loaded("narrow=methods.narrow:resnet50?size=64"), "layer3", [3, 14, 15, 9]
    images = [noise(seed, 64) for seed in range(4)]
    rows = [Row(i, ClassTarget(c), tuple(map(call, CAMS))) for i, c in zip(images, classes, strict=True)]
    results = [result.maps[0] for result in run(model, rows, [layer])]
    # The peers' own hooks and gradients go to a copy, which they may treat as they like.
    theirs = copy.deepcopy(model.module).requires_grad_()
    ours = {name: np.stack([each[slot] for each in results]) for slot, name in enumerate(CAMS)}
    return ours, [Peers(each, layer, inputs(model, *images), classes) for each in (theirs, doubled(theirs))]


def worst(ours, oracle, peers):
    """The largest error ratio of our maps, image by image, where an oracle gives the maps of a model for peers."""
    plain, truth = map(oracle, peers)
    return max(error_ratio(*maps) for maps in zip(ours, plain, truth, strict=True))


def captured_by_hand(peers):
    """Activations and gradients, by autograd alone."""
    kept = []
    with peers.layer.register_forward_hook(lambda _module, _args, output: kept.append(output)):
        score = peers.model(peers.image).gather(1, torch.tensor(peers.classes)[:, None]).sum()
    (gradients,) = torch.autograd.grad(score, kept)
    return list(zip(kept[0].detach().numpy(), gradients.numpy(), strict=True))


@pytest.mark.slow  # `test_parity.py` has these formulas and libraries, too, for one image
@pytest.mark.parametrize("method", PAPERS)
def test_map_equals_the_papers_formula(seen, method):
    ours, peers = seen
    assert worst(ours[method], lambda each: [PAPERS[method](a, g) for a, g in captured_by_hand(each)], peers) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "peer"), [("gradcam", "GradCAM"), ("layercam", "LayerCAM")])
def test_map_equals_that_of_pytorch_grad_cam_after_its_normalisation_and_resize(seen, name, peer):
    def theirs(peers):
        with getattr(pytorch_grad_cam, peer)(peers.model, [peers.layer]) as cam:
            return cam(peers.image, [ClassifierOutputTarget(index) for index in peers.classes])

    ours, peers = seen
    assert worst([as_grad_cam_draws(each, peers[0].image.shape[2:]) for each in ours[name]], theirs, peers) <= 1


def as_grad_cam_draws(heatmap, size):
    """ReLU, min-max, bilinear to the input's size, min-max again."""
    small = between_0_and_1(np.maximum(heatmap, 0), 1e-7)
    return between_0_and_1(cv2.resize(small, size, interpolation=cv2.INTER_LINEAR), 1e-7)


def between_0_and_1(heatmap, eps):
    shifted = heatmap - heatmap.min()
    return shifted / (eps + shifted.max())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "peer"), [("gradcam", "GradCAM"), ("layercam", "LayerCAM")])
def test_map_equals_that_of_torchcam_after_its_relu_and_normalisation(seen, name, peer):
    def theirs(peers):
        with getattr(torchcam.methods, peer)(peers.model, peers.layer) as cam:
            return cam(peers.classes, peers.model(peers.image), normalized=True)[0]

    ours, peers = seen
    positive = [np.maximum(each, 0) for each in ours[name]]
    assert worst([between_0_and_1(each, 1e-8) for each in positive], theirs, peers) <= 1


@pytest.mark.slow
def test_signed_gradcam_map_equals_captums(seen):
    ours, peers = seen
    assert worst(ours["gradcam"], lambda each: captums(each, each.classes), peers) <= 1


def captums(peers, classes):
    """The signed maps of captum's LayerGradCam."""
    result = LayerGradCam(peers.model, peers.layer).attribute(peers.image, classes, relu_attributions=False)
    return result.detach()[:, 0]


@pytest.mark.slow
def test_map_of_a_wrong_class_is_detected(seen):
    """A planted fault: the comparisons above can tell one class's map from another's."""
    ours, peers = seen
    for one, *theirs in zip(
        ours["gradcam"], *(captums(each, [1 + i for i in each.classes]) for each in peers), strict=True
    ):
        assert error_ratio(one, *theirs) > 1


PLAIN = [name for name in METHODS if runs_unchanged(call(name))]


def weigh(name, activations, gradients, **parameters):
    """A method's maps, summed where it gives the terms of channels."""
    result = METHODS[name].weigh(
        activations, gradients, torch.zeros(len(activations)), **call(name, **parameters).parameters
    )
    return result.sum(1) if result.dim() == 4 else result


def drawn(*shape):
    """Activations, as behind a ReLU, and gradients."""
    activations, gradients = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    return activations.clamp(min=0), gradients


@pytest.mark.parametrize("name", PLAIN)
def test_formula_treats_the_images_of_a_batch_independently(name):
    activations, gradients = drawn(5, 8, 3, 4)
    together = weigh(name, activations, gradients)
    for each in range(5):
        a, g = activations[each : each + 1], gradients[each : each + 1]
        assert error_ratio(together[each : each + 1], weigh(name, a, g), weigh(name, a.double(), g.double())) <= 1


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("nothing", ["activations", "gradients"])
def test_maps_of_zero_gradients_and_activations_are_finite(name, nothing):
    result = {key: torch.zeros_like(each) if key == nothing else each for key, each in named(drawn(2, 8, 3, 4)).items()}
    assert weigh(name, **result).isfinite().all()


def named(pair):
    return dict(zip(("activations", "gradients"), pair, strict=True))


@pytest.mark.parametrize("name", PLAIN)
def test_non_finite_features_do_not_affect_batch_neighbours(name):
    activations, gradients = drawn(3, 8, 3, 4)
    clean, truth = weigh(name, activations, gradients), weigh(name, activations.double(), gradients.double())
    activations[1, 2, 0, 0] = torch.nan
    spoilt = weigh(name, activations, gradients)
    assert not spoilt[1].isfinite().all()
    assert error_ratio(spoilt[[0, 2]], clean[[0, 2]], truth[[0, 2]]) <= 1


@pytest.mark.parametrize("variant", ["paper", "official"])
@pytest.mark.parametrize("scale", [1e-9, 1e-4, 1e6])
def test_grad_cam_plus_plus_is_invariant_to_the_scale_of_a_layer(variant, scale):
    activations, gradients = drawn(2, 8, 3, 4)
    plain = weigh("gradcam_plus_plus", activations, gradients, variant=variant)
    truth = weigh("gradcam_plus_plus", activations.double(), gradients.double(), variant=variant)
    result = weigh("gradcam_plus_plus", activations / scale, gradients * scale, variant=variant)
    assert error_ratio(result, plain, truth) <= 1


def test_grad_cam_plus_plus_with_an_epsilon_depends_on_the_scale_of_a_layer():
    """A planted fault: the test above catches what pytorch-grad-cam does."""
    activations, gradients = (each.numpy() for each in drawn(2, 8, 3, 4))
    with pytorch_grad_cam.GradCAMPlusPlus(Toy(), [Toy().layer]) as cam:
        plain, small = (
            (cam.get_cam_weights(None, None, None, activations / s, gradients * s)[:, :, None, None] * activations / s)
            for s in (1.0, 1e-4)
        )
    assert gap(small.sum(1), plain.sum(1)) > 0.1


def test_alpha_is_a_half_if_the_sum_of_activations_is_negative():
    """Equation 19 has a pole there, which feature maps behind a ReLU never come near."""
    gradients = torch.full((1, 1, 2, 2), 0.5)
    activations = torch.full((1, 1, 2, 2), -1.0)  # 2 + g ΣA is zero
    result = METHODS["gradcam_plus_plus"].weigh(activations, gradients, torch.zeros(1), variant="paper")
    assert gap(result, 4 * 0.5 * 0.5 * activations) <= 1e-6


@pytest.mark.slow
def test_variants_of_grad_cam_plus_plus_agree_if_sums_are_negative(lite0, photos):
    """Behind a linear bottleneck half of the sums are: with the pole, the two correlate by -0.6 on one photo."""
    calls = tuple(call("gradcam_plus_plus", variant=variant) for variant in ("paper", "official"))
    rows = [Row(photo, RankTarget(0), calls) for photo in photos.values()]
    for result in run(lite0, rows, ["blocks.4.2"]):
        paper, official = (each.ravel() for each in result.maps[0])
        assert np.corrcoef(paper, official)[0, 1] >= 0.9


def test_official_weight_is_a_mean_of_positive_gradients():
    activations, gradients = drawn(1, 8, 3, 4)
    terms = METHODS["gradcam_plus_plus"].weigh(activations, gradients, torch.zeros(1), variant="official")
    for channel, g, term in zip(activations[0], gradients[0], terms[0], strict=True):
        weight = float(term.max() / channel.max())
        assert float(g[g > 0].min()) * (1 - 1e-5) <= weight <= float(g.max()) * (1 + 1e-5)


def test_xgradcam_map_adds_up_to_the_gradient_times_the_activations():
    """Conservation, which the paper derives its weights from (section 3.1)."""
    activations, gradients = drawn(4, 8, 3, 4)
    plain, truth = ((a * g).sum((1, 2, 3)) for a, g in ((activations, gradients), (activations.double(), gradients)))
    assert error_ratio(weigh("xgradcam", activations, gradients).sum((1, 2)), plain, truth) <= 1


def test_channel_whose_sum_is_zero_has_no_weight_in_xgradcam():
    activations, gradients = drawn(1, 2, 2, 2)
    activations[0, 0] = torch.tensor([[1.0, -1.0], [2.0, -2.0]])
    expected = weigh("xgradcam", activations[:, 1:], gradients[:, 1:])
    assert gap(weigh("xgradcam", activations, gradients), expected) <= 1e-6


@pytest.mark.parametrize("name", ["eigencam", "kpcacam"])
def test_sign_of_a_principal_component_is_that_of_the_rising_score(name):
    model, image = loaded(SMALL), noise(0, 64)
    result = maps(model, image, "layer3", RankTarget(0), ("gradcam", name))
    assert np.corrcoef(result["gradcam"].ravel(), result[name].ravel())[0, 1] >= 0
    here, there = (maps(model, image, "layer3", target, (name,))[name] for target in OPPOSITES)
    np.testing.assert_array_equal(here, -there)


OPPOSITES = (ContrastTarget(281, 282), ContrastTarget(282, 281))


def test_sign_of_eigencam_is_that_of_the_scores_slope_along_the_component():
    """The docstring states the sign: v · Σg ≥ 0."""
    activations, gradients = drawn(6, 8, 3, 4)
    for a, g, heatmap in zip(activations, gradients, weigh("eigencam", activations, gradients), strict=True):
        rows = a.flatten(1).T - a.flatten(1).mean(1)
        v = rows.T @ heatmap.flatten()  # the map is (A - mean) v, and v an eigenvector of the covariance
        assert float(v @ g.sum((1, 2))) >= 0


def test_principal_component_equals_numpys():
    terms, _ = drawn(3, 8, 3, 4)
    for term, heatmap in zip(terms.double().numpy(), principal(terms).numpy(), strict=True):
        assert error_ratio(heatmap, numpys(term.astype(np.float32)), numpys(term)) <= 1


def numpys(terms):
    """The first principal component of terms [C,h,w]."""
    rows = terms.reshape(len(terms), -1).T
    rows = rows - rows.mean(0)
    result = (rows @ np.linalg.svd(rows)[2][0]).reshape(terms.shape[1:])
    return result * np.sign((result * terms.sum(0)).sum())


def test_kpcacam_with_a_linear_kernel_is_eigencam():
    activations, gradients = drawn(3, 8, 3, 4)
    kernel, eigen = weigh("kpcacam", activations, gradients, kernel="linear"), weigh("eigencam", activations, gradients)
    assert error_ratio(kernel, eigen, weigh("eigencam", activations.double(), gradients.double())) <= 1


def test_kpcacam_refuses_a_grid_that_is_too_fine():
    with pytest.raises(FailedPrecondition, match="1056 positions; kpcacam takes up to 1024: name a deeper layer"):
        weigh("kpcacam", *torch.zeros(2, 1, 1, 32, 33))


def test_fem_ignores_the_target_and_is_zero_if_nothing_stands_out():
    first, second = (
        maps(loaded(SMALL), noise(0, 64), "layer3", ClassTarget(index), ("fem",))["fem"] for index in (1, 2)
    )
    np.testing.assert_array_equal(first, second)
    assert not weigh("fem", *drawn(1, 8, 3, 4), k=10.0).any()


def found_on(model, image, asked, layer, target=ClassTarget(1)):  # noqa: B008 -- frozen
    """The raw map of one call on one layer."""
    (finding,) = explain(model, image, job(model, [asked], [target], [layer])).explanations
    return finding.heatmap


def test_shapleycam_equals_gradcam_if_only_relus_follow():
    model = loaded(SMALL)
    shapley, plain = (found_on(model, noise(0, 64), name, "layer3") for name in ("shapleycam", "gradcam"))
    assert error_ratio(shapley, plain, found_on(exact(model), noise(0, 64), "gradcam", "layer3")) <= 1


def bent(model, name, image, index):
    """Shapley-CAM in float64, the Hessian by the difference of two gradients close by."""
    net, info = copy.deepcopy(model.module).double(), model.info.layers[name].layout
    activation = captured(net, name, image)[0]

    def gradient(at):
        return captured(net, name, image, at, index)[1]

    step = 1e-5
    bend = (gradient(activation * (1 + step)) - gradient(activation * (1 - step))) / (2 * step)
    terms = gradient(activation) - bend / 2
    if info.axes == "tokens":
        terms, activation = (
            each[:, info.prefix :].transpose(1, 2).unflatten(2, (info.height, info.width))
            for each in (terms, activation)
        )
    return (terms.mean((2, 3), keepdim=True) * activation).sum(1)[0]


def captured(net, name, image, at=None, index=0):
    """A layer's output, or another in its place, and the gradient there."""
    kept = []

    def replace_output(_module, _args, output):
        kept.append((output if at is None else at).detach().requires_grad_())
        return kept[0].clone()

    with net.get_submodule(name).register_forward_hook(replace_output):
        (gradient,) = torch.autograd.grad(net(image.double())[0, index], kept)
    return kept[0].detach(), gradient


def test_curvature_of_shapleycam_equals_a_difference_of_gradients(smooth):
    ours, plain = (found_on(each, noise(0, 16), "shapleycam", "conv") for each in (smooth, unaided(smooth)))
    assert error_ratio(ours, plain, bent(smooth, "conv", inputs(smooth, noise(0, 16)), 1)) <= 1
    assert gap(ours, found_on(smooth, noise(0, 16), "gradcam", "conv")) > 0.01


def test_curvature_of_shapleycam_passes_fused_attention():
    model = loaded("timm:test_vit?weights=none&size=64")
    ours, plain = (found_on(each, noise(0, 64), "shapleycam", "blocks.4") for each in (model, unaided(model)))
    assert error_ratio(ours, plain, bent(model, "blocks.4", inputs(model, noise(0, 64)), 1)) <= 1


def test_second_derivative_of_shapleycam_records_no_graph_of_its_own(smooth, monkeypatch):
    recorded, differentiate = [], torch.autograd.grad

    def record(*args, **options):
        recorded.append(options["create_graph"])
        return differentiate(*args, **options)

    monkeypatch.setattr(torch.autograd, "grad", record)
    found_on(smooth, noise(0, 16), "shapleycam", "conv")

    assert list(dict.fromkeys(recorded)) == [True, False]  # `PlainAttention` passes each call through once more


def test_smooth_grad_cam_plus_plus_without_noise_is_grad_cam_plus_plus(smooth):
    plain = found_on(smooth, noise(0, 16), "gradcam_plus_plus", "conv")
    calm = found_on(smooth, noise(0, 16), call("smoothgradcam_plus_plus", samples=3, noise=0.0), "conv")
    assert error_ratio(calm, plain, found_on(exact(smooth), noise(0, 16), "gradcam_plus_plus", "conv")) <= 1


def test_smooth_grad_cam_plus_plus_depends_on_its_seed_alone(smooth):
    first, repeated, other_seed = (
        found_on(smooth, noise(0, 16), call("smoothgradcam_plus_plus", samples=3, seed=seed), "conv")
        for seed in (4, 4, 5)
    )
    np.testing.assert_array_equal(first, repeated)
    assert gap(first, other_seed) > 0.01


def test_smooth_grad_cam_plus_plus_weights_the_images_own_feature_maps(smooth):
    method = call("smoothgradcam_plus_plus", samples=3)
    asked = job(smooth, [method, "gradcam"], [ClassTarget(1), ClassTarget(2)], ["conv", "layer"])
    assert asked.rows == 2 * (1 + 3)
    for finding in explain(smooth, noise(0, 16), asked, chunk=3).explanations[:4]:
        expected = (
            found_on(each, noise(0, 16), method, finding.layer, finding.target) for each in (smooth, exact(smooth))
        )
        assert error_ratio(finding.heatmap, *expected) <= 1


def test_rows_of_a_mixed_batch_equal_rows_computed_alone():
    model, images, layers = loaded(SMALL), [noise(seed, 64) for seed in range(6)], ("layer4", "layer3")
    targets = [RankTarget(0), ClassTarget(285), ContrastTarget(281, 282), RankTarget(3)]
    choices = [("gradcam",), ("layercam", "gradcam"), ("hirescam",), CAMS, ("layercam",)]
    rows = [
        Row(image, targets[(i + j) % 4], tuple(map(call, choices[(2 * i + j) % 5])))
        for i, image in enumerate(images)
        for j in range(2)
    ]
    truths = run(exact(model), rows, layers)
    for row, mixed, truth in zip(rows, run(model, rows, layers), truths, strict=True):
        for slot, layer in enumerate(layers):
            for place, method in enumerate(row.calls):
                (alone,) = run(model, [Row(row.image.copy(), row.target, (method,))], [layer])
                assert mixed.target == alone.target
                assert error_ratio(mixed.maps[slot][place], alone.maps[0][0], truth.maps[slot][place]) <= 1
                assert error_ratio(mixed.logits, alone.logits, truth.logits) <= 1
                allowed = (
                    2 * FACTOR * np.abs(alone.logits - truth.logits).max() + 2 * FLOOR * np.abs(truth.logits).max()
                )
                assert abs(mixed.score - truth.score) <= allowed  # a score may be the difference of two logits


def test_infinite_logit_of_a_class_does_not_affect_other_scores(plant):
    class Masks(Toy):
        def forward(self, image):
            return super().forward(image) + torch.tensor([-torch.inf, 0, 0, 0, 0])

    model = plant(Masks)
    rows = [Row(noise(i, 16), t, (call("gradcam"),)) for i, t in enumerate([ClassTarget(1), ContrastTarget(1, 2)])]
    together = run(model, rows, ["layer"])
    (alone,), (truth,) = (run(each, rows[:1], ["layer"]) for each in (model, exact(model)))
    assert np.isfinite(alone.score)
    assert error_ratio(together[0].score, alone.score, truth.score) <= 1


def test_raw_maps_are_signed_float32_on_the_layers_own_grid():
    model = loaded("timm:efficientnet_lite0?weights=none&size=64")
    rows = [Row(noise(0, 64), RankTarget(0), tuple(map(call, CAMS)))]
    (result,) = run(model, rows, ["blocks.4.2", "blocks.2.1"])
    assert [[each.shape for each in layer] for layer in result.maps] == [[(4, 4)] * 3, [(8, 8)] * 3]
    assert all(each.dtype == np.float32 for layer in result.maps for each in layer)
    assert all(each.min() < 0 < each.max() for layer in result.maps for each in layer)


def test_two_calls_of_one_method_with_different_parameters_are_two_maps(monkeypatch):
    def scaled(activations, gradients, _scores, *, factor):
        return factor * (gradients * activations).sum(1)

    parameter = Parameter("factor", "What the map is multiplied by.", 1.0, 0.0, 10.0)
    monkeypatch.setitem(METHODS, "scaled", Cam(scaled, "none", (parameter,)))
    model = loaded(SMALL)
    info = model.info
    calls = (MethodCall("scaled", {"factor": 2.0}), MethodCall("scaled", {"factor": 6.0}), MethodCall("hirescam"))
    image = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    pass_ = Pass(info.name, "cam", info.preprocess.size, (info.default_layer,))
    (result,) = Engine({info.name: model}).run(pass_, [Row(image, ClassTarget(3), calls)])
    twice, sixfold, plain = result.maps[0]

    assert np.allclose(twice, 2 * plain, rtol=1e-6)
    assert np.allclose(sixfold, 6 * plain, rtol=1e-6)
