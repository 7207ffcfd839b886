"""What Ray's gRPC proxy hands calls to: it passes each to an engine, and each request of a stream to any engine.

Ray itself would answer INTERNAL for an engine that dies. Here such a call is UNAVAILABLE, and clients send it again.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import grpc
from google.protobuf import empty_pb2
from google.rpc import code_pb2
from grpc_health.v1 import health_pb2

from camserve.v1 import explain_pb2
from camserve_server.cluster.calls import AGAIN, Answer, Caller

log = logging.getLogger(__name__)

UNARY = (
    *("Explain", "InspectLayers", "ExtractFeatures", "Evaluate", "ListMetrics", "ListModels", "GetModel"),
    *("ListLayers", "ListMethods", "LoadModel", "UnloadModel"),
)
"""The calls of one message; Ray goes by these names alone, whatever the service."""

_News = asyncio.Queue[explain_pb2.ExplainStreamResponse | asyncio.Semaphore | None]
"""What comes of a stream: replies, its semaphore whenever a request has ended, None at the end."""

LOOK = 2.0  # seconds that an engine may take to say that it is well, and between two looks


class Ingress:
    """Passes calls on.

    Args:
        engine: Ray's handle of the engines.
        refusals: the status's name for each of Ray's errors that is not the caller's fault.
        longest: size of a request at most, in bytes.
        in_flight: requests of one stream under way at most.
    """

    def __init__(
        self, engine: Any, refusals: Mapping[type[Exception], str], longest: int = 8 * 2**20, in_flight: int = 32
    ) -> None:
        self._engine, self._refusals = engine, refusals
        self._longest, self._in_flight = longest, in_flight

    async def pass_on(self, rpc: str, request: Any, context: Any) -> Any:
        """Have an engine answer a call of one message."""
        caller = _caller(context)
        answer = await self._attempted(caller, request, lambda: self._engine.answer.remote(rpc, request, caller))
        # Whatever is raised here would lose its metadata on its way through Ray's proxy.
        context.set_trailing_metadata(list(answer.trailers))
        if answer.reply is not None:
            return answer.reply
        context.set_code(grpc.StatusCode[answer.code])
        context.set_details(answer.words)
        return empty_pb2.Empty()  # which gRPC does not send

    async def _attempted(self, caller: Caller, request: Any, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        if request.ByteSize() > self._longest:
            words = f"the message is larger than max_message_mib: {request.ByteSize():,} bytes"
            return Answer(None, (("x-request-id", caller.request_id),), "RESOURCE_EXHAUSTED", words)
        try:
            return await ask()
        except Exception as error:  # noqa: BLE001 -- the border: nothing goes out unmapped
            return self._refused(caller, error)

    def _refused(self, caller: Caller, error: Exception) -> Answer:
        trailers: tuple[tuple[str, str], ...] = (("x-request-id", caller.request_id),)
        for kind, code in self._refusals.items():
            if isinstance(error, kind):
                words = "the engine that ran this was lost" if code == "UNAVAILABLE" else "the engines' queue is full"
                return Answer(None, (*trailers, ("grpc-retry-pushback-ms", str(AGAIN))), code, words)
        log.error("a call failed", exc_info=error)
        words = f"internal error; the log has more under request id {caller.request_id}"
        return Answer(None, trailers, "INTERNAL", words)

    async def ExplainStream(  # noqa: N802 -- the RPC's name
        self, requests: AsyncIterator[explain_pb2.ExplainStreamRequest], grpc_context: Any
    ) -> AsyncIterator[explain_pb2.ExplainStreamResponse]:
        """Have engines answer the requests of a stream, each by whichever has least to do."""
        peer = _caller(grpc_context).peer
        news = _News()
        free = asyncio.Semaphore(self._in_flight)

        async def answered(item: explain_pb2.ExplainStreamRequest) -> None:
            await self._answered(item, Caller(item.request_id, peer), news)
            news.put_nowait(free)

        async def listen() -> None:
            async with asyncio.TaskGroup() as group:
                await free.acquire()
                async for item in requests:
                    group.create_task(answered(item))
                    await free.acquire()

        listening = asyncio.create_task(listen())
        listening.add_done_callback(lambda _: news.put_nowait(None))
        try:
            while (reply := await news.get()) is not None:
                if isinstance(reply, asyncio.Semaphore):  # not before: who only sends is not read on and on
                    reply.release()
                else:
                    yield reply
            await listening
        finally:
            listening.cancel()

    async def _answered(
        self,
        item: explain_pb2.ExplainStreamRequest,
        caller: Caller,
        news: _News,
    ) -> None:
        """Put all that comes of one request of a stream among the news."""

        async def ask() -> Answer:
            if item.request.progress:
                async for reply in self._engine.options(stream=True).told.remote(item, caller):
                    news.put_nowait(reply)
                return Answer(None)
            return Answer(await self._engine.one.remote(item, caller))

        answer = await self._attempted(caller, item, ask)
        if answer.reply is not None:
            news.put_nowait(answer.reply)
        elif answer.code != "OK":
            news.put_nowait(_failure(item.request_id, answer))

    async def Check(  # noqa: N802 -- the RPC's name
        self, request: health_pb2.HealthCheckRequest, grpc_context: Any
    ) -> health_pb2.HealthCheckResponse:
        """Say whether an engine is there and well."""
        del request, grpc_context  # all services are behind the same engines
        kinds = health_pb2.HealthCheckResponse
        return kinds(status=kinds.SERVING if await self._well() else kinds.NOT_SERVING)

    async def Watch(  # noqa: N802 -- the RPC's name
        self, request: health_pb2.HealthCheckRequest, grpc_context: Any
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Say so whenever it changes."""
        said = None
        while True:
            found = await self.Check(request, grpc_context)
            if found != said:
                yield found
            said = found
            await asyncio.sleep(LOOK)

    async def _well(self) -> bool:
        try:
            async with asyncio.timeout(LOOK):
                return bool(await self._engine.ready.remote())
        except Exception as error:  # noqa: BLE001 -- whatever it is, there is no explanation to be had
            log.warning("no engine is well: %s", str(error) or type(error).__name__)
            return False


def _passing(rpc: str) -> Callable[..., Awaitable[Any]]:
    # Ray looks for an argument of this name.
    async def passed(self: Ingress, request: Any, grpc_context: Any) -> Any:
        return await self.pass_on(rpc, request, grpc_context)

    passed.__name__ = rpc
    return passed


for _rpc in UNARY:
    setattr(Ingress, _rpc, _passing(_rpc))


def _caller(context: Any) -> Caller:
    theirs = dict(context.invocation_metadata() or ()).get("x-request-id")
    return Caller(str(theirs or uuid.uuid4().hex), context.peer())


def _failure(request_id: str, answer: Answer) -> explain_pb2.ExplainStreamResponse:
    code = code_pb2.Code.Value(answer.code)
    retry = AGAIN if any(name == "grpc-retry-pushback-ms" for name, _ in answer.trailers) else None
    error = explain_pb2.Error(code=code, message=answer.words, retry_after_ms=retry)
    return explain_pb2.ExplainStreamResponse(request_id=request_id, error=error)
