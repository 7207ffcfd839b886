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

from camserve_server.engine import Engine
from camserve_server.methods import METHODS, Cam, Parameter
from camserve_server.models import load, parse
from camserve_server.types import ClassTarget, ContrastTarget, MethodCall, Pass, RankTarget, Row
from methods.tools import CAMS, Toy, call, gap, inputs, noise, run

EXACT = 1e-5  # of the map's largest value

PAPERS = {
    "gradcam": lambda a, g: np.einsum("k,kij->ij", g.mean((1, 2)), a),
    "hirescam": lambda a, g: np.einsum("kij,kij->ij", g, a),
    "layercam": lambda a, g: np.einsum("kij,kij->ij", np.maximum(g, 0), a),
}


@pytest.fixture(scope="module", params=["efficientnet_lite0 on photos", "resnet18 on noise"])
def seen(request):
    """A model, a layer, images and a class for each; our raw maps by method; the same model for the peers."""
    if request.param.startswith("resnet18"):
        model, layer = request.getfixturevalue("resnet"), "layer3"
        images = [noise(seed, 64) for seed in range(4)]
        classes = [3, 141, 592, 653]
    else:
        model = request.getfixturevalue("lite0")
        layer, images = model.info.default_layer, list(request.getfixturevalue("photos").values())
        classes = [result.target.index for result in run(model, [Row(i, RankTarget(0)) for i in images], kind="score")]
    rows = [Row(i, ClassTarget(c), tuple(map(call, CAMS))) for i, c in zip(images, classes, strict=True)]
    found = [result.maps[0] for result in run(model, rows, [layer])]
    # The peers' own hooks and gradients go to a copy, which they may treat as they like.
    theirs = copy.deepcopy(model.module).requires_grad_()
    ours = {name: np.stack([one[slot] for one in found]) for slot, name in enumerate(CAMS)}
    return ours, theirs, theirs.get_submodule(layer), inputs(model, *images), classes


def each(ours, theirs):
    """The largest gap between two stacks of maps, image by image."""
    return max(gap(one, other) for one, other in zip(ours, theirs, strict=True))


def test_a_map_equals_the_papers_formula_in_float64(seen):
    ours, model, layer, image, classes = seen
    name = next(name for name, module in model.named_modules() if module is layer)
    model, kept = copy.deepcopy(model).double(), []
    model.get_submodule(name).register_forward_hook(lambda _module, _args, output: kept.append(output))
    score = model(image.double()).gather(1, torch.tensor(classes)[:, None]).sum()
    (gradients,) = torch.autograd.grad(score, kept)
    for method, formula in PAPERS.items():
        paper = [formula(a, g) for a, g in zip(kept[0].detach().numpy(), gradients.numpy(), strict=True)]
        assert each(ours[method], paper) <= EXACT, method


@pytest.mark.parametrize(("name", "peer"), [("gradcam", "GradCAM"), ("hirescam", "HiResCAM"), ("layercam", "LayerCAM")])
def test_a_map_equals_that_of_pytorch_grad_cam_after_its_normalisation_and_resize(seen, name, peer):
    ours, model, layer, image, classes = seen
    with getattr(pytorch_grad_cam, peer)(model, [layer]) as cam:
        theirs = cam(image, [ClassifierOutputTarget(index) for index in classes])
    assert each([as_grad_cam_draws(one, image.shape[2:]) for one in ours[name]], theirs) <= EXACT


def as_grad_cam_draws(heatmap, size):
    """ReLU, min-max, bilinear to the input's size, min-max again."""
    small = between_0_and_1(np.maximum(heatmap, 0), 1e-7)
    return between_0_and_1(cv2.resize(small, size, interpolation=cv2.INTER_LINEAR), 1e-7)


def between_0_and_1(heatmap, eps):
    shifted = heatmap - heatmap.min()
    return shifted / (eps + shifted.max())


@pytest.mark.parametrize("name", CAMS)
def test_a_raw_map_equals_that_of_pytorch_grad_cam_before_its_relu(seen, name):
    ours, model, layer, image, classes = seen
    peer = {"gradcam": "GradCAM", "hirescam": "HiResCAM", "layercam": "LayerCAM"}[name]
    with getattr(pytorch_grad_cam, peer)(model, [layer]) as cam:
        cam(image, [ClassifierOutputTarget(index) for index in classes])
        (activations,), (gradients,) = cam.activations_and_grads.activations, cam.activations_and_grads.gradients
        theirs = cam.get_cam_image(image, layer, None, activations.numpy(), gradients.numpy(), eigen_smooth=False)
    assert each(ours[name], theirs) <= EXACT


@pytest.mark.parametrize(("name", "peer"), [("gradcam", "GradCAM"), ("layercam", "LayerCAM")])
@pytest.mark.parametrize("normalised", [False, True])
def test_a_map_equals_that_of_torchcam_after_its_relu_and_normalisation(seen, name, peer, normalised):
    ours, model, layer, image, classes = seen
    with getattr(torchcam.methods, peer)(model, layer) as cam:
        (theirs,) = cam(classes, model(image), normalized=normalised)
    positive = [np.maximum(one, 0) for one in ours[name]]
    drawn = [between_0_and_1(one, 1e-8) for one in positive] if normalised else positive
    assert each(drawn, theirs) <= EXACT


def test_the_signed_gradcam_map_equals_captums(seen):
    ours, model, layer, image, classes = seen
    theirs = LayerGradCam(model, layer).attribute(image, classes, relu_attributions=False)
    assert ours["gradcam"].min() < 0
    assert each(ours["gradcam"], theirs.detach()[:, 0]) <= EXACT


def test_the_map_of_a_wrong_class_is_caught(seen):
    """A planted fault: the comparisons above can tell one class's map from another's."""
    ours, model, layer, image, classes = seen
    wrong = [index + 1 for index in classes]
    theirs = LayerGradCam(model, layer).attribute(image, wrong, relu_attributions=False)
    assert min(gap(one, other) for one, other in zip(ours["gradcam"], theirs.detach()[:, 0], strict=True)) > 0.01


@pytest.mark.parametrize("name", CAMS)
def test_a_formula_treats_every_image_of_a_batch_alone(name):
    activations, gradients = torch.randn(2, 5, 8, 3, 4, generator=torch.Generator().manual_seed(0))
    weigh = METHODS[name].weigh
    together = weigh(activations, gradients, torch.zeros(5))
    for one in range(5):
        here = slice(one, one + 1)
        alone = weigh(activations[here], gradients[here], torch.zeros(1))
        assert gap(together[here], alone) <= 1e-6


def test_a_mixed_batch_answers_every_row_as_if_it_were_alone(lite0, photos):
    layers = (lite0.info.default_layer, "blocks.4.2")
    targets = [RankTarget(0), ClassTarget(285), ContrastTarget(281, 282), RankTarget(3)]
    choices = [("gradcam",), ("layercam", "gradcam"), ("hirescam",), CAMS, ("layercam",)]
    rows = [
        Row(image, targets[(i + j) % 4], tuple(map(call, choices[(2 * i + j) % 5])))
        for i, image in enumerate(photos.values())
        for j in range(2)
    ]
    for row, mixed in zip(rows, run(lite0, rows, layers), strict=True):
        for slot, layer in enumerate(layers):
            for place, method in enumerate(row.calls):
                (alone,) = run(lite0, [Row(row.image.copy(), row.target, (method,))], [layer])
                assert mixed.target == alone.target
                assert gap(mixed.maps[slot][place], alone.maps[0][0]) <= EXACT
                assert gap(mixed.logits, alone.logits) <= EXACT
                assert abs(mixed.score - alone.score) <= EXACT * np.abs(alone.logits).max()


def test_a_class_that_the_model_masks_out_does_not_spoil_the_scores_of_others(plant):
    class Masks(Toy):
        def forward(self, image):
            return super().forward(image) + torch.tensor([-torch.inf, 0, 0, 0, 0])

    model = plant(Masks)
    rows = [Row(noise(i, 16), t, (call("gradcam"),)) for i, t in enumerate([ClassTarget(1), ContrastTarget(1, 2)])]
    together = run(model, rows, ["layer"])
    (alone,) = run(model, rows[:1], ["layer"])
    assert np.isfinite(alone.score)
    assert together[0].score == pytest.approx(alone.score, rel=EXACT)


def test_raw_maps_are_signed_float32_on_the_layers_own_grid(lite0, photos):
    rows = [Row(photos["chelsea"], RankTarget(0), tuple(map(call, CAMS)))]
    (result,) = run(lite0, rows, ["blocks.4.2", "blocks.2.1"])
    assert [[one.shape for one in layer] for layer in result.maps] == [[(14, 14)] * 3, [(28, 28)] * 3]
    assert all(one.dtype == np.float32 for layer in result.maps for one in layer)
    assert all(one.min() < 0 < one.max() for layer in result.maps for one in layer)


def test_two_calls_of_one_method_with_different_parameters_are_two_maps(monkeypatch):
    def scaled(activations, gradients, _scores, *, factor):
        return factor * (gradients * activations).sum(1)

    parameter = Parameter("factor", "What the map is multiplied by.", 1.0, 0.0, 10.0)
    monkeypatch.setitem(METHODS, "scaled", Cam(scaled, "none", (parameter,)))
    model = load(parse("torchvision:squeezenet1_1?weights=none&size=64"))
    info = model.info
    calls = (MethodCall("scaled", {"factor": 2.0}), MethodCall("scaled", {"factor": 6.0}), MethodCall("hirescam"))
    image = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    pass_ = Pass(info.name, "cam", info.preprocess.size, (info.default_layer,))
    (result,) = Engine({info.name: model}).run(pass_, [Row(image, ClassTarget(3), calls)])
    twice, sixfold, plain = result.maps[0]

    assert np.allclose(twice, 2 * plain, rtol=1e-6)
    assert np.allclose(sixfold, 6 * plain, rtol=1e-6)
