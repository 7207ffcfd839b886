"""Server in another process, started by its command: the one place where tests start servers and get ports."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile

import fork_server
from support import children, wait_until

TEST_VARIABLES = (
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
)  # set by servers in this process
REPORTS = {
    "gRPC": re.compile(r'\b(?:gRPC(?: address=|", "address": ")|serving port=)([^\s"]+)'),
    "HTTP": re.compile(r'\bHTTP(?: address=|", "address": ")([^\s"]+)'),
    "metrics": re.compile(r'\bmetrics(?: address=|", "address": ").*?\bport(?:=|": )(\d+)'),
}
"""What a server logs, as text or JSON, once a port is open. Of gRPC, servers of 0.2.0 log the port when they serve."""
SERVING = re.compile(r' serving port=|"message": "serving"')
ALL_SERVE = re.compile(r"\bevery process serves\b")


class ServerProcess:
    """A server in a process of its own.

    Attributes:
        process: the process, as `subprocess.Popen` or `fork_server.Process`.
        pid: its id.
    """

    def __init__(self, process, log, serving):
        self.process, self.pid, self._log, self._serving, self._ended_with = process, process.pid, log, serving, None

    @property
    def log(self):
        """Standard output and standard error so far; what they were in the end after the block."""
        if self._ended_with is not None:
            return self._ended_with
        # The process shares the file's position: this leaves it where it is.
        return os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0).decode(errors="replace")

    def entries(self, message=""):
        """Return the complete entries of a log in JSON, all or those with a message."""
        entries = [json.loads(line) for line in self.log.split("\n")[:-1] if line.startswith("{")]
        return [entry for entry in entries if message in ("", entry["message"])]

    @property
    def address(self):
        """Address of gRPC, once the port is open."""
        reported = self._reported("gRPC")
        return f"127.0.0.1:{reported}" if reported.isdecimal() else reported

    @property
    def port(self):
        """Port of gRPC, once it is open."""
        return int(self.address.rpartition(":")[2])

    @property
    def http_address(self):
        """Address of HTTP, once the port is open."""
        return self._reported("HTTP")

    @property
    def http_port(self):
        """Port of HTTP, once it is open."""
        return int(self.http_address.rpartition(":")[2])

    @property
    def metrics_address(self):
        """Address of the metrics on loopback, once the port is open."""
        return f"127.0.0.1:{self._reported('metrics')}"

    def _reported(self, name):
        def find():
            log = self._log_of_running().rpartition("\n")[0]  # the last line may be incomplete
            found = REPORTS[name].search(log)
            assert found or not self._serving.search(log), f"the server has no port of {name}"
            return found

        return wait_until(find)[1]

    def _log_of_running(self):
        ended, log = self.process.poll() is not None, self.log
        if ended:
            raise ChildProcessError(log)
        return log

    def wait_until_ready(self):
        """Wait until the models are warm: in every process, if there are several.

        Raises:
            ChildProcessError: the server ended before; the message has its log.
        """
        wait_until(lambda: self._serving.search(self._log_of_running()))

    def workers(self):
        """Return the ids of the worker processes, which are children of the server's fork server."""
        return [worker for forker in children(self.pid) for worker in children(forker)]

    def send_signal(self, number=signal.SIGTERM):
        """Send a signal, unless the server has ended."""
        self.process.send_signal(number)

    def wait(self):
        """Return the exit code once the server has ended, or the negative number of the signal that ended it."""
        return self.process.wait()

    def stop(self, number=signal.SIGTERM):
        """Send a signal; return the exit code once the server has ended."""
        self.send_signal(number)
        return self.wait()


@contextlib.contextmanager
def server_process(
    models,
    *flags,
    command=("serve",),
    ready=True,
    forked=False,
    cwd=None,
    environment=None,
    prefix=(),
    program=fork_server.SERVER,
):
    """Serve models in another process inside the block; a server that still runs at its end gets SIGTERM.

    Args:
        models: models in the format of the command line.
        flags: further flags. A port that they do not give is free: `server.address` has it. For HTTP and metrics, pass
            `--http-address 0` and `--metrics-address 0`.
        command: the command of `camserve-server`.
        ready: True to start the block when the models are warm; False to start it at once.
        forked: True to fork the process from one that has imported torch, which saves seconds. It has the environment
            of that process where it is read at the start, and more memory.
        cwd: its folder.
        environment: variables to add by name; those with None are removed.
        prefix: a program with arguments that runs the command, only of a new process.
        program: the code that runs; a test may plant a fault in the server before.

    Raises:
        ChildProcessError: the server ended before it was ready; the message has its log.
    """
    model_flags = [part for model in models for part in ("--model", model)]
    address = () if "--address" in flags else ("--address", "127.0.0.1:0")
    words = [*command, *address, *model_flags, *map(str, flags)]
    variables = {**os.environ, **dict.fromkeys(TEST_VARIABLES), **fork_server.CACHE, **(environment or {})}
    variables = {name: str(value) for name, value in variables.items() if value is not None}
    with tempfile.TemporaryFile() as log:
        options = {"cwd": cwd, "stdout": log, "stderr": log}
        if forked:
            process = fork_server.start(program, *words, environment=variables, **options)
        else:
            process = subprocess.Popen([*prefix, sys.executable, "-c", program, *words], env=variables, **options)
        server = ServerProcess(process, log, ALL_SERVE if "--processes" in flags else SERVING)
        try:
            if ready:
                server.wait_until_ready()
            yield server
            server.stop()
        finally:
            process.kill()  # only after an error: it might not stop
            process.wait()
            server._ended_with = server.log


@contextlib.contextmanager
def reserved_port(host="127.0.0.1"):
    """Reserve a port inside the block for a program that cannot report its own, or that is started again.

    The socket does not listen. The kernel lets a program with SO_REUSEADDR or SO_REUSEPORT, as servers have, bind the
    port, and gives it to nobody who asks for any free port.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind((host, 0))
        yield reserved.getsockname()[1]
