"""Direct oneDNN calls give the same numbers, and are used only where they do."""

import logging
from functools import partial

import numpy as np
import pytest
import timm.layers
import torch
from torch import nn
from torch.nn import functional

from camserve_server.engine.values import Row
from camserve_server.models import LoadedModel
from camserve_server.models.acceleration import onednn
from camserve_server.targets.values import ClassTarget
from methods.tools import call, error_ratio, gap, noise, plain, run

function = onednn._function

pytestmark = pytest.mark.skipif(not onednn.is_supported("cpu", torch.float32), reason="torch has no oneDNN here")

APPLIED_BY_ONEDNN = {
    "hardswish": lambda: nn.Hardswish(inplace=True),
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "gelu by tanh": lambda: nn.GELU("tanh"),
    "timm's gelu": timm.layers.activations.GELU,
}
CLAMPING = {
    "relu": nn.ReLU,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "relu6": lambda: nn.ReLU6(inplace=True),
    "hardtanh": lambda: nn.Hardtanh(-0.5, 0.75),
}


class Net(nn.Module):
    """Convolutions of 3 × 3 and 1 × 1, a linear map over a grid, and the default layer after them."""

    def __init__(self, way, act=nn.Hardswish, norm=nn.Identity):
        torch.manual_seed(0)
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(3, 16, 3, 2, 1), norm(16), act()
        self.point = nn.Conv2d(16, 16, 1, bias=False)
        self.map = nn.Linear(16, 16)
        self.layer = nn.Conv2d(16, 8, 3, padding=2, dilation=2, groups=2)
        self.head = nn.Linear(8, 5)
        self.way = way
        for name, parameter in self.named_parameters():
            nn.init.normal_(parameter, std=0.2 if "weight" in name else 0.5)

    def forward(self, image):
        return self.head(torch.tanh(self.layer(self.way(self, image))).mean((2, 3)))


def straight(net, image):
    features = net.point(net.act(net.norm(net.conv(image))))
    return net.act(net.map(features.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


def rows_of(number):
    methods = tuple(map(call, ("gradcam", "layercam")))
    return [Row(noise(seed, 16), ClassTarget(3), methods) for seed in range(number)]


def answers(model, rows):
    """Return the logits and the maps."""
    results = run(model, rows_of(rows), ["layer"])
    return [result.logits for result in results] + [heatmap for result in results for heatmap in result.maps[0]]


def error(model, rows=3):
    """Return the largest error ratio of maps and logits; plain float32 is the model without the copy."""
    actual, expected = answers(model, rows), answers(plain(model), rows)
    truth = answers(LoadedModel(model.info, model.module.double(), None, torch.float64), rows)
    model.module.float()
    return max(map(error_ratio, actual, expected, truth))


def patched(model):
    """Return the activation modules that oneDNN applies, by the names of the patched modules."""
    return {site.name: site.activation_module for site in model.accelerated.onednn.sites}


@pytest.mark.parametrize("act", [*APPLIED_BY_ONEDNN, *CLAMPING])
def test_results_with_a_following_activation_are_the_same(act, plant):
    model = plant(lambda: Net(straight, (APPLIED_BY_ONEDNN | CLAMPING)[act]))
    joined = "act" if act in APPLIED_BY_ONEDNN else ""
    assert patched(model) == {"conv": joined, "point": "", "map": joined, "layer": ""}
    assert max(error(model, rows) for rows in (1, 3)) <= 1


@pytest.mark.parametrize("act", [*APPLIED_BY_ONEDNN, *CLAMPING])
def test_nan_reaches_the_output(act, plant):
    """For oneDNN the maximum of 0 and NaN is 0."""
    model = plant(lambda: Net(straight, (APPLIED_BY_ONEDNN | CLAMPING)[act]))
    model.accelerated.module.conv.bias[0] = torch.nan
    (result,) = run(model, rows_of(1), ["layer"])
    assert np.isnan(result.logits).all()


def test_activation_after_a_folded_batch_norm_is_applied_by_onednn(plant):
    norms = {"act": nn.BatchNorm2d, "norm.act": partial(timm.layers.BatchNormAct2d, act_layer=nn.SiLU)}
    for activating, norm in norms.items():
        model = plant(lambda norm=norm: Net(straight, norm=norm))
        assert model.accelerated.folded_norms == 1
        assert patched(model)["conv"] == activating
        assert error(model) <= 1


def test_bfloat16_calls_onednn_too(plant):
    half, full = (plant(lambda: Net(straight), precision=precision) for precision in ("bfloat16", "float32"))
    assert bool(patched(half)) == onednn.is_supported("cpu", torch.bfloat16)
    for half_result, full_result in zip(
        run(half, rows_of(2), ["layer"]), run(full, rows_of(2), ["layer"]), strict=True
    ):
        assert all(gap(*pair) < 0.05 for pair in zip(*half_result.maps, *full_result.maps, strict=True))


# --- modules that are not patched ---


@pytest.mark.parametrize("name", ["conv", "norm", "act"])
def test_module_with_a_users_hook_is_not_changed(name, plant):
    """A folded or patched module would get another input, or none; and the hook may change its output."""
    records = []

    def made():
        net = Net(straight, norm=nn.BatchNorm2d)
        net.get_submodule(name).register_forward_hook(lambda _module, _args, output: records.append(name) or output * 2)
        return net

    model = plant(made)
    records.clear()
    assert error(model) <= 1
    assert records.count(name) >= 2


def shared(net, image):
    """As in a residual network: one activation, once after a convolution and once after a sum."""
    features = net.point(net.act(net.conv(image)))
    features += 1
    return net.act(features)


def looked_at_before(net, image):
    features = net.conv(image)
    return features * 2 + net.act(features)


def looked_at_after(net, image):
    features = net.conv(image)
    return features + net.act(features)


def changed_before(net, image):
    features = net.conv(image)
    features -= 1
    return net.act(features)


def negative(net, image):
    return net.act(-net.conv(image))


def by_function(net, image):
    return functional.relu(net.conv(image))


def twice(net, image):
    return net.act(net.conv(image)) + 2 * net.act(net.conv(image / 2))


def weight_used(net, image):
    return net.act(net.conv(image)) * net.conv.weight.mean()


def by_keyword(net, image):
    return net.act(net.conv(input=image))


REST = {"layer": ""}
JOINED, ALONE = {"conv": "act"} | REST, {"conv": ""} | REST


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    ("way", "expected"),
    [
        (shared, JOINED | {"point": ""}),
        (looked_at_before, ALONE),
        (looked_at_after, None),
        (changed_before, ALONE),
        (negative, ALONE),
        (by_function, ALONE),
        (twice, REST),
        (weight_used, REST),
        (by_keyword, REST),
    ],
)
def test_module_whose_patch_would_affect_others_is_not_patched(way, expected, inplace, plant):
    """A change in place is visible to all later uses."""
    model = plant(lambda: Net(way, lambda: nn.Hardswish(inplace=inplace)))
    assert patched(model) == (expected or (JOINED if inplace else ALONE))
    assert error(model) <= 1


def test_repeated_tensor_goes_through_the_activation_again(plant):
    model = plant(lambda: Net(lambda net, image: net.act(net.act(net.conv(image)).sub_(1)), nn.Hardswish))
    assert patched(model) == JOINED
    assert error(model) <= 1


@pytest.mark.parametrize("mode", [{"padding_mode": "reflect", "padding": 1}, {"padding": "same"}])
def test_convolution_with_other_padding_runs_in_torch(mode, plant):
    def make():
        net = Net(lambda net, image: net.act(net.conv(image)))
        net.conv = nn.Conv2d(3, 16, 3, **mode)
        return net

    model = plant(make)
    assert patched(model) == REST
    assert error(model) <= 1


def test_users_own_module_is_not_patched(plant):
    class Halved(nn.Conv2d):
        def forward(self, inputs):
            return super().forward(inputs) / 2

    def make():
        net = Net(lambda net, image: net.act(net.conv(image)))
        net.conv = Halved(3, 16, 3)
        return net

    assert patched(plant(make)) == REST


def test_modules_after_the_layer_are_not_patched(plant):
    model = plant(lambda: Net(straight))
    assert "head" not in patched(model)
    assert "forward" not in vars(model.accelerated.module.head)


def test_passes_that_differentiate_to_the_input_run_in_torch(plant):
    model = plant(lambda: Net(straight))
    assert not any("forward" in vars(module) for module in model.module.modules())
    (result,) = run(model, [Row(noise(0, 16), ClassTarget(3), (call("saliency"),), copy=0)], kind="saliency")
    assert result.maps[0][0].any()


# --- weights ---


def test_no_weight_is_held_twice(plant):
    model = plant(lambda: Net(straight, norm=nn.BatchNorm2d))
    copied, weights = model.accelerated.module, model.accelerated.onednn.weights
    assert copied.conv.weight is None
    assert all(weight.is_mkldnn for weight in weights["conv"])
    for name in ("point", "map", "layer"):
        assert set(map(id, weights[name])) == {id(model.module.get_submodule(name).weight)}
        assert copied.get_submodule(name).weight is model.module.get_submodule(name).weight


@pytest.mark.parametrize(("threads", "rows", "own"), [(2, 1, True), (2, 3, False), (1, 1, False), (1, 3, False)])
def test_single_row_on_several_threads_has_its_own_weight_order(threads, rows, own, plant, monkeypatch):
    weight_ids, before = [], torch.get_num_threads()

    def recording(name):
        def record(image, weight, *rest):
            weight_ids.append(id(weight))
            return function(name)(image, weight, *rest)

        return record if name == "_convolution_pointwise" else function(name)

    monkeypatch.setattr(onednn, "_function", recording)
    model = plant(lambda: Net(straight, norm=nn.BatchNorm2d))
    single, several = model.accelerated.onednn.weights["conv"]
    try:
        torch.set_num_threads(threads)
        weight_ids.clear()
        run(model, rows_of(rows), ["layer"])
        right = error(model, rows) <= 1
    finally:
        torch.set_num_threads(before)
    assert right
    assert (id(single) in weight_ids, id(several) in weight_ids) == (own, not own)


# --- failures ---


def failing(_name):
    def function(*_args):
        raise RuntimeError("could not create a primitive")

    return function


def wrong(name):
    return lambda *args: function(name)(*args) * 1.001


@pytest.mark.parametrize(
    ("broken", "reason"), [(failing, "RuntimeError: could not create a primitive"), (wrong, "off by 0.00")]
)
def test_failing_onednn_is_replaced_by_torch_and_logged(broken, reason, plant, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(onednn, "_function", broken)
    model = plant(lambda: Net(straight, norm=nn.BatchNorm2d))
    assert "oneDNN is not called directly" in caplog.text
    assert reason in caplog.text
    assert patched(model) == {}
    assert model.accelerated.folded_norms == 1
    assert not any("forward" in vars(module) for module in model.accelerated.module.modules())
    assert error(model) <= 1


@pytest.mark.parametrize("arguments", [("cuda:0", torch.float32), ("cpu", torch.float64)])
def test_other_devices_and_precisions_run_in_torch(arguments):
    assert not onednn.is_supported(*arguments)


def test_torch_without_onednn_runs_without_it(plant, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert plant(lambda: Net(straight)).accelerated is None
