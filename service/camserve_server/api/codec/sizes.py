"""Limits on the length of texts and lists in every field of every request, checked before anything else."""

from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf.message import Message

from camserve_server.core.errors import InvalidArgument
from camserve_server.core.limits import Limits

LISTS: Mapping[str, str] = {
    "camserve.v1.ExplainRequest.methods": "methods",
    "camserve.v1.ExplainRequest.targets": "targets",
    "camserve.v1.ExplainRequest.layers": "layers",
    "camserve.v1.ExplainRequest.texts": "texts",
    "camserve.v1.ExplainRequest.interventions": "interventions",
    "camserve.v1.Intervention.channels": "changed_channels",
    "camserve.v1.Rendering.bands": "bands",
    "camserve.v1.Method.parameters": "parameters",
    "camserve.v1.Method.input_channels": "explanations",
    "camserve.v1.Finer.against": "against",
    "camserve.v1.EvaluateRequest.metrics": "metrics",
    "camserve.v1.Metric.parameters": "parameters",
    "camserve.v1.InspectLayersRequest.layers": "inspected",
    "camserve.v1.InspectLayersRequest.texts": "texts",
    "camserve.v1.InspectLayersRequest.interventions": "interventions",
    "camserve.v1.ExtractFeaturesRequest.texts": "texts",
    "camserve.v1.ExtractFeaturesRequest.interventions": "interventions",
    "camserve.v1.ExtractFeaturesRequest.fit_images": "fit_images",
    "open_inference.v2.ModelInferRequest.parameters": "asked",
    "open_inference.v2.ModelInferRequest.inputs": "tensors",
    "open_inference.v2.ModelInferRequest.outputs": "tensors",
    "open_inference.v2.ModelInferRequest.raw_input_contents": "tensors",
    "open_inference.v2.ModelInferRequest.InferInputTensor.shape": "axes",
    "open_inference.v2.ModelInferRequest.InferInputTensor.parameters": "asked",
    "open_inference.v2.ModelInferRequest.InferRequestedOutputTensor.parameters": "asked",
    "open_inference.v2.InferTensorContents.bytes_contents": "images",
    "open_inference.v2.RepositoryModelLoadRequest.parameters": "asked",
    "open_inference.v2.RepositoryModelUnloadRequest.parameters": "asked",
}
"""The attribute of `Limits` for each repeated field and map of a request.

Lists of numbers in tensors have no limit of their own: the size of the message limits them.
"""


def check_sizes(message: Message, limits: Limits, path: str = "") -> None:
    """Refuse a request in which a text or a list is too long.

    Args:
        message: the request, or a message inside it.
        limits: limits on one request.
        path: path of the message inside the request, with a dot at its end.

    Raises:
        InvalidArgument: a text or list is too long; the error names the field and the limit.
    """
    for field, value in message.ListFields():
        name = f"{path}{field.name}"
        if field.full_name in LISTS:
            _check_list(value, limits, name, getattr(limits, LISTS[field.full_name]))
        else:
            _check_value(value, limits, name)


def _check_list(values: Any, limits: Limits, name: str, limit: int) -> None:
    if len(values) > limit:
        raise InvalidArgument(f"{len(values)} {name}, and {limit} is the limit", field=name)
    items: Iterable[tuple[object, Any]] = enumerate(values)  # index or quoted key, and value
    if isinstance(values, Mapping):
        for key in values:
            _check_value(key, limits, name)
        items = ((f'"{key}"', values[key]) for key in values)
    elif values and not isinstance(values[0], str | Message):
        return  # numbers, of which there may be a hundred thousand
    for key, value in items:
        _check_value(value, limits, f"{name}[{key}]")


def _check_value(value: Any, limits: Limits, name: str) -> None:
    if isinstance(value, Message):
        check_sizes(value, limits, f"{name}.")
    elif isinstance(value, str) and len(value) > limits.text:
        raise InvalidArgument.of_field(name, f"has {len(value):,} characters, and {limits.text:,} is the limit")
