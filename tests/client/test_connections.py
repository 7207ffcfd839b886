"""Connections of a client: which one a call uses, and one to each process of a server that has several."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc
import pytest

import camserve
import fork_server
from camserve._transport import connections as transport_connections
from camserve._transport.access import AccessOptions
from camserve._transport.connections import (
    MAX_PROCESSES,
    TRIES_PER_PROCESS,
    TRY_INTERVAL,
    Connection,
    ConnectionPool,
    least_loaded,
    process_count,
)
from camserve._transport.settings import ClientOptions, make_settings
from client.processes import Process, open_connections
from support import wait_in_loop_until, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

BOTH = {"0/2", "1/2"}
GONE = camserve.Unavailable("gone")
IMAGES = [bytes([number]) for number in range(64)]

# ------------------------------------------------------------------------------------------------- the choice of one


def loaded(*loads: int) -> list[Connection[str]]:
    """Return connections with a number of calls in flight each. Their last calls were in their order."""
    return [Connection(str(place), in_flight=load, last_used=place + 1) for place, load in enumerate(loads)]


def test_connection_with_the_fewest_calls_is_chosen() -> None:
    assert least_loaded(loaded(3, 1, 2), 0).stubs == "1"


def test_connection_that_was_used_the_longest_ago_is_chosen_of_equals() -> None:
    connections = loaded(2, 1, 1)
    assert least_loaded(connections, 0).stubs == "1"

    connections[1].last_used = 9
    assert least_loaded(connections, 0).stubs == "2"


def test_failed_connection_is_chosen_last_until_its_penalty_ends() -> None:
    connections = loaded(5, 0)
    connections[1].failed_until = 10

    assert least_loaded(connections, 9).stubs == "0"
    assert least_loaded(connections, 10).stubs == "1"
    connections[0].failed_until = 20
    assert least_loaded(connections, 9).stubs == "1"


@pytest.mark.parametrize("process", ["", "2/2", "3/2", "1", "-1/2", "0/0", "a/b", "0/2 ", "0/99999", "٠/٢"])
def test_invalid_process_counts_as_a_single_one(process: str) -> None:
    assert process_count(process) == 1


# -------------------------------------------------------------------------------------------------- the pool, alone


class Pool:
    """A pool whose channels are numbers, with a stopped clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int | None = None, **options: Any) -> None:
        self.opened = 0
        self.now = 1000.0
        monkeypatch.setattr(transport_connections, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.pool = ConnectionPool(self.open, count, **options)

    def open(self) -> int:
        self.opened += 1
        return self.opened

    def call(self, process: str) -> int:
        """Make a call that a process answers; return the number of the connection that it used."""
        connection = self.pool.acquire()
        self.report(connection, process)
        self.pool.release(connection)
        return connection.stubs

    def report(self, connection: Connection[int], process: str) -> None:
        report = self.pool.reporter(connection)
        assert report
        report((("camserve-process", process),) if process else ())

    def processes(self) -> list[str]:
        return [connection.process for connection in self.pool._connections]


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    return Pool(monkeypatch)


def test_server_of_a_single_process_gets_one_connection(pool: Pool) -> None:
    assert {pool.call("") for _ in range(20)} == {1}
    assert pool.opened == 1


def test_connections_are_opened_until_each_process_has_one(pool: Pool) -> None:
    for process in ("0/3", "0/3", "2/3", "2/3", "1/3"):
        pool.call(process)

    assert sorted(pool.processes()) == ["0/3", "1/3", "2/3"]
    assert pool.opened == 5


def test_duplicate_connection_is_closed_after_its_last_call(pool: Pool) -> None:
    pool.call("0/2")
    new, old = pool.pool.acquire(), pool.pool.acquire()
    assert (new.stubs, old.stubs) == (2, 1)

    pool.report(new, "0/2")
    pool.pool.hold(new)
    assert pool.pool.release(new) is None
    assert pool.pool.release(new) == 2
    assert pool.pool.release(old) is None
    assert 2 not in {pool.call("1/2") for _ in range(9)}


def test_number_of_tries_is_limited_and_grows_with_time(pool: Pool) -> None:
    for _ in range(99):
        pool.call("0/2")
    assert pool.opened == 1 + 2 * TRIES_PER_PROCESS

    pool.now += 2.5 * TRY_INTERVAL
    for _ in range(99):
        pool.call("0/2")
    assert pool.opened == 3 + 2 * TRIES_PER_PROCESS
    assert pool.processes() == ["0/2"]


def test_connection_that_reaches_another_process_is_replaced(pool: Pool) -> None:
    """As when the connection is closed at its maximum age, and gRPC opens another one in the same channel."""
    pool.call("0/2")
    pool.call("1/2")
    moved = pool.pool.acquire()
    other = "1/2" if moved.process == "0/2" else "0/2"

    pool.report(moved, other)
    pool.pool.release(moved)
    pool.call("0/2" if other == "1/2" else "1/2")

    assert set(pool.processes()) == BOTH
    assert moved.retired
    assert pool.opened == 3


def test_restart_with_fewer_processes_closes_the_others(pool: Pool) -> None:
    for number in range(4):
        pool.call(f"{number}/4")
    for number in range(9):
        pool.call(f"{number % 2}/2")

    assert sorted(pool.processes()) == ["0/2", "1/2"]


def test_call_that_finds_no_server_keeps_the_number_of_connections(pool: Pool) -> None:
    for process in ("0/2", "1/2", "", ""):
        pool.call(process)

    assert sorted(pool.processes()) == ["0/2", "1/2"]


def test_failed_connection_may_have_left_its_process_to_another(pool: Pool) -> None:
    for number in range(3):
        pool.call(f"{number}/3")
    failed, moved, _ = (pool.pool.acquire() for _ in range(3))

    pool.pool.report_failure(failed, GONE)
    pool.report(moved, "0/3")
    assert not moved.retired
    pool.report(failed, "1/3")
    assert not failed.retired
    assert pool.opened == 3


def test_hostile_number_of_processes_is_limited(pool: Pool) -> None:
    pool.call("0/9999")
    for _ in range(9):
        pool.call("0/999999999")

    assert pool.opened <= MAX_PROCESSES


def test_process_that_changes_with_every_reply_opens_few_connections(pool: Pool) -> None:
    """As with a proxy in between that sends each call to another process."""
    for number in range(99):
        pool.call(f"{number % 2}/2")

    assert pool.opened <= 1 + 2 * TRIES_PER_PROCESS


def test_several_servers_get_as_many_connections_as_one_has_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(monkeypatch, one_server=False)
    for process in ("0/2", "0/2", "", "1/2", "0/2"):
        pool.call(process)

    assert pool.opened == 2
    assert not pool.pool._retired


def test_failure_is_reported_with_the_presence_of_another_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(monkeypatch, 2).pool
    first = pool.acquire()
    assert not pool.report_failure(first, camserve.ResourceExhausted("full"))
    assert first.failed_until == -math.inf

    assert pool.report_failure(first, GONE)
    second = pool.acquire()
    assert second is not first
    assert pool.acquire() is second
    assert not pool.report_failure(second, GONE)


def test_closed_pool_opens_no_connection(pool: Pool) -> None:
    pool.call("0/2")
    new, old = pool.pool.acquire(), pool.pool.acquire()
    pool.report(new, "0/2")

    assert sorted(pool.pool.close()) == [1, 2, 3]
    assert pool.pool.reporter(old) is None
    assert pool.pool.release(new) is None
    assert pool.opened == 3


@pytest.mark.parametrize(
    ("address", "own_channel", "connections", "expected"),
    [
        ("localhost:1", False, None, None),
        ("localhost:1", False, 3, 3),
        ("localhost:1", True, None, 1),
        ("unix:/run/camserve", False, None, 1),
        ("unix:/run/camserve", False, 2, 2),
        ("dns:///camserve:1", False, None, None),
    ],
)
def test_number_of_connections_follows_from_the_options(
    address: str, own_channel: bool, connections: int | None, expected: int | None
) -> None:
    options = ClientOptions(30, 4, None, None, own_channel, connections)

    assert make_settings(address, options, AccessOptions()).connections == expected


@pytest.mark.parametrize("connections", [0, -1])
def test_number_of_connections_below_1_is_refused(connect: Any, connections: int) -> None:
    with pytest.raises(camserve.InvalidArgument, match=f"connections must be at least 1, not {connections}"):
        connect("a:1", connections=connections)


def test_connections_and_a_channel_contradict_each_other(connect: Any) -> None:
    with pytest.raises(camserve.InvalidArgument, match="pass either connections or a channel"):
        connect("a:1", connections=1, channel=SimpleNamespace())


# ------------------------------------------------------------------------------------------ clients and real servers


@contextmanager
def serving(*names: str) -> Iterator[list[Process]]:
    """Start processes on one port."""
    processes = [Process(names[0])]
    try:
        processes += [Process(name, processes[0].port) for name in names[1:]]
        yield processes
    finally:
        for process in processes:
            process.stop()


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Process]]:
    """Two processes on one port. A client that has not reached one of them tries again soon."""
    monkeypatch.setattr(transport_connections, "TRY_INTERVAL", 0.01)  # real timeout: calls only try again earlier
    with serving("0/2", "1/2") as started:
        yield started


@pytest.fixture
async def threads() -> AsyncIterator[None]:
    """Let 40 calls of a synchronous client run at once."""
    with ThreadPoolExecutor(40) as pool:
        asyncio.get_running_loop().set_default_executor(pool)
        yield


async def explain(client: Any, number: int = 1) -> str:
    return (await client.explain(bytes([number]))).model


async def reach_both(client: Any) -> None:
    """Make calls until the client has a connection to each process."""
    inner = getattr(client, "client", client)
    while {connection.process for connection in inner._pool._connections} != BOTH:
        await explain(client)


@pytest.mark.usefixtures("threads")
async def test_calls_under_way_are_shared_by_both_processes(connect: Any, processes: list[Process]) -> None:
    client = connect(processes[0].address)
    await reach_both(client)
    await wait_in_loop_until(lambda: open_connections(processes[0].port) == 2)  # duplicates are closed
    for process in processes:
        process.hold.clear()

    calls = [asyncio.create_task(explain(client)) for _ in range(32)]
    await wait_in_loop_until(lambda: sum(process.in_flight for process in processes) == 32)
    assert [process.in_flight for process in processes] == [16, 16]
    for process in processes:
        process.hold.set()
    assert Counter([await call for call in calls]) == {"0/2": 16, "1/2": 16}


async def test_images_of_one_iterable_are_shared_by_both_processes(connect: Any, processes: list[Process]) -> None:
    client = connect(processes[0].address)
    await reach_both(client)
    before = [process.answered for process in processes]

    results = [result async for result in client.explain_many(IMAGES)]

    assert [result.predictions[0].class_index for result in results] == list(range(64))
    assert Counter(result.model for result in results).keys() == BOTH
    assert sum(process.answered for process in processes) == sum(before) + 64
    assert [len(process.streams) for process in processes] == [1, 1]


async def test_streams_find_the_second_process_by_themselves(connect: Any, processes: list[Process]) -> None:
    client = connect(processes[0].address)
    models: set[str] = set()
    numbers = []

    def images() -> Iterator[bytes]:
        while models != BOTH:
            numbers.append(len(numbers) % 256)
            yield bytes([numbers[-1]])

    classes = []
    async for result in client.explain_many(images(), in_flight=4):
        models.add(result.model)
        classes.append(result.predictions[0].class_index)

    assert classes == numbers
    await wait_in_loop_until(lambda: all(not context.is_active() for each in processes for context in each.streams))
    await wait_in_loop_until(lambda: open_connections(processes[0].port) == 2)


async def test_exact_number_of_connections_is_opened(connect: Any, processes: list[Process]) -> None:
    client = connect(processes[0].address, connections=3)
    for _ in range(12):
        await explain(client)

    assert len(processes[0].connections | processes[1].connections) == 3
    assert open_connections(processes[0].port) == 3


async def test_server_of_one_process_gets_one_connection(connect: Any) -> None:
    with serving("") as (process,):
        client = connect(process.address)
        await asyncio.gather(*(explain(client) for _ in range(32)))
        _ = [result async for result in client.explain_many(IMAGES)]

        assert len(process.connections) == 1
        assert open_connections(process.port) == 1


def test_clients_of_one_program_are_spread_over_the_processes(processes: list[Process]) -> None:
    clients = [camserve.Client(processes[0].address, connections=1) for _ in range(64)]
    try:
        assert {client.explain(b"1").model for client in clients} == BOTH
        assert len(processes[0].connections) + len(processes[1].connections) == 64
    finally:
        for client in clients:
            client.close()


def test_many_threads_share_a_client_while_connections_are_opened_and_closed(processes: list[Process]) -> None:
    with camserve.Client(processes[0].address) as client, ThreadPoolExecutor(16) as threads:
        numbers = [result.predictions[0].class_index for result in threads.map(client.explain, IMAGES * 4)]
        assert numbers == list(range(64)) * 4
        wait_until(lambda: list(threads.map(client.explain, IMAGES)) and open_connections(processes[0].port) == 2)

        pool = client._pool
        wait_until(lambda: not pool._retired)
        assert [connection.in_flight for connection in pool._connections] == [0, 0]


async def test_call_refused_by_one_process_is_sent_to_the_other(connect: Any, processes: list[Process]) -> None:
    client = connect(processes[0].address, retries=camserve.Retry(attempts=1, first=3600))
    await reach_both(client)

    def refuse(_request: Any, context: Any) -> Any:
        context.abort(grpc.StatusCode.UNAVAILABLE, "draining")

    processes[0].answer = refuse  # type: ignore[method-assign]

    assert {await explain(client) for _ in range(8)} == {"1/2"}


# ------------------------------------------------------------------------------------------------ a process is killed

PROGRAM = """
import sys, time
sys.path.insert(0, sys.argv[3])
from client.processes import Process
Process(sys.argv[1], int(sys.argv[2]))
print(flush=True)
time.sleep(3600)
"""


def start_process(name: str, port: int, folder: Any) -> fork_server.Process:
    """Start a server process of its own, and wait until it listens."""
    out = folder / "out"
    with out.open("w") as file:
        process = fork_server.start(PROGRAM, name, port, fork_server.TESTS, stdout=file)
    wait_until(out.read_text)
    return process


@pytest.mark.usefixtures("threads")
async def test_killed_process_fails_no_call_and_no_image(
    connect: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(transport_connections, "TRY_INTERVAL", 0.01)  # real timeout: calls only try again earlier
    monkeypatch.setattr(transport_connections, "FAILURE_PENALTY", 0.1)
    models: list[str] = []
    stop = threading.Event()

    async def call() -> None:
        while not stop.is_set():
            models.append(await explain(client))

    async def stream() -> list[int]:
        endless = (image for _ in iter(stop.is_set, True) for image in IMAGES)
        return [result.predictions[0].class_index async for result in client.explain_many(endless)]

    with serving("0/2") as (survivor,):
        client = connect(survivor.address)
        killed = start_process("1/2", survivor.port, tmp_path)
        calls = [asyncio.create_task(call()) for _ in range(8)]
        streams = [asyncio.create_task(stream()) for _ in range(2)]
        await wait_in_loop_until(lambda: set(models[-100:]) == BOTH)
        killed.kill()
        killed.wait()
        count = len(models)
        await wait_in_loop_until(lambda: len(models) > count + 100)
        replacement = start_process("1/2", survivor.port, tmp_path)
        await wait_in_loop_until(lambda: set(models[-20:]) == BOTH)
        stop.set()
        await asyncio.gather(*calls)
        for classes in await asyncio.gather(*streams):
            assert classes == [number % len(IMAGES) for number in range(len(classes))]
        replacement.kill()
        replacement.wait()
