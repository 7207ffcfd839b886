"""The engine on a GPU compared with the CPU, and on a CPU where no GPU is needed."""

import threading
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

from camserve_server import models
from camserve_server.core.devices import fetch_arrays
from camserve_server.core.errors import OutOfMemory
from camserve_server.engine import Engine, cam, normalise
from camserve_server.engine.inputs import upload
from camserve_server.engine.values import Row
from camserve_server.methods.values import MethodCall
from camserve_server.models.values import Pass
from camserve_server.targets.values import ClassTarget, RankTarget
from methods.tools import call, gap, job, noise, run
from methods.tools import explain as explained
from support import GPU

RESNET, VIT = "timm:test_resnet?weights=none&size=64", "timm:test_vit?weights=none&size=64"
DEVICES = ("cpu", GPU)


@pytest.fixture(scope="module")
def resnets():
    """Return a function that loads the same model on any device."""
    first = models.load(models.parse(RESNET))
    known = {"cpu": first}
    return lambda device: known.setdefault(device, first.copy_to(device))


@pytest.fixture(scope="module")
def vit():
    return models.load(models.parse(VIT))


@pytest.fixture
def _precision_as_before():
    backends = torch.backends
    before = backends.cudnn.allow_tf32, torch.get_float32_matmul_precision(), backends.fp32_precision
    yield
    backends.cudnn.allow_tf32, backends.fp32_precision = before[0], before[2]
    torch.set_float32_matmul_precision(before[1])


def correlation(first, second):
    return np.corrcoef(first.ravel(), second.ravel())[0, 1]


# -------------------------------------------------------------------------------------------- what needs no GPU to show


def test_tensors_fetched_together_are_unchanged():
    tensors = [torch.randn(3, 4), torch.randn(2, 3, 4).requires_grad_(), torch.randn(1).bfloat16(), torch.zeros(0, 2)]

    for array, tensor in zip(fetch_arrays(tensors), tensors, strict=True):
        assert (array.dtype, array.shape) == (np.float32, tuple(tensor.shape))
        assert (array == tensor.detach().float().numpy()).all()


def test_models_copy_has_the_same_weights_and_shares_none_of_them():
    """The weights are copied because a factory may return others when it is called again."""
    model = models.load(models.parse(RESNET))
    copy = model.copy_to("cpu")
    mine, its = ({parameter.data_ptr() for parameter in each.module.parameters()} for each in (model, copy))

    assert models.digest(copy.module) == model.info.digest
    assert not mine & its
    assert not mine & {parameter.data_ptr() for parameter in copy.accelerated.module.parameters()}
    assert (copy.info, copy.accelerated.folded_norms) == (model.info, model.accelerated.folded_norms)


@pytest.mark.usefixtures("_precision_as_before")
def test_float32_is_exact_even_if_a_module_allows_tf32(plant):
    def careless():
        torch.backends.fp32_precision = "tf32"
        torch.backends.cudnn.allow_tf32 = True
        torch.set_float32_matmul_precision("medium")
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))

    plant(careless)
    backends = torch.backends

    assert {each.fp32_precision for each in (backends.cudnn.conv, backends.cuda.matmul)} == {"ieee"}
    assert {each.fp32_precision for each in (backends.mkldnn.conv, backends.mkldnn.matmul)} == {"ieee"}
    assert not backends.cudnn.allow_tf32  # and torch's compiler, which asks so, is not refused an answer


def test_second_derivatives_do_not_change_attention_in_other_threads(monkeypatch):
    """During a pass with second derivatives, another thread runs passes with and without them."""
    engines = [Engine({"vit": models.load(models.parse(f"vit={VIT}"))}) for _ in range(2)]
    rows = {
        "saliency": (Pass("vit", "saliency", (64, 64)), [Row(noise(0, 64), ClassTarget(1), (call("saliency"),))]),
        "curvature": (
            Pass("vit", "curvature", (64, 64), ("blocks.4",)),
            [Row(noise(0, 64), ClassTarget(1), (call("shapleycam"),))],
        ),
    }
    alone = {kind: engines[1].run(*asked)[0] for kind, asked in rows.items()}
    forward, caller, beside = cam.forward, threading.current_thread(), {}

    def work():
        beside["fused"] = torch.backends.cuda.flash_sdp_enabled()
        beside.update({kind: engines[1].run(*asked)[0] for kind, asked in rows.items()} if beside["fused"] else {})

    def forward_with_another(model, inputs):
        if threading.current_thread() is caller:
            other = threading.Thread(target=work)
            other.start()
            other.join()
        return forward(model, inputs)

    monkeypatch.setattr(cam, "forward", forward_with_another)
    mine = engines[0].run(*rows["curvature"])[0]

    assert torch.backends.cuda.flash_sdp_enabled()
    assert beside["fused"]
    for kind, expected in alone.items():
        assert beside[kind].score == expected.score
        assert np.array_equal(beside[kind].maps[0][0], expected.maps[0][0])
    assert np.array_equal(mine.maps[0][0], alone["curvature"].maps[0][0])


# ------------------------------------------------------------------------------------------------ on a CPU and on a GPU


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_uploaded_arrays_are_unchanged(device, dtype):
    arrays = [noise(seed, 8).astype(dtype) for seed in range(3)]
    arrays[1].flags.writeable = False  # as a decoded photo may be
    result = upload(arrays, torch.device(device))

    assert str(result.device) == device
    assert (result.cpu().numpy() == np.stack(arrays)).all()


@contextmanager
def detected_waits(reaction):
    """Make torch warn ("warn") or raise ("error") where the host waits for a GPU; `tests/simulated` needs no GPU."""
    try:
        with warnings.catch_warnings(action="ignore"):  # "a prototype feature", says torch
            torch.cuda.set_sync_debug_mode(reaction)
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("device", [GPU])
def test_batch_is_uploaded_to_a_gpu_without_a_wait(device):
    preprocess = models.load(models.parse(RESNET)).info.preprocess
    normalise(upload([noise(0, 64)], torch.device(device)), preprocess)
    with detected_waits("error"):
        normalise(upload([noise(0, 64), noise(1, 64)], torch.device(device)), preprocess)
    with detected_waits("error"), pytest.raises(RuntimeError):
        torch.ones(1, device=device).item()


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.filterwarnings("always::UserWarning")
@pytest.mark.parametrize("name", ["gradcam", "eigencam", "saliency"])
def test_batch_makes_the_host_wait_for_a_gpu_at_most_three_times(resnets, device, name, recwarn):
    model = resnets(device)
    kind, layers = ("saliency", []) if name == "saliency" else ("cam", ["layer4"])
    rows = [Row(noise(seed, 64), ClassTarget(seed), (call(name),)) for seed in range(8)]
    run(model, rows, layers, kind)
    recwarn.clear()
    with detected_waits("warn"):
        run(model, rows, layers, kind)

    assert 1 <= sum("synchronizing CUDA operation" in str(each.message) for each in recwarn) <= 3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name", ["gradcam", "layercam", "saliency", "integrated_gradients", "rise", "ablationcam", "fullgrad", "shapleycam"]
)
def test_device_gives_the_maps_of_the_cpu(resnets, device, name):
    asked = [call(name, **({"samples": 16} if name == "rise" else {}))]
    results = [
        explained(model, noise(1, 64), job(model, asked, [RankTarget(0)])).explanations[0]
        for model in (resnets("cpu"), resnets(device))
    ]

    assert results[1].target == results[0].target
    assert correlation(results[1].heatmap, results[0].heatmap) >= 0.999
    if results[0].layer:  # down to the pixels, rounding moves values across the zero of a ReLU
        assert gap(results[1].heatmap, results[0].heatmap) <= 1e-3


@pytest.mark.parametrize("device", DEVICES)
def test_convolution_in_float32_has_its_precision(device):
    """TF32 would have an error of 3e-4 of the norm."""
    torch.manual_seed(0)
    models.load(models.parse(RESNET))
    layer, image = nn.Conv2d(64, 64, 3), torch.randn(4, 64, 32, 32)
    exact = layer.double()(image.double()).detach()
    result = layer.float().to(device)(image.to(device)).detach().cpu()

    assert float((result - exact).norm() / exact.norm()) <= 1e-6


@pytest.mark.parametrize("device", DEVICES)
def test_two_engines_on_one_device_do_not_disturb_each_other(resnets, device):
    both = [Engine({"resnet18": resnets(device).copy_to(device)}, shares_device=True) for _ in range(2)]
    pass_ = Pass("resnet18", "cam", (64, 64), ("layer4",))
    batches = [[Row(noise(10 * i + j, 64), ClassTarget(i), (MethodCall("gradcam"),)) for j in range(3)] for i in (1, 2)]
    alone = [both[0].run(pass_, rows) for rows in batches]
    results = [[], []]

    def work(place):
        results[place] += [both[place].run(pass_, batches[place]) for _ in range(10)]

    threads = [threading.Thread(target=work, args=(place,)) for place in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for place in (0, 1):
        assert len(results[place]) == 10
        assert all(
            gap(each.maps[0][0], mine.maps[0][0]) <= 1e-5
            for answer in results[place]
            for each, mine in zip(answer, alone[place], strict=True)
        )


@pytest.mark.parametrize("device", [GPU])
def test_batch_too_large_for_the_gpu_fails_and_the_next_one_runs(resnets, device):
    model = resnets(device)
    rows = [Row(noise(seed, 64), ClassTarget(1), (call("gradcam"),)) for seed in range(512)]
    run(model, rows[:1], ["layer4"])
    torch.cuda.empty_cache()
    allowed = torch.cuda.memory_reserved() + 64 * 2**20
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.get_device_properties(0).total_memory)
    try:
        with pytest.raises(OutOfMemory):
            run(model, rows, ["layer4"])

        assert len(run(model, rows[:1], ["layer4"])) == 1
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
