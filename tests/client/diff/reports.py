"""Reports of a diff with synthetic maps and photos, for the tests of what a report shows."""

from __future__ import annotations

import functools
import io
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image

from camserve import Box, Photo, Prediction, Verdict
from camserve._values.comparison import Comparison, compare_explanations
from camserve.diff.html import Pictures
from camserve.diff.values import Answer, Case, Change, Check, Failure, Group, Interval, Report, Source

WIDTH, HEIGHT = 200, 150
WHOLE = Photo(WIDTH, HEIGHT, Box(0, 0, WIDTH, HEIGHT))
TABBY = Prediction("tabby", 0.8, 281, 9.0)
LABELS = ("tabby", "lynx", "tiger cat")
METHODS = (("gradcam", "layer4"), ("smoothgrad", ""))
VERSIONS = {"camserve": "0.1", "torch": "2.11"}
DISTINCT = 20  # photos with maps of their own
SIDES = {"gradcam": 7, "smoothgrad": 96}
_EVERY = {Change.ELSEWHERE: 0, Change.PREDICTION: 1, Change.VERDICT: 2}  # of five photos; the others are the same


@dataclass(frozen=True)
class Side:
    """An explanation as far as it is compared."""

    heatmap: Any
    score: float
    target: Prediction
    photo: Photo = WHOLE
    verdict: Verdict = Verdict.OK


def blob(side: int, x: float, y: float, seed: int = 0) -> Any:
    """Return a map with its largest values around a place, in shares of its sides, and negative values far from it."""
    rows, columns = np.mgrid[:side, :side] / side + 0.5 / side
    noise = 0.05 * np.random.default_rng(seed).normal(size=(side, side))
    return (3 * np.exp(-((rows - y) ** 2 + (columns - x) ** 2) / 0.05) - 0.3 + noise).astype(np.float32)


@functools.cache
def jpeg(seed: int) -> bytes:
    """Return a photo."""
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC).save(file, "JPEG", quality=40)
    return file.getvalue()


def change_of(photo: int) -> Change:
    """Return the class of the finding of a photo."""
    return next((change for change, place in _EVERY.items() if photo % 5 == place), Change.NONE)


@functools.cache
def maps(photo: int, method: str) -> tuple[Any, Any]:
    """Return both maps of a photo: they differ much if it looks elsewhere."""
    side = SIDES[method]
    x = 0.8 if change_of(photo) is Change.ELSEWHERE else 0.32
    return blob(side, 0.3, 0.4, photo), blob(side, x, 0.4 + 0.3 * (x > 0.5), photo + 1)


def case_of(photo: int, method: str = "gradcam", layer: str = "layer4", **changes: Any) -> Case:
    """Return a case of a photo."""
    change = change_of(photo)
    other = Prediction(LABELS[1 + photo % 2], 0.6, 287, 7.0) if change is Change.PREDICTION else TABBY
    comparison = comparison_of(photo % DISTINCT, method)
    values: dict[str, Any] = {
        "image": f"photo-{photo}.jpg", "index": 0, "method": method, "layer": layer, "target": "tabby",
        "baseline": Answer(TABBY, 9.0, 0.8, Verdict.OK),
        "candidate": Answer(other, 9.0 + comparison.score_change, 0.7, comparison.verdicts[1]),
        "comparison": comparison, "position": 1 - comparison.spearman, "change": change,
    }  # fmt: skip
    return Case(**{**values, **changes})


@functools.cache
def comparison_of(photo: int, method: str) -> Comparison:
    """Return the comparison of both maps of a photo."""
    one, two = maps(photo, method)
    verdict = Verdict.ALL_NEGATIVE if change_of(photo) is Change.VERDICT else Verdict.OK
    candidate = Side(two, 9.0 - photo / 10, replace(TABBY, probability=0.7), verdict=verdict)
    return compare_explanations(Side(one, 9.0, TABBY), candidate)


def report_of(photos: int = 10, methods: Any = METHODS, **changes: Any) -> Report:
    """Return a report of numbered photos."""
    cases = [case_of(photo, *method) for photo in range(photos) for method in methods]
    cases.sort(key=lambda case: case.comparison.spearman)
    return report(cases, **changes)


def report(cases: Any, **changes: Any) -> Report:
    """Return a report of cases, which are sorted already."""
    values: dict[str, Any] = {
        "baseline": Source("resnet50", "resnet50", "IMAGENET1K_V1", "0676ba61" * 8, VERSIONS),
        "candidate": Source("resnet50-v2", "resnet50", "IMAGENET1K_V2", "11ad3fa6" * 8, VERSIONS),
        "photos": len({case.image for case in cases}),
        "predictions_changed": Interval(0.2, 0.1, 0.3),
        "checks": (check_of("gradcam", "layer4"), check_of("smoothgrad", "", changed=False)),
        "cases": tuple(cases),
        "groups": tuple(groups_of(cases)),
        "failures": (Failure("broken.jpg", "candidate", "image: not a JPEG"),),
        "reasons": ("gradcam looks elsewhere for 20 % of the photos, and 5 % are allowed",),
        "max_changed": 0.05,
    }  # fmt: skip
    return Report(**{**values, **changes})


def check_of(method: str, layer: str, *, changed: bool = True) -> Check:
    """Return a check."""
    share = Interval(0.2, 0.12, 0.29) if changed else Interval(0.02, 0, 0.05)
    median = Interval(0.55, 0.5, 0.61) if changed else Interval(0.93, 0.91, 0.95)
    reasons = ("20 % of the photos look elsewhere",) if changed else ()
    return Check(method, layer, 10, median, 0.94, 0.82, 0.08, share, changed, reasons)


def groups_of(cases: Any) -> list[Group]:
    """Return one group for each class of findings."""
    found = {change: tuple(i for i, case in enumerate(cases) if case.change is change) for change in _EVERY}
    titles = {
        Change.ELSEWHERE: "Looks at the lower right instead of the left",
        Change.PREDICTION: "Predicts “lynx” or “tiger cat” instead of “tabby”",
        Change.VERDICT: "The map has no evidence for the class",
    }
    return [
        Group(change, titles[change], indices, len({cases[index].image for index in indices}))
        for change, indices in found.items() if indices
    ]  # fmt: skip


def pictures_of(case: Case) -> Pictures:
    """Return the pictures of a case of a numbered photo."""
    photo = int(case.image.removeprefix("photo-").removesuffix(".jpg")) % DISTINCT
    return Pictures(jpeg(photo), (WHOLE, WHOLE), maps(photo, case.method))
