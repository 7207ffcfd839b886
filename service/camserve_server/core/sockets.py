"""Connections: their other side, whether it has received what was sent, and how to end one."""

import functools
import ipaddress
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote

_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_FILES = Path("/proc/self/fd")
_MAPPED = "::ffff:"  # prefix of an IPv4 address in a socket for IPv6
_LOCAL, _REMOTE, _QUEUES, _INODE = 1, 2, 4, 9  # columns of the tables: proc(5)


def undelivered(ports: Collection[int], peers: Collection[int]) -> int:
    """Return the number of this process's connections with data that is not acknowledged.

    A system without `/proc` has none.

    Args:
        ports: ports of this computer that the connections lead to.
        peers: ports of the other side that they come from.
    """
    queued = {inode for port, peer, sending, inode in _connections() if sending and port in ports and peer in peers}
    return len(queued & _own_sockets()) if queued else 0


@functools.lru_cache(4096)  # every call asks for the address of its connection
def address_of(peer: str) -> str:
    """Return the address of a gRPC peer without its port; of an IPv6 address the /64 network.

    A single caller usually has a whole /64 network of addresses.

    Example:
        >>> address_of("ipv4:10.1.2.3:4567"), address_of("unix:"), address_of("ipv6:%5B2001:db8:1:2:3:4:5:6%5D:4567")
        ('10.1.2.3', 'unix:', '2001:db8:1:2::/64')
    """
    host = unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:  # a Unix socket, or another transport of gRPC
        return peer if peer.startswith("unix") else host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or ipaddress.ip_network(f"{address}/64", strict=False))


def end_connection(peer: str) -> bool:
    """End this process's connection with another program; return whether there was one.

    gRPC for Python cannot drop a reply that nobody reads. It does when its connection ends.

    Args:
        peer: address and port of the other program, as gRPC writes them, such as "ipv4:10.1.2.3:4567".
    """
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    ended = False
    for file in _FILES.iterdir() if port.isdecimal() and _FILES.exists() else ():
        with suppress(OSError), _borrowed(file) as connection:  # closed meanwhile, or not connected
            if connection and _is_to(connection, host.strip("[]"), int(port)):
                connection.shutdown(socket.SHUT_RDWR)
                ended = True
    return ended


@contextmanager
def _borrowed(file: Path) -> Iterator[socket.socket | None]:
    """Yield this process's socket with a file descriptor, or None for another file.

    It is no duplicate: while one is open, gRPC would still get events of a connection that it has closed and freed.
    """
    if not str(file.readlink()).startswith("socket:"):
        yield None
        return
    connection = socket.socket(fileno=int(file.name))
    try:
        yield connection
    finally:
        connection.detach()


def _is_to(connection: socket.socket, host: str, port: int) -> bool:
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    found = connection.getpeername()
    return bool((found[0].removeprefix(_MAPPED), found[1]) == (host.removeprefix(_MAPPED), port))


def _connections() -> Iterator[tuple[int, int, int, str]]:
    """Yield both ports, the bytes that are not acknowledged, and the inode of each TCP socket of the computer."""
    for table in _TABLES:
        with suppress(OSError):
            for line in table.read_text("ascii").splitlines()[1:]:
                words = line.split()
                port, peer = (int(words[column].rpartition(":")[2], 16) for column in (_LOCAL, _REMOTE))
                yield port, peer, int(words[_QUEUES].partition(":")[0], 16), words[_INODE]


def _own_sockets() -> set[str]:
    """Return the inodes of this process's sockets."""
    inodes = set()
    for file in _FILES.iterdir():
        with suppress(OSError):  # closed meanwhile
            inodes.add(str(file.readlink()).removeprefix("socket:[").removesuffix("]"))
    return inodes
