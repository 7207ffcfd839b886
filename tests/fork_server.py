"""Fork servers for programs of tests: a process imports the server and torch, and every program forks from it.

A new Python process takes seconds to import torch; a fork has the import done. Each fork has its own process id,
working folder, environment, standard output, signals and exit code. Variables that are read only when a process starts
(LD_LIBRARY_PATH, PYTHONPATH, OMP_NUM_THREADS) keep the values of the fork server.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import json
import os
import pickle
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import tracemalloc
import types
from pathlib import Path
from typing import NoReturn

import leftovers

TESTS = Path(__file__).parent
SERVER = "from camserve_server.cli import main; main()"
"""The program `camserve-server`."""
CACHE = {"XDG_CACHE_HOME": os.devnull}
"""Environment of programs: they must not use the user's cache of probed models. conftest.py names the run's own."""

CALL = """
import pickle, sys
from pathlib import Path

tests, given, result = sys.argv[1:]
sys.path.insert(0, tests)
function, arguments = pickle.loads(Path(given).read_bytes())
Path(result).write_bytes(pickle.dumps(function(*arguments)))
"""
"""Program that calls a function, and writes its result to a file."""

_NUMBER, _MAX_REQUEST = struct.Struct("i"), 2**20  # a process id or exit code; bytes


class Process:
    """A forked process, with the methods of `subprocess.Popen` that tests use.

    Attributes:
        pid: the process id.
        returncode: the exit code, or the negative number of the signal that ended it; None until `poll` or `wait`
            has returned after the end.
    """

    def __init__(self, status_socket):
        self._socket, self.returncode = status_socket, None
        self.pid = self._receive()

    def _receive(self):
        answer = self._socket.recv(_NUMBER.size)
        assert answer, "the fork server has ended"
        return _NUMBER.unpack(answer)[0]

    def poll(self):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout=None):
        if self.returncode is None:
            if not select.select([self._socket], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked program", timeout)
            self.returncode = self._receive()
            self._socket.close()
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.wait()


def start(code, *arguments, cwd=None, environment=None, stdout=None, stderr=None, pass_fds=(), imported_with=()):
    """Start a program, as `subprocess.Popen([sys.executable, "-c", code, *arguments])` does.

    `imported_with` are pairs of a variable and its value that its fork server had when it imported torch.
    """
    own_socket, child_socket = socket.socketpair()
    request = {"code": code, "arguments": list(map(str, arguments)), "cwd": str(cwd or Path.cwd())}
    variables = os.environ | CACHE if environment is None else dict(environment)
    request |= {"environment": variables, "pass_fds": list(pass_fds)}
    with child_socket:
        standard = [1 if stdout is None else stdout, 2 if stderr is None else stderr]
        numbers = [
            child_socket.fileno(),
            *(file if isinstance(file, int) else file.fileno() for file in standard),
            *pass_fds,
        ]
        socket.send_fds(_fork_server(imported_with), [json.dumps(request).encode()], numbers)
    return Process(own_socket)


def run(code, *arguments, cwd=None):
    """Run a program to its end; return its exit code and output, as `subprocess.run` does."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        with start(code, *arguments, cwd=cwd, stdout=out, stderr=errors) as process:
            code = process.wait()
        for file in (out, errors):
            file.seek(0)
        return subprocess.CompletedProcess(arguments, code, out.read(), errors.read())


def call(function, *arguments):
    """Call a function of a test's module in a process of its own; return its result.

    What the function measures is then of nothing else: the servers and threads of other tests are not in that process.
    """
    with tempfile.TemporaryDirectory() as folder:
        given, result = Path(folder, "given"), Path(folder, "result")
        given.write_bytes(pickle.dumps((function, arguments)))
        done = run(CALL, TESTS, given, result)
        assert done.returncode == 0, done.stderr
        return pickle.loads(result.read_bytes())  # noqa: S301 -- written by our own process


def allocating(function, *arguments):
    """Call a function; return its result, and the most bytes that Python and NumPy had allocated for it.

    Other threads count too, so that `call` must call what calls this.
    """
    tracemalloc.start()
    try:
        result = function(*arguments)
        return result, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def start_early():
    """Fork the fork server of this test run from this process itself, which must have no other threads yet.

    A new process takes seven seconds to import what this one has to import anyway.
    """
    with contextlib.ExitStack() as after:
        if "GRPC_VERBOSITY" not in os.environ:
            after.callback(os.environ.pop, "GRPC_VERBOSITY", None)  # programs that are not forked must not have it
        _import_programs()
    own_socket, child_socket = _sockets()
    if not os.fork():
        own_socket.close()
        _show_environment(os.environ | {leftovers.KEPT: leftovers.ENDS_ITSELF})
        sys.path[:] = ["", *(path for path in sys.path[1:] if path != str(TESTS))]
        sys.modules["__main__"] = types.ModuleType("__main__")  # what multiprocessing would run again
        serve(child_socket.detach())
    child_socket.close()
    _early.append(own_socket)


_early = []


def _sockets():
    own_socket, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    atexit.register(own_socket.close)
    return own_socket, child_socket


@functools.cache
def _fork_server(imported_with):
    """Return the connection to a fork server, which ends when this process does.

    It is in a session of its own: Ctrl-C in a terminal does not reach it.
    """
    if _early and not imported_with:
        return _early[0]
    own_socket, child_socket = _sockets()
    with child_socket:
        child_socket.set_inheritable(True)
        path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        code = f"import sys, fork_server; sys.path.remove({str(TESTS)!r}); fork_server.serve({child_socket.fileno()})"
        environment = os.environ | {"PYTHONPATH": path, leftovers.KEPT: leftovers.ENDS_ITSELF} | dict(imported_with)
        os.posix_spawn(sys.executable, [sys.executable, "-c", code], environment, setsid=True)
    return own_socket


# --- in the fork server's own process ---


def serve(number):
    """Fork a program for every request and report its exit code, until the socket is closed."""
    gc.disable()  # collections take a tenth of the time of the imports
    _import_programs()
    gc.enable()
    gc.collect()
    gc.freeze()  # a collection would write to shared pages, and copy them
    requests, selector = socket.socket(fileno=number), selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.data:
                _report(selector, key)
            else:
                _handle_request(requests, selector)


def _import_programs():
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # the server's program sets it before it imports gRPC too
    import pytest  # noqa: F401, PLC0415 -- so that forks that call a function of a test's module need not

    from camserve_server import cli  # noqa: F401, PLC0415 -- so that forks need not
    from camserve_server.app import server  # noqa: F401, PLC0415 -- so that forks need not
    from camserve_server.cli import commands  # noqa: F401, PLC0415 -- so that forks need not
    from camserve_server.models import zoo  # noqa: F401, PLC0415 -- so that forks need not
    from camserve_server.workers import in_process  # noqa: F401, PLC0415 -- so that forks need not


def _handle_request(requests, selector):
    request, numbers, *_ = socket.recv_fds(requests, _MAX_REQUEST, 16)
    if not request:
        for key in selector.get_map().values():
            if key.data:
                os.kill(key.data[0], signal.SIGKILL)
        os._exit(0)
    pid = os.fork()
    if not pid:
        for key in list(selector.get_map().values()):  # a program needs none of them
            if key.data:
                os.close(key.fd)
                os.close(key.data[1])
        selector.close()
        requests.close()
        _run_program(json.loads(request), numbers)
    os.write(numbers[0], _NUMBER.pack(pid))
    for number in numbers[1:]:
        os.close(number)
    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, numbers[0]))


def _report(selector, key):
    pid, status = key.data
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):  # the test no longer waits for the program
        os.write(status, _NUMBER.pack(code))
    selector.unregister(key.fileobj)
    os.close(key.fd)
    os.close(status)


def _run_program(request, numbers) -> NoReturn:
    """Run a program in this process, and exit as Python does."""
    os.close(numbers[0])
    null = os.open(os.devnull, os.O_RDONLY)
    for target, number in enumerate((null, *numbers[1:3])):
        os.dup2(number, target)
        os.close(number)
    # The caller's descriptors have other numbers in this process.
    passed = dict(zip(map(str, request["pass_fds"]), map(str, numbers[3:]), strict=True))
    os.chdir(request["cwd"])
    os.environ.clear()
    _show_environment(request["environment"])
    os.environ.update(request["environment"])
    sys.argv = ["-c", *(passed.get(argument, argument) for argument in request["arguments"])]
    code = None
    try:
        exec(compile(request["code"], "<program>", "exec"), {"__name__": "__main__"})  # noqa: S102 -- a test's program
    except SystemExit as ending:
        code = ending.code
    if isinstance(code, int | None):
        _exit_without_freeing(code or 0)
    sys.exit(code)


def _exit_without_freeing(code):
    """Exit as Python does, but leave the objects to the system: to free those of torch takes half a second."""
    threading._shutdown()  # waits for the threads
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):  # Python itself reports what it cannot write
        for file in (sys.stdout, sys.stderr):
            if file:
                file.flush()
        os._exit(code & 0xFF)


def _show_environment(environment):
    """Make /proc show a program's own environment, as if it had not been forked. `leftovers` reads it there."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    names = sorted(environment, key=lambda name: name not in leftovers.MARKS)  # the others may not all have room
    block = b"".join(os.fsencode(f"{name}={environment[name]}\0") for name in names)[: end - start]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, block, len(block))
