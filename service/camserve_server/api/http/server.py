"""The HTTP server: sockets, TLS, start and stop, on the event loop of the gRPC server."""

import asyncio
import logging
import socket
from collections.abc import Sequence
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState as UvicornState

from camserve_server.api import auth
from camserve_server.api.connection_limits import HANDSHAKE_TIMEOUT
from camserve_server.api.grpc_server import Border, Health
from camserve_server.api.http import app
from camserve_server.api.http.protocol import Connection
from camserve_server.core import logs

log = logging.getLogger(__name__)


class HttpServer:
    """HTTP server of the same services.

    Its connections are uvicorn's. uvicorn's own server is not used: it handles signals, wakes up ten times a second,
    and serves one certificate until it ends.

    Args:
        border: parts of the server that its protocols share.
        health: health of the server.

    Raises:
        ConfigError: a file of certificates cannot be used.
    """

    def __init__(self, border: Border, health: Health) -> None:
        settings = border.settings
        self._connection = type("Connection", (Connection,), {"max_connections": settings.max_connections})
        self._config = Config(
            app.build(border, health),
            http=self._connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            reset_contextvars=True,  # otherwise a call could start with the token's name of an earlier one
            timeout_keep_alive=settings.connection_idle_seconds,  # type: ignore[arg-type]  # passed to call_later
            h11_max_incomplete_event_size=settings.max_metadata_kib * 2**10,
        )
        self._config.load()
        self._tls = auth.https_context(settings) if settings.tls_cert else None
        self._state = UvicornState()
        self._servers: list[asyncio.Server] = []

    async def start(self, sockets: Sequence[socket.socket]) -> None:
        """Listen on sockets."""
        loop = asyncio.get_running_loop()
        timeout = HANDSHAKE_TIMEOUT if self._tls else None
        for listening in sockets:
            server = await loop.create_server(
                self._connect, sock=listening, ssl=self._tls, ssl_handshake_timeout=timeout
            )
            self._servers.append(server)
        log.info("HTTP", extra=logs.fields(address=self._config_address(sockets)))

    def _connect(self) -> Any:
        return self._connection(self._config, self._state, {})

    @staticmethod
    def _config_address(sockets: Sequence[socket.socket]) -> str:
        host, port = sockets[0].getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def stop(self, seconds: float) -> None:
        """Close the sockets and idle connections, complete the responses, and close all connections after a time."""
        for server in self._servers:
            server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks and seconds:
            await asyncio.wait(self._state.tasks, timeout=seconds)
        for connection in list(self._state.connections):
            connection.transport.abort()
        for task in list(self._state.tasks):
            task.cancel()
        await asyncio.gather(*self._state.tasks, return_exceptions=True)
