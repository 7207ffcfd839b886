"""Calls whose large message has been sent except for its last byte, over HTTP and over gRPC in frames of our own.

No client of gRPC's sends a part of a message. These calls never block: they send as much as the server has room for.
"""

import contextlib
import select
import socket
import struct

from camserve.v1 import explain_pb2
from http_calls import EXPLAIN, connect, head, read_all, request, statuses
from robustness.http2_flood import (
    ACKNOWLEDGED,
    DATA,
    END_OF_HEADERS,
    END_OF_STREAM,
    HEADERS,
    PING,
    PREFACE,
    SETTINGS,
    frame,
    opening,
)

MIB = 2**20
WINDOW, INITIAL_WINDOW = 8, 4  # the frame that enlarges a window, and the setting of new windows
DEFAULT_WINDOW, LARGEST_FRAME = 65_535, 16_384  # bytes
CONNECTION, STREAM = 0, 1  # numbers of streams
INVALID_ARGUMENT = b"\x0bgrpc-status\x013"  # a header, as HPACK has a literal
QUIET_ROUNDS = 20  # health checks answered while the server takes no further byte of any call


class HttpCall:
    """Call of Explain over HTTP, whose image is 7.5 MiB of bytes that are not an image.

    Args:
        server: the server, as a `ServerProcess`.
    """

    def __init__(self, server):
        body = b'{"image":"' + b"A" * (10 * MIB) + b'"}'
        lines = "Content-Type: application/json", f"Content-Length: {len(body)}", "Connection: close"
        self._rest, self._socket = memoryview(head(EXPLAIN, *lines) + body), connect(server.http_port)
        self._socket.setblocking(False)

    @property
    def held(self):
        """True if only the last byte is still here."""
        return len(self._rest) == 1

    def push(self):
        """Send what the server has room for; return True if that was anything."""
        before = len(self._rest)
        with contextlib.suppress(BlockingIOError):
            while not self.held:
                self._rest = self._rest[self._socket.send(self._rest[:-1]) :]
        return len(self._rest) < before

    def finish(self):
        """Send the rest; return True if the call is refused."""
        self._socket.setblocking(True)
        with contextlib.closing(self):
            self._socket.sendall(self._rest)
            return statuses(read_all(self._socket)) == [400]

    def close(self):
        """Hang up."""
        self._socket.close()


class GrpcCall:
    """Call of Explain over gRPC, whose image is almost 8 MiB of zeros, on a connection of its own.

    Args:
        server: the server, as a `ServerProcess`.
    """

    def __init__(self, server):
        message = explain_pb2.ExplainRequest(image=bytes(8 * MIB - 9)).SerializeToString()
        self._rest = memoryview(struct.pack(">BI", 0, len(message)) + message)
        opened = frame(HEADERS, END_OF_HEADERS, STREAM, opening(EXPLAIN[1:]))
        self._frames, self._received = bytearray(PREFACE + frame(SETTINGS, 0, 0) + opened), bytearray()
        self._windows, self._new_window = {CONNECTION: DEFAULT_WINDOW, STREAM: DEFAULT_WINDOW}, DEFAULT_WINDOW
        self._answer = b""
        self._socket = socket.create_connection(("127.0.0.1", server.port))
        self._socket.setblocking(False)

    @property
    def held(self):
        """True if only the last byte is still here."""
        return len(self._rest) == 1 and not self._frames

    def push(self):
        """Send what the server has room for; return True if that was anything, or if the server sent something."""
        moved = self._receive()
        with contextlib.suppress(BlockingIOError):
            while self._frames or self._room():
                if not self._frames:
                    self._add_frame(self._room())
                del self._frames[: self._socket.send(self._frames)]
                moved = True
        return moved

    def finish(self):
        """Send the rest; return True if the call is refused."""
        with contextlib.closing(self):
            while not self.held:
                self._push_or_wait()
            self._frames += frame(DATA, END_OF_STREAM, STREAM, self._rest)
            while not self._answer:
                self._push_or_wait()
            return INVALID_ARGUMENT in self._answer

    def close(self):
        """Hang up."""
        self._socket.close()

    def _push_or_wait(self):
        if not self.push():
            select.select([self._socket], [self._socket] if self._frames else [], [])

    def _room(self):
        return max(0, min(*self._windows.values(), LARGEST_FRAME, len(self._rest) - 1))

    def _add_frame(self, size):
        self._frames += frame(DATA, 0, STREAM, self._rest[:size])
        self._rest = self._rest[size:]
        for stream in self._windows:
            self._windows[stream] -= size

    def _receive(self):
        before = len(self._received)
        with contextlib.suppress(BlockingIOError):
            while part := self._socket.recv(2**16):
                self._received += part
        moved = len(self._received) > before
        while len(self._received) >= (end := 9 + int.from_bytes(self._received[:3], "big")):
            kind, flags, stream = self._received[3], self._received[4], int.from_bytes(self._received[5:9], "big")
            self._handle(kind, flags, stream, bytes(self._received[9:end]))
            del self._received[:end]
        return moved

    def _handle(self, kind, flags, stream, content):
        if kind == WINDOW:
            self._windows[stream] += int.from_bytes(content, "big")
        elif kind == HEADERS and flags & END_OF_STREAM:
            self._answer = content
        elif kind in {SETTINGS, PING} and not flags & ACKNOWLEDGED:
            self._frames += frame(kind, ACKNOWLEDGED, 0, content if kind == PING else b"")
            sizes = dict(struct.iter_unpack(">HI", content)) if kind == SETTINGS else {}
            new = sizes.get(INITIAL_WINDOW, self._new_window)
            self._windows[STREAM] += new - self._new_window
            self._new_window = new


def hold(server, calls, least):
    """Send all calls except for their last bytes, as far as the server takes them, and at least `least` calls.

    The server answers other requests meanwhile, so it has also had the time to take more bytes of these calls.
    """
    quiet = 0
    while quiet < QUIET_ROUNDS or sum(call.held for call in calls) < least:
        moved = [call.push() for call in calls]
        assert request(server.http_port, "GET", "/health").status == 200
        quiet = 0 if any(moved) else quiet + 1
