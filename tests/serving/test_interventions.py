"""Requests with interventions: answers beside those of other requests, and predictions of the unchanged network."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

import camserve
from camserve_server import Explainer
from camserve_server.engine import Engine
from camserve_server.models.hooks import hook_count
from few_threads import few_threads
from methods.tools import error_ratio
from support import wait_until

__all__ = ["few_threads"]

REQUESTS, TARGET = 36, 2


def network():
    torch.manual_seed(3)
    layers = [nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1), nn.Tanh()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


@pytest.fixture(scope="module")
def net():
    return network().eval()


@pytest.fixture(scope="module")
def explainer(net):
    with Explainer(net, size=32, accelerate=False) as explainer:
        yield explainer


@pytest.fixture
def batches(monkeypatch):
    """Pass and number of rows of each batch."""
    found, run = [], Engine.run

    def record(engine, pass_, rows):
        found.append((pass_, len(rows)))
        return run(engine, pass_, rows)

    monkeypatch.setattr(Engine, "run", record)
    return found


def image(seed=0):
    return torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(seed))


def scores(predictions):
    return np.array([each.score for each in sorted(predictions, key=lambda each: each.class_index)])


def answer(net, pixels, hook=None):
    """Return the outputs of the network and Grad-CAM at its last convolution, with a hook on the first one."""
    net, kept = copy.deepcopy(net).to(pixels.dtype), []
    if hook:
        net[0].register_forward_hook(hook)
    net[2].register_forward_hook(lambda _layer, _args, output: kept.append(output) or output.retain_grad())
    logits = net(pixels[None].requires_grad_())
    logits[0, TARGET].backward()
    weights = kept[0].grad.mean((2, 3), keepdim=True)
    return logits[0].detach().numpy(), (weights * kept[0]).sum(1)[0].detach().numpy()


def is_of_the_plain_network(predictions, net):
    plain, truth = (answer(net, image().to(kind))[0] for kind in (torch.float32, torch.float64))
    return error_ratio(scores(predictions), plain, truth) <= 1


def silencing(channel):
    def hook(_layer, _args, output):
        return torch.cat([output[:, :channel], 0 * output[:, channel : channel + 1], output[:, channel + 1 :]], 1)

    return hook


def test_neighbours_with_other_interventions_never_change_an_answer(net, monkeypatch):
    """The first batch waits until all other requests are in the queue, so that they run together."""
    hooks = [None, *map(silencing, range(8))]
    changes = [[], *([camserve.silence("0", [channel])] for channel in range(8))]
    batches, run, lock = [], Engine.run, threading.Lock()

    with Explainer(net, size=32, accelerate=False) as explainer:
        batcher = explainer._service._pipeline.batcher

        def record(engine, pass_, rows):
            with lock:
                batches.append((pass_.interventions, len(rows)))
                if len(batches) == 1:
                    wait_until(lambda: batcher.waiting == REQUESTS - len(rows))
            return run(engine, pass_, rows)

        def explain(number):
            options = {"targets": TARGET, "layers": "2", "overlay": None, "interventions": changes[number % 9]}
            return explainer.explain(image(number % 4), **options)

        monkeypatch.setattr(Engine, "run", record)
        before = hook_count(net)
        with ThreadPoolExecutor(REQUESTS) as pool:
            results = list(pool.map(explain, range(REQUESTS)))
        after = hook_count(net)

    assert (before, after) == (0, 0)
    assert len({interventions for interventions, _ in batches}) == 9
    assert max(rows for _, rows in batches) > 1
    for number, result in enumerate(results):
        plain, truth = (
            answer(net, image(number % 4).to(kind), hooks[number % 9]) for kind in (torch.float32, torch.float64)
        )
        assert error_ratio(scores(result.predictions), plain[0], truth[0]) <= 1
        assert error_ratio(result.explanations[0].heatmap, plain[1], truth[1]) <= 1
        assert bool(result.unchanged_predictions) == bool(number % 9)


def test_predictions_of_the_unchanged_network_come_back_too(net, explainer):
    plain = explainer.explain(image())
    changed = explainer.explain(image(), interventions=[camserve.scale("3", -1)])

    assert plain.unchanged_predictions == ()
    assert [each.class_index for each in changed.unchanged_predictions] == [
        each.class_index for each in plain.predictions
    ]
    assert is_of_the_plain_network(changed.unchanged_predictions, net)
    assert changed.predictions != plain.predictions
    expected = copy.deepcopy(net)
    expected[3].register_forward_hook(lambda _layer, _args, output: -output)
    best = expected(image()[None])[0].argmax().item()
    assert changed.predictions[0].class_index == changed.explanations[0].target.class_index == best


def test_interventions_cost_one_more_row_and_no_other_request_does(explainer, batches):
    changes = [camserve.silence("0", [1])]
    cost = explainer.estimate_cost(interventions=changes, methods=["gradcam", "layercam"], targets=[1, 2])
    explainer.explain(image(), interventions=changes, methods=["gradcam", "layercam"], targets=[1, 2])

    assert cost.rows == sum(rows for _, rows in batches) == 3
    assert [(pass_.kind, bool(pass_.interventions)) for pass_, _ in batches] == [("cam", True), ("score", False)]
    batches.clear()
    explainer.explain(image())
    assert [(pass_.interventions, rows) for pass_, rows in batches] == [((), 1)]


def test_evaluation_runs_every_edit_with_the_interventions(explainer, batches):
    evaluation = explainer.evaluate(
        image(),
        targets=1,
        interventions=[camserve.silence("0", [1])],
        metrics=["deletion", "max_sensitivity", "randomisation"],
    )
    unchanged = [(pass_.kind, rows) for pass_, rows in batches if not pass_.interventions]

    assert unchanged == [("score", 1)]
    assert {pass_.interventions for pass_, _ in batches if pass_.interventions} == {batches[0][0].interventions}
    assert sum(rows for _, rows in batches) > 20
    assert len(evaluation.readings) == 3
    assert len(evaluation.explained.unchanged_predictions) == 5


def test_inspection_measures_the_changed_network(net, explainer):
    changes = [camserve.clamp("3", minimum=0.1, channels=[0, 3]), camserve.clip_gradient("3", 1e-3)]
    inspection = explainer.inspect(image(), layers=["2", "3"], target=1, interventions=changes)
    plain = explainer.inspect(image(), layers=["2", "3"], target=1)
    values = copy.deepcopy(net)[:4](image()[None])
    values[:, [0, 3]] = values[:, [0, 3]].clamp(min=0.1)

    before, after = inspection.layers
    assert before.activation == plain.layers[0].activation
    assert after.activation.mean == pytest.approx(values.double().mean().item(), rel=1e-6)
    assert after.activation.minimum == values.min().item()
    assert after.gradient.maximum == pytest.approx(1e-3)
    assert plain.layers[1].gradient.maximum > 1e-3
    assert before.gradient.norm < plain.layers[0].gradient.norm
    assert is_of_the_plain_network(inspection.unchanged_predictions, net)
    assert inspection.predictions != plain.predictions
    assert len(plain.predictions) == 5
    assert plain.unchanged_predictions == ()


def test_features_are_those_of_the_changed_network(net, explainer):
    changed = explainer.features(image(), layer="2", top=8, interventions=[camserve.replace_mean("2", [4])])
    plain = explainer.features(image(), layer="2", top=8)
    maps = {channel.index: each for channel, each in zip(plain.channels, plain.maps, strict=True)}

    for channel, each in zip(changed.channels, changed.maps, strict=True):
        if channel.index == 4:
            np.testing.assert_array_equal(each, torch.from_numpy(maps[4].copy()).mean().expand(16, 16))
        else:
            np.testing.assert_array_equal(each, maps[channel.index])
    assert is_of_the_plain_network(changed.unchanged_predictions, net)


def test_channel_that_an_input_does_not_have_is_refused_by_name(explainer, net):
    with pytest.raises(camserve.InvalidArgument, match='the input of layer "6" has 8 channels') as caught:
        explainer.explain(image(), interventions=[camserve.silence("6", [8], input=True)])

    assert list(caught.value.fields) == ["interventions[0].channels"]
    with pytest.raises(camserve.InvalidArgument) as caught:
        explainer.evaluate(image(), interventions=[camserve.silence("6", [8], input=True)])
    assert list(caught.value.fields) == ["explain.interventions[0].channels"]
    assert hook_count(net) == 0


def test_replay_repeats_the_interventions(explainer):
    changes = (
        camserve.silence("0", channels=[1, 2]),
        camserve.scale("1", 0.3, input=True),
        camserve.clamp("2", minimum=-0.1),
        camserve.replace_mean("2", [0]),
        camserve.clip_gradient("2", 0.01),
    )
    receipt = explainer.explain(image(), interventions=changes).explanations[0].receipt
    stored = camserve.Receipt.from_json(receipt.to_json())
    replay = explainer.replay(stored, image())
    without = explainer.replay(
        camserve.Receipt.from_json(explainer.explain(image()).explanations[0].receipt.to_json()), image()
    )

    assert stored.interventions == receipt.interventions == changes
    assert (replay.same, replay.gap) == (True, 0)
    assert replay.explanation.receipt.interventions == changes
    assert without.explanation.score != replay.explanation.score
