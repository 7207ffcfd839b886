"""Limits on connections, and on messages that are received at the same time.

They limit how much one caller can hold that others need. gRPC itself has no timeout for a call without a deadline whose
message never arrives.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, TypeAlias, TypeVar, cast

import grpc

from camserve_server.core.config import Settings
from camserve_server.core.errors import DeadlineExceeded, InvalidArgument
from camserve_server.scheduling.policy import TurnOrder

T = TypeVar("T")

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

HANDSHAKE_TIMEOUT = 10.0  # seconds for TLS and the first frames of HTTP/2 of a new connection
KEEPALIVE_INTERVAL = 60.0  # seconds without data after which the server sends a keepalive ping
KEEPALIVE_TIMEOUT = 20.0  # seconds that the caller has to answer the ping
RECEIVE_TIMEOUT = 1.0  # seconds after which a message that has not arrived loses its slot, if other calls wait for it
MAX_PENDING_CALLS = 2**12  # calls that gRPC has received and not yet passed to the event loop
CANCEL_TIMEOUT = 0.1  # seconds: for a cancelled call, gRPC first reports the end of its messages, then cancels


def options(settings: Settings) -> tuple[tuple[str, int], ...]:
    """Return the gRPC channel arguments for the connection limits of these settings."""
    return (
        ("grpc.max_concurrent_streams", settings.max_streams),
        ("grpc.max_allowed_incoming_connections", settings.max_connections),
        ("grpc.server_handshake_timeout_ms", _ms(HANDSHAKE_TIMEOUT)),
        ("grpc.http2.settings_timeout", _ms(HANDSHAKE_TIMEOUT)),
        ("grpc.max_connection_idle_ms", _ms(settings.connection_idle_seconds)),
        ("grpc.max_connection_age_ms", _ms(settings.connection_age_seconds)),
        ("grpc.max_connection_age_grace_ms", _ms(settings.connection_grace_seconds)),
        ("grpc.keepalive_time_ms", _ms(KEEPALIVE_INTERVAL)),
        ("grpc.keepalive_timeout_ms", _ms(KEEPALIVE_TIMEOUT)),
        # Beyond its own limit of 1,000, gRPC cancels new calls of anybody at random. Cancelled calls count until the
        # event loop asks for the next call: 16,000 of them at once ended the call of another caller in one of six runs.
        # Each takes up to 16 KiB.
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        # With a limit on pings, gRPC closes the connection, and adds the reason to the connection's error for each
        # further ping: 200,000 pings in one write kept a thread busy for 19 s. Without a limit, pings cost no more than
        # other bytes.
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.bdp_probe", 0),  # with it, gRPC would buffer megabytes of a message before a handler reads it
    )


def _ms(seconds: float) -> int:
    return round(1e3 * seconds)


class Messages:
    """Iterator over the messages of a call. It reads each message on demand, and keeps no reference to it.

    gRPC's own iterator keeps the latest message until the next one arrives: a call's only message until the call ends.

    Args:
        context: context of the call.
        check: function that is called after each message is read and may raise an error.
    """

    def __init__(self, context: Context, check: Callable[[], object] = lambda: None) -> None:
        self._context, self._check = context, check

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        data = await self._context.read()
        if data is grpc.aio.EOF:
            raise StopAsyncIteration
        self._check()
        return cast("bytes", data)


class ReceiveLimiter:
    """Limit on the number of messages of each caller that are received at the same time.

    gRPC buffers a message until it is complete, so a caller that sends many large messages at once could take any
    amount of memory. gRPC buffers at most 64 KiB of a message before a handler reads it. A call whose message does not
    arrive loses its slot to the next call, and still waits for its message, outside of the limit. The connections of a
    caller take turns, so that one whose messages never arrive delays the others by at most `RECEIVE_TIMEOUT`.

    Args:
        slots: the largest number of messages of one caller that are received at the same time.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._callers: dict[str, _CallerSlots] = {}

    def slot(self, caller: str, connection: str) -> "ReceiveSlot":
        """Return a context manager that holds a slot for receiving a message.

        Args:
            caller: the caller that sends the message.
            connection: the connection over which the message is sent.
        """
        slots = self._callers.get(caller)
        if slots is None:
            slots = self._callers[caller] = _CallerSlots(self._slots)
        return ReceiveSlot(connection, slots, partial(self._forget_if_unused, caller, slots))

    def _forget_if_unused(self, caller: str, slots: "_CallerSlots") -> None:
        if not (slots.held or slots.waiting) and self._callers.get(caller) is slots:
            del self._callers[caller]


@dataclass(slots=True, eq=False)
class ReceiveSlot:
    """Slot for receiving a message, held inside a block. See `ReceiveLimiter.slot`.

    Attributes:
        connection: the connection over which the message is sent.
        slots: the slots of the caller.
        on_exit: function that is called after the block.
        received: True if the message has arrived; until then the slot may be taken away.
        acquired_at: time of acquisition, on the event loop's clock.
        acquired: event that is set when the slot is acquired; None if it did not have to wait.
    """

    connection: str
    slots: "_CallerSlots"
    on_exit: Callable[[], None]
    received: bool = False
    acquired_at: float = 0.0
    acquired: asyncio.Event | None = None

    async def __aenter__(self) -> Self:
        try:
            await self.slots.acquire(self)
        except asyncio.CancelledError:
            self.release()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the slot before the end of the block."""
        self.slots.release(self)
        self.on_exit()


@dataclass(slots=True, eq=False)
class _CallerSlots:
    """The slots of one caller.

    Attributes:
        limit: the number of slots.
        held: acquired slots, the oldest first.
        waiting: slots that are not acquired yet, by connection, the oldest first.
        turns: turns of the connections.
        timer: timer that takes slots away; one for all waiting slots, as there may be many of them.
    """

    limit: int
    held: dict[ReceiveSlot, None] = field(default_factory=dict)
    waiting: dict[str, dict[ReceiveSlot, None]] = field(default_factory=dict)
    turns: TurnOrder = field(default_factory=TurnOrder)
    timer: asyncio.TimerHandle | None = None

    async def acquire(self, slot: ReceiveSlot) -> None:
        """Acquire a slot, at once or when one is free."""
        if len(self.held) < self.limit and not self.waiting:
            self._hold(slot)
            return
        self.waiting.setdefault(slot.connection, {})[slot] = None
        slot.acquired = asyncio.Event()
        self._start_timer()
        await slot.acquired.wait()

    def release(self, slot: ReceiveSlot) -> None:
        """Release a slot, or remove it from the waiting ones; then assign free slots to waiting calls."""
        self.held.pop(slot, None)
        if not self.waiting:
            return
        self._remove_waiting(slot)
        while self.waiting and len(self.held) < self.limit:
            following = next(iter(self.waiting[self.turns.next(self.waiting)]))
            self._remove_waiting(following)
            self._hold(following)

    def _remove_waiting(self, slot: ReceiveSlot) -> None:
        queue = self.waiting.get(slot.connection, {})
        queue.pop(slot, None)
        if not queue:
            self.waiting.pop(slot.connection, None)

    def _hold(self, slot: ReceiveSlot) -> None:
        slot.acquired_at = asyncio.get_running_loop().time()
        self.held[slot] = None
        self.turns.record_turn(slot.connection)
        if slot.acquired:
            slot.acquired.set()

    def _start_timer(self) -> None:
        if self.waiting and self.timer is None:
            self.timer = asyncio.get_running_loop().call_later(RECEIVE_TIMEOUT, self._expire)

    def _expire(self) -> None:
        """Take slots away from calls whose message does not arrive, as long as other calls wait."""
        self.timer = None
        cutoff = asyncio.get_running_loop().time() - RECEIVE_TIMEOUT
        for slot in [slot for slot in self.held if slot.acquired_at <= cutoff and not slot.received]:
            self.release(slot)
        self._start_timer()


async def receive_first(requests: AsyncIterator[Any], seconds: float) -> Any:
    """Return the first message of a call.

    Args:
        requests: the messages of the call.
        seconds: the time to wait for the message.

    Raises:
        DeadlineExceeded: the message did not arrive within the server's time limit.
        InvalidArgument: the call ended without a message.
    """
    try:
        return await receive_within(anext(requests), seconds)
    except StopAsyncIteration:
        # If the caller cancelled the call, gRPC cancels this handler meanwhile, and no error is logged.
        await asyncio.sleep(CANCEL_TIMEOUT)
        raise InvalidArgument("the call ended without a message") from None


async def receive_within(receiving: Awaitable[T], seconds: float) -> T:
    """Return the message that an awaitable receives.

    Raises:
        DeadlineExceeded: the message did not arrive within the server's time limit, in seconds.
    """
    try:
        async with asyncio.timeout(seconds):
            return await receiving
    except TimeoutError:
        raise DeadlineExceeded(f"the call's message did not arrive within {seconds:g} s") from None
