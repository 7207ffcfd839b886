"""A model and its twin: two batches at once, with the weights of one model."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from camserve_server import models
from camserve_server.engine.values import Row
from camserve_server.models import parse, randomise
from camserve_server.models.values import Pass, Randomised
from camserve_server.targets.values import ClassTarget
from camserve_server.workers import InProcessWorker, Setup
from methods.tools import CAMS, Toy, call, noise, run

MODELS = (
    "efficientnet_lite0?weights=none",
    "torchvision:resnet18?weights=none&precision=bfloat16",
    "torchvision:googlenet?weights=none",
    "timm:vit_tiny_patch16_224?weights=none&precision=bfloat16",
    "timm:swin_tiny_patch4_window7_224?weights=none&size=64",
    "timm:convnext_atto?weights=none",
)
WAYS = {
    "cam": tuple(map(call, CAMS)),
    "saliency": (call("saliency"), call("input_x_gradient")),
}


@pytest.fixture(scope="module", params=MODELS)
def both(request):
    form = request.param if "size" in request.param else f"{request.param}&size=64"
    model = models.load(parse(form))
    replica = model.replica()
    assert replica is not None
    return model, replica


def answers(model, kind, seed=0, randomised=None):
    """Every number that comes of two images, in a row."""
    rows = [Row(noise(seed + n, model.info.preprocess.size[0]), ClassTarget(3), WAYS[kind]) for n in range(2)]
    layers = [model.info.default_layer] if kind == "cam" else []
    found = run(model, rows, layers, kind, randomised)
    return np.concatenate([np.concatenate([one.logits, *(part.ravel() for part in one.maps[0])]) for one in found])


def modules(model):
    both = (model.module, model.accelerated and model.accelerated.module)
    return {id(part) for whole in both if whole for part in whole.modules()}


@pytest.mark.parametrize("kind", WAYS)
def test_a_twin_answers_as_the_model_does_to_the_bit(both, kind):
    model, replica = both

    assert np.array_equal(answers(model, kind), answers(replica, kind), equal_nan=True)


def test_a_twin_has_the_weights_of_the_model_and_none_of_its_modules(both):
    model, replica = both
    weights = [{one.data_ptr() for one in each.module.parameters()} for each in both]

    assert weights[0] == weights[1]
    assert not modules(model) & modules(replica)


def test_batches_of_both_at_once_are_answered_as_one_after_the_other(both):
    alone = {(kind, seed): answers(both[0], kind, seed) for kind in WAYS for seed in range(4)}
    begin = threading.Barrier(2)

    def all_of(model, asked):
        begin.wait()
        return {one: answers(model, *one) for one in asked}

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(all_of, both, (list(alone), list(reversed(alone)))))

    for one, expected in alone.items():
        assert all(np.array_equal(each[one], expected, equal_nan=True) for each in found)


def test_weights_that_are_random_in_one_are_not_in_the_other(both):
    model, replica = both
    expected, during = answers(model, "cam"), []
    begun, over = threading.Event(), threading.Event()

    def hold(*_):
        begun.set()
        assert over.wait(10)

    watched = replica.module.register_forward_pre_hook(hold)
    with ThreadPoolExecutor(1) as pool, watched:
        changed = pool.submit(answers, replica, "cam", 0, Randomised(100))
        assert begun.wait(10)
        during.append(answers(model, "cam"))
        over.set()

    assert np.array_equal(during[0], expected, equal_nan=True)
    assert not np.array_equal(changed.result(), expected, equal_nan=True)
    assert np.array_equal(answers(replica, "cam"), expected, equal_nan=True)


def test_random_weights_of_the_twin_leave_the_models_accelerated_copy_alone(both):
    """What oneDNN is given in both copies are the model's own parameters: so these must not be exchanged."""
    model, replica = both
    expected = answers(model, "cam"), answers(replica, "cam")
    with randomise.randomised(replica, Randomised(100)):
        assert np.array_equal(answers(model, "cam"), expected[0], equal_nan=True)

    local = InProcessWorker(Setup("cpu", 2, partitioned=True))
    local._models["it"], local._replicas["it"] = model, replica
    seen = []
    for place, lane in enumerate(local._lanes):
        lane.run = lambda _pass, _rows, place=place: seen.append(place)
    plain = Pass("it", "cam", (64, 64))
    for pass_ in (plain, replace(plain, randomised=Randomised(1))):
        for half in (None, 0, 1):
            local.run(pass_, [], half)
    assert seen == [0, 0, 1, 1, 1, 1]


def closed():
    model = Toy()
    convolution = model.conv
    model.middle = lambda net, seen: convolution(net.unused(convolution.weight.mean() + seen[:, :3]))
    return model


def locked():
    model = Toy()
    model.lock = threading.Lock()
    return model


def listened():
    model = Toy()
    model.relu.register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (closed, "its copy gives other outputs"),
        (locked, "TypeError: cannot pickle"),
        (listened, "its own hooks may not support two batches at once"),
    ],
)
def test_a_model_that_cannot_have_a_twin_has_none_and_the_log_says_why(make, reason, plant, caplog):
    with caplog.at_level(logging.INFO):
        assert plant(make).replica() is None

    assert f"model planted runs one batch at a time: {reason}" in caplog.text
