"""HTTP of a server that starts and stops: refusals, accepted calls, and imports."""

import asyncio
from functools import partial

import pytest

import fork_server
from api.running_server import SETTINGS, request
from camserve_server.api import grpc_server
from camserve_server.app.server import serve as serve_here
from camserve_server.core import config
from http_calls import EXPLAIN, LIST, post
from http_calls import request as send
from support import wait_in_loop_until


class Running:
    """A server in the running event loop, from the opening of its HTTP port on."""

    def __init__(self, **settings):
        loop = asyncio.get_running_loop()
        self.stop, self.opened, self.ready = grpc_server.Stop(), loop.create_future(), loop.create_future()
        chosen = config.load(flags={**SETTINGS, "http_address": "0", **settings}, environment={})
        started = lambda _port, pipeline: self.ready.set_result(pipeline)  # noqa: E731
        self.task = asyncio.create_task(serve_here(chosen, self.stop, started, http_ready=self.opened.set_result))

    async def send(self, function, *args, **headers):
        return await asyncio.to_thread(partial(function, await self.opened, *args, **headers))


async def test_server_that_starts_serves_the_page_and_refuses_calls(model):
    import camserve_nets  # noqa: PLC0415 -- the fixture makes it importable

    camserve_nets.GATE.clear()
    running = Running(models=(model.replace(":tiny", ":gated"),))
    page = await running.send(send, "GET", "/")
    health = await running.send(send, "GET", "/health")
    refused = await running.send(post, LIST, {})
    camserve_nets.GATE.set()
    await running.ready
    answered = await running.send(post, LIST, {})
    warm = await running.send(send, "GET", "/health")
    running.stop.requested.set()
    await running.task

    assert page.status == 200
    assert (health.status, health.json) == (503, {"status": "NOT_SERVING"})
    assert (refused.status, refused.json["code"], refused.headers["retry-after"]) == (503, "unavailable", "1")
    assert refused.detail("ErrorInfo")["reason"] == "STARTING"
    assert answered.status == 200
    assert (warm.status, warm.json) == (200, {"status": "SERVING"})


async def test_server_that_stops_finishes_accepted_calls_and_refuses_others(model):
    running = Running(models=(model,))
    pipeline = await running.ready
    pipeline.batcher.pause()
    accepted = asyncio.create_task(running.send(post, EXPLAIN, request()))
    await wait_in_loop_until(lambda: pipeline.batcher.waiting == 1)
    running.stop.requested.set()
    while (await running.send(send, "GET", "/health")).status != 503:
        pass
    refused = await running.send(post, EXPLAIN, request())
    pipeline.batcher.resume()
    answered = await accepted
    await running.task

    assert answered.status == 200
    assert refused.detail("ErrorInfo")["reason"] == "DRAINING"
    assert running.stop.unanswered == 0
    with pytest.raises(ConnectionRefusedError):
        await running.send(send, "GET", "/health")


async def test_address_in_use_is_an_error(model):
    running = Running(models=(model,))
    port = await running.opened
    with pytest.raises(config.ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
        await Running(models=(model,), http_address=str(port)).task
    running.stop.requested.set()
    await running.task


def test_server_without_http_imports_no_http_library():
    code = "import sys, camserve_server.app.server as _; print({'starlette', 'uvicorn'} & set(sys.modules))"

    assert fork_server.run(code).stdout == "set()\n"
