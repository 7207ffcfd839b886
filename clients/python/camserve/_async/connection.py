"""Channel of a client, and the retry loop of its calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from camserve import _codec
from camserve import _transport_async as transport
from camserve._errors import CamserveError, FailedPrecondition, translate_errors
from camserve._retry import CallAttempts
from camserve._settings import HEALTH_CHECK, new_request_id
from camserve.v1 import evaluate_pb2_grpc, explain_pb2_grpc, models_pb2_grpc

if TYPE_CHECKING:
    import grpc.aio

    from camserve._retry import Retry
    from camserve._settings import Settings

Q = TypeVar("Q")
R = TypeVar("R")


class Stubs:
    """Stubs of the server's services on one channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.explain = explain_pb2_grpc.ExplainServiceStub(channel)
        self.evaluate = evaluate_pb2_grpc.EvaluateServiceStub(channel)
        self.models = models_pb2_grpc.ModelServiceStub(channel)
        self.check_health: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(HEALTH_CHECK)


class Connection:
    """Base class of the client's groups of calls: its settings, its channel and its retries.

    Args:
        settings: Settings of the channel and of every call.
        channel: The caller's own channel; None to open one.
    """

    def __init__(self, settings: Settings, channel: grpc.aio.Channel | None) -> None:
        self._settings = settings
        self._channel = channel
        self._open_stubs: Stubs | None = None
        self._closed = False
        if transport.OPENS_CHANNEL_AT_ONCE:
            self._open()

    async def close(self) -> None:
        """Close the connection; calls in progress end with Cancelled."""
        self._closed = True
        if self._channel is not None:
            await self._channel.close()

    def _open(self) -> Stubs:
        if self._channel is None:
            self._channel = transport.open_channel(self._settings)
        self._open_stubs = Stubs(self._channel)
        return self._open_stubs

    @property
    def _stubs(self) -> Stubs:
        self._check_open()
        return self._open_stubs or self._open()

    def _check_open(self) -> None:
        # A call on a closed channel can hang in gRPC, for example if the channel has interceptors.
        if self._closed:
            raise FailedPrecondition("the client is closed")

    async def _call(
        self,
        rpc: grpc.aio.UnaryUnaryMultiCallable[Q, R],
        request: Q,
        timeout: float | None = None,
        retry: Retry | None = None,
    ) -> R:
        request_id = new_request_id()
        metadata = self._settings.metadata_with(request_id)
        attempts = CallAttempts(retry or self._settings.retry, self._settings.timeout_for(timeout))
        while True:
            self._check_open()
            try:
                with translate_errors(self._settings.address, request_id):
                    return await transport.send(rpc, request, attempts.start(), metadata)
            except CamserveError as error:
                pause = attempts.pause(error)
                if pause is None:
                    raise
            await transport.sleep(pause)

    def _file_of(self, image: _codec.ImageLike) -> bytes:
        """Return the encoded image file that the client sends.

        Raises:
            InvalidArgument: The image cannot be read, or is not an image.
        """
        return _codec.image_bytes(image)
