"""Unusual networks have the same maps and predictions through a server as in process, by every method, to the bit."""

import contextlib

import pytest
import torch
from torch import nn

import as_written
import camserve
import camserve_server
from as_written import PREPROCESS, changed, plain
from camserve_server import Explainer
from camserve_server.models import Source
from models.test_as_written import ALIKE, OPTIONS, check_equal, maps
from models.test_independence import DEPENDENT
from models.test_probabilities import Sigmoid, Softmax
from models.test_unusual_grids import Deep, Reader, Square, seeded
from models.test_without_gradient import FrozenStem, Runtime, mlp, scripted


def with_zero_head():
    network = plain()
    nn.init.zeros_(network.head.weight)
    return network


MAKERS = {
    **{name: make for name, make in as_written.MAKERS.items() if name not in ALIKE},
    **{f"dependent_{name}": make for name, (make, _) in DEPENDENT.items()},
    "runtime": lambda: changed(Runtime),
    "frozen_stem": lambda: changed(FrozenStem),
    "softmax": lambda: changed(Softmax),
    "sigmoid": lambda: changed(Sigmoid),
    "perceptron": mlp,
    "script": lambda: scripted("stem"),
    "double": lambda: plain().double(),
    "zero_head": with_zero_head,
    "one_cell": lambda: seeded(Deep),
    "square": lambda: seeded(Square),
    "recurrent": lambda: seeded(Reader, nn.GRU),
}

ROW_BY_ROW = {"max_batch_rows": 1}
"""The rounding of a matrix product depends on the size of the batch, and this on when requests come."""


def __getattr__(name):
    """Return the factory of a network, for the spec `models.test_kinds_served:NAME`."""
    if name not in MAKERS:
        raise AttributeError(name)
    return lambda: Source(MAKERS[name](), PREPROCESS)


def maps_of_all(explainer):
    """Return what a model says of the image by every method that it offers."""
    found = {}
    for method in explainer.methods():
        with contextlib.suppress(camserve.FailedPrecondition):
            some, predictions = maps(explainer, [method.name])
            found |= some
    return found, predictions


@pytest.fixture(scope="module")
def client():
    with contextlib.ExitStack() as stack:
        specs = [f"{name}=models.test_kinds_served:{name}?accelerate=false" for name in MAKERS]
        threads = torch.get_num_threads()  # those of `Explainer`: the rounding of small layers depends on it
        address = stack.enter_context(camserve_server.running(specs, threads=threads, **ROW_BY_ROW))
        yield stack.enter_context(camserve.Client(address))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit")  # deprecated
@pytest.mark.parametrize("name", MAKERS)
def test_network_is_served_as_it_is_explained_in_process(name, client):
    with Explainer(MAKERS[name](), accelerate=False, settings=ROW_BY_ROW, **OPTIONS) as explainer:
        expected = maps_of_all(explainer)
    methods = [*dict.fromkeys(method for method, _class, _layer in expected[0])]
    assert len(methods) >= 5
    check_equal(maps(client, methods, model=name), expected)
