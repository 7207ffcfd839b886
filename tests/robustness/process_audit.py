"""Audit of a process: the files, processes and connections that it opens, and its peak memory."""

import ctypes
import json
import sys
from contextlib import contextmanager
from pathlib import Path

import fork_server

EVENTS = (
    "open",
    "os.exec",
    "os.listdir",
    "os.posix_spawn",
    "os.remove",
    "os.scandir",
    "os.system",
    "shutil",
    "socket.bind",
    "socket.connect",
    "socket.getaddrinfo",
    "subprocess.Popen",
    "urllib.Request",
)


def run_module(module, *arguments):
    """Run a module of this folder as a program; return the JSON of its last line of output."""
    code = f"import runpy; runpy.run_module('robustness.{module}', run_name='__main__', alter_sys=True)"
    done = fork_server.run(code, *arguments, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


class AuditLog:
    """Records Python's audit events about files, processes and the network inside `recording`.

    Attributes:
        events: the name of each event and its first argument.
    """

    def __init__(self):
        self.events, self._is_recording = [], False
        sys.addaudithook(self._record)

    def _record(self, event, arguments):
        # A file opened by its descriptor was opened before, and `measure_memory` itself reads /proc/self.
        if event == "open" and (isinstance(arguments[0], int) or str(arguments[0]).startswith("/proc/self/")):
            return
        if self._is_recording and (event in EVENTS or event.split(".")[0] in EVENTS):
            self.events.append((event, str(arguments[0]) if arguments else ""))

    @contextmanager
    def recording(self):
        self.events, self._is_recording = [], True
        try:
            yield self
        finally:
            self._is_recording = False


def status_mb(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024


@contextmanager
def measure_memory(into):
    """Measure the rise of memory in the block; set the key "mb" of a dict to it."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current size: proc(5)
    before = status_mb("VmRSS:")
    try:
        yield
    finally:
        into["mb"] = status_mb("VmHWM:") - before
