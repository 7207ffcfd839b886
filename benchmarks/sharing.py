"""What more targets and methods of one image cost: ten classes by five CAM methods, against one class by one."""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.capture import ROUNDS, ratios
from camserve_server import jobs, models
from camserve_server.batcher import Batcher, Collect
from camserve_server.engine import Engine
from camserve_server.types import ClassTarget, Pass, Row

CAMS = ("gradcam", "gradcam_plus_plus", "xgradcam", "hirescam", "layercam")
TARGETS = 10


def asking(model: models.LoadedModel, methods: Sequence[str], targets: int) -> Callable[[], object]:
    """Return a function that runs one request as a server does: planned, batched, run."""
    info = model.info
    calls = tuple(jobs.part(name) for name in methods)
    job = jobs.Job(info, calls, (info.default_layer,), tuple(ClassTarget(index) for index in range(targets)))
    image = np.random.default_rng(0).integers(0, 256, (*info.preprocess.size, 3), np.uint8)

    async def once() -> None:
        async with Batcher(Engine({info.name: model}).run) as batcher:

            async def submit(pass_: Pass, rows: Sequence[Row], collect: Collect) -> None:
                await batcher.submit(pass_, rows, collect)

            await jobs.explain(job, image, submit)

    return lambda: asyncio.run(once())


def main() -> None:
    """Print the ratio for each model, lower is better."""
    print(
        f"sharing: {TARGETS} classes by {len(CAMS)} CAM methods / one by Grad-CAM, float32, median of {ROUNDS} in turn"
    )
    for name in ("resnet50", "mobilenet_v3_large", "vit_b_16"):
        model = models.load(models.parse(f"torchvision:{name}?weights=none"))
        row = ratios({"one": asking(model, ("gradcam",), 1), "all": asking(model, CAMS, TARGETS)})
        print(f"{name}: {row['all']:.2f}")
