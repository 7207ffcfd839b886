"""The HTTP server: sockets, TLS, start and stop. Its event loop has a thread of its own, and calls run on gRPC's."""

import asyncio
import contextlib
import contextvars
import itertools
import logging
import socket
import ssl
from collections.abc import Sequence

from uvicorn.config import Config
from uvicorn.server import ServerState as UvicornState

from camserve_server.api import auth
from camserve_server.api.connection_limits import HANDSHAKE_TIMEOUT
from camserve_server.api.grpc_server import Border, Health
from camserve_server.api.http import app
from camserve_server.api.http.loops import LoopThread, run_on
from camserve_server.api.http.protocol import Connection
from camserve_server.core import logs

log = logging.getLogger(__name__)

ACCEPT_PAUSE = 1.0  # seconds after a connection could not be accepted; as in asyncio


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
        self._connection: type[Connection] = type(
            "Connection", (Connection,), {"max_connections": settings.max_connections}
        )
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
        self._thread: LoopThread | None = None
        self._servers: list[asyncio.Server] = []
        self._accepting: dict[socket.socket, asyncio.Task[None]] = {}  # by the socket that listens
        self._handshakes: set[asyncio.Task[None]] = set()

    async def start(self, sockets: Sequence[socket.socket]) -> None:
        """Listen on sockets, on an event loop in a thread of its own."""
        self._thread = LoopThread("camserve-http")
        await run_on(self._thread.loop, self._listen(sockets))

    async def _listen(self, sockets: Sequence[socket.socket]) -> None:
        loop = asyncio.get_running_loop()
        for listening in sockets:
            if self._tls is None:
                self._servers.append(await loop.create_server(self._connect, sock=listening))
            else:
                listening.settimeout(0)
                self._accepting[listening] = loop.create_task(self._accept(listening, self._tls))
        log.info("HTTP", extra=logs.fields(address=self._config_address(sockets)))

    async def _accept(self, listening: socket.socket, tls: ssl.SSLContext) -> None:
        """Accept connections with TLS.

        A server of asyncio tells of a connection when its TLS handshake is done. One that says nothing would not count,
        although it holds a file.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listening)
            except OSError as error:  # as a rule there are too many open files
                log.warning("cannot accept a connection: %s", error.strerror)
                await asyncio.sleep(ACCEPT_PAUSE)
                continue
            if not self._has_room():
                accepted.close()
                continue
            handshake = loop.create_task(self._shake_hands(accepted, tls), context=contextvars.Context())
            self._handshakes.add(handshake)
            handshake.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, accepted: socket.socket, tls: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):  # whatever the other side does wrong, or too late
            await loop.connect_accepted_socket(
                self._connect, accepted, ssl=tls, ssl_handshake_timeout=HANDSHAKE_TIMEOUT
            )

    def _connect(self) -> Connection:
        return self._connection(self._config, self._state, {})

    def _has_room(self) -> bool:
        return len(self._state.connections) + len(self._handshakes) < self._connection.max_connections

    @staticmethod
    def _config_address(sockets: Sequence[socket.socket]) -> str:
        host, port = sockets[0].getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def ports(self) -> list[int]:
        """The ports that it listens on."""
        listening = itertools.chain(self._accepting, *(server.sockets for server in self._servers))
        return [each.getsockname()[1] for each in listening]

    @property
    def unwritten(self) -> int:
        """The number of connections with data that the system has not taken yet."""
        connections = list(self._state.connections)  # copied at once: its thread adds and removes connections
        buffers = (connection.transport.get_write_buffer_size() for connection in connections)
        return sum(size > 0 for size in buffers)

    async def stop(self, seconds: float) -> None:
        """Close the sockets and idle connections, complete the responses, and close all connections after a time.

        Then the thread ends.
        """
        if self._thread:
            await run_on(self._thread.loop, self._close(seconds))
            thread, self._thread = self._thread, None
            await thread.close()

    async def _close(self, seconds: float) -> None:
        for server in self._servers:
            server.close()
        for task in (*self._accepting.values(), *self._handshakes):
            task.cancel()
        for listening in self._accepting:
            listening.close()
        self._accepting.clear()
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks and seconds:
            await asyncio.wait(self._state.tasks, timeout=seconds)
        for connection in list(self._state.connections):
            connection.transport.abort()
        for task in list(self._state.tasks):
            task.cancel()
        await asyncio.gather(*self._state.tasks, return_exceptions=True)
