"""The scales of detectors are found by running the model, and their maps are added as densities."""

import sys
from collections import defaultdict
from functools import partial
from types import ModuleType

import numpy as np
import pytest
import torch
import transformers
from benchmarks.pyramid import measure, toy
from torch import nn
from torch.nn import functional
from torchvision.models import detection
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

from camserve_server import models
from camserve_server.engine.values import Row
from camserve_server.jobs import Job, LayerMaps, RawMap
from camserve_server.jobs.fuse import JOINT, fuse_layers, pyramid
from camserve_server.methods import METHODS
from camserve_server.models.values import PYRAMID
from camserve_server.targets.values import RankTarget
from coloured import Colours, Finder
from methods.tools import FACTOR, FLOOR, call, error_ratio, exact, explain, gap, inputs, noise, run
from models.lazy_folders import marked_except
from support import loaded

CAMS = ("gradcam", "hirescam", "layercam", "gradcam_plus_plus")


@pytest.fixture(scope="module")
def ssdlite():
    return loaded("torchvision:ssdlite320_mobilenet_v3_large?weights=none&size=128")


@pytest.fixture(scope="module", params=marked_except(pytest.mark.slow, ["mixed"], ["fpn", "pan", "mixed"]))
def detector(request):
    """The toy detector with random weights and each neck."""
    torch.manual_seed(0)
    network = toy.Detector(request.param)
    network.score_thresh = -1.0
    planted = ModuleType("planted")
    planted.make = lambda: network
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "planted", planted)
        return models.load(models.ModelSpec("planted", "planted", "make", size=toy.SIDE))


def scales_of(model):
    return {name: model.info.layers[name].shape[2:] for name in model.info.pyramid}


# ------------------------------------------------------------------------------------------------------ finding scales


def retinanet():
    """torchvision's detectors as it builds them, with the smallest backbone."""
    more = LastLevelP6P7(256, 256)
    backbone = resnet_fpn_backbone(backbone_name="resnet18", weights=None, returned_layers=[2, 3, 4], extra_blocks=more)
    return detection.RetinaNet(backbone, 91, score_thresh=0)


def fcos():
    more = LastLevelP6P7(256, 256)
    backbone = resnet_fpn_backbone(backbone_name="resnet18", weights=None, returned_layers=[2, 3, 4], extra_blocks=more)
    return detection.FCOS(backbone, 91, score_thresh=0)


def faster_rcnn():
    backbone = resnet_fpn_backbone(backbone_name="resnet18", weights=None)
    return detection.FasterRCNN(backbone, 91, box_score_thresh=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "size", "keys"),
    [
        (retinanet, 128, ["0", "1", "2", "p6"]),  # "p7" has one cell, which is no grid
        (fcos, 64, ["0", "1", "2"]),
        (faster_rcnn, 64, ["0", "1", "2", "3"]),  # "pool" is for the proposals, not for the scores
    ],
)
def test_scales_of_a_detector_are_the_maps_that_its_heads_read(make, size, keys):
    model = models.load(models.parse(f"models.test_pyramid:{make.__name__}?weights=none&size={size}"))
    outputs, hooks = {}, []
    for layer in model.info.pyramid:
        keep = partial(lambda _module, _args, output, layer: outputs.update({layer: output}), layer=layer)
        hooks.append(model.module.get_submodule(layer).register_forward_hook(keep))
    maps = model.module.backbone(inputs(model, noise(0, size)))
    for hook in hooks:
        hook.remove()
    assert all(torch.equal(outputs[layer], maps[key]) for layer, key in zip(model.info.pyramid, keys, strict=True))


def test_scales_without_an_object_in_the_trial_are_found_too(ssdlite):
    scales = {"backbone.features.0": (8, 8), "backbone.features.1": (4, 4), "backbone.extra.0": (2, 2)}
    assert scales_of(ssdlite) == scales  # the other maps of the backbone have one cell


def test_scales_of_every_neck_are_found(detector):
    assert scales_of(detector) == {
        "backbone.scales.0": (24, 24),
        "backbone.scales.1": (12, 12),
        "backbone.scales.2": (6, 6),
    }


class OwnHeads(nn.Module):
    """A detector with heads of their own for each scale, as in YOLO, or one for the joint tokens of all scales."""

    num_classes = 2

    def __init__(self, *, joint=False):
        super().__init__()
        torch.manual_seed(0)
        self.joint = joint
        self.stages = nn.ModuleList([nn.Conv2d(3, 4, 2, 2), nn.Conv2d(4, 4, 2, 2)])
        self.project = nn.ModuleList([nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)])
        self.classes, self.sides = (
            nn.ModuleList([nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, out, 1)) for _ in "12"])
            for out in (1, 4)
        )
        self.attention, self.scores, self.boxes = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 4)

    def forward(self, images):
        grid, maps = torch.stack(list(images)), []
        for stage, project in zip(self.stages, self.project, strict=True):
            grid = torch.tanh(stage(grid))
            maps.append(project(grid))
        if self.joint:
            tokens = self.attention(torch.cat([each.flatten(2).mT for each in maps], 1))
            scores, boxes = self.scores(tokens).sigmoid(), self.boxes(tokens)
        else:
            scores = torch.cat([head(each).flatten(2).mT for head, each in zip(self.classes, maps, strict=True)], 1)
            boxes = torch.cat([head(each).flatten(2).mT for head, each in zip(self.sides, maps, strict=True)], 1)
        return [
            {"boxes": box, "labels": torch.ones(len(box), dtype=torch.int64), "scores": score[:, 0].sigmoid()}
            for score, box in zip(scores, boxes, strict=True)
        ]


@pytest.mark.parametrize("joint", [False, True], ids=["heads of each scale", "tokens of all scales"])
def test_scales_are_found_without_a_backbone(plant, joint):
    model = plant(lambda: OwnHeads(joint=joint), size=16)
    assert scales_of(model) == {"project.0": (8, 8), "project.1": (4, 4)}


SIZES = {"d_model": 32, "num_queries": 6, "num_labels": 3, "decoder_layers": 2, "decoder_ffn_dim": 16}
HEADS = {"encoder_ffn_dim": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2}


class Queries(nn.Module):
    """A detector of transformers with random weights, whose objects are its queries."""

    num_classes = 3

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.model = getattr(self, f"_{kind}")(kind).eval()

    def _stages(self, config, *names):
        sizes = {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "layer_type": "basic"}
        return config(**sizes, out_features=list(names))

    def _rt_detr(self, _kind):
        stages = self._stages(transformers.RTDetrResNetConfig, "stage2", "stage3", "stage4")
        sizes = {"encoder_hidden_dim": 32, "encoder_in_channels": [8, 16, 16], "decoder_in_channels": [32] * 3}
        config = transformers.RTDetrConfig(backbone_config=stages, **sizes, **SIZES, **HEADS, num_denoising=0)
        return transformers.RTDetrForObjectDetection(config)

    def _detr(self, kind):
        names = ["stage4"] if kind == "detr" else ["stage3", "stage4"]
        stages = self._stages(transformers.ResNetConfig, *names)
        options = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
        name = "Detr" if kind == "detr" else "DeformableDetr"
        levels = {} if kind == "detr" else {"num_feature_levels": 2}
        sizes = {**SIZES, **HEADS, **levels, "encoder_layers": 1}
        config = getattr(transformers, f"{name}Config")(backbone_config=stages, **options, **sizes)
        return getattr(transformers, f"{name}ForObjectDetection")(config)

    _deformable = _detr

    def forward(self, images):
        output = self.model(pixel_values=images)
        scores, labels = output.logits.sigmoid().max(2)
        objects = zip(output.pred_boxes, labels, scores, strict=True)
        return [dict(zip(("boxes", "labels", "scores"), each, strict=True)) for each in objects]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        pytest.param(
            "rt_detr",
            {f"model.model.decoder_input_proj.{index}": (8 >> index,) * 2 for index in range(3)},
            marks=pytest.mark.slow,
        ),
        ("deformable", {f"model.model.input_proj.{index}": (4 >> index,) * 2 for index in range(2)}),
        ("detr", {}),
    ],
)
def test_scales_are_those_before_a_transformer(plant, kind, expected):
    assert scales_of(plant(lambda: Queries(kind), size=64)) == expected


@pytest.mark.parametrize("factory", [Finder, Colours])
def test_model_with_one_scale_has_no_pyramid(plant, factory):
    assert plant(factory, size=64).info.pyramid == ()


def test_classifier_has_no_pyramid(resnet):
    assert resnet.info.pyramid == ()


# ------------------------------------------------------------------------------------------------------- adding scales


def leaves(model, image):
    """Return a detector's output for an image, and the outputs of its scales on the graph: the oracle's own hooks."""
    kept, hooks = {}, []

    def keep(name, output):
        kept[name] = output if output.requires_grad else output.detach().requires_grad_()
        return kept[name].clone()

    for name in model.info.pyramid:
        module = model.module.get_submodule(name)
        hooks.append(module.register_forward_hook(lambda _module, _args, output, name=name: keep(name, output)))
    with torch.enable_grad():
        (output,) = model.module(inputs(model, image))
    for hook in hooks:
        hook.remove()
    return output, [kept[name] for name in model.info.pyramid]


def by_hand(method, model, image, box):
    """Return the sum of the densities of the scales' maps, for the object at a box."""
    objects, scales = leaves(model, image)
    nearest = int((objects["boxes"].detach() - torch.tensor(box)).abs().sum(1).argmin())
    score = objects["scores"][nearest]
    gradients = torch.autograd.grad(score, scales, materialize_grads=True, allow_unused=True)
    total = 0
    for scale, gradient in zip(scales, gradients, strict=True):
        activation, maps = scale.detach(), FORMULAS[method]
        density = maps(activation, gradient)[None] / (scales[0][0, 0].numel() / scale[0, 0].numel())
        total = total + functional.interpolate(density, scales[0].shape[2:], mode="bilinear", align_corners=False)[0, 0]
    return total.numpy()


FORMULAS = {
    "gradcam": lambda a, g: (g.mean((2, 3), keepdim=True) * a).sum(1),
    "hirescam": lambda a, g: (g * a).sum(1),
    "layercam": lambda a, g: (g.clamp(min=0) * a).sum(1),
}


def asked(model, method, fusion="sum"):
    return Job(model.info, (call(method),), model.info.pyramid, (RankTarget(0),), fusion, pyramid=True)


def check_sum(model, method, image):
    (found,) = explain(model, image, asked(model, method)).explanations
    box = [found.target.box.left, found.target.box.top, found.target.box.right, found.target.box.bottom]
    plain, truth = (by_hand(method, each, image, box) for each in (model, exact(model)))
    assert error_ratio(found.heatmap, plain, truth) <= 1
    assert (found.layer, found.fusion) == (PYRAMID, "sum")


@pytest.mark.parametrize(
    "method", ["gradcam", *(pytest.param(name, marks=pytest.mark.slow) for name in ("hirescam", "layercam"))]
)
def test_map_of_a_pyramid_equals_autograds_sum_of_densities(ssdlite, method):
    check_sum(ssdlite, method, noise(2, 128))


@pytest.mark.parametrize("method", FORMULAS)
def test_map_of_a_toys_pyramid_equals_autograds_sum(detector, method):
    check_sum(detector, method, toy.scenes(1, 3)[0].photo)


def test_sum_keeps_the_total_of_every_scale():
    generator = np.random.default_rng(0)
    maps = [generator.normal(size=(side, side)).astype(np.float32) for side in (16, 8, 4)]
    fused = fuse_layers([LayerMaps(str(index), [RawMap(each)]) for index, each in enumerate(maps)], "sum").maps[0]
    assert fused.heatmap.shape == (16, 16)
    assert fused.heatmap.dtype == np.float32
    # Bilinear interpolation by a whole factor keeps the mean, so that each scale adds its own total.
    assert float(fused.heatmap.sum(dtype=np.float64)) == pytest.approx(
        float(sum(each.sum() for each in maps)), abs=1e-3
    )


def test_map_of_the_finest_scale_alone_is_left_as_it_is():
    fine = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    nothing = RawMap(np.zeros((4, 3), np.float32), zero_gradient=True)
    fused = fuse_layers([LayerMaps("a", [RawMap(fine)]), LayerMaps("b", [nothing])], "sum")
    np.testing.assert_array_equal(fused.maps[0].heatmap, fine)
    assert not fused.maps[0].zero_gradient
    assert fuse_layers([LayerMaps("a", [nothing]), LayerMaps("b", [nothing])], "sum").maps[0].zero_gradient


def test_batch_neighbours_do_not_change_the_map_of_a_pyramid(detector):
    """The error of plain float32 is the largest one of the images alone: that of one image may be small by luck."""
    images = [scene.photo for scene in toy.scenes(4, 11)]
    calls, layers = tuple(call(name) for name in CAMS), detector.info.pyramid
    together = run(detector, [Row(image, RankTarget(0), calls) for image in images], layers)
    errors, plain_errors = defaultdict(list), defaultdict(list)
    for image, row in zip(images, together, strict=True):
        (alone,), (truth,) = (
            run(each, [Row(image, RankTarget(0), calls)], layers) for each in (detector, exact(detector))
        )
        assert row.target.index == alone.target.index
        for found, plain, right in zip(row.maps, alone.maps, truth.maps, strict=True):
            for position, name in enumerate(CAMS):
                if right[position].any():
                    errors[name].append(gap(found[position], right[position]))
                    plain_errors[name].append(gap(plain[position], right[position]))
                else:
                    assert not found[position].any()
    for name in CAMS:
        assert max(errors[name]) <= FACTOR * max(plain_errors[name]) + FLOOR


def test_fusion_of_a_request_replaces_the_sum(ssdlite):
    (found,) = explain(ssdlite, noise(2, 128), asked(ssdlite, "layercam", "max")).explanations
    assert (found.layer, found.fusion) == (PYRAMID, "max")
    assert found.heatmap.max() == 1


def test_refinecam_multiplies_the_layers_before_the_default_layer(ssdlite):
    """The product of scales would be zero wherever the score depends on one of them alone."""
    (found,) = explain(ssdlite, noise(2, 128), asked(ssdlite, "refinecam")).explanations
    assert found.layer == JOINT.join(pyramid(ssdlite.info, ssdlite.info.default_layer))
    assert found.fusion == "product"


@pytest.mark.parametrize("detector", ["mixed"], indirect=True)
def test_methods_of_one_pass_and_composed_ones_explain_a_pyramid(detector):
    names = [name for name in METHODS if METHODS[name].answered_by == "cam"] + ["guided_gradcam", "refinecam"]
    photo, calls = toy.scenes(1, 3)[0].photo, tuple(map(call, names))
    layers = detector.info.pyramid[1:]  # kpcacam takes no finer grid
    request = Job(detector.info, calls, layers, (RankTarget(0),), "sum", pyramid=True)
    found = explain(detector, photo, request).explanations
    assert [each.call.name for each in found] == names
    assert {each.layer for each in found if each.call.name != "refinecam"} == {PYRAMID}
    assert all(np.isfinite(each.heatmap).all() for each in found)


@pytest.mark.slow
def test_pyramid_finds_small_objects_that_one_layer_does_not():
    """The detector is trained for a tenth of the steps of `python -m benchmarks.pyramid`; the bars are far below."""
    numbers = {}
    measure.collect(numbers, toy.trained("mixed", 0, count=120, epochs=6), toy.scenes(4, 77))
    for method in ("hirescam", "layercam"):
        (energy, hits), (energy_of_one, hits_of_one) = (
            measure.means_of(numbers[method, way, True]) for way in ("sum", "one layer")
        )
        assert energy >= 3 * energy_of_one
        assert hits >= 0.5 > hits_of_one
        # Normalising every scale shows scales that hardly matter.
        assert energy >= measure.means_of(numbers[method, "mean", True])[0] - 0.02
