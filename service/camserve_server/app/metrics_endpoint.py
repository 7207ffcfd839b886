"""Where Prometheus finds the metrics: a port and threads of its own, with TLS and tokens where the server has them."""

import logging
import socketserver
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from socket import AF_INET, AF_INET6, SHUT_RDWR, socket
from typing import TYPE_CHECKING, Any, ClassVar, cast

from camserve_server.api import auth, tokens
from camserve_server.core import logs
from camserve_server.core.config import Settings
from camserve_server.core.errors import ConfigError, ServiceError, Unauthenticated
from camserve_server.telemetry import State, Telemetry, telemetry

if TYPE_CHECKING:
    from camserve_server.telemetry.prometheus import PrometheusMetrics

log = logging.getLogger(__name__)
clock = time.monotonic

PATH = "/metrics"
AT_ONCE = 8  # connections that are served at a time; one more replaces a slow one, or is closed at once
SLOW = 2.0  # seconds after which a connection may be replaced by a new one
DEADLINE = 10.0  # seconds that a connection has in total, for TLS, its request and the answer
POLL = 0.1  # seconds that stopping takes at most


@contextmanager
def told(settings: Settings, state: Callable[[], State]) -> Iterator[Telemetry | None]:
    """Hold open inside the block what is told of a server: its metrics, and its traces.

    Args:
        settings: of the server; by default nothing is told.
        state: what is read when Prometheus asks.

    Raises:
        ConfigError: the address cannot be listened on, or traces cannot be sent.
    """
    found = telemetry(state, metrics=bool(settings.metrics_address), traces=settings.traces)
    if found is None:
        yield None
        return
    try:
        if found.prometheus_metrics is None:
            yield found
        else:
            with _served(settings, found.prometheus_metrics):
                yield found
    finally:
        if found.traces:
            found.traces.close()


@contextmanager
def _served(settings: Settings, prometheus_metrics: "PrometheusMetrics") -> Iterator[None]:
    server = _listening(settings, prometheus_metrics)
    log.info("metrics", extra=logs.fields(address=settings.metrics_address, port=server.server_address[1]))
    thread = threading.Thread(target=server.serve_forever, args=(POLL,), name="metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _listening(settings: Settings, prometheus_metrics: "PrometheusMetrics") -> "_Server":
    try:
        return _Server(settings, prometheus_metrics)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen on {settings.metrics_address}: is the port taken, or the host unknown?"
        ) from error


class _Server(socketserver.ThreadingMixIn, HTTPServer):
    """Answers Prometheus.

    Args:
        settings: of the server.
        meters: what it is told.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, settings: Settings, prometheus_metrics: "PrometheusMetrics") -> None:
        host, _, port = settings.metrics_address.rpartition(":")
        self.address_family = AF_INET6 if host.startswith("[") else AF_INET
        self.metrics = prometheus_metrics.written
        self._settings = settings
        self._tokens = auth.tokens_file(settings.tokens_file) if settings.tokens_file else None
        self._open: dict[Any, tuple[float, socket]] = {}  # opening time, a handle that TLS leaves alone; oldest first
        super().__init__((host.strip("[]"), int(port)), _Handler)

    def server_bind(self) -> None:
        """Bind; the base class would look its own name up in the network, too."""
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread, if there is room for one more."""
        if len(self._open) >= AT_ONCE:
            self._cut(SLOW)
        if len(self._open) >= AT_ONCE:
            self.shutdown_request(request)
            return
        self._open[request] = clock(), request.dup()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def service_actions(self) -> None:
        """Close the connections that are past their deadline; a slow sender is never silent, so silence is no test."""
        self._cut(DEADLINE)

    def _cut(self, seconds: float) -> None:
        """Close the connections that are older than a number of seconds; their threads end when they notice."""
        for request, (since, handle) in list(self._open.items()):
            if clock() - since > seconds:
                with suppress(OSError):  # the connection has just ended by itself
                    handle.shutdown(SHUT_RDWR)
                self._forget(request)

    def _forget(self, request: Any) -> None:
        if known := self._open.pop(request, None):
            known[1].close()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Read what it asks, and answer; with TLS after a handshake, with the certificates as they are now."""
        connection = cast("socket", request)
        connection.settimeout(DEADLINE)
        if not self._settings.tls_cert:
            super().finish_request(connection, client_address)
            return
        with _context(self._settings).wrap_socket(connection, server_side=True) as secured:
            super().finish_request(secured, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 -- as the base class calls it
        """Say little of a connection that broke: it is the other side's affair."""
        log.debug("a scrape failed: %s", sys.exc_info()[1])

    def check(self, shown: list[str]) -> None:
        """Refuse who may not see metrics.

        Args:
            shown: every value of the header Authorization.

        Raises:
            ServiceError: it shows no token, or none that is for this.
        """
        if self._tokens is None:
            return
        token = tokens.authenticate(self._tokens.current(), list(shown))
        if "observe" not in token.roles:
            raise ServiceError("this needs a token with the role observe")


class _Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    protocol_version = "HTTP/1.1"
    server: _Server
    timeout: ClassVar[float] = DEADLINE

    def do_GET(self) -> None:
        """Answer with the metrics, in the form that is asked for."""
        try:
            self.server.check(self.headers.get_all("Authorization") or [])
        except ServiceError as error:
            self._say(401 if isinstance(error, Unauthenticated) else 403, str(error))
            return
        if self.path.partition("?")[0] != PATH:
            self._say(404, f"the metrics are at {PATH}")
            return
        self._send(200, *self.server.metrics(self.headers.get("Accept", "")))

    def version_string(self) -> str:
        """Return what answers, and not by which versions of what."""
        return "camserve"

    def _say(self, code: int, words: str) -> None:
        self._send(code, "text/plain; charset=utf-8", f"{words}\n".encode())

    def _send(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")  # the deadline is for the connection, so it gets one request
        if code == 401:  # noqa: PLR2004 -- HTTP's own number
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        with suppress(OSError):  # it did not wait
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- the base class's name
        """Say nothing of a scrape: there is one every few seconds."""


def _context(settings: Settings) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(settings.tls_cert, settings.tls_key, password="")
    if settings.tls_client_ca:
        context.load_verify_locations(settings.tls_client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
