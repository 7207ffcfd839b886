"""The model by itself: its maps beside a CPU's, its speed beside plain forward passes, and what graphs would gain."""

import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.engine import CLASS, made
from benchmarks.gpu.scale import Cells, Clock, Scale
from benchmarks.results import Part, Table
from benchmarks.scale import RESNET, VIT
from benchmarks.timing import Run
from camserve_server import models
from camserve_server.core.arrays import Map, Pixels
from camserve_server.engine import Engine
from camserve_server.engine.values import Row
from camserve_server.methods import METHODS
from camserve_server.methods.values import MethodCall
from camserve_server.models import LoadedModel
from camserve_server.models.values import Kind, Pass
from camserve_server.targets.values import ClassTarget, RankTarget, Target

Speeds = dict[str, float]
"""Images a second, by contestant."""

PLAIN, PLAIN_TF32, PLAIN_HALF = "plain float32", "plain TF32", "plain bfloat16"
OURS, OURS_HALF = "camserve float32", "camserve bfloat16"
TOP, TWO = "camserve bfloat16, top class", "camserve bfloat16, two engines"
CONTESTANTS = (PLAIN, PLAIN_TF32, PLAIN_HALF, OURS, OURS_HALF, TOP, TWO)
NEEDS = 30.0  # seconds that all of them take
PROFILED = 5  # runs
BATCHES = (32, 128)  # whose memory is measured
COMPILING = 45.0  # seconds that a graph and a compiled model take
LIKENESS: tuple[tuple[str, Kind], ...] = (("gradcam", "cam"), ("layercam", "cam"), ("saliency", "saliency"))
LEAST, MOST, WAITS = 0.9, 1e-3, 3


def pictures(size: tuple[int, int], count: int) -> list[Pixels]:
    """Make images [height, width, 3] of noise."""
    return list(np.random.default_rng(0).integers(0, 256, (count, *size, 3), np.uint8))


def asked(model: LoadedModel, rows: int, name: str = "gradcam", target: Target | None = None) -> list[Row]:
    """Build the rows of one method for a number of images."""
    call = MethodCall(name, {one.name: one.default for one in METHODS[name].parameters})
    return [Row(image, target or ClassTarget(CLASS), (call,)) for image in pictures(model.info.preprocess.size, rows)]


def pass_of(model: LoadedModel, kind: Kind = "cam") -> Pass:
    """Return the pass over a model's default layer, or over its input."""
    info = model.info
    return Pass(info.name, kind, info.preprocess.size, (info.default_layer,) if kind == "cam" else ())


def ours(model: LoadedModel, rows: int, target: Target | None = None, *, beside: bool = False) -> Run:
    """Return a function that explains a number of images by Grad-CAM, from uint8 on the host to maps on the host."""
    engine, pass_, mine = (
        Engine({model.info.name: model}, shares_device=beside),
        pass_of(model),
        asked(model, rows, "gradcam", target),
    )
    return lambda: engine.run(pass_, mine)


# --- maps ---


def likeness(scale: Scale, _clock: Clock) -> Part:
    """Compare maps with those that a CPU gives in float32."""
    part, rows = Part("likeness"), list[Cells]()
    for name in scale.models:
        exact = models.load(models.parse(scale.spec(name)))
        kinds = _loaded(name, scale)
        for method, kind in LIKENESS:
            expected = _maps(exact, method, kind)
            found = {precision: _maps(model, method, kind) for precision, model in kinds.items()}
            gap = max(float(abs(a - b).max() / abs(b).max()) for a, b in zip(found["float32"], expected, strict=True))
            cosines = [min(map(_cosine, maps, expected)) for maps in found.values()]
            rows.append((name, method, f"{gap:.1e}", *(f"{cosine:.5f}" for cosine in cosines)))
            if kind == "cam":  # down to the pixels, rounding moves values across the zero of a ReLU
                part.at_most(f"{name}, {method}: largest difference in float32 / largest value", MOST, gap)
    columns = ("model", "method", "float32: difference / maximum", "float32: least cosine", "bfloat16: least cosine")
    part.tables.append(
        Table(f"Maps of {scale.device} beside those of a CPU in float32, 4 images of noise", columns, rows)
    )
    return part


def _maps(model: LoadedModel, method: str, kind: Kind) -> list[Map]:
    engine = Engine({model.info.name: model})
    return [one.maps[0][0] for one in engine.run(pass_of(model, kind), asked(model, 4, method))]


def _cosine(one: Map, other: Map) -> float:
    a, b = one.ravel().astype(np.float64), other.ravel().astype(np.float64)
    return float(a @ b / np.sqrt(a @ a * (b @ b)))


# --- speed ---


def bursts(runs: Mapping[str, Run], batch: int, scale: Scale) -> Speeds:
    """Let everything take turns; return the median images a second over the rounds."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(scale.rounds + 1):
        for name, run in runs.items():
            speed = batch * _burst(run, scale)
            if number:
                found[name].append(speed)
    return {name: statistics.median(speeds) for name, speeds in found.items()}


def _burst(run: Run, scale: Scale) -> float:
    run()
    scale.wait()
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < scale.burst:
        run()
        count += 1
    scale.wait()
    return count / (time.perf_counter() - began)


def engine(scale: Scale, clock: Clock) -> Part:
    """Time camserve's engine beside plain forward passes of tensors that are on the device already."""
    part, rows, notes = Part("engine"), list[Cells](), list[str]()
    for name in scale.models:
        loaded = _loaded(name, scale)
        loaded[TWO] = loaded["bfloat16"].copy_to(scale.device)
        for batch in scale.batches:
            if not clock.allows(NEEDS if scale.gpu else 1):
                notes.append(f"Left out for want of time: {name} at {batch}.")
                continue
            speeds, busy = _timed(name, loaded, batch, scale)
            share = speeds[OURS_HALF] / speeds[PLAIN_HALF]
            rows.append((name, str(batch), *(f"{one:,.0f}" for one in speeds.values()), f"{share:.2f}", f"{busy:.0%}"))
            if scale.gpu and name in (RESNET, VIT):
                part.at_least(f"{name}, batch {batch}: camserve / plain, bfloat16", LEAST, share)
    columns = ("model", "batch", *CONTESTANTS, "bfloat16: camserve / plain", "bfloat16: GPU busy")
    notes.append(
        "Plain: of ready tensors on the device, in the faster memory format of contiguous and channels last. "
        "camserve: from images on the host to maps on the host."
    )
    part.tables.append(Table("Images a second", columns, rows, tuple(notes)))
    return part


def _loaded(name: str, scale: Scale) -> dict[str, LoadedModel]:
    return {
        precision: models.load(models.parse(scale.spec(name, precision)), scale.device)
        for precision in ("float32", "bfloat16")
    }


def _timed(name: str, loaded: Mapping[str, LoadedModel], batch: int, scale: Scale) -> tuple[Speeds, float]:
    """Return the images a second of every contestant, and the share of the time that a GPU works for camserve."""
    with ThreadPoolExecutor(2) as pool:
        runs = _plain(name, batch, scale) | _ours(loaded, batch, pool)
        speeds = bursts(runs, batch, scale)
    speeds[TWO] *= 2  # of whose batches there are two
    return speeds, kernels(runs[OURS_HALF], scale) * speeds[OURS_HALF] / batch


def _plain(model: str, batch: int, scale: Scale) -> dict[str, Run]:
    ways: dict[str, tuple[torch.dtype, Callable[[nn.Module, Tensor], None]]] = {
        PLAIN: (torch.float32, _predict),
        PLAIN_TF32: (torch.float32, _in_tf32),
        PLAIN_HALF: (torch.bfloat16, _predict),
    }
    return {name: _faster(model, batch, scale, dtype, predict) for name, (dtype, predict) in ways.items()}


def _faster(
    model: str, batch: int, scale: Scale, dtype: torch.dtype, predict: Callable[[nn.Module, Tensor], None]
) -> Run:
    """Return a plain forward pass in the memory format in which it is faster here."""
    runs = {
        str(order): partial(predict, _placed(model, scale, dtype, order), _images(batch, scale, order).to(dtype))
        for order in (torch.contiguous_format, torch.channels_last)
    }
    speeds = bursts(runs, batch, replace(scale, rounds=1))
    return runs[max(speeds, key=lambda order: speeds[order])]


def _placed(
    model: str, scale: Scale, dtype: torch.dtype, order: torch.memory_format = torch.channels_last
) -> nn.Module:
    return made(model, scale.size).to(scale.device, dtype).to(memory_format=order)


def _images(batch: int, scale: Scale, order: torch.memory_format = torch.channels_last) -> Tensor:
    images = torch.randn(batch, 3, scale.size, scale.size, device=scale.device)
    return images.contiguous(memory_format=order)


def _predict(module: Callable[[Tensor], object], images: Tensor) -> None:
    with torch.inference_mode():
        module(images)


def _in_tf32(module: nn.Module, images: Tensor) -> None:
    """Predict as torch would if nobody asked for exact float32."""
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("high")
    try:
        _predict(module, images)
    finally:
        torch.backends.cudnn.allow_tf32 = False
        torch.set_float32_matmul_precision("highest")


def _ours(loaded: Mapping[str, LoadedModel], batch: int, pool: ThreadPoolExecutor) -> dict[str, Run]:
    full, half = loaded["float32"], loaded["bfloat16"]
    pair = [ours(model, batch, beside=True) for model in (half, loaded[TWO])]
    return {
        OURS: ours(full, batch),
        OURS_HALF: ours(half, batch),
        TOP: ours(half, batch, RankTarget(0)),
        TWO: lambda: list(pool.map(_call, pair)),
    }


def _call(run: Run) -> object:
    return run()


def kernels(run: Run, scale: Scale) -> float:
    """Return the seconds that a GPU is busy with one run; NaN without a GPU or without a profiler."""
    if not scale.gpu:
        return math.nan
    try:
        return _profiled(run, scale) or math.nan
    except Exception as error:  # noqa: BLE001 -- whatever it is, the rest is measured
        print(f"the GPU's time is not known: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return math.nan


def _profiled(run: Run, scale: Scale) -> float:
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(PROFILED):
            run()
        scale.wait()
    events: Any = seen.key_averages()
    return sum(float(event.self_device_time_total) for event in events) / 1e6 / PROFILED


# --- waits ---


def waits(scale: Scale, _clock: Clock) -> Part:
    """Count the operations in a batch for which the host waits for the GPU, as torch warns of them."""
    rows, notes = list[Cells](), [] if scale.gpu else ["Counted on a GPU only."]
    part = Part("waits")
    for name in scale.models if scale.gpu else ():
        model = models.load(models.parse(scale.spec(name, "bfloat16")), scale.device)
        for method, kind in LIKENESS:
            few, many = (_waits(model, method, kind, count) for count in (2, 8))
            rows.append((name, method, str(few), str(many)))
            if method == "gradcam":
                part.at_most(f"{name}: waits in a batch of Grad-CAM", WAITS, many)
    columns = ("model", "method", "batch of 2", "batch of 8")
    part.tables.append(Table("Waits of the host for the GPU in a batch", columns, rows, tuple(notes)))
    return part


def _waits(model: LoadedModel, method: str, kind: Kind, count: int) -> int:
    engine, pass_, rows = Engine({model.info.name: model}), pass_of(model, kind), asked(model, count, method)
    engine.run(pass_, rows)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            torch.cuda.set_sync_debug_mode("warn")
            engine.run(pass_, rows)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(one.message) for one in seen)


# --- memory ---


def memory(scale: Scale, _clock: Clock) -> Part:
    """Measure what a batch adds at its peak to the memory of the device, beside a plain forward pass."""
    columns = ("model", "precision", "batch", "plain MiB", "camserve MiB", "ratio")
    rows = list(_peaks(scale)) if scale.gpu else []
    notes = () if scale.gpu else ("Measured on a GPU only.",)
    return Part("memory", [Table("What a batch adds to the memory of the GPU, at its peak", columns, rows, notes)])


def _peaks(scale: Scale) -> Iterator[Cells]:
    for name in scale.models:
        for precision, loaded in _loaded(name, scale).items():
            dtype: torch.dtype = getattr(torch, precision)
            module = _placed(name, scale, dtype)
            for batch in BATCHES:
                images = _images(batch, scale).to(dtype)
                theirs, mine = _peak(partial(_predict, module, images), scale), _peak(ours(loaded, batch), scale)
                yield name, precision, str(batch), f"{theirs:.0f}", f"{mine:.0f}", f"{mine / theirs:.2f}"


def _peak(run: Run, scale: Scale) -> float:
    run()
    scale.wait()
    torch.cuda.reset_peak_memory_stats(scale.device)
    before = torch.cuda.memory_allocated(scale.device)
    run()
    return float(torch.cuda.max_memory_allocated(scale.device) - before) / 2**20


# --- graphs ---


def graphs(scale: Scale, clock: Clock) -> Part:
    """Time a forward pass in bfloat16 eagerly, as a CUDA graph, and compiled; and how long each takes to be made."""
    part, rows, notes = Part("graphs"), list[Cells](), list[str]()
    for name in scale.models:
        for batch in scale.graphed:
            if clock.allows(COMPILING if scale.gpu else 1):
                rows += [(name, str(batch), *cells) for cells in _launched(name, batch, scale, notes)]
            else:
                notes.append(f"Left out for want of time: {name} at {batch}.")
    columns = ("model", "batch", "way", "images/s", "of eager", "seconds to make")
    part.tables.append(Table("A plain forward pass in bfloat16, launched in several ways", columns, rows, tuple(notes)))
    return part


def _launched(name: str, batch: int, scale: Scale, notes: list[str]) -> Iterator[Cells]:
    module, images = _placed(name, scale, torch.bfloat16), _images(batch, scale).bfloat16()
    runs: dict[str, Run] = {"eager": partial(_predict, module, images)}
    took = {"eager": 0.0}
    for way, make in _ways(scale).items():
        began = time.perf_counter()
        try:
            runs[way] = make(module, images)
            took[way] = time.perf_counter() - began
        except Exception as error:  # noqa: BLE001 -- whatever it is, the others are measured
            notes.append(f"{name} at {batch}, {way}: {type(error).__name__}: {str(error)[:150]}")
    speeds = bursts(runs, batch, scale)
    for way, speed in speeds.items():
        yield way, f"{speed:,.0f}", f"{speed / speeds['eager']:.2f}", f"{took[way]:.1f}"


Way = Callable[[nn.Module, Tensor], Run]


def _ways(scale: Scale) -> dict[str, Way]:
    return {"CUDA graph": _graphed, "compiled, reduce-overhead": _compiled} if scale.gpu else {}


def _graphed(module: nn.Module, images: Tensor) -> Run:
    """Record the kernels of a forward pass once, to launch them all by one call; the input is copied in."""
    held = images.clone()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch does not declare it
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.inference_mode():
        for _ in range(3):
            module(held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        module(held)

    def run() -> None:
        held.copy_(images)
        graph.replay()

    return run


def _compiled(module: nn.Module, images: Tensor) -> Run:
    torch.compiler.reset()  # of another batch's size: this one is compiled for its own
    compiled = torch.compile(module, mode="reduce-overhead", dynamic=False)
    for _ in range(3):
        _predict(compiled, images)
    torch.cuda.synchronize()
    return partial(_predict, compiled, images)
