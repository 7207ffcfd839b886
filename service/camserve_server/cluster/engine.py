"""Engine: a Ray Serve replica that runs the whole server without a port. Its calls come from ingresses, through Ray."""

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from typing import Any

import grpc

from camserve.v1 import explain_pb2
from camserve_server.api.rpc import ServerState
from camserve_server.api.servicers import EvaluateServicer, ExplainServicer, ModelServicer
from camserve_server.api.streams import Received
from camserve_server.app import server
from camserve_server.cluster.calls import Answer, Caller
from camserve_server.core import config, logs

ENGINE = "x-camserve-engine"
"""Key of the trailing metadata with the name of the engine that ran the call, to find its log."""

NAME = f"{socket.gethostname()}-{os.getpid()}"


class Aborted(Exception):
    """Raised when a servicer aborts a call with a status."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.message)
        self.answer = answer


@dataclass(slots=True)
class _Context:
    """Replacement of gRPC's context for the servicers.

    Attributes:
        caller: caller of the RPC.
        trailers: trailing metadata of the response.
        replies: responses of a stream; None after the last one.
        done: callbacks for the end of the call.
    """

    caller: Caller
    trailers: tuple[tuple[str, str | bytes], ...] = ()
    replies: asyncio.Queue[explain_pb2.ExplainStreamResponse | None] = field(default_factory=asyncio.Queue)
    done: ExitStack = field(default_factory=ExitStack)

    def add_done_callback(self, callback: Callable[["_Context"], None]) -> None:
        self.done.callback(callback, self)

    def time_remaining(self) -> None:
        """Return None: Ray does not pass the deadline on. It cancels a call when its caller has gone."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("x-request-id", self.caller.request_id),)

    def peer(self) -> str:
        return self.caller.peer

    def set_trailing_metadata(self, trailers: tuple[tuple[str, str | bytes], ...]) -> None:
        self.trailers = trailers

    async def abort(
        self, code: grpc.StatusCode, details: str, trailing_metadata: tuple[tuple[str, str | bytes], ...] = ()
    ) -> None:
        raise Aborted(Answer(None, trailing_metadata, code.name, details))

    async def write(self, reply: explain_pb2.ExplainStreamResponse) -> None:
        self.replies.put_nowait(reply)


class Engine:
    """A server with its own batcher and models, in a process of its own.

    Args:
        settings: settings of the server, without its address and access control.
        path: `sys.path` of the process that started the application.

    Raises:
        ConfigError: no model can be loaded.
    """

    async def __init__(self, settings: dict[str, Any], path: Sequence[str] = ()) -> None:  # type: ignore[misc]  # Ray's way
        sys.path.extend(folder for folder in path if folder not in sys.path)
        chosen = config.load(flags=settings, environment={})
        logs.configure(chosen.log_level, chosen.log_format)
        self._open = AsyncExitStack()
        self._healthy = True
        self._state = ServerState(chosen.stream_in_flight, chosen.idle_seconds)
        self._state.pipeline = await self._open.enter_async_context(server.open_pipeline(chosen, self._set_healthy))
        self._explain = ExplainServicer(self._state)
        self._servicers = (self._explain, EvaluateServicer(self._state), ModelServicer(self._state))

    def _set_healthy(self, healthy: bool) -> None:  # noqa: FBT001 -- the signature of the callback
        self._healthy = healthy

    async def close(self) -> None:
        """Free the models."""
        await self._open.aclose()

    async def answer(self, rpc: str, request: Any, caller: Caller) -> Answer:
        """Run a unary RPC.

        Args:
            rpc: name of the RPC.
            request: the request.
            caller: caller of the RPC.
        """
        context = _Context(caller)
        method = next(getattr(servicer, rpc) for servicer in self._servicers if rpc in type(servicer).__dict__)
        with context.done:
            try:
                return Answer(await method(request, context), (*context.trailers, (ENGINE, NAME)))
            except Aborted as abort:
                return abort.answer

    async def stream_item(
        self, item: explain_pb2.ExplainStreamRequest, caller: Caller
    ) -> AsyncIterator[explain_pb2.ExplainStreamResponse]:
        """Run one request of a stream; yield progress messages, if requested, and the response."""
        context = _Context(caller)

        async def single_request() -> AsyncIterator[Received[explain_pb2.ExplainStreamRequest]]:
            yield Received(item)

        stream = self._explain.ExplainStream(single_request(), context)  # type: ignore[arg-type]
        running = asyncio.ensure_future(stream)
        running.add_done_callback(lambda _: context.replies.put_nowait(None))
        try:
            while (reply := await context.replies.get()) is not None:
                yield reply
            await running
        finally:
            running.cancel()
            context.done.close()

    async def explain_item(
        self, item: explain_pb2.ExplainStreamRequest, caller: Caller
    ) -> explain_pb2.ExplainStreamResponse:
        """Run one request of a stream without progress messages."""
        (reply,) = [reply async for reply in self.stream_item(item, caller)]
        return reply

    async def ready(self) -> bool:
        """Return True if the engine can explain."""
        return self._healthy

    def check_health(self) -> None:
        """Health check of Ray, which replaces an engine that fails it.

        Raises:
            RuntimeError: the engine cannot explain.
        """
        if not self._healthy:
            raise RuntimeError("this engine is unhealthy: it cannot explain")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the rows that are accepted and not yet computed, for the scaling policy."""
        return {"rows": float(self._state.require_warm().batcher.admitted)}
