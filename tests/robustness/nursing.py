"""A nursery as a server has it, made by another process: that of the tests has threads, and must not fork."""

import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

from camserve_server.workers import nursery

SCRIPT = """
import socket, sys
sys.path.insert(0, sys.argv[2])
from camserve_server import server
from camserve_server.workers import local, nursery
{first}
nursery._nurse(socket.socket(fileno=int(sys.argv[1])))
"""
TESTS = Path(__file__).parent.parent


@contextmanager
def nursed(first=""):
    """Yield a nursery whose process has run a statement first."""
    line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-c", SCRIPT.format(first=first), str(theirs.fileno()), str(TESTS)]
    with line, subprocess.Popen(command, pass_fds=(theirs.fileno(),)) as process:
        theirs.close()
        one = object.__new__(nursery._Nursery)
        one._line, one._lock = line, threading.Lock()
        yield one
        process.kill()
