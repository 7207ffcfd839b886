"""Health checks, which need no token: whoever watches cannot hold the status back from others, or take all the room."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from camserve_server import health
from robustness import flood_it, nets
from support import serving

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
WATCH = "grpc.health.v1.Health/Watch"


@pytest.fixture
async def served():
    """A server that has health and nothing else: its servicer, its port and a stub."""
    server, servicer = grpc.aio.server(), health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    servicer.set({"": NOT_SERVING, "liveness": SERVING})
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield servicer, port, health_pb2_grpc.HealthStub(channel)
    await server.stop(None)


def asked(service=""):
    return health_pb2.HealthCheckRequest(service=service)


async def begun(stub, service=""):
    """Watch, and return the call and its first status."""
    call = stub.Watch(asked(service), timeout=30)
    return call, (await call.read()).status


async def until(there):
    async with asyncio.timeout(20):
        while not there():  # noqa: ASYNC110 -- of what another thread, or gRPC, counts
            await asyncio.sleep(0.01)


async def stuck(port, count=1):
    """Watch over a connection that takes no answers; return it once the server has tried to answer."""
    connection = flood_it.Connection("127.0.0.1", port, flood_it.NO_WINDOW)
    for _ in range(count):
        connection.send(WATCH, b"")
    await until(lambda: connection.statuses == count)  # headers need no window, and come with the first status
    return connection


@pytest.mark.parametrize("turns", [(SERVING,), (SERVING, NOT_SERVING)])
async def test_a_watcher_that_reads_nothing_holds_back_no_status(served, turns):
    servicer, port, stub = served
    attacker = await stuck(port)
    watching, first = await begun(stub)
    seen = [first]
    for status in turns:
        servicer.set({"": status})
        seen.append((await watching.read()).status)
        assert (await stub.Check(asked(), timeout=10)).status == status
    attacker.socket.close()

    assert seen == [NOT_SERVING, *turns]


async def test_a_watcher_that_falls_behind_gets_the_latest_status(served):
    servicer, _, stub = served
    watching, _ = await begun(stub)
    for status in (SERVING, NOT_SERVING, SERVING):  # in one turn of the event loop
        servicer.set({"": status})

    assert (await watching.read()).status == SERVING


async def test_one_address_takes_some_of_the_watches_and_leaves_the_others(served, monkeypatch):
    _, port, stub = served
    monkeypatch.setattr(health, "WATCHERS_OF_ONE", 4)
    attacker = await stuck(port, 4)
    refused = stub.Watch(asked(), timeout=10)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await refused.read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await stub.Check(asked(), timeout=10)).status == NOT_SERVING

    monkeypatch.setattr(health, "address_of", lambda _peer: "another")
    _, first = await begun(stub)
    assert first == NOT_SERVING

    monkeypatch.setattr(health, "WATCHERS", 5)
    monkeypatch.setattr(health, "address_of", lambda _peer: "a third")
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.Watch(asked(), timeout=10).read()
    attacker.socket.close()


async def test_a_watch_that_ends_makes_room_for_another(served, monkeypatch):
    servicer, _, stub = served
    monkeypatch.setattr(health, "WATCHERS_OF_ONE", 1)
    for _ in range(3):
        call, _ = await begun(stub)
        call.cancel()
        await until(lambda: not servicer._watchers)


async def test_a_service_that_is_not_there_is_unknown_until_it_is(served):
    servicer, _, stub = served
    call, first = await begun(stub, "later")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(asked("later"), timeout=10)
    servicer.set({"later": SERVING})

    assert (first, (await call.read()).status) == (UNKNOWN, SERVING)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_list_returns_the_status_of_every_service(served):
    _, _, stub = served
    listed = await stub.List(health_pb2.HealthListRequest(), timeout=10)

    assert {name: one.status for name, one in listed.statuses.items()} == {"": NOT_SERVING, "liveness": SERVING}


def test_a_server_lists_its_services_and_watches_to_who_has_no_token(tmp_path):
    (tmp_path / "tokens").write_text("")
    with (
        serving(models=(nets.TINY,), device="cpu", threads=1, tokens_file=str(tmp_path / "tokens")) as one,
        grpc.insecure_channel(one.address) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        listed = stub.List(health_pb2.HealthListRequest(), timeout=10).statuses
        watched = next(iter(stub.Watch(asked(), timeout=10))).status

    assert {one.status for one in listed.values()} == {SERVING}
    assert {"", "liveness", "camserve.v1.ExplainService"} <= set(listed)
    assert watched == SERVING
