"""Servers in processes of their own, and ports that are kept for other programs."""

import contextlib
import socket
import struct

import pytest

from server_process import reserved_port, server_process

IP_LOCAL_PORT_RANGE = 51  # ip(7), since Linux 6.3


def bound(port, *options, among=0):
    """Bind a port, or any of a range that has only one; return the error, or None."""
    with socket.socket() as asking:
        for option in options:
            asking.setsockopt(socket.SOL_SOCKET, option, 1)
        if among:
            with contextlib.suppress(OSError):  # an older kernel, which tries any port
                asking.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("I", among | among << 16))
        try:
            asking.bind(("127.0.0.1", port))
            assert asking.getsockname()[1] != among
            asking.listen()
        except OSError as error:
            return error
    return None


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])  # noqa: S104 -- nothing listens there
def test_reserved_port_is_bound_by_servers_and_given_to_nobody_else(host):
    with reserved_port(host) as port:
        assert bound(port, socket.SO_REUSEADDR) is None
        assert bound(port, socket.SO_REUSEADDR, socket.SO_REUSEPORT) is None
        assert bound(port) is not None
        for options in ((), (socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,)):
            bound(0, *options, among=port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


def test_server_that_ends_before_it_is_ready_is_reported_with_its_log():
    with pytest.raises(ChildProcessError, match=r"error: .*needs a source"), server_process(("none",), forked=True):
        pass
