"""Several servers behind one address: asked in turn, and left out while they take no requests."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

import camserve
from camserve.v1 import explain_pb2, explain_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator

IMAGE = np.zeros((8, 8, 3), np.uint8)
WELL, AWAY = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Server(explain_pb2_grpc.ExplainServiceServicer):
    """Says in each answer which server it is."""

    def __init__(self, name: str, port: int = 0) -> None:
        self.name, self.health = name, health.HealthServicer()
        self.grpc = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
        explain_pb2_grpc.add_ExplainServiceServicer_to_server(self, self.grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.grpc)
        self.port = self.grpc.add_insecure_port(f"127.0.0.1:{port}")
        self.health.set("", WELL)
        self.grpc.start()

    def Explain(self, _request: object, _context: object) -> explain_pb2.ExplainResponse:  # noqa: N802 -- the RPC's name
        return explain_pb2.ExplainResponse(model=self.name)


@contextmanager
def servers() -> Iterator[list[Server]]:
    started = [Server("one"), Server("two")]
    try:
        yield started
    finally:
        for each in started:
            each.grpc.stop(None)


@pytest.fixture
def both() -> Iterator[list[Server]]:
    with servers() as started:
        yield started


def address(both: list[Server]) -> str:
    return "ipv4:" + ",".join(f"127.0.0.1:{each.port}" for each in both)


def answers(client: camserve.Client, number: int = 20) -> Counter[str]:
    return Counter(client.explain(IMAGE).model for _ in range(number))


def settled(client: camserve.Client, wanted: set[str]) -> None:
    """Wait until so many answer: connections are made, and health is told, in their own time."""
    while set(answers(client, 4)) != wanted:
        time.sleep(0.02)


def test_calls_are_shared_evenly(both: list[Server]) -> None:
    with camserve.Client(address(both)) as client:
        settled(client, {"one", "two"})

        assert answers(client) == {"one": 10, "two": 10}


async def test_the_asynchronous_client_shares_them_too(both: list[Server]) -> None:
    async with camserve.AsyncClient(address(both)) as client:
        found: set[str] = set()
        while found != {"one", "two"}:
            replies = await asyncio.gather(*(client.explain(IMAGE) for _ in range(4)))
            found = {one.model for one in replies}


def test_a_server_that_drains_is_left_out_before_it_refuses_anything_and_taken_back(both: list[Server]) -> None:
    with camserve.Client(address(both), retries=0) as client:
        settled(client, {"one", "two"})

        both[0].health.set("", AWAY)
        settled(client, {"two"})
        assert answers(client) == {"two": 20}

        both[0].health.set("", WELL)
        settled(client, {"one", "two"})


def test_a_server_that_dies_costs_no_request_and_is_found_again(both: list[Server]) -> None:
    with camserve.Client(address(both)) as client:
        settled(client, {"one", "two"})
        both[0].grpc.stop(None).wait()

        assert answers(client) == {"two": 20}

        both[0] = Server("one again", both[0].port)
        settled(client, {"one again", "two"})


def test_a_name_stands_for_all_of_its_addresses(both: list[Server]) -> None:
    """Of the loopback's name one address answers, here; whichever of them are there, calls go to those."""
    assert socket.getaddrinfo("localhost", both[0].port)
    with camserve.Client(f"dns:///localhost:{both[0].port}") as client:
        assert answers(client) == {"one": 20}


def test_a_plain_address_keeps_one_connection(both: list[Server]) -> None:
    with camserve.Client(f"127.0.0.1:{both[0].port}") as client:
        both[0].health.set("", AWAY)  # nobody asks

        assert answers(client) == {"one": 20}


def test_real_servers_share_the_work_and_say_the_same() -> None:
    import camserve_server  # noqa: PLC0415 -- the other tests of this folder need no torch

    net = "torchvision:squeezenet1_1?weights=none&size=64"
    photo = np.random.default_rng(0).integers(0, 256, (80, 80, 3), np.uint8)
    with (
        camserve_server.running(f"one={net}") as one,
        camserve_server.running(f"two={net}") as two,
        camserve.Client(f"ipv4:{one},{two}") as client,
    ):
        settled(client, {"one", "two"})
        found = [client.explain(photo) for _ in range(8)]
        streamed = list(client.explain_many([photo] * 4))

    assert Counter(one.model for one in found) == {"one": 4, "two": 4}
    scores = [one.explanations[0].score for one in found]
    assert max(scores) - min(scores) <= 1e-5 * abs(scores[0])
    assert len({one.model for one in streamed}) == 1  # a stream is one call
