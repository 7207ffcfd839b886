"""Fork server for programs of tests: one process imports the server and torch once, and every program is a fork of it.

A new Python process takes seconds to import torch. A fork runs the same program with the import done: it has a process
id, a folder, an environment, standard output and signals of its own, and ends with its own exit code. What the dynamic
linker and Python read only as a process starts (LD_LIBRARY_PATH, PYTHONPATH, OMP_NUM_THREADS) stays as it is here.
"""

import atexit
import contextlib
import functools
import gc
import json
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

TESTS = Path(__file__).parent
SERVER = "from camserve_server.cli import main; main()"
"""The program `camserve-server`."""
_NUMBER, _MOST = struct.Struct("i"), 2**20


class Process:
    """A forked process, with the methods of `subprocess.Popen` that tests use.

    Attributes:
        pid: its id.
        returncode: its exit code, or the signal that ended it, negative; None while it runs or nobody has asked.
    """

    def __init__(self, line):
        self._line, self.returncode = line, None
        self.pid = self._received()

    def _received(self):
        answer = self._line.recv(_NUMBER.size)
        assert answer, "the fork server has ended"
        return _NUMBER.unpack(answer)[0]

    def poll(self):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout=None):
        if self.returncode is None:
            if not select.select([self._line], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked program", timeout)
            self.returncode = self._received()
            self._line.close()
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.wait()


def start(code, *arguments, cwd=None, stdout=None, stderr=None, pass_fds=()):
    """Start a program, as `subprocess.Popen([sys.executable, "-c", code, *arguments])` does."""
    mine, theirs = socket.socketpair()
    order = {"code": code, "arguments": list(map(str, arguments)), "cwd": str(cwd or Path.cwd())}
    order |= {"environment": dict(os.environ), "pass_fds": list(pass_fds)}
    with theirs:
        standard = [1 if stdout is None else stdout, 2 if stderr is None else stderr]
        numbers = [theirs.fileno(), *(one if isinstance(one, int) else one.fileno() for one in standard), *pass_fds]
        socket.send_fds(_fork_server(), [json.dumps(order).encode()], numbers)
    return Process(mine)


def run(code, *arguments, cwd=None):
    """Run a program to its end; return its exit code and what it wrote, as `subprocess.run` does."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        with start(code, *arguments, cwd=cwd, stdout=out, stderr=errors) as process:
            code = process.wait()
        for file in (out, errors):
            file.seek(0)
        return subprocess.CompletedProcess(arguments, code, out.read(), errors.read())


@functools.cache
def _fork_server():
    """Start the fork server of this test run, which ends when this process does."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        theirs.set_inheritable(True)
        path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        code = f"import sys, fork_server; sys.path.remove({str(TESTS)!r}); fork_server.serve({theirs.fileno()})"
        os.posix_spawn(sys.executable, [sys.executable, "-c", code], os.environ | {"PYTHONPATH": path})
    atexit.register(mine.close)
    return mine


# --- in the fork server's own process ---


def serve(number):
    """Fork a program for every order, and report the exit code of each, until there are no more orders."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # as the server's own program has it before it imports gRPC
    from camserve_server import cli  # noqa: F401, PLC0415 -- so that no program has to
    from camserve_server.app import server  # noqa: F401, PLC0415 -- so that no program has to
    from camserve_server.cli import commands  # noqa: F401, PLC0415 -- so that no program has to
    from camserve_server.workers import in_process  # noqa: F401, PLC0415 -- the same

    gc.collect()
    gc.freeze()  # what the collector touches is no longer shared
    line, known = socket.socket(fileno=number), selectors.DefaultSelector()
    known.register(line, selectors.EVENT_READ)
    while True:
        for key, _ in known.select():
            if key.data:
                _report(known, key)
            else:
                _follow(line, known)


def _follow(line, known):
    order, numbers, *_ = socket.recv_fds(line, _MOST, 16)
    if not order:
        for key in known.get_map().values():
            if key.data:
                os.kill(key.data[0], signal.SIGKILL)
        os._exit(0)
    pid = os.fork()
    if not pid:
        for key in list(known.get_map().values()):  # of which a program needs none
            if key.data:
                os.close(key.fd)
                os.close(key.data[1])
        known.close()
        line.close()
        _become(json.loads(order), numbers)
    os.write(numbers[0], _NUMBER.pack(pid))
    for one in numbers[1:]:
        os.close(one)
    known.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, numbers[0]))


def _report(known, key):
    pid, status = key.data
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
        os.write(status, _NUMBER.pack(code))
    known.unregister(key.fileobj)
    os.close(key.fd)
    os.close(status)


def _become(order, numbers) -> NoReturn:
    """Run a program in this process, and end as Python itself does."""
    os.close(numbers[0])
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, one in enumerate((nothing, *numbers[1:3])):
        os.dup2(one, target)
        os.close(one)
    # The caller's numbers of descriptors are not those of this process.
    passed = dict(zip(map(str, order["pass_fds"]), map(str, numbers[3:]), strict=True))
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = ["-c", *(passed.get(one, one) for one in order["arguments"])]
    exec(compile(order["code"], "<program>", "exec"), {"__name__": "__main__"})  # noqa: S102 -- a test's own
    sys.exit()
