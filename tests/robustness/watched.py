"""A process of its own that is watched: what it opens, starts and connects to, its highest memory."""

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


def run(module, *arguments):
    """Run a module of this folder as a program; return what it says in JSON on its last line."""
    code = f"import runpy; runpy.run_module('robustness.{module}', run_name='__main__', alter_sys=True)"
    done = fork_server.run(code, *arguments, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


class Ears:
    """Hears what Python is about to do with files, processes and the network, while it is told to listen."""

    def __init__(self):
        self.heard, self.listening = [], False
        sys.addaudithook(self._hear)

    def _hear(self, event, arguments):
        # What a program opens by its descriptor, it has opened before; the watch itself reads how it stands.
        if event == "open" and (isinstance(arguments[0], int) or str(arguments[0]).startswith("/proc/self/")):
            return
        if self.listening and (event in EVENTS or event.split(".")[0] in EVENTS):
            self.heard.append((event, str(arguments[0]) if arguments else ""))

    @contextmanager
    def listen(self):
        self.heard, self.listening = [], True
        try:
            yield self
        finally:
            self.listening = False


def status_mb(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024


@contextmanager
def measured(into):
    """Put into a dict how far memory rises in the block, in MB."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far becomes that of now
    before = status_mb("VmRSS:")
    try:
        yield
    finally:
        into["mb"] = status_mb("VmHWM:") - before
