"""Reservation of a port for several processes of one server, against every other server.

The processes bind the same port with SO_REUSEPORT, and the kernel distributes connections among those that listen. The
supervisor holds a socket on the port that never listens, so that no connection arrives there. It keeps the port taken
while the processes start, and when they all have ended.
"""

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from camserve_server.core.errors import ConfigError


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
            number = _reserve_all(host.strip("[]"), int(port), held)
        except OSError as error:
            raise ConfigError(f"cannot listen on {address}: is the port taken, or the host unknown?") from error
        yield f"{host}:{number}"


def _reserve_all(host: str, port: int, held: ExitStack) -> int:
    """Reserve a port on every address of a host that this machine has; return the port.

    Raises:
        OSError: the port is taken, or the host has no address here.
    """
    addresses, missing = _addresses(host), []
    for family, ip in addresses:
        try:
            port = held.enter_context(_reserve(family, ip, port)).getsockname()[1]
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            missing.append(error)  # localhost may name ::1 where IPv6 is off; gRPC leaves that address out, too
    if len(missing) == len(addresses):
        raise missing[0]
    return port


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
