"""Servers of the API's tests, with stubs of every service and the requests that the tests send."""

import asyncio
import contextlib
import io
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from PIL import Image

from camserve.v1 import explain_pb2, explain_pb2_grpc, models_pb2_grpc
from camserve_server.api import grpc_server
from camserve_server.app.server import serve
from camserve_server.core import config
from camserve_server.serving.explain import Pipeline

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
SETTINGS = {"isolation": "thread", "address": "127.0.0.1:0", "device": "cpu", "threads": 1, "drain_seconds": 60}

NETS = """
import threading
from collections import OrderedDict

import torch
from torch import nn

GATE = threading.Event()


def tiny():
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(
        stem=nn.Conv2d(3, 4, 3, 2, 1), act=nn.ReLU(), features=nn.Conv2d(4, 4, 3, 2, 1), pool=nn.AdaptiveAvgPool2d(1),
        flat=nn.Flatten(), head=nn.Linear(4, 5),
    ))


def gated():
    assert GATE.wait(60)
    return tiny()
"""
"""A user's module. Loading `gated` waits until the test sets GATE."""


def write_nets(folder):
    """Write the module and the labels into a folder; return the argument of `--model` for the tiny model."""
    (folder / "camserve_nets.py").write_text(NETS)
    (folder / "words.txt").write_text("ant\nbee\ncat\ndog\nelk\n")
    return f"tiny=camserve_nets:tiny?size=32&labels={folder / 'words.txt'}"


def picture(color="red"):
    out = io.BytesIO()
    Image.new("RGB", (40, 30), color).save(out, "PNG")
    return out.getvalue()


PHOTO = picture()


def request(**fields):
    return explain_pb2.ExplainRequest(**{"image": PHOTO, **fields})


def item(name, **fields):
    """Return a request of a stream, with its id."""
    return explain_pb2.ExplainStreamRequest(request_id=name, request=request(**fields))


def smoothgrad(samples):
    return explain_pb2.Method(name="smoothgrad", parameters={"samples": explain_pb2.Parameter(number=samples)})


@dataclass
class RunningServer:
    """A server and its stubs. `stop` and `task` are None if the server runs in a thread."""

    port: int
    pipeline: Pipeline
    channel: grpc.aio.Channel
    stop: grpc_server.Stop | None = None
    task: asyncio.Task | None = None

    def __post_init__(self):
        self.batcher = self.pipeline.batcher
        self.explain = explain_pb2_grpc.ExplainServiceStub(self.channel).Explain
        self.estimate_cost = explain_pb2_grpc.ExplainServiceStub(self.channel).EstimateCost
        self.stream = explain_pb2_grpc.ExplainServiceStub(self.channel).ExplainStream
        self.models = models_pb2_grpc.ModelServiceStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    async def status(self, service=""):
        return (await self.health.Check(health_pb2.HealthCheckRequest(service=service))).status


@contextlib.asynccontextmanager
async def run_server(**settings):
    """Start a server in the running event loop, and stop it at the end of the block."""
    ready, stop = asyncio.get_running_loop().create_future(), grpc_server.Stop()
    chosen = config.load(flags={**SETTINGS, **settings}, environment={})
    task = asyncio.create_task(serve(chosen, stop, lambda *result: ready.set_result(result)))
    await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task
    port, pipeline = ready.result()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield RunningServer(port, pipeline, channel, stop, task)
    finally:
        pipeline.batcher.resume()
        stop.requested.set()
        await task


@dataclass
class Refusal:
    """An error as a caller receives it, with its details decoded."""

    code: grpc.StatusCode
    message: str
    trailers: dict[str, Any]
    ids: int

    def detail(self, kind):
        """Return the only detail of this kind, or None."""
        status = status_pb2.Status.FromString(self.trailers["grpc-status-details-bin"])
        assert code_pb2.Code.Name(status.code) == self.code.name
        assert status.message == self.message
        details = [detail for detail in status.details if detail.Is(kind.DESCRIPTOR)]
        assert len(details) <= 1
        message = kind()
        return message if details and details[0].Unpack(message) else None


async def refusal_of(call):
    """Return the error that a call fails with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    trailers = caught.value.trailing_metadata()
    ids = sum(key == "x-request-id" for key, _ in trailers)
    return Refusal(caught.value.code(), caught.value.details(), dict(trailers), ids)
