"""The grid of a layer is found by running the model, for every layout that architectures use."""

import importlib.util
import math
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from torch import nn

from camserve_server import models
from camserve_server.engine.values import Row
from camserve_server.models import grids, layout_probe, parse, probe
from camserve_server.models.grids import NO_BATCH_AXIS, NO_GRID, NO_TENSOR, OTHER_ORDER, UNKNOWN_GRID, LayerObservation
from camserve_server.models.probe import ZERO_GRADIENT
from camserve_server.models.values import Layout
from camserve_server.models.weights import randomise_zeros
from camserve_server.targets.values import ClassTarget
from methods.tools import call, error_ratio, exact, inputs, noise, run
from models.lazy_folders import marked_except

PATCH = 4


class Passes(nn.Module):
    """A layer that rearranges its input with a function."""

    def __init__(self, lay_out):
        super().__init__()
        self.lay_out = lay_out

    def forward(self, features):
        return self.lay_out(features)


class Net(nn.Module):
    """A patch embedding, a layer, and scores that depend on every value of the layer's output."""

    def __init__(self, lay_out, channels=8):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, channels, PATCH, stride=PATCH)
        self.layer = Passes(lay_out)
        self.head = nn.LazyLinear(5)

    def forward(self, image):
        features = self.layer(self.stem(image))
        whole = features.expand(len(image), *features.shape[1:]) if len(features) == 1 else features
        return self.head(whole.reshape(len(image), -1).square())


def place(lay_out, size=(32, 32), channels=8):
    """Return the layout that the probe finds for the layer, or the reason why it has no grid."""
    net = Net(lay_out, channels).eval()
    with torch.no_grad():
        net(torch.zeros(1, 3, *size))
    layers, _classes = probe.probe(net.requires_grad_(requires_grad=False), size, "cpu")
    return layers["layer"].layout or layers["layer"].reason


def tokens(prefix=0, order=None):
    """Return a function that converts to tokens, after prefix tokens that are the same for every place."""

    def lay_out(features):
        rows = features.flatten(2).transpose(1, 2)
        rows = rows if order is None else rows[:, order(*features.shape[2:])]
        return torch.cat([rows.mean(1, keepdim=True) * torch.arange(1, prefix + 1).view(1, -1, 1), rows], 1)

    return lay_out


def z_order(height, width):
    """Order by quarters, and by quarters in each of them, as after pooling windows of tokens."""
    places = [
        (sum(((y >> b & 1) * 2 + (x >> b & 1)) << 2 * b for b in range(8)), y * width + x)
        for y in range(height)
        for x in range(width)
    ]
    return [place for _, place in sorted(places)]


def columns_first(height, width):
    return [y * width + x for x in range(width) for y in range(height)]


def shuffled(height, width):
    return torch.randperm(height * width, generator=torch.Generator().manual_seed(0)).tolist()


SIZES = [(32, 32), (32, 48), (56, 40), (64, 64)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("prefix", [0, 1, 2, 3, 5, 9, 16])
def test_prefix_tokens_and_the_grid_after_them_are_found(prefix, size):
    assert place(tokens(prefix), size) == Layout("tokens", size[0] // PATCH, size[1] // PATCH, prefix)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("channels", [1, 8, 16])
def test_axes_of_rows_and_columns_are_found(size, channels):
    """With 8 or 16 channels on a grid of 8 or 16 rows and columns, the shape is ambiguous."""
    grid = size[0] // PATCH, size[1] // PATCH
    assert place(lambda seen: seen, size, channels) == Layout("nchw", *grid)
    assert place(lambda seen: seen.permute(0, 2, 3, 1), size, channels) == Layout("nhwc", *grid)


@pytest.mark.parametrize("order", [z_order, columns_first, shuffled])
def test_tokens_in_another_order_are_refused(order):
    """Their number is a square: the shape alone would give wrong maps."""
    assert place(tokens(1, order)) == OTHER_ORDER
    assert place(tokens(1)) == Layout("tokens", 8, 8, 1)


REFUSED = {
    "windows": (
        lambda x: x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 4, 5, 1).reshape(-1, 16, 8),
        NO_BATCH_AXIS,
    ),
    "windows of maps": (
        lambda x: x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(-1, 8, 4, 4),
        NO_BATCH_AXIS,
    ),
    "heads before images": (lambda x: x.flatten(2).repeat(2, 1, 1), NO_BATCH_AXIS),
    "a table": (lambda x: x[:1].flatten(2).transpose(1, 2), NO_BATCH_AXIS),
    "heads": (lambda x: x.reshape(len(x), 2, 4, 64).transpose(2, 3), NO_GRID),
    "square heads": (lambda x: torch.cat([x] * 8, 1).flatten(2).transpose(1, 2)[:, None], OTHER_ORDER),
    "attention": (lambda x: (x.flatten(2).transpose(1, 2) @ x.flatten(2)).softmax(2)[:, None], OTHER_ORDER),
    "transposed tokens": (lambda x: x.flatten(2), UNKNOWN_GRID),
    "one value a channel": (lambda x: x.mean((2, 3)), NO_GRID),
    "one token": (lambda x: x.mean((2, 3))[:, None], NO_GRID),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_output_without_a_grid_is_refused_with_a_reason(kind):
    lay_out, reason = REFUSED[kind]
    assert place(lay_out) == reason
    assert reason.startswith(NO_GRID)


def test_pooled_layer_after_the_last_grid_has_one_cell():
    assert place(lambda x: x.mean((2, 3), keepdim=True)) == Layout("nchw", 1, 1)


def test_layer_without_visible_places_has_the_only_grid_of_its_shape():
    """Each place is the mean of all, so their order is not visible, and tokens may have any order."""
    assert place(lambda x: x.mean((2, 3), keepdim=True).expand_as(x)) == Layout("nchw", 8, 8)
    assert place(lambda x: tokens()(x.mean((2, 3), keepdim=True).expand_as(x))) == UNKNOWN_GRID


def test_layer_without_visible_places_has_the_grid_of_similar_layers():
    sure = layout_probe.Reading(Layout("tokens", 8, 8, 1), 1.0, 0.5, 1.0)
    blind = layout_probe.Reading(Layout("tokens", 8, 8, 1), 0.0, 0.0, 0.0)
    uncertain = layout_probe.Reading(Layout("tokens", 4, 4, 1), 0.5, 0.5, 0.5)
    observations = {
        "shows": LayerObservation((4, 65, 8), (sure,)),
        "hides": LayerObservation((4, 65, 8), (blind,)),
        "smaller": LayerObservation((4, 17, 8), (blind,)),
        "not alike": LayerObservation((4, 17, 8), (uncertain,)),
        "other prefix": LayerObservation((4, 18, 8), (blind,)),
    }
    assert grids.find_grids(observations, (32, 32)) == {
        "shows": sure.layout,
        "hides": sure.layout,
        "smaller": Layout("tokens", 4, 4, 1),
        "not alike": UNKNOWN_GRID,
        "other prefix": UNKNOWN_GRID,
    }


def test_attention_matrix_without_visible_places_is_refused():
    """Its numbers of rows and columns are the number of tokens."""
    sure = layout_probe.Reading(Layout("tokens", 7, 7), 1.0, 0.5, 1.0)
    observations = {"block": LayerObservation((1, 49, 8), (sure,)), "attention": LayerObservation((1, 3, 49, 49), ())}
    assert grids.find_grids(observations, (224, 224))["attention"] == OTHER_ORDER
    lone = {"map": LayerObservation((1, 3, 49, 49), ())}
    assert grids.find_grids(lone, (224, 224)) == {"map": Layout("nchw", 49, 49)}


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((1, 512, 7, 7), Layout("nchw", 7, 7)),
        ((1, 7, 7, 512), Layout("nhwc", 7, 7)),
        ((1, 64, 7, 9), NO_GRID),  # not square, as the image is
        ((1, 7, 7, 7), UNKNOWN_GRID),
        ((1, 512, 1, 1), NO_GRID),
        ((1, 197, 64), UNKNOWN_GRID),
        ((1, 100), NO_GRID),
        (None, NO_TENSOR),
    ],
)
def test_without_a_trial_run_only_an_unambiguous_shape_is_a_grid(shape, expected):
    assert grids.find_grids({"layer": LayerObservation(shape)}, (224, 224)) == {"layer": expected}


def test_model_that_takes_one_image_at_a_time_is_read_by_its_shapes():
    def one_only(features):
        return features.reshape(1, 8, 8, 8) if len(features) == 1 else features.reshape(1, 8, 8, 8, 8)

    assert place(one_only) == UNKNOWN_GRID
    assert place(lambda x: x.reshape(1, 4, 8, 8), channels=4) == Layout("nchw", 8, 8)


def test_layer_that_returns_its_input_does_not_share_its_gradient():
    """The gradient at the tensor is not zero, but at the layer it is: a capture there has no gradient."""
    net = Net(lambda seen: (net.shortcut(seen), seen * 1)[1]).eval()
    net.shortcut = nn.Identity()
    net.after = nn.Identity()
    net(torch.zeros(1, 3, 32, 32))
    layers, _classes = probe.probe(net.requires_grad_(requires_grad=False), (32, 32), "cpu")
    assert layers["shortcut"].reason == ZERO_GRADIENT
    assert layers["stem"].layout == layers["layer"].layout == Layout("nchw", 8, 8)


def test_probe_images_are_reproducible_and_keep_the_random_state():
    before = torch.get_rng_state()
    assert torch.equal(layout_probe.images((8, 12)), layout_probe.images((8, 12)))
    assert torch.equal(torch.get_rng_state(), before)


def test_fading_noise_on_the_image_itself_fits_exactly():
    """On the image itself, where no layer mixes places, the fit is 1 and the spread is that of a line."""
    (reading,) = layout_probe.read(layout_probe.images((32, 32)), [Layout("nchw", 32, 32)])
    assert reading.fit == pytest.approx(1, abs=1e-5)
    assert reading.agreement == pytest.approx(1, abs=1e-4)
    assert reading.spread == pytest.approx(1 / math.sqrt(3), rel=0.05)


def test_trial_run_finds_axes_of_equal_length():
    torch.manual_seed(0)
    swin = torchvision.models.SwinTransformer([4, 4], 24, [1, 1], [2, 2], [7, 7], num_classes=5)
    layers, _classes = probe.probe(swin.eval().requires_grad_(requires_grad=False), (96, 96), "cpu")
    alike = {name: layer_info.layout for name, layer_info in layers.items() if layer_info.shape == (1, 24, 24, 24)}
    assert alike["features.0.0"] == Layout("nchw", 24, 24)
    assert alike["features.0.1"] == alike["features.1.0.norm1"] == Layout("nhwc", 24, 24)
    assert layers["features.3"].layout == Layout("nhwc", 12, 12)


# --- architectures ---

NOT_SQUARE = {
    "test_vit": ("tokens", (6, 4), 1),
    "test_vit4": ("tokens", (6, 4), None),
    "test_resnet": ("nchw", (3, 2), 0),
    "vit_tiny_patch16_dinov3_qkvb": ("tokens", (6, 4), 5),
    "swin_tiny_patch4_window7_224": ("nhwc", (3, 2), 0),
    "mixer_s16_224": ("tokens", (6, 4), 0),
}
SMALLER = {
    "vit_tiny_patch16_dinov3_qkvb": {"depth": 3},
    "swin_tiny_patch4_window7_224": {"embed_dim": 24, "depths": (1, 1, 1, 1)},
}
"""Options that leave layers out."""


@pytest.mark.parametrize(
    "arch", [pytest.param(each, marks=() if each.startswith("test_") else pytest.mark.slow) for each in NOT_SQUARE]
)
def test_image_that_is_not_square_has_its_grid(arch):
    axes, grid, prefix = NOT_SQUARE[arch]
    options = {} if arch == "test_resnet" else {"img_size": (96, 64)}
    torch.manual_seed(0)
    model = timm.create_model(arch, **options, **SMALLER.get(arch, {})).eval().requires_grad_(requires_grad=False)
    randomise_zeros(model)
    layers, _classes = probe.probe(model, (96, 64), "cpu")
    layout = layers[probe.default_layer(model, layers)].layout
    assert layout == Layout(axes, *grid, model.num_prefix_tokens if prefix is None else prefix)


def small_swin():
    return torchvision.models.SwinTransformer([4, 4], 24, [2, 2], [2, 2], [4, 4], num_classes=10)


EVERY_LAYER = [
    "timm:test_resnet",
    "timm:test_vit",
    "models.test_architectures:small_swin",
    *(
        pytest.param(arch, marks=pytest.mark.slow)
        for arch in (
            "torchvision:mobilenet_v3_small",
            "timm:test_maxvit",
        )
    ),
]


def everywhere(model, image, names):
    """Compute Grad-CAM at every layer at once, by autograd alone, in the layout that the probe found.

    The model continues in one memory format, as in the engine, so that the same kernels round in the same way.
    """
    own, rows_last = {}, torch.contiguous_format

    def keep(name):
        def hook(_module, _args, output):
            first, *rest = output if isinstance(output, tuple) else (output,)
            own[name] = first.clone()
            through = own[name].clone(memory_format=rows_last)
            return (through, *rest) if rest else through

        return hook

    handles = [model.module.get_submodule(name).register_forward_hook(keep(name)) for name in names]
    logits = model.module(image.requires_grad_())
    gradients = torch.autograd.grad(logits[0, 7], [own[name] for name in names])
    for handle in handles:
        handle.remove()
    for name, gradient in zip(names, gradients, strict=True):
        layout = model.info.layers[name].layout
        yield architectures.formula(own[name].detach(), gradient, layout)


@pytest.mark.parametrize("arch", EVERY_LAYER)
def test_gradcam_at_every_explainable_layer_equals_autograd(arch):
    model = models.load(parse(f"{arch}?weights=none&size=64"))
    names = [name for name, layer in model.info.layers.items() if layer.layout]
    assert len(names) > 50
    picture = noise(0, 64)
    (result,) = run(model, [Row(picture, ClassTarget(7), (call("gradcam"),))], names)
    plain, truth = (everywhere(variant, inputs(variant, picture), names) for variant in (model, exact(model)))
    actual = (maps[0] for maps in result.maps)
    errors = dict(zip(names, map(error_ratio, actual, plain, truth), strict=True))
    assert max(errors.values()) <= 1, max(errors, key=errors.get)


def script():
    """Import the script that writes docs/architectures.md."""
    path = Path(__file__).parents[2] / "docs" / "generate" / "architectures.py"
    spec = importlib.util.spec_from_file_location("architectures", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


architectures = script()
ROWS = architectures.existing_rows()


FAMILIES = (
    "torchvision:shufflenet_v2_x0_5", "timm:edgenext_xx_small", "timm:levit_128s", "timm:mambaout_femto",
    "timm:vit_tiny_patch16_dinov3_qkvb", "timm:crossvit_tiny_240", "timm:starnet_s050",
)  # fmt: skip
"""Those whose grids or blocks differ most: axes of every order, no, one and five prefix tokens, two branches."""


@pytest.mark.parametrize(
    "name", ["torchvision:squeezenet1_1", *(pytest.param(spec, marks=pytest.mark.slow) for spec in FAMILIES)]
)
def test_default_explanation_equals_autograd_and_the_documented_row(name):
    """`examine` fails for a map that is zero or differs from autograd's."""
    explanation = architectures.examine(name)
    assert explanation.row().rsplit("|", 2)[0] == ROWS[name].rsplit("|", 2)[0]


def test_page_has_one_row_for_every_architecture():
    assert list(ROWS) == architectures.names()
    assert sum(name.startswith("timm:") for name in ROWS) >= 60
    assert {name.split("?")[0] for name in ROWS if name.startswith("torchvision:")} == {
        f"torchvision:{name}" for name in torchvision.models.list_models(module=torchvision.models)
    }


def test_no_row_exceeds_the_allowed_deviation():
    assert all(float(row.split("|")[-2]) <= architectures.MAX_DEVIATION for row in ROWS.values())


def test_script_detects_a_wrong_map_and_a_zero_map(monkeypatch):
    """The script's own check detects a fault of each kind."""
    right = architectures.oracle
    for fault, message in ((lambda *a: right(*a) * 1.00002, "deviates by 2"), (lambda *a: right(*a) * 0, "is zero")):
        monkeypatch.setattr(architectures, "oracle", fault)
        with pytest.raises(ArithmeticError, match=message):
            architectures.examine("timm:test_resnet")


TRANSFORMERS = (
    "deit_tiny_distilled_patch16_224",
    "eva02_tiny_patch14_224",
    "vit_tiny_patch16_dinov3_qkvb",
    "vit_tiny_r_s16_p8_224",
    "vit_wee_patch16_reg1_gap_256",
    "vit_medium_patch16_reg4_gap_256",
    "vit_base_patch16_gap_224",
)


@pytest.mark.parametrize("name", marked_except(pytest.mark.slow, TRANSFORMERS[:1], TRANSFORMERS))
def test_grids_in_the_table_are_those_that_timm_states(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    _, _, _, grid, axes, prefix, *_ = (cell.strip() for cell in ROWS[f"timm:{name}"].split("|"))
    assert (axes, int(prefix)) == ("tokens", model.num_prefix_tokens)
    assert grid == "{} x {}".format(*model.patch_embed.grid_size)
