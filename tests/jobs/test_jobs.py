"""Jobs: number and order of rows and explanations, shared passes, verdicts, and memory of an evaluation."""

import asyncio
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

import fork_server
from camserve_server import engine, jobs
from camserve_server.core.errors import Internal, OutOfMemory
from camserve_server.engine.values import Row, RowResult
from camserve_server.imaging.values import Box
from camserve_server.jobs.run_methods import run_method
from camserve_server.jobs.verdict import Verdict
from camserve_server.methods import METHODS, Baseline, Cam, Perturbation, Saliency, cams, method_of
from camserve_server.metrics import METRICS
from camserve_server.targets.values import ClassTarget, ContrastTarget, RankTarget
from methods.tools import Toy, call, error_ratio, exact, explain, job, noise, plain, run
from support import loaded

IMAGE = noise(0, 64)
THREE = (RankTarget(0), ClassTarget(5), ContrastTarget(1, 2))
THREE_OF_FIVE = (RankTarget(0), ClassTarget(4), ContrastTarget(1, 2))


@pytest.fixture(scope="module")
def resnet():
    """A smaller model than in other folders."""
    return loaded("timm:test_resnet?weights=none&size=64")


@pytest.mark.parametrize(
    ("calls", "rows"),
    [
        (["gradcam"], 1),
        (["gradcam", "hirescam", "layercam"], 1),  # one pass gives the feature maps to all of them
        (["saliency"], 1),
        (["gradcam", "saliency"], 2),
        ([call("smoothgrad", samples=16)], 17),  # one more for what the model predicts for the image as it is
        ([call("smoothgrad", samples=16), "saliency"], 17),  # which saliency makes use of
        ([call("smoothgrad", samples=16), "gradcam"], 17),  # and a CAM
        ([call("smoothgrad", samples=16), "gradcam", "saliency"], 18),
        ([call("smoothgrad", samples=16), call("smoothgrad", samples=4, seed=1)], 21),
    ],
)
def test_target_costs_one_row_for_each_copy_of_the_image(resnet, calls, rows):
    batches = []
    for targets in (THREE[:1], THREE):
        asked = job(resnet, calls, targets)
        assert asked.rows == rows * len(targets)
    explain(resnet, IMAGE, job(resnet, calls, THREE), batches=batches)
    assert sum(size for _, size in batches) == rows * 3


def test_layers_cost_no_rows(resnet):
    assert job(resnet, ["gradcam"], THREE, ["layer3", "layer4"]).rows == 3


def test_explanations_are_ordered_by_method_then_layer_then_target(resnet):
    calls = ["layercam", call("smoothgrad", samples=2), "gradcam", "saliency"]
    asked = job(resnet, calls, THREE, ["layer4", "layer2"])
    outcome = explain(resnet, IMAGE, asked)
    fixed = [ClassTarget(int(outcome.logits.argmax())), *THREE[1:]]
    layers = {"layercam": ["layer4", "layer2"], "gradcam": ["layer4", "layer2"]}
    expected = [
        (each, layer, target) for each in asked.calls for layer in layers.get(each.name, [""]) for target in fixed
    ]
    assert [
        (explanation.call, explanation.layer, explanation.target) for explanation in outcome.explanations
    ] == expected


def test_maps_of_channels_are_ordered_by_channel_then_target_and_not_fused(smooth):
    parts, targets = replace(call("saliency"), input_channels=(2, 0)), THREE_OF_FIVE[1:]
    averaged = replace(parts, augmented=True)
    asked = job(smooth, [parts, "gradcam", averaged], targets, ["layer", "conv"], fusion="max")
    found = explain(smooth, noise(0, 16), asked).explanations

    places = [(each.call.name, each.layer, each.input_channel, each.fusion) for each in found]
    channels = [("saliency", "", channel, None) for channel in (2, 0) for _ in targets]
    assert places == [*channels, *[("gradcam", "layer + conv", None, "max")] * 2, *channels]
    assert [each.target for each in found] == [*targets] * 5
    assert len(found) == asked.explanations


def test_mean_over_views_of_the_maps_of_channels_is_that_of_each_channel(smooth):
    """The sum over channels and the mean over views can change places."""
    whole = replace(call("input_x_gradient"), augmented=True)
    calls = [whole, replace(whole, input_channels=(0, 1, 2))]
    found, truth = (
        [each.heatmap for each in explain(model, noise(0, 16), job(model, calls, [ClassTarget(1)])).explanations]
        for model in (smooth, exact(smooth))
    )
    assert error_ratio(np.sum(found[1:], 0, np.float64), found[0], truth[0]) <= 1


def test_explanations_computed_together_equal_each_computed_alone(smooth):
    calls = ["layercam", call("smoothgrad", samples=2), "gradcam", "saliency"]
    together = explain(smooth, noise(0, 16), job(smooth, calls, THREE_OF_FIVE, ["layer", "conv"]), chunk=4)
    in_float64 = exact(smooth)
    for explanation in together.explanations:
        alone = job(smooth, [explanation.call], [explanation.target], [explanation.layer or "layer"])
        (finding,), (truth,) = (explain(model, noise(0, 16), alone).explanations for model in (smooth, in_float64))
        assert error_ratio(explanation.heatmap, finding.heatmap, truth.heatmap) <= 1
        assert explanation.score == pytest.approx(finding.score, rel=1e-5)
        assert explanation.verdict is finding.verdict


def test_score_is_that_of_the_unchanged_image(resnet):
    outcome = explain(resnet, IMAGE, job(resnet, [call("smoothgrad", samples=2, noise=0.9)], THREE))
    logits = outcome.logits
    expected = [logits.max(), logits[5], logits[1] - logits[2]]
    assert [explanation.score for explanation in outcome.explanations] == pytest.approx(expected, rel=1e-4)


class Scaled(Cam):
    """A kind of method derived in a plugin."""


def test_method_of_a_derived_kind_runs_as_its_base_kind(resnet, monkeypatch):
    monkeypatch.setitem(METHODS, "derived", Scaled(cams.gradcam, "a test", smooths=True))
    ours, theirs = explain(resnet, noise(0, 64), job(resnet, ["derived", "gradcam"], [ClassTarget(1)])).explanations
    np.testing.assert_array_equal(ours.heatmap, theirs.heatmap)


def test_value_that_is_no_method_is_refused_by_its_runner():
    with pytest.raises(TypeError, match="gradcam is of an unknown kind: int"):
        asyncio.run(run_method(3, None, call("gradcam")))


def test_method_of_another_kind_than_its_pass_is_refused():
    assert method_of(Cam, "gradcam") is METHODS["gradcam"]
    with pytest.raises(TypeError, match="saliency is a Saliency, not a Cam"):
        method_of(Cam, "saliency")


def one_map_for_all(scene):
    yield []
    return scene.image[0]


def cam_of(function):
    """Return a CAM that makes its map of the gradients times the activations [B,C,h,w]."""
    return Cam(lambda activations, gradients, _scores: function(gradients * activations), "a test")


def saliency_of(function):
    return Saliency(lambda mean, _image: function(mean), "a test")


CAM_SHAPES = "maps [2, 8, 8] or each channel's terms [2, 4, 8, 8]"
MAP_SHAPES = "a map [h, w] for each target, [2, h, w]"


@pytest.mark.parametrize(
    ("method", "found", "expected"),
    [
        (cam_of(lambda terms: terms.sum((0, 1))), [8, 8], CAM_SHAPES),
        (cam_of(lambda terms: terms.sum(1)[:1]), [1, 8, 8], CAM_SHAPES),
        (cam_of(lambda terms: terms.mean((2, 3))), [2, 4], CAM_SHAPES),
        (cam_of(lambda terms: terms[:, :, 1:]), [2, 4, 7, 8], CAM_SHAPES),
        (saliency_of(lambda mean: mean), [2, 3, 8, 8], MAP_SHAPES),
        (saliency_of(lambda mean: mean[0, 0]), [2, 8], MAP_SHAPES),
        (Perturbation(one_map_for_all, "a test", lambda **_: 0), [8, 8], MAP_SHAPES),
        (Baseline(lambda image: image, "a test"), [2, 3, 8, 8], MAP_SHAPES),
    ],
)
def test_error_for_a_map_of_a_wrong_shape_names_the_method_and_both(plant, monkeypatch, method, found, expected):
    monkeypatch.setitem(METHODS, "wrong", method)
    toy = plant(Toy, size=8)
    message = f'the method "wrong" returned the shape {found}; it must return {expected}'
    with pytest.raises(Internal, match=f"^{re.escape(message)}$"):
        explain(toy, noise(0, 8), job(toy, ["wrong"], THREE_OF_FIVE[1:], ["layer"]))


def test_sum_of_terms_that_keeps_its_channel_axis_is_a_map(plant, monkeypatch):
    monkeypatch.setitem(METHODS, "kept", cam_of(lambda terms: terms.sum(1, keepdim=True)))
    toy = plant(Toy, size=8)
    asked = job(toy, ["kept", "hirescam"], [ClassTarget(1)], ["layer"])
    kept, hirescam = explain(toy, noise(0, 8), asked).explanations
    np.testing.assert_array_equal(kept.heatmap, hirescam.heatmap)


def test_method_requested_twice_returns_two_maps(resnet):
    first, second = explain(resnet, IMAGE, job(resnet, ["gradcam", "gradcam"], THREE[:1])).explanations
    np.testing.assert_array_equal(first.heatmap, second.heatmap)


def counted(model, monkeypatch):
    """Count the images of forward passes, and the passes."""
    counts = {"images": 0, "forwards": 0, "backwards": 0}
    backward = torch.autograd.backward

    def count_forward(module, args):
        if module in {model.module, model.accelerated.module}:
            counts["forwards"] += 1
            counts["images"] += len(args[0])

    def count_backward(*args, **options):
        counts["backwards"] += 1
        return backward(*args, **options)

    monkeypatch.setattr(torch.autograd, "backward", count_backward)
    return counts, register_module_forward_pre_hook(count_forward)


@pytest.mark.parametrize(
    ("calls", "kind", "images", "backwards"),
    [
        (("gradcam", "hirescam", "layercam"), "cam", 2, 3),
        (("saliency",), "saliency", 2, 3),
        ((), "score", 2, 0),
    ],
)
def test_targets_of_one_image_share_its_forward_pass(resnet, monkeypatch, calls, kind, images, backwards):
    first, second = noise(0, 64), noise(1, 64)
    rows = [Row(first, t, tuple(map(call, calls))) for t in THREE] + [Row(second, THREE[1], tuple(map(call, calls)))]
    counts, hook = counted(resnet, monkeypatch)
    try:
        run(resnet, rows, ["layer4"] if kind == "cam" else [], kind)
    finally:
        hook.remove()
    assert counts == {"images": images, "forwards": 1, "backwards": backwards}


def test_copy_of_an_image_has_one_forward_pass_for_all_its_targets(resnet, monkeypatch):
    counts, hook = counted(resnet, monkeypatch)
    try:
        explain(resnet, IMAGE, job(resnet, [call("smoothgrad", samples=4)], THREE))
    finally:
        hook.remove()
    assert counts == {"images": 1 + 4, "forwards": 2, "backwards": 3}


def test_copies_with_different_noise_do_not_share_a_forward_pass(resnet, monkeypatch):
    calls = [call("smoothgrad", seed=1), call("smoothgrad", seed=2), call("smoothgrad", seed=1, noise=0.3)]
    rows = [Row(IMAGE, THREE[1], (each,), copy) for each in calls for copy in (0, 1)]
    counts, hook = counted(resnet, monkeypatch)
    try:
        run(resnet, rows, kind="saliency")
    finally:
        hook.remove()
    assert counts == {"images": 6, "forwards": 1, "backwards": 1}


@pytest.mark.parametrize(
    ("heatmap", "zero_gradient", "verdict"),
    [
        ([[1.0, -2.0]], False, Verdict.OK),
        ([[1e-30, 0.0]], False, Verdict.OK),
        ([[-1.0, -2.0]], False, Verdict.ALL_NEGATIVE),
        ([[0.0, -2.0]], False, Verdict.ALL_NEGATIVE),
        ([[3.0, 3.0]], False, Verdict.FLAT),
        ([[0.0, 0.0]], False, Verdict.FLAT),
        ([[0.0, 0.0]], True, Verdict.ZERO_GRADIENT),
        ([[np.nan, 1.0]], False, Verdict.NON_FINITE),
        ([[np.inf, 1.0]], False, Verdict.NON_FINITE),
        ([[np.nan, 0.0]], True, Verdict.NON_FINITE),
    ],
)
def test_planted_map_gets_its_verdict(heatmap, zero_gradient, verdict):
    assert jobs.judge(np.array(heatmap, np.float32), zero_gradient=zero_gradient) is verdict


class UniformHead(nn.Module):
    """A head that gives every class the same weight on every channel."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, pooled):
        return self.weight * pooled.sum(1, keepdim=True).expand(-1, 5)


class PlantedMaps(Toy):
    """A model whose maps can be planted."""

    def __init__(self):
        super().__init__()
        self.head = UniformHead(1.0)

    def forward(self, image):
        return self.head(self.layer(self.conv(image).abs()).mean((2, 3)))


@pytest.mark.parametrize(
    ("weight", "verdict"),
    [
        (1.0, Verdict.OK),
        (-1.0, Verdict.ALL_NEGATIVE),
        (0.0, Verdict.ZERO_GRADIENT),
        (float("nan"), Verdict.NON_FINITE),
        (float("inf"), Verdict.NON_FINITE),
    ],
)
def test_verdict_of_an_explanation_names_its_problem(plant, weight, verdict):
    model = plain(plant(PlantedMaps))
    model.module.head.weight = weight
    for method in ("gradcam", "hirescam"):
        (finding,) = explain(model, noise(0, 16), job(model, [method], [ClassTarget(1)], ["layer"])).explanations
        assert finding.verdict is verdict, method


@pytest.mark.parametrize(
    ("weight", "verdict"), [(1.0, Verdict.OK), (0.0, Verdict.ZERO_GRADIENT), (float("nan"), Verdict.NON_FINITE)]
)
@pytest.mark.parametrize("method", ["saliency", "smoothgrad"])
def test_verdict_of_a_saliency_map_names_its_problem(plant, method, weight, verdict):
    model = plant(PlantedMaps)
    model.module.head.weight = weight
    (finding,) = explain(model, noise(0, 16), job(model, [method], [ClassTarget(1)])).explanations
    assert finding.verdict is verdict


def test_product_of_maps_has_a_zero_gradient_if_one_of_them_has(plant):
    model = plain(plant(lambda: Toy(lambda net, seen: net.relu(net.layer(seen)))))
    nn.init.zeros_(model.module.conv.weight)
    nn.init.ones_(model.module.conv.bias)
    methods = ["guided_gradcam", "guided_backprop", "gradcam"]
    product, pixels, layer = explain(model, noise(0, 16), job(model, methods, [ClassTarget(1)], ["layer"])).explanations
    assert product.verdict is pixels.verdict is Verdict.ZERO_GRADIENT
    assert layer.verdict is not Verdict.ZERO_GRADIENT


def test_map_with_the_same_value_everywhere_is_called_flat(plant):
    model = plant(PlantedMaps)
    nn.init.zeros_(model.module.conv.weight)
    (finding,) = explain(model, noise(0, 16), job(model, ["gradcam"], [ClassTarget(1)], ["layer"])).explanations
    assert finding.heatmap.max() > 0
    assert finding.verdict is Verdict.FLAT


def test_zero_gradient_of_one_image_does_not_affect_its_batch_neighbours(plant):
    def dark_is_dead(net, seen):
        return net.layer(seen) * (seen.amax((1, 2, 3), keepdim=True) > 1)

    model = plant(lambda: Toy(dark_is_dead))
    nn.init.zeros_(model.module.conv.bias)
    dark, bright = np.full((16, 16, 3), 124, np.uint8), noise(0, 16)
    rows = [Row(image, ClassTarget(1), (call("gradcam"),)) for image in (bright, dark, bright.copy())]
    assert [each.zero_gradient for each in run(model, rows, ["layer"])] == [(False,), (True,), (False,)]


def test_out_of_memory_error_keeps_no_tensors_alive(resnet, monkeypatch):
    """torch's error as the context would keep the tensors that fill the memory, while halves of the batch are tried."""

    def full(*_args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(engine.RUNS, "score", full)
    with pytest.raises(OutOfMemory) as caught:
        run(resnet, [Row(np.zeros((64, 64, 3), np.uint8), ClassTarget(0))], kind="score")

    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


class FakeEngine:
    """Fake that returns results for rows without a model, and counts the rows in flight."""

    def __init__(self, failing=None):
        self.rows = self.under_way = self.most = 0
        self.failing = failing

    async def submit(self, _pass, rows, collect):
        self.under_way += len(rows)
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0)
        if self.failing and self.rows >= self.failing:
            raise OutOfMemory("no memory")
        self.rows += len(rows)
        for index, row in enumerate(rows):
            heatmap = np.random.default_rng(self.rows + index).normal(size=(4, 4)).astype(np.float32)
            maps = tuple((heatmap,) * len(row.calls) for _ in range(2))
            collect(index, RowResult(np.zeros(9, np.float32), row.target, float(index), maps, (False, False)))
        self.under_way -= len(rows)


def evaluation(model, calls, metrics):
    """Return an assessment of a job's maps."""
    chosen = tuple(
        jobs.MetricCall(
            name, {parameter.name: parameter.default for parameter in METRICS[name].parameters} | parameters
        )
        for name, parameters in metrics
    )
    return jobs.EvaluationJob(job(model, calls, [ClassTarget(1)]), chosen)


def evaluate(asked, engine):
    """Return the readings of the one explanation, and the engine."""
    _, (readings,) = asyncio.run(jobs.evaluate(asked, IMAGE, Box(0, 0, 64, 64), engine.submit))
    return readings, engine


def evaluate_alone(asked, first=None):
    """Do the same in a process of its own, after another evaluation; return its peak memory in bytes too."""
    return fork_server.call(_evaluate_after, first or asked, asked)


def _evaluate_after(first, asked):
    evaluate(first, FakeEngine())  # what it imports must not count
    return fork_server.allocating(evaluate, asked, FakeEngine())


MASKS = 64 * 64 * 64 * 4
"""Bytes of the masks that a method uses at a time."""


@pytest.mark.parametrize(
    "metrics",
    [
        [("max_sensitivity", {"samples": 16})],  # 16 maps of 64 masks each
        pytest.param([("deletion", {"steps": 512}), ("insertion", {"steps": 512})], marks=pytest.mark.slow),
        [("deletion", {"steps": steps}) for steps in range(60, 76)],  # 16 metrics of 60 to 75 masks each
    ],
)
def test_evaluation_holds_few_masks_at_a_time(resnet, metrics):
    asked = evaluation(resnet, [call("rise", samples=64)], metrics)
    (readings, engine), peak = evaluate_alone(asked)

    assert engine.rows == asked.rows
    assert len(readings) == len(metrics)
    assert engine.most <= 64
    assert peak < 4 * MASKS


def test_recomputed_maps_are_not_kept(resnet):
    (readings, _), peak = evaluate_alone(evaluation(resnet, ["edges"], [("max_sensitivity", {"samples": 128})]))

    assert math.isfinite(readings[0].value)
    assert peak < 100 * IMAGE.size / 3 * 4  # of 128 maps of as many pixels


def test_small_repeats_still_share_batches(resnet):
    engine = FakeEngine()
    evaluate(evaluation(resnet, ["gradcam"], [("max_sensitivity", {"samples": 128})]), engine)

    assert engine.most == 64


def test_failed_repeat_cancels_the_others(resnet):
    engine = FakeEngine(failing=100)
    asked = evaluation(resnet, [call("rise", samples=64)], [("max_sensitivity", {"samples": 32})])
    with pytest.raises(OutOfMemory):
        evaluate(asked, engine)

    assert engine.rows < 200


@pytest.mark.slow  # the import of captum takes seconds
def test_surrogate_creates_masks_only_when_they_are_used(resnet):
    pytest.importorskip("captum")
    few, many = (evaluation(resnet, [call("kernel_shap", samples=samples)], []) for samples in (32, 2048))
    _, peak = evaluate_alone(many, few)

    assert peak < 6 * MASKS
