"""ASGI endpoints of the RPCs: each call runs the servicer's own method, with the limits and tokens of gRPC.

An endpoint runs on the event loop of HTTP. The servicer's method runs on that of calls, and gets complete messages.
"""

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, NoReturn, TypeAlias, cast

import grpc
from google.protobuf.message import Message
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from camserve.v1 import explain_pb2
from camserve.web import connect
from camserve.web.connect import IMAGE_FORMATS, RPCS, message_class
from camserve_server.api.connection_limits import Messages
from camserve_server.api.deserialization import Deserialization
from camserve_server.api.grpc_server import Border
from camserve_server.api.http.context import CallFailed, HttpContext, StreamContext, UnaryContext, check_protocol
from camserve_server.api.http.forms import STREAMS, UNARY, Media
from camserve_server.api.http.loops import run_on
from camserve_server.api.inprocess import Services
from camserve_server.api.rpc import Context, caller_of, rpc_scope
from camserve_server.core import logs
from camserve_server.core.errors import InvalidArgument, ServiceError

Behaviour: TypeAlias = Callable[[Any, Context], Coroutine[Any, Any, Any]]

UNSUPPORTED_MEDIA_TYPE = 415
IDENTITY = "identity"
EXPLAIN = "/camserve.v1.ExplainService/Explain"


def routes(border: Border, services: Services) -> list[Route]:
    """Return the routes of every RPC.

    Args:
        border: parts of the server that its protocols share.
        services: the services.
    """
    return [
        Route(path, _endpoint(border, path, services.handler(path)), methods=["POST"], include_in_schema=False)
        for path in RPCS
    ]


def _endpoint(border: Border, path: str, handler: Any) -> "Endpoint":
    if handler.stream_stream:
        return StreamEndpoint(border, path, handler.stream_stream)
    if path == EXPLAIN:
        return PictureEndpoint(border, path, handler.unary_unary)
    return UnaryEndpoint(border, path, handler.unary_unary)


class Endpoint:
    """Endpoint of an RPC.

    Args:
        border: parts of the server that its protocols share.
        path: path of the RPC, which is also its full name.
        behaviour: the servicer's method.

    Attributes:
        media: media types of the messages; the first is the default.
        encodings: encodings of the request's body.
    """

    media: Mapping[str, Media]
    encodings: tuple[str, ...] = (IDENTITY,)

    def __init__(self, border: Border, path: str, behaviour: Behaviour) -> None:
        self._border, self._path, self._rpc = border, path, RPCS[path]
        self._behaviours = {media.name: self._deserialized(media, behaviour) for media in self.media.values()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        media_type = _media_type(scope)
        media = self.media.get(media_type, next(iter(self.media.values())))
        limit = int(self._border.settings.max_message_mib * 2**20 * media.growth)
        context = self._context(scope, receive, send, media, limit)
        try:
            await self._serve(context, media_type)
        except asyncio.CancelledError:
            if not context.hung_up:
                raise
        finally:
            context.done(self._border.loop)

    @abstractmethod
    def _context(self, *args: Any) -> Any: ...

    @abstractmethod
    def _deserialized(self, media: Media, behaviour: Behaviour) -> Behaviour: ...

    @abstractmethod
    async def _serve(self, context: Any, media_type: str) -> None: ...

    async def _run(self, context: HttpContext, media_type: str) -> Any:
        """Run the servicer's method, and return its reply.

        Raises:
            CallFailed: the call failed.
        """
        try:
            async with asyncio.timeout_at(context.deadline):
                return await self._run_behaviour(cast("Any", context), media_type)
        except CallFailed as error:
            # The frames of the traceback refer to the message.
            raise error.with_traceback(None) from None
        except TimeoutError:
            raise CallFailed(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline of the call has passed") from None

    async def _run_behaviour(self, context: Any, media_type: str) -> Any:
        try:
            check = self._admit(context, media_type)
            async with self._received(context):
                work = self._behaviours[media_type](Messages(context, check), context)
                return await run_on(self._border.loop, work)
        except ServiceError as error:
            refusal = error.with_traceback(None)
        return await run_on(self._border.loop, self._refuse(context, refusal))

    def _received(self, _context: Any) -> AbstractAsyncContextManager[None]:
        """Return a context manager that receives what the servicer's method does not read itself."""
        return nullcontext()

    async def _refuse(self, context: Any, error: ServiceError) -> NoReturn:
        async with rpc_scope(self._border.state, context, self._rpc.name):
            raise error

    def _admit(self, context: HttpContext, media_type: str) -> Callable[[], object]:
        """Check token and headers of a call; return the check for each of its messages.

        Raises:
            ServiceError: the call is refused.
        """
        authorizer, authorizations = self._border.authorizer, context.headers.getlist("authorization")
        if authorizer:
            logs.CALLER.set(authorizer.authorize(self._path, authorizations).name)
        check_protocol(context.headers)
        self._check_media(context, media_type)
        return (lambda: authorizer.authorize(self._path, authorizations)) if authorizer else (lambda: None)

    def _check_media(self, context: HttpContext, media_type: str) -> None:
        encoding = context.headers.get("content-encoding", IDENTITY).lower()
        if media_type in self.media and encoding in self.encodings:
            return
        context.http_status = UNSUPPORTED_MEDIA_TYPE
        if media_type not in self.media:
            raise InvalidArgument(f"send this RPC's messages with Content-Type: {' or '.join(self.media)}")
        raise InvalidArgument(f"send this RPC's messages with Content-Encoding: {' or '.join(self.encodings)}")

    def _deserialization(self, media: Media) -> Deserialization:
        parse = media.parse(message_class(self._rpc.input_type))
        return Deserialization(self._border.state, self._border.limits, self._path, parse, media.form)


class UnaryEndpoint(Endpoint):
    """Endpoint of an RPC with one request and one reply."""

    media = UNARY
    encodings = (IDENTITY, "gzip")  # which the first bytes of a message tell too
    _context = UnaryContext

    def _deserialized(self, media: Media, behaviour: Behaviour) -> Behaviour:
        return self._deserialization(media).unary(behaviour)

    def _received(self, context: UnaryContext) -> AbstractAsyncContextManager[None]:
        slot = self._border.limits.http_calls.slot(caller_of(cast("Any", context)), context.peer())
        return context.received(slot, self._border.state.idle)

    async def _serve(self, context: UnaryContext, media_type: str) -> None:
        try:
            reply = await self._run(context, media_type)
        except CallFailed as error:
            await context.send_error(error)
        else:
            await self._send(context, reply)

    async def _send(self, context: UnaryContext, reply: Message) -> None:
        await context.send_reply(reply)


class PictureEndpoint(UnaryEndpoint):
    """Endpoint of Explain, which returns the first overlay itself if the caller accepts a picture."""

    def _deserialized(self, media: Media, behaviour: Behaviour) -> Behaviour:
        async def explain(request: explain_pb2.ExplainRequest, context: Context) -> Any:
            wanted = _accepted_picture(cast("HttpContext", context))
            if wanted and not request.rendering.overlay:
                request.rendering.overlay = IMAGE_FORMATS[wanted]
            return await behaviour(request, context)

        return super()._deserialized(media, explain)

    async def _send(self, context: UnaryContext, reply: Message) -> None:
        explained = cast("explain_pb2.ExplainResponse", reply)
        if not _accepted_picture(context) or not explained.explanations:
            await context.send_reply(reply)
            return
        overlay = explained.explanations[0].overlay
        names = {number: name for name, number in IMAGE_FORMATS.items()}
        await context.send_picture(overlay.data, names[overlay.format])


class StreamEndpoint(Endpoint):
    """Endpoint of an RPC with a stream of requests and a stream of replies."""

    media = STREAMS
    _context = StreamContext

    def _deserialized(self, media: Media, behaviour: Behaviour) -> Behaviour:
        return self._deserialization(media).writing_stream(behaviour)

    async def _serve(self, context: StreamContext, media_type: str) -> None:
        try:
            await self._run(context, media_type)
        except CallFailed as error:
            await context.end(error)
        else:
            await context.end()


def _media_type(scope: Scope) -> str:
    value = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    return str(value.decode("latin-1").partition(";")[0].strip().lower())


def _accepted_picture(context: HttpContext) -> str:
    """Return the media type of the picture that the caller accepts first; empty if it accepts JSON before."""
    for part in context.headers.get("accept", "").split(","):
        name = part.partition(";")[0].strip().lower()
        if name == "image/*":
            return next(iter(IMAGE_FORMATS))
        if name in IMAGE_FORMATS:
            return name
        if name in (connect.JSON, "*/*"):
            return ""
    return ""
