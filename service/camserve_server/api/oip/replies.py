"""Responses: explanations as tensors, and models as Triton describes them."""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from camserve.v1 import explain_pb2
from camserve_server.api.oip.tensors import IMAGE, element
from camserve_server.api.oip.v2 import inference_pb2
from camserve_server.models.values import KnownModel, ModelInfo

PLATFORM = "camserve"
EXTENSIONS = ("model_configuration", "model_repository", "parameters", "statistics", "binary_tensor_data")


@dataclass(frozen=True, slots=True)
class Output:
    """An output of a model.

    Attributes:
        datatype: datatype in the protocol.
        dims: shape for one image; -1 for a dimension that depends on the layer.
        encode: function that returns the values for one image as the bytes of a tensor.
    """

    datatype: str
    dims: tuple[int, ...]
    encode: Callable[[explain_pb2.Explanation], bytes]


def _verdict(explanation: explain_pb2.Explanation) -> bytes:
    return explain_pb2.Verdict.Name(explanation.verdict).removeprefix("VERDICT_").encode()


OUTPUTS: Mapping[str, Output] = {
    "overlay": Output("BYTES", (1,), lambda explanation: element(explanation.overlay.data)),
    "heatmap": Output("FP32", (-1, -1), lambda explanation: explanation.heatmap.data),
    "class_id": Output("INT64", (1,), lambda explanation: struct.pack("<q", explanation.target.class_index)),
    "score": Output("FP32", (1,), lambda explanation: struct.pack("<f", explanation.score)),
    "label": Output("BYTES", (1,), lambda explanation: element(explanation.target.label.encode())),
    "verdict": Output("BYTES", (1,), lambda explanation: element(_verdict(explanation))),
}
"""The outputs of every model by name, with one value or array for each image."""

_TYPES = {
    "BYTES": inference_pb2.TYPE_STRING,
    "FP32": inference_pb2.TYPE_FP32,
    "INT64": inference_pb2.TYPE_INT64,
}


def infer_response(
    request: inference_pb2.ModelInferRequest,
    model: ModelInfo,
    outputs: Sequence[str],
    responses: Sequence[explain_pb2.ExplainResponse],
) -> inference_pb2.ModelInferResponse:
    """Encode the response to a request.

    Args:
        request: the request.
        model: the model that was explained.
        outputs: names of the requested outputs, in order.
        responses: the response for each image, each with one explanation.
    """
    explanations = [response.explanations[0] for response in responses]
    response = inference_pb2.ModelInferResponse(model_name=model.name, model_version=str(model.version), id=request.id)
    for name in outputs:
        output, shape = OUTPUTS[name], [len(explanations), *OUTPUTS[name].dims]
        if name == "heatmap":
            shape[1:] = [explanations[0].heatmap.height, explanations[0].heatmap.width]
        response.outputs.add(name=name, datatype=output.datatype, shape=shape)
        response.raw_output_contents.append(b"".join(map(output.encode, explanations)))
    return response


def metadata_of(model: ModelInfo) -> inference_pb2.ModelMetadataResponse:
    """Describe the inputs and outputs of a model."""
    tensor = inference_pb2.ModelMetadataResponse.TensorMetadata
    return inference_pb2.ModelMetadataResponse(
        name=model.name,
        versions=[str(model.version)],
        platform=PLATFORM,
        inputs=[tensor(name=IMAGE, datatype="BYTES", shape=[-1, 1])],
        outputs=[
            tensor(name=name, datatype=output.datatype, shape=[-1, *output.dims]) for name, output in OUTPUTS.items()
        ],
        properties={
            "task": model.task,
            "source": model.source,
            "weights": model.weights,
            "default_layer": model.default_layer,
        },
    )


def config_of(model: ModelInfo, images: int, delay_ms: float) -> inference_pb2.ModelConfig:
    """Describe a model as a configuration of Triton does.

    Args:
        model: the model.
        images: the largest number of images in a request.
        delay_ms: the longest time, in milliseconds, that a row waits for others to fill a batch.
    """
    return inference_pb2.ModelConfig(
        name=model.name,
        platform=PLATFORM,
        backend=PLATFORM,
        max_batch_size=images,
        input=[inference_pb2.ModelInput(name=IMAGE, data_type=inference_pb2.TYPE_STRING, dims=[1])],
        output=[
            inference_pb2.ModelOutput(name=name, data_type=_TYPES[output.datatype], dims=output.dims)
            for name, output in OUTPUTS.items()
        ],
        dynamic_batching=inference_pb2.ModelDynamicBatching(max_queue_delay_microseconds=round(1e3 * delay_ms)),
        model_transaction_policy=inference_pb2.ModelTransactionPolicy(decoupled=False),
    )


_STATES = {
    "loading": ("LOADING", ""),
    "failed": ("UNAVAILABLE", "it could not be loaded; the server's log says why"),
    "unloading": ("UNLOADING", "it completes accepted requests"),
    "unloaded": ("UNAVAILABLE", "unloaded"),
}
"""State and reason of a model that is not ready, by `UnavailableModel.state`."""


def index_of(model: KnownModel) -> inference_pb2.RepositoryIndexResponse.ModelIndex:
    """Describe the state of a model."""
    state, reason = ("READY", "") if isinstance(model, ModelInfo) else _STATES[model.state]
    version = str(model.version) if model.version else ""
    return inference_pb2.RepositoryIndexResponse.ModelIndex(
        name=model.name, version=version, state=state, reason=reason
    )
