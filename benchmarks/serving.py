"""A server in a process of its own, started as a user starts it; what it costs is read from the system's books."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVE = ("-c", "from camserve_server.cli import main; main()", "serve", "--log-level", "warning")
PAGE = os.sysconf("SC_PAGE_SIZE") / 2**20
HERE = Path(__file__).parent
START_TIMEOUT = 300.0  # seconds until the models are warm
OURS_ALONE = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")  # that this process has, and a user's has not


@dataclass(frozen=True, slots=True)
class Process:
    """A running process.

    Attributes:
        pid: its id.
        address: that it listens on.
        pipes: to it, where it was started with pipes.
    """

    pid: int
    address: str
    pipes: "subprocess.Popen[str]"

    def cpu(self) -> float:
        """Return the seconds of processor time that it and its engines' processes have used."""
        return sum(map(cpu_of, self._family()))

    def memory(self) -> float:
        """Return the MiB that they have in memory, files that they share counted once.

        Not by what each has a share of: the kernel stops a process to add that up, long enough for it to show.
        """
        first, *others = map(_pages_of, self._family())
        return (first[0] + sum(resident - shared for resident, shared in others)) * PAGE

    def _family(self) -> list[int]:
        return [self.pid, *children_of(self.pid)]


def children_of(pid: int) -> list[int]:
    """Return the processes that one has started, and those that they have."""
    found = []
    for one in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if int(_fields(int(one.name))[1]) == pid:
                found += [int(one.name), *children_of(int(one.name))]
    return found


def _fields(pid: int) -> list[str]:
    """Return the fields of a process's line in proc(5), from the third on: a name may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()


def _pages_of(pid: int) -> tuple[int, int]:
    """Return how many pages of a process are in memory, and how many of these are files'."""
    resident, shared = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1:3]
    return int(resident), int(shared)


def cpu_of(pid: int) -> float:
    """Return the seconds of processor time that a process has used.

    The clock's number is that of clock_getcpuclockid(3), which Python does not offer for other processes. It counts
    nanoseconds; /proc counts ticks of 10 ms, and a short measurement may have none.
    """
    return time.clock_gettime(~pid << 3 | 2)


@contextlib.contextmanager
def serving(
    models: Sequence[str], *flags: str, program: Sequence[str] = SERVE, tree: Path | None = None
) -> Iterator[Process]:
    """Serve models inside the block.

    Args:
        models: as on a command line.
        flags: of `camserve-server serve`.
        program: what Python is to run.
        tree: another checkout to run the server of; None for this one.
    """
    with contextlib.ExitStack() as stack:
        address = f"127.0.0.1:{stack.enter_context(reserved_port())}"
        named = [word for model in models for word in ("--model", model)]
        command = [sys.executable, *program, *named, "--address", address, *flags]
        log = stack.enter_context(tempfile.TemporaryFile())
        process = stack.enter_context(_started(command, log, tree))
        try:
            _wait(process, address)
            yield Process(process.pid, address, process)
        except ChildProcessError:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace"))
            raise
        finally:
            _stop(process)


def _started(command: Sequence[str], log: IO[bytes], tree: Path | None) -> "subprocess.Popen[str]":
    environment = environment_of(tree)
    pipe = subprocess.PIPE
    return subprocess.Popen(  # noqa: S603 -- our own program
        command, stdin=pipe, stdout=pipe, stderr=log, cwd=HERE.parent, env=environment, text=True
    )


def environment_of(tree: Path | None) -> dict[str, str]:
    """Return the environment of a server: a user's own, or one in which Python imports another checkout."""
    environment = {key: value for key, value in os.environ.items() if key not in OURS_ALONE}
    if tree is not None:
        folders = (tree / "service", tree / "clients" / "python", HERE.parent)  # the last one for `benchmarks` itself
        environment["PYTHONPATH"] = os.pathsep.join(map(str, folders))
    return environment


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a port of loopback inside the block for a server that does not report its own.

    The socket does not listen. The system lets a server, which has SO_REUSEADDR or SO_REUSEPORT, bind the port, and
    gives it to nobody who asks for any free port.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


def _wait(process: "subprocess.Popen[str]", address: str) -> None:
    until = time.monotonic() + START_TIMEOUT
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < until and process.poll() is None:
            with contextlib.suppress(grpc.RpcError):
                answer = stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=5)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            time.sleep(0.1)
    raise ChildProcessError(f"the server did not start: exit code {process.poll()}")


def _stop(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
