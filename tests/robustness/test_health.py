"""Health checks need no token, so a watcher must not delay the status for others or take all watches."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from camserve.v1 import explain_pb2, explain_pb2_grpc
from camserve_server.api import health
from robustness import http2_flood, nets
from support import PHOTOS, serving

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
WATCH = "grpc.health.v1.Health/Watch"


@pytest.fixture
async def served():
    """A server with only the health service: its servicer, its port and a stub."""
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
    """Watch over a connection that accepts no answers; return it once the server has tried to answer."""
    connection = http2_flood.Connection("127.0.0.1", port, http2_flood.NO_WINDOW)
    for _ in range(count):
        connection.send(WATCH, b"")
    await until(lambda: connection.statuses == count)  # headers need no window, and come with the first status
    return connection


@pytest.mark.parametrize("turns", [(SERVING,), (SERVING, NOT_SERVING)])
async def test_watcher_that_reads_nothing_delays_no_status(served, turns):
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


async def test_one_address_cannot_take_all_watches(served, monkeypatch):
    _, port, stub = served
    monkeypatch.setattr(health, "MAX_WATCHERS_PER_ADDRESS", 4)
    attacker = await stuck(port, 4)
    refused = stub.Watch(asked(), timeout=10)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await refused.read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await stub.Check(asked(), timeout=10)).status == NOT_SERVING

    monkeypatch.setattr(health, "address_of", lambda _peer: "another")
    _, first = await begun(stub)
    assert first == NOT_SERVING

    monkeypatch.setattr(health, "MAX_WATCHERS", 5)
    monkeypatch.setattr(health, "address_of", lambda _peer: "a third")
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.Watch(asked(), timeout=10).read()
    attacker.socket.close()


async def test_a_watch_for_a_name_that_is_long_or_a_field_that_is_not_known_is_refused(served):
    _, _, stub = served
    largest = asked("x" * (health.MAX_MESSAGE_BYTES - 3))
    _, first = await begun(stub, largest.service)
    assert (largest.ByteSize(), first) == (health.MAX_MESSAGE_BYTES, UNKNOWN)

    for question in (asked(largest.service + "x"), unknown_field(health.MAX_MESSAGE_BYTES)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Watch(question, timeout=10).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def unknown_field(size):
    return health_pb2.HealthCheckRequest.FromString(b"\x12" + bytes((size & 127 | 128, size >> 7)) + bytes(size))


async def test_a_watch_that_ends_makes_room_for_another(served, monkeypatch):
    servicer, _, stub = served
    monkeypatch.setattr(health, "MAX_WATCHERS_PER_ADDRESS", 1)
    for _ in range(3):
        call, _ = await begun(stub)
        call.cancel()
        await until(lambda: not servicer._watchers)


async def test_missing_service_is_unknown_until_it_exists(served):
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


def test_list_and_watch_need_no_token(tmp_path):
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


def test_watches_do_not_take_the_memory_that_there_is_for_all_messages():
    """A watch kept the memory that its message takes: those of large ones left none for anybody."""
    small = {"max_message_mib": 1, "max_queue_rows": 16}  # four messages of the largest size, and no more
    with (
        serving(models=(nets.TINY,), device="cpu", threads=1, **small) as one,
        grpc.insecure_channel(one.address) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        sizes = (*[2**19] * 8, *(2**power for power in range(18, 11, -1)))
        watches, codes = [], set()
        for size in sizes:  # one after the other: at once, some would find no room before they are refused
            watches.append(stub.Watch(asked("x" * size), timeout=60))
            codes.add(refusal(watches[-1]))
        photo = explain_pb2.ExplainRequest(image=PHOTOS["chelsea"].read_bytes())
        answer = explain_pb2_grpc.ExplainServiceStub(channel).Explain(photo, timeout=60)

    assert codes == {grpc.StatusCode.INVALID_ARGUMENT}
    assert answer.explanations


def refusal(watch):
    """Return the code with which a watch is refused; None if it is not."""
    try:
        next(watch)
    except grpc.RpcError as error:
        return error.code()
    return None
