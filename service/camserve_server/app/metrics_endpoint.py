"""Metrics endpoint for Prometheus: an HTTP server on its own port and threads, with the server's TLS and tokens."""

import logging
import socketserver
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from email.message import Message
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import BufferedIOBase
from socket import AF_INET, AF_INET6, SHUT_RDWR, socket
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias, cast

from camserve_server.api import tokens
from camserve_server.api.hosts import Hosts
from camserve_server.core import logs
from camserve_server.core.config import Settings
from camserve_server.core.errors import ConfigError, ServiceError, Unauthenticated
from camserve_server.core.sockets import address_of
from camserve_server.telemetry import ServerSnapshot, Telemetry, telemetry

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

log = logging.getLogger(__name__)

HEADERS = {"X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin"}
"""Headers of every response. The supervisor serves metrics, too, and does not import gRPC, as the page's headers do."""
clock = time.monotonic

PATH = "/metrics"
MAX_CONNECTIONS = 8  # concurrent connections; one more replaces another one, or is closed immediately
SLOW_AFTER = 2.0  # seconds after which a new connection may replace one of an address that has no more than its own
CONNECTION_TIMEOUT = 10.0  # seconds that a connection has in total, for TLS, its request and the response
POLL_INTERVAL = 0.1  # seconds between two checks for a stop, so the longest time that stopping takes

Encode: TypeAlias = Callable[[str], tuple[str, bytes]]
"""Function that returns the content type and the text of all metrics, in the format that an Accept header requests."""

Publish: TypeAlias = Callable[["CollectorRegistry"], object]
"""Function that receives the metrics of a server whose supervisor serves them."""


@contextmanager
def open_telemetry(
    settings: Settings,
    state: Callable[[], ServerSnapshot],
    publish: Publish | None = None,
) -> Iterator[Telemetry | None]:
    """Serve the metrics and export the traces of a server inside the block.

    Args:
        settings: settings of the server; both are disabled by default.
        state: function that returns the server's state, called at each request of Prometheus.
        publish: function that receives the metrics, for a supervisor that serves them; None to serve them here.

    Yields:
        The telemetry, or None if both are disabled.

    Raises:
        ConfigError: the metrics address cannot be listened on, or traces cannot be exported.
    """
    enabled = telemetry(state, metrics=bool(settings.metrics_address), traces=settings.traces)
    if enabled is None:
        yield None
        return
    try:
        with _serving(settings, enabled, publish):
            yield enabled
    finally:
        if enabled.traces:
            enabled.traces.close()


def _serving(settings: Settings, enabled: Telemetry, publish: Publish | None) -> AbstractContextManager[None]:
    if enabled.prometheus_metrics is None:
        return nullcontext()
    if publish is None:
        return serve_metrics(settings, enabled.prometheus_metrics.encode)
    publish(enabled.prometheus_metrics.registry)
    return nullcontext()


@contextmanager
def serve_metrics(settings: Settings, encode: Encode) -> Iterator[None]:
    """Serve metrics at the metrics address inside the block.

    Args:
        settings: settings of the server.
        encode: function that returns the metrics; called in the endpoint's threads.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    server = _listen(settings, encode)
    log.info("metrics", extra=logs.fields(address=settings.metrics_address, port=server.server_address[1]))
    thread = threading.Thread(target=server.serve_forever, args=(POLL_INTERVAL,), name="metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _listen(settings: Settings, encode: Encode) -> "_Server":
    try:
        return _Server(settings, encode)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen on {settings.metrics_address}: is the port taken, or the host unknown?"
        ) from error


class _Connection(NamedTuple):
    """An open connection.

    Attributes:
        since: time of its start.
        handle: duplicate of its socket, which TLS does not wrap.
        address: the caller's address, as `address_of` returns it.
    """

    since: float
    handle: socket
    address: str


class _Server(socketserver.ThreadingMixIn, HTTPServer):
    """HTTP server of the metrics.

    Args:
        settings: settings of the server.
        encode: function that returns the metrics.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, settings: Settings, encode: Encode) -> None:
        host, _, port = settings.metrics_address.rpartition(":")
        self.address_family = AF_INET6 if host.startswith("[") else AF_INET
        self.metrics = encode
        self._settings = settings
        self._hosts = Hosts(settings.metrics_address, settings.http_origins, tls=bool(settings.tls_cert))
        self._tokens = tokens.file(settings.tokens_file) if settings.tokens_file else None
        self.max_header_bytes = settings.max_metadata_kib * 2**10
        self._open: dict[Any, _Connection] = {}  # the oldest first
        super().__init__((host.strip("[]"), int(port)), _Handler)

    def server_bind(self) -> None:
        """Bind without the base class's lookup of the host's name in the network."""
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread, unless too many are open."""
        address = address_of(f"ip:[{client_address[0]}]:{client_address[1]}")
        if len(self._open) >= MAX_CONNECTIONS:
            self._make_room(address)
        if len(self._open) >= MAX_CONNECTIONS:
            self.shutdown_request(request)
            return
        self._open[request] = _Connection(clock(), request.dup(), address)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def service_actions(self) -> None:
        """Close the connections that have timed out. Their age counts: a slow sender would never be idle."""
        for request, connection in list(self._open.items()):
            if clock() - connection.since > CONNECTION_TIMEOUT:
                self._close(request, connection)

    def _make_room(self, address: str) -> None:
        """Close the oldest connection of the address that has most, counting the new one of this address.

        If this address has as many, it is closed only if it is slow: so nobody gains by renewing connections.
        """
        connections = list(self._open.items())
        counts = Counter([address, *(connection.address for _, connection in connections)])
        most = max(counts.values())
        for request, connection in connections:
            if counts[connection.address] == most:
                if most > counts[address] or clock() - connection.since > SLOW_AFTER:
                    self._close(request, connection)
                return

    def _close(self, request: Any, connection: _Connection) -> None:
        """Close a connection. Its thread ends with an error."""
        with suppress(OSError):  # the connection has just ended
            connection.handle.shutdown(SHUT_RDWR)
        self._forget(request)

    def _forget(self, request: Any) -> None:
        if connection := self._open.pop(request, None):
            connection.handle.close()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection. The certificates are read for each TLS handshake, so renewed ones take effect."""
        connection = cast("socket", request)
        connection.settimeout(CONNECTION_TIMEOUT)
        if not self._settings.tls_cert:
            super().finish_request(connection, client_address)
            return
        with _context(self._settings).wrap_socket(connection, server_side=True) as secured:
            super().finish_request(secured, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 -- as the base class calls it
        """Log a broken connection at debug level: the client is usually the cause."""
        log.debug("a request for metrics failed: %s", sys.exc_info()[1])

    def check(self, headers: Message) -> None:
        """Check that a client may read the metrics.

        Args:
            headers: headers of its request.

        Raises:
            ServiceError: a web page asks, or the token is missing or unknown, or lacks the role "observe".
        """
        if "Origin" in headers:
            raise ServiceError("web pages may not read the metrics")
        if not self._hosts.allow(headers.get("Host", "")):
            raise ServiceError("the header Host does not name this server: see http_origins")
        if self._tokens is None:
            return
        token = tokens.authenticate(self._tokens.current(), list[object](headers.get_all("Authorization") or ()))
        if "observe" not in token.roles:
            raise ServiceError("metrics need a token with the role observe")


class _Lines:
    """Lines of a request, up to a number of bytes in total: the base class reads a hundred of 64 KiB each.

    Args:
        file: the connection.
        limit: the largest number of bytes.
    """

    def __init__(self, file: BufferedIOBase, limit: int) -> None:
        self._file, self._limit, self._left = file, limit, limit
        self.close = file.close

    def readline(self, size: int) -> bytes:
        """Return the next line, or its first bytes.

        Args:
            size: the largest number of bytes to return.

        Raises:
            HTTPException: the lines are longer than the limit.
        """
        line = self._file.readline(min(size, self._left + 1))
        self._left -= len(line)
        if self._left < 0:
            raise HTTPException(f"the request line and the headers have more than {self._limit:,} bytes")
        return line


class _Handler(BaseHTTPRequestHandler):
    """Handler of one connection."""

    protocol_version = "HTTP/1.1"
    server: _Server
    timeout: ClassVar[float] = CONNECTION_TIMEOUT

    def setup(self) -> None:
        """Limit the bytes of the request. The base class refuses headers for which the limit is met (431)."""
        super().setup()
        self.rfile = cast("Any", _Lines(self.rfile, self.server.max_header_bytes))

    def handle_one_request(self) -> None:
        """Answer a request; refuse one whose first line alone meets the limit."""
        try:
            super().handle_one_request()
        except HTTPException as error:
            self.requestline = self.request_version = self.command = ""
            self.send_error(431, explain=str(error))

    def do_GET(self) -> None:
        """Send the metrics in the requested format."""
        try:
            self.server.check(self.headers)
        except ServiceError as error:
            self._send_text(401 if isinstance(error, Unauthenticated) else 403, str(error))
            return
        if self.path.partition("?")[0] != PATH:
            self._send_text(404, f"the metrics are at {PATH}")
            return
        self._send(200, *self.server.metrics(self.headers.get("Accept", "")))

    def version_string(self) -> str:
        """Return a Server header without the versions of Python and of the library."""
        return "camserve"

    def _send_text(self, code: int, text: str) -> None:
        self._send(code, "text/plain; charset=utf-8", f"{text}\n".encode())

    def _send(self, code: int, content_type: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Connection", "close")  # the timeout is for the whole connection
        if code == 401:  # noqa: PLR2004 -- HTTP's own number
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        with suppress(OSError):  # the client has gone
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- the base class's name
        """Do not log requests: Prometheus sends one every few seconds."""


def _context(settings: Settings) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(settings.tls_cert, settings.tls_key, password="")
    if settings.tls_client_ca:
        context.load_verify_locations(settings.tls_client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
