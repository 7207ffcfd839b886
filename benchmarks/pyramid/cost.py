"""Processor time of a pyramid's map compared with that of one layer, and the main scale of an object."""

import time
from collections.abc import Sequence
from statistics import median

import numpy as np

from benchmarks.results import Part, Table
from camserve_server import Explainer

DETECTORS = {"retinanet_resnet50_fpn": 256, "ssdlite320_mobilenet_v3_large": 320}
"""Detectors that find something with random weights, and the side of their input."""


def measure(rounds: int) -> Part:
    """Measure torchvision's detectors with random weights."""
    rows = [_row(name, rounds) for name in DETECTORS]
    columns = (
        "detector",
        "scales",
        "one layer (CPU ms)",
        "pyramid (CPU ms)",
        "ratio",
        "share of an object's main scale",
    )
    notes = (
        "Processor time of a request for a Grad-CAM map without a picture, one thread; the median of requests in turn.",
        "The last column is the share of Σ|g·A| on the main scale of the most certain object in noise.",
    )
    return Part("pyramid cost", [Table("torchvision's detectors, with random weights", columns, rows, notes)])


def _row(name: str, rounds: int) -> tuple[str, ...]:
    side = DETECTORS[name]
    photo = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)
    one: list[float] = []
    all_scales: list[float] = []
    with Explainer(f"torchvision:{name}?weights=none&size={side}", device="cpu") as explainer:
        model = explainer.model()
        for _ in range(rounds):
            for times, layers in ((one, [model.default_layer]), (all_scales, ["pyramid"])):
                start = time.process_time()
                explainer.explain(photo, layers=layers, overlay=None)
                times.append(1e3 * (time.process_time() - start))
        share = _main_share(explainer, photo, model.pyramid)
    ratio = median(again / before for before, again in zip(one, all_scales, strict=True))
    times_text = (f"{median(one):.0f}", f"{median(all_scales):.0f}", f"{ratio:.2f}")
    return name, str(len(model.pyramid)), *times_text, f"{share:.2f}"


def _main_share(explainer: Explainer, photo: np.ndarray, layers: Sequence[str]) -> float:
    result = explainer.explain(photo, methods="hirescam", layers=[*layers], overlay=None)
    sums = np.array([np.abs(np.asarray(each.heatmap)).sum() for each in result.explanations])
    return float(sums.max() / sums.sum())
