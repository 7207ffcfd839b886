"""Connections of a client: their number, and the choice of one for a call. This module does no I/O.

A server may consist of several processes that listen on one port. The kernel chooses the process of a new connection,
and all calls of a connection go to that process. So a client needs at least one connection for each process. It cannot
choose the process either, but each reply names it: see ``PROCESS_KEY``. The client opens connections until it has one
to each process, and closes those to a process that another of its connections has reached.
"""

from __future__ import annotations

import math
import re
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeAlias, TypeVar

import grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from camserve._core.errors import CamserveError

S = TypeVar("S")

ReplyMetadata: TypeAlias = "Iterable[tuple[str, str | bytes]] | None"
"""Metadata of a reply, as gRPC returns it."""

PROCESS_KEY: Final = "camserve-process"
"""Key of the metadata with the index and the number of the server's processes, such as "0/2". A server that is a single
process does not send it."""

MAX_PROCESSES: Final = 64
"""The largest number of processes for which connections are opened."""

TRIES_PER_PROCESS: Final = 4
"""Connections that may be opened for each process at once.

The kernel chooses among N processes at random, so N * (1 + 1/2 + ... + 1/N) connections reach all of them on average:
3 for 2 processes, 22 for 8.
"""

TRY_INTERVAL: Final = 15.0
"""Seconds for each further connection, while a process has not been reached."""

FAILURE_PENALTY: Final = 5.0
"""Seconds after a failure during which other connections are preferred."""

_PROCESS: Final = re.compile(r"([0-9]{1,4})/([0-9]{1,4})")


@dataclass(slots=True, eq=False)
class Connection(Generic[S]):
    """One connection of a client.

    Attributes:
        stubs: Stubs on the connection's channel.
        process: The server's process that the connection reaches, as in the metadata; empty if it is not known, or if
            the server is a single process.
        in_flight: The number of calls in flight. A stream counts as one, and so does each of its images.
        last_used: Sequence number of the last call; 0 before the first one.
        failed_until: The time until which other connections are preferred, because this one failed.
        retired: True if no further call will use it.
    """

    stubs: S
    process: str = ""
    in_flight: int = 0
    last_used: int = 0
    failed_until: float = -math.inf
    retired: bool = False


def least_loaded(connections: Sequence[Connection[S]], now: float) -> Connection[S]:
    """Return the connection with the fewest calls in flight; of several, the one whose last call is the longest ago.

    Connections that failed a short time ago are only chosen if all did.
    """
    return min(connections, key=lambda each: (each.failed_until > now, each.in_flight, each.last_used))


def process_of(metadata: ReplyMetadata) -> str:
    """Return the process that sent a reply, from the reply's metadata; empty if they do not name it.

    >>> process_of((("x-request-id", "1"), ("camserve-process", "0/2"))), process_of(None)
    ('0/2', '')
    """
    return next((str(value) for key, value in metadata or () if key == PROCESS_KEY), "")


def process_count(process: str) -> int:
    """Return the number of processes of a server; 1 if it is not valid.

    >>> process_count("0/2"), process_count(""), process_count("2/2"), process_count("0/9999")
    (2, 1, 1, 64)
    """
    match = _PROCESS.fullmatch(process)
    if match is None or int(match[1]) >= int(match[2]):
        return 1
    return min(int(match[2]), MAX_PROCESSES)


class ConnectionPool(Generic[S]):
    """Connections of one client. Threads may share it.

    Args:
        open_stubs: Function that opens a channel and returns the stubs on it. gRPC connects at the first call.
        count: The number of connections; None for one to each process of the server.
        one_server: False if the address stands for several servers. Their processes cannot be told apart, so there
            are as many connections as processes in one server, and none is closed.
    """

    def __init__(self, open_stubs: Callable[[], S], count: int | None, *, one_server: bool = True) -> None:
        self._open_stubs = open_stubs
        self._count = count or 1
        self._follows_processes = count is None
        self._one_server = one_server
        self._lock = threading.Lock()
        self._connections = [Connection(open_stubs()) for _ in range(self._count)]
        self._retired: list[Connection[S]] = []
        self._calls = 0
        self._recently_opened = 0.0
        self._recent_at = 0.0

    def acquire(self) -> Connection[S]:
        """Return the connection for a call, and count the call as in flight."""
        with self._lock:
            if len(self._connections) < self._count:
                self._open_missing()
            connection = self._connections[0]
            if len(self._connections) > 1:
                connection = least_loaded(self._connections, time.monotonic())
            self._calls += 1
            connection.last_used = self._calls
            connection.in_flight += 1
            return connection

    def hold(self, connection: Connection[S]) -> None:
        """Count another call on a connection as in flight."""
        with self._lock:
            connection.in_flight += 1

    def release(self, connection: Connection[S], calls: int = 1) -> S | None:
        """Count calls as ended; return the stubs of a connection that must now be closed."""
        with self._lock:
            connection.in_flight -= calls
            if connection.in_flight or connection not in self._retired:
                return None
            self._retired.remove(connection)
            return connection.stubs

    def reporter(self, connection: Connection[S]) -> Callable[[ReplyMetadata], None] | None:
        """Return a function that takes the metadata of each reply on a connection; None if nothing depends on it."""
        return (lambda metadata: self._report(connection, metadata)) if self._follows_processes else None

    def report_failure(self, connection: Connection[S], error: CamserveError) -> bool:
        """If the server is unavailable, prefer other connections for a while; return True if one has not failed."""
        if error.code is not grpc.StatusCode.UNAVAILABLE:
            return False
        with self._lock:
            now = time.monotonic()
            connection.failed_until = now + FAILURE_PENALTY
            connection.process = ""  # gRPC connects again, perhaps to another process
            return any(each.failed_until <= now for each in self._connections)

    def close(self) -> list[S]:
        """Return the stubs of all connections, to be closed. No further connection is opened."""
        with self._lock:
            closing = [each.stubs for each in (*self._connections, *self._retired)]
            self._retired, self._follows_processes, self._count = [], False, 0
            return closing

    def _report(self, connection: Connection[S], metadata: ReplyMetadata) -> None:
        process = process_of(metadata)
        if process in {"", connection.process}:  # a call that found no server has no metadata
            return
        with self._lock:
            connection.process = process
            if self._follows_processes and not connection.retired:
                self._follow(connection, process)

    def _follow(self, connection: Connection[S], process: str) -> None:
        """Retire a connection if another one has reached its process, and open connections to the others."""
        if not self._one_server:
            self._count = max(self._count, process_count(process))
        else:
            self._count = process_count(process)
            if any(each.process == process for each in self._connections if each is not connection):
                connection.retired = True
                self._connections.remove(connection)
                self._retired.append(connection)  # `release` closes it after its last call
        self._open_missing()

    def _open_missing(self) -> None:
        now = time.monotonic()
        self._recently_opened = max(0.0, self._recently_opened - (now - self._recent_at) / TRY_INTERVAL)
        self._recent_at = now
        limit = TRIES_PER_PROCESS * self._count
        while len(self._connections) < self._count and self._recently_opened + 1 <= limit:
            self._recently_opened += 1
            self._connections.append(Connection(self._open_stubs()))
