"""Fork server for tests, started by another process, because the test process has threads and must not fork."""

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
    """Yield a fork server whose process has first run a statement."""
    own_socket, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    number = child_socket.fileno()
    with own_socket, fork_server.start(SCRIPT.format(first=first), number, TESTS, pass_fds=(number,)) as process:
        child_socket.close()
        server = object.__new__(server_forks.ForkServer)
        server._socket, server._lock = own_socket, threading.Lock()
        yield server
        process.kill()
