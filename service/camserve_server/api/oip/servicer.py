"""Servicer of the Open Inference Protocol. To follow a request, start at `InferenceServicer.ModelInfer`."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from camserve.v1 import explain_pb2, models_pb2
from camserve_server.api import codec
from camserve_server.api.codec.checks import shorten
from camserve_server.api.oip.replies import EXTENSIONS, PLATFORM, config_of, index_of, infer_response, metadata_of
from camserve_server.api.oip.requests import (
    ASKS_FOR_FINAL,
    FINAL,
    InferRequest,
    convert_fields,
    read_infer,
    read_version,
)
from camserve_server.api.oip.statistics import Statistics
from camserve_server.api.oip.tensors import read_images
from camserve_server.api.oip.v2 import inference_pb2
from camserve_server.api.rpc import Call, Context, ServerState, rpc_scope, run_item
from camserve_server.api.servicers.explain import explain
from camserve_server.api.servicers.models import load_model, unload_model
from camserve_server.api.streams import Received, serve_stream
from camserve_server.core.errors import DeadlineExceeded, InvalidArgument, ServiceError
from camserve_server.models.values import ModelInfo
from camserve_server.serving.explain import Pipeline


class InferenceServicer:
    """Servicer for clients of Triton and KServe.

    Args:
        state: state of the server.
        ready: function that returns True if the server can explain images.
        delay_ms: the longest time, in milliseconds, that a row waits for others to fill a batch.
    """

    def __init__(self, state: ServerState, ready: Callable[[], bool], delay_ms: float) -> None:
        self._state, self._ready, self._delay_ms = state, ready, delay_ms
        self._statistics = Statistics()

    async def ModelInfer(  # noqa: N802 -- the RPC's name
        self, request: inference_pb2.ModelInferRequest, context: Context
    ) -> inference_pb2.ModelInferResponse:
        """Explain the images of one request."""
        async with rpc_scope(self._state, context, "ModelInfer") as call:
            return await self._infer(self._state.require_open(), request, call)

    async def _infer(
        self, pipeline: Pipeline, request: inference_pb2.ModelInferRequest, call: Call, *, wait: bool = False
    ) -> inference_pb2.ModelInferResponse:
        infer_request = read_infer(request, pipeline.models, pipeline.limits)
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            limited = replace(call, deadline=min(call.deadline, began + infer_request.timeout))
            try:
                async with asyncio.timeout(infer_request.timeout):  # gRPC knows only the call's own deadline
                    responses = await _explain_images(pipeline, request, infer_request, limited, wait=wait)
            except TimeoutError:
                raise DeadlineExceeded("the timeout of the request has passed") from None
        except ServiceError:
            self._statistics.count_failure(infer_request.model, clock() - began)
            raise
        self._statistics.count_success(infer_request.model, clock() - began, responses)
        call.note_reply(responses[0])
        return infer_response(request, infer_request.model, infer_request.outputs, responses)

    async def ModelStreamInfer(  # noqa: N802 -- the RPC's name
        self, requests: AsyncIterator[Received[inference_pb2.ModelInferRequest]], context: Context
    ) -> None:
        """Explain the images of many requests. Responses are in the order of the requests, which need no ids."""
        async with rpc_scope(self._state, context, "ModelStreamInfer") as call:
            last = asyncio.Event()
            last.set()

            async def answer(request: inference_pb2.ModelInferRequest, write: Callable[[Any], Awaitable[None]]) -> None:
                nonlocal last
                previous, last = last, (written := asyncio.Event())
                reply = await self._reply(request, call.item(call.request_id))
                await previous.wait()
                await write(reply)
                written.set()

            await serve_stream(self._state, context, requests, answer)

    async def _reply(
        self, request: inference_pb2.ModelInferRequest, call: Call
    ) -> inference_pb2.ModelStreamInferResponse:
        work = self._infer(self._state.require_warm(), request, call, wait=True)
        result = await run_item(self._state, call, "ModelStreamInfer", work)
        if isinstance(result, ServiceError):
            response = inference_pb2.ModelInferResponse(id=request.id)
            return inference_pb2.ModelStreamInferResponse(error_message=result.message, infer_response=response)
        if ASKS_FOR_FINAL in request.parameters:
            result.parameters[FINAL].bool_param = True
        return inference_pb2.ModelStreamInferResponse(infer_response=result)

    async def ServerLive(  # noqa: N802 -- the RPC's name
        self, _request: inference_pb2.ServerLiveRequest, context: Context
    ) -> inference_pb2.ServerLiveResponse:
        """Return that the server runs."""
        async with rpc_scope(self._state, context, "ServerLive"):
            return inference_pb2.ServerLiveResponse(live=True)

    async def ServerReady(  # noqa: N802 -- the RPC's name
        self, _request: inference_pb2.ServerReadyRequest, context: Context
    ) -> inference_pb2.ServerReadyResponse:
        """Return whether the server can explain images."""
        async with rpc_scope(self._state, context, "ServerReady"):
            return inference_pb2.ServerReadyResponse(ready=self._ready())

    async def ModelReady(  # noqa: N802 -- the RPC's name
        self, request: inference_pb2.ModelReadyRequest, context: Context
    ) -> inference_pb2.ModelReadyResponse:
        """Return whether a model is ready."""
        async with rpc_scope(self._state, context, "ModelReady"):
            if not self._ready():
                return inference_pb2.ModelReadyResponse(ready=False)
            pipeline = self._state.require_warm()
            codec.check_sizes(request, pipeline.limits)
            model = pipeline.models.get(request.name)
            ready = isinstance(model, ModelInfo) and request.version in ("", str(model.version))
            return inference_pb2.ModelReadyResponse(ready=ready)

    async def ServerMetadata(  # noqa: N802 -- the RPC's name
        self, _request: inference_pb2.ServerMetadataRequest, context: Context
    ) -> inference_pb2.ServerMetadataResponse:
        """Describe the server."""
        async with rpc_scope(self._state, context, "ServerMetadata"):
            return inference_pb2.ServerMetadataResponse(
                name=PLATFORM, version=version("camserve"), extensions=EXTENSIONS
            )

    async def ModelMetadata(  # noqa: N802 -- the RPC's name
        self, request: inference_pb2.ModelMetadataRequest, context: Context
    ) -> inference_pb2.ModelMetadataResponse:
        """Describe the inputs and outputs of a model."""
        async with rpc_scope(self._state, context, "ModelMetadata"):
            return metadata_of(self._model(request))

    async def ModelConfig(  # noqa: N802 -- the RPC's name
        self, request: inference_pb2.ModelConfigRequest, context: Context
    ) -> inference_pb2.ModelConfigResponse:
        """Describe a model as a configuration of Triton does."""
        async with rpc_scope(self._state, context, "ModelConfig"):
            config = config_of(self._model(request), self._state.require_open().limits.images, self._delay_ms)
            return inference_pb2.ModelConfigResponse(config=config)

    async def ModelStatistics(  # noqa: N802 -- the RPC's name
        self, request: inference_pb2.ModelStatisticsRequest, context: Context
    ) -> inference_pb2.ModelStatisticsResponse:
        """Return the statistics of one model, or of all models that are ready."""
        async with rpc_scope(self._state, context, "ModelStatistics"):
            pipeline = self._state.require_open()
            codec.check_sizes(request, pipeline.limits)
            models = [self._model(request)] if request.name else pipeline.models.values()
            statistics = [self._statistics.of(model) for model in models if isinstance(model, ModelInfo)]
            return inference_pb2.ModelStatisticsResponse(model_stats=statistics)

    def _model(
        self,
        request: inference_pb2.ModelMetadataRequest
        | inference_pb2.ModelConfigRequest
        | inference_pb2.ModelStatisticsRequest,
    ) -> ModelInfo:
        pipeline = self._state.require_open()
        codec.check_sizes(request, pipeline.limits)
        return read_version(request.name, request.version, pipeline.models)

    async def RepositoryIndex(  # noqa: N802 -- the RPC's name
        self, request: inference_pb2.RepositoryIndexRequest, context: Context
    ) -> inference_pb2.RepositoryIndexResponse:
        """List the models."""
        async with rpc_scope(self._state, context, "RepositoryIndex"):
            pipeline = self._state.require_open()
            codec.check_sizes(request, pipeline.limits)
            _check_repository(request.repository_name)
            models = [model for model in pipeline.models.values() if isinstance(model, ModelInfo) or not request.ready]
            return inference_pb2.RepositoryIndexResponse(models=map(index_of, models))

    async def RepositoryModelLoad(  # noqa: N802 -- the RPC's name
        self, request: inference_pb2.RepositoryModelLoadRequest, context: Context
    ) -> inference_pb2.RepositoryModelLoadResponse:
        """Load a model, or load it again."""
        async with rpc_scope(self._state, context, "RepositoryModelLoad") as call:
            codec.check_sizes(request, self._state.require_open().limits)
            _check_repository(request.repository_name)
            weights = _read_loading(request.parameters)
            with convert_fields():
                model = await load_model(self._state, models_pb2.LoadModelRequest(name=request.model_name, **weights))
            call.fields = {"model": model.name, "version": model.version}
            return inference_pb2.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(  # noqa: N802 -- the RPC's name
        self, request: inference_pb2.RepositoryModelUnloadRequest, context: Context
    ) -> inference_pb2.RepositoryModelUnloadResponse:
        """Unload a model."""
        async with rpc_scope(self._state, context, "RepositoryModelUnload") as call:
            codec.check_sizes(request, self._state.require_open().limits)
            _check_repository(request.repository_name)
            with convert_fields():
                model = await unload_model(self._state, models_pb2.UnloadModelRequest(name=request.model_name))
            call.fields = {"model": model.name, "version": model.version}
            return inference_pb2.RepositoryModelUnloadResponse()


async def _explain_images(
    pipeline: Pipeline, request: inference_pb2.ModelInferRequest, infer_request: InferRequest, call: Call, *, wait: bool
) -> list[explain_pb2.ExplainResponse]:
    """Explain the images of a request, all at once. If one of them fails, the request fails."""
    if any(tensor.datatype != "BYTES" for tensor in request.inputs):
        images = await call.bind(pipeline).in_thread(read_images, request, pipeline.limits)
    else:
        images = read_images(request, pipeline.limits)
    explain_requests = list(map(infer_request.for_image, images))
    del images  # the requests have copies

    async def explain_image(index: int, explain_request: explain_pb2.ExplainRequest) -> explain_pb2.ExplainResponse:
        # The memory is released before the response is sent: on a stream, an earlier response may wait to be sent and
        # hold memory that this request, whose response must follow it, waits for.
        with convert_fields(index, len(explain_requests)), ExitStack() as until_sent:
            return await explain(pipeline, explain_request, replace(call, until_sent=until_sent), wait=wait)

    tasks = [asyncio.ensure_future(explain_image(*item)) for item in enumerate(explain_requests)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _check_repository(name: str) -> None:
    if name:
        raise InvalidArgument("the only repository has no name: leave repository_name empty", field="repository_name")


def _read_loading(parameters: Mapping[str, inference_pb2.ModelRepositoryParameter]) -> dict[str, str]:
    """Return the parameters weights and sha256."""
    result = {}
    for name, value in parameters.items():
        if name not in ("weights", "sha256") or value.WhichOneof("parameter_choice") != "string_param":
            raise InvalidArgument(
                f'unknown parameter "{shorten(name)}": the parameters of a load are the texts weights and sha256',
                field="parameters",
            )
        result[name] = value.string_param
    return result
