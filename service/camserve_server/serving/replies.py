"""Replies that are not sent yet: their memory, and what happens if callers do not read them.

gRPC holds a reply until its caller has read it, and cannot drop one. So if others wait for memory, the connection of a
caller that does not read ends, as HTTP ends a connection on which nothing moves.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from camserve_server.core import logs, sockets
from camserve_server.core.errors import ResourceExhausted
from camserve_server.scheduling.admission import Admission

log = logging.getLogger(__name__)

REPLY_LIMIT = 96 * 2**20  # bytes of all unsent replies, with their copies; other requests wait before they are drawn
REPLY_TIMEOUT = 300.0  # seconds for which a reply waits for memory that others hold until their callers read them
CHECK_INTERVAL = 2.0  # seconds for which a reply waits before connections whose callers do not read are ended
STALL_TIME = 10.0  # seconds that any caller has to read a reply while others wait for memory
STALL_RATE = 2**20  # bytes a second that a caller has to read beyond that: 8 Mbit/s


class UntilSent(ExitStack):
    """Context in which a reply is in memory. It is closed when the reply is sent.

    Args:
        peer: address that the reply goes to, as gRPC writes it; empty in process.

    Attributes:
        ready: time on the event loop's clock at which the reply was given to the transport; infinite before.
    """

    def __init__(self, peer: str = "") -> None:
        super().__init__()
        self.peer, self.ready = peer, math.inf


@dataclass(frozen=True, slots=True, eq=False)
class _Unsent:
    """A reply that is not sent yet.

    Attributes:
        size: bytes that it counts for.
        caller: its caller.
        until_sent: its context.
    """

    size: int
    caller: str
    until_sent: UntilSent

    def is_stalled(self, now: float) -> bool:
        """Return whether its caller has had the time to read it."""
        return now - self.until_sent.ready > STALL_TIME + self.size / STALL_RATE


@dataclass(frozen=True, slots=True)
class Replies:
    """Memory of the replies that are not sent yet.

    Attributes:
        limit: limit on their bytes.
    """

    limit: Admission = field(default_factory=lambda: Admission(REPLY_LIMIT, 0, line=math.inf, headroom=True))
    _unsent: set[_Unsent] = field(default_factory=set)

    async def reserve(self, size: int, caller: str, until_sent: UntilSent) -> None:
        """Reserve memory for a reply; wait until there is enough.

        Args:
            size: bytes of the reply and its copies.
            caller: its caller.
            until_sent: context of the reply, whose end releases the memory.

        Raises:
            ResourceExhausted: earlier replies were not read in time.
        """
        try:
            with self._relieving():
                async with asyncio.timeout(REPLY_TIMEOUT):
                    until_sent.callback(await self.limit.hold(size, caller=caller, wait=True))
        except TimeoutError:
            message = f"there was no memory for the reply for {REPLY_TIMEOUT:g} s: earlier replies have not been read"
            raise ResourceExhausted(message, retry_after=1.0, shed_reason="replies_unread") from None
        unsent = _Unsent(size, caller, until_sent)
        self._unsent.add(unsent)
        until_sent.callback(self._unsent.discard, unsent)

    @contextmanager
    def _relieving(self) -> Iterator[None]:
        """End connections whose callers do not read, at intervals, while a reply waits in the block."""
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle

        def check() -> None:
            nonlocal timer
            self.end_stalled(loop.time())
            timer = loop.call_later(CHECK_INTERVAL, check)

        timer = loop.call_later(CHECK_INTERVAL, check)
        try:
            yield
        finally:
            timer.cancel()

    def end_stalled(self, now: float) -> None:
        """End the connection of the oldest reply that is not read, of the caller whose such replies hold most.

        Args:
            now: the time on the event loop's clock.
        """
        stalled = [each for each in self._unsent if each.is_stalled(now)]
        held: Counter[str] = Counter()
        for each in stalled:
            held[each.caller] += each.size
        oldest = min(stalled, key=lambda each: (-held[each.caller], each.until_sent.ready), default=None)
        if oldest and sockets.end_connection(oldest.until_sent.peer):
            seconds = round(now - oldest.until_sent.ready)
            log.warning(
                "ended a connection: others wait for memory, and its caller has not read a reply",
                extra=logs.fields(caller=oldest.caller, seconds=seconds, bytes=oldest.size),
            )
