"""The HTTP application: the RPCs, the page and the health check."""

from collections.abc import Iterator
from functools import partial
from importlib import resources
from typing import Any, cast

import grpc
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from camserve.web import assets, connect
from camserve.web.connect import error_json
from camserve_server.api.grpc_server import Border, Health
from camserve_server.api.http import endpoints
from camserve_server.api.http.loops import run_on
from camserve_server.api.http.origins import OriginCheck
from camserve_server.api.inprocess import services_with


def build(border: Border, health: Health) -> Starlette:
    """Return the application.

    Args:
        border: parts of the server that its protocols share.
        health: health of the server.
    """
    app = Starlette(
        routes=[
            *endpoints.routes(border, services_with(border.state)),
            Route("/health", partial(_health, border, health)),
            *_pages(),
        ],
        middleware=[Middleware(cast("Any", OriginCheck), border.settings)],
        exception_handlers={404: _not_found},
    )
    app.router.redirect_slashes = False
    return app


def _pages() -> Iterator[Route]:
    """Yield the routes of the page's files and of the OpenAPI document, which are served from memory."""
    document = resources.files(__package__).joinpath("openapi.json").read_bytes()
    for path, asset in {**assets.load(), "openapi.json": assets.Asset.of(document, connect.JSON)}.items():
        yield Route(f"/{path}", partial(_asset, asset))


async def _asset(asset: assets.Asset, request: Request) -> Response:
    if asset.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=asset.headers)
    body, headers = asset.encoded(request.headers.get("accept-encoding", ""))
    return Response(body, headers=headers)


async def _health(border: Border, health: Health, _request: Request) -> Response:
    """Return what the health check of gRPC says of the server as a whole, if the event loop of calls runs."""

    async def serving() -> bool:
        return health.serving

    status, code = ("SERVING", 200) if await run_on(border.loop, serving()) else ("NOT_SERVING", 503)
    return JSONResponse({"status": status}, code, {"cache-control": "no-store"})


async def _not_found(request: Request, _error: Exception) -> Response:
    if request.method == "POST":
        error = error_json(grpc.StatusCode.UNIMPLEMENTED, "there is no RPC at this path: see /openapi.json")
        return JSONResponse(error, 404)
    return PlainTextResponse("not found\n", 404)
