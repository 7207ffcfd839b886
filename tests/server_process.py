"""Server in another process, started by its command."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass

import camserve
from fork_server import NO_CACHE
from support import wait_until

COMMAND = (sys.executable, "-c", "from camserve_server.cli import main; main()", "serve", "--log-level", "warning")
STOP_TIMEOUT = 60  # seconds after SIGTERM until a server is killed
TEST_VARIABLES = (
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
)  # set by servers in this process


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass(frozen=True)
class ServerProcess:
    pid: int
    address: str


@contextlib.contextmanager
def server_process(models, *flags):
    """Serve models in a new process inside the block; the block starts when the server is ready.

    Raises:
        ChildProcessError: the server ended before it was ready; the message has its log.
    """
    address = f"127.0.0.1:{free_port()}"
    model_flags = [part for model in models for part in ("--model", model)]
    environment = {key: value for key, value in os.environ.items() if key not in TEST_VARIABLES} | NO_CACHE
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*COMMAND, *model_flags, "--address", address, *flags], stderr=log, env=environment)

        def ready():
            if process.poll() is not None:
                log.seek(0)
                raise ChildProcessError(log.read().decode(errors="replace"))
            with contextlib.suppress(camserve.CamserveError):
                return client.health() is camserve.Health.SERVING
            return False

        try:
            with camserve.Client(address, retries=0, timeout=5) as client:
                wait_until(ready)
            yield ServerProcess(process.pid, address)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
