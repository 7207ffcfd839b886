"""Every pass, method, target, view and metric on a simulated GPU: the CPU's results, few waits, no kept graph."""

import functools
import gc
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from camserve_server import jobs
from camserve_server.core import devices
from camserve_server.engine import Engine
from camserve_server.engine.values import Row
from camserve_server.imaging.values import Box, View
from camserve_server.methods import METHODS, Attention, Baseline, Cam, cams
from camserve_server.methods.values import MethodCall
from camserve_server.metrics import METRICS
from camserve_server.models.values import Randomised
from camserve_server.targets import whole
from camserve_server.targets.values import (
    ClassTarget,
    ContrastTarget,
    DetectionTarget,
    FinerTarget,
    ProbabilityTarget,
    RankTarget,
    SegmentTarget,
    SimilarityTarget,
)
from methods.tools import call, error_ratio, exact, explain, job, noise, plain, result_of
from simulated.device import RECORD, Simulated, register
from support import wait_until

pytestmark = pytest.mark.slow

RESNET = "resnet=simulated.nets:resnet?size=64"
VIT = "vit=simulated.nets:vit?size=64"
SEGMENTERS = {
    "toy": "colours=coloured:Colours?size=64",
    "lraspp": "torchvision:lraspp_mobilenet_v3_large?weights=none&size=64",
}
DETECTORS = {
    "toy": "finder=coloured:Finder?size=64",
    "ssdlite": "torchvision:ssdlite320_mobilenet_v3_large?weights=none&size=128",
}
FEW = {"samples": 3, "steps": 3, "scales": 2, "top_channels": 4, "window": 0.5, "stride": 0.5, "k": 0.5}
"""Parameters with which a method takes few rows and has a non-zero map on a grid of 2x2."""
CLASSIFYING = [name for name in METHODS if not METHODS[name].tasks]
"""Methods of classifiers. The rows of drise are those of rise on the GPU; it reads their objects on the host."""
COMPUTED = [name for name in CLASSIFYING if not isinstance(METHODS[name], Baseline)]


def quick(name):
    """Return a call of a method with few rows."""
    known = {parameter.name for parameter in METHODS[name].parameters}
    return call(name, **{key: value for key, value in FEW.items() if key in known})


def model_for(name):
    return VIT if isinstance(METHODS[name], Attention) else RESNET


def batches_of(model, image, name, target):
    """Run a method on one image; return its batches as (pass, rows)."""
    batches = []

    async def submit(pass_, rows, collect):
        batches.append((pass_, list(rows)))
        for place, result in enumerate(Engine({model.info.name: model}).run(pass_, rows)):
            collect(place, result)

    result_of(jobs.explain(job(model, [quick(name)], [target]), image, submit))
    return batches


@functools.cache
def truth_of(model):
    """Return a model in float64, which tests share."""
    return exact(model)


def check_equal(result, answer, cpu):
    """Compare a result with the CPU's, with or without the accelerated copy, by the distances from float64."""
    truth = answer(truth_of(cpu))
    assert any(error_ratio(result, answer(each), truth) <= 1 for each in (plain(cpu), cpu))


@contextmanager
def without_collector():
    """Disable the garbage collector inside the block."""
    gc.collect()
    gc.freeze()  # otherwise the next test's collection goes through all modules that this one imported
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# ----------------------------------------------------------------------------------------------- the answers of the CPU


@pytest.mark.parametrize("name", CLASSIFYING)
def test_method_gives_the_maps_of_the_cpu(pair, name):
    cpu, gpu = pair(model_for(name))

    def answer(model):
        return explain(model, noise(1, 64), job(model, [quick(name)], [ClassTarget(3)])).explanations[0].heatmap

    result = answer(gpu)
    if isinstance(METHODS[name], Baseline):
        assert np.array_equal(result, answer(cpu))
    else:
        check_equal(result, answer, cpu)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_gives_the_map_of_the_cpu_in_the_same_precision(pair, precision):
    cpu, gpu = pair(f"{RESNET}&precision={precision}")
    result, expected, truth = (
        explain(model, noise(1, 64), job(model, ["gradcam"], [ClassTarget(3)])).explanations[0].heatmap
        for model in (gpu, cpu, truth_of(pair(RESNET)[0]))
    )

    assert gpu.accelerated is not None  # its weights are converted: the simulated GPU has no autocast
    assert error_ratio(result, expected, truth) <= 1


@pytest.mark.parametrize(
    "target",
    [
        RankTarget(2),
        ContrastTarget(4, 9),
        FinerTarget(5),
        FinerTarget(5, (1, 2)),
        ProbabilityTarget(7),
        SimilarityTarget(image=noise(9, 64)),  # similarity to itself has a gradient of zero: maps of rounding errors
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["gradcam", "saliency", "occlusion"])
def test_target_of_a_classifier_gives_the_maps_of_the_cpu(pair, target, name):
    cpu, gpu = pair(RESNET)

    def finding(model):
        return explain(model, noise(2, 64), job(model, [quick(name)], [target])).explanations[0]

    assert finding(gpu).score == pytest.approx(finding(cpu).score, rel=1e-4, abs=1e-6)
    check_equal(finding(gpu).heatmap, lambda model: finding(model).heatmap, cpu)


@pytest.mark.parametrize("wanted", ["rank", "box", "class"])
@pytest.mark.parametrize("name", SEGMENTERS)
def test_segmentation_gives_the_maps_of_the_cpu(pair, name, wanted):
    cpu, gpu = pair(SEGMENTERS[name])
    size = cpu.info.preprocess.size
    image = noise(3, size[0])
    largest = explain(cpu, image, job(cpu, ["gradcam"], [RankTarget(0)])).explanations[0].target
    target = {
        "rank": RankTarget(0),
        "box": SegmentTarget(1, whole(size)),
        "class": SegmentTarget(largest.index),
    }[wanted]

    def answer(model):
        return explain(model, image, job(model, ["gradcam"], [target])).explanations[0].heatmap

    check_equal(answer(gpu), answer, cpu)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", DETECTORS)
def test_detection_gives_the_maps_of_the_cpu(pair, name):
    cpu, gpu = pair(DETECTORS[name])
    image = noise(4, cpu.info.preprocess.size[0])
    target = DetectionTarget(1, whole(cpu.info.preprocess.size), found=True)

    def finding(model):
        return explain(model, image, job(model, ["gradcam"], [target])).explanations[0]

    result, expected = finding(gpu), finding(cpu)

    assert result.target == expected.target
    assert np.array_equal(result.heatmap, expected.heatmap)


@pytest.mark.parametrize(
    "views",
    [(View(mirrored=True),), (View(gain=0.8), View(noise=0.1, seed=3)), (View(scale=1.5, top=4, left=8),)],
    ids=["mirrored", "noise", "window"],
)
def test_view_of_an_image_gives_the_maps_of_the_cpu(pair, views):
    cpu, gpu = pair(RESNET)
    row = Row(noise(5, 64), ClassTarget(3), (call("gradcam"),), views=views)

    def answer(model):
        pass_ = batches_of(cpu, row.image, "gradcam", ClassTarget(3))[0][0]
        return Engine({model.info.name: model}).run(pass_, [row])[0].maps[0][0]

    check_equal(answer(gpu), answer, cpu)


@pytest.mark.parametrize("name", METRICS)
def test_metric_gives_the_readings_of_the_cpu(pair, name):
    cpu, gpu = pair(RESNET)
    known = {parameter.name: parameter.default for parameter in METRICS[name].parameters}
    metric = jobs.MetricCall(name, known | {key: 2 for key in ("samples", "stages", "steps") if key in known})

    def readings(model):
        async def submit(pass_, rows, collect):
            for place, result in enumerate(Engine({model.info.name: model}).run(pass_, rows)):
                collect(place, result)

        asked = jobs.EvaluationJob(job(model, ["gradcam"], [ClassTarget(3)]), (metric,), Box(8, 8, 40, 40))
        _, ((reading,),) = result_of(jobs.evaluate(asked, noise(6, 64), Box(0, 0, 64, 64), submit))
        return np.array([reading.value, *np.ravel([curve.y for curve in reading.curves])], np.float64)

    assert readings(plain(gpu)) == pytest.approx(readings(plain(cpu)), rel=1e-4, abs=1e-5)


def test_random_weights_give_the_maps_of_the_cpu(pair):
    cpu, gpu = pair(RESNET)
    (pass_, rows), *_ = batches_of(cpu, noise(7, 64), "gradcam", ClassTarget(3))
    pass_ = replace(pass_, randomised=Randomised(4, 1))
    result, expected = (Engine({model.info.name: model}).run(pass_, rows)[0] for model in (gpu, plain(cpu)))

    assert error_ratio(result.maps[0][0], expected.maps[0][0], expected.maps[0][0]) <= 1
    assert explain(gpu, noise(7, 64), job(gpu, ["gradcam"], [ClassTarget(3)])).explanations[0].score == pytest.approx(
        explain(cpu, noise(7, 64), job(cpu, ["gradcam"], [ClassTarget(3)])).explanations[0].score, rel=1e-4
    )


@pytest.mark.parametrize("kind", ["inspect", "features"])
def test_layer_inspection_equals_that_of_the_cpu(pair, kind):
    cpu, gpu = pair(RESNET)
    (pass_, _), *_ = batches_of(cpu, noise(8, 64), "gradcam", ClassTarget(3))
    rows = [Row(noise(8, 64), ClassTarget(3))]
    result, expected = (
        Engine({model.info.name: model}).run(replace(pass_, kind=kind), rows)[0] for model in (gpu, plain(cpu))
    )

    for mine, its in zip(result.readings, expected.readings, strict=True):
        assert mine.shape == its.shape
        assert mine.activation.norm == pytest.approx(its.activation.norm, rel=1e-4)
        assert mine.gradient.norm == pytest.approx(its.gradient.norm, rel=1e-4)
    for mine, its in zip(result.features, expected.features, strict=True):
        assert mine == pytest.approx(its, rel=1e-4, abs=1e-5)


# ---------------------------------------------------------------------------------------------------------- host waits


@pytest.mark.parametrize("name", COMPUTED)
def test_batch_of_many_rows_waits_no_more_often_than_one_of_few_and_leaves_nothing(pair, name):
    """The rows of one image, and of two, in one batch; of every kind of batch that the method has."""
    cpu, gpu = pair(model_for(name))
    batches_of(gpu, noise(0, 64), name, ClassTarget(3))  # constants are uploaded once
    each = [batches_of(cpu, noise(seed, 64), name, ClassTarget(3)) for seed in range(2)]
    engine = Engine({gpu.info.name: gpu})
    with without_collector():
        before = RECORD.bytes_alive
        for same in zip(*each, strict=False):
            waits = []
            for count in (1, 2):
                rows = [row for _, some in same[:count] for row in some]
                RECORD.clear()
                assert len(engine.run(same[0][0], rows)) == len(rows)
                waits.append([event.line for event in RECORD.waits])

            assert waits[0] == waits[1]
            assert 1 <= len(waits[0]) <= 3
        # Autograd's thread lets go of its last tensor some time after the answer.
        wait_until(lambda: RECORD.bytes_alive == before)


def test_targets_that_depend_on_the_prediction_make_a_batch_wait_once_more(pair, record):
    _, gpu = pair(RESNET)
    rows = [Row(noise(seed, 64), RankTarget(0), (call("gradcam"),)) for seed in range(4)]
    (pass_, _), *_ = batches_of(gpu, rows[0].image, "gradcam", ClassTarget(3))
    record.clear()
    Engine({gpu.info.name: gpu}).run(pass_, rows)

    assert len(record.waits) == 2


@pytest.mark.parametrize("name", ["gradcam", "kpcacam", "shapleycam", "saliency", "smoothgrad", "fullgrad", "chefer"])
def test_backward_pass_is_launched_before_anything_is_read(pair, record, name):
    _, gpu = pair(model_for(name))
    *_, (pass_, rows) = batches_of(gpu, noise(1, 64), name, ClassTarget(3))
    engine = Engine({gpu.info.name: gpu})
    engine.run(pass_, rows)  # constants are uploaded once
    record.clear()
    engine.run(pass_, rows)

    assert waits_before_backward(record) == []


def waits_before_backward(record):
    first = next(place for place, event in enumerate(record.events) if event.backward)
    return [event.line for event in record.events[:first] if event.waits]


# ------------------------------------------------------------------------------ the simulated GPU shows planted faults


def with_method(monkeypatch, function):
    monkeypatch.setitem(METHODS, "planted", Cam(function, "planted"))
    return MethodCall("planted")


def test_constant_of_the_cpu_in_a_method_is_refused(pair, monkeypatch):
    cpu, gpu = pair(RESNET)
    planted = with_method(monkeypatch, lambda activations, *_: activations * torch.ones(4, 4))

    assert explain(cpu, noise(1, 64), job(cpu, [planted], [ClassTarget(3)])).explanations
    with pytest.raises(RuntimeError, match="expected all tensors on one device"):
        explain(gpu, noise(1, 64), job(gpu, [planted], [ClassTarget(3)]))


def test_read_in_a_method_is_counted(pair, monkeypatch, record):
    _, gpu = pair(RESNET)

    def reading(activations, gradients, scores):
        return cams.gradcam(activations, gradients, scores) * float(gradients.max())

    planted = with_method(monkeypatch, reading)
    explain(gpu, noise(1, 64), job(gpu, [planted], [ClassTarget(3)]))

    assert record.waits[0].name == "aten._local_scalar_dense.default"
    assert len(record.waits) == 2


def test_read_before_the_backward_pass_is_detected(pair, monkeypatch, record):
    _, gpu = pair(RESNET)
    (pass_, rows), *_ = batches_of(gpu, noise(1, 64), "gradcam", ClassTarget(3))
    engine = Engine({gpu.info.name: gpu})
    engine.run(pass_, rows)

    def reading(outputs):
        outputs.values.tolist()
        return list(outputs.values.detach())

    monkeypatch.setattr("camserve_server.targets.summary", reading)
    record.clear()
    engine.run(pass_, rows)

    assert len(waits_before_backward(record)) == 1


def test_graph_kept_by_a_reference_cycle_is_detected(pair, monkeypatch):
    _, gpu = pair(RESNET)

    class Cycle:
        def __init__(self, tensor):
            self.tensor, self.self = tensor, self

    def keeping(activations, gradients, scores):
        Cycle(activations)
        return cams.gradcam(activations, gradients, scores)

    with_method(monkeypatch, keeping)
    (pass_, rows), *_ = batches_of(gpu, noise(1, 64), "planted", ClassTarget(3))
    with without_collector():
        before = RECORD.bytes_alive
        Engine({gpu.info.name: gpu}).run(pass_, rows)

        assert RECORD.bytes_alive > before
    gc.collect()


def test_upload_waits_unless_its_memory_is_page_locked():
    place = devices.device_for("sim:0")
    RECORD.clear()
    place.copied(torch.ones(3))
    assert RECORD.waits == []
    torch.ones(3).to("sim:0")
    assert len(RECORD.waits) == 1
    assert isinstance(place.copied(torch.ones(3)), Simulated)


def test_backward_pass_runs_on_a_thread_of_autograds(record):
    leaf = torch.ones(3, device="sim:0").requires_grad_()
    (leaf * 2).sum().backward()

    assert any(event.backward for event in record.events)
    assert leaf.grad.tolist() == [2, 2, 2]
    assert register() is register()
