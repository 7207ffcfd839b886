"""Add our services to Ray's gRPC proxy. This module is imported in the proxy, and does not need torch."""

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import wraps
from inspect import isasyncgenfunction
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from camserve.v1 import evaluate_pb2_grpc, explain_pb2_grpc, models_pb2_grpc
from camserve_server.cluster.calls import RETRY_DELAY

_SERVICES: tuple[Callable[[Any, Any], None], ...] = (
    explain_pb2_grpc.add_ExplainServiceServicer_to_server,
    evaluate_pb2_grpc.add_EvaluateServiceServicer_to_server,
    models_pb2_grpc.add_ModelServiceServicer_to_server,
    health_pb2_grpc.add_HealthServicer_to_server,
)
_REPLICA_LOST = "The actor "
"""Beginning of Ray's error message when the replica that a call was passed to has died."""


def add_services_to_server(servicer: Any, server: Any) -> None:
    """Add all our services to Ray's server. Ray's option `grpc_servicer_functions` names this function.

    When an ingress dies, Ray responds with INTERNAL. The handlers here turn that into UNAVAILABLE, so clients retry.

    Args:
        servicer: Ray's servicer, which is not used.
        server: Ray's server, which creates its own handler for each method.
    """
    ray_factory = server.service_handler_factory

    def retryable_factory(*args: Any, **options: Any) -> Callable[..., Any]:
        return _retryable(ray_factory(*args, **options))

    server.service_handler_factory = retryable_factory
    try:
        for add in _SERVICES:
            add(servicer, server)
    finally:
        server.service_handler_factory = ray_factory  # other applications may add services too


def _retryable(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap one of Ray's handlers, so that calls which lost their ingress end with UNAVAILABLE."""

    @wraps(handler)
    async def unary(request: Any, context: Any) -> Any:
        reply = await handler(request, context)
        _correct_status(context)
        return reply

    @wraps(handler)
    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        async with aclosing(handler(request, context)) as replies:
            async for reply in replies:
                yield reply
        _correct_status(context)

    return stream if isasyncgenfunction(handler) else unary


def _correct_status(context: Any) -> None:
    """Turn INTERNAL into UNAVAILABLE if the call lost its ingress."""
    if context.code() in {grpc.StatusCode.INTERNAL, grpc.StatusCode.INTERNAL.value[0]} and (
        context.details() or ""
    ).startswith(_REPLICA_LOST):
        context.set_code(grpc.StatusCode.UNAVAILABLE)
        context.set_details("the ingress that passed this call on was lost")
        context.set_trailing_metadata(
            (*(context.trailing_metadata() or ()), ("grpc-retry-pushback-ms", str(RETRY_DELAY)))
        )
