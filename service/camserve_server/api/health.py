"""Servicer of the gRPC health protocol: the status of each service, for single checks and for watches.

The servicer of grpcio-health-checking writes to a watcher while it holds the lock that a change of status needs. So one
watcher that reads nothing freezes the status for every other one. Here a change of status waits for no watcher.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from camserve_server.core.sockets import address_of

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
HealthResponse: TypeAlias = health_pb2.HealthCheckResponse
Status: TypeAlias = "health_pb2.HealthCheckResponse.ServingStatus.ValueType"

MAX_WATCHERS = 1000  # each takes about 20 KiB
MAX_WATCHERS_PER_ADDRESS = 100  # so that one caller leaves room for others
MAX_MESSAGE_BYTES = 4096  # a watch keeps the memory of its message until it ends


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # generated, and not typed
    """Servicer that answers health checks."""

    def __init__(self) -> None:
        self._statuses: dict[str, Status] = {}
        self._changed = asyncio.Event()  # set by the next change of status, and then replaced
        self._watchers: Counter[str] = Counter()  # by address

    def set(self, statuses: Mapping[str, Status]) -> None:
        """Set the status of services by their names, and notify the watchers."""
        self._statuses.update(statuses)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(  # noqa: N802 -- the RPC's name
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> HealthResponse:
        """Return the status of one service."""
        if request.service not in self._statuses:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return HealthResponse(status=self._statuses[request.service])

    async def List(  # noqa: N802 -- the RPC's name
        self, _request: health_pb2.HealthListRequest, _context: Context
    ) -> health_pb2.HealthListResponse:
        """Return the status of every service."""
        return health_pb2.HealthListResponse(
            statuses={name: HealthResponse(status=status) for name, status in self._statuses.items()}
        )

    async def Watch(  # noqa: N802 -- the RPC's name
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> None:
        """Send the status of one service at once and after each change, until the call ends."""
        if request.ByteSize() > MAX_MESSAGE_BYTES:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"a health watch has at most {MAX_MESSAGE_BYTES:,} bytes"
            )
        address = address_of(context.peer())
        if self._watchers.total() >= MAX_WATCHERS or self._watchers[address] >= MAX_WATCHERS_PER_ADDRESS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many health watches")
        with self._count_watcher(address):
            await self._watch(request.service, context)

    @contextmanager
    def _count_watcher(self, address: str) -> Iterator[None]:
        self._watchers[address] += 1
        try:
            yield
        finally:
            self._watchers[address] -= 1
            if not self._watchers[address]:
                del self._watchers[address]

    async def _watch(self, service: str, context: Context) -> None:
        sent: Status | None = None
        while True:
            changed, status = self._changed, self._statuses.get(service, HealthResponse.SERVICE_UNKNOWN)
            if status != sent:
                await context.write(HealthResponse(status=status))
                sent = status
            await changed.wait()
