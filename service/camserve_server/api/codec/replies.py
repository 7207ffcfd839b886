"""Responses: conversion of results, models, layers and methods to protobuf."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from camserve.v1 import explain_pb2, models_pb2
from camserve_server.api.codec.formats import FORMATS, FUSIONS
from camserve_server.api.codec.interventions import intervention_message
from camserve_server.api.codec.predictions import (
    box_message,
    contrast_message,
    explained_message,
    prediction_messages,
    target_message,
)
from camserve_server.core.arrays import Map
from camserve_server.core.limits import Limits
from camserve_server.imaging.values import Box, Picture, Region, RunLengths
from camserve_server.jobs import Explanation, Job, rows_of
from camserve_server.jobs.verdict import Verdict
from camserve_server.methods import METHODS, Method, Parameter
from camserve_server.methods.kinds import formula, summary
from camserve_server.methods.values import MethodCall, ParameterValue
from camserve_server.models.values import KnownModel, LayerInfo, UnavailableModel
from camserve_server.serving.receipts import Receipt
from camserve_server.serving.requests import ExplainRequest
from camserve_server.serving.results import ExplainResult, ModelPrediction, Timing

_FORMATS = {name: value for value, name in FORMATS.items() if name}
_FUSIONS = {name: value for value, name in FUSIONS.items()}

_VERDICTS = {
    Verdict.OK: explain_pb2.VERDICT_OK,
    Verdict.ALL_NEGATIVE: explain_pb2.VERDICT_ALL_NEGATIVE,
    Verdict.FLAT: explain_pb2.VERDICT_FLAT,
    Verdict.ZERO_GRADIENT: explain_pb2.VERDICT_ZERO_GRADIENT,
    Verdict.NON_FINITE: explain_pb2.VERDICT_NON_FINITE,
}


def explain_response(request: ExplainRequest, result: ExplainResult) -> explain_pb2.ExplainResponse:
    """Encode the response to a request; the caller sets its id.

    Args:
        request: the request, with the number of predictions to return and whether to return raw maps.
        result: the result. Its list of explanations is emptied one by one, so that a picture and its copy in the
            message do not take memory at the same time.
    """
    prediction, raw = result.prediction, request.rendering.heatmap
    response = explain_pb2.ExplainResponse(
        model=prediction.model.name,
        predictions=prediction_messages(prediction, request.predictions),
        photo=photo_message(result.size, prediction.seen),
        timing=timing_message(result.timing),
        receipt=_receipt(result.receipt),
        class_map=None if result.class_map is None else _class_map(result.class_map),
        unchanged_predictions=prediction_messages(result.unchanged, request.predictions),
    )
    while result.explanations:
        response.explanations.append(_explanation(prediction, result.explanations.pop(0), raw=raw))
    return response


def cost_response(job: Job, limits: Limits) -> explain_pb2.EstimateCostResponse:
    """Encode the cost of a job."""
    return explain_pb2.EstimateCostResponse(rows=job.rows, explanations=job.explanations, max_rows=limits.rows)


def photo_message(size: tuple[int, int], seen: Box) -> explain_pb2.Photo:
    """Convert the height and width of a photo, and the part of it that the model saw, to protobuf."""
    return explain_pb2.Photo(height=size[0], width=size[1], seen=box_message(seen))


def timing_message(timing: Timing) -> explain_pb2.Timing:
    """Convert the timing of a request to protobuf, in milliseconds."""
    return explain_pb2.Timing(
        decode_ms=1e3 * timing.decode,
        queue_ms=1e3 * timing.queue,
        compute_ms=1e3 * timing.compute,
        render_ms=1e3 * timing.render,
        batch_rows=timing.batch_rows,
    )


def _receipt(receipt: Receipt) -> explain_pb2.Receipt:
    return explain_pb2.Receipt(
        source=receipt.source,
        weights=receipt.weights,
        digest=receipt.digest,
        precision=receipt.precision,
        device=receipt.device,
        image_sha256=receipt.image_sha256,
        input_sha256=receipt.input_sha256,
        versions=receipt.versions,
        texts=receipt.texts,
        value_range=_range_message(receipt.value_range),
        interventions=map(intervention_message, receipt.interventions),
    )


def _range_message(values: tuple[float, float] | None) -> explain_pb2.ValueRange | None:
    return explain_pb2.ValueRange(minimum=values[0], maximum=values[1]) if values else None


def _explanation(prediction: ModelPrediction, explanation: Explanation, *, raw: bool) -> explain_pb2.Explanation:
    return explain_pb2.Explanation(
        method=explanation.call.name,
        layer=explanation.layer,
        target=explained_message(prediction, explanation.target, explanation.score),
        contrast=contrast_message(prediction, explanation.target, explanation.score),
        score=explanation.score,
        verdict=_VERDICTS[explanation.verdict],
        verdict_message="" if explanation.verdict is Verdict.OK else explanation.verdict.value,
        parameters=parameter_messages(explanation.call.parameters),
        heatmap=_heatmap(explanation.heatmap) if raw else None,
        overlay=picture_message(explanation.overlay),
        heatmap_image=picture_message(explanation.heatmap_image),
        intensity=None if explanation.intensity is None else _heatmap(explanation.intensity),
        completeness_error=explanation.error,
        augmentation_smoothing=explanation.call.augmented,
        eigen_smoothing=explanation.call.eigen,
        input_channel=explanation.input_channel,
        fusion=_FUSIONS[explanation.fusion],
        resolved_target=target_message(prediction, explanation.target),
        scale=explanation.scale,
        regions=map(_region, explanation.regions),
    )


def _region(region: Region) -> explain_pb2.Region:
    return explain_pb2.Region(
        box=box_message(region.box),
        area=region.area,
        contour=region.contour.ravel().tolist(),
        peak=explain_pb2.Point(x=region.peak[0], y=region.peak[1]),
        peak_value=region.peak_value,
        share=region.share,
        mask=_run_lengths(region.mask) if region.mask else None,
    )


def _run_lengths(mask: RunLengths) -> explain_pb2.RunLengths:
    return explain_pb2.RunLengths(height=mask.height, width=mask.width, counts=mask.counts)


def _class_map(classes: NDArray[np.uint16]) -> explain_pb2.ClassMap:
    height, width = classes.shape
    return explain_pb2.ClassMap(height=height, width=width, data=classes.astype("<u2").tobytes())


def _heatmap(heatmap: Map) -> explain_pb2.Heatmap:
    height, width = heatmap.shape
    return explain_pb2.Heatmap(height=height, width=width, data=heatmap.astype("<f4").tobytes())


def picture_message(picture: Picture | None) -> explain_pb2.Picture | None:
    """Convert a picture to protobuf; None stays None."""
    if picture is None:
        return None
    return explain_pb2.Picture(
        format=_FORMATS[picture.format], data=picture.data, width=picture.width, height=picture.height
    )


def parameter_messages(parameters: Mapping[str, ParameterValue]) -> dict[str, explain_pb2.Parameter]:
    """Convert parameters by name to protobuf."""
    return {name: _parameter(value) for name, value in parameters.items()}


def _parameter(value: ParameterValue) -> explain_pb2.Parameter:
    return explain_pb2.Parameter(text=value) if isinstance(value, str) else explain_pb2.Parameter(number=value)


_STATES: dict[str, "models_pb2.ModelState.ValueType"] = {
    "loading": models_pb2.MODEL_STATE_LOADING,
    "failed": models_pb2.MODEL_STATE_FAILED,
    "unloading": models_pb2.MODEL_STATE_UNLOADING,
    "unloaded": models_pb2.MODEL_STATE_UNLOADED,
}


def describe_model(info: KnownModel) -> models_pb2.Model:
    """Describe a model; of one that is not ready, only the name, source, version and state."""
    if isinstance(info, UnavailableModel):
        return models_pb2.Model(name=info.name, source=info.source, version=info.version, state=_STATES[info.state])
    height, width = info.preprocess.size
    info = info.with_texts(info.labels)
    return models_pb2.Model(
        name=info.name,
        source=info.source,
        weights=info.weights,
        digest=info.digest,
        classes=info.classes,
        input_height=height,
        input_width=width,
        default_layer=info.default_layer,
        parameters=info.parameters,
        precision=info.precision,
        device=info.device,
        task=info.task,
        version=info.version,
        state=models_pb2.MODEL_STATE_READY,
        accepts_texts=info.text is not None,
        input_channels=info.channels,
        pyramid=info.pyramid,
        independent_rows=info.independent_rows,
    )


def _explains(method: Method, layer: LayerInfo) -> bool:
    """Return whether a method makes maps of a layer."""
    return method.layered and layer.layout is not None and (layer.differentiable or "layer" not in method.gradients)


def describe_layer(layer: LayerInfo) -> models_pb2.Layer:
    """Describe a layer."""
    return models_pb2.Layer(
        name=layer.name,
        type=layer.type,
        output_shape=layer.shape,
        parameters=layer.parameters,
        calls=layer.calls,
        explainable=layer.layout is not None,
        grid_height=layer.layout.height if layer.layout else 0,
        grid_width=layer.layout.width if layer.layout else 0,
        reason=layer.reason,
        kinds=sorted({kind_of(method) for method in METHODS.values() if _explains(method, layer)}),
    )


_KINDS: dict[str, "models_pb2.MethodKind.ValueType"] = {
    "cam": models_pb2.METHOD_KIND_CAM,
    "saliency": models_pb2.METHOD_KIND_SALIENCY,
    "perturbation": models_pb2.METHOD_KIND_PERTURBATION,
    "attention": models_pb2.METHOD_KIND_ATTENTION,
    "composite": models_pb2.METHOD_KIND_COMPOSITE,
    "baseline": models_pb2.METHOD_KIND_BASELINE,
}

_TYPICAL_CHANNELS = 512  # of a layer
_TYPICAL_SIZE = (224, 224)  # height and width of a model's input


def kind_of(method: Method) -> "models_pb2.MethodKind.ValueType":
    """Return the kind of a method as protobuf."""
    return _KINDS[method.kind]


def describe_method(name: str) -> models_pb2.MethodInfo:
    """Describe a method."""
    method = METHODS[name]
    call = MethodCall(name, {parameter.name: parameter.default for parameter in method.parameters})
    return models_pb2.MethodInfo(
        name=name,
        kind=kind_of(method),
        summary=summary(method),
        paper=method.paper,
        parameters=[parameter_info(parameter) for parameter in method.parameters],
        rows=max(1, rows_of(call, [_TYPICAL_CHANNELS], _TYPICAL_SIZE)),
        layered=method.layered,
        eigen_smoothing=method.smooths,
        per_channel=method.per_channel,
        needs=method.needs,
        formula=formula(method),
    )


def parameter_info(parameter: Parameter) -> models_pb2.ParameterInfo:
    """Describe a parameter."""
    return models_pb2.ParameterInfo(
        name=parameter.name,
        summary=parameter.summary,
        default_value=_parameter(parameter.default),
        minimum=parameter.minimum,
        maximum=parameter.maximum,
        integer=parameter.integer,
        choices=parameter.choices,
    )
