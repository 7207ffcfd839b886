"""Answers: what was explained as tensors, and models as Triton describes them."""

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
    """An output.

    Attributes:
        datatype: as the protocol calls it.
        dims: its shape for one image; -1 where that depends on the layer.
        of: returns its values for one image, as they lie in memory.
    """

    datatype: str
    dims: tuple[int, ...]
    of: Callable[[explain_pb2.Explanation], bytes]


def _verdict(explanation: explain_pb2.Explanation) -> bytes:
    return explain_pb2.Verdict.Name(explanation.verdict).removeprefix("VERDICT_").encode()


OUTPUTS: Mapping[str, Output] = {
    "overlay": Output("BYTES", (1,), lambda one: element(one.overlay.data)),
    "heatmap": Output("FP32", (-1, -1), lambda one: one.heatmap.data),
    "class_id": Output("INT64", (1,), lambda one: struct.pack("<q", one.target.class_index)),
    "score": Output("FP32", (1,), lambda one: struct.pack("<f", one.score)),
    "label": Output("BYTES", (1,), lambda one: element(one.target.label.encode())),
    "verdict": Output("BYTES", (1,), lambda one: element(_verdict(one))),
}
"""What may be asked for, one value or array for each image."""

_TYPES = {
    "BYTES": inference_pb2.TYPE_STRING,
    "FP32": inference_pb2.TYPE_FP32,
    "INT64": inference_pb2.TYPE_INT64,
}


def infer_response(
    request: inference_pb2.ModelInferRequest,
    model: ModelInfo,
    outputs: Sequence[str],
    answers: Sequence[explain_pb2.ExplainResponse],
) -> inference_pb2.ModelInferResponse:
    """Put the answer to a message together.

    Args:
        request: as it came.
        model: that answered.
        outputs: that are wanted, in order.
        answers: one for each image, each of one explanation.
    """
    explanations = [answer.explanations[0] for answer in answers]
    response = inference_pb2.ModelInferResponse(model_name=model.name, model_version=str(model.version), id=request.id)
    for name in outputs:
        output, shape = OUTPUTS[name], [len(explanations), *OUTPUTS[name].dims]
        if name == "heatmap":
            shape[1:] = [explanations[0].heatmap.height, explanations[0].heatmap.width]
        response.outputs.add(name=name, datatype=output.datatype, shape=shape)
        response.raw_output_contents.append(b"".join(map(output.of, explanations)))
    return response


def metadata_of(model: ModelInfo) -> inference_pb2.ModelMetadataResponse:
    """Describe the inputs and outputs of a model."""
    tensor = inference_pb2.ModelMetadataResponse.TensorMetadata
    return inference_pb2.ModelMetadataResponse(
        name=model.name,
        versions=[str(model.version)],
        platform=PLATFORM,
        inputs=[tensor(name=IMAGE, datatype="BYTES", shape=[-1, 1])],
        outputs=[tensor(name=name, datatype=one.datatype, shape=[-1, *one.dims]) for name, one in OUTPUTS.items()],
        properties={
            "task": model.task,
            "source": model.source,
            "weights": model.weights,
            "default_layer": model.default_layer,
        },
    )


def config_of(model: ModelInfo, images: int, delay_ms: float) -> inference_pb2.ModelConfig:
    """Describe a model as its configuration at Triton would.

    Args:
        model: that answers.
        images: how many a message may have.
        delay_ms: how long a row may be held back for company, in milliseconds.
    """
    return inference_pb2.ModelConfig(
        name=model.name,
        platform=PLATFORM,
        backend=PLATFORM,
        max_batch_size=images,
        input=[inference_pb2.ModelInput(name=IMAGE, data_type=inference_pb2.TYPE_STRING, dims=[1])],
        output=[
            inference_pb2.ModelOutput(name=name, data_type=_TYPES[one.datatype], dims=one.dims)
            for name, one in OUTPUTS.items()
        ],
        dynamic_batching=inference_pb2.ModelDynamicBatching(max_queue_delay_microseconds=round(1e3 * delay_ms)),
        model_transaction_policy=inference_pb2.ModelTransactionPolicy(decoupled=False),
    )


_WHY = {
    "loading": ("LOADING", ""),
    "failed": ("UNAVAILABLE", "it could not be loaded; the server's log says why"),
    "unloading": ("UNLOADING", "it finishes what was accepted"),
    "unloaded": ("UNAVAILABLE", "unloaded"),
}


def index_of(model: KnownModel) -> inference_pb2.RepositoryIndexResponse.ModelIndex:
    """Say of a model whether it answers."""
    state, reason = ("READY", "") if isinstance(model, ModelInfo) else _WHY[model.state]
    version = str(model.version) if model.version else ""
    return inference_pb2.RepositoryIndexResponse.ModelIndex(
        name=model.name, version=version, state=state, reason=reason
    )
