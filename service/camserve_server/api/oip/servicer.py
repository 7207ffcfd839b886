"""Servicer of the Open Inference Protocol. To follow a request, start at `InferenceServicer.ModelInfer`."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

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
from camserve_server.api.servicers.explain import read
from camserve_server.api.servicers.models import load_model, unload_model
from camserve_server.api.streams import Received, serve_stream
from camserve_server.core.errors import DeadlineExceeded, InvalidArgument, ServiceError
from camserve_server.models.values import ModelInfo
from camserve_server.serving.explain import Explained, Pipeline
from camserve_server.serving.requests import ExplainRequest

T = TypeVar("T")

INPUTS, REPLY, WRITTEN = range(3)


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
        self, pipeline: Pipeline, request: inference_pb2.ModelInferRequest, call: Call, turn: "_Turn | None" = None
    ) -> inference_pb2.ModelInferResponse:
        infer_request = read_infer(request, pipeline.models, pipeline.limits)
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            limited = replace(call, deadline=min(call.deadline, began + infer_request.timeout))
            try:
                async with asyncio.timeout(infer_request.timeout):  # gRPC knows only the call's own deadline
                    responses = await _explain_images(pipeline, request, infer_request, limited, turn)
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
            last: _Turn | None = None

            async def answer(request: inference_pb2.ModelInferRequest, write: Callable[[Any], Awaitable[None]]) -> None:
                nonlocal last
                last = turn = _Turn(last)
                item_call = call.item(call.request_id)
                with item_call.until_sent:
                    reply = await self._reply(request, item_call, turn)
                    await turn.write(write, reply)

            await serve_stream(self._state, context, requests, answer)

    async def _reply(
        self, request: inference_pb2.ModelInferRequest, call: Call, turn: "_Turn"
    ) -> inference_pb2.ModelStreamInferResponse:
        work = self._infer(self._state.require_warm(), request, call, turn)
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
    pipeline: Pipeline,
    request: inference_pb2.ModelInferRequest,
    infer_request: InferRequest,
    call: Call,
    turn: "_Turn | None",
) -> list[explain_pb2.ExplainResponse]:
    """Explain the images of a request, all at once. If one of them fails, the request fails.

    Memory is reserved for all images together: two requests that hold it for some of theirs could wait for each other.

    Args:
        pipeline: the pipeline.
        request: the request.
        infer_request: what it asks for.
        call: its call.
        turn: turn of the request in its stream; None for a call of its own.
    """
    bound = call.bind(pipeline)
    if any(tensor.datatype != "BYTES" for tensor in request.inputs):
        images = await bound.in_thread(read_images, request, pipeline.limits)
    else:
        images = read_images(request, pipeline.limits)
    count, wait = len(images), turn is not None
    explain_requests = list[ExplainRequest]()
    while images:
        with convert_fields(len(explain_requests), count):
            explain_requests.append(read(pipeline, infer_request.for_image(images.pop(0)), call))
    async with AsyncExitStack() as held:
        async with _step(turn, INPUTS):
            with convert_fields():
                accepted = await held.enter_async_context(bound.accept(explain_requests, wait=wait))

        async def explained(index: int, explain_request: ExplainRequest) -> Explained:
            with convert_fields(index, count):
                explaining = bound.explained(explain_request, accepted, deadline=call.deadline, wait=wait)
                return await held.enter_async_context(explaining)

        async def drawn(index: int, explained: Explained) -> explain_pb2.ExplainResponse:
            with convert_fields(index, count):
                return await bound.draw(explained, partial(codec.explain_response, explained.request))

        each = await _gather(explained(*item) for item in enumerate(explain_requests))
        accepted.computed()
        async with _step(turn, REPLY):
            await bound.reserve_reply(sum(one.reply_bytes for one in each), call.until_sent)
        return await _gather(drawn(*item) for item in enumerate(each))


async def _gather(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Do all the work at once. If some of it fails, cancel the rest, and wait until it has ended."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Turn:
    """Turn of one request of a stream whose responses are in the order of the requests.

    A request reserves memory for its inputs, and for its response, after every earlier request. Otherwise it could hold
    memory that an earlier one waits for, after which it must be written.

    Args:
        previous: turn of the request before; None for the first.

    Attributes:
        steps: an event for each step, set when it is done: `INPUTS`, `REPLY` and `WRITTEN`.
    """

    def __init__(self, previous: "_Turn | None") -> None:
        self.steps = [asyncio.Event() for _ in range(WRITTEN + 1)]
        self._before = previous.steps if previous else []

    @asynccontextmanager
    async def step(self, number: int) -> AsyncIterator[None]:
        """Take a step in the block, after those before have taken it."""
        for event in self._before[number : number + 1]:
            await event.wait()
        try:
            yield
        finally:
            self.steps[number].set()

    async def write(self, write: Callable[[Any], Awaitable[None]], reply: Any) -> None:
        """Write a response after those before. A request that failed may not have taken the other steps."""
        for number in (INPUTS, REPLY):
            async with self.step(number):
                pass
        async with self.step(WRITTEN):
            await write(reply)


def _step(turn: _Turn | None, number: int) -> AbstractAsyncContextManager[None]:
    return turn.step(number) if turn else nullcontext()


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
