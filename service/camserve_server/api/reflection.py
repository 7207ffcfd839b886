"""gRPC reflection: the services of the server, for clients that do not have its .proto files."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, TypeAlias

from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from camserve_server.api.health import MAX_MESSAGE_BYTES
from camserve_server.api.rpc import Context
from camserve_server.core.errors import InvalidArgument, Unavailable

Request: TypeAlias = Any  # the generated class has no type stubs
Response: TypeAlias = Any

NAME: str = reflection.SERVICE_NAME


class ReflectionServicer(reflection_pb2_grpc.ServerReflectionServicer):  # type: ignore[misc]  # no type stubs
    """Servicer that answers short requests, and ends idle streams.

    Args:
        services: names of the services to list.
        pool: descriptors of the services.
        idle: the time, in seconds, that a stream may be open without a request.
    """

    def __init__(self, services: Iterable[str], pool: DescriptorPool, idle: float) -> None:
        self._servicer: Any = reflection.aio.ReflectionServicer(services, pool)
        self._idle = idle

    async def ServerReflectionInfo(  # noqa: N802 -- the RPC's name
        self, requests: AsyncIterator[Request], context: Context
    ) -> AsyncIterator[Response]:
        """Answer each request of a stream.

        Raises:
            InvalidArgument: a request is too long; it would be looked up on the event loop, and sent back.
            Unavailable: the stream was idle for too long.
        """
        async for response in self._servicer.ServerReflectionInfo(self._checked(requests), context):
            yield response

    async def _checked(self, requests: AsyncIterator[Request]) -> AsyncIterator[Request]:
        while (request := await self._next(requests)) is not None:
            if request.ByteSize() > MAX_MESSAGE_BYTES:
                raise InvalidArgument(f"a reflection request has at most {MAX_MESSAGE_BYTES:,} bytes")
            yield request

    async def _next(self, requests: AsyncIterator[Request]) -> Request | None:
        try:
            async with asyncio.timeout(self._idle):
                return await anext(requests, None)
        except TimeoutError:
            raise Unavailable(f"the stream was idle for {self._idle:g} s") from None
