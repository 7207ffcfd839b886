"""A nursery as a server has it, made by another process: that of the tests has threads, and must not fork."""

import socket
import threading
from contextlib import contextmanager
from pathlib import Path

import fork_server
from camserve_server.workers import fork_server as server_forks

SCRIPT = """
import socket, sys
sys.path.insert(0, sys.argv[2])
from camserve_server.workers import fork_server
{first}
fork_server._serve_forks(socket.socket(fileno=int(sys.argv[1])))
"""
TESTS = Path(__file__).parent.parent


@contextmanager
def running_fork_server(first=""):
    """Yield a nursery whose process has run a statement first."""
    line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    number = theirs.fileno()
    with line, fork_server.start(SCRIPT.format(first=first), number, TESTS, pass_fds=(number,)) as process:
        theirs.close()
        one = object.__new__(server_forks.ForkServer)
        one._socket, one._lock = line, threading.Lock()
        yield one
        process.kill()
