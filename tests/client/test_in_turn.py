"""Load balancing between several servers at one address; unhealthy servers get no calls."""

from __future__ import annotations

import asyncio
import socket
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
from camserve_server.app import reserved_port
from support import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

IMAGE = np.zeros((8, 8, 3), np.uint8)
HEALTHY, UNHEALTHY = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Server(explain_pb2_grpc.ExplainServiceServicer):
    """Server whose responses contain its name."""

    def __init__(self, name: str, port: int = 0) -> None:
        self.name, self.health = name, health.HealthServicer()
        self.grpc = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", int(bool(port)))])
        explain_pb2_grpc.add_ExplainServiceServicer_to_server(self, self.grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.grpc)
        self.port = self.grpc.add_insecure_port(f"127.0.0.1:{port}")
        self.health.set("", HEALTHY)
        self.grpc.start()

    def Explain(self, _request: object, _context: object) -> explain_pb2.ExplainResponse:  # noqa: N802 -- the RPC's name
        return explain_pb2.ExplainResponse(model=self.name)


@contextmanager
def servers() -> Iterator[list[Server]]:
    started = [Server("one"), Server("two")]
    try:
        yield started
    finally:
        for server in started:
            server.grpc.stop(None)


@pytest.fixture
def both() -> Iterator[list[Server]]:
    with servers() as started:
        yield started


def address(both: list[Server]) -> str:
    return "ipv4:" + ",".join(f"127.0.0.1:{server.port}" for server in both)


def count_calls(client: camserve.Client, calls: int = 20) -> Counter[str]:
    """Make calls; return the number of responses from each server."""
    return Counter(client.explain(IMAGE).model for _ in range(calls))


def wait_for_servers(client: camserve.Client, expected: set[str]) -> None:
    """Wait until exactly these servers respond: connections and health updates take time."""
    wait_until(lambda: set(count_calls(client, 4)) == expected)


def test_servers_get_the_same_number_of_calls(both: list[Server]) -> None:
    with camserve.Client(address(both)) as client:
        wait_for_servers(client, {"one", "two"})

        assert count_calls(client) == {"one": 10, "two": 10}


async def test_asynchronous_client_calls_all_servers(both: list[Server]) -> None:
    async with camserve.AsyncClient(address(both)) as client:
        names: set[str] = set()
        while names != {"one", "two"}:
            results = await asyncio.gather(*(client.explain(IMAGE) for _ in range(4)))
            names = {result.model for result in results}


def test_draining_server_gets_no_calls_until_it_is_healthy_again(both: list[Server]) -> None:
    with camserve.Client(address(both), retries=0) as client:
        wait_for_servers(client, {"one", "two"})

        both[0].health.set("", UNHEALTHY)
        wait_for_servers(client, {"two"})
        assert count_calls(client) == {"two": 20}

        both[0].health.set("", HEALTHY)
        wait_for_servers(client, {"one", "two"})


def test_stopped_server_fails_no_call_and_is_used_after_its_restart(both: list[Server]) -> None:
    with reserved_port.reserve("127.0.0.1:0") as held:  # nobody else gets the port while no server listens on it
        both[0].grpc.stop(None)
        both[0] = Server("one", int(held.rpartition(":")[2]))
        with camserve.Client(address(both)) as client:
            wait_for_servers(client, {"one", "two"})
            both[0].grpc.stop(None).wait()

            assert count_calls(client) == {"two": 20}

            both[0] = Server("one again", both[0].port)
            wait_for_servers(client, {"one again", "two"})


def test_name_stands_for_all_of_its_addresses(both: list[Server]) -> None:
    """`localhost` may have an address that no server listens on; calls go to the others."""
    assert socket.getaddrinfo("localhost", both[0].port)
    with camserve.Client(f"dns:///localhost:{both[0].port}") as client:
        assert count_calls(client) == {"one": 20}


def test_plain_address_does_not_use_health_checks(both: list[Server]) -> None:
    with camserve.Client(f"127.0.0.1:{both[0].port}") as client:
        both[0].health.set("", UNHEALTHY)

        assert count_calls(client) == {"one": 20}


def test_real_servers_share_calls_and_return_the_same_scores(tiny: str) -> None:
    import camserve_server  # noqa: PLC0415 -- the other tests of this folder need no torch

    net = tiny.partition("=")[2]
    photo = np.random.default_rng(0).integers(0, 256, (80, 80, 3), np.uint8)
    with (
        camserve_server.running(f"one={net}") as first,
        camserve_server.running(f"two={net}") as second,
        camserve.Client(f"ipv4:{first},{second}") as client,
    ):
        wait_for_servers(client, {"one", "two"})
        results = [client.explain(photo) for _ in range(8)]
        streamed = list(client.explain_many([photo] * 4))

    assert Counter(result.model for result in results) == {"one": 4, "two": 4}
    scores = [result.explanations[0].score for result in results]
    assert max(scores) - min(scores) <= 1e-5 * abs(scores[0])
    assert len({result.model for result in streamed}) == 1  # a stream is one call
