"""The supervisor of several processes, with small programs in place of servers: they import and load nothing."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from camserve_server.app import server_process, supervisor, supervisor_link
from camserve_server.app.reserved_port import reserve
from camserve_server.app.supervisor import Supervisor
from camserve_server.core import config
from camserve_server.core.errors import ConfigError
from opened_ports import opened_ports
from server_process import reserved_port
from support import StoppedClock, alive, wait_in_loop_until

FAKE = """
import json, os, signal, socket, sys
from pathlib import Path

folder, link = Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
lines = link.makefile("rb")
start = json.loads(next(lines))
number = start["process"]
mine = folder / str(number)
attempt = len(mine.read_text().split("start")) if mine.exists() else 1


def send(kind, **values):
    link.sendall(json.dumps({"kind": kind, **values}).encode() + b"\\n")


def note(text):
    with mine.open("a") as file:
        file.write(text + "\\n")


versions = {}
note(f"start {os.getpid()}")
exec((folder / "plan.py").read_text())
for line in lines:
    message = json.loads(line)
    kind = message["kind"]
    if kind not in ("ping", "metrics"):
        note(" ".join([kind, *(str(message[key]) for key in ("operation", "version") if key in message)]))
    on(kind, message)
"""
"""A server that does what the test's plan says, and writes down what it receives."""

GOOD = """
def change(message):
    name, version = message["arguments"]["name"], message["version"]
    versions[name] = version or versions.get(name, 1) + (message["operation"] == "load")
    return {"version": versions[name]}


def on(kind, message):
    if kind == "open":
        send("serving")
    elif kind == "stop":
        os._exit(0)
    elif kind == "ping":
        send("pong")
    elif kind == "change":
        send("reply", id=message["id"], **change(message))
    elif kind == "metrics":
        samples = [["camserve_rows_total", {"outcome": "answered"}, 10.0 + number, None, None]]
        families = [["camserve_rows", "Rows.", "counter", "", samples]]
        send("reply", id=message["id"], families=families)


send("warm")
"""
"""Plan of a server without faults."""


class Running:
    """A running supervisor and the programs that it started."""

    def __init__(self, folder, **flags):
        self.folder, self.flags = folder, {"processes": 2, "drain_seconds": 0, **flags}

    async def __aenter__(self):
        self.supervisor = Supervisor(config.load(flags=self.flags, environment={}))
        self.ended = asyncio.create_task(self.supervisor.run())
        return self

    async def __aexit__(self, *_):
        self.supervisor._stop.set()
        self.supervisor._stop_now.set()
        with contextlib.suppress(ConfigError):
            await self.ended
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)

    def lines(self, number):
        file = self.folder / str(number)
        return file.read_text().splitlines() if file.exists() else []

    def received(self, number):
        """Return what a process and its predecessors have received."""
        return [line for line in self.lines(number) if not line.startswith("start")]

    def pids(self, number):
        """Return the ids of a process and its predecessors."""
        return [int(line.split()[1]) for line in self.lines(number) if line.startswith("start")]

    async def until(self, condition):
        await wait_in_loop_until(lambda: condition() or self.ended.done())
        assert not self.ended.done()

    async def until_serving(self):
        await self.until(lambda: self.supervisor._all_were_serving)

    async def send_signal(self, times=1):
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0)
        return await self.ended


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that starts a supervisor whose processes follow a plan."""
    monkeypatch.setattr(supervisor_link, "PROGRAM", ("-S", "-c", FAKE, str(tmp_path)))
    monkeypatch.setattr(supervisor, "MAX_PAUSE", 0)
    monkeypatch.setattr(supervisor, "STOP_TIMEOUT", 3600)

    def begin(plan=GOOD, **flags):
        (tmp_path / "plan.py").write_text(plan)
        return Running(tmp_path, **flags)

    return begin


async def test_processes_open_the_port_when_all_are_warm(run, tmp_path):
    os.mkfifo(tmp_path / "go")
    async with run("number == 1 and (folder / 'go').read_text()\n" + GOOD) as running:
        await running.until(
            lambda: [each.state for each in running.supervisor._servers.values()] == ["warm", "starting"]
        )
        before = running.received(0) + running.received(1)
        await asyncio.to_thread((tmp_path / "go").write_text, "go")
        await running.until_serving()

        assert before == []
        assert running.received(0) == running.received(1) == ["open"]


async def test_port_is_open_early_at_the_first_start_but_not_of_a_replacement(run):
    async with run("note(f'early {start[\"early\"]}')\n" + GOOD) as running:
        await running.until_serving()
        os.kill(running.pids(0)[0], signal.SIGKILL)
        await running.until(lambda: running.received(0).count("open") == 2)

        assert running.received(0) == ["early True", "open", "early False", "open"]
        assert running.received(1) == ["early True", "open"]


async def test_each_process_gets_its_share_of_the_settings(run):
    plan = "note(json.dumps([number, start['processes'], start['settings']['max_queue_rows']]))\n" + GOOD
    async with run(plan, processes=3, max_queue_rows=77) as running:
        await running.until_serving()

        assert [json.loads(running.received(number)[0]) for number in range(3)] == [[n, 3, 77] for n in range(3)]


async def test_process_that_dies_is_replaced_and_its_neighbour_stays(run):
    async with run() as running:
        await running.until_serving()
        os.kill(running.pids(0)[0], signal.SIGKILL)
        await running.until(lambda: running.received(0) == ["open", "open"])

        assert len(running.pids(0)) == 2
        assert (len(running.pids(1)), running.received(1)) == (1, ["open"])
        assert running.supervisor._restarts == [1, 0]


async def test_process_that_dies_before_the_others_are_warm_is_replaced(run):
    plan = "if number == 0 and attempt < 3:\n    os._exit(9)\n"
    async with run(plan + GOOD) as running:
        await running.until_serving()

        assert (len(running.pids(0)), len(running.pids(1))) == (3, 1)
        assert running.received(1) == ["open"]


async def test_server_that_never_starts_gives_up(run, caplog):
    async with run("os._exit(9)") as running:
        assert await running.ended == 1

    assert max(len(running.pids(number)) for number in range(2)) == supervisor.MAX_FAILED_STARTS
    assert "giving up, as no process starts" in caplog.messages


async def test_replacement_that_cannot_start_is_tried_again_and_the_others_serve(run, tmp_path):
    plan = "if (folder / 'broken').exists() and number == 0:\n    send('failed', error='no')\n    os._exit(2)\n"
    async with run(plan + GOOD) as running:
        await running.until_serving()
        (tmp_path / "broken").touch()
        os.kill(running.pids(0)[0], signal.SIGKILL)
        await running.until(lambda: len(running.pids(0)) > 2 + supervisor.MAX_FAILED_STARTS)
        assert alive(running.pids(1)[0])
        (tmp_path / "broken").unlink()
        await running.until(lambda: running.received(0) == ["open", "open"])

        assert running.received(1) == ["open"]


async def test_pause_before_the_next_attempt_grows(run, monkeypatch):
    pauses = []

    async def pause(_self, seconds):
        pauses.append(seconds)
        await asyncio.sleep(0)

    monkeypatch.setattr(supervisor, "MAX_PAUSE", 5)
    monkeypatch.setattr(Supervisor, "_pause", pause)
    async with run("if attempt in (2, 3, 4, 5, 6):\n    os._exit(9)\n" + GOOD, processes=1) as running:
        running.supervisor._settings = running.supervisor._settings.model_copy(update={"processes": 1})
        await running.until_serving()
        os.kill(running.pids(0)[0], signal.SIGKILL)
        await running.until(lambda: len(running.received(0)) == 2)

    assert pauses[:6] == [0, 1, 2, 4, 5, 5]


async def test_error_of_the_settings_ends_the_server_once(run):
    async with run("send('failed', error='no such model')\nos._exit(2)\n") as running:
        with pytest.raises(ConfigError, match=r"^no such model$"):
            await running.ended

    assert not any(alive(pid) for number in range(2) for pid in running.pids(number))


async def test_first_signal_drains_every_process(run):
    async with run() as running:
        await running.until_serving()
        code = await running.send_signal()

        assert code == 0
        assert running.received(0) == running.received(1) == ["open", "stop"]


async def test_process_that_lost_calls_makes_the_exit_code_1(run):
    async with run(GOOD.replace("os._exit(0)", "os._exit(number)")) as running:
        await running.until_serving()

        assert await running.send_signal() == 1


async def test_process_that_does_not_stop_in_time_is_killed(run):
    async with run(GOOD.replace("os._exit(0)", "pass")) as running:
        await running.until_serving()
        with StoppedClock() as clock:
            stopping = asyncio.create_task(running.send_signal())
            for received in (["open", "stop"], ["open", "stop", "stop"]):
                await running.until(lambda now=received: running.received(0) == running.received(1) == now)
                clock.advance(supervisor.STOP_TIMEOUT)

            assert await stopping == 1
        assert running.received(0) == running.received(1) == ["open", "stop", "stop"]


async def test_second_signal_stops_every_process_at_once(run):
    plan = GOOD.replace("os._exit(0)", "stops.append(1)\n        if len(stops) == 2:\n            os._exit(1)")
    async with run("stops = []\n" + plan, drain_seconds=3600) as running:
        await running.until_serving()
        first = asyncio.create_task(running.send_signal())
        await running.until(lambda: running.received(0)[-1] == running.received(1)[-1] == "stop")
        await running.send_signal()

        assert await first == 1
        assert running.received(0) == running.received(1) == ["open", "stop", "stop"]


async def test_signal_before_the_models_are_loaded_ends_all_with_0(run):
    async with run("def on(kind, message):\n    pass\n") as running:
        await running.until(lambda: len(running.supervisor._servers) == 2)
        await running.until(lambda: all((running.folder / str(number)).exists() for number in range(2)))

        assert await running.send_signal() == 0
        assert not any(alive(pid) for number in range(2) for pid in running.pids(number))


async def test_process_whose_event_loop_hangs_is_replaced(run, caplog):
    answers = "if number or attempt > 1:\n            send('pong')"
    async with run(GOOD.replace('send("pong")', answers)) as running:
        await running.until_serving()
        servers, unanswered = running.supervisor._servers, []
        hung = servers[0]
        with StoppedClock() as clock:
            for _ in range(supervisor.MAX_UNANSWERED):
                unanswered.append(hung.unanswered)
                clock.advance(supervisor.PING_INTERVAL)
                await running.until(lambda: hung.unanswered == len(unanswered) and servers[1].unanswered == 0)
            assert "a process hangs" not in caplog.messages
            clock.advance(supervisor.PING_INTERVAL)
            await running.until(lambda: running.received(0).count("open") == 2)

        assert caplog.messages.count("a process hangs") == 1
        assert unanswered == list(range(supervisor.MAX_UNANSWERED))
        assert [len(running.pids(number)) for number in range(2)] == [2, 1]


async def test_first_process_of_a_container_collects_orphans(run, monkeypatch):
    collected, pings = [], []

    def ping(server):
        pings.append(server.number)

    monkeypatch.setattr(supervisor.process, "reap_orphans", collected.append)
    monkeypatch.setattr(server_process.ServerProcess, "ping", ping)
    async with run() as running:
        await running.until_serving()
        with StoppedClock() as clock:
            clock.advance(supervisor.PING_INTERVAL)
            await running.until(lambda: len(pings) == 2)
            assert collected == []
            monkeypatch.setattr(supervisor, "FIRST_PROCESS", os.getpid())
            clock.advance(supervisor.PING_INTERVAL)
            await running.until(lambda: len(pings) == 4)

        assert collected == [{running.pids(0)[0], running.pids(1)[0]}]


async def change(running, number, operation, **arguments):
    """Let a process pass a change on, as if it were a client's; return the reply that it receives."""
    origin = running.supervisor._servers[number]
    sent = asyncio.get_running_loop().create_future()
    send = origin.send
    origin.send = lambda kind, **values: sent.set_result(values) if kind == "reply" else send(kind, **values)
    message = {"kind": "change", "id": 5, "operation": operation, "arguments": arguments}
    running.supervisor._handle(origin, message)
    reply = await sent
    origin.send = send
    return reply


async def test_model_is_loaded_in_the_process_of_the_call_first_and_then_in_the_others(run):
    async with run(processes=3) as running:
        await running.until_serving()

        assert await change(running, 1, "load", name="net") == {"id": 5}
        assert await change(running, 0, "load", name="net") == {"id": 5}
        assert await change(running, 2, "unload", name="net") == {"id": 5}
        assert running.received(1) == ["open", "change load 0", "change load 3", "change unload 3"]
        assert running.received(0) == ["open", "change load 2", "change load 3", "change unload 3"]
        assert running.received(2) == running.received(0)


REFUSES = """
def change(message):
    if number == {number}:
        return {{"error": "NotFound", "message": "no such file", "field": "weights", "fault": "is missing"}}
    return {{"version": message["version"] or 2}}
"""


async def test_change_that_fails_in_the_first_process_is_made_in_no_other(run):
    async with run(GOOD + REFUSES.format(number=0)) as running:
        await running.until_serving()
        reply = await change(running, 0, "load", name="net")

        assert reply == {
            "id": 5,
            "error": "NotFound",
            "message": "no such file",
            "field": "weights",
            "fault": "is missing",
        }
        assert running.received(1) == ["open"]


async def test_change_that_fails_in_another_process_is_an_error(run):
    async with run(GOOD + REFUSES.format(number=1)) as running:
        await running.until_serving()
        reply = await change(running, 0, "load", name="net")

        assert reply["error"] == "FailedPrecondition"
        assert reply["message"] == "model net was loaded in 1 of 2 processes. Process 1: no such file"


async def test_replaced_process_gets_the_models_of_the_others_before_it_opens(run):
    async with run() as running:
        await running.until_serving()
        for name in ("a", "a", "b"):
            await change(running, 0, "load", name=name)
        await change(running, 0, "unload", name="b")
        os.kill(running.pids(1)[0], signal.SIGKILL)
        await running.until(lambda: running.received(1).count("open") == 2)

        assert running.received(1)[-3:] == ["change load 3", "change unload 2", "open"]


async def test_replaced_process_that_cannot_load_a_model_of_the_others_does_not_open(run, tmp_path, caplog):
    fails = """
def change(message):
    if (folder / "broken").exists():
        return {"error": "NotFound", "message": "no such file", "field": "", "fault": ""}
    return {"version": message["version"] or 2}
"""
    async with run(GOOD + fails) as running:
        await running.until_serving()
        await change(running, 0, "load", name="net")
        (tmp_path / "broken").touch()
        os.kill(running.pids(1)[0], signal.SIGKILL)
        await running.until(lambda: len(running.pids(1)) > 3)
        assert running.received(1).count("open") == 1
        (tmp_path / "broken").unlink()
        await running.until(lambda: running.received(1).count("open") == 2)

    assert "model net is not as in the other processes: no such file" in caplog.messages


async def test_change_continues_if_another_process_ends_meanwhile(run):
    dies = GOOD.replace(
        "    name, version =", "    if number == 1 and attempt == 1:\n        os._exit(9)\n    name, version ="
    )
    async with run(dies) as running:
        await running.until_serving()

        assert await change(running, 0, "load", name="net") == {"id": 5}
        await running.until(lambda: running.received(1) == ["open", "change load 2", "change load 2", "open"])


async def scrape(port):
    def read():
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            return [line for line in answer.read().decode().splitlines() if not line.startswith("#")]

    return await asyncio.to_thread(read)


async def test_metrics_of_all_processes_are_served_with_their_number(run):
    with opened_ports() as ports:
        async with run(metrics_address="0") as running:
            await running.until_serving()

            assert await scrape(ports["metrics"]) == [
                'camserve_rows_total{outcome="answered",process="0"} 10.0',
                'camserve_rows_total{outcome="answered",process="1"} 11.0',
                'camserve_process_up{process="0"} 1.0',
                'camserve_process_up{process="1"} 1.0',
                'camserve_process_restarts_total{process="0"} 0.0',
                'camserve_process_restarts_total{process="1"} 0.0',
            ]


async def test_process_without_an_answer_is_left_out_of_the_metrics(run):
    plan = GOOD.replace('kind == "metrics"', 'kind == "metrics" and number == 1')
    with opened_ports() as ports:
        async with run(plan, metrics_address="0") as running:
            await running.until_serving()
            with StoppedClock() as clock:
                scraping = asyncio.create_task(scrape(ports["metrics"]))
                silent, other = (running.supervisor._servers[number] for number in range(2))
                await running.until(lambda: silent._waiting and not other._waiting)
                clock.advance(supervisor.METRICS_TIMEOUT)
                found = await scraping

    assert found[0] == 'camserve_rows_total{outcome="answered",process="1"} 11.0'
    assert 'camserve_process_up{process="0"} 1.0' in found


async def test_processes_end_with_a_supervisor_that_is_killed(tmp_path):
    (tmp_path / "plan.py").write_text(GOOD)
    follows = FAKE.replace("lines =", "from camserve_server.core import process\nprocess.follow_parent()\nlines =")
    code = (
        "import asyncio, sys\nfrom camserve_server.app import supervisor, supervisor_link\n"
        "from camserve_server.core import config\n"
        "supervisor_link.PROGRAM = ('-c', sys.argv[1], sys.argv[2])\n"
        "settings = config.load(flags={'processes': 2}, environment={})\n"
        "asyncio.run(supervisor.Supervisor(settings).run())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, follows, str(tmp_path))
    running = Running(tmp_path)
    await wait_in_loop_until(lambda: all((tmp_path / str(number)).exists() for number in range(2)))
    await wait_in_loop_until(lambda: running.received(0) == running.received(1) == ["open"])
    pids = [pid for number in range(2) for pid in running.pids(number)]
    process.kill()
    await process.wait()

    await wait_in_loop_until(lambda: not any(map(alive, pids)))
    assert len(pids) == 2


def test_supervisor_imports_neither_torch_nor_grpc():
    code = "import sys; from camserve_server.app import supervisor, sharing; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()

    assert "camserve_server.app.server_process" in loaded
    assert not {"torch", "numpy", "grpc", "google.protobuf", "prometheus_client"} & set(loaded)


def enter(context):
    with context:
        pass


def bind(port, *, share):
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, share)
        stranger.bind(("127.0.0.1", port))
        stranger.listen()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "[::1]", "[::]"])  # noqa: S104 -- one of them
def test_reserved_port_is_taken_for_others_and_free_for_the_processes(host):
    with reserve(f"{host}:0") as address:
        port = int(address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=re.escape(f"cannot listen on {address}: is the port taken")):
            enter(reserve(address))
        if host != "[::1]":
            with pytest.raises(OSError, match="in use"):
                bind(port, share=0)
        bind(port, share=1)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


def test_port_of_another_server_cannot_be_reserved():
    for share in (0, 1):
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, share)
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            with pytest.raises(ConfigError, match="is the port taken"), reserve(address):
                pass


def test_port_with_closed_connections_of_an_earlier_server_can_be_reserved():
    with reserved_port() as port:
        with socket.create_server(("127.0.0.1", port)) as listener:
            client = socket.create_connection(("127.0.0.1", port))
            connection, _ = listener.accept()
            connection.close()
            assert client.recv(1) == b""
            client.close()

        for _ in range(2):  # also after an earlier reservation
            with reserve(f"127.0.0.1:{port}") as address:
                assert address == f"127.0.0.1:{port}"


@pytest.mark.parametrize("address", ["no-such-host.invalid:1", "203.0.113.7:1", "127.0.0.1:1"])
def test_address_that_cannot_be_listened_on_is_refused(address, monkeypatch):
    if address == "127.0.0.1:1" and os.geteuid() == 0:
        monkeypatch.setattr(socket.socket, "bind", lambda *_: (_ for _ in ()).throw(PermissionError(13, "denied")))
    with pytest.raises(ConfigError, match=f"^cannot listen on {address}: is the port taken, or the host unknown"):
        enter(reserve(address))


def test_process_that_cannot_be_started_is_tried_again(run, monkeypatch, caplog):
    async def main():
        start, attempts = server_process.ServerProcess.start, []

        async def refuse_twice(*arguments, **options):
            attempts.append(arguments)
            if len(attempts) <= 2:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            return await start(*arguments, **options)

        monkeypatch.setattr(server_process.ServerProcess, "start", refuse_twice)
        async with run() as running:
            await running.until_serving()

    asyncio.run(main())
    assert caplog.messages.count("no process can be started: Resource temporarily unavailable") == 2
