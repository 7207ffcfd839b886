"""A model and its replica run two batches at once, with shared weights."""

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
    "timm:test_efficientnet?weights=none",
    "timm:test_vit?weights=none&precision=bfloat16",
    pytest.param("timm:test_resnet?weights=none&precision=bfloat16", marks=pytest.mark.slow),
    pytest.param("timm:test_convnext?weights=none", marks=pytest.mark.slow),
)
CALLS = {
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


def results(model, kind, seed=0, randomised=None):
    """All results for two images, concatenated."""
    rows = [Row(noise(seed + n, model.info.preprocess.size[0]), ClassTarget(3), CALLS[kind]) for n in range(2)]
    layers = [model.info.default_layer] if kind == "cam" else []
    outputs = run(model, rows, layers, kind, randomised)
    return np.concatenate(
        [np.concatenate([output.logits, *(heatmap.ravel() for heatmap in output.maps[0])]) for output in outputs]
    )


def modules(model):
    both = (model.module, model.accelerated and model.accelerated.module)
    return {id(part) for whole in both if whole for part in whole.modules()}


@pytest.mark.parametrize("kind", CALLS)
def test_replica_gives_the_same_results_to_the_bit(both, kind):
    model, replica = both

    assert np.array_equal(results(model, kind), results(replica, kind), equal_nan=True)


def test_replica_shares_weights_and_no_modules(both):
    model, replica = both
    weights = [{parameter.data_ptr() for parameter in loaded.module.parameters()} for loaded in both]

    assert weights[0] == weights[1]
    assert not modules(model) & modules(replica)


def test_concurrent_batches_give_the_results_of_sequential_ones(both):
    alone = {(kind, seed): results(both[0], kind, seed) for kind in CALLS for seed in range(2)}
    begin = threading.Barrier(2)

    def run_all(model, cases):
        begin.wait()
        return {case: results(model, *case) for case in cases}

    with ThreadPoolExecutor(2) as pool:
        concurrent = list(pool.map(run_all, both, (list(alone), list(reversed(alone)))))

    for case, expected in alone.items():
        assert all(np.array_equal(outputs[case], expected, equal_nan=True) for outputs in concurrent)


def test_random_weights_in_the_replica_do_not_affect_the_model(both):
    model, replica = both
    expected, during = results(model, "cam"), []
    begun, over = threading.Event(), threading.Event()

    def hold(*_):
        begun.set()
        over.wait()

    hook = replica.module.register_forward_pre_hook(hold)
    with ThreadPoolExecutor(1) as pool, hook:
        changed = pool.submit(results, replica, "cam", 0, Randomised(100))
        begun.wait()
        during.append(results(model, "cam"))
        over.set()

    assert np.array_equal(during[0], expected, equal_nan=True)
    assert not np.array_equal(changed.result(), expected, equal_nan=True)
    assert np.array_equal(results(replica, "cam"), expected, equal_nan=True)


def test_random_weights_in_the_replica_leave_the_models_copy_alone(both):
    """Both accelerated copies pass the model's own parameters to oneDNN, so these must not be exchanged."""
    model, replica = both
    expected = results(model, "cam"), results(replica, "cam")
    with randomise.random_weights(replica, Randomised(100)):
        assert np.array_equal(results(model, "cam"), expected[0], equal_nan=True)

    local = InProcessWorker(Setup("cpu", 2, partitioned=True))
    local._models["it"], local._replicas["it"] = model, replica
    lanes = []
    for place, lane in enumerate(local._lanes):
        lane.run = lambda _pass, _rows, place=place: lanes.append(place)
    plain = Pass("it", "cam", (64, 64))
    for pass_ in (plain, replace(plain, randomised=Randomised(1))):
        for half in (None, 0, 1):
            local.run(pass_, [], half)
    assert lanes == [0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(("threads", "halves"), [(1, [1, 1]), (2, [1, 1]), (3, [2, 1]), (8, [4, 4])])
def test_two_batches_at_once_use_every_thread(threads, halves, monkeypatch):
    local, used = InProcessWorker(Setup("cpu", threads, partitioned=True)), []
    local._models["it"] = local._replicas["it"] = None
    monkeypatch.setattr(local, "_set_threads", used.append)
    for lane in local._lanes:
        lane.run = lambda _pass, _rows: []
    for half in (0, 1, None):
        local.run(Pass("it", "cam", (64, 64)), [], half)

    assert used == [*halves, threads]


def with_closure():
    model = Toy()
    convolution = model.conv
    model.middle = lambda net, seen: convolution(net.unused(convolution.weight.mean() + seen[:, :3]))
    return model


def with_lock():
    model = Toy()
    model.lock = threading.Lock()
    return model


def with_hook():
    model = Toy()
    model.relu.register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (with_closure, "its copy gives other outputs"),
        (with_lock, "TypeError: cannot pickle"),
        (with_hook, "its own hooks may not support two batches at once"),
    ],
)
def test_model_that_cannot_be_copied_has_no_replica_and_logs_why(make, reason, plant, caplog):
    with caplog.at_level(logging.INFO):
        assert plant(make).replica() is None

    assert f"model planted runs one batch at a time: {reason}" in caplog.text
