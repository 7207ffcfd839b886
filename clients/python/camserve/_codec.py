"""Encode arguments as protobuf messages, and decode responses into values.

Nothing here does network I/O, so the synchronous and the asynchronous client share it.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Required, TypeAlias, TypedDict, TypeGuard, cast

import numpy as np
from PIL import Image

from camserve import _interventions, _local, _picture, _regions, _rendering, _targets
from camserve._checks import check_range, indices, invalid, look_up
from camserve._errors import CamserveError, ErrorDetails, Internal, InvalidArgument, join_faults, make, status_code
from camserve._picture import Box, Photo, Picture
from camserve._receipts import Receipt, target_json
from camserve._result import Explanation, Result, Timing, Verdict
from camserve._values import Cost, Layer, Method, MethodInfo, Model, ModelState, ParameterInfo, Prediction
from camserve.v1 import explain_pb2, models_pb2

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from camserve._interventions import Intervention
    from camserve._targets import TargetLike
    from camserve._values import RegionsLike

_Value: TypeAlias = "np.uint8 | np.uint16 | np.float32"  # of a pixel
ImageLike: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | memoryview | Image.Image | NDArray[_Value]"
MethodLike: TypeAlias = "str | Method | tuple[str, Mapping[str, float | str]]"

FORMAT_NAMES = {number: name for name, number in _rendering.FORMATS.items() if name}
_FUSIONS: Mapping[str | None, explain_pb2.Fusion.ValueType] = {
    None: explain_pb2.FUSION_UNSPECIFIED,
    "mean": explain_pb2.FUSION_MEAN,
    "max": explain_pb2.FUSION_MAX,
    "product": explain_pb2.FUSION_PRODUCT,
    "sum": explain_pb2.FUSION_SUM,
}
_FUSION_NAMES = {number: name for name, number in _FUSIONS.items() if name}
_MAX_EXPLANATIONS = 16 * 16 * 8  # methods × targets × layers of a request
_MAX_CLASS_INDEX = (1 << 31) - 1
_MAX_PHOTO_SIDE = 1 << 20  # pixels
_PICTURE_START = re.compile(rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|RIFF.{4}WEBP", re.DOTALL)
_MAX_TEXTS, _MAX_INTERVENTIONS = 1000, 16  # of a request
_LAYER_SEPARATOR = " + "  # joins the names of fused layers
MAX_PREDICTIONS = 1000
_RGB = 3  # channels


class ExplainOptions(TypedDict, total=False):
    """Options of an explanation: what to explain and what to return. All are optional.

    Attributes:
        model: Name of a loaded model. Default: the server's first model.
        methods: One method or several, up to 16. Each is a name, a ``Method``, or a pair of name
            and parameters. Default: gradcam.
        targets: One target or several, up to 16: labels, class indices, ``contrast(a, b)``,
            ``finer(a)``, ``probability(a)``, ``segment(a)``, ``mask(a, image)``, ``detection(a)``,
            ``similarity(image)`` or ``text(a)``. Default: the ``top_k`` most probable classes.
        layers: One layer or several, up to 8, by name; or "pyramid": all scales of a detector in one
            map. Default: the pyramid, if the model has one, or else its default layer.
        fusion: How to combine the maps of several layers into one: "mean", "max", "product" or
            "sum". Each map is resized bilinearly to the finest grid. For a sum it stays signed, and
            is divided by the area of its cells; otherwise it is first cut at zero, and scaled from
            its minimum and maximum to 0 and 1. Default: None, which is "sum" for the pyramid, or
            else one map for each layer.
        top_k: Number of classes to explain if there are no targets, 1 to 16: the most probable ones;
            for a segmentation the largest ones, for a detector the objects with the highest scores.
            Default: 1.
        heatmap: True to return the raw map. Default: True.
        overlay: Format of the overlay: "jpeg", "png", "webp", or None for no overlay.
            Default: "jpeg".
        heatmap_image: Format of a picture of the heatmap alone, in colour and in the size of the
            overlay. Default: None.
        colormap: Name of the colour map. Default: None, which is "coolwarm" if positive and negative
            values are shown, otherwise "jet".
        alpha: Opacity of the heatmap over the photo, 0 to 1. Default: 0.5.
        max_side: Maximum length of a picture's longer side in pixels, 16 to 16384. Pictures are
            never enlarged. Default: the photo's own size.
        quality: Quality of JPEG and WebP pictures, 1 to 100. Default: 90.
        max_predictions: Number of predictions to return, 0 to 1000. Default: 5.
        profile: Convention that converts raw values to colours: "paper", "grad-cam" (that of
            pytorch-grad-cam), "torchcam", "captum", or "signed" for evidence for and against the
            target, in two colours around zero. The raw values stay the same. Default: "paper".
        intensity: True to return the intensities that are coloured, 0 to 1, at the resolution of
            the model's input; -1 to 1 if positive and negative values are shown. With "torchcam"
            they can slightly exceed that range, because it interpolates bicubically.
            Default: False.
        sign: The values to show: "positive", "negative", "both" or "absolute". Default: None, which
            is "both" for the profile "signed", otherwise "positive".
        scale: Raw value that gets the strongest colour: "map" for each map's own, "request" for the
            largest of all maps of this request, or a number above 0, such as ``Explanation.scale``
            of an earlier result, to compare the pictures. Default: "map".
        threshold: Quantile of the shown values, 0 to 1, below which nothing is drawn: 0.8 draws
            the strongest fifth. Default: None, which draws every value.
        threshold_value: Raw value, 0 or more, below which nothing is drawn, instead of
            ``threshold``. Default: None.
        contour_lines: Number of contour lines at equally spaced intensities, 0 to 16. Default: 0.
        color_bar: True to add a bar with the colours and their raw values to the right of the
            picture, which becomes wider than the photo. Default: False.
        fade: True to multiply the opacity by the intensity, so that the photo shows where the map is
            weak. Default: False.
        regions: The regions of each map to return: True for those above the quantile 0.8, another
            quantile, or ``RegionOptions``. Default: False.
        class_map: True to return the predicted class of each cell, for models of semantic
            segmentation. Default: False.
        texts: Texts that are the classes of this request, up to 1000, for models that compare images
            with texts, such as CLIP: ``result.predictions`` are then these texts, and targets may name
            them as labels. Default: the labels of the model.
        value_range: Values of the photo that the model takes as 0 and 1, such as ``(0, 4095)`` for 12
            bits in a file of 16. Default: those of the values' type: 0 and 255, 0 and 65,535, or 0 and 1.
        bands: Channels of the photo to show under the map, one as grey or three as red, green and blue.
            Default: the first three, or the first if there are fewer.
        window: Centre and width of the values of the photo to show, from black to white. Default: all
            values of 8 bits, otherwise from the smallest to the largest value.
        interventions: Changes to what layers return while the request is computed, up to 16, in this
            order: ``silence(layer, channels)``, ``scale``, ``clamp``, ``replace_mean`` or
            ``clip_gradient``. ``result.predictions`` are those of the changed model, and
            ``result.unchanged_predictions`` those of the model itself. Default: none.

    Example:
        >>> options: camserve.ExplainOptions = {"methods": ["gradcam"], "targets": ["tabby"], "max_side": 200}
        >>> explanation = client.explain("cat.jpg", **options).explanations[0]
        >>> explanation.heading, explanation.image.size
        ('tabby · gradcam', (200, 133))
    """

    model: str | None
    methods: MethodLike | Sequence[MethodLike]
    targets: TargetLike | Iterable[TargetLike] | None
    layers: str | Sequence[str] | None
    fusion: str | None
    top_k: int
    heatmap: bool
    overlay: str | None
    heatmap_image: str | None
    colormap: str | None
    alpha: float
    max_side: int | None
    quality: int | None
    max_predictions: int
    profile: str
    intensity: bool
    sign: str | None
    scale: str | float
    threshold: float | None
    threshold_value: float | None
    contour_lines: int
    color_bar: bool
    fade: bool
    regions: RegionsLike
    class_map: bool
    texts: Sequence[str]
    value_range: tuple[float, float] | None
    bands: Sequence[int]
    window: tuple[float, float] | None
    interventions: Sequence[Intervention]


class ImageWithOptions(ExplainOptions):
    """An image for ``explain_many``, and options for this image alone.

    Attributes:
        image: The image, as for ``explain``.

    Example:
        >>> item: camserve.ImageWithOptions = {"image": "cat.jpg", "targets": ["tiger cat"]}
        >>> results = client.explain_many(["cat.jpg", item])
        >>> [result.explanations[0].title for result in results]
        ['Egyptian cat', 'tiger cat']
    """

    image: Required[ImageLike]


ImageItem: TypeAlias = "ImageLike | ImageWithOptions"
"""An item of ``explain_many``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainArguments:
    """The fields of ``ExplainOptions`` with their defaults."""

    model: str | None = None
    methods: MethodLike | Sequence[MethodLike] = ("gradcam",)
    targets: TargetLike | Iterable[TargetLike] | None = None
    layers: str | Sequence[str] | None = None
    fusion: str | None = None
    top_k: int = 1
    heatmap: bool = True
    overlay: str | None = "jpeg"
    heatmap_image: str | None = None
    colormap: str | None = None
    alpha: float = 0.5
    max_side: int | None = None
    quality: int | None = None
    max_predictions: int = 5
    profile: str = "paper"
    intensity: bool = False
    sign: str | None = None
    scale: str | float = "map"
    threshold: float | None = None
    threshold_value: float | None = None
    contour_lines: int = 0
    color_bar: bool = False
    fade: bool = False
    regions: RegionsLike = False
    class_map: bool = False
    texts: Sequence[str] = ()
    value_range: tuple[float, float] | None = None
    bands: Sequence[int] = ()
    window: tuple[float, float] | None = None
    interventions: Sequence[Intervention] = ()


def explain_request(**options: Any) -> explain_pb2.ExplainRequest:
    """Return a request without its image.

    Args:
        **options: The options: see ``ExplainOptions``.

    Raises:
        InvalidArgument: An option is out of range or has the wrong type.
        TypeError: There is no such option.
    """
    arguments = ExplainArguments(**options)
    try:
        check_range("top_k", arguments.top_k, 1, 16)
        check_range("max_predictions", arguments.max_predictions, 0, MAX_PREDICTIONS)
        return _encode(arguments)
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidArgument(f"an option has the wrong type: {error}") from error


def _encode(options: ExplainArguments) -> explain_pb2.ExplainRequest:
    return explain_pb2.ExplainRequest(
        model=options.model or "",
        methods=[_encode_method(method) for method in _methods_as_sequence(options.methods)],
        targets=[
            _targets.encode(target, f"targets[{index}]", image_bytes)
            for index, target in enumerate(_targets.as_iterable(options.targets))
        ],
        top_k=options.top_k,
        layers=[options.layers] if isinstance(options.layers, str) else options.layers or (),
        rendering=_rendering.encode(options),
        max_predictions=options.max_predictions,
        fusion=look_up(_FUSIONS, options.fusion, "fusion"),
        class_map=options.class_map,
        texts=texts_of(options.texts),
        value_range=range_of(options.value_range),
        interventions=_interventions.encode(options.interventions),
    )


def range_of(values: tuple[float, float] | None) -> explain_pb2.ValueRange | None:
    """Return a range of values as a message.

    Raises:
        InvalidArgument: It is not two numbers, the smaller one first.
    """
    if values is None:
        return None
    low, high = values
    if not low < high:
        raise invalid("value_range", f"{low} is not below {high}")
    return explain_pb2.ValueRange(minimum=low, maximum=high)


def texts_of(texts: object) -> list[str]:
    """Return the texts of a request as a list.

    Raises:
        InvalidArgument: They are one string, whose letters would be the texts, or they are not strings.
    """
    if isinstance(texts, str):
        raise invalid("texts", f"they must be a list of strings, such as [{texts!r}]")
    listed: list[str] = []
    for index, text in enumerate(cast("Iterable[object]", texts)):
        if not isinstance(text, str):
            raise invalid(f"texts[{index}]", f"it must be a str, not {type(text).__name__}")
        listed.append(text)
    return listed


def fusion_name(number: explain_pb2.Fusion.ValueType) -> str | None:
    """Return the name of a fusion; None for no fusion."""
    return _FUSION_NAMES.get(number)


def with_image(template: explain_pb2.ExplainRequest, image: object) -> explain_pb2.ExplainRequest:
    """Return a copy of a request, with an image.

    Raises:
        InvalidArgument: The image cannot be read, or is not an image.
    """
    request = explain_pb2.ExplainRequest(image=image_bytes(image))
    request.MergeFrom(template)
    return request


def image_bytes(image: object) -> bytes:
    """Return an image as the bytes of a file: files and bytes unchanged, pixels encoded as PNG or NPY.

    Raises:
        InvalidArgument: The image cannot be read, or is not an image.
    """
    data = _read_image(image)
    if not data:
        raise invalid("image", "it is empty")
    return data


def _read_image(image: object) -> bytes:
    for types, read in _IMAGE_READERS:
        if isinstance(image, types):
            return read(image)
    expected = "a path, bytes, a PIL image or an array [H, W] or [H, W, channels]"
    raise invalid("image", f"it must be {expected}, not {type(image).__name__}")


def _read_file(path: str | os.PathLike[str]) -> bytes:
    try:
        with Path(path).open("rb") as file:
            return _local.read_photo(file, os.fstat(file.fileno()).st_size)
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        reason = getattr(error, "strerror", None) or str(error)
        raise invalid("image", f"cannot read {os.fspath(path)!r}: {reason}") from error


_IMAGE_READERS: Sequence[tuple[tuple[type, ...], Callable[[Any], bytes]]] = (
    ((str, os.PathLike), _read_file),
    ((bytes, bytearray, memoryview), bytes),
    ((Image.Image,), _picture.from_pil),
    ((np.ndarray,), _picture.from_array),
)


def _methods_as_sequence(methods: MethodLike | Sequence[MethodLike]) -> Sequence[MethodLike]:
    if isinstance(methods, str | Method) or _is_name_with_parameters(methods):
        return (methods,)
    return cast("Sequence[MethodLike]", methods)


def _is_name_with_parameters(value: Sequence[object]) -> TypeGuard[tuple[str, Mapping[str, float | str]]]:
    # A tuple of two names is two methods.
    return isinstance(value, tuple) and bool(value) and isinstance(value[-1], Mapping)


def _encode_method(value: MethodLike) -> explain_pb2.Method:
    if isinstance(value, str):
        return explain_pb2.Method(name=value)
    method = value if isinstance(value, Method) else Method(*value)
    parameters = {name: parameter(name, number_or_text) for name, number_or_text in method.parameters.items()}
    channels = () if isinstance(method.per_channel, bool) else indices(method.per_channel, "methods.per_channel")
    return explain_pb2.Method(
        name=method.name,
        parameters=parameters,
        augmentation_smoothing=method.augmentation_smoothing,
        eigen_smoothing=method.eigen_smoothing,
        per_channel=method.per_channel is True or bool(channels),
        input_channels=channels,
    )


def parameter(name: str, number_or_text: object, owner: str = "methods") -> explain_pb2.Parameter:
    """Encode the value of a parameter.

    Args:
        name: Name of the parameter, for the error.
        number_or_text: Its value.
        owner: Name of the request's field that has the parameter, for the error.

    Raises:
        InvalidArgument: The value is neither a number nor a string.
    """
    if isinstance(number_or_text, str):
        return explain_pb2.Parameter(text=number_or_text)
    try:
        return explain_pb2.Parameter(number=number_or_text)  # type: ignore[arg-type]  # protobuf checks it
    except TypeError as error:
        kind = type(number_or_text).__name__
        raise invalid(f"{owner}.{name}", f"it must be a number or a string, not {kind}") from error


def result(response: explain_pb2.ExplainResponse, targets: Sequence[explain_pb2.Target] = ()) -> Result:
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


def cost(response: explain_pb2.EstimateCostResponse) -> Cost:
    """Decode the cost of a request."""
    return Cost(rows=response.rows, explanations=response.explanations, max_rows=response.max_rows)


def outcome(
    reply: explain_pb2.ExplainStreamResponse, targets: Sequence[explain_pb2.Target] = ()
) -> Result | CamserveError | None:
    """Decode one reply of a stream: a result or an error; None for other kinds of replies, such as progress."""
    kind = reply.WhichOneof("outcome")
    if kind == "response":
        try:
            return result(reply.response, targets)
        except CamserveError as error:
            return error
    if kind != "error":
        return None
    message = reply.error
    retry_after = message.retry_after_ms / 1000 if message.HasField("retry_after_ms") else None
    violations = join_faults((violation.field, violation.description) for violation in message.fields)
    return make(status_code(message.code), message.message, ErrorDetails(reply.request_id, violations, retry_after))


def _decode_photo(message: explain_pb2.Photo) -> Photo:
    seen = message.seen
    edges = (seen.left, seen.top, seen.right, seen.bottom)
    if max(message.width, message.height) > _MAX_PHOTO_SIDE or not all(map(math.isfinite, edges)):
        raise Internal("the server sent an invalid photo geometry")
    if excess := _picture.excess_pixels(message.width, message.height):
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
        "interventions": tuple(map(_interventions.decode, receipt.interventions)),
    }


def _decode_own_receipt(message: explain_pb2.Explanation) -> dict[str, Any]:
    return {
        "method": message.method,
        "parameters": {name: value(parameter) for name, parameter in message.parameters.items()},
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
        parameters={name: value(parameter) for name, parameter in message.parameters.items()},
        photo=photo,
        heatmap=_decode_heatmap(message.heatmap) if message.HasField("heatmap") else None,
        overlay_picture=decode_picture(message.overlay) if message.HasField("overlay") else None,
        colored_picture=decode_picture(message.heatmap_image) if message.HasField("heatmap_image") else None,
        resolved=_targets.decode(message.resolved_target),
        intensity=_decode_heatmap(message.intensity) if message.HasField("intensity") else None,
        completeness_error=message.completeness_error if message.HasField("completeness_error") else None,
        augmentation_smoothing=message.augmentation_smoothing,
        eigen_smoothing=message.eigen_smoothing,
        fusion=fusion_name(message.fusion),
        receipt_or_none=receipt,
        scale=_decode_scale(message.scale),
        regions=_regions.decode(message.regions, photo),
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


def value(message: explain_pb2.Parameter) -> float | str:
    """Decode the value of a parameter."""
    return message.text if message.WhichOneof("value") == "text" else message.number


def model(message: models_pb2.Model, labels: Iterable[str] = ()) -> Model:
    """Decode the description of a model."""
    names = [field.name for field in fields(Model) if field.name not in {"labels", "state", "pyramid"}]
    values = {name: getattr(message, name) for name in names}
    values["input_channels"] = message.input_channels or _RGB  # an older server has models of RGB alone
    values["independent_rows"] = message.independent_rows or not message.HasField("independent_rows")
    pyramid, state = tuple(message.pyramid), _decode_model_state(message.state)
    return Model(labels=tuple(labels), state=state, pyramid=pyramid, **values)


def _decode_model_state(number: int) -> ModelState:
    try:
        return ModelState(models_pb2.ModelState.Name(number).removeprefix("MODEL_STATE_"))  # type: ignore[arg-type]
    except ValueError:  # a newer server may know more states than this client
        return ModelState.UNSPECIFIED


def layer(message: models_pb2.Layer) -> Layer:
    """Decode the description of a layer."""
    return Layer(
        name=message.name,
        type=message.type,
        output_shape=tuple(message.output_shape),
        parameters=message.parameters,
        calls=message.calls,
        explainable=message.explainable,
        grid=(message.grid_height, message.grid_width) if message.grid_height else None,
        reason=message.reason,
        kinds=tuple(map(_decode_kind, message.kinds)),
    )


def method(message: models_pb2.MethodInfo) -> MethodInfo:
    """Decode the description of a method."""
    return MethodInfo(
        name=message.name,
        kind=_decode_kind(message.kind),
        summary=message.summary,
        paper=message.paper,
        parameters=tuple(map(parameter_info, message.parameters)),
        rows=message.rows,
        layered=message.layered,
        eigen_smoothing=message.eigen_smoothing,
        needs=message.needs,
        formula=message.formula,
        per_channel=message.per_channel,
    )


def _decode_kind(number: int) -> str:
    if number not in models_pb2.MethodKind.values():
        return str(number)
    name = models_pb2.MethodKind.Name(models_pb2.MethodKind.ValueType(number))
    return name.removeprefix("METHOD_KIND_")


def parameter_info(message: models_pb2.ParameterInfo) -> ParameterInfo:
    """Decode the description of a parameter."""
    return ParameterInfo(
        name=message.name,
        summary=message.summary,
        default=value(message.default_value) if message.HasField("default_value") else None,
        minimum=message.minimum,
        maximum=message.maximum,
        integer=message.integer,
        choices=tuple(message.choices),
    )
