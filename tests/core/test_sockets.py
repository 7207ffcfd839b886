"""Data of TCP connections that the other side has not received, and connections that are ended."""

import socket
import sys

import pytest

import fork_server
from camserve_server.core import sockets
from support import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no /proc")


@pytest.fixture(params=["127.0.0.1", "::1"])
def pair(request):
    """The two ends of a connection; the first is the server's."""
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.create_server((request.param, 0), family=family) as listening:
        theirs = socket.create_connection(listening.getsockname()[:2])
        own, _ = listening.accept()
        with own, theirs:
            yield own, theirs


def fill(connection):
    """Send as much as the system takes; return the number of bytes."""
    sent = 0
    connection.setblocking(False)
    try:
        while True:
            sent += connection.send(bytes(2**16))
    except BlockingIOError:
        return sent


def test_connection_counts_until_its_data_has_arrived(pair):
    own, theirs = pair
    port, peer = own.getsockname()[1], own.getpeername()[1]
    assert sockets.undelivered([port], [peer]) == 0
    sent = fill(own)

    assert sockets.undelivered([port, 1], [peer, 1]) == 1
    assert sockets.undelivered([port + 1], [peer]) == sockets.undelivered([port], [peer + 1]) == 0
    while sent:
        sent -= len(theirs.recv(2**20))
    wait_until(lambda: sockets.undelivered([port], [peer]) == 0)


@pytest.mark.parametrize("escaped", [False, True])
def test_connection_of_a_peer_ends_and_no_other(pair, escaped):
    own, theirs = pair
    host, port = own.getpeername()[:2]
    kind, written = ("ipv6", f"%5B{host}%5D" if escaped else f"[{host}]") if ":" in host else ("ipv4", host)

    assert not sockets.end_connection(f"{kind}:{written}:{own.getsockname()[1] + 1}")
    assert not any(map(sockets.end_connection, ("", "unix:", "unix:/a/b", "ipv4:127.0.0.1")))
    own.send(b"still open")
    assert theirs.recv(100) == b"still open"
    assert sockets.end_connection(f"{kind}:{written}:{port}")
    assert theirs.recv(100) == b""


def test_connections_of_other_processes_do_not_count(pair):
    own, _ = pair
    fill(own)
    ports = [own.getsockname()[1]], [own.getpeername()[1]]

    assert fork_server.call(sockets.undelivered, *ports) == 0
    assert sockets.undelivered(*ports) == 1
