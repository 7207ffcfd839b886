"""Time of a pyramid's map compared with that of one layer, and the scales that an object's score depends on."""

import time
from collections.abc import Sequence
from statistics import median

import numpy as np

from benchmarks.results import Part, Table
from camserve_server import Explainer

DETECTORS = (
    "torchvision:retinanet_resnet50_fpn?weights=none&size=320",
    "torchvision:fcos_resnet50_fpn?weights=none&size=320",
    "torchvision:fasterrcnn_resnet50_fpn?weights=none&size=320",
    "torchvision:ssd300_vgg16?weights=none&size=300",
    "torchvision:ssdlite320_mobilenet_v3_large?weights=none&size=320",
)
OBJECTS = 4


def measure(rounds: int) -> Part:
    """Measure torchvision's detectors with random weights."""
    rows = [_row(spec, rounds) for spec in DETECTORS]
    columns = ("detector", "scales", "one layer (ms)", "pyramid (ms)", "ratio", "share of an object's main scale")
    notes = (
        "Time of a Grad-CAM map without a picture, the median of requests in turn.",
        f"The last column is the share of Σ|g·A| on one scale, the mean over {OBJECTS} objects in noise.",
    )
    return Part("pyramid cost", [Table("torchvision's detectors, with random weights", columns, rows, notes)])


def _row(spec: str, rounds: int) -> tuple[str, ...]:
    photo = np.random.default_rng(0).integers(0, 256, (320, 320, 3), np.uint8)
    with Explainer(spec, device="cpu") as explainer:
        model = explainer.model()
        one: list[float] = []
        all_scales: list[float] = []
        for _ in range(rounds):
            for times, layers in ((one, [model.default_layer]), (all_scales, ["pyramid"])):
                start = time.perf_counter()
                explainer.explain(photo, layers=layers, overlay=None)
                times.append(1e3 * (time.perf_counter() - start))
        share = _main_share(explainer, photo, model.pyramid)
    times_text = (f"{median(one):.0f}", f"{median(all_scales):.0f}", f"{median(all_scales) / median(one):.2f}")
    name = spec.removeprefix("torchvision:").partition("?")[0]
    return name, str(len(model.pyramid)), *times_text, f"{share:.2f}"


def _main_share(explainer: Explainer, photo: np.ndarray, layers: Sequence[str]) -> float:
    result = explainer.explain(photo, methods="hirescam", layers=[*layers], top_k=OBJECTS, overlay=None)
    sums = np.array([np.abs(np.asarray(each.heatmap)).sum() for each in result.explanations])
    by_object = sums.reshape(len(layers), -1)
    return float((by_object.max(0) / by_object.sum(0)).mean())
