"""The RPCs of ExplainService. Read a request's way from `ExplainServicer.Explain` downward."""

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

Write = Callable[[explain_pb2.ExplainStreamResponse], Awaitable[None]]


class ExplainServicer(explain_pb2_grpc.ExplainServiceServicer):
    """Explains images, and shows the layers of models."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def Explain(  # noqa: N802 -- the RPC's name
        self, request: explain_pb2.ExplainRequest, context: Context
    ) -> explain_pb2.ExplainResponse:
        """Explain one image."""
        async with rpc_scope(self._state, context, "Explain") as call:
            response = await explain(self._state.open(), request, call)
            response.request_id = call.request_id
            call.note_reply(response)
            return response

    async def ExplainStream(  # type: ignore[override]  # noqa: N802 -- the RPC's name; writes rather than yields
        self, requests: AsyncIterator[Received[explain_pb2.ExplainStreamRequest]], context: Context
    ) -> None:
        """Explain many images, each answered as it is ready."""
        async with rpc_scope(self._state, context, "ExplainStream") as call:

            async def answer(item: explain_pb2.ExplainStreamRequest, write: Write) -> None:
                one = call.item(item.request_id)
                with one.unsent:
                    async with progress_reporter(item, write) as progress:
                        reply = await self._reply(item, one, progress)
                    await write(reply)

            await serve_stream(self._state, context, requests, answer)

    async def _reply(
        self, item: explain_pb2.ExplainStreamRequest, call: Call, progress: jobs.Progress
    ) -> explain_pb2.ExplainStreamResponse:
        outcome = await run_item(self._state, call, "ExplainStream", self._explained(item, call, progress))
        if isinstance(outcome, ServiceError):
            return explain_pb2.ExplainStreamResponse(request_id=item.request_id, error=error_message(outcome))
        return explain_pb2.ExplainStreamResponse(request_id=item.request_id, response=outcome)

    async def _explained(
        self, item: explain_pb2.ExplainStreamRequest, call: Call, progress: jobs.Progress
    ) -> explain_pb2.ExplainResponse:
        check_id(item.request_id)
        logs.REQUEST_ID.set(item.request_id)
        response = await explain(self._state.accepted(), item.request, call, wait=True, progress=progress)
        response.request_id = item.request_id
        call.note_reply(response)
        return response

    async def InspectLayers(  # noqa: N802 -- the RPC's name
        self, request: explain_pb2.InspectLayersRequest, context: Context
    ) -> explain_pb2.InspectLayersResponse:
        """Measure every layer for one image."""
        async with rpc_scope(self._state, context, "InspectLayers") as call:
            pipeline = self._state.open()
            order = codec.read_inspection(request, pipeline.models, pipeline.limits)
            result = await inspection.inspect(call.bound(pipeline), order, deadline=call.deadline)
            response = codec.inspect_response(order, result)
            response.request_id = call.request_id
            call.fields = {"model": response.model, "layers": len(response.layers)}
            return response

    async def ExtractFeatures(  # noqa: N802 -- the RPC's name
        self, request: explain_pb2.ExtractFeaturesRequest, context: Context
    ) -> explain_pb2.ExtractFeaturesResponse:
        """Return channels of a layer."""
        async with rpc_scope(self._state, context, "ExtractFeatures") as call:
            pipeline = self._state.open()
            order = codec.read_extraction(request, pipeline.models, pipeline.limits)
            result = await inspection.features(call.bound(pipeline), order, call.unsent, deadline=call.deadline)
            response = codec.features_response(order, result)
            response.request_id = call.request_id
            call.fields = {"model": response.model, "channels": len(response.channels)}
            return response


async def explain(
    pipeline: Pipeline,
    request: explain_pb2.ExplainRequest,
    call: Call,
    *,
    wait: bool = False,
    progress: jobs.Progress = jobs.ignore_progress,
) -> explain_pb2.ExplainResponse:
    """Explain one image: read the request, and encode the result.

    Args:
        pipeline: explains it.
        request: as it came.
        call: that it is part of.
        wait: for room in the queue, rather than be refused.
        progress: is notified how many rows are done, and of how many.

    Raises:
        ServiceError: whatever was wrong.
    """
    call.record_request(request, pipeline.models)
    order = codec.read_order(request, pipeline.models, pipeline.limits)
    return await call.bound(pipeline).explain(
        order,
        call.unsent,
        encode=partial(codec.explain_response, order),
        deadline=call.deadline,
        wait=wait,
        progress=progress,
    )


@asynccontextmanager
async def progress_reporter(item: explain_pb2.ExplainStreamRequest, write: Write) -> AsyncIterator[jobs.Progress]:
    """Report the progress of a request that asks for it, never faster than its caller reads."""
    if not item.request.progress:
        yield jobs.ignore_progress
        return
    news: asyncio.Queue[explain_pb2.Progress | None] = asyncio.Queue()

    def progress(done: int, rows: int) -> None:
        news.put_nowait(explain_pb2.Progress(rows_done=done, rows_total=rows))

    async def tell() -> None:
        while (latest := await news.get()) is not None:
            if news.empty():
                await write(explain_pb2.ExplainStreamResponse(request_id=item.request_id, progress=latest))

    telling = asyncio.create_task(tell())
    try:
        yield progress
    finally:
        news.put_nowait(None)  # not cancelled: half a message would end the stream
        await asyncio.gather(telling, return_exceptions=True)
