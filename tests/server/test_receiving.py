"""Messages are received a limited number of each caller's at a time, and none is kept once it is handed over."""

import asyncio
import contextlib
import sys

import grpc
import pytest

from camserve_server.api import connection_limits
from camserve_server.api.connection_limits import Messages, Receiving
from support import StoppedClock


async def turns():
    """Let everything run that can."""
    for _ in range(10):
        await asyncio.sleep(0)


class Call:
    """A call that holds its turn until `end` is called.

    Args:
        receiving: what gives turns.
        caller: whose call it is.
        connection: that it came through.
        received: whether its message is there.
    """

    def __init__(self, receiving, caller="a", connection="1", *, received=True):
        self.receives, self._go_on = asyncio.Event(), asyncio.Event()
        self._task = asyncio.ensure_future(self._run(receiving, caller, connection, received))

    async def _run(self, receiving, caller, connection, received):
        async with receiving.turn(caller, connection) as turn:
            turn.received = received
            self.receives.set()
            await self._go_on.wait()

    async def end(self):
        self._go_on.set()
        await self._task

    async def cancel(self):
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


async def receiving_now(calls):
    await turns()
    return [call.receives.is_set() for call in calls]


async def test_only_so_many_messages_of_a_caller_are_received_and_another_caller_need_not_wait():
    receiving = Receiving(2)
    calls = [Call(receiving) for _ in range(4)] + [Call(receiving, "b")]

    assert await receiving_now(calls) == [True, True, False, False, True]
    await calls[1].end()
    assert await receiving_now(calls) == [True, True, True, False, True]
    for call in calls:
        await call.end()
    assert receiving._gates == {}


async def test_a_call_that_is_cancelled_while_it_waits_takes_no_turn():
    receiving = Receiving(1)
    calls = [Call(receiving) for _ in range(3)]
    await turns()
    await calls[1].cancel()
    await calls[0].end()

    assert await receiving_now(calls) == [True, False, True]
    await calls[2].cancel()
    assert receiving._gates == {}


async def test_turn_of_a_call_whose_message_does_not_come_lapses_and_one_that_has_its_message_is_waited_for():
    with StoppedClock() as clock:
        receiving = Receiving(2)
        whole, stuck, waiting = Call(receiving), Call(receiving, received=False), Call(receiving)
        before = await receiving_now([waiting])
        for _ in range(3):
            clock.advance(connection_limits.LAPSE)
            await turns()

        assert before == [False]
        assert await receiving_now([waiting]) == [True]
        later = Call(receiving)
        for _ in range(3):
            clock.advance(connection_limits.LAPSE)
            await turns()
        assert await receiving_now([later]) == [False]
        for call in (whole, stuck, waiting, later):
            await call.end()
        assert receiving._gates == {}


async def test_connection_whose_messages_never_come_holds_up_another_one_of_its_caller_only_once():
    with StoppedClock() as clock:
        receiving = Receiving(2)
        stuck = [Call(receiving, received=False) for _ in range(20)]
        newcomer = Call(receiving, connection="2")
        before = await receiving_now([newcomer])
        clock.advance(connection_limits.LAPSE)

        assert before == [False]
        assert await receiving_now([newcomer]) == [True]
        for call in (*stuck, newcomer):
            await call.cancel()
        assert receiving._gates == {}


class Sender:
    """The context of a call whose caller sends some messages."""

    def __init__(self, *messages):
        self.messages = list(messages)

    async def read(self):
        return self.messages.pop(0) if self.messages else grpc.aio.EOF


async def test_messages_come_in_order_and_none_is_kept():
    first = bytes(1000)
    messages = Messages(Sender(first, b"2"))
    references = sys.getrefcount(first)
    assert await anext(messages) == bytes(1000)

    assert sys.getrefcount(first) == references - 1  # the sender's own is gone
    assert [one async for one in messages] == [b"2"]


async def test_each_message_is_checked_before_it_is_handed_over():
    def refuse():
        raise PermissionError

    with pytest.raises(PermissionError):
        await anext(Messages(Sender(b"1"), refuse))
