"""What wraps the handler of every RPC, once."""

from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"  # gRPC's own class takes no [] at run time


class Interceptor(grpc.aio.ServerInterceptor):
    """Gives each RPC a handler that is made of its own when it is first called."""

    def __init__(self) -> None:
        self._made: dict[str, Handler] = {}

    @abstractmethod
    def wrapped(self, method: str, handler: Any) -> Handler:
        """Return what is to handle an RPC.

        Args:
            method: its name, "/camserve.v1.ExplainService/Explain".
            handler: its own.
        """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Return the handler of an RPC, or None where there is no such RPC."""
        method = handler_call_details.method
        if method in self._made:
            return self._made[method]
        handler = await continuation(handler_call_details)
        if handler is not None:  # callers choose the names of RPCs that there are not, so there is no end of them
            handler = self._made[method] = self.wrapped(method, handler)
        return handler
