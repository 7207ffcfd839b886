"""Lines of a recording: the explanations of one photo as JSON, with the maps in float16."""

from __future__ import annotations

import base64
import json
import math
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from camserve._codec.targets import decode_target, target_message
from camserve._core.errors import InvalidArgument
from camserve._values.picture import Box, Photo, excess_pixels
from camserve._values.prediction import Prediction
from camserve._values.receipt import Receipt
from camserve._values.targets import TargetLike, similarity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from camserve._values.result import Explanation, Result
    from camserve._values.verdict import Verdict


MAX_BYTES = 96 << 20
"""Most bytes of a line: an answer of a server has at most 64 MiB, which are 86 MiB in base64."""

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False, slots=True)
class RecordedExplanation:
    """An explanation in a recording.

    Attributes:
        method: Name of the method, with its smoothing.
        layer: Name of the layer; empty for methods without one.
        title: Name of the explained target.
        target: The explained class or object.
        score: The explained score.
        verdict: Verdict on the map.
        photo: Geometry of the photo.
        heatmap: The raw map, float32 [h, w], rounded to the precision of float16.
        receipt: The receipt, without the map.
    """

    method: str
    layer: str
    title: str
    target: Prediction
    score: float
    verdict: Verdict
    photo: Photo = field(repr=False)
    heatmap: NDArray[np.float32] = field(repr=False)
    receipt: Receipt = field(repr=False)

    @property
    def resolved(self) -> TargetLike:
        """The target, to explain the same one with another model."""
        message = target_message(self.receipt.target)
        target = decode_target(message)
        return similarity(message.similarity.image) if target is None else target


@dataclass(frozen=True, eq=False, slots=True)
class RecordedPhoto:
    """Explanations of one photo in a recording.

    Attributes:
        name: Name of the photo.
        sha256: SHA-256 of its file.
        photo: Its geometry.
        predictions: The most probable classes.
        explanations: The explanations, in the order of the result.
        thumbnail: A small copy of the photo, as a JPEG; empty in a baseline.
    """

    name: str
    sha256: str
    photo: Photo
    predictions: tuple[Prediction, ...]
    explanations: tuple[RecordedExplanation, ...]
    thumbnail: bytes = field(default=b"", repr=False)

    @property
    def targets(self) -> Sequence[TargetLike]:
        """The explained targets: those of the first method and layer."""
        first = self.explanations[0]
        same = [each for each in self.explanations if (each.method, each.layer) == (first.method, first.layer)]
        return [each.resolved for each in same]


def encode(name: str, result: Result) -> bytes:
    """Encode a result as a line."""
    first = result.explanations[0]
    thumbnail = first.overlay_picture.data if first.overlay_picture else b""
    content = {
        "photo": name,
        "sha256": first.receipt.image_sha256,
        "geometry": asdict(result.photo),
        "predictions": list(map(asdict, result.predictions)),
        "explanations": list(map(_plain_explanation, result.explanations)),
        "thumbnail": base64.b64encode(thumbnail).decode(),
    }
    return json.dumps(content, ensure_ascii=True, separators=(",", ":")).encode() + b"\n"


def _plain_explanation(explanation: Explanation) -> dict[str, Any]:
    receipt = replace(explanation.receipt, heatmap=None)
    return {
        "method": explanation.how,
        "layer": explanation.layer,
        "title": explanation.title,
        "target": asdict(explanation.target),
        "receipt": json.loads(receipt.to_json()),
        "map": _plain_map(cast("NDArray[np.float32]", explanation.heatmap)),
    }


def _plain_map(heatmap: NDArray[np.float32]) -> dict[str, Any]:
    """Divide a map by its largest absolute value, so that float16 keeps three digits of a map of any magnitude."""
    finite = heatmap[np.isfinite(heatmap)]
    scale = float(np.abs(finite).max(initial=0)) or 1.0
    values = (heatmap / np.float32(scale)).astype("<f2")
    height, width = heatmap.shape
    data = base64.b64encode(values.tobytes()).decode()
    return {"height": height, "width": width, "scale": scale, "data": data}


def key_of(line: bytes, place: str) -> tuple[str, str]:
    """Return the name of a line's photo, and the SHA-256 of its file.

    Args:
        line: The line.
        place: The file and the line's number, for the error.

    Raises:
        InvalidArgument: The line is damaged.
    """
    content = _load(line, place)
    name, digest = content.get("photo"), content.get("sha256")
    if not isinstance(name, str) or not isinstance(digest, str):
        raise InvalidArgument(f"{place} is damaged: it names no photo")
    return name, digest


def decode(line: bytes, place: str) -> RecordedPhoto:
    """Decode a line; the arguments are those of ``key_of``.

    Raises:
        InvalidArgument: The line is damaged.
    """
    content = _load(line, place)
    try:
        return _recorded_photo(content)
    except KeyError as error:
        raise InvalidArgument(f"{place} is damaged: it has no {error}") from error
    except (TypeError, ValueError, AttributeError, OverflowError, InvalidArgument) as error:
        raise InvalidArgument(f"{place} is damaged: {error}") from error


def _recorded_photo(content: dict[str, Any]) -> RecordedPhoto:
    photo = _photo(content["geometry"])
    explanations = tuple(_explanation(each, photo) for each in content["explanations"])
    if not explanations:
        raise ValueError("it has no explanation")
    return RecordedPhoto(
        name=content["photo"],
        sha256=content["sha256"],
        photo=photo,
        predictions=tuple(map(_prediction, content["predictions"])),
        explanations=explanations,
        thumbnail=base64.b64decode(content["thumbnail"], validate=True),
    )


def _load(line: bytes, place: str) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{place} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise InvalidArgument(f"{place} is damaged: it is not a JSON object")
    return cast("dict[str, Any]", content)


def _photo(content: dict[str, Any]) -> Photo:
    seen = Box(**{edge: float(value) for edge, value in content["seen"].items()})
    width, height = int(content["width"]), int(content["height"])
    edges = (seen.left, seen.top, seen.right, seen.bottom)
    if min(width, height) < 1 or not all(map(math.isfinite, edges)):
        raise ValueError("the geometry of the photo is invalid")
    if excess := excess_pixels(width, height):
        raise ValueError(f"the photo has {excess}")
    return Photo(width, height, seen)


def _prediction(content: dict[str, Any]) -> Prediction:
    box = content["box"] and Box(**content["box"])
    label, index = str(content["label"]), int(content["class_index"])
    numbers = float(content["probability"]), index, float(content["score"])
    return Prediction(label, *numbers, box, float(content["area"]))


def _explanation(content: dict[str, Any], photo: Photo) -> RecordedExplanation:
    receipt = Receipt.from_json(json.dumps(content["receipt"]))
    return RecordedExplanation(
        method=str(content["method"]),
        layer=str(content["layer"]),
        title=str(content["title"]),
        target=_prediction(content["target"]),
        score=receipt.score,
        verdict=receipt.verdict,
        photo=photo,
        heatmap=_map(content["map"]),
        receipt=receipt,
    )


def _map(content: dict[str, Any]) -> NDArray[np.float32]:
    values = np.frombuffer(base64.b64decode(content["data"], validate=True), "<f2")
    height, width, scale = int(content["height"]), int(content["width"]), float(content["scale"])
    if min(height, width) < 1 or values.size != height * width or not 0 < scale <= _LARGEST:
        raise ValueError("a map is invalid")
    heatmap: NDArray[np.float32] = values.astype(np.float32).reshape(height, width) * np.float32(scale)
    return heatmap
