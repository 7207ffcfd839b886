"""Rows of the table of results: one for each explanation of a photo, or one with the photo's error."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from camserve._core.files import npy_file
from camserve._files.naming import UniqueNames, stem_of
from camserve.dataset.parquet import arrow

if TYPE_CHECKING:
    from camserve._core.errors import CamserveError
    from camserve._values.prediction import Prediction
    from camserve._values.regions import Region
    from camserve._values.result import Explanation, Result

SUFFIXES = {"jpeg": ".jpg", "png": ".png", "webp": ".webp"}


@dataclass(frozen=True, slots=True)
class Outputs:
    """Files that a job writes for each explanation.

    Attributes:
        overlay: Format of the overlay: "jpeg", "png" or "webp".
        heatmaps: True to write the raw map.
        receipts: True to write the receipt.
    """

    overlay: str
    heatmaps: bool
    receipts: bool


def schema(*, regions: bool = False) -> Any:
    """Return the columns of the table as a pyarrow schema.

    Args:
        regions: True for a job that also returns the regions of each map.
    """
    pa = arrow()
    text, integer = pa.string(), pa.int32()
    prediction = {"class_index": integer, "label": text, "probability": pa.float32(), "score": pa.float32()}
    columns = pa.schema(
        {
            "image": text,
            "explanation": integer,
            "error": text,
            "error_message": text,
            "model": text,
            "digest": text,
            "width": integer,
            "height": integer,
            "predictions": pa.list_(pa.struct(prediction)),
            "method": text,
            "parameters": text,
            "layer": text,
            "target": text,
            "class_index": integer,
            "contrast": text,
            "score": pa.float32(),
            "verdict": text,
            "verdict_message": text,
            "overlay": text,
        }
    )
    return columns.append(pa.field("regions", _regions_type())) if regions else columns


def _regions_type() -> Any:
    pa = arrow()
    number = pa.float32()
    box = pa.struct(dict.fromkeys(("left", "top", "right", "bottom"), number))
    peak = pa.struct({"x": number, "y": number})
    region = {"box": box, "area": pa.int64(), "share": number, "peak": peak, "peak_value": number}
    return pa.list_(pa.struct(region))


def failed(key: str, error: CamserveError, *, regions: bool) -> dict[str, Any]:
    """Return the row of a photo that could not be explained; ``regions`` is as for ``schema``."""
    row = {"image": key, "explanation": 0, "error": error.code.name, "error_message": error.message}
    return row | ({"regions": None} if regions else {})


def explained(key: str, index: int, result: Result, digest: str, overlay: str, *, regions: bool) -> dict[str, Any]:
    """Return the row of one explanation.

    Args:
        key: Key of the photo.
        index: Index of the explanation in the result.
        result: The result.
        digest: SHA-256 of the model's weights.
        overlay: Path of the overlay in the job's folder.
        regions: As for ``schema``.
    """
    explanation = result.explanations[index]
    row = {
        "image": key,
        "explanation": index,
        "model": result.model,
        "digest": digest,
        "width": result.size[0],
        "height": result.size[1],
        "predictions": list(map(_prediction_columns, result.predictions)),
        "method": explanation.how,
        "parameters": json.dumps(dict(explanation.parameters), sort_keys=True),
        "layer": explanation.layer,
        "target": explanation.target.name,
        "class_index": explanation.target.class_index,
        "contrast": explanation.contrast.name if explanation.contrast else None,
        "score": explanation.score,
        "verdict": str(explanation.verdict),
        "verdict_message": explanation.verdict_message,
        "overlay": overlay,
    }
    return row | ({"regions": list(map(_region_columns, explanation.regions))} if regions else {})


def _region_columns(region: Region) -> dict[str, Any]:
    x, y = region.peak
    return {
        "box": asdict(region.box),
        "area": region.area,
        "share": region.share,
        "peak": {"x": x, "y": y},
        "peak_value": region.peak_value,
    }


def _prediction_columns(prediction: Prediction) -> dict[str, Any]:
    return {
        "class_index": prediction.class_index,
        "label": prediction.label,
        "probability": prediction.probability,
        "score": prediction.score,
    }


def pictures(stem: str, digest: str, result: Result, outputs: Outputs) -> list[tuple[str, dict[str, bytes]]]:
    """Return, for each explanation, the path of its overlay, and the content of all its files by path.

    Args:
        stem: Stem of the photo's file name.
        digest: Hexadecimal hash of the photo's key. It is part of every name, so that a photo that is
            explained again replaces its files.
        result: The result.
        outputs: The files to write.
    """
    names = UniqueNames(Path("overlays", digest[:2]))
    has_layers = len({explanation.layer for explanation in result.explanations}) > 1
    photo = Path(f"{stem}-{digest}.x")
    files: list[tuple[str, dict[str, bytes]]] = []
    for explanation in result.explanations:
        stem = stem_of(photo, explanation, with_layer=has_layers)
        path = names.unique(stem, SUFFIXES[outputs.overlay])
        overlay = {path.as_posix(): explanation.overlay}
        files.append((path.as_posix(), {**overlay, **_data_files(explanation, path, outputs)}))
    return files


def _data_files(explanation: Explanation, path: Path, outputs: Outputs) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    if outputs.heatmaps and explanation.heatmap is not None:
        files[path.with_suffix(".npy").as_posix()] = npy_file(explanation.heatmap)
    if explanation.intensity is not None:
        files[path.with_suffix(".intensity.npy").as_posix()] = npy_file(explanation.intensity)
    if outputs.receipts:
        files[path.with_suffix(".receipt.json").as_posix()] = explanation.receipt.to_json().encode()
    return files
