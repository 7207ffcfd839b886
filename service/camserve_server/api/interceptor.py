"""Base class of interceptors that wrap the handler of each RPC once."""

from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"  # a string: gRPC's class accepts no [] at run time


class Interceptor(grpc.aio.ServerInterceptor):
    """Interceptor that wraps the handler of an RPC at its first call, and reuses the wrapped handler."""

    def __init__(self) -> None:
        self._wrapped: dict[str, Handler] = {}

    @abstractmethod
    def wrap(self, method: str, handler: Any) -> Handler:
        """Return the wrapped handler of an RPC.

        Args:
            method: full name of the RPC, such as "/camserve.v1.ExplainService/Explain".
            handler: the RPC's own handler.
        """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Return the wrapped handler of an RPC, or None if there is no such RPC."""
        method = handler_call_details.method
        if method in self._wrapped:
            return self._wrapped[method]
        handler = await continuation(handler_call_details)
        if handler is not None:  # unknown names are not stored: callers could send any number of them
            handler = self._wrapped[method] = self.wrap(method, handler)
        return handler
