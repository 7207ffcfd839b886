"""The RPCs of the Open Inference Protocol. Read a request's way from `InferenceServicer.ModelInfer` downward."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from camserve.v1 import explain_pb2, models_pb2
from camserve_server.api import codec
from camserve_server.api.codec.checks import short
from camserve_server.api.oip.replies import EXTENSIONS, PLATFORM, config_of, index_of, infer_response, metadata_of
from camserve_server.api.oip.requests import ASKS_FOR_FINAL, FINAL, Asked, fields_named, read_infer, read_version
from camserve_server.api.oip.statistics import Statistics
from camserve_server.api.oip.tensors import read_images
from camserve_server.api.oip.v2 import inference_pb2
from camserve_server.api.rpc import Call, Context, ServerState, rpc_scope, run_item
from camserve_server.api.servicers.explain import explain
from camserve_server.api.servicers.models import load_model, unload_model
from camserve_server.api.streams import Received, serve_stream
from camserve_server.core.errors import InvalidArgument, ServiceError
from camserve_server.models.values import ModelInfo
from camserve_server.serving.explain import Pipeline


class InferenceServicer:
    """Answers clients of Triton and KServe.

    Args:
        state: that it answers from.
        ready: says whether explanations can be had.
        delay_ms: how long a row may be held back for company, in milliseconds.
    """

    def __init__(self, state: ServerState, ready: Callable[[], bool], delay_ms: float) -> None:
        self._state, self._ready, self._delay_ms = state, ready, delay_ms
        self._statistics = Statistics()

    async def ModelInfer(  # noqa: N802 -- the RPC's name
        self, request: inference_pb2.ModelInferRequest, context: Context
    ) -> inference_pb2.ModelInferResponse:
        """Explain the images of one message."""
        async with rpc_scope(self._state, context, "ModelInfer") as call:
            return await self._infer(self._state.open(), request, call)

    async def _infer(
        self, pipeline: Pipeline, request: inference_pb2.ModelInferRequest, call: Call, *, wait: bool = False
    ) -> inference_pb2.ModelInferResponse:
        asked = read_infer(request, pipeline.models, pipeline.limits)
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            limited = replace(call, deadline=min(call.deadline, began + asked.seconds))
            answers = await _explained(pipeline, request, asked, limited, wait=wait)
        except ServiceError:
            self._statistics.failed(asked.model, clock() - began)
            raise
        self._statistics.succeeded(asked.model, clock() - began, answers)
        call.note_reply(answers[0])
        return infer_response(request, asked.model, asked.outputs, answers)

    async def ModelStreamInfer(  # noqa: N802 -- the RPC's name
        self, requests: AsyncIterator[Received[inference_pb2.ModelInferRequest]], context: Context
    ) -> None:
        """Explain the images of many messages, in their order: clients need not name them."""
        async with rpc_scope(self._state, context, "ModelStreamInfer") as call:
            last = asyncio.Event()
            last.set()

            async def answer(request: inference_pb2.ModelInferRequest, write: Callable[[Any], Awaitable[None]]) -> None:
                nonlocal last
                before, last = last, (written := asyncio.Event())
                reply = await self._reply(request, call.item(call.request_id))
                await before.wait()
                await write(reply)
                written.set()

            await serve_stream(self._state, context, requests, answer)

    async def _reply(
        self, request: inference_pb2.ModelInferRequest, call: Call
    ) -> inference_pb2.ModelStreamInferResponse:
        pipeline = self._state.accepted()
        work = self._infer(pipeline, request, call, wait=True)
        answer = await run_item(self._state, call, "ModelStreamInfer", work)
        if isinstance(answer, ServiceError):
            unanswered = inference_pb2.ModelInferResponse(id=request.id)
            return inference_pb2.ModelStreamInferResponse(error_message=answer.message, infer_response=unanswered)
        if ASKS_FOR_FINAL in request.parameters:
            answer.parameters[FINAL].bool_param = True
        return inference_pb2.ModelStreamInferResponse(infer_response=answer)

    async def ServerLive(  # noqa: N802 -- the RPC's name
        self, _request: inference_pb2.ServerLiveRequest, context: Context
    ) -> inference_pb2.ServerLiveResponse:
        """Say that the server runs."""
        async with rpc_scope(self._state, context, "ServerLive"):
            return inference_pb2.ServerLiveResponse(live=True)

    async def ServerReady(  # noqa: N802 -- the RPC's name
        self, _request: inference_pb2.ServerReadyRequest, context: Context
    ) -> inference_pb2.ServerReadyResponse:
        """Say whether explanations can be had."""
        async with rpc_scope(self._state, context, "ServerReady"):
            return inference_pb2.ServerReadyResponse(ready=self._ready())

    async def ModelReady(  # noqa: N802 -- the RPC's name
        self, request: inference_pb2.ModelReadyRequest, context: Context
    ) -> inference_pb2.ModelReadyResponse:
        """Say whether a model answers."""
        async with rpc_scope(self._state, context, "ModelReady"):
            if not self._ready():
                return inference_pb2.ModelReadyResponse(ready=False)
            pipeline = self._state.accepted()
            codec.check_sizes(request, pipeline.limits)
            model = pipeline.models.get(request.name)
            there = isinstance(model, ModelInfo) and request.version in ("", str(model.version))
            return inference_pb2.ModelReadyResponse(ready=there)

    async def ServerMetadata(  # noqa: N802 -- the RPC's name
        self, _request: inference_pb2.ServerMetadataRequest, context: Context
    ) -> inference_pb2.ServerMetadataResponse:
        """Say what the server is."""
        async with rpc_scope(self._state, context, "ServerMetadata"):
            return inference_pb2.ServerMetadataResponse(
                name=PLATFORM, version=version("camserve"), extensions=EXTENSIONS
            )

    async def ModelMetadata(  # noqa: N802 -- the RPC's name
        self, request: inference_pb2.ModelMetadataRequest, context: Context
    ) -> inference_pb2.ModelMetadataResponse:
        """Describe a model's inputs and outputs."""
        async with rpc_scope(self._state, context, "ModelMetadata"):
            return metadata_of(self._model(request))

    async def ModelConfig(  # noqa: N802 -- the RPC's name
        self, request: inference_pb2.ModelConfigRequest, context: Context
    ) -> inference_pb2.ModelConfigResponse:
        """Describe a model as Triton's configuration does."""
        async with rpc_scope(self._state, context, "ModelConfig"):
            config = config_of(self._model(request), self._state.open().limits.images, self._delay_ms)
            return inference_pb2.ModelConfigResponse(config=config)

    async def ModelStatistics(  # noqa: N802 -- the RPC's name
        self, request: inference_pb2.ModelStatisticsRequest, context: Context
    ) -> inference_pb2.ModelStatisticsResponse:
        """Say how many inferences there were, of one model or of all that answer."""
        async with rpc_scope(self._state, context, "ModelStatistics"):
            pipeline = self._state.open()
            codec.check_sizes(request, pipeline.limits)
            models = [self._model(request)] if request.name else pipeline.models.values()
            found = [self._statistics.of(model) for model in models if isinstance(model, ModelInfo)]
            return inference_pb2.ModelStatisticsResponse(model_stats=found)

    def _model(
        self,
        request: inference_pb2.ModelMetadataRequest
        | inference_pb2.ModelConfigRequest
        | inference_pb2.ModelStatisticsRequest,
    ) -> ModelInfo:
        pipeline = self._state.open()
        codec.check_sizes(request, pipeline.limits)
        return read_version(request.name, request.version, pipeline.models)

    async def RepositoryIndex(  # noqa: N802 -- the RPC's name
        self, request: inference_pb2.RepositoryIndexRequest, context: Context
    ) -> inference_pb2.RepositoryIndexResponse:
        """List the models."""
        async with rpc_scope(self._state, context, "RepositoryIndex"):
            pipeline = self._state.open()
            codec.check_sizes(request, pipeline.limits)
            _check_repository(request.repository_name)
            models = [model for model in pipeline.models.values() if isinstance(model, ModelInfo) or not request.ready]
            return inference_pb2.RepositoryIndexResponse(models=map(index_of, models))

    async def RepositoryModelLoad(  # noqa: N802 -- the RPC's name
        self, request: inference_pb2.RepositoryModelLoadRequest, context: Context
    ) -> inference_pb2.RepositoryModelLoadResponse:
        """Load a model, or load it again."""
        async with rpc_scope(self._state, context, "RepositoryModelLoad") as call:
            codec.check_sizes(request, self._state.open().limits)
            _check_repository(request.repository_name)
            weights = _read_loading(request.parameters)
            with fields_named():
                model = await load_model(self._state, models_pb2.LoadModelRequest(name=request.model_name, **weights))
            call.fields = {"model": model.name, "version": model.version}
            return inference_pb2.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(  # noqa: N802 -- the RPC's name
        self, request: inference_pb2.RepositoryModelUnloadRequest, context: Context
    ) -> inference_pb2.RepositoryModelUnloadResponse:
        """Unload a model."""
        async with rpc_scope(self._state, context, "RepositoryModelUnload") as call:
            codec.check_sizes(request, self._state.open().limits)
            _check_repository(request.repository_name)
            with fields_named():
                model = await unload_model(self._state, models_pb2.UnloadModelRequest(name=request.model_name))
            call.fields = {"model": model.name, "version": model.version}
            return inference_pb2.RepositoryModelUnloadResponse()


async def _explained(
    pipeline: Pipeline, request: inference_pb2.ModelInferRequest, asked: Asked, call: Call, *, wait: bool
) -> list[explain_pb2.ExplainResponse]:
    """Explain the images of a message, all at once; if one fails, so does the message."""
    if any(tensor.datatype != "BYTES" for tensor in request.inputs):
        images = await call.bound(pipeline).in_thread(read_images, request, pipeline.limits)
    else:
        images = read_images(request, pipeline.limits)
    questions = list(map(asked.about, images))
    del images  # the questions have copies

    async def explain_one(place: int, question: explain_pb2.ExplainRequest) -> explain_pb2.ExplainResponse:
        # Memory is released before the reply is sent: a later message of a stream waits for an earlier one's reply.
        with fields_named(place, len(questions)), ExitStack() as unsent:
            return await explain(pipeline, question, replace(call, unsent=unsent), wait=wait)

    explaining = [asyncio.ensure_future(explain_one(place, question)) for place, question in enumerate(questions)]
    try:
        return await asyncio.gather(*explaining)
    finally:
        for one in explaining:
            one.cancel()


def _check_repository(name: str) -> None:
    if name:
        raise InvalidArgument("there is one repository, without a name", field="repository_name")


def _read_loading(parameters: Mapping[str, inference_pb2.ModelRepositoryParameter]) -> dict[str, str]:
    """Return what is said of the weights."""
    found = {}
    for name, value in parameters.items():
        if name not in ("weights", "sha256") or value.WhichOneof("parameter_choice") != "string_param":
            raise InvalidArgument(
                f'a model is loaded with the texts weights and sha256, and no "{short(name)}"', field="parameters"
            )
        found[name] = value.string_param
    return found
