"""Local proxy of the web page: it serves the page to a browser, and forwards the page's calls to any gRPC server.

The proxy holds the token, which never reaches the browser. Only this machine can connect, and only a page below the
random key in the address can call: other users of the machine, and other web pages, do not know the key.
"""

from __future__ import annotations

import hmac
import json
import secrets
import select
import socket
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Final

import grpc

from camserve._codec.json_messages import InvalidJson, Json, from_json, to_json
from camserve._codec.protocol import RPCS, Trailers, error_bytes, error_json, message_class, retry_after
from camserve._core.errors import CamserveError
from camserve._transport import sync
from camserve._transport.settings import new_request_id
from camserve.web import assets, connect

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping

    from camserve._sync.client import Client

HOST: Final = "127.0.0.1"
OWN_NAMES: Final = ("127.0.0.1", "localhost")
MAX_BODY: Final = 96 * 2**20  # bytes of a request, which may have many photos; the server has limits of its own
POLL_SECONDS: Final = 0.5  # between checks whether a call has ended


class PageServer(ThreadingHTTPServer):
    """HTTP server of the page.

    Args:
        client: Client of the server. Its settings apply to every call, but not its timeout and retries.
        port: Port to listen on; 0 for a free one.

    Attributes:
        url: Address of the page, with the key.
        opened: Event that is set when a browser has asked for the page.
    """

    daemon_threads = True

    def __init__(self, client: Client, port: int) -> None:
        self.client = client
        self.settings = client._settings  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]  # of the same package
        self.channel: Any = sync.open_channel(self.settings)
        self.assets = assets.load()
        self.opened = threading.Event()
        self.key = f"key-{secrets.token_urlsafe(32)}"  # the page leaves it out of links: see state.js
        super().__init__((HOST, port), _Handler)
        self.url = f"http://{HOST}:{self.server_port}/{self.key}/"

    def server_close(self) -> None:
        """Close the port, and cancel the calls in progress."""
        super().server_close()
        self.channel.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a connection that breaks: the browser closes connections as it likes."""


class _Handler(BaseHTTPRequestHandler):
    """Handler of one connection of the browser."""

    protocol_version = "HTTP/1.1"
    server: PageServer  # pyright: ignore[reportIncompatibleVariableOverride]  # the base class does not know which
    timeout: ClassVar[float | None] = 60  # seconds between two requests

    def do_GET(self) -> None:
        """Send a file of the page, or the health of the server."""
        path = self._path()
        if path == "health":
            self._send_health()
        elif path is None or path not in self.server.assets:
            self._send_text(404, "not found")
        else:
            self.server.opened.set()
            asset = self.server.assets[path]
            unchanged = self.headers.get("If-None-Match") == asset.etag
            body, headers = asset.encoded(self.headers.get("Accept-Encoding", ""))
            self._send(304 if unchanged else 200, headers, b"" if unchanged else body)

    def do_POST(self) -> None:
        """Forward a call."""
        rpc = RPCS.get(f"/{self._path()}")
        if rpc is None:
            self._send_text(404, "not found")
        elif (body := self._body()) is None:
            self._send_text(413, f"send Content-Length, and at most {MAX_BODY:,} bytes")
        else:
            self._forward(rpc, body)

    def _path(self) -> str | None:
        """Return the path below the key; None for a request that does not know the key, or is not for this server."""
        host = self.headers.get("Host", "")
        origin = self.headers.get("Origin", f"http://{host}")
        known = [f"{name}:{self.server.server_port}" for name in OWN_NAMES]
        key, _, path = self.path.partition("?")[0].removeprefix("/").partition("/")
        has_key = hmac.compare_digest(key.encode(), self.server.key.encode())
        return path if has_key and host in known and origin == f"http://{host}" else None

    def _body(self) -> bytes | None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY:
            self.close_connection = True
            return None
        return self.rfile.read(int(length))

    def _forward(self, rpc: Any, body: bytes) -> None:
        message = message_class(rpc.input_type)
        try:
            lines = _lines(body) if rpc.client_streaming else [body]
            messages = [from_json(line, message()).SerializeToString() for line in lines]
        except InvalidJson as error:
            self._send_error(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            return
        forward = self._forward_stream if rpc.server_streaming else self._forward_unary
        forward(f"/{rpc.containing_service.full_name}/{rpc.name}", message_class(rpc.output_type), messages)

    def _forward_unary(self, path: str, reply: Any, messages: list[bytes]) -> None:
        future = self.server.channel.unary_unary(path).future(
            messages[0], timeout=self._timeout(), metadata=self._metadata()
        )
        try:
            with self._cancelled_on_hang_up(future):
                data = future.result()
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            self._send_failure(error)
        else:
            self._send(200, {"Content-Type": connect.JSON}, to_json(reply.FromString(data)))

    def _forward_stream(self, path: str, reply: Any, messages: list[bytes]) -> None:
        """Forward a stream. The first reply decides whether the response is a stream or an error."""
        replies = self.server.channel.stream_stream(path)(
            iter(messages), timeout=self._timeout(), metadata=self._metadata()
        )
        with self._cancelled_on_hang_up(replies):
            try:
                first = next(replies, None)
            except grpc.RpcError as error:
                self._send_failure(error)
                return
            self._start(200, {"Content-Type": connect.NDJSON, "Transfer-Encoding": "chunked"})
            try:
                for data in () if first is None else chain((first,), replies):
                    self._send_chunk(to_json(reply.FromString(data)) + b"\n")
            except grpc.RpcError as error:
                self._send_chunk(error_bytes({"streamError": _error_json(error)}) + b"\n")
            self.wfile.write(b"0\r\n\r\n")

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return self.server.settings.metadata_with(self.headers.get("X-Request-Id") or new_request_id())

    def _timeout(self) -> float | None:
        """Return the timeout of a call in seconds. Without one the page can cancel it."""
        value = self.headers.get("Connect-Timeout-Ms", "")
        return int(value) / 1e3 if value.isdecimal() else None

    @contextmanager
    def _cancelled_on_hang_up(self, call: Any) -> Generator[None, None, None]:
        """Cancel a call when the browser closes the connection during the block."""
        over = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(call, over), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            call.cancel()  # has no effect on a call that has ended

    def _watch(self, call: Any, over: threading.Event) -> None:
        with suppress(OSError, ValueError):  # the connection is closed
            while not over.is_set():
                readable, _, _ = select.select([self.connection], (), (), POLL_SECONDS)
                if readable and not over.is_set():
                    if not self.connection.recv(1, socket.MSG_PEEK):
                        call.cancel()
                    return

    def _send_failure(self, error: Any) -> None:
        if isinstance(error, grpc.FutureCancelledError):
            self.close_connection = True  # the browser has gone
            return
        trailers = error.trailing_metadata() or ()
        retry = retry_after(trailers)
        self._send_error(error.code(), error.details() or "", trailers, {"Retry-After": retry} if retry else {})

    def _send_error(
        self,
        code: grpc.StatusCode,
        message: str,
        trailers: Trailers = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        body = error_bytes(error_json(code, message, trailers))
        self._send(connect.HTTP_STATUS[code], {"Content-Type": connect.JSON, **(headers or {})}, body)

    def _send_health(self) -> None:
        try:
            status = str(self.server.client.health())
        except CamserveError:
            status = "NOT_SERVING"
        body = json.dumps({"status": status}).encode()
        self._send(200 if status == "SERVING" else 503, {"Content-Type": connect.JSON}, body)

    def _send_text(self, status: int, text: str) -> None:
        self._send(status, {"Content-Type": "text/plain; charset=utf-8"}, f"{text}\n".encode())

    def _send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self._start(status, {**headers, "Content-Length": str(len(body))})
        self.wfile.write(body)

    def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Cache-Control": "no-store", **headers, **connect.SECURITY_HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()

    def _send_chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def version_string(self) -> str:
        """Return a Server header without versions."""
        return "camserve"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- the base class's name
        """Do not log requests."""


def _lines(body: bytes) -> Iterator[bytes]:
    return (line for line in body.splitlines() if line.strip())


def _error_json(error: Any) -> Json:
    return error_json(error.code(), error.details() or "", error.trailing_metadata() or ())
