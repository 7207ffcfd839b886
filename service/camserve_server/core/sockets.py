"""Connections: the address of their other side, and whether it has received what was sent."""

import functools
import ipaddress
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote

_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_FILES = Path("/proc/self/fd")
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
