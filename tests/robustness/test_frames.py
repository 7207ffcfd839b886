"""HTTP/2 frames that no valid client sends: the server reads or refuses them, and answers other callers."""

import contextlib
import struct

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from camserve_server.api import connection_limits, health
from camserve_server.core import config
from robustness import http2_flood
from robustness.http2_flood import (
    ACKNOWLEDGED,
    DATA,
    END_OF_HEADERS,
    GOAWAY,
    HEADERS,
    OPENINGS,
    PING,
    RESET,
    SETTINGS,
    frame,
)
from support import wait_in_loop_until

PRIORITY, WINDOW, CONTINUATION = 2, 8, 9
PING_FRAME, PING_COUNT = frame(PING, 0, 0, bytes(8)), 20_000
OPENED, BEGUN = (frame(HEADERS, flags, 1, OPENINGS[0]) for flags in (END_OF_HEADERS, 0))
NUMBERS = range(1, 20_000, 2)


@pytest.fixture
async def port():
    """Port of a server with the health service and our server's options."""
    options = connection_limits.options(config.load(flags={"models": ("any",)}, environment={}))
    server, servicer = grpc.aio.server(options=options), health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    servicer.set({"": health_pb2.HealthCheckResponse.SERVING})
    number = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield number
    await server.stop(None)


class Listener(http2_flood.Connection):
    """Connection that counts the frames that it receives.

    Attributes:
        pongs: the number of answers to its pings.
        goodbyes: the number of GOAWAY frames, with which the server begins to close the connection.
    """

    def __init__(self, port):
        self.pongs = self.goodbyes = 0
        super().__init__("127.0.0.1", port)

    def _handle(self, kind, flags, content):
        self.pongs += kind == PING and flags & ACKNOWLEDGED
        self.goodbyes += kind == GOAWAY
        super()._handle(kind, flags, content)


async def test_any_number_of_pings_at_once_is_answered(port):
    """gRPC's own limit on pings took time that grew with the square of their number."""
    connection = Listener(port)
    connection.socket.sendall(PING_FRAME * PING_COUNT)
    connection.send("grpc.health.v1.Health/Check", b"")
    await wait_in_loop_until(lambda: connection.statuses or not connection.open)
    connection.socket.close()

    assert (connection.pongs, connection.goodbyes) == (PING_COUNT, 0)


FLOODS = {
    "SETTINGS": frame(SETTINGS, 0, 0) * 20_000,
    "windows that close and open": OPENED
    + b"".join(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, size)) for size in (0, 65_535) * 5_000),
    "a window that overflows": frame(WINDOW, 0, 0, struct.pack(">I", 2**31 - 1)) * 2,
    "a window update of 0": frame(WINDOW, 0, 0, bytes(4)),
    "empty DATA": OPENED + frame(DATA, 0, 1) * 20_000,
    "empty CONTINUATION": BEGUN + frame(CONTINUATION, 0, 1) * 20_000,
    "CONTINUATION without end": BEGUN + frame(CONTINUATION, 0, 1, http2_flood.plain(b"x-a", bytes(50)) * 250) * 60,
    "PRIORITY": b"".join(frame(PRIORITY, 0, number, bytes(5)) for number in NUMBERS),
    "resets of streams that were not opened": b"".join(
        frame(RESET, 0, number, http2_flood.CANCEL) for number in NUMBERS
    ),
    "headers that repeat a large one": frame(
        HEADERS, END_OF_HEADERS, 1, OPENINGS[0] + b"\x40\x01a\x7f\xa1\x1e" + b"v" * 4000 + b"\xbe" * 12_000
    ),
    "a number of HPACK that overflows": frame(HEADERS, END_OF_HEADERS, 1, b"\xff" * 10 + b"\x7f"),
    "a frame of 16 MB": (2**24 - 1).to_bytes(3, "big") + bytes((DATA, 0)) + bytes(4) + bytes(100_000),
    "frames of an unknown type": frame(99, 0, 0, bytes(8)) * 20_000,
}


@pytest.mark.parametrize("name", FLOODS)
async def test_flood_of_frames_does_not_keep_others_from_answers(port, name):
    attacker = Listener(port)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        with contextlib.suppress(OSError):  # the server may close the connection before everything is sent
            attacker.socket.sendall(FLOODS[name])
        during = await stub.Check(health_pb2.HealthCheckRequest())
        with contextlib.suppress(OSError):
            attacker.socket.sendall(PING_FRAME)
        await wait_in_loop_until(lambda: attacker.pongs or not attacker.open)
        after = await stub.Check(health_pb2.HealthCheckRequest())
    attacker.socket.close()

    assert during.status == after.status == health_pb2.HealthCheckResponse.SERVING
