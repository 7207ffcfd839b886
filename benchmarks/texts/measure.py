"""Measure how often the map of a caption is strongest in the quadrant that shows it, method by method."""

import io
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

import camserve
from benchmarks.texts import toy
from camserve_server import running

METHODS = (
    "gradcam", "hirescam", "layercam", "gradcam_plus_plus", "attention_rollout", "gradient_rollout", "chefer", "legrad",
    "gradeclip", "saliency", "occlusion", "random",
)  # fmt: skip
SCENES = 25
CHANCE = 0.25


@dataclass(frozen=True, slots=True)
class Row:
    """Result of one method, for a caption alone and in contrast to the scene's other captions.

    Attributes:
        peak: share of the maps with their maximum in the caption's quadrant.
        energy: mean share of the positive values that is in the quadrant.
        contrast: `peak` for contrasts with the caption of another quadrant.
    """

    peak: float
    energy: float
    contrast: float


@contextmanager
def served(steps: int = toy.STEPS) -> Iterator[camserve.Client]:
    """Train the toy and serve it; yield a client."""
    with tempfile.TemporaryDirectory() as folder:
        path = toy.save(Path(folder) / "toy", steps)
        with running(models=(f"hf:{path}",), device="cpu") as address, camserve.Client(address, timeout=600) as client:
            yield client


def measure(client: camserve.Client, methods: Sequence[str] = METHODS, count: int = SCENES) -> Mapping[str, Row]:
    """Return the result of each method over the four captions of new scenes.

    Args:
        client: a client of the server with the toy.
        methods: the methods.
        count: the number of scenes.
    """
    made = toy.scenes(count, seed=1)
    found: dict[str, list[tuple[bool, float, bool]]] = {name: [] for name in methods}
    for photo, captions in zip(made.photos, made.captions, strict=True):
        texts = [toy.CAPTIONS[caption] for caption in captions]
        contrasts = [camserve.contrast(place, (place + 1) % 4) for place in range(4)]
        options = {"texts": texts, "targets": [*map(camserve.text, texts), *contrasts], "overlay": None}
        for name in methods:
            result = client.explain(_png(photo), methods=[name], **options)  # type: ignore[arg-type]
            heats = [explanation.heatmap_on_image for explanation in result.explanations]
            for place in range(4):
                peak, energy = _in_quadrant(heats[place], place)
                found[name].append((peak, energy, _in_quadrant(heats[4 + place], place)[0]))
    return {name: Row(*(float(np.mean(values)) for values in zip(*rows, strict=True))) for name, rows in found.items()}


def _in_quadrant(heatmap: NDArray[np.float32], place: int) -> tuple[bool, float]:
    """Return whether a map's maximum is in a quadrant, and the share of its positive values there."""
    positive = np.nan_to_num(heatmap).clip(min=0)
    row, column = np.unravel_index(int(np.nanargmax(heatmap)), heatmap.shape)
    top, left = place // 2 * toy.QUADRANT, place % 2 * toy.QUADRANT
    inside = positive[top : top + toy.QUADRANT, left : left + toy.QUADRANT].sum()
    is_peak = top <= row < top + toy.QUADRANT and left <= column < left + toy.QUADRANT
    return bool(is_peak), float(inside / positive.sum()) if positive.any() else 0.0


def recall(client: camserve.Client, count: int = SCENES) -> float:
    """Return the share of the scenes' captions that are among the model's four most probable ones."""
    made = toy.scenes(count, seed=1)
    hits = []
    for photo, captions in zip(made.photos, made.captions, strict=True):
        result = client.explain(
            _png(photo), texts=toy.CAPTIONS, methods=["random"], max_predictions=4, overlay=None, heatmap=False
        )
        named = {prediction.label for prediction in result.predictions}
        hits += [toy.CAPTIONS[caption] in named for caption in captions]
    return float(np.mean(hits))


def table(rows: Mapping[str, Row]) -> str:
    """Return the results as a table in Markdown."""
    lines = ["| method | peak in the quadrant ↑ | share in it ↑ | peak, contrast ↑ |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {row.peak:.2f} | {row.energy:.2f} | {row.contrast:.2f} |" for name, row in rows.items()]
    return "\n".join(lines)


def _png(photo: NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(photo).save(file, "PNG")
    return file.getvalue()
