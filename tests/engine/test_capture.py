"""The capture of layers returns their outputs and gradients, and leaves no hooks or tensors."""

import types

import numpy as np
import pytest
import torch
from torch import nn

from camserve_server import models
from camserve_server.core.errors import FailedPrecondition
from camserve_server.engine.values import Row
from camserve_server.models.hooks import capture_layers, hook_count
from camserve_server.targets.values import ClassTarget
from methods import narrow
from methods.tools import FACTOR, FLOOR, Toy, call, error_ratio, gap, inputs, maps, noise, plain, run

INDEX = 7
KINK = 1e-5  # a gradient that jumps at a ReLU is off by more than this share of its largest value

SIZE = 64

# By architecture, of which `narrow` has a small model: the default layer, and three others: in-place modules, layers
# whose output torchvision's own code changes in place, layers called several times, tokens, tuples, channels last.
ZOO = {
    "resnet50": ("layer4", ("relu", "layer1.0.relu", "layer2.0.bn1")),
    "densenet121": ("features", ("features.relu0", "features.denseblock2.denselayer3.relu2", "features.norm5")),
    "mobilenet_v3_small": ("features", ("features.0.2", "features.1.block.0.2", "features.4.block.0.1")),
    "convnext_tiny": ("features", ("features.1.0.stochastic_depth", "features.5.3.block.3", "features.7.2.block")),
    "swin_t": ("norm", ("features.1.0.stochastic_depth", "features.5.3.attn", "features.7.1.norm2")),
    "vit_b_16": (
        "encoder.layers.encoder_layer_5.ln_1",
        ("conv_proj", "encoder.layers.encoder_layer_3.self_attention", "encoder.layers.encoder_layer_4"),
    ),
}


def oracle(arch, state, image, layers):
    """Return activations and gradients of torchvision's model, with its in-place operations, in the image's precision.

    Returns:
        By layer the activation and the gradient; and the gradient at the image.
    """
    with torch.device("meta"):
        model = getattr(narrow, arch)().eval()
    state = {name: each.to(image.dtype) if each.is_floating_point() else each for name, each in state.items()}
    model.load_state_dict(state, assign=True)
    model.requires_grad_(requires_grad=False)
    kept = {}

    def keep(name):
        def hook(_module, _args, output):
            first, *rest = output if isinstance(output, tuple) else (output,)
            kept[name] = first.clone()
            through = kept[name].clone()
            return (through, *rest) if isinstance(output, tuple) else through

        return hook

    for name in layers:
        model.get_submodule(name).register_forward_hook(keep(name))
    image = image.clone().requires_grad_()
    score = model(image)[0, INDEX]
    *gradients, at_image = torch.autograd.grad(score, [*(kept[name] for name in layers), image])
    return {name: (kept[name].detach(), grad) for name, grad in zip(layers, gradients, strict=True)}, at_image


def smooth(arch, model, layers):
    """An image at which float32 and float64 are on the same side of every ReLU, and the oracle's results in both.

    Where rounding moves one value across zero the gradient jumps, whoever takes it. That it did not is seen in the
    gradient at the image, which needs no capture.
    """
    for seed in range(8):
        picture = noise(seed, SIZE)
        image, state = inputs(model, picture), model.module.state_dict()
        (plain, here), (truth, there) = (oracle(arch, state, each, layers) for each in (image, image.double()))
        if gap(here, there) <= KINK:
            return types.SimpleNamespace(
                model=model, layers=layers, picture=picture, image=image, plain=plain, truth=truth
            )
    raise AssertionError


def backward(model, image, layers):
    """Capture layers of a model while the score of one class is differentiated."""
    with capture_layers({name: model.module.get_submodule(name) for name in layers}) as captures:
        model.module(image)[0, INDEX].backward()
    return captures


def graph(node):
    """Return the names of all nodes of autograd's graph."""
    seen, waiting = set(), [node]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [above for above, _ in node.next_functions]
    return sorted(node.name() for node in seen)


# Fast tests of a small Swin's layers are in `models/test_architectures.py`.
SLOW = tuple(name for name in ZOO if name != "resnet50")


@pytest.fixture(
    scope="module", params=[pytest.param(each, marks=pytest.mark.slow if each in SLOW else ()) for each in ZOO]
)
def zoo(request):
    default, others = ZOO[request.param]
    model = models.load(models.parse(f"narrow=methods.narrow:{request.param}?size={SIZE}"))
    assert model.info.default_layer == default
    assert all(model.info.layers[name].layout for name in others)
    return smooth(request.param, model, (default, *others))


def error_ratios(zoo, captures):
    """Yield the error ratios of the captured activation and gradient of each layer."""
    for name, capture in captures.items():
        for place, tensor in enumerate((capture.activation, capture.gradient)):
            yield error_ratio(tensor, zoo.plain[name][place], zoo.truth[name][place]), name


def test_captured_activations_and_gradients_are_as_exact_as_plain_float32(zoo):
    for name in zoo.layers:
        captures = backward(zoo.model, zoo.image, [name])
        assert captures[name].intact()
        assert max(error_ratios(zoo, captures))[0] <= 1, name


def test_engines_elementwise_maps_are_as_exact_as_plain_float32(zoo):
    calls = (call("hirescam"), call("layercam"))
    (result,) = run(zoo.model, [Row(zoo.picture, ClassTarget(INDEX), calls)], zoo.layers)
    for name, (hirescam, layercam) in zip(zoo.layers, result.maps, strict=True):
        plain, truth = (elementwise(zoo, each[name], name) for each in (zoo.plain, zoo.truth))
        assert error_ratio(layercam, plain["layercam"], truth["layercam"]) <= 1, name
        # Before a layer norm gradient and activation are orthogonal: HiResCAM's sum cancels to nothing.
        size = truth["terms"].abs().sum(0).max()
        error, lost = (np.abs(each - truth["hirescam"].numpy()).max() for each in (hirescam, plain["hirescam"].numpy()))
        assert error <= FACTOR * lost + FLOOR * size, name


def elementwise(zoo, oracle, name):
    """Return the elementwise maps by their formulas, and the terms of HiResCAM's sum."""
    activation, gradient = (grid(each[0], zoo.model.info.layers[name].layout) for each in oracle)
    terms = gradient * activation
    return {"terms": terms, "hirescam": terms.sum(0), "layercam": (gradient.clamp(min=0) * activation).sum(0)}


def test_layers_captured_together_equal_each_alone_and_leave_the_model_unchanged(zoo):
    together = backward(zoo.model, zoo.image, zoo.layers)
    assert set(together) == set(zoo.layers)
    assert max(error_ratios(zoo, together))[0] <= 1
    assert untouched(zoo.model)


@pytest.mark.parametrize("fault", [lambda seen: seen.flip(-1), lambda seen: seen * (1 + 1e-4)])
def test_planted_fault_in_a_capture_is_detected(zoo, fault):
    """The planted faults are a mirrored tensor and one scaled by 1.0001."""
    name = zoo.layers[0]
    capture = backward(zoo.model, zoo.image, [name])[name]
    assert error_ratio(fault(capture.activation), zoo.plain[name][0], zoo.truth[name][0]) > 1


def untouched(model):
    """Return True if a model is unchanged since it was loaded."""
    parameters, modules = list(model.module.parameters()), list(model.module.modules())
    return (
        hook_count(model.module) == 0
        and models.digest(model.module) == model.info.digest
        and not any(parameter.requires_grad or parameter.grad is not None for parameter in parameters)
        and not any(module.training for module in modules)
    )


def grid(output, layout):
    """Return the [C,h,w] of one image, computed by hand."""
    if layout.axes == "nchw":
        return output
    if layout.axes == "nhwc":
        return torch.einsum("hwc->chw", output)
    return torch.stack([output[layout.prefix + i] for i in range(layout.height * layout.width)], 1).unflatten(
        1, (layout.height, layout.width)
    )


@pytest.mark.parametrize("name", ["conv1", "layer2.0.bn1", "layer3", "layer4"])
def test_layers_up_to_the_captured_one_are_not_differentiated(resnet, name):
    tracked = []
    # Registered before the capture's own hook, it sees what the layer itself returned.
    hook = resnet.module.get_submodule(name).register_forward_hook(
        lambda _module, args, out: tracked.extend([*args, out])
    )
    backward(resnet, inputs(resnet, noise(0, 64)), [name])
    hook.remove()
    assert len(tracked) == 2
    assert not any(each.requires_grad or each.grad_fn for each in tracked)


def test_only_modules_after_the_layer_are_in_the_graph(resnet):
    with capture_layers({"layer4": resnet.module.layer4}):
        score = resnet.module(inputs(resnet, noise(0, 64)))[0, INDEX]
    names = graph(score.grad_fn)
    assert not [name for name in names if "Conv" in name or "Norm" in name]
    assert len(names) <= 16


def test_without_the_capture_the_whole_graph_is_visible(resnet):
    score = resnet.module(inputs(resnet, noise(0, 64)).requires_grad_())[0, INDEX]
    assert sum("Conv" in name for name in graph(score.grad_fn)) == 20


def test_error_in_the_forward_pass_leaves_no_hook(resnet):
    layers = {name: resnet.module.get_submodule(name) for name in ("layer1", "layer4")}
    with capture_layers(layers):
        assert hook_count(resnet.module) == 2
    with pytest.raises(RuntimeError, match="channels"), capture_layers(layers):
        resnet.module(torch.zeros(1, 5, 64, 64))
    assert untouched(resnet)


def test_leaving_the_block_before_the_backward_pass_leaves_no_hook(resnet):
    with capture_layers({"layer4": resnet.module.layer4}) as captures:
        resnet.module(inputs(resnet, noise(0, 64)))
    assert hook_count(resnet.module) == 0
    assert captures["layer4"].gradient is None


def test_hook_count_counts_hooks_of_every_kind():
    layer = nn.Linear(2, 2)
    layer.register_forward_pre_hook(lambda *_: None)
    layer.register_forward_hook(lambda *_: None)
    layer.register_full_backward_hook(lambda *_: None)
    layer.register_full_backward_pre_hook(lambda *_: None)
    assert hook_count(nn.Sequential(layer)) == 4


def test_last_of_several_calls_is_captured(resnet):
    image = inputs(resnet, noise(0, 64))
    captures = backward(resnet, image, ["layer1.0.relu", "layer1.0"])
    assert torch.equal(captures["layer1.0.relu"].activation, captures["layer1.0"].activation)
    assert torch.equal(captures["layer1.0.relu"].gradient, captures["layer1.0"].gradient)
    assert resnet.info.layers["layer1.0.relu"].calls == 2


def test_second_backward_pass_does_not_change_the_first_gradient(resnet):
    with capture_layers({"layer4": resnet.module.layer4}) as captures:
        logits = resnet.module(inputs(resnet, noise(0, 64)).contiguous())
        logits[0, 1].backward(retain_graph=True)
        first = captures["layer4"].gradient
        before = first.clone()
        logits[0, 2].backward()
    assert not torch.equal(captures["layer4"].gradient, before)
    assert torch.equal(first, before)


class Keeps(nn.Module):
    """Module that returns three times its input, and keeps the result."""

    def forward(self, seen):
        self.kept = seen * 3
        return self.kept


def overwrite_input(net, seen):
    """Change the output of an Identity in place, through its input's name."""
    result = net.layer(seen)
    seen.mul_(2)
    return result


def overwrite_kept(net, seen):
    """Change the output of a layer in place, through the reference that the layer keeps."""
    result = net.layer(seen)
    net.layer.kept.mul_(2)
    return result


@pytest.mark.parametrize(("middle", "layer"), [(overwrite_input, None), (overwrite_kept, Keeps())])
@pytest.mark.parametrize("watched", [("layer",), ("conv", "layer")])
def test_model_that_overwrites_the_captured_output_through_an_alias_is_refused(plant, middle, layer, watched):
    model = plant(lambda: Toy(middle, layer))
    row = Row(noise(0, 16), ClassTarget(1), (call("hirescam"),))
    # What is behind "conv" may be found out when the model is loaded: its own tensor is the one that was overwritten.
    words = 'overwrites the output of layer "layer"|layer "conv" cannot be explained'
    with pytest.raises(FailedPrecondition, match=words):
        run(model, [row], watched)


def test_output_changed_in_place_later_is_captured_unchanged(plant):
    def relu_in_place(net, seen):
        return nn.functional.relu(net.layer(seen), inplace=True)

    model = plant(lambda: Toy(relu_in_place))
    capture = backward_toy(model)["layer"]
    assert capture.intact()
    assert capture.activation.min() < 0
    clean = plant(lambda: Toy(lambda net, seen: nn.functional.relu(net.layer(seen))))
    assert torch.equal(capture.gradient, backward_toy(clean)["layer"].gradient)


def backward_toy(model):
    with capture_layers({"layer": model.module.layer}) as captures:
        model.module(inputs(model, noise(0, 16)))[0, 1].backward()
    return captures


class Wraps(nn.Module):
    """Module that returns its input in a structure."""

    def __init__(self, wrap):
        super().__init__()
        self.wrap = wrap

    def forward(self, seen):
        return self.wrap(seen)


STRUCTURES = {
    "tuple": (lambda t: (None, t), lambda each: each[1]),
    "list": (lambda t: [t, "words"], lambda each: each[0]),
    "dict": (lambda t: {"mask": t > 0, "features": t}, lambda each: each["features"]),
    "nested": (lambda t: {"a": [(None, {"b": t})]}, lambda each: each["a"][0][1]["b"]),
}


@pytest.mark.parametrize("kind", STRUCTURES)
def test_first_floating_tensor_of_a_structure_is_captured(plant, kind):
    wrap, unwrap = STRUCTURES[kind]
    bare = plant(Toy)
    model = plant(lambda: Toy(lambda net, seen: unwrap(net.layer(seen)), Wraps(wrap)))
    model.module.load_state_dict(bare.module.state_dict())
    ours, theirs = (maps(plain(each), noise(0, 16), "layer") for each in (model, bare))
    for name, heatmap in theirs.items():
        np.testing.assert_array_equal(ours[name], heatmap)


def test_layer_that_returns_no_floating_tensor_is_refused(plant):
    def say(net, seen):
        net.layer(seen)
        return seen

    model = plant(lambda: Toy(say, Wraps(lambda t: (t > 0, "words"))))
    with pytest.raises(FailedPrecondition, match='"layer" returns no floating-point tensor'):
        backward_toy(model)
    assert hook_count(model.module) == 0


def test_layer_that_an_image_does_not_run_through_is_refused(plant):
    model = plant(lambda: Toy(lambda net, seen: net.layer(seen) if seen.abs().max() > 0 else seen))
    for part in model.module.conv.parameters():
        part.zero_()
    assert model.info.layers["layer"].layout
    with pytest.raises(FailedPrecondition, match='"layer" did not run'):
        maps(model, noise(0, 16), "layer")


def test_layer_that_never_runs_is_refused(plant):
    model = plant(Toy)
    assert "unused" not in model.info.layers
    with pytest.raises(FailedPrecondition, match='"unused" did not run'):
        maps(model, noise(0, 16), "unused")


def test_score_that_does_not_depend_on_the_layer_has_a_gradient_of_zero(plant):
    model = plain(plant(Toy))
    model.module.middle = lambda net, seen: (net.layer(seen), seen)[1]
    (result,) = run(model, [Row(noise(0, 16), ClassTarget(1), (call("gradcam"),))], ["layer"])
    assert model.info.layers["layer"].layout
    assert result.zero_gradient == (True,)
    assert not result.maps[0][0].any()
