"""The table of results: one row for each explanation of a photo, or one row with its error."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from camserve import _files, _local
from camserve.dataset.store import arrow

if TYPE_CHECKING:
    from camserve._errors import CamserveError
    from camserve._result import Explanation, Prediction, Result

SUFFIX = {"jpeg": ".jpg", "png": ".png", "webp": ".webp"}


@dataclass(frozen=True, slots=True)
class Outputs:
    """The files that a job writes for each explanation.

    Attributes:
        overlay: The format of the overlay: "jpeg", "png" or "webp".
        heatmaps: Whether to write the raw map.
        receipts: Whether to write the receipt.
    """

    overlay: str
    heatmaps: bool
    receipts: bool


def schema() -> Any:
    """Return the table's columns, as a pyarrow schema."""
    pa = arrow()
    text, whole = pa.string(), pa.int32()
    prediction = {"class_index": whole, "label": text, "probability": pa.float32(), "score": pa.float32()}
    return pa.schema(
        {
            "image": text,
            "explanation": whole,
            "error": text,
            "error_message": text,
            "model": text,
            "digest": text,
            "width": whole,
            "height": whole,
            "predictions": pa.list_(pa.struct(prediction)),
            "method": text,
            "parameters": text,
            "layer": text,
            "target": text,
            "class_index": whole,
            "contrast": text,
            "score": pa.float32(),
            "verdict": text,
            "verdict_message": text,
            "overlay": text,
        }
    )


def failed(key: str, error: CamserveError) -> dict[str, Any]:
    """Return the row of a photo that could not be explained."""
    return {"image": key, "explanation": 0, "error": error.code.name, "error_message": error.message}


def explained(key: str, place: int, result: Result, digest: str, overlay: str) -> dict[str, Any]:
    """Return the row of one explanation.

    Args:
        key: Of the photo.
        place: Of the explanation in the answer.
        result: The answer.
        digest: Of the model's weights.
        overlay: Where the overlay is, in the job's folder.
    """
    one = result.explanations[place]
    return {
        "image": key,
        "explanation": place,
        "model": result.model,
        "digest": digest,
        "width": result.size[0],
        "height": result.size[1],
        "predictions": list(map(_prediction, result.predictions)),
        "method": one.how,
        "parameters": json.dumps(dict(one.parameters), sort_keys=True),
        "layer": one.layer,
        "target": one.target.name,
        "class_index": one.target.class_index,
        "contrast": one.contrast.name if one.contrast else None,
        "score": one.score,
        "verdict": str(one.verdict),
        "verdict_message": one.verdict_message,
        "overlay": overlay,
    }


def _prediction(one: Prediction) -> dict[str, Any]:
    return {
        "class_index": one.class_index,
        "label": one.label,
        "probability": one.probability,
        "score": one.score,
    }


def pictures(stem: str, mark: str, result: Result, outputs: Outputs) -> list[tuple[str, dict[str, bytes]]]:
    """Return, for each explanation, the path of its overlay and what is to be written, by path.

    Args:
        stem: What the photo is called.
        mark: Hexadecimal digits that no other photo has: they are in every name, so that a photo that
            is explained again writes the same files again.
        result: The answer.
        outputs: The files to write.
    """
    names = _files.Names(Path("overlays", mark[:2]))
    layers = len({each.layer for each in result.explanations}) > 1
    marked = Path(f"{stem}-{mark}.x")
    found: list[tuple[str, dict[str, bytes]]] = []
    for each in result.explanations:
        path = names.unique(_files.stem_of(marked, each, with_layer=layers), SUFFIX[outputs.overlay])
        found.append((path.as_posix(), {path.as_posix(): each.overlay, **_numbers(each, path, outputs)}))
    return found


def _numbers(each: Explanation, path: Path, outputs: Outputs) -> dict[str, bytes]:
    written: dict[str, bytes] = {}
    if outputs.heatmaps and each.heatmap is not None:
        written[path.with_suffix(".npy").as_posix()] = _local.npy(each.heatmap)
    if each.intensity is not None:
        written[path.with_suffix(".intensity.npy").as_posix()] = _local.npy(each.intensity)
    if outputs.receipts:
        written[path.with_suffix(".receipt.json").as_posix()] = each.receipt.to_json().encode()
    return written
