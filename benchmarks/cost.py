"""Measure what more targets, methods, rows, layers and pixels cost, relative to one Grad-CAM of one target."""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.engine import Ours
from benchmarks.results import Part, Table
from benchmarks.scale import Scale
from benchmarks.timing import Run, in_turn, ratio
from camserve_server import jobs, models
from camserve_server.engine import Engine
from camserve_server.engine.values import Row
from camserve_server.methods.values import MethodCall
from camserve_server.models.values import Pass
from camserve_server.scheduling import Batcher, Collect
from camserve_server.targets.values import ClassTarget

CAMS = ("gradcam", "gradcam_plus_plus", "xgradcam", "hirescam", "layercam")
TARGETS = (1, 2, 5, 10)
ONE = "one Grad-CAM"


def asking(model: models.LoadedModel, calls: Sequence[MethodCall], targets: int = 1, layers: Sequence[str] = ()) -> Run:
    """Return a function that runs one request as a server does: planned, batched, run."""
    info = model.info
    named = tuple(layers) or (info.default_layer,)
    job = jobs.Job(info, tuple(calls), named, tuple(ClassTarget(index) for index in range(targets)))
    image = np.random.default_rng(0).integers(0, 256, (*info.preprocess.size, 3), np.uint8)

    async def once() -> None:
        async with Batcher(Engine({info.name: model}).run) as batcher:

            async def submit(pass_: Pass, rows: Sequence[Row], collect: Collect) -> None:
                await batcher.submit(pass_, rows, collect)

            await jobs.explain(job, image, submit)

    return lambda: asyncio.run(once())


def measure(scale: Scale, *, say: Callable[[str], None] = print) -> Part:
    """Measure each model: what it takes for more, as a multiple of what it takes for one."""
    part, rows = Part("cost"), []
    for name in scale.models:
        model = Ours.of(scale.spec(name)).model
        runs = {ONE: asking(model, _cams(1))} | _more(scale, model)
        if name == scale.models[0]:  # one model is enough to see what pixels cost
            others = {size: Ours.of(scale.spec(name, size=size)).model for size in scale.sizes}
            runs |= {f"{size} by {size} pixels": asking(other, _cams(1)) for size, other in others.items()}
        seconds = in_turn(runs, scale.rounds).wall
        found = {what: ratio(some, seconds[ONE]) for what, some in seconds.items()}
        rows += [(name, what, f"{value:.2f}") for what, value in found.items() if what != ONE]
        say(f"cost: {name}: " + ", ".join(f"{what} {value:.2f}" for what, value in found.items()))
    title = f"Time over that of one Grad-CAM of one target, at {scale.size} by {scale.size} pixels"
    part.tables.append(Table(title, ("model", "what", "times"), rows))
    return part


def _cams(count: int) -> list[MethodCall]:
    return [jobs.default_call(name) for name in CAMS[:count]]


def _more(scale: Scale, model: models.LoadedModel) -> dict[str, Run]:
    layers = _some_layers(model)
    return {
        **{f"{count} targets": asking(model, _cams(1), count) for count in TARGETS[1:]},
        **{f"{count} CAM methods": asking(model, _cams(count)) for count in range(2, len(CAMS) + 1)},
        "10 targets by 5 CAM methods": asking(model, _cams(5), 10),
        **{f"{count} layers": asking(model, _cams(1), layers=layers[:count]) for count in range(2, len(layers) + 1)},
        "saliency": asking(model, [jobs.default_call("saliency")]),
        **{f"smoothgrad of {count}": asking(model, [_smoothgrad(count)]) for count in scale.smoothgrad},
    }


def _smoothgrad(count: int) -> MethodCall:
    call = jobs.default_call("smoothgrad")
    return MethodCall(call.name, {**call.parameters, "samples": count})


def _some_layers(model: models.LoadedModel) -> list[str]:
    """Return the default layer and three above it, at a quarter, a half and three quarters of the way."""
    fit = [name for name, layer in model.info.layers.items() if layer.layout]
    end = fit.index(model.info.default_layer)
    above = [fit[end * share // 4] for share in (3, 2, 1)]
    return list(dict.fromkeys([model.info.default_layer, *above]))
