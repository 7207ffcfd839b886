"""Random weights on a GPU are drawn once per seed, equal those on a CPU, and are released."""

import gc
import weakref

import pytest
import torch

from camserve_server import models
from camserve_server.engine import Engine
from camserve_server.engine.values import Row
from camserve_server.methods.values import MethodCall
from camserve_server.models.randomise import random_weights, stack
from camserve_server.models.values import Pass, Randomised
from camserve_server.targets.values import ClassTarget
from fake_gpu import FakeGpu, fake_gpu
from methods.tools import noise

NET = "timm:test_resnet?weights=none&size=64&accelerate=false"
ALL = 1000
"""More modules than any model has."""


class Counted(FakeGpu):
    """A GPU that counts uploads."""

    uploads = 0

    def upload(self, tensor):
        type(self).uploads += 1
        return super().upload(tensor)


@pytest.fixture
def gpu():
    Counted.uploads = 0
    with fake_gpu(Counted):
        yield Counted


@pytest.fixture
def draws(monkeypatch):
    """Record the calls of `torch.randn`: one per drawn parameter."""
    drawn, randn = [], torch.randn

    def counting(*args, **options):
        drawn.append(args)
        return randn(*args, **options)

    monkeypatch.setattr(torch, "randn", counting)
    return drawn


def loaded():
    return models.load(models.parse(NET))


def weights(model, how):
    with random_weights(model, how):
        return {name: parameter.detach().clone() for name, parameter in model.module.named_parameters()}


def test_gpu_has_the_random_weights_of_a_cpu_in_every_batch():
    how = Randomised(ALL, seed=4)
    expected = weights(loaded(), how)
    with fake_gpu():
        model = loaded()
        results = [weights(model, how) for _ in range(2)]

    for drawn in results:
        assert drawn.keys() == expected.keys()
        assert all(torch.equal(drawn[name], weight) for name, weight in expected.items())


def test_second_batch_draws_and_uploads_nothing(gpu, draws):
    model = loaded()
    draws.clear()
    before, parameters = gpu.uploads, len(list(model.module.parameters()))
    weights(model, Randomised(ALL))
    first = len(draws), gpu.uploads - before
    weights(model, Randomised(ALL))

    assert first == (parameters, parameters)
    assert (len(draws), gpu.uploads - before) == first


@pytest.mark.usefixtures("gpu")
def test_next_stage_of_a_cascade_draws_only_new_weights(draws):
    model = loaded()
    draws.clear()
    for modules in range(1, len(stack(model.info)) + 1):
        weights(model, Randomised(modules))

    assert len(draws) == len(list(model.module.parameters()))


def copy_weights(model):
    return [weakref.ref(weight) for known in model.random_weights.values() for weight in known.values()]


@pytest.mark.usefixtures("gpu")
def test_weights_of_the_previous_seed_are_released():
    model = loaded()
    weights(model, Randomised(ALL, seed=1))
    first = copy_weights(model)
    drawn = weights(model, Randomised(1, seed=2))

    assert first
    assert all(weight() is None for weight in first)
    assert torch.equal(drawn["fc.weight"], weights(loaded(), Randomised(1, seed=2))["fc.weight"])


@pytest.mark.usefixtures("gpu")
def test_weights_are_released_with_their_model():
    model = loaded()
    weights(model, Randomised(ALL))
    drawn = copy_weights(model)
    del model
    gc.collect()

    assert drawn
    assert all(weight() is None for weight in drawn)


@pytest.mark.usefixtures("gpu")
def test_models_own_weights_are_restored_and_cached_ones_unchanged():
    model, how = loaded(), Randomised(ALL)
    pass_ = Pass(model.info.name, "cam", (64, 64), (model.info.default_layer,), how)
    rows = [Row(noise(0, 64), ClassTarget(2), (MethodCall("gradcam"),))]
    engine = Engine({model.info.name: model})
    heatmaps = [engine.run(pass_, rows)[0].maps[0][0] for _ in range(2)]

    assert models.digest(model.module) == model.info.digest
    assert (heatmaps[0] == heatmaps[1]).all()


def test_cpu_draws_in_every_batch_and_keeps_nothing(draws):
    model = loaded()
    draws.clear()
    for _ in range(2):
        weights(model, Randomised(1))

    assert len(draws) == 2 * len(list(model.module.fc.parameters()))
    assert model.random_weights == {}
