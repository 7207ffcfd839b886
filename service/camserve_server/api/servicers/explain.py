"""Servicer of ExplainService. To follow a request, start at `ExplainServicer.Explain`."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from camserve.v1 import explain_pb2, explain_pb2_grpc
from camserve_server import jobs
from camserve_server.api import codec
from camserve_server.api.rpc import Call, Context, ServerState, check_id, rpc_scope, run_item
from camserve_server.api.statuses import error_message
from camserve_server.api.streams import Received, serve_stream
from camserve_server.core import logs
from camserve_server.core.errors import ServiceError
from camserve_server.serving import inspection
from camserve_server.serving.explain import Pipeline
from camserve_server.serving.requests import ExplainRequest

Write = Callable[[explain_pb2.ExplainStreamResponse], Awaitable[None]]


class ExplainServicer(explain_pb2_grpc.ExplainServiceServicer):
    """Servicer that explains images and inspects layers."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def Explain(  # noqa: N802 -- the RPC's name
        self, request: explain_pb2.ExplainRequest, context: Context
    ) -> explain_pb2.ExplainResponse:
        """Explain one image."""
        async with rpc_scope(self._state, context, "Explain") as call:
            response = await explain(self._state.require_open(), request, call)
            response.request_id = call.request_id
            call.note_reply(response)
            return response

    async def ExplainStream(  # type: ignore[override]  # noqa: N802 -- the RPC's name; writes rather than yields
        self, requests: AsyncIterator[Received[explain_pb2.ExplainStreamRequest]], context: Context
    ) -> None:
        """Explain many images. Each response is sent as soon as it is ready."""
        async with rpc_scope(self._state, context, "ExplainStream") as call:

            async def answer(item: explain_pb2.ExplainStreamRequest, write: Write) -> None:
                item_call = call.item(item.request_id)
                with item_call.until_sent:
                    async with progress_reporter(item, write) as progress:
                        reply = await self._reply(item, item_call, progress)
                    await write(reply)

            await serve_stream(self._state, context, requests, answer)

    async def _reply(
        self, item: explain_pb2.ExplainStreamRequest, call: Call, progress: jobs.Progress
    ) -> explain_pb2.ExplainStreamResponse:
        outcome = await run_item(self._state, call, "ExplainStream", self._explain_item(item, call, progress))
        if isinstance(outcome, ServiceError):
            return explain_pb2.ExplainStreamResponse(request_id=item.request_id, error=error_message(outcome))
        return explain_pb2.ExplainStreamResponse(request_id=item.request_id, response=outcome)

    async def _explain_item(
        self, item: explain_pb2.ExplainStreamRequest, call: Call, progress: jobs.Progress
    ) -> explain_pb2.ExplainResponse:
        check_id(item.request_id)
        logs.REQUEST_ID.set(item.request_id)
        response = await explain(self._state.require_warm(), item.request, call, wait=True, progress=progress)
        response.request_id = item.request_id
        call.note_reply(response)
        return response

    async def InspectLayers(  # noqa: N802 -- the RPC's name
        self, request: explain_pb2.InspectLayersRequest, context: Context
    ) -> explain_pb2.InspectLayersResponse:
        """Measure the layers of a model for one image."""
        async with rpc_scope(self._state, context, "InspectLayers") as call:
            pipeline = self._state.require_open()
            inspect_request = codec.read_inspection(request, pipeline.models, pipeline.limits)
            result = await inspection.inspect(call.bind(pipeline), inspect_request, deadline=call.deadline)
            response = codec.inspect_response(inspect_request, result)
            response.request_id = call.request_id
            call.fields = {"model": response.model, "layers": len(response.layers)}
            return response

    async def ExtractFeatures(  # noqa: N802 -- the RPC's name
        self, request: explain_pb2.ExtractFeaturesRequest, context: Context
    ) -> explain_pb2.ExtractFeaturesResponse:
        """Return channels of a layer."""
        async with rpc_scope(self._state, context, "ExtractFeatures") as call:
            pipeline = self._state.require_open()
            features_request = codec.read_extraction(request, pipeline.models, pipeline.limits)
            result = await inspection.features(
                call.bind(pipeline), features_request, call.until_sent, deadline=call.deadline
            )
            response = codec.features_response(features_request, result)
            response.request_id = call.request_id
            call.fields = {"model": response.model, "channels": len(response.channels)}
            return response

    async def EstimateCost(  # noqa: N802 -- the RPC's name
        self, request: explain_pb2.EstimateCostRequest, context: Context
    ) -> explain_pb2.EstimateCostResponse:
        """Return the cost of a request to explain an image."""
        async with rpc_scope(self._state, context, "EstimateCost"):
            pipeline = self._state.require_open()
            with codec.within_explain():
                explain_request = codec.read_explanation(request.explain, pipeline.models, pipeline.limits)
            return codec.cost_response(explain_request.job, pipeline.limits)


def read(pipeline: Pipeline, request: explain_pb2.ExplainRequest, call: Call) -> ExplainRequest:
    """Check a request, and record it in the trace of its call.

    Raises:
        ServiceError: the request is invalid.
    """
    call.record_request(request, pipeline.models)
    return codec.read_explanation(request, pipeline.models, pipeline.limits)


async def explain(
    pipeline: Pipeline,
    request: explain_pb2.ExplainRequest,
    call: Call,
    *,
    wait: bool = False,
    progress: jobs.Progress = jobs.ignore_progress,
) -> explain_pb2.ExplainResponse:
    """Explain one image: check the request, run it, and encode the result.

    Args:
        pipeline: pipeline that runs the request.
        request: the request.
        call: the call that the request belongs to.
        wait: True to wait if the queue is full, False to be refused.
        progress: callback that receives the number of rows that are done, and the total number.

    Raises:
        ServiceError: the request is invalid or failed.
    """
    explain_request = read(pipeline, request, call)
    return await call.bind(pipeline).explain(
        explain_request,
        call.until_sent,
        encode=partial(codec.explain_response, explain_request),
        deadline=call.deadline,
        wait=wait,
        progress=progress,
    )


@asynccontextmanager
async def progress_reporter(item: explain_pb2.ExplainStreamRequest, write: Write) -> AsyncIterator[jobs.Progress]:
    """Yield a callback that reports the progress of a request, if requested.

    Only the latest progress is sent, so that a caller that reads slowly does not fall behind.
    """
    if not item.request.progress:
        yield jobs.ignore_progress
        return
    latest: explain_pb2.Progress | None = None
    ended, changed = False, asyncio.Event()

    def progress(done: int, rows: int) -> None:
        nonlocal latest
        latest = explain_pb2.Progress(rows_done=done, rows_total=rows)
        changed.set()

    async def send_updates() -> None:
        nonlocal latest
        while latest is not None or not ended:
            if latest is not None:
                message, latest = latest, None
                await write(explain_pb2.ExplainStreamResponse(request_id=item.request_id, progress=message))
            else:
                changed.clear()
                await changed.wait()

    sender = asyncio.create_task(send_updates())
    try:
        yield progress
    finally:
        ended = True  # not cancelled: a cancelled write would end the stream, and the last update would be lost
        changed.set()
        await asyncio.gather(sender, return_exceptions=True)
