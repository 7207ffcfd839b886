"""Ports: sockets that listen, and the reservation of a port for several processes of one server.

The processes bind the same port with SO_REUSEPORT, and the kernel distributes connections among those that listen. The
supervisor holds a socket on the port that never listens, so that no connection arrives there. It keeps the port taken
while the processes start, and when they all have ended.
"""

import errno
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeAlias

from camserve_server.core.errors import ConfigError

Bind: TypeAlias = Callable[[socket.AddressFamily, str, int], socket.socket]
"""Function that returns a socket that is bound to a port of an address; port 0 picks a free one."""


@contextmanager
def reserve(address: str) -> Iterator[str]:
    """Reserve a port inside the block.

    Args:
        address: host and port; port 0 picks a free one.

    Yields:
        The address, with the port that was picked.

    Raises:
        ConfigError: the address cannot be listened on, or another server listens on it.
    """
    host, _, port = address.rpartition(":")
    with ExitStack() as held:
        try:
            number = _bind_all(host.strip("[]"), int(port), held, _reserve)[0].getsockname()[1]
        except OSError as error:
            raise ConfigError(f"cannot listen on {address}: is the port taken, or the host unknown?") from error
        yield f"{host}:{number}"


def listen(address: str, *, shared: bool) -> list[socket.socket]:
    """Return sockets that are bound to an address, one for each address of its host that this machine has.

    Args:
        address: host and port; port 0 picks a free one.
        shared: True if other processes of this server bind the same port.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    host, _, port = address.rpartition(":")
    with ExitStack() as held:
        try:
            bound = _bind_all(host.strip("[]"), int(port), held, partial(_bound, shared=shared))
        except OSError as error:
            raise ConfigError(f"cannot listen on {address}: is the port taken, or the host unknown?") from error
        held.pop_all()
    return bound


def _bound(family: socket.AddressFamily, ip: str, port: int, *, shared: bool) -> socket.socket:
    bound = _socket(family)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
        bound.bind((ip, port))
        bound.listen()  # otherwise another server could bind the port too
    except OSError:
        bound.close()
        raise
    return bound


def _bind_all(host: str, port: int, held: ExitStack, bind: Bind) -> list[socket.socket]:
    """Bind the same port on every address of a host that this machine has; return the sockets.

    Raises:
        OSError: the port is taken, or the host has no address here.
    """
    bound, missing = list[socket.socket](), None
    for family, ip in _addresses(host):
        try:
            bound.append(held.enter_context(bind(family, ip, port)))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            missing = error  # localhost may name ::1 where IPv6 is off; gRPC leaves that address out, too
        else:
            port = bound[-1].getsockname()[1]
    if missing and not bound:
        raise missing
    return bound


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """Return the addresses that gRPC listens on for a host."""
    found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    pairs = ((family, str(where[0])) for family, _, _, _, where in found)
    addresses: list[tuple[socket.AddressFamily, str]] = list(dict.fromkeys(pairs))
    if {"0.0.0.0", "::"} & {ip for _, ip in addresses} and socket.has_dualstack_ipv6():  # noqa: S104 -- compared only
        return [(socket.AF_INET6, "::")]  # for either of them gRPC listens on every interface, with IPv4 and IPv6
    return addresses


def _reserve(family: socket.AddressFamily, ip: str, port: int) -> socket.socket:
    """Return a socket that is bound to a port and does not listen. Other servers cannot bind the port any more.

    A socket that listens without SO_REUSEPORT is the kernel's check that nobody else has the port, in whatever way.
    While it listens, nobody else can get the port either. So of two supervisors that start together one is refused.
    """
    with _socket(family) as check:
        check.bind((ip, port))
        check.listen()
        check.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved = _socket(family)
        try:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            reserved.bind(check.getsockname())
            # Needed until here because of closed connections of an earlier server. With it, a server that does not use
            # SO_REUSEPORT could bind the port, too.
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        except OSError:
            reserved.close()
            raise
        return reserved


def _socket(family: socket.AddressFamily) -> socket.socket:
    opened = socket.socket(family, socket.SOCK_STREAM)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family is socket.AF_INET6:
        opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    return opened
