"""Write docs/precision.md: the differences of half precision from float32, on photos, with the embedded model.

PYTHONPATH=tests python docs/generate/precision.py
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from camserve_server import models
from camserve_server.core.arrays import Map, Pixels
from camserve_server.engine.values import Row
from camserve_server.models import LoadedModel
from camserve_server.targets.values import ClassTarget
from methods.tools import call, photo, run

PAGE = Path(__file__).parent.parent / "precision.md"
PHOTOS = ("chelsea", "coffee", "astronaut", "rocket", "china", "flower")
METHODS = ("gradcam", "layercam")
LAYERS = ("bn2", "blocks.4", "blocks.2")
PRECISIONS = ("bfloat16", "float16")
BATCH = 10

HEAD = """\
# Precision

Half precision is faster on hardware that computes it natively. This page shows how much it changes your maps. At the
default layer they are close to those of float32: the median cosine is above 0.999. Maps of earlier layers differ more.
`make precision` generates this page.

- `?precision=bfloat16` is for machines that compute it natively: processors with AMX or AVX-512 BF16, and GPUs of
  2020 or later.
- `?precision=float16` is for GPUs.

## Which part is in half precision

Weights and activations are in half precision up to and including the model's default layer. The weights are converted
once, when the model is loaded. Everything after that layer, the gradients and the map are in float32. The exception
is the linear layers over all tokens in a transformer's last block.

torch's autocast chooses the precision of each operation if a request names an earlier layer, or a method that
differentiates down to the input. A model that cannot be converted always runs under autocast, and the server logs this.
Receipts record the precision.

## Small gradients in float16

camserve does not scale the score before it differentiates. The gradient of a logit needs no scaling: if the logits of
six photos are multiplied by 1024, the cosine of their saliency maps with float32's changes by at most 0.0001. The
gradient of a probability below 0.001 is too small for float16: in the saliency map of a class with probability 0.00004,
98% of the pixels are zero. Explain unlikely classes by their logits, which is the default.

## How much the maps differ

The table compares {count} images: {photos} photos, each as a whole and as four crops of its corners, mirrored and not.
The model is efficientnet_lite0 with its ImageNet weights, and the target is the class that float32 predicts.

- *Cosine* is the cosine similarity of the two raw maps: its minimum and its median over the images.
- *Off* is the largest difference in any cell, as a share of float32's largest absolute value: its maximum and its
  median.
- *Peak* counts the images whose largest cell differs.

"""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Prediction and maps of one image in one precision.

    Attributes:
        best: the predicted class.
        margin: probability of the predicted class minus that of the second.
        maps: maps in the order of `METHODS`.
    """

    best: int
    margin: float
    maps: tuple[Map, ...]


def main() -> int:
    """Measure and write the page."""
    torch.set_num_threads(1)
    PAGE.write_text(page(), encoding="utf-8")
    return 0


def page() -> str:
    """Return the page."""
    images = [view for name in PHOTOS for view in views(photo(name, 299))]
    full = models.load(models.parse("efficientnet_lite0"))
    classes = [measurement.best for measurement in explain(full, images, LAYERS[0])]
    lines = ["| precision | layer | grid | method | cosine | off | peak |", "|---|---|---|---|---|---|---|"]
    changed = []
    for precision in PRECISIONS:
        half = models.load(models.parse(f"efficientnet_lite0?precision={precision}"))
        for layer in LAYERS:
            float32, reduced = (explain(model, images, layer, classes) for model in (full, half))
            lines += rows(precision, full, layer, float32, reduced)
            if layer == LAYERS[0]:
                changed.append(change(precision, float32, reduced))
    head = HEAD.format(count=len(images), photos=len(PHOTOS))
    return head + "\n".join(lines) + "\n\n" + "\n".join(changed) + "\n"


def views(square: Pixels) -> Iterator[Pixels]:
    """Yield ten views of a photo: the whole and its corners, mirrored and not."""
    side = len(square) * 3 // 4
    corners = [square[:side, :side], square[:side, -side:], square[-side:, :side], square[-side:, -side:]]
    for part in (square, *corners):
        small: Any = cv2.resize(part, (224, 224), interpolation=cv2.INTER_AREA)
        yield small
        yield np.ascontiguousarray(small[:, ::-1])


def explain(model: LoadedModel, images: Sequence[Pixels], layer: str, classes: Sequence[int] = ()) -> list[Measurement]:
    """Explain images for the given classes, or for class 0."""
    calls = tuple(map(call, METHODS))
    batch = [
        Row(image, ClassTarget(index), calls) for image, index in zip(images, classes or [0] * len(images), strict=True)
    ]
    measurements = []
    for start in range(0, len(batch), BATCH):
        for result in run(model, batch[start : start + BATCH], [layer]):
            exponentials = np.sort(np.exp(result.logits - result.logits.max()))
            margin = float((exponentials[-1] - exponentials[-2]) / exponentials.sum())
            measurements.append(Measurement(int(result.logits.argmax()), margin, result.maps[0]))
    return measurements


def rows(
    precision: str, model: LoadedModel, layer: str, float32: Sequence[Measurement], reduced: Sequence[Measurement]
) -> Iterator[str]:
    """Yield the table's rows for one precision and layer."""
    for place, method in enumerate(METHODS):
        pairs = [(full.maps[place], half.maps[place]) for full, half in zip(float32, reduced, strict=True)]
        cosines = [float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b)) for a, b in pairs]
        off = [float(np.abs(a - b).max() / np.abs(a).max()) for a, b in pairs]
        moved = sum(a.argmax() != b.argmax() for a, b in pairs)
        grid = "×".join(map(str, pairs[0][0].shape))
        how = "converted" if layer == model.info.default_layer else "autocast"
        yield (
            f"| {precision}, {how} | `{layer}` | {grid} | `{method}` | {min(cosines):.4f}, {np.median(cosines):.4f} |"
            f" {max(off):.3f}, {np.median(off):.3f} | {moved} of {len(pairs)} |"
        )


def change(precision: str, float32: Sequence[Measurement], reduced: Sequence[Measurement]) -> str:
    """Return a line on the number of images whose predicted class differs."""
    margins = [full.margin for full, half in zip(float32, reduced, strict=True) if full.best != half.best]
    largest = f", where float32's first class leads the second by at most {max(margins):.3f}" if margins else ""
    return f"- {precision} predicts another class in {len(margins)} of {len(float32)} images{largest}."


if __name__ == "__main__":
    sys.exit(main())
