"""Where the processes of engines come from: one that has imported all they need, and does nothing but fork.

So an engine is there at once, whenever it is needed, and has in common with the server what both have imported: half a
GiB of code, and the seconds that it takes to load. A server itself cannot fork once it has threads; so the nursery is
forked from it before, and stays as it was.
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

from camserve_server.workers import child

# -P: without it Python would search the current folder for modules first.
PROGRAM = ("-P", "-c", "import sys; from camserve_server.workers import child; child.run(int(sys.argv[1]))")
_NUMBER = struct.Struct("i")


class Process(Protocol):
    """A process of an engine.

    Attributes:
        pid: its id.
    """

    pid: int

    def end(self) -> int:
        """Kill it, if it still lives, and return its exit code, or the signal that ended it, negative."""


class _SpawnedProcess:
    """A process that imports everything itself."""

    def __init__(self, number: int) -> None:
        command = (sys.executable, *PROGRAM, str(number))
        self._process = subprocess.Popen(command, pass_fds=(number,), stdin=subprocess.DEVNULL)  # noqa: S603 -- ours
        self.pid = self._process.pid

    def end(self) -> int:
        self._process.kill()
        return self._process.wait()


class _ForkedProcess:
    """A process that the nursery forked."""

    def __init__(self, nursery: "ForkServer", pid: int) -> None:
        self._nursery = nursery
        self.pid = pid

    def end(self) -> int:
        try:
            return self._nursery.ask(self.pid)
        except OSError:  # then the kernel has ended it already, with the nursery
            return -signal.SIGKILL


class ForkServer:
    """The server's end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if not _fork():
            self._line.close()
            _serve_forks(theirs)
        theirs.close()

    def born(self, number: int) -> _ForkedProcess:
        """Fork a process that talks over a socket.

        Raises:
            OSError: the nursery is gone, or there is no room for a process.
        """
        pid = self.ask(0, number)
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return _ForkedProcess(self, pid)

    def ask(self, pid: int, *numbers: int) -> int:
        """Have a process ended, or, of none, a new one begin with these descriptors; return what is answered."""
        with self._lock:
            socket.send_fds(self._line, [_NUMBER.pack(pid)], numbers)
            answer = self._line.recv(_NUMBER.size)
        if not answer:
            raise BrokenPipeError("the nursery is gone")
        found: int = _NUMBER.unpack(answer)[0]
        return found


_here: list[ForkServer] = []


def open_fork_server() -> None:
    """Fork one from this process, which must have imported everything by now, and not have started a thread."""
    if sys.platform == "linux":
        _here[:] = [ForkServer()]


def begin(number: int) -> Process:
    """Begin a process of an engine that talks over a socket.

    Raises:
        OSError: there is no room for a process.
    """
    for nursery in _here:
        with suppress(BrokenPipeError):
            return nursery.born(number)
    return _SpawnedProcess(number)


def _serve_forks(line: socket.socket) -> NoReturn:
    """Fork, and end, as the server says; never return."""
    child.follow()
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 -- a descriptor is wanted, for what is the server's input
        os.dup2(nothing.fileno(), 0)
    gc.collect()
    gc.freeze()  # what the collector touches is no longer shared
    while True:
        order, numbers, *_ = socket.recv_fds(line, _NUMBER.size, 1)
        if not order:
            os._exit(0)
        answer = _begun(line, numbers[0]) if numbers else _ended(_NUMBER.unpack(order)[0])
        line.send(_NUMBER.pack(answer))


def _begun(line: socket.socket, number: int) -> int:
    try:
        pid = _fork()
    except OSError as error:
        return -(error.errno or errno.EAGAIN)
    if not pid:
        line.close()
        _run(number)
    os.close(number)
    return pid


def _run(number: int) -> NoReturn:
    try:
        child.run(number)
    except BaseException:  # noqa: BLE001 -- it ends here, whatever it was
        traceback.print_exc()
    finally:
        os._exit(1)


def _ended(pid: int) -> int:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _fork() -> int:
    with warnings.catch_warnings():  # from 3.12 on Python warns of threads, which some library may keep for itself
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()
