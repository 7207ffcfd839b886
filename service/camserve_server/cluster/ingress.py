"""Ingress: receives calls from Ray's gRPC proxy, and passes each call or request of a stream to an engine.

For an engine that dies, Ray itself would respond with INTERNAL. The ingress responds with UNAVAILABLE: clients retry.
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

from camserve.v1 import evaluate_pb2, explain_pb2, models_pb2
from camserve_server.cluster.calls import RETRY_DELAY, Answer, Caller

log = logging.getLogger(__name__)

UNARY = tuple(
    rpc.name
    for file in (explain_pb2, evaluate_pb2, models_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for rpc in service.methods
    if not rpc.client_streaming
)
"""The unary RPCs. Ray dispatches by the RPC's name alone, whatever the service."""

_StreamEvents = asyncio.Queue[explain_pb2.ExplainStreamResponse | asyncio.Semaphore | None]
"""Events of a stream: responses, the stream's semaphore after each finished request, and None at the end."""

HEALTH_CHECK_INTERVAL = 2.0  # seconds between two health checks, and the timeout of each


class Ingress:
    """Passes calls to engines.

    Args:
        engine: Ray's handle of the engines.
        refusals: name of the status for each of Ray's errors that is not the caller's fault.
        max_bytes: maximum size of a request, in bytes.
        in_flight: maximum of requests of one stream in progress.
    """

    def __init__(
        self, engine: Any, refusals: Mapping[type[Exception], str], max_bytes: int = 8 * 2**20, in_flight: int = 32
    ) -> None:
        self._engine, self._refusals = engine, refusals
        self._max_bytes, self._in_flight = max_bytes, in_flight

    async def forward(self, rpc: str, request: Any, context: Any) -> Any:
        """Pass a unary call to an engine."""
        caller = _caller(context)
        answer = await self._call_engine(caller, request, lambda: self._engine.answer.remote(rpc, request, caller))
        # The status is set, not raised: an exception would lose its metadata in Ray's proxy.
        context.set_trailing_metadata(list(answer.trailers))
        if answer.reply is not None:
            return answer.reply
        context.set_code(grpc.StatusCode[answer.code])
        context.set_details(answer.message)
        return empty_pb2.Empty()  # gRPC does not send it

    async def _call_engine(self, caller: Caller, request: Any, call: Callable[[], Awaitable[Answer]]) -> Answer:
        if request.ByteSize() > self._max_bytes:
            message = f"the message is larger than max_message_mib: {request.ByteSize():,} bytes"
            return Answer(None, (("x-request-id", caller.request_id),), "RESOURCE_EXHAUSTED", message)
        try:
            return await call()
        except Exception as error:  # noqa: BLE001 -- the border: every error gets a status
            return self._error_answer(caller, error)

    def _error_answer(self, caller: Caller, error: Exception) -> Answer:
        trailers: tuple[tuple[str, str], ...] = (("x-request-id", caller.request_id),)
        for kind, code in self._refusals.items():
            if isinstance(error, kind):
                message = "the engine that ran this was lost" if code == "UNAVAILABLE" else "the engines' queue is full"
                return Answer(None, (*trailers, ("grpc-retry-pushback-ms", str(RETRY_DELAY))), code, message)
        log.error("a call failed", exc_info=error)
        message = f"internal error; the log has more under request id {caller.request_id}"
        return Answer(None, trailers, "INTERNAL", message)

    async def ExplainStream(  # noqa: N802 -- the RPC's name
        self, requests: AsyncIterator[explain_pb2.ExplainStreamRequest], grpc_context: Any
    ) -> AsyncIterator[explain_pb2.ExplainStreamResponse]:
        """Pass each request of a stream to the engine with the lowest load."""
        peer = _caller(grpc_context).peer
        events = _StreamEvents()
        slots = asyncio.Semaphore(self._in_flight)

        async def run(item: explain_pb2.ExplainStreamRequest) -> None:
            await self._run_item(item, Caller(item.request_id, peer), events)
            events.put_nowait(slots)

        async def read() -> None:
            async with asyncio.TaskGroup() as group:
                await slots.acquire()
                async for item in requests:
                    group.create_task(run(item))
                    await slots.acquire()

        reading = asyncio.create_task(read())
        reading.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                # A slot is released after its responses were sent: a client that only sends is not read further.
                if isinstance(event, asyncio.Semaphore):
                    event.release()
                else:
                    yield event
            await reading
        finally:
            reading.cancel()

    async def _run_item(
        self,
        item: explain_pb2.ExplainStreamRequest,
        caller: Caller,
        events: _StreamEvents,
    ) -> None:
        """Add all responses to one request of a stream to the events."""

        async def call() -> Answer:
            if item.request.progress:
                async for reply in self._engine.options(stream=True).stream_item.remote(item, caller):
                    events.put_nowait(reply)
                return Answer(None)
            return Answer(await self._engine.explain_item.remote(item, caller))

        answer = await self._call_engine(caller, item, call)
        if answer.reply is not None:
            events.put_nowait(answer.reply)
        elif answer.code != "OK":
            events.put_nowait(_error_response(item.request_id, answer))

    async def Check(  # noqa: N802 -- the RPC's name
        self, request: health_pb2.HealthCheckRequest, grpc_context: Any
    ) -> health_pb2.HealthCheckResponse:
        """Return SERVING if an engine is healthy."""
        del request, grpc_context  # all services have the same engines
        kinds = health_pb2.HealthCheckResponse
        return kinds(status=kinds.SERVING if await self._is_healthy() else kinds.NOT_SERVING)

    async def Watch(  # noqa: N802 -- the RPC's name
        self, request: health_pb2.HealthCheckRequest, grpc_context: Any
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Return the health now and whenever it changes."""
        previous = None
        while True:
            current = await self.Check(request, grpc_context)
            if current != previous:
                yield current
            previous = current
            await asyncio.sleep(HEALTH_CHECK_INTERVAL)

    async def _is_healthy(self) -> bool:
        try:
            async with asyncio.timeout(HEALTH_CHECK_INTERVAL):
                return bool(await self._engine.ready.remote())
        except Exception as error:  # noqa: BLE001 -- any error means that no engine can explain
            log.warning("no engine is healthy: %s", str(error) or type(error).__name__)
            return False


def _unary_method(rpc: str) -> Callable[..., Awaitable[Any]]:
    # Ray passes its context to an argument with the name `grpc_context`.
    async def method(self: Ingress, request: Any, grpc_context: Any) -> Any:
        return await self.forward(rpc, request, grpc_context)

    method.__name__ = rpc
    return method


for _rpc in UNARY:
    setattr(Ingress, _rpc, _unary_method(_rpc))


def _caller(context: Any) -> Caller:
    request_id = dict(context.invocation_metadata() or ()).get("x-request-id")
    return Caller(str(request_id or uuid.uuid4().hex), context.peer())


def _error_response(request_id: str, answer: Answer) -> explain_pb2.ExplainStreamResponse:
    code = code_pb2.Code.Value(answer.code)
    retry = RETRY_DELAY if any(name == "grpc-retry-pushback-ms" for name, _ in answer.trailers) else None
    error = explain_pb2.Error(code=code, message=answer.message, retry_after_ms=retry)
    return explain_pb2.ExplainStreamResponse(request_id=request_id, error=error)
