"""Fake server processes that share one port, as those of `camserve-server serve --processes N` do."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from camserve.v1 import explain_pb2, explain_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator

ESTABLISHED = "01"


class Process(explain_pb2_grpc.ExplainServiceServicer):
    """Server process. Its responses have its name as their model, and the last byte of the image as their class.

    Args:
        name: Index and number of the processes, such as "0/2"; empty for a server that is a single process.
        port: The port that the processes share; 0 for a free one.
    """

    def __init__(self, name: str, port: int = 0) -> None:
        self.metadata = (("camserve-process", name),) if name else ()
        self.name = name
        self.connections: set[str] = set()
        self.streams: list[grpc.ServicerContext] = []
        self.answered = 0
        self.in_flight = 0
        self.changed = threading.Condition()
        self.hold = threading.Event()
        self.hold.set()
        self.server = grpc.server(ThreadPoolExecutor(80), options=[("grpc.so_reuseport", int(bool(name)))])
        explain_pb2_grpc.add_ExplainServiceServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{self.port}"
        self.server.start()

    def Explain(self, request: Any, context: Any) -> Any:  # noqa: N802 -- the RPC's name
        context.set_trailing_metadata(self.metadata)
        return self.answer(request, context)

    def ExplainStream(self, request_iterator: Any, context: Any) -> Iterator[Any]:  # noqa: N802 -- the same
        self.streams.append(context)
        if self.metadata:
            context.send_initial_metadata(self.metadata)
        for each in request_iterator:
            yield explain_pb2.ExplainStreamResponse(
                request_id=each.request_id, response=self.answer(each.request, context)
            )

    def answer(self, request: Any, context: Any) -> Any:
        with self.changed:
            self.connections.add(context.peer())
            self.in_flight += 1
        self.hold.wait()
        with self.changed:
            self.in_flight -= 1
            self.answered += 1
        seen = explain_pb2.Prediction(class_index=request.image[-1])
        return explain_pb2.ExplainResponse(model=self.name or "single", predictions=[seen])

    def stop(self) -> None:
        self.hold.set()
        self.server.stop(None).wait()


def open_connections(port: int) -> int:
    """Return the number of open connections to a port of this machine."""
    tables = [Path(path).read_text("ascii").splitlines()[1:] for path in ("/proc/net/tcp", "/proc/net/tcp6")]
    rows = [line.split() for table in tables for line in table]
    return sum(row[2].endswith(f":{port:04X}") and row[3] == ESTABLISHED for row in rows)
