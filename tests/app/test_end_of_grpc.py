"""A server whose gRPC ends by itself stops with an exit code of 1, so that a supervisor starts it again."""

import asyncio

import pytest

from camserve_server.api.grpc_server import Stop
from camserve_server.app.server import _Server


class Grpc:
    """A gRPC server that serves for ever, or ends in some way.

    Args:
        end: the error with which it ends, True if it ends without one, or None.
    """

    def __init__(self, end):
        self._end = end

    async def wait_for_termination(self, _seconds):
        if self._end is None:
            await asyncio.Event().wait()
        if isinstance(self._end, Exception):
            raise self._end


def server_of(end):
    return _Server(Grpc(end), *[None] * 5)


@pytest.mark.parametrize("end", [True, ValueError("no text")])
async def test_end_of_grpc_stops_the_server_at_once(end, caplog):
    stop = Stop()
    await server_of(end).wait(stop)

    assert stop.stop_now.is_set()
    assert stop.code == 1
    assert caplog.messages == ["gRPC has ended by itself"]


async def test_requested_stop_is_no_end_of_grpc(caplog):
    stop = Stop()
    stop.requested.set()
    await server_of(None).wait(stop)

    assert stop.code == 0
    assert caplog.messages == []
