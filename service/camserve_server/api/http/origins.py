"""Checks of the headers Host and Origin, CORS, and the headers of every response.

A page of another origin can send requests to a server on the visitor's machine or network. The checks refuse them: by
the header Origin, and, where the page's own host name was made to resolve to this server (DNS rebinding), by Host
(`api/hosts.py`).
"""

from email.utils import formatdate

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from camserve.web import connect
from camserve_server.api.hosts import Hosts
from camserve_server.core.config import Settings

HEADER_OVERHEAD = 32  # bytes that each header counts beyond its own, as in HTTP/2
ALLOWED_HEADERS = (
    "authorization, content-type, connect-protocol-version, connect-timeout-ms, x-request-id, traceparent, tracestate"
)
EXPOSED_HEADERS = "camserve-process, retry-after, x-request-id"
PREFLIGHT_SECONDS = "3600"  # seconds for which a browser remembers the answer to a preflight request


class OriginCheck:
    """ASGI middleware that refuses requests for other hosts and from other origins.

    Args:
        app: the application.
        settings: settings of the server.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._origins = frozenset(settings.http_origins)
        self._hosts = Hosts(settings.http_address, settings.http_origins, tls=bool(settings.tls_cert))
        self._max_header_bytes = settings.max_metadata_kib * 2**10

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        headers = Headers(scope=scope)
        origin = headers.get("origin", "")
        response = self._refusal(scope, headers) or self._preflight(scope, headers)
        await (response or self._app)(scope, receive, self._with_headers(send, origin, close=response is not None))

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        if sum(len(name) + len(value) + HEADER_OVERHEAD for name, value in scope["headers"]) > self._max_header_bytes:
            return _plain(f"the headers have more than {self._max_header_bytes:,} bytes, which is the limit", 431)
        if "content-length" in headers and "transfer-encoding" in headers:
            return _plain("a request has either Content-Length or Transfer-Encoding", 400)
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._hosts.allow(host):
            return _plain("the header Host does not name this server: see http_origins", 403)
        if origin is not None and not (origin in self._origins or origin.partition("://")[2] == host):
            return _plain("pages of this origin may not call this server: see http_origins", 403)
        return None

    def _preflight(self, scope: Scope, headers: Headers) -> Response | None:
        if scope["method"] != "OPTIONS" or headers.get("origin") not in self._origins:
            return None
        granted = {
            "access-control-allow-methods": "GET, POST",
            "access-control-allow-headers": ALLOWED_HEADERS,
            "access-control-max-age": PREFLIGHT_SECONDS,
        }
        return Response(status_code=204, headers=granted)

    def _with_headers(self, send: Send, origin: str, *, close: bool) -> Send:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=message["headers"])
                headers.update(connect.SECURITY_HEADERS)
                headers["date"] = formatdate(usegmt=True)
                if close:
                    headers["connection"] = "close"
                if self._origins:
                    headers.add_vary_header("origin")
                if origin in self._origins:
                    headers["access-control-allow-origin"] = origin
                    headers["access-control-expose-headers"] = EXPOSED_HEADERS
                message["headers"] = headers.raw
            await send(message)

        return send_with_headers


def _plain(text: str, status: int) -> Response:
    return PlainTextResponse(f"{text}\n", status)
