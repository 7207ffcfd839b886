"""A replica: the whole server but for its port. What gRPC would ask of the servicers, a door asks by Ray."""

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
"""The metadata of a reply that say which engine it came from: whose log to read."""

NAME = f"{socket.gethostname()}-{os.getpid()}"


class Aborted(Exception):
    """A call that a servicer ended with a status."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.words)
        self.answer = answer


@dataclass(slots=True)
class _Context:
    """What servicers take for gRPC's context.

    Attributes:
        caller: who called.
        trailers: metadata of the reply.
        replies: of a stream; None after the last.
        done: closed when the call has ended.
    """

    caller: Caller
    trailers: tuple[tuple[str, str | bytes], ...] = ()
    replies: asyncio.Queue[explain_pb2.ExplainStreamResponse | None] = field(default_factory=asyncio.Queue)
    done: ExitStack = field(default_factory=ExitStack)

    def add_done_callback(self, callback: Callable[["_Context"], None]) -> None:
        self.done.callback(callback, self)

    def time_remaining(self) -> None:
        """Return nothing: Ray cancels a call whose caller is gone, and does not say when that will be."""

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
    """Explains, with a batcher and models of its own, in a process of its own.

    Args:
        settings: of the server, but for its port and who may call.
        path: where modules are looked for, as in the process that began all this.

    Raises:
        ConfigError: no model can be loaded.
    """

    async def __init__(self, settings: dict[str, Any], path: Sequence[str] = ()) -> None:  # type: ignore[misc]  # Ray's way
        sys.path.extend(each for each in path if each not in sys.path)
        chosen = config.load(flags=settings, environment={})
        logs.configure(chosen.log_level, chosen.log_format)
        self._open = AsyncExitStack()
        self._well = True
        self._house = ServerState(chosen.stream_in_flight, chosen.idle_seconds)
        self._house.pipeline = await self._open.enter_async_context(server.opened(chosen, self._told))
        self._explain = ExplainServicer(self._house)
        self._servicers = (self._explain, EvaluateServicer(self._house), ModelServicer(self._house))

    def _told(self, well: bool) -> None:  # noqa: FBT001 -- what a callback is told
        self._well = well

    async def close(self) -> None:
        """Let the models go."""
        await self._open.aclose()

    async def answer(self, rpc: str, request: Any, caller: Caller) -> Answer:
        """Answer a call of one message.

        Args:
            rpc: its name.
            request: the message.
            caller: who called.
        """
        context = _Context(caller)
        method = next(getattr(one, rpc) for one in self._servicers if rpc in type(one).__dict__)
        with context.done:
            try:
                return Answer(await method(request, context), (*context.trailers, (ENGINE, NAME)))
            except Aborted as ended:
                return ended.answer

    async def told(
        self, item: explain_pb2.ExplainStreamRequest, caller: Caller
    ) -> AsyncIterator[explain_pb2.ExplainStreamResponse]:
        """Answer one request of a stream; say before how far it has come, where that was asked for."""
        context = _Context(caller)

        async def only() -> AsyncIterator[Received[explain_pb2.ExplainStreamRequest]]:
            yield Received(item)

        answering = asyncio.ensure_future(self._explain.ExplainStream(only(), context))  # type: ignore[arg-type]
        answering.add_done_callback(lambda _: context.replies.put_nowait(None))
        try:
            while (reply := await context.replies.get()) is not None:
                yield reply
            await answering
        finally:
            answering.cancel()
            context.done.close()

    async def one(self, item: explain_pb2.ExplainStreamRequest, caller: Caller) -> explain_pb2.ExplainStreamResponse:
        """Answer one request of a stream."""
        (reply,) = [reply async for reply in self.told(item, caller)]
        return reply

    async def ready(self) -> bool:
        """Say whether explanations can be had."""
        return self._well

    def check_health(self) -> None:
        """Have Ray put another in this one's place when no explanations come out of it.

        Raises:
            RuntimeError: so it is.
        """
        if not self._well:
            raise RuntimeError("no explanations come out of this engine")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the rows that were accepted and not yet answered: what engines are added for."""
        return {"rows": float(self._house.require_warm().batcher.admitted)}
