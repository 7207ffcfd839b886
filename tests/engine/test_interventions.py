"""Interventions equal the same hooks placed by hand on the plain network, in every pass, and leave nothing behind."""

import copy
import functools
import itertools
import sys
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch
from timm.models.resnet import BasicBlock, ResNet
from torch import nn
from torchvision.models import SwinTransformer, VisionTransformer

from camserve_server.core.errors import FailedPrecondition, InvalidArgument
from camserve_server.engine import Engine, cam
from camserve_server.engine.inspection import measure
from camserve_server.engine.values import Row
from camserve_server.methods import cams
from camserve_server.methods.values import Edit
from camserve_server.models import ModelSpec, load
from camserve_server.models.grid import to_grid
from camserve_server.models.hooks import hook_count
from camserve_server.models.values import Intervention, Pass
from camserve_server.targets.values import ClassTarget
from methods.tools import Toy, call, error_ratio, exact, inputs, noise, plain

SIZE, CLASS = 64, 2
FEW = (1, 3, 5, 7, 8, 9)


def convolutions():
    return ResNet(BasicBlock, [1, 1, 1, 1], 5, stem_width=8, channels=(16, 16, 16, 32))


def tokens():
    return VisionTransformer(SIZE, 8, num_layers=4, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=5)


def channels_last():
    return SwinTransformer([4, 4], 16, [1, 1, 1], [2, 2, 2], [2, 2], num_classes=5)


PLACES = {
    # the layer that is explained, one before it and one after it, the axis of their channels, and the class tokens
    convolutions: ("layer3", "layer2", "layer4", 1, 0),
    tokens: (
        "encoder.layers.encoder_layer_1",
        "encoder.layers.encoder_layer_0.mlp",
        "encoder.layers.encoder_layer_2",
        2,
        1,
    ),
    channels_last: ("features.3", "features.1", "features.5.0", 3, 0),
}


@pytest.fixture(scope="module")
def loaded():
    """Return a function that loads a model from a factory, without acceleration."""

    def load_from(factory):
        torch.manual_seed(1)
        module = ModuleType("intervened")
        module.make = factory
        patch.setitem(sys.modules, "intervened", module)
        return load(ModelSpec("net", "intervened", "make", size=SIZE, weights="none", accelerate=False))

    with pytest.MonkeyPatch.context() as patch:
        yield functools.cache(load_from)


@pytest.fixture(params=PLACES, ids=lambda factory: factory.__name__)
def factory(request):
    return request.param


@pytest.fixture
def model(factory, loaded):
    return loaded(factory)


@pytest.fixture
def places(factory):
    return PLACES[factory]


def compute(model, rows, interventions=(), layers=(), kind="cam"):
    pass_ = Pass(model.info.name, kind, (SIZE, SIZE), tuple(layers), interventions=tuple(interventions))
    return Engine({model.info.name: model}).run(pass_, rows)


def gradcam(model, image, interventions=(), layer=""):
    (result,) = compute(model, [Row(image, ClassTarget(CLASS), (call("gradcam"),))], interventions, [layer])
    return result.logits, result.maps[0][0]


def by_hand(tensor, change, axis, prefix):
    """Return a tensor with a change, written for these tests."""
    changed = tensor.clone()
    at = [slice(None)] * tensor.dim()
    at[axis] = list(change.channels) or slice(None)
    if change.change == "replace_mean":
        at[1] = slice(prefix, None) if tensor.dim() == 3 else at[1]
        grid = [each for each in range(1, tensor.dim()) if each != axis]
        changed[tuple(at)] = tensor[tuple(at)].mean(grid, keepdim=True)
    elif change.change == "silence":
        changed[tuple(at)] = 0
    elif change.change == "scale":
        changed[tuple(at)] = tensor[tuple(at)] * change.factor
    else:
        changed[tuple(at)] = torch.clip(tensor[tuple(at)], change.minimum, change.maximum)
    return changed


def hooked(module, change, axis, prefix):
    """Place the hook of a change on a layer, with torch's own functions."""
    layer = module.get_submodule(change.layer)
    if change.change == "clip_gradient":
        return layer.register_full_backward_pre_hook(
            lambda _layer, gradients: (by_hand(gradients[0], change, axis, 0),)
        )
    if change.input:
        return layer.register_forward_pre_hook(lambda _layer, args: (by_hand(args[0], change, axis, prefix), *args[1:]))
    return layer.register_forward_hook(lambda _layer, _args, output: by_hand(output, change, axis, prefix))


def expected(model, image, changes, layer, axis, prefix):
    """Return the outputs and Grad-CAM of the plain network with hooks placed by hand."""
    module, kept = copy.deepcopy(model.module), []
    for change in changes:
        hooked(module, change, axis, prefix)

    def capture(_layer, _args, output):
        kept.append(output.detach().requires_grad_())
        return kept[0].clone()

    module.get_submodule(layer).register_forward_hook(capture)
    logits = module(inputs(model, image).contiguous())
    (gradient,) = torch.autograd.grad(logits[0, CLASS], kept[0], allow_unused=True, materialize_grads=True)
    layout = model.info.layers[layer].layout
    parts = (to_grid(kept[0].detach(), layout), to_grid(gradient, layout))
    return logits[0].detach().numpy(), cams.gradcam(*parts, logits[:, CLASS].detach()).sum(1)[0].numpy()


CHANGES = {
    "silence": {"change": "silence", "channels": FEW},
    "silence all": {"change": "silence"},
    "scale": {"change": "scale", "factor": 0.3, "channels": FEW},
    "scale all": {"change": "scale", "factor": -1.5},
    "clamp": {"change": "clamp", "minimum": -0.1, "maximum": 0.1, "channels": FEW},
    "clamp all": {"change": "clamp", "maximum": 0.2},
    "mean": {"change": "replace_mean", "channels": FEW},
    "mean of all": {"change": "replace_mean"},
}


def in_turn():
    """Return every change of the output and of the input of layers; half of them, in turn, are for the fast tests."""
    return [
        pytest.param(name, received, marks=pytest.mark.slow if (place + place // 4) % 2 else ())
        for place, (name, received) in enumerate(itertools.product(CHANGES, (False, True)))
    ]


@pytest.mark.parametrize(("name", "received"), in_turn())
def test_change_equals_a_hook_placed_by_hand_to_the_bit(model, places, name, received):
    explained, before, after, axis, prefix = places
    image = noise(1, SIZE)
    unchanged, _ = gradcam(model, image, (), explained)
    for layer in (before, explained, after):
        change = Intervention(layer, input=received, **CHANGES[name])
        logits, heatmap = gradcam(model, image, [change], explained)
        true_logits, true_heatmap = expected(model, image, [change], explained, axis, prefix)

        np.testing.assert_array_equal(logits, true_logits)
        np.testing.assert_array_equal(heatmap, true_heatmap)
        assert layer == after or not np.array_equal(logits, unchanged)
    assert hook_count(model.module) == 0


@pytest.mark.parametrize("channels", [(), FEW])
def test_cut_gradient_equals_a_backward_hook_to_the_bit(model, places, channels):
    explained, before, after, axis, _ = places
    image = noise(1, SIZE)
    unchanged = gradcam(model, image, (), explained)
    for layer in (explained, after):
        limit = 1e-4
        change = Intervention(layer, "clip_gradient", channels, minimum=-limit, maximum=limit)
        logits, heatmap = gradcam(model, image, [change], explained)

        np.testing.assert_array_equal(logits, unchanged[0])
        assert not np.array_equal(heatmap, unchanged[1])
        np.testing.assert_array_equal(heatmap, expected(model, image, [change], explained, axis, 0)[1])
    earlier = Intervention(before, "clip_gradient", minimum=-1e-9, maximum=1e-9)
    np.testing.assert_array_equal(gradcam(model, image, [earlier], explained)[1], unchanged[1])


def test_mean_is_taken_over_a_grid_that_the_score_does_not_read(loaded):
    model, last = loaded(tokens), "encoder.layers.encoder_layer_3"
    change, outputs = Intervention(last, "replace_mean", FEW), []
    with model.module.get_submodule(last).register_forward_hook(lambda *call: outputs.append(call[2])):
        model.module(inputs(model, noise(1, SIZE)).contiguous())
    (result,) = compute(model, [Row(noise(1, SIZE), ClassTarget(CLASS))], [change], [last], "inspect")

    assert (model.info.layers[last].layout, model.info.layers[last].grid.prefix) == (None, 1)
    assert result.readings[0].activation == measure(by_hand(outputs[0], change, 2, 1))


def test_changes_apply_in_their_order(model, places):
    explained, before, _, axis, prefix = places
    image = noise(1, SIZE)
    changes = [
        Intervention(before, "scale", factor=2.0),
        Intervention(before, "clamp", maximum=0.3),
        Intervention(before, "scale", FEW, factor=-1.0),
    ]
    found = gradcam(model, image, changes, explained)

    for ours, theirs in zip(found, expected(model, image, changes, explained, axis, prefix), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert not np.array_equal(found[0], gradcam(model, image, changes[::-1], explained)[0])


def test_each_image_of_a_batch_is_changed_as_if_it_were_alone(model, places):
    explained, before, after, *_ = places
    changes = (
        Intervention(before, "replace_mean", FEW),
        Intervention(explained, "clip_gradient", minimum=-1e-3, maximum=1e-3),
        Intervention(after, "scale", factor=0.5, input=True),
    )
    images = [noise(seed, SIZE) for seed in range(3)]
    rows = [Row(image, ClassTarget(CLASS), (call("gradcam"),)) for image in images]
    for image, result in zip(images, compute(model, rows, changes, [explained]), strict=True):
        alone = gradcam(model, image, changes, explained)
        truth = gradcam(exact(model), image, changes, explained)

        assert error_ratio(result.logits, alone[0], truth[0]) <= 1
        assert error_ratio(result.maps[0][0], alone[1], truth[1]) <= 1


def test_accelerated_model_runs_changes_in_the_plain_network(resnet):
    change = (Intervention("layer3", "scale", factor=0.5),)
    pass_ = Pass(resnet.info.name, "cam", (SIZE, SIZE), ("layer4",), interventions=change)

    assert resnet.accelerated
    assert resnet.for_pass(pass_) is resnet
    found, alone, truth = (
        gradcam(each, noise(1, SIZE), change, "layer4") for each in (resnet, plain(resnet), exact(resnet))
    )
    assert error_ratio(found[1], alone[1], truth[1]) <= 1


class Scaled(nn.Module):
    def forward(self, values):
        return values * 0.5


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("cam", "layercam"),
        ("curvature", "shapleycam"),
        ("saliency", "saliency"),
        ("guided", "guided_backprop"),
        ("bias", "fullgrad"),
    ],
)
def test_every_kind_of_pass_runs_the_changed_network(loaded, kind, method):
    """Its maps are those of a network in which another module changes what the layer returns."""
    model, image = loaded(convolutions), noise(1, SIZE)
    layers = ["layer4"] if kind in ("cam", "curvature") else []
    row = Row(image, ClassTarget(CLASS), (call(method),), copy=0 if kind in ("saliency", "guided") else None)
    answers = []
    for each in (model, exact(model)):
        module = copy.deepcopy(each.module)
        module.layer3.append(Scaled())
        answers.append(compute(replace(each, module=module), [row], (), layers, kind)[0].maps[0][0])
    (result,) = compute(model, [row], [Intervention("layer3", "scale", factor=0.5)], layers, kind)

    assert error_ratio(result.maps[0][0], *answers) <= 1


@pytest.mark.parametrize("kind", ["attention", "each", "last"])
def test_attention_is_that_of_the_changed_network(loaded, kind):
    method = {"attention": "chefer", "each": "legrad", "last": "gradeclip"}[kind]
    model, row = loaded(tokens), Row(noise(1, SIZE), ClassTarget(CLASS), (call(method),))
    changes = [Intervention("encoder.layers.encoder_layer_0.mlp", "scale", factor=2.0)]
    answers = []
    for each in (model, exact(model)):
        module = copy.deepcopy(each.module)
        module.encoder.layers.encoder_layer_0.mlp.append(Doubled())
        answers.append(compute(replace(each, module=module), [row], (), (), kind)[0].maps[0][0])
    (result,) = compute(model, [row], changes, (), kind)

    assert error_ratio(result.maps[0][0], *answers) <= 1


class Doubled(nn.Module):
    def forward(self, values):
        return values * 2


def test_channels_are_silenced_in_the_changed_network(loaded):
    """Such rows share the modules before the layer, if a trial shows that they can: its result is kept for others."""
    model, image = loaded(convolutions), noise(1, SIZE)
    rows = [Row(image, ClassTarget(CLASS), edit=Edit(silenced=channel)) for channel in range(4)]
    before = dict(model.runs_versions)
    changes = [Intervention("layer1", "scale", factor=0.5), Intervention("layer4", "silence")]
    for each in (changes[:1], changes):
        results = compute(model, rows, each, ["layer2"], "score")
        for channel, result in enumerate(results):
            alone = [*each, Intervention("layer2", "silence", (channel,))]
            found, truth = (
                compute(of, [Row(image, ClassTarget(CLASS))], alone, (), "score")[0].logits
                for of in (model, exact(model))
            )
            assert error_ratio(result.logits, found, truth) <= 1

    assert model.runs_versions == before


class Pair(nn.Module):
    """A module that is called twice, and changes its output and what it is given in place."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, seen, more=None):
        values = self.conv(seen)
        seen.mul_(3)
        return {"table": torch.arange(3), "values": (values, more)}


def twice(net, seen):
    first = net.layer(seen)["values"][0]
    first.relu_()
    return net.layer(first, more=seen)["values"][0].relu_()


@pytest.fixture
def pair(plant):
    return plant(lambda: Toy(twice, Pair()), size=16, accelerate=False)


@pytest.mark.parametrize("received", [False, True])
def test_every_call_of_a_layer_is_changed(pair, received):
    """Its output is the first floating-point tensor in a structure, and the network changes it in place."""
    change = Intervention("layer", "scale", (0, 2), input=received, factor=0.25)
    image = noise(2, 16)
    (result,) = run_toy(pair, image, [change])
    module, factors = copy.deepcopy(pair.module), torch.tensor([0.25, 1, 0.25, 1])[:, None, None]

    def output(_layer, _args, kept):
        return {**kept, "values": (kept["values"][0] * factors, kept["values"][1])}

    def arguments(_layer, args, kwargs):
        return (args[0] * factors,), kwargs

    if received:
        module.layer.register_forward_pre_hook(arguments, with_kwargs=True)
    else:
        module.layer.register_forward_hook(output)
    np.testing.assert_array_equal(result.logits, module(inputs(pair, image).contiguous())[0].detach())


def run_toy(model, image, changes, layers=(), kind="score"):
    pass_ = Pass(model.info.name, kind, (16, 16), tuple(layers), interventions=tuple(changes))
    return Engine({model.info.name: model}).run(pass_, [Row(image, ClassTarget(1), (call("gradcam"),))])


def test_gradient_is_cut_where_the_network_changes_the_output_in_place(plant):
    """`relu` works in place: a backward hook on `conv` would fail."""
    model = plant(lambda: Toy(lambda net, seen: net.relu(net.layer(seen))), accelerate=False)
    limit = 1e-4
    cut = Intervention("layer", "clip_gradient", minimum=-limit, maximum=limit)
    (result,), (plain_result,) = (run_toy(model, noise(1, 16), each, ["layer"], "cam") for each in ([cut], []))
    module, kept = copy.deepcopy(model.module), []
    module.middle = lambda net, seen: net.relu(kept.append(seen.detach().requires_grad_()) or kept[0].clone())
    module(inputs(model, noise(1, 16)).contiguous())[0, 1].backward()
    terms = cams.gradcam(kept[0].detach(), kept[0].grad.clamp(-limit, limit), None)

    np.testing.assert_array_equal(result.maps[0][0], terms.sum(1)[0])
    assert not np.array_equal(result.maps[0][0], plain_result.maps[0][0])


def test_many_targets_that_are_differentiated_together_get_the_cut_gradient(loaded, monkeypatch):
    model, image = loaded(convolutions), noise(1, SIZE)
    cut = [Intervention("layer4", "clip_gradient", FEW, minimum=-1e-3, maximum=1e-3)]
    rows = [Row(image, ClassTarget(target), (call("gradcam"),), targets=5) for target in range(5)]
    joined, can_join = [], cam.can_join
    monkeypatch.setattr(cam, "can_join", lambda *args: joined.append(can_join(*args)) or joined[-1])
    together, uncut = (compute(model, rows, each, ["layer4"]) for each in (cut, []))

    assert joined == [True, True]
    for target, result in enumerate(together):
        assert not np.array_equal(result.maps[0][0], uncut[target].maps[0][0])
        alone, truth = (
            compute(each, [replace(rows[target], targets=1)], cut, ["layer4"]) for each in (model, exact(model))
        )
        assert error_ratio(result.maps[0][0], alone[0].maps[0][0], truth[0].maps[0][0]) <= 1


@pytest.mark.parametrize(
    ("change", "error", "field", "words"),
    [
        (
            Intervention("fc", "silence", (32,), input=True),
            InvalidArgument,
            "channels",
            "has 32 channels, from 0",
        ),
        (Intervention("fc", "replace_mean", input=True), FailedPrecondition, "replace_mean", "has none"),
        (Intervention("unused", "silence"), FailedPrecondition, "layer", "did not run"),
    ],
)
def test_change_that_does_not_fit_is_refused_and_leaves_no_hook(loaded, change, error, field, words):
    model = loaded(convolutions)
    model.module.add_module("unused", nn.ReLU())
    model = replace(model, info=replace(model.info, layers={**model.info.layers, "unused": model.info.layers["fc"]}))
    good = Intervention("layer2", "clip_gradient", minimum=-1, maximum=1)
    with pytest.raises(error, match=words) as caught:
        compute(model, [Row(noise(1, SIZE), ClassTarget(1), (call("gradcam"),))], [good, change], ["layer1"])

    assert caught.value.field == f"interventions[1].{field}"
    assert hook_count(model.module) == 0


def test_error_of_the_network_leaves_no_hook(plant):
    def fail(_net, seen):
        if failing:
            raise RuntimeError("broken")
        return seen

    failing = []
    model = plant(lambda: Toy(fail), accelerate=False)
    failing.append(True)
    changes = [
        Intervention("conv", "scale", factor=2.0),
        Intervention("conv", "scale", input=True, factor=2.0),
        Intervention("conv", "clip_gradient", minimum=-1, maximum=1),
    ]
    with pytest.raises(FailedPrecondition, match=r"failed in its own forward .Toy.: broken"):
        run_toy(model, noise(1, 16), changes, ["conv"], "cam")

    assert hook_count(model.module) == 0
