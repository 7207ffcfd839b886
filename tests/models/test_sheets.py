"""Networks that take several pictures: their maps on a sheet of the pictures equal those of the network itself."""

import copy

import numpy as np
import pytest
import torch
from captum.attr import LayerGradCam
from torch import nn

from camserve_server.core.errors import ConfigError
from camserve_server.models import Preprocess, Source, load, spec_of_network, tiled
from camserve_server.models.hooks import hook_count
from camserve_server.models.sheets import cut, join
from camserve_server.targets.values import ClassTarget
from methods.tools import error_ratio, explain, job

SIDE = 16
METHODS = ("gradcam", "hirescam", "layercam")


class Video(nn.Module):
    """Network for videos; its last layer halves the number of frames, rounded up."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv3d(3, 4, 3, (1, 2, 2), 1)
        self.last = nn.Conv3d(4, 6, 3, (2, 1, 1), 1)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, clip):
        last = self.last(self.first(clip).relu()).tanh() ** 2
        return self.head(self.norm(last.movedim(1, 4)).tanh().mean((1, 2, 3)))


class Pair(nn.Module):
    """Network with one backbone for two pictures, which it calls in one of several ways."""

    def __init__(self, form="calls"):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 6, 3, 1, 1))
        self.other = nn.Sequential(nn.Conv2d(3, 5, 3, 2, 1), nn.Tanh())
        self.head = nn.Linear(11 if form == "streams" else 12, 3)
        self.form = form

    def forward(self, *pictures):
        if self.form == "views":
            features = self.backbone(pictures[0].flatten(0, 1)).unflatten(0, (-1, 2)).unbind(1)
        elif self.form == "joined":
            features = self.backbone(torch.cat(pictures)).chunk(2)
        elif self.form == "streams":
            second = self.other(pictures[1])  # the first picture need not come first
            features = self.backbone(pictures[0]), second
        else:
            features = [self.backbone(picture) for picture in pictures]
        return self.head(torch.cat([(each.tanh() ** 2).mean((2, 3)) for each in features], 1))


def seeded(make, *args):
    torch.manual_seed(0)
    return make(*args).eval()


def loaded(network, grid, layers, inputs):
    size = (grid[0] * SIDE, grid[1] * SIDE)
    preprocess = Preprocess(size, size, "bilinear", (0.5, 0.4, 0.3), (0.2, 0.2, 0.2))
    return load(spec_of_network("net", Source(tiled(network, grid, layers, inputs), preprocess)))


def noise(grid):
    return np.random.default_rng(0).integers(0, 256, (grid[0] * SIDE, grid[1] * SIDE, 3), np.uint8)


def pictures_of(sheet, grid, dtype):
    """Return the normalised pictures [1,T,3,H,W] of a sheet."""
    pixels = torch.from_numpy(sheet).permute(2, 0, 1)[None].to(dtype) / 255
    mean = torch.tensor((0.5, 0.4, 0.3), dtype=dtype)[:, None, None]
    return cut((pixels - mean) / 0.2, grid)


def formulas(activations, gradients):
    """Return the maps of `METHODS` from activations and gradients [T,C,h,w] of all pictures."""
    return {
        "gradcam": (gradients.mean((0, 2, 3), keepdim=True) * activations).sum(1),
        "hirescam": (gradients * activations).sum(1),
        "layercam": (gradients.clamp(min=0) * activations).sum(1),
    }


def differentiated(network, arguments, layers, arrange):
    """Return a network's logits, and the maps from what autograd says of layers' outputs.

    `arrange` turns the tensors of all calls of the layers into one tensor [T,C,h,w].
    """
    network, outputs = copy.deepcopy(network).to(arguments[0].dtype), []
    for name in layers:
        network.get_submodule(name).register_forward_hook(
            lambda _layer, _args, output: outputs.append(output) or output.retain_grad()
        )
    logits = network(*(argument.requires_grad_() for argument in arguments))
    logits[0, 1].backward()
    maps = formulas(arrange([each.detach() for each in outputs]), arrange([each.grad for each in outputs]))
    return logits[0].detach().numpy(), {name: each.numpy() for name, each in maps.items()}


def check(model, sheet, grid, expected):
    """Check a model's logits and maps with those that `expected` returns in a type of numbers."""
    result = explain(model, sheet, job(model, METHODS, [ClassTarget(1)]))
    (plain_logits, plain), (true_logits, truth) = expected(torch.float32), expected(torch.float64)
    assert model.info.default_layer == "sheet"
    assert error_ratio(result.logits, plain_logits, true_logits) <= 1
    for name, explanation in zip(METHODS, result.explanations, strict=True):
        tiles = cut(torch.from_numpy(explanation.heatmap.copy())[None, None], grid)[0, :, 0].numpy()
        assert error_ratio(tiles, plain[name], truth[name]) <= 1


def video_maps(network, layer, sheet, dtype):
    """Return the logits, and the maps of a layer with one slice for two frames, whose gradient these two share."""
    clip = pictures_of(sheet, (2, 3), dtype).transpose(1, 2).contiguous()

    def arrange(outputs):
        slices = outputs[0][0].movedim(3, 1) if layer == "norm" else outputs[0][0].transpose(0, 1)
        return slices.repeat_interleave(2, 0)

    logits, maps = differentiated(network, [clip], [layer], arrange)
    return logits, {name: each / 2 for name, each in maps.items()}


@pytest.mark.parametrize("layer", ["last", "norm"])
def test_maps_of_a_video_equal_autograds_in_three_dimensions(layer):
    network, sheet = seeded(Video), noise((2, 3))
    model = loaded(network, (2, 3), layer, "video")

    check(model, sheet, (2, 3), lambda dtype: video_maps(network, layer, sheet, dtype))


def test_grad_cam_of_a_video_equals_captums_but_for_the_share_of_each_frame():
    network, grid = seeded(Video), (2, 2)
    model, sheet = loaded(network, grid, "last", "video"), noise(grid)
    (explanation,) = explain(model, sheet, job(model, ["gradcam"], [ClassTarget(1)])).explanations

    def captum(dtype):
        clip = pictures_of(sheet, grid, dtype).transpose(1, 2)
        net = copy.deepcopy(network).to(dtype)
        return LayerGradCam(net, net.last).attribute(clip, 1)[0, 0].detach().numpy()

    frames = cut(torch.from_numpy(explanation.heatmap.copy())[None, None], grid)[0, :, 0].numpy()
    assert np.array_equal(frames[::2], frames[1::2])  # the layer has one slice for two frames
    assert error_ratio(frames[::2], captum(torch.float32) / 2, captum(torch.float64) / 2) <= 1


def test_frames_without_an_equal_share_of_slices_leave_the_logits_unchanged():
    network, grid = seeded(Video), (1, 5)  # five frames, three slices
    sheet = pictures_of(noise(grid), grid, torch.float64)

    found = tiled(network.double(), grid, "last")(join(sheet, grid))
    assert torch.allclose(found, network(sheet.transpose(1, 2)), rtol=1e-12, atol=0)


PAIRS = {
    "calls": ("separate", "backbone", torch.cat),
    "joined": ("separate", "backbone", lambda outputs: outputs[0]),
    "views": ("views", "backbone", lambda outputs: outputs[0]),
}


@pytest.mark.parametrize("form", PAIRS)
def test_maps_of_two_pictures_through_one_backbone_equal_autograds(form):
    network, grid, (inputs, layer, arrange) = seeded(Pair, form), (1, 2), PAIRS[form]
    model, sheet = loaded(network, grid, layer, inputs), noise(grid)

    def expected(dtype):
        pictures = pictures_of(sheet, grid, dtype)
        arguments = [pictures] if inputs == "views" else [each.contiguous() for each in pictures.unbind(1)]
        return differentiated(network, arguments, [layer], arrange)

    check(model, sheet, grid, expected)


def test_maps_of_two_pictures_with_a_backbone_each_equal_autograds():
    network, grid = seeded(Pair, "streams"), (1, 2)
    model, sheet = loaded(network, grid, ("backbone", "other"), "separate"), noise(grid)

    def arrange(outputs):
        second, first = outputs
        zeros = torch.zeros_like
        return torch.cat([torch.cat([first, zeros(second)], 1), torch.cat([zeros(first), second], 1)])

    def expected(dtype):
        pictures = [each.contiguous() for each in pictures_of(sheet, grid, dtype).unbind(1)]
        return differentiated(network, pictures, ["backbone", "other"], arrange)

    check(model, sheet, grid, expected)


@pytest.mark.parametrize("form", [*PAIRS, "video"])
def test_neighbours_in_a_batch_do_not_mix_and_no_hook_is_left(form):
    network = seeded(Video) if form == "video" else seeded(Pair, form)
    inputs, layer, _ = ("video", "last", None) if form == "video" else PAIRS[form]
    sheets = torch.randn(3, 3, SIDE, 2 * SIDE, dtype=torch.float64)
    whole = tiled(network.double(), (1, 2), layer, inputs)
    together, alone = whole(sheets), torch.cat([whole(each[None]) for each in sheets])

    assert torch.allclose(together, alone, rtol=1e-12, atol=0)
    assert hook_count(whole) == 0


def test_methods_of_the_input_and_of_edits_work_on_a_sheet():
    model, sheet = loaded(seeded(Pair), (1, 2), "backbone", "separate"), noise((1, 2))
    result = explain(model, sheet, job(model, ["saliency", "occlusion", "ablationcam"], [ClassTarget(1)]))
    shapes = [each.heatmap.shape for each in result.explanations]

    assert shapes == [(SIDE, 2 * SIDE), (SIDE, 2 * SIDE), (SIDE // 2, SIDE)]
    assert all(each.heatmap.any() for each in result.explanations)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: tiled(Video(), (1, 1), "last"), "at least two tiles"),
        (lambda: tiled(Video(), (1, 2), "lasst"), 'no layer "lasst" .did you mean "last"'),
        (lambda: tiled(Pair(), (1, 2), ["backbone"] * 3), "3 layers for 2 pictures"),
        (lambda: tiled(Video(), (1, 2), "last", "vidio"), 'inputs="vidio" must be one of video, views, separate'),
        (lambda: loaded(Video(), (1, 2), "head", "video"), r"returns \[1, 3\] for 1 images; with 1x2 pictures"),
        (lambda: loaded(Pair("streams"), (1, 2), "other", "separate"), '"other" was called for 1 of them; with 1x2'),
        (lambda: loaded(Pair(), (1, 2), ["backbone", "other"], "separate"), "was called again for picture 0"),
    ],
)
def test_wrong_description_of_pictures_is_refused_with_the_reason(make, words):
    with pytest.raises(ConfigError, match=words):
        make()
