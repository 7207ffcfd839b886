"""Models and photos that several tests explain."""

import os
import sys
from types import ModuleType

import pytest
import torch

from camserve_server import models
from camserve_server.models import ModelSpec
from methods.tools import Toy, photo


@pytest.fixture(autouse=True, scope="module")
def few_threads():
    # Two threads for operations as small as these wait for each other more than they work.
    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def lite0():
    """The embedded model with its ImageNet weights."""
    return models.load(models.parse("efficientnet_lite0"))


@pytest.fixture(scope="session")
def resnet():
    """A model with random weights, for small images."""
    return models.load(models.parse("torchvision:resnet18?weights=none&size=64"))


@pytest.fixture(scope="session")
def photos():
    """Photos by name, each uint8 [224,224,3]."""
    return {name: photo(name) for name in ("chelsea", "coffee", "astronaut", "rocket", "china", "flower")}


@pytest.fixture
def plant(monkeypatch):
    """Load a model from a factory, as from a user's own module."""

    def load(factory, size=16, **options):
        module = ModuleType("planted")
        module.make = factory
        monkeypatch.setitem(sys.modules, "planted", module)
        return models.load(ModelSpec("planted", "planted", "make", size=size, **options))

    return load


@pytest.fixture
def smooth(plant):
    """A model without kinks.

    Where there is a ReLU, rounding may move a value across zero, and the gradient jumps: by 2 % of the largest value
    between float32 and float64 for noisy photos in the embedded model.
    """
    return plant(lambda: Toy(lambda net, seen: torch.tanh(net.layer(seen))))
