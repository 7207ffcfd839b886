"""Connections that reach their age are replaced without a failed call; streams that are cut then lose no photo."""

import asyncio
import itertools

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import camserve
from camserve_server.api import rpc
from support import serving

PHOTO = np.random.default_rng(0).integers(0, 255, (32, 32, 3), np.uint8)
AGE = {"connection_age_seconds": 0.1}  # real timeout: connections are to reach it, and may do so at any moment
GRACE = {"connection_grace_seconds": 0.1}  # real timeout: calls are to be cut, and may be at any moment
PATIENT = camserve.Retry(attempts=10_000, first=0, longest=0)
"""However slow the machine is, some photo is answered before its connection is cut."""


@pytest.fixture(scope="module")
def serve(tiny):
    """Serve the tiny model with further settings, for the length of a block."""
    return lambda **settings: serving(models=(tiny,), device="cpu", threads=1, **AGE, **settings)


@pytest.fixture(scope="module")
def graceful(serve):
    """A server that ends connections by their age, and no call on them."""
    with serve(connection_grace_seconds=3600) as served:
        yield served.address


@pytest.fixture(scope="module")
def strict(serve):
    """A server that ends connections by their age, and soon after also the calls on them."""
    with serve(**GRACE) as served:
        yield served.address


@pytest.fixture
def connections(monkeypatch):
    """The client's end of each connection over which the server has received a call."""
    seen = set()
    monkeypatch.setattr(rpc, "address_of", lambda peer: seen.add(peer) or "caller")
    return seen


def test_no_call_of_a_client_fails_while_its_connections_age(graceful, connections):
    with camserve.Client(graceful, retries=0) as client:
        while len(connections) < 4:
            assert client.explain(PHOTO, overlay=None).predictions


async def test_no_concurrent_call_fails_while_the_connections_age(graceful, connections):
    async with camserve.AsyncClient(graceful, retries=0) as client, grpc.aio.insecure_channel(graceful) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        while len(connections) < 5:
            results = await asyncio.gather(*(client.explain(PHOTO, overlay=None) for _ in range(8)))
            assert all(result.predictions for result in results)

        assert not watch.done()  # a call that is older than its connection may be is not cut within the grace period
        watch.cancel()


async def test_call_is_cut_after_the_grace_period(strict):
    async with grpc.aio.insecure_channel(strict) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [reply async for reply in watch]

    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


def test_stream_that_is_cut_after_the_grace_period_loses_no_photo(strict, connections):
    photos = itertools.takewhile(lambda _: len(connections) < 4, itertools.repeat(PHOTO))
    with camserve.Client(strict, retries=PATIENT) as client:
        assert all(result.predictions for result in client.explain_many(photos, overlay=None, in_flight=4))

    assert len(connections) >= 4


async def test_stream_of_an_async_client_that_is_cut_loses_no_photo(strict, connections):
    photos = itertools.takewhile(lambda _: len(connections) < 4, itertools.repeat(PHOTO))
    async with camserve.AsyncClient(strict, retries=PATIENT) as client:
        assert all([result.predictions async for result in client.explain_many(photos, overlay=None, in_flight=4)])

    assert len(connections) >= 4
