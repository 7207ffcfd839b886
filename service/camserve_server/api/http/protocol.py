"""HTTP/1.1 connections, with the timeouts and limits that uvicorn does not have."""

import asyncio
import logging
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from camserve.web import connect
from camserve_server.api.connection_limits import HANDSHAKE_TIMEOUT

log = logging.getLogger(__name__)
log.setLevel(logging.ERROR)  # uvicorn warns of every request that is not HTTP

# h11 takes 28 us of the event loop for a chunk of a body, whatever its size.
FREE_CHUNKS = 256  # chunks of a body that may have any size
MIN_CHUNK = 256  # bytes of the further ones, on average
LINGER_TIMEOUT = 2.0  # seconds for which the rest of a refused request is read, so that its caller sees the answer
STALL_TIMEOUT = 60.0  # seconds in which a caller must read something of a response, beyond what the kernel buffers


class _Parser(h11.Connection):
    """Parser that refuses bodies in many small chunks."""

    _spare = 0.0

    def next_event(self) -> Any:
        """Return the next event of the connection; raise RemoteProtocolError if it is not acceptable."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._spare = FREE_CHUNKS
        elif isinstance(event, h11.Data):
            self._spare += len(event.data) / MIN_CHUNK - event.chunk_end
            if self._spare < 0:
                raise h11.RemoteProtocolError("the chunks of the body are too small")
        return event


class Connection(H11Protocol):
    """Connection of a caller.

    uvicorn closes idle connections. This class also closes those whose headers arrive slowly, whose refused request has
    no end, whose body has many small chunks, or whose caller does not read the response.
    """

    max_connections: int  # of the server; set by a subclass for each server

    _timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _lingering = False
    _unsent = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Start with the headers of the first request, or close the connection if too many are open.

        One that its caller has reset before it was accepted has no address any more.
        """
        self.logger = log
        self.conn = _Parser(h11.SERVER, self.config.h11_max_incomplete_event_size or 0)
        super().connection_made(transport)
        if self.client is None or len(self.connections) > self.max_connections:
            transport.abort()
        else:
            self._close_after(HANDSHAKE_TIMEOUT)

    def data_received(self, data: bytes) -> None:
        """Handle data, and start or stop the timeout of a request's headers."""
        super().data_received(data)
        if self._lingering and self.conn.their_state is not h11.SEND_BODY:
            self.transport.close()
        elif not self._waits_for_request():
            self._stop_timer()
        elif self._timer is None:
            self._close_after(HANDSHAKE_TIMEOUT)

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the connection."""
        self._stop_timer()
        self._stop_stall_timer()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Wait for the next request, or a short time for the rest of this one."""
        self._stop_timer()
        self._lingering = self.conn.their_state is h11.SEND_BODY
        if self._lingering:
            self._close_after(LINGER_TIMEOUT)
        super().on_response_complete()
        if self.conn.trailing_data[0] and self._waits_for_request() and not self._timer:  # a part of the next request
            self._close_after(HANDSHAKE_TIMEOUT)

    def pause_writing(self) -> None:
        """Watch that the caller reads, as the transport holds much of the response."""
        super().pause_writing()
        self._unsent = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(STALL_TIMEOUT, self._check_progress)

    def resume_writing(self) -> None:
        """Continue the response."""
        self._stop_stall_timer()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, with the headers of every response."""
        self._stop_timer()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # a response has been started
            self.transport.abort()
            return
        headers = {"content-type": "text/plain; charset=utf-8", "connection": "close", **connect.SECURITY_HEADERS}
        for event in (
            h11.Response(status_code=400, headers=list(headers.items()), reason=b"Bad Request"),
            h11.Data(data=f"{msg}\n".encode("ascii")),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _waits_for_request(self) -> bool:
        return not self._has_cycle() or self.cycle.response_complete

    def _has_cycle(self) -> bool:
        return bool(self.cycle)  # None before the first request, though uvicorn declares otherwise

    def _check_progress(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        if unsent >= self._unsent:
            self.transport.abort()
            return
        self._unsent = unsent
        self._stall_timer = self.loop.call_later(STALL_TIMEOUT, self._check_progress)

    def _close_after(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _stop_stall_timer(self) -> None:
        if self._stall_timer:
            self._stall_timer.cancel()
            self._stall_timer = None
