"""What keeps callers who do nothing, or far too much, out of the way of others: limits that gRPC holds, and a patience.

A call that was opened, and whose message never comes, costs little; but gRPC itself would let it stay for ever.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, TypeAlias, cast

import grpc

from camserve_server.core.config import Settings
from camserve_server.core.errors import DeadlineExceeded, InvalidArgument
from camserve_server.scheduling.policy import TurnOrder

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

HANDSHAKE = 10.0  # seconds that a new connection may take for TLS and the first frames of HTTP/2
KEEPALIVE_INTERVAL = 60.0  # seconds without a sign of life after which a caller is asked for one
ANSWER = 20.0  # seconds that it has for it
LAPSE = 1.0  # seconds that a message may take while others of its caller wait to be received
MOMENT = 0.1  # seconds after which gRPC, which first says that no message will come, has told that a call is taken back


def options(settings: Settings) -> tuple[tuple[str, int], ...]:
    """Return the options of a gRPC server that hold these settings' limits on connections and calls."""
    return (
        ("grpc.max_concurrent_streams", settings.max_streams),
        ("grpc.max_allowed_incoming_connections", settings.max_connections),
        ("grpc.server_handshake_timeout_ms", _ms(HANDSHAKE)),
        ("grpc.http2.settings_timeout", _ms(HANDSHAKE)),
        ("grpc.max_connection_idle_ms", _ms(settings.connection_idle_seconds)),
        ("grpc.max_connection_age_ms", _ms(settings.connection_age_seconds)),
        ("grpc.max_connection_age_grace_ms", _ms(settings.connection_grace_seconds)),
        ("grpc.keepalive_time_ms", _ms(KEEPALIVE_INTERVAL)),
        ("grpc.keepalive_timeout_ms", _ms(ANSWER)),
        # gRPC would end a connection of too many pings, and note at each ping that came with them why: 200,000 in one
        # write took a thread 19 s. Answered, they take no more than other bytes do.
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.bdp_probe", 0),  # with it, megabytes of a message that nobody receives yet would be taken
    )


def _ms(seconds: float) -> int:
    return round(1e3 * seconds)


class Messages:
    """The messages of a call. Each is received when it is asked for, and no reference to it is kept.

    gRPC's own iterator keeps the latest message until the next one arrives: a call's only message until the call ends.

    Args:
        context: of the call.
        check: called with each message before it is handed over.
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


class Receiving:
    """Limits how many messages of each caller are received at a time.

    gRPC buffers a message until it is complete, so a caller who sends many large messages at once could take any amount
    of memory. Of a message that is not being received yet, gRPC takes at most 64 KiB. A call whose message does not
    arrive loses its turn to the next call, and goes on waiting for the message. The connections of a caller take turns,
    so that one whose messages never arrive holds up the others only once.

    Args:
        most: messages of one caller that are received at a time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._gates: dict[str, _Gate] = {}

    def turn(self, caller: str, connection: str) -> "FirstMessageTimeout":
        """Hold the right to receive a message of a caller inside a block.

        Args:
            caller: that sends the message.
            connection: that the message comes through.
        """
        gate = self._gates.setdefault(caller, _Gate(self._most))
        return FirstMessageTimeout(connection, gate, partial(self._left, caller, gate))

    def _left(self, caller: str, gate: "_Gate") -> None:
        if not (gate.held or gate.lines) and self._gates.get(caller) is gate:
            del self._gates[caller]


@dataclass(slots=True, eq=False)
class FirstMessageTimeout:
    """The right to receive a message, held inside a block; see `Receiving.turn`.

    Attributes:
        connection: that the message comes through.
        gate: of its caller.
        left: called when the block was left.
        received: whether the message is there; until then the turn may lapse.
        since: when it was got.
        come: set when it is got.
    """

    connection: str
    gate: "_Gate"
    left: Callable[[], None]
    received: bool = False
    since: float = 0.0
    come: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> Self:
        try:
            await self.gate.enter(self)
        except asyncio.CancelledError:
            self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        self.gate.leave(self)
        self.left()


@dataclass(slots=True, eq=False)
class _Gate:
    """The calls of one caller: those that receive, the longest first, and by connection those that wait to."""

    most: int
    held: dict[FirstMessageTimeout, None] = field(default_factory=dict)
    lines: dict[str, dict[FirstMessageTimeout, None]] = field(default_factory=dict)
    turns: TurnOrder = field(default_factory=TurnOrder)  # of the connections
    timer: asyncio.TimerHandle | None = None  # one for all who wait: there may be many of them

    async def enter(self, turn: FirstMessageTimeout) -> None:
        """Take a turn, or wait for one."""
        if len(self.held) < self.most and not self.lines:
            self._begin(turn)
            return
        self.lines.setdefault(turn.connection, {})[turn] = None
        self._watch()
        await turn.come.wait()

    def leave(self, turn: FirstMessageTimeout) -> None:
        """Give a turn back, or stop waiting for one; then let those in who wait."""
        self.held.pop(turn, None)
        self._out_of_line(turn)
        while self.lines and len(self.held) < self.most:
            following = next(iter(self.lines[self.turns.next(self.lines)]))
            self._out_of_line(following)
            self._begin(following)

    def _out_of_line(self, turn: FirstMessageTimeout) -> None:
        line = self.lines.get(turn.connection, {})
        line.pop(turn, None)
        if not line:
            self.lines.pop(turn.connection, None)

    def _begin(self, turn: FirstMessageTimeout) -> None:
        turn.since = asyncio.get_running_loop().time()
        self.held[turn] = None
        self.turns.took(turn.connection)
        turn.come.set()

    def _watch(self) -> None:
        if self.lines and self.timer is None:
            self.timer = asyncio.get_running_loop().call_later(LAPSE, self._lapse)

    def _lapse(self) -> None:
        """Take the turns away from calls whose message does not come, as long as others wait."""
        self.timer = None
        late = asyncio.get_running_loop().time() - LAPSE
        for turn in [one for one in self.held if one.since <= late and not one.received]:
            self.leave(turn)
        self._watch()


async def only(requests: AsyncIterator[Any], seconds: float) -> Any:
    """Return the one message of a call.

    Args:
        requests: its messages.
        seconds: that may pass until it is there.

    Raises:
        DeadlineExceeded: it did not come in time.
        InvalidArgument: the call ended without one.
    """
    try:
        async with asyncio.timeout(seconds):
            return await anext(requests)
    except TimeoutError:
        raise DeadlineExceeded(f"the call's message did not come within {seconds:g} s") from None
    except StopAsyncIteration:
        await asyncio.sleep(MOMENT)
        raise InvalidArgument("the call ended without a message") from None
