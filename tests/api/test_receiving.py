"""Limit on the messages of a caller that are received at the same time, and the iterator over messages."""

import asyncio
import contextlib
import sys

import grpc
import pytest

from camserve_server.api import connection_limits
from camserve_server.api.connection_limits import Messages, ReceiveLimiter
from support import StoppedClock


async def settle():
    """Let all tasks run that can."""
    for _ in range(10):
        await asyncio.sleep(0)


class Call:
    """A call that waits for a slot, and holds it until `end` is called.

    Args:
        limiter: the limiter of slots.
        caller: the caller.
        connection: the caller's connection.
        received: True if its message has arrived when it gets the slot.
    """

    def __init__(self, limiter, caller="a", connection="1", *, received=True):
        self.receives, self._end = asyncio.Event(), asyncio.Event()
        self._task = asyncio.ensure_future(self._run(limiter, caller, connection, received))

    async def _run(self, limiter, caller, connection, received):
        async with limiter.slot(caller, connection) as slot:
            slot.received = received
            self.receives.set()
            await self._end.wait()

    async def end(self):
        self._end.set()
        await self._task

    async def cancel(self):
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


async def receiving_now(calls):
    await settle()
    return [call.receives.is_set() for call in calls]


async def test_each_caller_has_its_own_slots_and_further_calls_wait():
    limiter = ReceiveLimiter(2)
    calls = [Call(limiter) for _ in range(4)] + [Call(limiter, "b")]

    assert await receiving_now(calls) == [True, True, False, False, True]
    await calls[1].end()
    assert await receiving_now(calls) == [True, True, True, False, True]
    for call in calls:
        await call.end()
    assert limiter._callers == {}


async def test_call_cancelled_while_it_waits_takes_no_slot():
    limiter = ReceiveLimiter(1)
    calls = [Call(limiter) for _ in range(3)]
    await settle()
    await calls[1].cancel()
    await calls[0].end()

    assert await receiving_now(calls) == [True, False, True]
    await calls[2].cancel()
    assert limiter._callers == {}


async def test_slot_is_taken_away_only_from_a_call_whose_message_does_not_arrive():
    with StoppedClock() as clock:
        limiter = ReceiveLimiter(2)
        complete, stuck, waiting = Call(limiter), Call(limiter, received=False), Call(limiter)
        before = await receiving_now([waiting])
        for _ in range(3):
            clock.advance(connection_limits.RECEIVE_TIMEOUT)
            await settle()

        assert before == [False]
        assert await receiving_now([waiting]) == [True]
        later = Call(limiter)
        for _ in range(3):
            clock.advance(connection_limits.RECEIVE_TIMEOUT)
            await settle()
        assert await receiving_now([later]) == [False]
        for call in (complete, stuck, waiting, later):
            await call.end()
        assert limiter._callers == {}


async def test_connection_without_messages_delays_other_connections_only_once():
    with StoppedClock() as clock:
        limiter = ReceiveLimiter(2)
        stuck = [Call(limiter, received=False) for _ in range(20)]
        newcomer = Call(limiter, connection="2")
        before = await receiving_now([newcomer])
        clock.advance(connection_limits.RECEIVE_TIMEOUT)

        assert before == [False]
        assert await receiving_now([newcomer]) == [True]
        for call in (*stuck, newcomer):
            await call.cancel()
        assert limiter._callers == {}


class Sender:
    """Context of a call whose caller sends messages."""

    def __init__(self, *messages):
        self.messages = list(messages)

    async def read(self):
        return self.messages.pop(0) if self.messages else grpc.aio.EOF


async def test_messages_are_in_order_and_no_reference_is_kept():
    first = bytes(1000)
    messages = Messages(Sender(first, b"2"))
    references = sys.getrefcount(first)
    assert await anext(messages) == bytes(1000)

    assert sys.getrefcount(first) == references - 1  # that of the sender
    assert [message async for message in messages] == [b"2"]


async def test_check_runs_before_a_message_is_returned():
    def refuse():
        raise PermissionError

    with pytest.raises(PermissionError):
        await anext(Messages(Sender(b"1"), refuse))
