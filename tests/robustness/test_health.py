"""Health checks need no token, so a watcher must not delay the status for others or take all watches."""

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from camserve.v1 import explain_pb2, explain_pb2_grpc
from camserve_server.api import health
from robustness import http2_flood, nets
from support import PHOTOS, serving, wait_in_loop_until

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


def request(service=""):
    return health_pb2.HealthCheckRequest(service=service)


async def start_watch(stub, service=""):
    """Start a watch; return the call and its first status."""
    call = stub.Watch(request(service))
    return call, (await call.read()).status


async def unread_watch(port, count=1):
    """Start watches on a connection with no receive window; return it once the server has tried to answer."""
    connection = http2_flood.Connection("127.0.0.1", port, http2_flood.NO_WINDOW)
    for _ in range(count):
        connection.send(WATCH, b"")
    await wait_in_loop_until(
        lambda: connection.statuses == count
    )  # headers need no window and are sent with the first status
    return connection


@pytest.mark.parametrize("turns", [(SERVING,), (SERVING, NOT_SERVING)])
async def test_watcher_that_reads_nothing_delays_no_status(served, turns):
    servicer, port, stub = served
    attacker = await unread_watch(port)
    watching, first = await start_watch(stub)
    statuses = [first]
    for status in turns:
        servicer.set({"": status})
        statuses.append((await watching.read()).status)
        assert (await stub.Check(request())).status == status
    attacker.socket.close()

    assert statuses == [NOT_SERVING, *turns]


async def test_slow_watcher_gets_the_latest_status(served):
    servicer, _, stub = served
    watching, _ = await start_watch(stub)
    for status in (SERVING, NOT_SERVING, SERVING):  # in one turn of the event loop
        servicer.set({"": status})

    assert (await watching.read()).status == SERVING


async def test_one_address_cannot_take_all_watches(served, monkeypatch):
    _, port, stub = served
    monkeypatch.setattr(health, "MAX_WATCHERS_PER_ADDRESS", 4)
    attacker = await unread_watch(port, 4)
    refused = stub.Watch(request())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await refused.read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await stub.Check(request())).status == NOT_SERVING

    monkeypatch.setattr(health, "address_of", lambda _peer: "another")
    _, first = await start_watch(stub)
    assert first == NOT_SERVING

    monkeypatch.setattr(health, "MAX_WATCHERS", 5)
    monkeypatch.setattr(health, "address_of", lambda _peer: "a third")
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.Watch(request()).read()
    attacker.socket.close()


async def test_watch_with_a_long_name_or_unknown_field_is_refused(served):
    _, _, stub = served
    largest = request("x" * (health.MAX_MESSAGE_BYTES - 3))
    _, first = await start_watch(stub, largest.service)
    assert (largest.ByteSize(), first) == (health.MAX_MESSAGE_BYTES, UNKNOWN)

    for message in (request(largest.service + "x"), unknown_field(health.MAX_MESSAGE_BYTES)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Watch(message).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def unknown_field(size):
    return health_pb2.HealthCheckRequest.FromString(b"\x12" + bytes((size & 127 | 128, size >> 7)) + bytes(size))


async def test_ended_watch_makes_room_for_another(served, monkeypatch):
    servicer, _, stub = served
    monkeypatch.setattr(health, "MAX_WATCHERS_PER_ADDRESS", 1)
    for _ in range(3):
        call, _ = await start_watch(stub)
        call.cancel()
        await wait_in_loop_until(lambda: not servicer._watchers)


async def test_missing_service_is_unknown_until_it_exists(served):
    servicer, _, stub = served
    call, first = await start_watch(stub, "later")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(request("later"))
    servicer.set({"later": SERVING})

    assert (first, (await call.read()).status) == (UNKNOWN, SERVING)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_list_returns_the_status_of_every_service(served):
    _, _, stub = served
    listed = await stub.List(health_pb2.HealthListRequest())

    assert {name: reply.status for name, reply in listed.statuses.items()} == {"": NOT_SERVING, "liveness": SERVING}


def test_list_and_watch_need_no_token(tmp_path):
    (tmp_path / "tokens").write_text("")
    with (
        serving(models=(nets.TINY,), device="cpu", threads=1, tokens_file=str(tmp_path / "tokens")) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        listed = stub.List(health_pb2.HealthListRequest()).statuses
        watched_status = next(iter(stub.Watch(request()))).status

    assert {reply.status for reply in listed.values()} == {SERVING}
    assert {"", "liveness", "camserve.v1.ExplainService"} <= set(listed)
    assert watched_status == SERVING


def test_watches_do_not_use_up_the_memory_for_messages():
    """A watch once kept the memory of its message, so that large ones left none for other calls."""
    small = {"max_message_mib": 1, "max_queue_rows": 16}  # memory for four messages of the largest size
    with (
        serving(models=(nets.TINY,), device="cpu", threads=1, **small) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        sizes = (*[2**19] * 8, *(2**power for power in range(18, 11, -1)))
        watches, codes = [], set()
        for size in sizes:  # one by one: at once, some would be refused for lack of memory
            watches.append(stub.Watch(request("x" * size)))
            codes.add(refusal(watches[-1]))
        photo = explain_pb2.ExplainRequest(image=PHOTOS["chelsea"].read_bytes())
        answer = explain_pb2_grpc.ExplainServiceStub(channel).Explain(photo)

    assert codes == {grpc.StatusCode.INVALID_ARGUMENT}
    assert answer.explanations


def refusal(watch):
    """Return the error code of a watch, or None if it is accepted."""
    try:
        next(watch)
    except grpc.RpcError as error:
        return error.code()
    return None
