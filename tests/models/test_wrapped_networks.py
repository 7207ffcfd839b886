"""Networks inside DataParallel or torch.compile are explained as the plain network."""

import sys
from collections import OrderedDict
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

from camserve_server import models
from camserve_server.models import Preprocess, Source, spec_of_network
from methods.tools import maps, noise
from networks import changes, state_of

PREPROCESS = Preprocess((32, 32), (32, 32), "bilinear", (0.5,) * 3, (0.5,) * 3)


def network():
    """Return the plain network, always the same."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
    parts = {"stem": nn.Conv2d(3, 4, 3, 2, 1), "layer": layer, "last": nn.ReLU(), "pool": nn.AdaptiveAvgPool2d(1)}
    return nn.Sequential(OrderedDict(parts, flat=nn.Flatten(), head=nn.Linear(8, 5)))


def with_part(*path, wrap):
    """Return the network with one wrapped layer, as in the ImageNet example of PyTorch."""
    whole = network()
    parent = whole.get_submodule(".".join(path[:-1]))
    setattr(parent, path[-1], wrap(getattr(parent, path[-1])))
    return whole


def compiled_twice():
    whole = with_part("layer", "0", wrap=torch.compile)
    whole.layer = torch.compile(whole.layer)
    return whole


WRAPPED = {
    "DataParallel": lambda: nn.DataParallel(network()),
    "compiled": lambda: torch.compile(network()),
    "compiled in DataParallel": lambda: nn.DataParallel(torch.compile(network())),
    "part in DataParallel": lambda: with_part("layer", wrap=nn.DataParallel),
    "part compiled twice": compiled_twice,
}


def spec_of(module, *, shared=False):
    return spec_of_network("mine", Source(module, PREPROCESS), shared=shared)


@pytest.fixture(scope="module")
def plain():
    return models.load(spec_of(network()))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("wrapped", WRAPPED.values(), ids=WRAPPED)
def test_wrapped_network_has_the_layers_and_maps_of_the_plain_one(plain, wrapped, shared):
    module = wrapped()
    before = state_of(module)
    model = models.load(spec_of(module, shared=shared))

    assert list(model.info.layers) == list(plain.info.layers)
    assert (model.info.source, model.info.digest) == (plain.info.source, plain.info.digest)
    for layer in ("layer.0", "last"):
        found, expected = (maps(each, noise(0, 32), layer) for each in (model, plain))
        assert all(np.array_equal(found[method], expected[method]) for method in expected)
    assert changes(before, state_of(module)) == []


class Doubled(nn.Module):
    """Network around another one, whose attributes it passes on."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        children = self.__dict__["_modules"]
        return children[name] if name in children else getattr(children["inner"], name)

    def forward(self, images):
        return 2 * self.inner(images)


def test_module_around_a_compiled_network_is_kept():
    model, plain = (models.load(spec_of(Doubled(each))) for each in (torch.compile(network()), network()))

    assert list(model.info.layers) == list(plain.info.layers)
    assert "inner.last" in model.info.layers
    assert np.array_equal(*(maps(each, noise(0, 32), "inner.last")["gradcam"] for each in (model, plain)))


class Uncopyable(nn.Module):
    """Network that cannot be copied."""

    def __init__(self):
        super().__init__()
        self.inner = network()

    def forward(self, images):
        return self.inner(images)

    def __deepcopy__(self, memo):
        raise RuntimeError


def test_wrapped_network_that_cannot_be_copied_is_run_without_the_wrapper():
    module = Uncopyable()
    model, expected = (models.load(spec_of(each, shared=True)) for each in (torch.compile(module), module))

    assert model.module is module
    found, same = (maps(each, noise(0, 32), "inner.last")["gradcam"] for each in (model, expected))
    assert np.array_equal(found, same)


@pytest.mark.parametrize("wrapped", WRAPPED.values(), ids=WRAPPED)
def test_weights_of_a_wrapped_network_are_loaded(plain, wrapped, tmp_path, monkeypatch):
    other, factory = nn.DataParallel(network()), ModuleType("wrapping")
    nn.init.zeros_(other.module.head.weight)
    factory.make = lambda: other
    monkeypatch.setitem(sys.modules, "wrapping", factory)
    torch.save(wrapped().state_dict(), tmp_path / "w.pth")
    model = models.load(models.parse(f"wrapping:make?size=32&weights={tmp_path / 'w.pth'}"))

    assert list(model.info.layers) == list(plain.info.layers)
    assert model.info.digest == plain.info.digest
