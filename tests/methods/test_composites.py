"""Maps composed of several layers, of copies and windows of the image, or of the input and all biases."""

import cv2
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from camserve_server.core.errors import FailedPrecondition
from camserve_server.engine import bias
from camserve_server.engine.inputs import apply_view
from camserve_server.engine.values import Row
from camserve_server.jobs import LayerMaps, RawMap
from camserve_server.jobs.cost import AUGMENTED
from camserve_server.jobs.fuse import JOINT, fuse_layers, pyramid
from camserve_server.jobs.verdict import Verdict
from camserve_server.methods.cams import sess, windows
from camserve_server.methods.values import MethodCall
from camserve_server.targets import weight_probability
from camserve_server.targets.values import ClassTarget, ContrastTarget, ProbabilityTarget, RankTarget
from methods.tools import Toy, call, error_ratio, exact, explain, gap, inputs, job, noise, run
from support import loaded

STAGES = ("layer2", "layer3", "layer4")


def finding(model, image, asked, *layers, target=ClassTarget(1), fusion=None):  # noqa: B008 -- frozen
    """Return the only explanation of a call."""
    (explanation,) = explain(model, image, job(model, [asked], [target], layers, fusion=fusion)).explanations
    return explanation


def scaled(heatmap, size):
    """Return a map clipped at zero, scaled to 0 to 1 and resized."""
    cut = heatmap.clip(min=0)
    return cv2.resize((cut - cut.min()) / (cut.max() - cut.min()), size[::-1], interpolation=cv2.INTER_LINEAR)


# -------------------------------------------------------------------------------------------------------------- layers


@pytest.fixture(scope="module")
def stages(resnet):
    """Grad-CAM maps of three stages, scaled and resized to the finest one; in float32 and float64."""
    answers = [
        explain(model, noise(0, 64), job(model, ["gradcam"], [ClassTarget(1)], STAGES)).explanations
        for model in (resnet, exact(resnet))
    ]
    return [[scaled(item.heatmap, each[0].heatmap.shape) for item in each] for each in answers]


@pytest.mark.parametrize(("fusion", "by_hand"), [("mean", np.mean), ("max", np.max), ("product", np.prod)])
def test_layers_are_fused_value_by_value_on_the_finest_grid(resnet, stages, fusion, by_hand):
    result = finding(resnet, noise(0, 64), "gradcam", *STAGES, fusion=fusion)
    plain, truth = (by_hand(stage, axis=0) for stage in stages)
    assert error_ratio(result.heatmap, plain, truth) <= 1
    assert result.layer == JOINT.join(STAGES)
    turned = finding(resnet, noise(0, 64), "gradcam", *STAGES[::-1], fusion=fusion)
    assert error_ratio(turned.heatmap, plain, truth) <= 1


def test_layers_are_fused_target_by_target(resnet):
    targets = [ClassTarget(1), ContrastTarget(3, 4)]
    together = explain(resnet, noise(0, 64), job(resnet, ["layercam"], targets, STAGES, fusion="mean")).explanations
    for each in together:
        alone, truth = (
            finding(model, noise(0, 64), "layercam", *STAGES, target=each.target, fusion="mean")
            for model in (resnet, exact(resnet))
        )
        assert error_ratio(each.heatmap, alone.heatmap, truth.heatmap) <= 1


@pytest.mark.parametrize(("value", "expected"), [(3.0, [[0.0, 1.0]]), (0.0, [[0.0, 0.0]]), (-1.0, [[0.0, 0.0]])])
def test_constant_positive_layer_leaves_a_product_unchanged(value, expected):
    layers = [
        LayerMaps(name, [RawMap(np.array(heatmap, np.float32))])
        for name, heatmap in (("told", [[1.0, 5.0]]), ("flat", [[value, value]]))
    ]
    np.testing.assert_array_equal(fuse_layers(layers, "product").maps[0].heatmap, expected)


def test_refinecam_is_the_product_of_grad_cams_of_the_layers_named(resnet, stages):
    result = finding(resnet, noise(0, 64), "refinecam", *STAGES)
    assert error_ratio(result.heatmap, *(np.prod(stage, 0) for stage in stages)) <= 1


def test_refinecam_adds_the_last_layer_of_each_finer_grid(resnet):
    joined = pyramid(resnet.info, "layer4")
    assert joined[-1] == "layer4"
    grids = [resnet.info.layers[name].layout.height for name in joined]
    assert grids == sorted(set(grids), reverse=True)
    result = finding(resnet, noise(0, 64), "refinecam", "layer4")
    assert result.layer == JOINT.join(joined)
    assert gap(result.heatmap, finding(resnet, noise(0, 64), "refinecam", *joined).heatmap) == 0


# -------------------------------------------------------------------------------------------------------------- copies


def test_augmentation_averages_mirrored_and_brightened_copies(resnet):
    asked = MethodCall("gradcam", augmented=True)
    layer, photo = resnet.info.default_layer, noise(0, 64)
    result = finding(resnet, photo, asked, layer, target=ClassTarget(504)).heatmap

    def mean(model):
        image = inputs(model, photo)
        return np.mean(
            [
                np.flip(grad_cam(model, (image.flip(3) if mirrored else image) * gain, layer, 504), [1] * mirrored)
                for mirrored in (False, True)
                for gain in (0.9, 1.0, 1.1)
            ],
            axis=0,
        )

    assert error_ratio(result, mean(resnet), mean(exact(resnet))) <= 1


def grad_cam(model, image, layer, index):
    """Return Grad-CAM by plain autograd."""
    kept = []

    def keep(_module, _args, output):
        kept.append(output.detach().requires_grad_())
        return kept[0].clone()

    with model.module.get_submodule(layer).register_forward_hook(keep):
        (gradient,) = torch.autograd.grad(model.module(image)[0, index], kept)
    return (gradient.mean((2, 3), keepdim=True) * kept[0]).sum(1)[0].detach().numpy()


def test_copies_explain_the_class_of_the_unchanged_image(resnet):
    asked = job(resnet, [MethodCall("gradcam", augmented=True)], [RankTarget(0)])
    batches = []
    outcome = explain(resnet, noise(0, 64), asked, batches=batches)
    assert outcome.explanations[0].target == ClassTarget(int(outcome.logits.argmax()))
    assert sum(rows for _, rows in batches) == asked.rows == 1 + len(AUGMENTED)


def test_augmented_map_of_a_mirrored_image_is_the_mirrored_map(resnet):
    asked, layer, photo = MethodCall("layercam", augmented=True), resnet.info.default_layer, noise(0, 64)
    other = finding(resnet, np.ascontiguousarray(photo[:, ::-1]), asked, layer).heatmap
    expected = (finding(model, photo, asked, layer).heatmap for model in (resnet, exact(resnet)))
    assert error_ratio(other[:, ::-1], *expected) <= 1


# ------------------------------------------------------------------------------------------------------------- windows


@pytest.mark.parametrize(("scales", "count"), [(1, 1), (2, 5), (6, 31), (12, 122)])
def test_windows_cover_the_image_and_their_number_is_the_authors(scales, count):
    views = windows(height=224, width=224, scales=scales)
    assert len(views) == count
    assert sorted({view.enlarged(224, 224)[0] for view in views}) == [224 + 64 * number for number in range(scales)]
    for scale in {view.scale for view in views}:
        height, width = next(view for view in views if view.scale == scale).enlarged(224, 224)
        seen = np.zeros((height, width), bool)
        for view in views:
            if view.scale == scale:
                assert view.top + 224 <= height
                assert view.left + 224 <= width
                seen[view.top : view.top + 224, view.left : view.left + 224] = True
        assert seen.all()


def test_window_is_a_crop_of_the_enlarged_image():
    image = torch.rand(3, 20, 28, generator=torch.Generator().manual_seed(0))
    for view in windows(height=20, width=28, scales=3):
        height, width = view.enlarged(20, 28)
        large = functional.interpolate(image[None], (height, width), mode="bilinear", align_corners=False)[0]
        expected = large[:, view.top : view.top + 20, view.left : view.left + 28]
        assert torch.equal(apply_view(image, view), expected)


def test_windows_cost_one_row_each_and_a_target_costs_them_again(resnet):
    batches = []
    asked = job(resnet, [call("sess", scales=2)], [ClassTarget(1), ClassTarget(2)])
    explain(resnet, noise(0, 64), asked, batches=batches)
    assert sum(rows for _, rows in batches) == asked.rows == 2 * (1 + 5)


def test_window_with_an_unlikely_target_adds_little():
    views = windows(height=32, width=32, scales=2)
    maps = np.zeros((5, 4, 4), np.float32)
    maps[1, 1, 1] = maps[4, 2, 2] = 1.0  # in the upper left window and in the lower right one
    likely = sess(maps, np.array([0, 0.9, 0, 0, 0.1], np.float32), views, height=32, width=32)
    assert likely[:16, :16].max() > 5 * likely[16:, 16:].max() > 0
    turned = sess(maps, np.array([0, 0.1, 0, 0, 0.9], np.float32), views, height=32, width=32)
    assert turned[16:, 16:].max() > 5 * turned[:16, :16].max() > 0


def test_windows_with_zero_maps_or_probabilities_give_a_zero_map():
    views = windows(height=16, width=16, scales=1)
    for maps, chances in ((np.zeros((1, 2, 2)), [0.5]), (np.ones((1, 2, 2)), [0.5]), (np.eye(2)[None], [0.0])):
        result = sess(maps.astype(np.float32), np.array(chances, np.float32), views, height=16, width=16)
        assert not result.any()


def test_weight_of_a_window_is_a_probability(resnet):
    rows = [Row(noise(0, 64), target) for target in (ClassTarget(3), ContrastTarget(3, 4), ProbabilityTarget(3))]
    rank, contrast, probability = run(resnet, rows, kind="score")
    shares = np.exp(rank.logits - rank.logits.max()) / np.exp(rank.logits - rank.logits.max()).sum()
    assert weight_probability(resnet.info.task, rank) == pytest.approx(shares[3], rel=1e-4)
    assert weight_probability(resnet.info.task, contrast) == pytest.approx(1 / (1 + np.exp(-contrast.score)), rel=1e-4)
    assert weight_probability(resnet.info.task, probability) == pytest.approx(shares[3], rel=1e-4)


# -------------------------------------------------------------------------------------------------------------- biases


@pytest.fixture(scope="module")
def biased():
    """A resnet in which no bias is zero."""
    return loaded("drawn=methods.parity.made:small?size=64")


def test_terms_of_fullgrad_and_the_heads_bias_add_up_to_the_score(biased):
    """Completeness (equation 3) of a network of ReLUs and linear layers, in float64 because the terms cancel."""
    model = exact(biased)
    pictures = inputs(model, noise(0, 64), noise(1, 64)).requires_grad_()
    outputs, biases = bias.run_with_biases(model, pictures)
    scores = outputs.values[:, 7]
    terms = bias.score_terms(scores, pictures, biases)
    total = sum(each.sum((1, 2, 3)) for each in terms) + model.module.fc.bias[7]
    assert len(biases) == sum(isinstance(module, nn.BatchNorm2d) for module in model.module.modules())
    assert gap(total.detach(), scores.detach()) <= 1e-6


def test_fullgrad_without_a_batch_norms_mean_is_incomplete(biased):
    """A planted fault: a batch normalisation adds more than its bias parameter."""
    pictures = inputs(biased, noise(0, 64)).requires_grad_()
    outputs, biases = bias.run_with_biases(biased, pictures)
    layers = [module for module in biased.module.modules() if isinstance(module, nn.BatchNorm2d)]
    terms = bias.score_terms(outputs.values[:, 7], pictures, biases)
    named = [t * (b.bias / each.value)[:, None, None] for t, each, b in zip(terms[1:], biases, layers, strict=False)]
    total = terms[0].sum() + sum(each.sum() for each in named) + biased.module.fc.bias[7]
    assert gap(total.detach(), outputs.values[0, 7].detach()) > 0.05


def test_fullgrad_map_has_the_inputs_size_and_is_never_negative(biased):
    result = finding(biased, noise(0, 64), "fullgrad")
    assert result.heatmap.shape == (64, 64)
    assert result.heatmap.dtype == np.float32
    assert result.heatmap.min() >= 0
    assert result.layer == ""
    assert result.verdict is Verdict.OK


def test_fullgrad_rows_of_a_batch_equal_rows_computed_alone(biased):
    asked = call("fullgrad")
    pictures = [noise(0, 64), noise(1, 64)]
    rows = [Row(picture, target, (asked,)) for picture in pictures for target in (ClassTarget(3), ContrastTarget(5, 6))]
    in_float64 = exact(biased)
    for row, mixed in zip(rows, run(biased, rows, kind="bias"), strict=True):
        (alone,), (truth,) = (run(model, [row], kind="bias") for model in (biased, in_float64))
        assert error_ratio(mixed.maps[0][0], alone.maps[0][0], truth.maps[0][0]) <= 1
        assert mixed.target == alone.target


def counted(model, size=16):
    """Return the output shape at each bias that is recorded."""
    pictures = inputs(model, noise(0, size)).requires_grad_()
    return [tuple(each.output.shape[1:]) for each in bias.run_with_biases(model, pictures)[1]]


class Adds(nn.Module):
    """Network that adds biases in every way with a grid, and in some without."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.group = nn.GroupNorm(2, 4)
        self.layer = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5)

    def forward(self, image):
        seen = functional.relu_(self.conv(image))  # changed in place
        seen = functional.relu_(functional.conv2d(seen, torch.ones(4, 4, 1, 1), torch.ones(4)))  # no module
        seen = self.group(seen) + functional.conv2d(seen, torch.ones(4, 4, 1, 1))  # without a bias
        seen = self.linear(self.layer(seen.permute(0, 2, 3, 1)))
        return self.head(seen.mean((1, 2)))


def test_fullgrad_records_every_kind_of_bias_with_a_grid(plant):
    assert counted(plant(Adds)) == [(4, 16, 16)] * 3 + [(16, 16, 4)] * 2


def test_bias_that_is_added_twice_counts_twice(plant):
    model = plant(lambda: Toy(lambda net, seen: net.conv(seen[:, :3])))
    assert counted(model) == [(4, 16, 16)] * 2


def test_tokens_of_a_transformer_have_a_grid():
    model = loaded("timm:test_vit?weights=none&size=64")
    shapes = counted(model, 64)
    assert shapes.count((17, 64)) == 1 + 6 * 4  # the last norm; of each block two norms, the projection, the MLP's last
    assert finding(model, noise(0, 64), "fullgrad").verdict is Verdict.OK


def test_fullgrad_refuses_a_model_without_biases(plant):
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 5, 3, bias=False)

        def forward(self, image):
            return self.conv(image).square().mean((2, 3))

    with pytest.raises(FailedPrecondition, match="no bias whose sum has a grid"):
        finding(plant(Bare), noise(0, 16), "fullgrad")


def test_score_without_a_gradient_gives_a_zero_map(plant):
    model = plant(Toy)
    model.module.middle = lambda net, seen: net.layer(seen).detach()
    result = finding(model, noise(0, 16), "fullgrad")
    assert result.verdict is Verdict.ZERO_GRADIENT
    assert not result.heatmap.any()
