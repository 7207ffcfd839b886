"""Clients whose connections reach their age, and the grace period after it, see no failure."""

import asyncio
import itertools

import numpy as np
import pytest

import camserve
from camserve_server.api import rpc
from support import serving

PHOTO = np.random.default_rng(0).integers(0, 255, (32, 32, 3), np.uint8)


@pytest.fixture(scope="module")
def address(tiny):
    """A server that ends a connection after 0.3 s, and the calls on it 0.3 s later."""
    ages = {"connection_age_seconds": 0.3, "connection_grace_seconds": 0.3}
    with serving(models=(tiny,), device="cpu", threads=1, **ages) as served:
        yield served.address


@pytest.fixture
def connections(monkeypatch):
    """The client's end of each connection over which the server has received a call."""
    seen = set()
    monkeypatch.setattr(rpc, "address_of", lambda peer: seen.add(peer) or "caller")
    return seen


def test_calls_of_a_client_succeed_while_its_connections_age(address, connections):
    with camserve.Client(address) as client:
        while len(connections) < 4:
            assert client.explain(PHOTO, overlay=None).predictions


async def test_concurrent_calls_of_an_async_client_succeed_while_its_connections_age(address, connections):
    async with camserve.AsyncClient(address) as client:
        while len(connections) < 4:
            results = await asyncio.gather(*(client.explain(PHOTO, overlay=None) for _ in range(8)))
            assert all(result.predictions for result in results)


def test_stream_that_is_cut_after_the_grace_period_loses_no_photo(address, connections):
    photos = itertools.takewhile(lambda _: len(connections) < 4, itertools.repeat(PHOTO))
    with camserve.Client(address) as client:
        assert all(result.predictions for result in client.explain_many(photos, overlay=None, in_flight=4))

    assert len(connections) == 4


async def test_stream_of_an_async_client_that_is_cut_loses_no_photo(address, connections):
    photos = itertools.takewhile(lambda _: len(connections) < 4, itertools.repeat(PHOTO))
    async with camserve.AsyncClient(address) as client:
        assert all([result.predictions async for result in client.explain_many(photos, overlay=None, in_flight=4)])

    assert len(connections) == 4
