"""Layer inspection: statistics of every layer equal those of plain autograd, and no measured tensor is kept."""

import math
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from camserve_server import models
from camserve_server.engine import batch, inspection
from camserve_server.engine.values import Row
from camserve_server.models.hooks import hook_count, observe_layers
from camserve_server.targets.values import ClassTarget, ContrastTarget
from methods.tools import FACTOR, FLOOR, Toy, doubled, error_ratio, inputs, noise, run
from support import loaded

INDEX = 1
FIELDS = ("mean", "std", "minimum", "maximum", "zeros", "norm")

ZOO = ("timm:test_resnet?weights=none&size=64", "timm:test_vit?weights=none&size=64")
ZOO += (pytest.param("narrow=methods.narrow:densenet121?size=64", marks=pytest.mark.slow),)


def oracle(model, image, index):
    """Return each layer's output and gradient by plain autograd. Outputs are kept and their copies passed on."""
    kept = {}

    def keep(name):
        def hook(_module, _args, output):
            first, *rest = output if isinstance(output, tuple) else (output,)
            kept[name] = first.clone()
            return (kept[name].clone(), *rest) if isinstance(output, tuple) else kept[name].clone()

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in model.named_modules() if name]
    score = model(image.clone().requires_grad_().clone())[0, index]
    for handle in handles:
        handle.remove()
    gradients = torch.autograd.grad(score, list(kept.values()), allow_unused=True)
    return {
        name: (out.detach(), torch.zeros_like(out) if gradient is None else gradient)
        for (name, out), gradient in zip(kept.items(), gradients, strict=True)
    }


def described(tensor):
    """Compute Statistics with numpy, in float64."""
    values = tensor.detach().numpy().astype(np.float64).ravel()
    finite = values[np.isfinite(values)]
    return {
        "mean": finite.mean(),
        "std": finite.std(),
        "minimum": finite.min(),
        "maximum": finite.max(),
        "zeros": (values == 0).mean(),
        "norm": np.sqrt((finite**2).sum()),
    }


def apart(statistics, tensor):
    """Return the largest difference of a field. Mean and deviation count as shares of the root mean square."""
    expected = described(tensor)
    norm, greatest = expected["norm"] or 1.0, float(tensor.abs().max()) or 1.0
    scales = dict.fromkeys(("mean", "std"), norm / math.sqrt(tensor.numel()))
    scales |= {"minimum": greatest, "maximum": greatest, "zeros": 1.0, "norm": norm}
    return max(abs(getattr(statistics, name) - expected[name]) / scales[name] for name in FIELDS)


def error(statistics, plain, truth):
    """Return the distance of statistics from those of a tensor in float64, as a share of the limit by plain float32."""
    return apart(statistics, truth) / (FACTOR * apart(SimpleNamespace(**described(plain)), truth) + FLOOR)


@pytest.fixture(scope="module", params=ZOO)
def zoo(request):
    return loaded(request.param)


@pytest.fixture(scope="module")
def small():
    return loaded(ZOO[0])


def same_side(model):
    """Readings and the oracle's tensors for an image in which rounding moves no value across zero in a ReLU.

    Where it has moved one, the gradients before it jump: by 5e-3 for one value in 8192, in a block of densenet121.
    """
    for seed in range(8):
        picture = noise(seed, 64)
        (result,) = run(model, [Row(picture, ClassTarget(INDEX))], kind="inspect")
        expected = oracle(model.module, inputs(model, picture), INDEX)
        pairs = zip(model.info.layers, result.readings, strict=True)
        if all(each.activation.zeros == described(expected[name][0])["zeros"] for name, each in pairs):
            return picture, result, expected
    raise AssertionError


def test_every_layers_statistics_equal_those_of_plain_autograd(zoo):
    picture, result, expected = same_side(zoo)
    truth = oracle(doubled(zoo.module), inputs(zoo, picture).double(), INDEX)

    assert set(zoo.info.layers) == set(expected)
    for name, reading in zip(zoo.info.layers, result.readings, strict=True):
        activation, gradient = expected[name]
        assert reading.shape == activation.shape == zoo.info.layers[name].shape
        assert reading.elements == activation.numel()
        assert error(reading.activation, activation, truth[name][0]) <= 1, name
        assert error(reading.gradient, gradient, truth[name][1]) <= 1, name
        assert reading.activation.non_finite == reading.gradient.non_finite == 0


def test_named_layers_are_measured_alone_with_the_same_results(zoo):
    picture = noise(3, 64)
    (whole,) = run(zoo, [Row(picture, ClassTarget(INDEX))], kind="inspect")
    every = dict(zip(zoo.info.layers, whole.readings, strict=True))
    some = list(zoo.info.layers)[:: -(len(every) // 5)]
    (named,) = run(zoo, [Row(picture, ClassTarget(INDEX))], some, kind="inspect")

    assert len(named.readings) == len(some)
    for name, reading in zip(some, named.readings, strict=True):
        for side in ("activation", "gradient"):
            one, other = getattr(reading, side), getattr(every[name], side)
            assert one.norm == pytest.approx(other.norm, rel=1e-5)
            assert one.zeros == pytest.approx(other.zeros, abs=1e-9)


def test_inspection_does_not_change_the_model_or_its_prediction(zoo):
    picture = noise(3, 64)
    (result,) = run(zoo, [Row(picture, ClassTarget(INDEX))], kind="inspect")
    with torch.no_grad():
        plain = zoo.module(inputs(zoo, picture))[0]
        truth = doubled(zoo.module)(inputs(zoo, picture).double())[0]

    assert error_ratio(result.logits, plain, truth) <= 1
    assert hook_count(zoo.module) == 0
    assert models.digest(zoo.module) == zoo.info.digest
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in zoo.module.parameters())


def test_rows_of_one_batch_are_measured_independently(small):
    rows = [Row(noise(0, 64), ClassTarget(1)), Row(noise(1, 64), ContrastTarget(2, 3))]
    together = run(small, rows, kind="inspect")

    assert [each.readings for each in together] == [run(small, [row], kind="inspect")[0].readings for row in rows]
    assert together[0].readings != together[1].readings


def test_inspection_takes_one_forward_and_one_backward_pass(resnet, monkeypatch):
    passes = []
    monkeypatch.setattr(inspection, "forward", lambda *args: passes.append("forward") or batch.forward(*args))
    backward = torch.autograd.backward
    monkeypatch.setattr(torch.autograd, "backward", lambda *a, **k: passes.append("backward") or backward(*a, **k))
    run(resnet, [Row(noise(0, 64), ClassTarget(1))], kind="inspect")

    assert passes == ["forward", "backward"]


# ------------------------------------------------------------------------------------------------------------- memory


class Chain(nn.Module):
    """Forty layers of which autograd keeps no tensor."""

    class Step(nn.Module):
        def forward(self, seen):
            return seen * 0.99

    def __init__(self):
        super().__init__()
        self.steps = nn.Sequential(*(self.Step() for _ in range(40)))
        self.head = nn.Linear(3, 5)

    def forward(self, image):
        return self.head(self.steps(image).mean((2, 3)))


@pytest.fixture
def living(monkeypatch):
    """Count, at each measurement, the earlier measured tensors that are still alive."""
    seen, counts, plain = [], [], inspection.measure

    def measure(values):
        counts.append(sum(each() is not None for each in seen))
        seen.append(weakref.ref(values.untyped_storage()))
        return plain(values)

    monkeypatch.setattr(inspection, "measure", measure)
    return counts


def test_measured_tensors_are_released_layer_by_layer(plant, living):
    model = plant(Chain)
    run(model, [Row(noise(0, 16), ClassTarget(1))], kind="inspect")

    assert len(living) == 2 * 42  # forty steps, their Sequential and the head; forward and back
    assert max(living) <= 3


def test_tensor_count_detects_kept_tensors(plant, living, monkeypatch):
    model, kept = plant(Chain), []

    def hoard(layers, glance):
        return observe_layers(layers, lambda name, output: kept.append(output) or glance(name, output))

    monkeypatch.setattr(inspection, "observe_layers", hoard)
    run(model, [Row(noise(0, 16), ClassTarget(1))], kind="inspect")

    assert max(living) >= 40


# ------------------------------------------------------------------------------------------------- what layers may do


def test_last_of_several_calls_is_measured(resnet):
    names = ["layer1.0.relu", "layer1.0"]  # the first is called twice, and ends the second
    (result,) = run(resnet, [Row(noise(0, 64), ClassTarget(1))], names, kind="inspect")

    assert resnet.info.layers["layer1.0.relu"].calls == 2
    assert result.readings[0] == result.readings[1]


def test_layer_that_the_score_does_not_depend_on_has_a_gradient_of_zeros(plant):
    model = plant(lambda: Toy(lambda net, seen: (net.layer(seen), net.relu(seen.clone()))[0]))
    (result,) = run(model, [Row(noise(0, 16), ClassTarget(1))], ["layer", "relu"], kind="inspect")
    used, unused = result.readings

    assert used.gradient.norm > 0
    assert unused.gradient == inspection.ALL_ZERO
    assert unused.activation.norm > 0


class Odd(nn.Module):
    """Module that returns the output of a function together with the tensor for the next layer."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, seen):
        return self.make(seen)


@pytest.mark.parametrize(
    "make", [lambda seen: seen.long(), lambda _: None, lambda seen: seen[:, :0], lambda _: {"words": "none"}]
)
def test_layer_without_floating_outputs_has_no_reading(plant, make):
    model = plant(lambda: Toy(lambda net, seen: (seen, net.layer(seen))[0], Odd(make)))
    (result,) = run(model, [Row(noise(0, 16), ClassTarget(1))], kind="inspect")
    readings = dict(zip(model.info.layers, result.readings, strict=True))

    assert readings["layer"] is None
    assert readings["conv"].gradient.norm > 0


def test_non_finite_values_are_counted_and_excluded(plant):
    def spoil(seen):
        spoilt = seen.clone()
        spoilt[0, 0, 0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
        return spoilt

    model = plant(lambda: Toy(lambda net, seen: (seen, net.layer(seen))[0], Odd(spoil)))
    (result,) = run(model, [Row(noise(0, 16), ClassTarget(1))], ["conv", "layer"], kind="inspect")
    clean, spoilt = (reading.activation for reading in result.readings)

    assert (clean.non_finite, spoilt.non_finite) == (0, 3)
    assert spoilt.maximum <= clean.maximum
    assert 0.9 * clean.norm < spoilt.norm < clean.norm


@pytest.mark.parametrize(
    "values",
    [
        [1.0, 2.0, 0.0, -3.0],
        [0.0, math.nan, 4.0, 0.0, math.inf, -math.inf],
        [5.0],
        [1e30, -1e30, 1e30],
        [1e-30, 2e-30],
        [1000.001, 1000.002, 1000.003],
    ],
)
def test_statistics_are_those_of_numpy_in_float64(values):
    tensor = torch.tensor(values)
    result, expected = inspection.measure(tensor), described(tensor)

    for name in FIELDS:
        assert getattr(result, name) == pytest.approx(expected[name], rel=1e-6, abs=1e-12 * abs(expected["norm"])), name
    assert result.non_finite == len(values) - np.isfinite(values).sum()


def test_tensor_without_one_finite_value_has_no_mean_but_a_count():
    result = inspection.measure(torch.tensor([math.nan, math.inf]))

    assert (result.non_finite, result.zeros) == (2, 0.0)
    assert all(math.isnan(getattr(result, name)) for name in ("mean", "std", "minimum", "maximum", "norm"))


def test_half_precision_is_measured_in_float32():
    result = inspection.measure(torch.full((1000,), 300.0, dtype=torch.bfloat16))

    assert result.norm == pytest.approx(300 * math.sqrt(1000), rel=1e-9)


def test_error_in_the_forward_pass_leaves_no_hook(resnet):
    with (
        pytest.raises(RuntimeError, match="channels"),
        observe_layers({"layer1": resnet.module.layer1}, lambda *_: print),
    ):
        resnet.module(torch.zeros(1, 5, 64, 64))

    assert hook_count(resnet.module) == 0


# ----------------------------------------------------------------------------------------------------------- features


@pytest.mark.parametrize("layer", ["layer1", "layer2.0.bn1", "layer4"])
def test_features_are_the_layers_output_and_weights_its_mean_gradient(small, layer):
    rows = [Row(noise(0, 64), ClassTarget(each)) for each in (1, 2)] + [Row(noise(1, 64), ClassTarget(1))]
    results, in_float64 = run(small, rows, [layer], kind="features"), doubled(small.module)

    for row, result in zip(rows, results, strict=True):
        image = inputs(small, row.image)
        plain, truth = (
            oracle(module, image.to(precision), row.target.index)[layer]
            for module, precision in ((small.module, torch.float32), (in_float64, torch.float64))
        )
        assert error_ratio(result.features[0], plain[0][0], truth[0][0]) <= 1
        assert error_ratio(result.maps[0][0], *(gradient[0].mean((1, 2)) for _, gradient in (plain, truth))) <= 1
