"""The accelerated copy of a model gives the same results with less work."""

import copy
import logging
from functools import partial

import numpy as np
import pytest
import timm
import torch
from torch import nn
from torchvision.models import ConvNeXt, DenseNet, SwinTransformer, VisionTransformer
from torchvision.models.convnext import CNBlockConfig

from camserve_server import models
from camserve_server.core.errors import ConfigError
from camserve_server.engine import Engine
from camserve_server.engine.values import Row
from camserve_server.models import ModelSpec, digest, parse
from camserve_server.models.acceleration import onednn
from camserve_server.models.acceleration.attention import attend
from camserve_server.models.hooks import hook_count
from camserve_server.models.values import Intervention, Pass, Randomised
from camserve_server.targets.values import ClassTarget, RankTarget
from fake_gpu import Convolutions, FakeGpu, fake_gpu
from methods.tools import CAMS, Toy, call, error_ratio, exact, gap, inputs, noise, photo, plain, run, worst_error_ratio

FOLDED = {
    "timm:test_efficientnet": 13,  # all of them: timm's batch norms include their activation
    "timm:test_resnet": 15,
    "torchvision:mobilenet_v3_small": 34,
    "efficientnet_lite0": 49,
    "models.test_acceleration:small_densenet": 5,  # of 11: the others come after a concatenation
}
FAST = ("timm:test_efficientnet", "timm:test_resnet")


@pytest.fixture(
    scope="module", params=[*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in FOLDED if name not in FAST)]
)
def zoo(request):
    return models.load(parse(f"{request.param}?size=64&weights=none"))


def answers(model, layer=None, kind="cam"):
    rows = [Row(noise(seed, model.info.preprocess.size[0]), ClassTarget(3), METHODS) for seed in range(2)]
    if kind == "score":
        return [result.logits for result in run(model, rows, kind=kind)]
    return [heatmap for result in run(model, rows, [layer or model.info.default_layer]) for heatmap in result.maps[0]]


METHODS = tuple(map(call, CAMS))


def weights(model):
    """Return the weights that oneDNN receives instead of those of the copy."""
    return [weight for both in model.accelerated.onednn.weights.values() for weight in both]


def cosine(actual, expected):
    return (actual * expected).sum() / np.linalg.norm(actual) / np.linalg.norm(expected)


# --- float32 ---


def test_copy_gives_the_maps_and_logits_of_the_model(zoo):
    variants = zoo, plain(zoo), exact(zoo)
    for layer in sorted(zoo.accelerated.layers):
        if zoo.info.layers[layer].layout:
            assert max(map(error_ratio, *(answers(variant, layer) for variant in variants))) <= 1
    assert max(map(error_ratio, *(answers(variant, kind="score") for variant in variants))) <= 1


def test_every_batch_norm_after_a_convolution_is_folded(zoo):
    arch = zoo.info.source.removeprefix("embedded:")
    assert zoo.accelerated.folded_norms == FOLDED[arch]
    left = [module for module in zoo.accelerated.module.modules() if isinstance(module, nn.BatchNorm2d)]
    norms = [child for child in zoo.module.modules() if isinstance(child, nn.BatchNorm2d)]
    assert len(norms) - len(left) == FOLDED[arch]


def test_model_itself_is_not_changed(zoo):
    answers(zoo)
    assert digest(zoo.module) == zoo.info.digest
    assert hook_count(zoo.module) == 0


def test_unchanged_weights_are_shared(zoo):
    own = {id(parameter) for parameter in zoo.module.parameters()}
    copied = [weight for weight in (*zoo.accelerated.module.parameters(), *weights(zoo)) if id(weight) not in own]
    singles = sum(single is not several for single, several in zoo.accelerated.onednn.weights.values())
    folded = FOLDED[zoo.info.source.removeprefix("embedded:")]
    assert len({id(weight) for weight in copied}) - singles == 2 * folded


def test_earlier_layers_are_captured_in_the_model(zoo):
    before = next(iter(zoo.info.layers))
    assert zoo.for_pass(Pass(zoo.info.name, "cam", (64, 64), (before,))) is zoo
    assert zoo.for_pass(Pass(zoo.info.name, "cam", (64, 64), (before, zoo.info.default_layer))) is zoo
    assert zoo.for_pass(Pass(zoo.info.name, "saliency", (64, 64))) is zoo
    assert zoo.for_pass(Pass(zoo.info.name, "score", (64, 64))).module is zoo.accelerated.module


def test_pass_with_interventions_runs_in_the_model(zoo):
    change = Intervention(zoo.info.default_layer, "scale", factor=0.5)
    assert zoo.for_pass(Pass(zoo.info.name, "score", (64, 64), interventions=(change,))) is zoo


def test_pass_with_random_weights_runs_in_the_model(resnet):
    rows = [Row(noise(0, 64), ClassTarget(1), METHODS)]
    pass_ = Pass(resnet.info.name, "cam", (64, 64), ("layer4",), Randomised(99, 3))
    actual, expected = (Engine({resnet.info.name: variant}).run(pass_, rows) for variant in (resnet, plain(resnet)))
    for heatmap, reference in zip(actual[0].maps[0], expected[0].maps[0], strict=True):
        np.testing.assert_array_equal(heatmap, reference)


# --- batch norms that may not be folded ---


class Normed(nn.Module):
    """A convolution and a batch norm, and a function that calls them."""

    def __init__(self, way):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.last = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 5)
        self.way = way
        with torch.no_grad():
            for tensor in (self.bn.weight, self.bn.running_var):
                tensor.uniform_(0.5, 2)
            for tensor in (self.bn.bias, self.bn.running_mean):
                tensor.uniform_(-1, 1)

    def forward(self, image):
        return self.head(torch.tanh(self.last(self.way(self, image))).mean((2, 3)))


def also_used(net, image):
    features = net.conv(image)
    return net.bn(features) + features


def called_twice(net, image):
    return net.bn(net.conv(image)) + net.conv(image.flip(-1))


def normed_twice(net, image):
    return net.bn(torch.relu(net.bn(net.conv(image))))


def changed_between(net, image):
    return net.bn(net.conv(image).relu_())


def weight_used(net, image):
    return net.bn(net.conv(image)) * net.conv.weight.mean()


@pytest.mark.parametrize("way", [also_used, called_twice, normed_twice, changed_between, weight_used])
def test_batch_norm_is_not_folded_if_others_would_change(way, plant, monkeypatch):
    model = plant(lambda: Normed(way), precision="bfloat16")
    assert model.accelerated.folded_norms == 0
    monkeypatch.setattr(onednn, "is_supported", lambda *_: False)
    assert plant(lambda: Normed(way)).accelerated is None


def test_batch_norm_called_elsewhere_in_the_code_is_folded(plant):
    model = plant(lambda: Normed(lambda net, image: torch.relu(net.bn(net.conv(image)))))
    assert model.accelerated.folded_norms == 1
    assert worst_error_ratio(answers, model) <= 1


# --- half precision ---


def small_vit():
    return VisionTransformer(64, 16, num_layers=3, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=5)


def small_swin():
    return SwinTransformer([4, 4], 24, depths=[2, 2], num_heads=[2, 2], window_size=[4, 4], num_classes=5)


def small_densenet():
    return DenseNet(8, block_config=(2, 2), num_init_features=16, num_classes=5)


small_resnet = partial(timm.create_model, "test_resnet")


def small_convnext():
    return ConvNeXt([CNBlockConfig(24, 48, 1), CNBlockConfig(48, None, 2)], num_classes=5)


@pytest.mark.parametrize(
    "make",
    [
        small_vit,
        pytest.param(small_swin, marks=pytest.mark.slow),
        small_convnext,
        small_resnet,
        pytest.param(partial(timm.create_model, "test_vit", img_size=64), marks=pytest.mark.slow),
    ],
)
def test_half_precision_ends_at_the_default_layer(make, plant):
    """In a transformer, the linear maps over all tokens after the layer are in half precision too."""
    half, full = (plant(make, size=64, weights="none", precision=precision) for precision in ("bfloat16", "float32"))
    own = {id(parameter) for parameter in half.module.parameters()}
    for parameter in half.accelerated.module.parameters():
        assert (parameter.dtype == torch.float32) == (id(parameter) in own)
    modules = list(half.accelerated.module.modules())
    first = [module.weight for module in modules if isinstance(module, nn.Conv2d) and module.weight is not None]
    assert {parameter.dtype for parameter in (*first, *weights(half))} == {torch.bfloat16}
    assert [module for module in modules if isinstance(module, nn.Linear)][-1].weight.dtype == torch.float32
    full.module.load_state_dict(half.module.state_dict())
    assert min(map(cosine, answers(half), answers(plain(full)))) > 0.99


@pytest.mark.parametrize(
    "make",
    [
        small_vit,
        pytest.param(small_swin, marks=pytest.mark.slow),
        small_convnext,
        pytest.param(partial(timm.create_model, "test_vit", img_size=64), marks=pytest.mark.slow),
    ],
)
def test_float32_results_without_batch_norms_are_the_same(make, plant):
    model = plant(make, size=64, weights="none")
    assert len(model.accelerated.onednn.sites) > 1
    assert worst_error_ratio(answers, model) <= 1


def test_earlier_layers_run_under_autocast():
    half = models.load(parse("timm:test_resnet?size=64&weights=none&precision=bfloat16"))
    for actual, expected in zip(answers(half, "layer3"), answers(plain(half), "layer3"), strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert max(map(gap, answers(half), answers(plain(half)))) > 0


def inverse(net, features):
    """Compute an inverse, which torch does not have in half precision."""
    return net.layer(features * torch.linalg.inv(torch.eye(2, dtype=features.dtype))[0, 0])


def enormous(net, features):
    """Exceed the range of float16."""
    return net.layer(features * 1e6)


@pytest.mark.parametrize(("middle", "reason"), [(inverse, "RuntimeError: "), (enormous, "off by nan of its norm")])
def test_model_without_half_precision_runs_by_autocast_and_is_logged(middle, reason, plant, caplog):
    caplog.set_level(logging.INFO)
    model = plant(lambda: Toy(middle, nn.Conv2d(4, 4, 1)), precision="float16")
    assert model.accelerated is None
    assert "runs in float16 by autocast, which is slower" in caplog.text
    assert reason in caplog.text


@pytest.mark.slow
def test_bfloat16_maps_of_a_photo_resemble_float32_maps():
    """Measured for Grad-CAM, the smallest of three photos of 224 pixels: 0.9986."""
    half, full = (models.load(parse(f"efficientnet_lite0?size=112{more}")) for more in ("&precision=bfloat16", ""))
    rows = [Row(photo("coffee", 112), RankTarget(0), METHODS)]
    ((actual,), (expected,)) = (run(variant, rows, [full.info.default_layer]) for variant in (half, full))
    assert actual.target == expected.target
    assert min(map(cosine, actual.maps[0], expected.maps[0])) > 0.997


def test_token_linears_after_the_layer_are_half_and_return_float32(plant):
    model = plant(small_vit, size=64, weights="none", precision="bfloat16")
    last = model.accelerated.module.encoder.layers.encoder_layer_2
    assert last.mlp[0].weight.dtype == last.self_attention.in_proj_weight.dtype == torch.bfloat16
    assert last.ln_2.weight.dtype == model.accelerated.module.heads.head.weight.dtype == torch.float32
    tokens = torch.randn(2, 17, 32)
    assert last.mlp(tokens).dtype == last.self_attention(tokens, tokens, tokens, need_weights=False)[0].dtype
    assert last.mlp(tokens).dtype == torch.float32


# --- attention after the layer ---


@pytest.fixture
def attention():
    torch.manual_seed(0)
    module = nn.MultiheadAttention(32, 4, batch_first=True).eval().requires_grad_(requires_grad=False)
    with torch.no_grad():
        module.in_proj_bias.normal_()
    return module


def backward(attend, tokens):
    tokens = tokens.clone().requires_grad_()
    output, _ = attend(tokens, tokens, tokens, need_weights=False)
    (gradient,) = torch.autograd.grad((output**2).sum(), tokens)
    return output.detach(), gradient


def test_self_attention_equals_that_of_the_module(attention):
    tokens = torch.randn(3, 17, 32)
    actual = backward(partial(attend, attention, None), tokens)
    plain, truth = backward(attention, tokens), backward(copy.deepcopy(attention).double(), tokens.double())
    assert max(map(error_ratio, actual, plain, truth)) <= 1


def test_attention_in_half_precision_is_close_to_float32(attention):
    tokens = torch.randn(3, 17, 32)
    expected = backward(attention, tokens)
    half = copy.deepcopy(attention).bfloat16()
    for actual, other in zip(backward(partial(attend, half, None), tokens), expected, strict=True):
        assert actual.dtype == torch.float32
        assert cosine(actual.numpy(), other.numpy()) > 0.999


@pytest.mark.parametrize("options", [{"need_weights": True}, {"attn_mask": torch.zeros(5, 5)}, {}])
def test_other_calls_of_attention_run_the_module(attention, options):
    tokens, other = torch.randn(2, 5, 32), torch.randn(2, 5, 32)
    keywords = {"need_weights": False} | options
    arguments = (tokens, tokens, tokens) if options else (tokens, other, other)
    calls = []

    def otherwise(*args, **kwargs):
        calls.append(kwargs)
        return attention(*args, **kwargs)

    output, _ = attend(attention, otherwise, *arguments, **keywords)
    assert calls == [keywords]
    torch.testing.assert_close(output, attention(*arguments, **keywords)[0], rtol=0, atol=0)


def test_only_attention_after_the_layer_is_replaced(plant):
    model = plant(small_vit, size=64, weights="none")
    changed = {name for name, module in model.accelerated.module.named_modules() if "forward" in vars(module)}
    assert {name for name in changed if "attention" in name} == {"encoder.layers.encoder_layer_2.self_attention"}
    assert not any("forward" in vars(child) for child in model.module.modules())


# --- the switch ---


SWITCHED_OFF = ("resnet", small_resnet), ("convnext", small_convnext), ("vit", small_vit)
KINDS = {"cam": CAMS, "curvature": ("shapleycam",), "score": (), "saliency": ("saliency",)}


@pytest.fixture(params=[make for _, make in SWITCHED_OFF], ids=[name for name, _ in SWITCHED_OFF])
def unaccelerated(request, plant):
    """Return a model that runs without acceleration, and the module that its factory returned."""
    created = []

    def factory():
        torch.manual_seed(0)
        created.append(request.param())
        return created[0]

    return plant(factory, size=64, weights="none", accelerate=False), created[0]


@pytest.mark.parametrize("kind", KINDS)
def test_without_acceleration_the_loaded_module_runs_unchanged(unaccelerated, kind, monkeypatch):
    model, module = unaccelerated
    monkeypatch.setattr(onednn, "_function", lambda name: pytest.fail(f"oneDNN's {name} was called"))
    layers = [model.info.default_layer] if kind in ("cam", "curvature") else []
    rows = [Row(noise(0, 64), ClassTarget(3), tuple(map(call, KINDS[kind])), copy=0 if kind == "saliency" else None)]
    with Convolutions() as seen:
        run(model, rows, layers, kind)

    assert model.accelerated is None
    assert model.for_pass(Pass(model.info.name, kind, (64, 64), tuple(layers))).module is model.module is module
    assert not any("forward" in vars(child) for child in module.modules())
    own = {id(parameter) for parameter in module.parameters()}
    assert seen.inputs
    for image, weight in seen.inputs:
        assert id(weight) in own
        assert weight.is_contiguous()
        assert image.dtype == weight.dtype == torch.float32
    assert seen.images.is_contiguous()
    assert not model.info.channels_last


def gradcam_oracle(model, module, dtype):
    """Compute the logits and the Grad-CAM map of the plain module by autograd."""
    captured = []

    def keep(_layer, _args, output):
        captured.append(output.detach().requires_grad_())
        return captured[0].clone()

    module, layer = copy.deepcopy(module).to(dtype), model.info.layers[model.info.default_layer].layout
    with module.get_submodule(model.info.default_layer).register_forward_hook(keep):
        logits = module(inputs(model, noise(0, 64)).contiguous().to(dtype))
    (gradient,) = torch.autograd.grad(logits[0, 3], captured)
    activation, gradient = (grid(part.detach(), layer) for part in (captured[0], gradient))
    return logits.detach()[0].numpy(), (gradient.mean((1, 2), keepdim=True) * activation).sum(0).numpy()


def grid(values, layout):
    """Return the values [C,h,w] of a layer whose output is [1,C,h,w] or tokens [1,N,C]."""
    if layout.axes == "tokens":
        return values[0, layout.prefix :].unflatten(0, (layout.height, layout.width)).permute(2, 0, 1)
    return values[0]


def test_without_acceleration_results_equal_the_plain_module(unaccelerated):
    model, module = unaccelerated
    rows = [Row(noise(0, 64), ClassTarget(3), (call("gradcam"),))]
    (cam,) = run(model, rows, [model.info.default_layer])
    (scored,) = run(model, rows, kind="score")
    plain, truth = (gradcam_oracle(model, module, dtype) for dtype in (torch.float32, torch.float64))

    with torch.no_grad():
        np.testing.assert_array_equal(scored.logits, module(inputs(model, noise(0, 64)).contiguous())[0])
    # With a capture the rest of the model runs in one memory format, whose kernels round differently.
    assert max(map(error_ratio, (cam.logits, cam.maps[0][0]), plain, truth)) <= 1


def test_without_acceleration_half_precision_is_autocast(plant):
    created = []
    model = plant(
        lambda: created.append(small_resnet()) or created[0],
        size=64,
        weights="none",
        precision="bfloat16",
        accelerate=False,
    )
    (outputs,) = run(model, [Row(noise(0, 64), ClassTarget(3), ())], kind="score")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = created[0](inputs(model, noise(0, 64)).contiguous())

    assert {parameter.dtype for parameter in model.module.parameters()} == {torch.float32}
    np.testing.assert_array_equal(outputs.logits, expected[0].float().numpy())


def test_without_acceleration_no_memory_layout_is_timed(monkeypatch, caplog):
    monkeypatch.setattr(FakeGpu, "measure", lambda *_: pytest.fail("timed"))
    caplog.set_level(logging.INFO)
    with fake_gpu():
        model = models.load(parse("timm:test_resnet?weights=none&size=64&accelerate=false"))

    assert not model.info.channels_last
    assert "model test_resnet runs without acceleration (accelerate=false)" in caplog.text
    assert "could not be timed" not in caplog.text


def test_copies_of_a_model_without_acceleration_have_none():
    model = models.load(parse("timm:test_resnet?weights=none&size=64&accelerate=false"))
    for other in (model.copy_to("cpu"), model.replica()):
        assert other.accelerated is None
        assert not other.info.channels_last
        assert all(map(np.array_equal, answers(other), answers(model)))


def test_option_accelerate_is_true_or_false():
    assert parse("torchvision:resnet18").accelerate
    assert parse("torchvision:resnet18?accelerate=true&compile=true").compile
    assert not parse("torchvision:resnet18?accelerate=false").accelerate
    with pytest.raises(ConfigError, match='accelerate must be true or false, not "no"'):
        parse("torchvision:resnet18?accelerate=no")


def test_compile_without_acceleration_is_refused():
    refused = pytest.raises(ConfigError, match=r"model net \(torchvision:resnet18\): compile=true and accelerate=false")
    with refused:
        parse("net=torchvision:resnet18?compile=true&accelerate=false")
    with refused:
        ModelSpec("net", "torchvision", "resnet18", compile=True, accelerate=False)
