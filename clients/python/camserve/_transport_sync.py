"""I/O of the synchronous client: channels, calls, blocking functions and streams.

It defines the same names as ``_transport_async``, which has their common description.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeAlias, TypeVar

import grpc

from camserve import _stream
from camserve._errors import CamserveError, translate_errors
from camserve._settings import new_request_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from typing import Self

    from camserve._settings import Settings
    from camserve.v1 import explain_pb2, explain_pb2_grpc

P = ParamSpec("P")
Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")

_RequestQueue: TypeAlias = "queue.SimpleQueue[explain_pb2.ExplainStreamRequest | None]"
_EventQueue: TypeAlias = "queue.SimpleQueue[explain_pb2.ExplainStreamResponse | Exception]"

OPENS_CHANNEL_AT_ONCE: Final[bool] = True
"""Threads share a client. A channel that the constructor opens needs no lock."""

sleep = time.sleep


def run_blocking(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function in the calling thread, which may block."""
    return function(*args, **kwargs)


def open_channel(settings: Settings) -> grpc.Channel:
    """Open a channel to the server."""
    address, credentials, options = settings.address, settings.credentials, settings.channel_options
    if credentials is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, credentials, options)


def send(
    rpc: grpc.UnaryUnaryMultiCallable[Q, R],
    request: Q,
    timeout: float | None,
    metadata: tuple[tuple[str, str], ...],
) -> R:
    """Send a request once and return the response."""
    return rpc(request, timeout=timeout, metadata=metadata)


def iterate(items: Iterable[T]) -> Iterator[T]:
    """Iterate over an iterable."""
    return iter(items)


class StreamConnection:
    """Connection that has at most one open stream; sending opens another stream when none is open.

    Requests and responses go through queues: gRPC takes requests in its own thread, and another
    thread reads the responses, so that waiting for a response can time out.
    """

    def __init__(self, stub: explain_pb2_grpc.ExplainServiceStub, settings: Settings) -> None:
        self._stub = stub
        self._settings = settings
        self._call: grpc.RpcContext | None = None
        self._requests: _RequestQueue = queue.SimpleQueue()
        self._events: _EventQueue = queue.SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._cancel()

    def send(self, requests: Sequence[explain_pb2.ExplainStreamRequest]) -> None:
        """Send requests; open a stream if none is open."""
        if requests and self._call is None:
            self._open()
        for request in requests:
            self._requests.put(request)

    def next_event(self, seconds: float) -> _stream.Event:
        """Wait for a response or for the error that ends the stream; return None after a timeout.

        Raises:
            Exception: The caller's own channel raised it, and it is not an error of gRPC.
        """
        try:
            event = self._events.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(event, CamserveError):
            self._cancel()
        elif isinstance(event, Exception):
            raise event
        return event

    def finish(self) -> None:
        """End the stream without cancelling it, so that the server does not record a cancelled call."""
        if self._call is not None:
            self._requests.put(None)
            self.next_event(_stream.STREAM_END_TIMEOUT)

    def _open(self) -> None:
        self._requests, self._events = queue.SimpleQueue(), queue.SimpleQueue()
        request_id = new_request_id()
        with translate_errors(self._settings.address, request_id):
            call = self._stub.ExplainStream(
                iter(self._requests.get, None), metadata=self._settings.metadata_with(request_id)
            )
        errors = translate_errors(self._settings.address, request_id)
        reader = threading.Thread(target=_read, args=(call, self._events, errors), daemon=True)
        reader.start()
        self._call = call

    def _cancel(self) -> None:
        self._requests.put(None)  # otherwise gRPC's thread would wait for a request forever
        if self._call is not None:
            self._call.cancel()
            self._call = None


def _read(
    responses: Iterable[Any],
    events: _EventQueue,
    errors: AbstractContextManager[None],
) -> None:
    """Put every response into the queue, and last the error that ended the stream."""
    try:
        with errors:
            for response in responses:
                events.put(response)
        events.put(_stream.stream_ended())
    except Exception as error:  # noqa: BLE001 -- the consumer waits for whatever ends the stream
        events.put(error)
