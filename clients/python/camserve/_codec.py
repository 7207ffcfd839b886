"""Arguments to protobuf, and protobuf to values: pure, so that both clients share it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, TypeGuard, TypeVar, cast

import numpy as np
from PIL import Image

from camserve import _local, _picture, _targets
from camserve._errors import CamserveError, Details, Internal, InvalidArgument, code_of, make, merged
from camserve._picture import Box, Photo, Picture
from camserve._receipts import Receipt, target_json
from camserve._result import Explanation, Prediction, Result, Timing, Verdict
from camserve._values import Layer, Method, MethodInfo, Model, ModelState, ParameterInfo
from camserve.v1 import explain_pb2, models_pb2

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from camserve._targets import TargetLike

K = TypeVar("K")
V = TypeVar("V")

ImageLike: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | memoryview | Image.Image | NDArray[np.uint8]"
MethodLike: TypeAlias = "str | Method | tuple[str, Mapping[str, float | str]]"

_FORMATS: Mapping[str | None, explain_pb2.ImageFormat.ValueType] = {
    None: explain_pb2.IMAGE_FORMAT_UNSPECIFIED,
    "jpeg": explain_pb2.IMAGE_FORMAT_JPEG,
    "png": explain_pb2.IMAGE_FORMAT_PNG,
    "webp": explain_pb2.IMAGE_FORMAT_WEBP,
}
_FORMAT_NAMES = {number: name for name, number in _FORMATS.items() if name}
_FUSIONS: Mapping[str | None, explain_pb2.Fusion.ValueType] = {
    None: explain_pb2.FUSION_UNSPECIFIED,
    "mean": explain_pb2.FUSION_MEAN,
    "max": explain_pb2.FUSION_MAX,
    "product": explain_pb2.FUSION_PRODUCT,
}
_FUSION_NAMES = {number: name for name, number in _FUSIONS.items() if name}
_MOST_EXPLANATIONS = 16 * 16 * 8  # methods, targets and layers of a request
_LARGEST_INDEX = (1 << 31) - 1  # of a class
_LONGEST_SIDE = 1 << 20  # pixels of a photo
_JOINT = " + "  # between the names of layers that were fused
_PROFILES: Mapping[str, explain_pb2.Profile.ValueType] = {
    "paper": explain_pb2.PROFILE_PAPER,
    "grad-cam": explain_pb2.PROFILE_GRAD_CAM,
    "torchcam": explain_pb2.PROFILE_TORCHCAM,
    "captum": explain_pb2.PROFILE_CAPTUM,
}
_RANGES: Mapping[str, tuple[float, float]] = {
    "top_k": (1, 16),
    "alpha": (0, 1),
    "max_side": (16, 16384),
    "quality": (1, 100),
    "max_predictions": (0, 1000),
}


class ExplainOptions(TypedDict, total=False):
    """What to explain and what to return; everything may be left out.

    Attributes:
        model: Name of a loaded model. Default: the server's first.
        methods: One method or several, each a name, a ``Method``, or a pair of name and
            parameters. Default: gradcam.
        targets: One target or several: labels, class indices, ``contrast(a, b)``, ``finer(a)``,
            ``probability(a)``, ``segment(a)``, ``detection(a)`` or ``similarity(image)``. Default:
            the ``top_k`` most probable classes.
        layers: One layer or several, by name. Default: the model's default layer.
        fusion: How the maps of several layers become one: "mean", "max" or "product" of what is
            positive in them, each divided by its maximum. Default: None, a map for each.
        top_k: How many classes to explain where there are no targets, 1 to 16. Default: 1.
        heatmap: Whether to return the raw map. Default: True.
        overlay: "jpeg", "png", "webp", or None for no overlay. Default: "jpeg".
        heatmap_image: The same for the heatmap alone, in colour. Default: None.
        colormap: Name of the colour map. Default: "jet".
        alpha: Opacity of the heatmap over the photo, 0 to 1. Default: 0.5.
        max_side: Longer side of the pictures at most, in pixels, 16 to 16384. Default: the photo's.
        quality: Of JPEG and WebP pictures, 1 to 100. Default: the server's.
        max_predictions: How many predictions to return, 0 to 1000. Default: 5.
        profile: By whose convention raw numbers become colours: "paper", "grad-cam" (as
            pytorch-grad-cam), "torchcam" or "captum". The raw numbers stay the same.
            Default: "paper".
        intensity: Whether to return what is coloured, 0 to 1, on the pixels of the model's input.
            Default: False.
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
    colormap: str
    alpha: float
    max_side: int | None
    quality: int | None
    max_predictions: int
    profile: str
    intensity: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """ExplainOptions with their defaults."""

    model: str | None = None
    methods: MethodLike | Sequence[MethodLike] = ("gradcam",)
    targets: TargetLike | Iterable[TargetLike] | None = None
    layers: str | Sequence[str] | None = None
    fusion: str | None = None
    top_k: int = 1
    heatmap: bool = True
    overlay: str | None = "jpeg"
    heatmap_image: str | None = None
    colormap: str = "jet"
    alpha: float = 0.5
    max_side: int | None = None
    quality: int | None = None
    max_predictions: int = 5
    profile: str = "paper"
    intensity: bool = False

    def request(self) -> explain_pb2.ExplainRequest:
        """Return the request, still without an image.

        Raises:
            InvalidArgument: An option is out of range or of a wrong kind.
        """
        try:
            for name, (low, high) in _RANGES.items():
                _check_range(name, getattr(self, name), low, high)
            return self._message()
        except (TypeError, ValueError, AttributeError) as error:
            raise InvalidArgument(f"an option is of a wrong kind: {error}") from error

    def _message(self) -> explain_pb2.ExplainRequest:
        return explain_pb2.ExplainRequest(
            model=self.model or "",
            methods=[_method(each) for each in _methods(self.methods)],
            targets=[
                _targets.message(each, f"targets[{at}]", image_bytes)
                for at, each in enumerate(_targets.targets_of(self.targets))
            ],
            top_k=self.top_k,
            layers=[self.layers] if isinstance(self.layers, str) else self.layers or (),
            rendering=self._rendering(),
            max_predictions=self.max_predictions,
            fusion=_chosen(_FUSIONS, self.fusion, "fusion"),
        )

    def _rendering(self) -> explain_pb2.Rendering:
        return explain_pb2.Rendering(
            overlay=_chosen(_FORMATS, self.overlay, "rendering.overlay"),
            heatmap=self.heatmap,
            heatmap_image=_chosen(_FORMATS, self.heatmap_image, "rendering.heatmap_image"),
            colormap=self.colormap,
            alpha=self.alpha,
            max_side=self.max_side or 0,
            quality=self.quality or 0,
            profile=_chosen(_PROFILES, self.profile, "rendering.profile"),
            intensity=self.intensity,
        )


def with_image(question: explain_pb2.ExplainRequest, image: object) -> explain_pb2.ExplainRequest:
    """Return the request for one image.

    Raises:
        InvalidArgument: The image cannot be read, or is no image.
    """
    request = explain_pb2.ExplainRequest(image=image_bytes(image))
    request.MergeFrom(question)
    return request


def image_bytes(image: object) -> bytes:
    """Return the file of an image: paths and bytes untouched, pixels encoded as PNG.

    Raises:
        InvalidArgument: The image cannot be read, or is no image.
    """
    data = _file(image)
    if not data:
        raise _bad("image", "it is empty")
    return data


def _file(image: object) -> bytes:
    for kinds, read in _READERS:
        if isinstance(image, kinds):
            return read(image)
    wanted = "a path, bytes, a PIL image or a uint8 [H, W, 3] array"
    raise _bad("image", f"it must be {wanted}, not {type(image).__name__}")


def _read(path: str | os.PathLike[str]) -> bytes:
    try:
        with Path(path).open("rb") as file:
            return _local.read_photo(file, os.fstat(file.fileno()).st_size)
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        reason = getattr(error, "strerror", None) or str(error)
        raise _bad("image", f"cannot read {os.fspath(path)!r}: {reason}") from error


_READERS: Sequence[tuple[tuple[type, ...], Callable[[Any], bytes]]] = (
    ((str, os.PathLike), _read),
    ((bytes, bytearray, memoryview), bytes),
    ((Image.Image,), _picture.from_pil),
    ((np.ndarray,), _picture.from_array),
)


def _methods(given: MethodLike | Sequence[MethodLike]) -> Sequence[MethodLike]:
    if isinstance(given, str | Method) or _is_pair(given):
        return (given,)
    return cast("Sequence[MethodLike]", given)


def _is_pair(given: Sequence[object]) -> TypeGuard[tuple[str, Mapping[str, float | str]]]:
    # A tuple of two names is two methods.
    return isinstance(given, tuple) and bool(given) and isinstance(given[-1], Mapping)


def _method(given: MethodLike) -> explain_pb2.Method:
    if isinstance(given, str):
        return explain_pb2.Method(name=given)
    method = given if isinstance(given, Method) else Method(*given)
    parameters = {name: parameter(name, each) for name, each in method.parameters.items()}
    return explain_pb2.Method(
        name=method.name,
        parameters=parameters,
        augmentation_smoothing=method.augmentation_smoothing,
        eigen_smoothing=method.eigen_smoothing,
    )


def parameter(name: str, given: object, owner: str = "methods") -> explain_pb2.Parameter:
    """Write the value of a parameter.

    Raises:
        InvalidArgument: It is neither a number nor a word.
    """
    if isinstance(given, str):
        return explain_pb2.Parameter(text=given)
    try:
        return explain_pb2.Parameter(number=given)  # type: ignore[arg-type]  # protobuf checks it
    except TypeError as error:
        kind = type(given).__name__
        raise _bad(f"{owner}.{name}", f"it must be a number or a word, not {kind}") from error


def _chosen(known: Mapping[K, V], name: K, field: str) -> V:
    if name not in known:
        raise _bad(field, f"there is no {name!r}; there are {', '.join(map(repr, known))}")
    return known[name]


def _check_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise _bad(name, f"{value} is not between {low} and {high}")


def _bad(field: str, reason: str) -> InvalidArgument:
    return InvalidArgument(f"{field}: {reason}", fields={field: reason})


def result(response: explain_pb2.ExplainResponse, asked: Sequence[explain_pb2.Target] = ()) -> Result:
    """Read a response.

    Args:
        response: As it came.
        asked: The targets of its request, for receipts: an image to compare with is not sent back.

    Raises:
        Internal: A raw map does not have the number of values that it declares, or the answer is invalid.
    """
    if len(response.explanations) > _MOST_EXPLANATIONS or len(response.predictions) > _RANGES["max_predictions"][1]:
        raise Internal("the server sent more explanations or predictions than a request can ask for")
    photo = _photo(response.photo)
    timing = response.timing
    return Result(
        predictions=tuple(map(_prediction, response.predictions)),
        explanations=tuple(
            _explanation(each, photo, _receipt(each, response, asked[at % len(asked)] if asked else None))
            for at, each in enumerate(response.explanations)
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
    )


def outcome(
    reply: explain_pb2.ExplainStreamResponse, asked: Sequence[explain_pb2.Target] = ()
) -> Result | CamserveError | None:
    """Read one answer of a stream: what came out, or why nothing did; None if it is neither."""
    kind = reply.WhichOneof("outcome")
    if kind == "response":
        try:
            return result(reply.response, asked)
        except CamserveError as error:
            return error
    if kind != "error":
        return None
    said = reply.error
    after = said.retry_after_ms / 1000 if said.HasField("retry_after_ms") else None
    wrong = merged((each.field, each.description) for each in said.fields)
    return make(code_of(said.code), said.message, Details(reply.request_id, wrong, after))


def _photo(said: explain_pb2.Photo) -> Photo:
    seen = said.seen
    edges = (seen.left, seen.top, seen.right, seen.bottom)
    if max(said.width, said.height) > _LONGEST_SIDE or not all(map(math.isfinite, edges)):
        raise Internal("the server sent an invalid photo geometry")
    box = Box(seen.left, seen.top, seen.right, seen.bottom)
    whole = Box(0.0, 0.0, float(said.width), float(said.height))
    return Photo(said.width, said.height, box if said.HasField("seen") else whole)


def _prediction(said: explain_pb2.Prediction) -> Prediction:
    box = said.box
    where = Box(box.left, box.top, box.right, box.bottom) if said.HasField("box") else None
    if said.class_index > _LARGEST_INDEX:
        raise Internal("the server sent an invalid class index")
    label = said.label or f"class {said.class_index}"
    return Prediction(label, said.probability, said.class_index, said.score, where, said.area)


def _receipt(
    said: explain_pb2.Explanation, response: explain_pb2.ExplainResponse, asked: explain_pb2.Target | None
) -> Receipt | None:
    if not response.HasField("receipt"):
        return None
    origin = response.receipt
    same = {each.name: getattr(origin, each.name) for each in origin.DESCRIPTOR.fields if each.name != "versions"}
    return Receipt(
        **same,
        model=response.model,
        versions=dict(origin.versions),
        method=said.method,
        parameters={name: value(each) for name, each in said.parameters.items()},
        augmentation_smoothing=said.augmentation_smoothing,
        eigen_smoothing=said.eigen_smoothing,
        layers=tuple(said.layer.split(_JOINT)) if said.layer else (),
        fusion=_FUSION_NAMES.get(said.fusion),
        target=target_json(_complete(said.resolved_target, asked)),
        score=said.score,
        verdict=_verdict(said.verdict),
        heatmap=_heatmap(said.heatmap) if said.HasField("heatmap") else None,
    )


def _complete(resolved: explain_pb2.Target, asked: explain_pb2.Target | None) -> explain_pb2.Target:
    likeness = resolved.WhichOneof("kind") == "similarity" and not resolved.similarity.image
    return asked if asked and likeness else resolved


def _explanation(said: explain_pb2.Explanation, photo: Photo, receipt: Receipt | None) -> Explanation:
    return Explanation(
        method=said.method,
        layer=said.layer,
        target=_prediction(said.target),
        contrast=_prediction(said.contrast) if said.HasField("contrast") else None,
        score=said.score,
        verdict=_verdict(said.verdict),
        verdict_message=said.verdict_message,
        parameters={name: value(each) for name, each in said.parameters.items()},
        photo=photo,
        heatmap=_heatmap(said.heatmap) if said.HasField("heatmap") else None,
        overlay_picture=_pictured(said.overlay) if said.HasField("overlay") else None,
        colored_picture=_pictured(said.heatmap_image) if said.HasField("heatmap_image") else None,
        resolved=_targets.resolved(said.resolved_target),
        intensity=_heatmap(said.intensity) if said.HasField("intensity") else None,
        completeness_error=said.completeness_error if said.HasField("completeness_error") else None,
        augmentation_smoothing=said.augmentation_smoothing,
        eigen_smoothing=said.eigen_smoothing,
        fusion=_FUSION_NAMES.get(said.fusion),
        receipt_or_none=receipt,
    )


def _verdict(number: int) -> Verdict:
    # A newer server may know more verdicts than this client.
    if number not in explain_pb2.Verdict.values():
        return Verdict.UNSPECIFIED
    name = explain_pb2.Verdict.Name(explain_pb2.Verdict.ValueType(number))
    return Verdict(name.removeprefix("VERDICT_"))


def _heatmap(said: explain_pb2.Heatmap) -> NDArray[np.float32]:
    values = np.frombuffer(said.data, "<f4") if len(said.data) % 4 == 0 else np.empty(0)
    if values.size != said.height * said.width or not values.size:
        raise Internal(f"the server sent no {said.height} by {said.width} heatmap")
    return values.astype(np.float32, copy=False).reshape(said.height, said.width)


def _pictured(said: explain_pb2.Picture) -> Picture:
    return Picture(_FORMAT_NAMES.get(said.format, ""), said.data, said.width, said.height)


def value(said: explain_pb2.Parameter) -> float | str:
    """Read the value of a parameter."""
    return said.text if said.WhichOneof("value") == "text" else said.number


def model(said: models_pb2.Model, labels: Iterable[str] = ()) -> Model:
    """Read the description of a model."""
    same = {each.name: getattr(said, each.name) for each in fields(Model) if each.name not in {"labels", "state"}}
    return Model(labels=tuple(labels), state=_state(said.state), **same)


def _state(number: int) -> ModelState:
    try:
        return ModelState(models_pb2.ModelState.Name(number).removeprefix("MODEL_STATE_"))  # type: ignore[arg-type]
    except ValueError:  # of a newer server
        return ModelState.UNSPECIFIED


def layer(said: models_pb2.Layer) -> Layer:
    """Read the description of a layer."""
    return Layer(
        name=said.name,
        type=said.type,
        output_shape=tuple(said.output_shape),
        parameters=said.parameters,
        calls=said.calls,
        explainable=said.explainable,
        grid=(said.grid_height, said.grid_width) if said.grid_height else None,
        reason=said.reason,
        kinds=tuple(map(_kind, said.kinds)),
    )


def method(said: models_pb2.MethodInfo) -> MethodInfo:
    """Read the description of a method."""
    return MethodInfo(
        name=said.name,
        kind=_kind(said.kind),
        summary=said.summary,
        paper=said.paper,
        parameters=tuple(map(parameter_info, said.parameters)),
        rows=said.rows,
        layered=said.layered,
        eigen_smoothing=said.eigen_smoothing,
        needs=said.needs,
        formula=said.formula,
    )


def _kind(number: int) -> str:
    if number not in models_pb2.MethodKind.values():
        return str(number)
    name = models_pb2.MethodKind.Name(models_pb2.MethodKind.ValueType(number))
    return name.removeprefix("METHOD_KIND_")


def parameter_info(said: models_pb2.ParameterInfo) -> ParameterInfo:
    """Read the description of a parameter."""
    return ParameterInfo(
        name=said.name,
        summary=said.summary,
        default=value(said.default_value) if said.HasField("default_value") else None,
        minimum=said.minimum,
        maximum=said.maximum,
        integer=said.integer,
        choices=tuple(said.choices),
    )
