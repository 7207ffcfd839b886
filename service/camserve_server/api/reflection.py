"""Reflection: what services there are, for clients that have none of our protos."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, TypeAlias

from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from camserve_server.api.health import LARGEST
from camserve_server.api.rpc import Context
from camserve_server.core.errors import InvalidArgument, Unavailable

Question: TypeAlias = Any  # generated, and not typed
Answer: TypeAlias = Any

NAME: str = reflection.SERVICE_NAME


class ReflectionServicer(reflection_pb2_grpc.ServerReflectionServicer):  # type: ignore[misc]  # likewise
    """Answers short questions, and ends streams on which none come.

    Args:
        services: that callers are told of.
        pool: their descriptors.
        idle: seconds that a stream may be open without a question.
    """

    def __init__(self, services: Iterable[str], pool: DescriptorPool, idle: float) -> None:
        self._answers: Any = reflection.aio.ReflectionServicer(services, pool)
        self._idle = idle

    async def ServerReflectionInfo(  # noqa: N802 -- the RPC's name
        self, requests: AsyncIterator[Question], context: Context
    ) -> AsyncIterator[Answer]:
        """Answer each question.

        Raises:
            InvalidArgument: a question is too long. It would be looked up on the event loop, and sent back.
            Unavailable: none came for long.
        """
        async for answer in self._answers.ServerReflectionInfo(self._checked(requests), context):
            yield answer

    async def _checked(self, requests: AsyncIterator[Question]) -> AsyncIterator[Question]:
        while (question := await self._next(requests)) is not None:
            if question.ByteSize() > LARGEST:
                raise InvalidArgument(f"a question has at most {LARGEST:,} bytes")
            yield question

    async def _next(self, requests: AsyncIterator[Question]) -> Question | None:
        try:
            async with asyncio.timeout(self._idle):
                return await anext(requests, None)
        except TimeoutError:
            raise Unavailable(f"the stream was idle for {self._idle:g} s") from None
