"""What Ray's gRPC proxy is told of our services. It runs in the proxy: nothing here needs torch."""

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import wraps
from inspect import isasyncgenfunction
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from camserve.v1 import evaluate_pb2_grpc, explain_pb2_grpc, models_pb2_grpc
from camserve_server.cluster.calls import AGAIN

_SERVICES: tuple[Callable[[Any, Any], None], ...] = (
    explain_pb2_grpc.add_ExplainServiceServicer_to_server,
    evaluate_pb2_grpc.add_EvaluateServiceServicer_to_server,
    models_pb2_grpc.add_ModelServiceServicer_to_server,
    health_pb2_grpc.add_HealthServicer_to_server,
)
_LOST = "The actor "
"""What Ray's words begin with where the replica that it had handed a call to is gone."""


def add_services_to_server(servicer: Any, server: Any) -> None:
    """Add all our services to Ray's server: what `grpc_servicer_functions` names.

    Ray answers INTERNAL where a door dies. Ours then answer UNAVAILABLE, and clients send the call again.

    Args:
        servicer: Ray's, which it does not use.
        server: Ray's, which makes a handler of its own for each method.
    """
    made = server.service_handler_factory

    def sent_again(*args: Any, **names: Any) -> Callable[..., Any]:
        return _sent_again(made(*args, **names))

    server.service_handler_factory = sent_again
    try:
        for add in _SERVICES:
            add(servicer, server)
    finally:
        server.service_handler_factory = made  # there may be other applications


def _sent_again(handler: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(handler)
    async def answered(request: Any, context: Any) -> Any:
        reply = await handler(request, context)
        _mend(context)
        return reply

    @wraps(handler)
    async def streamed(request: Any, context: Any) -> AsyncIterator[Any]:
        async with aclosing(handler(request, context)) as replies:
            async for reply in replies:
                yield reply
        _mend(context)

    return streamed if isasyncgenfunction(handler) else answered


def _mend(context: Any) -> None:
    if context.code() in {grpc.StatusCode.INTERNAL, grpc.StatusCode.INTERNAL.value[0]} and (
        context.details() or ""
    ).startswith(_LOST):
        context.set_code(grpc.StatusCode.UNAVAILABLE)
        context.set_details("the door that passed this on was lost")
        context.set_trailing_metadata((*(context.trailing_metadata() or ()), ("grpc-retry-pushback-ms", str(AGAIN))))
