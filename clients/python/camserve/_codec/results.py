"""Decode the results of explanations."""

from __future__ import annotations

import functools
import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from camserve._codec.explain import MAX_PREDICTIONS, fusion_name
from camserve._codec.interventions import decode_intervention
from camserve._codec.parameters import decode_parameter
from camserve._codec.regions import decode_regions
from camserve._codec.rendering import PICTURE_FORMATS
from camserve._codec.targets import decode_target, target_json
from camserve._core.errors import CamserveError, ErrorDetails, Internal, join_faults, make_error, status_code
from camserve._values.methods import Cost
from camserve._values.picture import Box, Photo, Picture, excess_pixels
from camserve._values.prediction import Prediction
from camserve._values.receipt import Receipt
from camserve._values.result import Explanation, Result
from camserve._values.timing import Timing
from camserve._values.verdict import Verdict
from camserve.v1 import explain_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

FORMAT_NAMES = {number: name for name, number in PICTURE_FORMATS.items() if name}
_MAX_EXPLANATIONS = 16 * 16 * 8  # methods × targets × layers of a request
_MAX_CLASS_INDEX = (1 << 31) - 1
_MAX_PHOTO_SIDE = 1 << 20  # pixels
_PICTURE_START = re.compile(rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|RIFF.{4}WEBP", re.DOTALL)
_MAX_TEXTS, _MAX_INTERVENTIONS = 1000, 16  # of a request
_LAYER_SEPARATOR = " + "  # joins the names of fused layers


def decode_result(response: explain_pb2.ExplainResponse, targets: Sequence[explain_pb2.Target] = ()) -> Result:
    """Decode a response.

    Args:
        response: The server's response.
        targets: The targets of the request. Receipts need them, because a response leaves out the image of a
            ``similarity`` and that of a ``mask``.

    Raises:
        Internal: The response is invalid, such as a raw map without the declared number of values.
    """
    predictions = max(len(response.predictions), len(response.unchanged_predictions))
    if len(response.explanations) > _MAX_EXPLANATIONS or predictions > MAX_PREDICTIONS:
        raise Internal("the server sent more explanations or predictions than a request can ask for")
    photo = _decode_photo(response.photo)
    timing = response.timing
    return Result(
        predictions=tuple(map(decode_prediction, response.predictions)),
        explanations=tuple(
            _decode_explanation(message, photo, receipt)
            for message, receipt in zip(response.explanations, _decode_receipts(response, targets), strict=True)
        ),
        model=response.model,
        request_id=response.request_id,
        photo=photo,
        timing=Timing(
            timing.decode_ms,
            timing.queue_ms,
            timing.compute_ms,
            timing.render_ms,
            timing.batch_rows,
        ),
        class_map=_decode_class_map(response.class_map) if response.HasField("class_map") else None,
        unchanged_predictions=tuple(map(decode_prediction, response.unchanged_predictions)),
    )


def decode_cost(response: explain_pb2.EstimateCostResponse) -> Cost:
    """Decode the cost of a request."""
    return Cost(rows=response.rows, explanations=response.explanations, max_rows=response.max_rows)


def decode_outcome(
    reply: explain_pb2.ExplainStreamResponse, targets: Sequence[explain_pb2.Target] = ()
) -> Result | CamserveError | None:
    """Decode one reply of a stream: a result or an error; None for other kinds of replies, such as progress."""
    kind = reply.WhichOneof("outcome")
    if kind == "response":
        try:
            return decode_result(reply.response, targets)
        except CamserveError as error:
            return error
    if kind != "error":
        return None
    message = reply.error
    retry_after = message.retry_after_ms / 1000 if message.HasField("retry_after_ms") else None
    violations = join_faults((violation.field, violation.description) for violation in message.fields)
    return make_error(
        status_code(message.code), message.message, ErrorDetails(reply.request_id, violations, retry_after)
    )


def _decode_photo(message: explain_pb2.Photo) -> Photo:
    seen = message.seen
    edges = (seen.left, seen.top, seen.right, seen.bottom)
    if max(message.width, message.height) > _MAX_PHOTO_SIDE or not all(map(math.isfinite, edges)):
        raise Internal("the server sent an invalid photo geometry")
    if excess := excess_pixels(message.width, message.height):
        raise Internal(f"the server sent the geometry of a photo of {excess}")
    whole = Box(0.0, 0.0, float(message.width), float(message.height))
    return Photo(message.width, message.height, Box(*edges) if message.HasField("seen") else whole)


def decode_prediction(message: explain_pb2.Prediction) -> Prediction:
    box = message.box
    object_box = Box(box.left, box.top, box.right, box.bottom) if message.HasField("box") else None
    if message.class_index > _MAX_CLASS_INDEX:
        raise Internal("the server sent an invalid class index")
    label = message.label or f"class {message.class_index}"
    return Prediction(label, message.probability, message.class_index, message.score, object_box, message.area)


def _decode_receipts(
    response: explain_pb2.ExplainResponse, targets: Sequence[explain_pb2.Target]
) -> Iterator[Receipt | None]:
    """Yield the receipt of each explanation. What their receipts have in common is decoded once, and shared."""
    common = _decode_common_receipt(response) if response.HasField("receipt") else None

    @functools.cache
    def requested(index: int) -> Mapping[str, Any]:
        return target_json(targets[index])

    for index, message in enumerate(response.explanations):
        if common is None:
            yield None
        else:
            # The server does not send back the image of a similarity, and sends an empty mask.
            is_restored = targets and _lacks_image(message.resolved_target)
            target = requested(index % len(targets)) if is_restored else target_json(message.resolved_target)
            yield Receipt(**common, **_decode_own_receipt(message), target=target)


def _decode_common_receipt(response: explain_pb2.ExplainResponse) -> dict[str, Any]:
    receipt, values = response.receipt, response.receipt.value_range
    if len(receipt.texts) > _MAX_TEXTS or len(receipt.interventions) > _MAX_INTERVENTIONS:
        raise Internal("the server sent a receipt with more texts or interventions than a request can have")
    converted = ("versions", "texts", "value_range", "interventions")
    names = [descriptor.name for descriptor in receipt.DESCRIPTOR.fields if descriptor.name not in converted]
    return {
        **{name: getattr(receipt, name) for name in names},
        "model": response.model,
        "versions": dict(receipt.versions),
        "texts": tuple(receipt.texts),
        "value_range": (values.minimum, values.maximum) if values.minimum < values.maximum else None,
        "interventions": tuple(map(decode_intervention, receipt.interventions)),
    }


def _decode_own_receipt(message: explain_pb2.Explanation) -> dict[str, Any]:
    return {
        "method": message.method,
        "parameters": {name: decode_parameter(parameter) for name, parameter in message.parameters.items()},
        "augmentation_smoothing": message.augmentation_smoothing,
        "eigen_smoothing": message.eigen_smoothing,
        "input_channel": message.input_channel if message.HasField("input_channel") else None,
        "layers": tuple(message.layer.split(_LAYER_SEPARATOR)) if message.layer else (),
        "fusion": fusion_name(message.fusion),
        "score": message.score,
        "verdict": _decode_verdict(message.verdict),
        "heatmap": _decode_heatmap(message.heatmap) if message.HasField("heatmap") else None,
    }


def _lacks_image(resolved: explain_pb2.Target) -> bool:
    is_empty_similarity = resolved.WhichOneof("kind") == "similarity" and not resolved.similarity.image
    return is_empty_similarity or (resolved.segment.HasField("mask") and not resolved.segment.mask)


def _decode_explanation(message: explain_pb2.Explanation, photo: Photo, receipt: Receipt | None) -> Explanation:
    return Explanation(
        method=message.method,
        layer=message.layer,
        target=decode_prediction(message.target),
        contrast=decode_prediction(message.contrast) if message.HasField("contrast") else None,
        score=message.score,
        verdict=_decode_verdict(message.verdict),
        verdict_message=message.verdict_message,
        parameters={name: decode_parameter(parameter) for name, parameter in message.parameters.items()},
        photo=photo,
        heatmap=_decode_heatmap(message.heatmap) if message.HasField("heatmap") else None,
        overlay_picture=decode_picture(message.overlay) if message.HasField("overlay") else None,
        colored_picture=decode_picture(message.heatmap_image) if message.HasField("heatmap_image") else None,
        resolved=decode_target(message.resolved_target),
        intensity=_decode_heatmap(message.intensity) if message.HasField("intensity") else None,
        completeness_error=message.completeness_error if message.HasField("completeness_error") else None,
        augmentation_smoothing=message.augmentation_smoothing,
        eigen_smoothing=message.eigen_smoothing,
        fusion=fusion_name(message.fusion),
        receipt_or_none=receipt,
        scale=_decode_scale(message.scale),
        regions=decode_regions(message.regions, photo),
        input_channel=message.input_channel if message.HasField("input_channel") else None,
    )


def _decode_scale(scale: float) -> float:
    if not 0 <= scale < math.inf:
        raise Internal("the server sent an invalid scale")
    return scale


def _decode_verdict(number: int) -> Verdict:
    # A newer server may know more verdicts than this client.
    if number not in explain_pb2.Verdict.values():
        return Verdict.UNSPECIFIED
    name = explain_pb2.Verdict.Name(explain_pb2.Verdict.ValueType(number))
    return Verdict(name.removeprefix("VERDICT_"))


def _decode_heatmap(message: explain_pb2.Heatmap) -> NDArray[np.float32]:
    values = np.frombuffer(message.data, "<f4") if len(message.data) % 4 == 0 else np.empty(0)
    if values.size != message.height * message.width or not values.size:
        raise Internal(f"the server sent a heatmap that does not have {message.height} × {message.width} values")
    return values.astype(np.float32, copy=False).reshape(message.height, message.width)


def _decode_class_map(message: explain_pb2.ClassMap) -> NDArray[np.uint16]:
    values = np.frombuffer(message.data, "<u2") if len(message.data) % 2 == 0 else np.empty(0)
    if values.size != message.height * message.width or not values.size:
        raise Internal(f"the server sent a class map that does not have {message.height} × {message.width} cells")
    return values.astype(np.uint16, copy=False).reshape(message.height, message.width)


def decode_picture(message: explain_pb2.Picture) -> Picture:
    """Decode a picture.

    Raises:
        Internal: The data is not a file of a format that can be requested: it might be written to a file of that name.
    """
    if not _PICTURE_START.match(message.data):
        raise Internal("the server sent a picture that is not a JPEG, PNG or WebP file")
    return Picture(FORMAT_NAMES.get(message.format, ""), message.data, message.width, message.height)
