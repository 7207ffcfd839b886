"""Fork server for worker processes: a process that has imported everything they need, and only forks.

A forked worker starts at once, and shares with the server what both have imported: half a GiB of code, which takes
seconds to load. A server cannot fork once it has threads. So the fork server is forked before, and never starts one.
"""

import errno
import gc
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import warnings
from contextlib import suppress
from typing import NoReturn, Protocol

from camserve_server.core import native_output, process
from camserve_server.workers import child

# -P: without it Python would search the current folder for modules first.
PROGRAM = ("-P", "-c", "import sys; from camserve_server.workers import child; child.run(int(sys.argv[1]))")
_NUMBER = struct.Struct("i")  # a process id, an exit code or a negative errno; see `_serve_forks`


class Process(Protocol):
    """A worker process.

    Attributes:
        pid: process id.
    """

    pid: int

    def end(self) -> int:
        """Kill the process if it is still alive; return its exit code, or the negative signal that ended it."""


class _SpawnedProcess:
    """A process that imports everything itself."""

    def __init__(self, number: int) -> None:
        command = (sys.executable, *PROGRAM, str(number))
        self._process = subprocess.Popen(  # noqa: S603 -- our own program
            command, pass_fds=(number,), stdin=subprocess.DEVNULL, stderr=native_output.standard_error()
        )
        self.pid = self._process.pid

    def end(self) -> int:
        self._process.kill()
        return self._process.wait()


class _ForkedProcess:
    """A process that the fork server forked."""

    def __init__(self, fork_server: "ForkServer", pid: int) -> None:
        self._fork_server = fork_server
        self.pid = pid

    def end(self) -> int:
        try:
            return self._fork_server.request(self.pid)
        except OSError:  # the kernel has ended it already, together with the fork server
            return -signal.SIGKILL


class ForkServer:
    """Fork server, as the server that started it sees it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if not _fork():
            self._socket.close()
            _serve_forks(child_socket)
        child_socket.close()

    def fork(self, number: int) -> _ForkedProcess:
        """Fork a worker process that uses a socket.

        Args:
            number: file descriptor of the socket.

        Raises:
            OSError: the fork server is gone, or no further process can be started.
        """
        pid = self.request(0, number)
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return _ForkedProcess(self, pid)

    def request(self, pid: int, *numbers: int) -> int:
        """Send a request: to kill a process, or, with file descriptors, to fork one; return the response."""
        with self._lock:
            socket.send_fds(self._socket, [_NUMBER.pack(pid)], numbers)
            response = self._socket.recv(_NUMBER.size)
        if not response:
            raise BrokenPipeError("the fork server is gone")
        number: int = _NUMBER.unpack(response)[0]
        return number


_fork_servers: list[ForkServer] = []  # at most one: that of this process


def open_fork_server() -> None:
    """Start a fork server from this process, which must have imported everything, and not have started a thread."""
    if sys.platform == "linux":
        _fork_servers[:] = [ForkServer()]


def begin(number: int) -> Process:
    """Start a worker process that uses a socket; it is spawned if there is no fork server.

    Args:
        number: file descriptor of the socket.

    Raises:
        OSError: no further process can be started.
    """
    for fork_server in _fork_servers:
        with suppress(BrokenPipeError):
            return fork_server.fork(number)
    return _SpawnedProcess(number)


def _serve_forks(server_socket: socket.socket) -> NoReturn:
    """Serve the requests of the server: fork a worker process, or kill one and collect its exit code. Never return."""
    process.follow_parent()
    with open(os.devnull, "rb") as devnull:  # noqa: PTH123 -- a file descriptor is needed, to replace the server's stdin
        os.dup2(devnull.fileno(), 0)
    gc.collect()
    gc.freeze()  # memory pages that the garbage collector writes to are no longer shared
    while True:
        request, numbers, *_ = socket.recv_fds(server_socket, _NUMBER.size, 1)
        if not request:
            os._exit(0)
        response = _start(server_socket, numbers[0]) if numbers else _kill(_NUMBER.unpack(request)[0])
        server_socket.send(_NUMBER.pack(response))


def _start(server_socket: socket.socket, number: int) -> int:
    """Fork a worker process; return its id, or the negative errno."""
    try:
        pid = _fork()
    except OSError as error:
        return -(error.errno or errno.EAGAIN)
    if not pid:
        server_socket.close()
        _run(number)
    os.close(number)
    return pid


def _run(number: int) -> NoReturn:
    try:
        child.run(number)
    except BaseException:  # noqa: BLE001 -- nothing may return to the fork server's loop
        traceback.print_exc()
    finally:
        os._exit(1)


def _kill(pid: int) -> int:
    """Kill a process; return its exit code, or the negative signal that ended it."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _fork() -> int:
    with warnings.catch_warnings():  # since 3.12 Python warns of threads, and a library may have started one of its own
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()
