"""The client, awaited: the same as ``_client``, line by line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast, overload

import grpc.aio

from camserve import _codec, _inspection_codec, _metrics, _replay, _stream
from camserve._errors import CamserveError, Cancelled, FailedPrecondition, Internal, StatusLost, border
from camserve._progress import CallbackProgress, progress_bar
from camserve._retry import Retry, Tries
from camserve._settings import (
    HEALTH_CHECK,
    IN_FLIGHT,
    LOCAL,
    TIMEOUT,
    Given,
    health,
    health_request,
    new_request_id,
    settings,
)
from camserve.v1 import (
    evaluate_pb2,
    evaluate_pb2_grpc,
    explain_pb2,
    explain_pb2_grpc,
    models_pb2,
    models_pb2_grpc,
)

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import TracebackType
    from typing import Self, Unpack

    from camserve._access import AccessOptions
    from camserve._evaluation import Evaluation, MetricInfo
    from camserve._inspection import Features, Inspection
    from camserve._progress import Meter, OnProgress
    from camserve._receipts import Receipt
    from camserve._replay import Replay
    from camserve._result import Result
    from camserve._settings import Settings
    from camserve._targets import BoxLike
    from camserve._values import Health, Layer, MethodInfo, Model

Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")

_Outbox: TypeAlias = "asyncio.Queue[explain_pb2.ExplainStreamRequest | None]"
_Inbox: TypeAlias = "asyncio.Queue[explain_pb2.ExplainStreamResponse | Exception]"


class AsyncClient:
    """A connection to a camserve server, for one event loop: ``Client``, awaited.

    Args:
        address: HOST:PORT.
        timeout: Seconds that a call may take, retries and pauses included; ``math.inf`` for no
            limit.
        retries: How often a call is sent again when the server is unavailable or its queue is full;
            a ``Retry`` sets the pauses as well.
        credentials: gRPC's own, for what ``tls`` does not say. Default: no encryption.
        metadata: Sent with every call.
        channel: A channel to use in place of one to the address: for interceptors, for tests, or for
            a server in the same process. The client closes it. The address is then only named in
            errors, and a token is sent whether or not the channel is encrypted. docs/channels.md
            lists the methods that a channel needs.
        **access: TLS and the token: see ``AccessOptions``.

    Raises:
        InvalidArgument: An argument is out of range.
    """

    def __init__(
        self,
        address: str = LOCAL,
        *,
        timeout: float = TIMEOUT,
        retries: int | Retry = Retry(),  # noqa: B008 -- a frozen value
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Mapping[str, str] | None = None,
        channel: grpc.aio.Channel | None = None,
        **access: Unpack[AccessOptions],
    ) -> None:
        given = Given(timeout, retries, credentials, metadata, own_channel=channel is not None)
        self._settings = settings(address, given, access)
        self._channel = channel
        self._opened: _Stubs | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; calls under way end with Cancelled."""
        self._closed = True
        if self._channel is not None:
            await self._channel.close()

    async def explain(
        self,
        image: _codec.ImageLike,
        *,
        on_progress: OnProgress | None = None,
        timeout: float | None = None,
        **options: Unpack[_codec.ExplainOptions],
    ) -> Result:
        """Explain what the model saw in one image: see ``Client.explain``."""
        return await self._asked(_codec.Question(**options).request(), image, on_progress, timeout)

    async def replay(
        self,
        receipt: Receipt,
        image: _codec.ImageLike,
        *,
        on_progress: OnProgress | None = None,
        timeout: float | None = None,
    ) -> Replay:
        """Ask for a receipt's explanation again, and compare: see ``Client.replay``."""
        result = await self._asked(_replay.request(receipt), image, on_progress, timeout)
        return _replay.compare(receipt, _replay.explanation(result))

    @overload
    def explain_many(
        self,
        images: Iterable[_codec.ImageLike] | AsyncIterable[_codec.ImageLike],
        *,
        progress: bool = ...,
        in_flight: int = ...,
        on_error: Literal["raise"] = ...,
        timeout: float | None = ...,
        **options: Unpack[_codec.ExplainOptions],
    ) -> AsyncGenerator[Result, None]: ...
    @overload
    def explain_many(
        self,
        images: Iterable[_codec.ImageLike] | AsyncIterable[_codec.ImageLike],
        *,
        progress: bool = ...,
        in_flight: int = ...,
        on_error: Literal["return"],
        timeout: float | None = ...,
        **options: Unpack[_codec.ExplainOptions],
    ) -> AsyncGenerator[Result | CamserveError, None]: ...
    def explain_many(
        self,
        images: Iterable[_codec.ImageLike] | AsyncIterable[_codec.ImageLike],
        *,
        progress: bool = False,
        in_flight: int = IN_FLIGHT,
        on_error: Literal["raise", "return"] = "raise",
        timeout: float | None = None,
        **options: Unpack[_codec.ExplainOptions],
    ) -> AsyncGenerator[Any, None]:
        """Explain many images over one stream: see ``Client.explain_many``.

        The images may be an asynchronous iterable too. Leave the loop early under
        ``contextlib.aclosing``, or the stream ends only when Python notices.
        """
        patience = self._settings.patience(timeout)
        window = _stream.InFlightWindow(in_flight, self._settings.retry, patience, on_error)
        question = _codec.Question(**options).request()
        question.progress = progress
        bar = progress_bar(images, shown=progress)
        return self._explained(_stream.many(images), question, window, bar)

    async def inspect(
        self,
        image: _codec.ImageLike,
        *,
        timeout: float | None = None,
        **options: Unpack[_inspection_codec.InspectOptions],
    ) -> Inspection:
        """Measure every layer of a model while it looks at one image: see ``Client.inspect``."""
        request = await asyncio.to_thread(_inspection_codec.inspection_request, image, options)
        return _inspection_codec.inspection(await self._call(self._stubs.explain.InspectLayers, request, timeout))

    async def features(
        self,
        image: _codec.ImageLike,
        *,
        timeout: float | None = None,
        **options: Unpack[_inspection_codec.FeaturesOptions],
    ) -> Features:
        """Return channels of a layer: see ``Client.features``."""
        request = await asyncio.to_thread(_inspection_codec.features_request, image, options)
        return _inspection_codec.features(await self._call(self._stubs.explain.ExtractFeatures, request, timeout))

    async def evaluate(
        self,
        image: _codec.ImageLike,
        *,
        metrics: _metrics.MetricLike | Sequence[_metrics.MetricLike] = (),
        box: BoxLike | None = None,
        timeout: float | None = None,
        **options: Unpack[_codec.ExplainOptions],
    ) -> Evaluation:
        """Explain one image, and judge every map by every metric: see ``Client.evaluate``."""
        question = await asyncio.to_thread(_codec.with_image, _codec.Question(**options).request(), image)
        request = _metrics.request(question, metrics, box)
        return _metrics.evaluation(await self._call(self._stubs.evaluate.Evaluate, request, timeout))

    async def metrics(self) -> tuple[MetricInfo, ...]:
        """List the metrics that the server knows, and their parameters."""
        request = evaluate_pb2.ListMetricsRequest()
        reply = await self._call(self._stubs.evaluate.ListMetrics, request)
        return tuple(map(_metrics.metric, reply.metrics))

    async def models(self) -> tuple[Model, ...]:
        """List the models that the server is there for; the first one is its default."""
        reply = await self._call(self._stubs.models.ListModels, models_pb2.ListModelsRequest())
        return tuple(map(_codec.model, reply.models))

    async def model(self, name: str = "") -> Model:
        """Describe one model, with its labels; the server's first where no name is given."""
        reply = await self._call(self._stubs.models.GetModel, models_pb2.GetModelRequest(name=name))
        return _codec.model(reply.model, reply.labels)

    async def load_model(
        self, name: str, *, weights: str = "", sha256: str = "", timeout: float | None = None
    ) -> Model:
        """Have the server load a model, or load it again; the version before answers meanwhile.

        Args:
            name: Of a model in the server's configuration.
            weights: A file in the server's model folder. Default: what the configuration says.
            sha256: That the file of weights must have, in hexadecimal.
            timeout: Seconds, instead of the client's. The server goes on with what it has begun.

        Raises:
            FailedPrecondition: The server does not allow it, or the model could not be loaded.
        """
        request = models_pb2.LoadModelRequest(name=name, weights=weights, sha256=sha256)
        return _codec.model((await self._call(self._stubs.models.LoadModel, request, timeout)).model)

    async def unload_model(self, name: str, *, timeout: float | None = None) -> Model:
        """Have the server unload a model; it returns when the last request for it is answered.

        Args:
            name: Of the model.
            timeout: Seconds, instead of the client's. The server goes on with what it has begun.

        Raises:
            FailedPrecondition: The server does not allow it.
        """
        request = models_pb2.UnloadModelRequest(name=name)
        return _codec.model((await self._call(self._stubs.models.UnloadModel, request, timeout)).model)

    async def layers(self, model: str = "") -> tuple[Layer, ...]:
        """List the layers of a model in the order in which they run."""
        request = models_pb2.ListLayersRequest(model=model)
        reply = await self._call(self._stubs.models.ListLayers, request)
        return tuple(map(_codec.layer, reply.layers))

    async def methods(self) -> tuple[MethodInfo, ...]:
        """List the methods that the server knows, and their parameters."""
        reply = await self._call(self._stubs.models.ListMethods, models_pb2.ListMethodsRequest())
        return tuple(map(_codec.method, reply.methods))

    async def health(self, service: str = "") -> Health:
        """Ask once whether the server, or a service, takes requests: see ``Client.health``."""
        request = health_request(service)
        return health(await self._call(self._stubs.check, request, retry=Retry(attempts=0)))

    @property
    def _stubs(self) -> _Stubs:
        # gRPC may hang on a closed channel that is made to do something new.
        if self._closed:
            raise FailedPrecondition("the client is closed")
        if self._opened is None:
            # Not before the first call: a channel belongs to the loop in which it was made.
            self._channel = _opened(self._settings) if self._channel is None else self._channel
            self._opened = _Stubs(self._channel)
        return self._opened

    async def _call(
        self,
        rpc: grpc.aio.UnaryUnaryMultiCallable[Q, R],
        request: Q,
        timeout: float | None = None,
        retry: Retry | None = None,
    ) -> R:
        request_id = new_request_id()
        metadata = self._settings.metadata_with(request_id)
        tries = Tries(retry or self._settings.retry, self._settings.patience(timeout))
        while True:
            try:
                with border(self._settings.address, request_id):
                    return await _own(rpc(request, timeout=tries.start(), metadata=metadata))
            except CamserveError as error:
                pause = tries.pause(error)
                if pause is None:
                    raise
            await asyncio.sleep(pause)

    async def _explained(
        self,
        images: Iterable[_codec.ImageLike] | AsyncIterable[_codec.ImageLike],
        question: explain_pb2.ExplainRequest,
        window: _stream.InFlightWindow,
        measured: AbstractContextManager[Meter],
    ) -> AsyncGenerator[_stream.Outcome, None]:
        source = _each(images)
        with measured as meter:
            async with self._line() as line:
                while not window.done:
                    if window.room:
                        image = await anext(source, _stream.END)
                        window.take(await asyncio.to_thread(_stream.asked, question, image))
                    await line.send(window.due())
                    window.hear(await line.hear(window.patience()))
                    if rows := window.news():
                        meter.rows(rows)
                    for outcome in window.ready():
                        meter.image()
                        yield outcome
                await line.finish()

    async def _asked(
        self,
        question: explain_pb2.ExplainRequest,
        image: _codec.ImageLike,
        on_progress: OnProgress | None,
        timeout: float | None,
    ) -> Result:
        if on_progress is not None:
            return await self._watched(image, question, on_progress, timeout)
        # Reading and encoding an image would hold up the loop.
        request = await asyncio.to_thread(_codec.with_image, question, image)
        return _codec.result(await self._call(self._stubs.explain.Explain, request, timeout), request.targets)

    async def _watched(
        self,
        image: _codec.ImageLike,
        question: explain_pb2.ExplainRequest,
        on_progress: OnProgress,
        timeout: float | None,
    ) -> Result:
        window = _stream.InFlightWindow(1, self._settings.retry, self._settings.patience(timeout), "raise")
        question.progress = True
        explained = self._explained((image,), question, window, nullcontext(CallbackProgress(on_progress)))
        (result,) = [each async for each in explained]
        return cast("Result", result)

    def _line(self) -> StreamConnection:
        return StreamConnection(self._stubs.explain, self._settings)


def _opened(settings: Settings) -> grpc.aio.Channel:
    address, secure, options = settings.address, settings.credentials, settings.channel_options
    return grpc.aio.secure_channel(address, secure, options) if secure else grpc.aio.insecure_channel(address, options)


class _Stubs:
    """The calls that a client makes through a channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.explain = explain_pb2_grpc.ExplainServiceStub(channel)
        self.evaluate = evaluate_pb2_grpc.EvaluateServiceStub(channel)
        self.models = models_pb2_grpc.ModelServiceStub(channel)
        self.check: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(HEALTH_CHECK)


async def _own(call: grpc.aio.UnaryUnaryCall[Any, R]) -> R:
    """Await a call. If closing the client cancels the call, its task is not cancelled.

    Raises:
        Internal: The answer cannot be parsed.
    """
    try:
        answer = cast("R | None", await call)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise Cancelled("the client was closed") from error
    if answer is None:  # gRPC returns None for bytes that cannot be parsed
        raise Internal("the server sent an answer that cannot be parsed")
    return answer


async def _each(items: Iterable[T] | AsyncIterable[T]) -> AsyncIterator[T]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


HESITATION = 0.2
"""Seconds before the first request after a stream that broke while it was written to.

gRPC loses what the server says meanwhile, and one that refuses streams shall be heard.
"""


class StreamConnection:
    """One stream at a time, opened when there is something to send and none is open.

    Both directions go through queues, so that waiting for an answer has an end.
    """

    def __init__(self, stub: explain_pb2_grpc.ExplainServiceAsyncStub, settings: Settings) -> None:
        self._stub = stub
        self._settings = settings
        self._call: grpc.aio.Call | None = None
        self._reader: asyncio.Task[None] | None = None
        self._outbox: _Outbox = asyncio.Queue()
        self._inbox: _Inbox = asyncio.Queue()
        self._hesitant = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._drop()

    async def send(self, requests: Sequence[explain_pb2.ExplainStreamRequest]) -> None:
        """Send requests, on a new stream if there is none."""
        if requests and self._call is None:
            self._open()
        for request in requests:
            self._outbox.put_nowait(request)

    async def hear(self, seconds: float) -> _stream.Event:
        """Wait for an answer, or for the error that the stream breaks with.

        Raises:
            Exception: What a channel of the caller's own raised, other than gRPC's errors.
        """
        try:
            async with asyncio.timeout(seconds):
                event = await self._inbox.get()
        except TimeoutError:
            return None
        if isinstance(event, CamserveError):
            self._hesitant = isinstance(event, StatusLost)
            await self._drop()
        elif isinstance(event, Exception):
            raise event
        return event

    async def finish(self) -> None:
        """End the stream in good order, so that the server does not see it cancelled."""
        if self._call is not None:
            self._outbox.put_nowait(None)
            await self.hear(_stream.FAREWELL)

    def _open(self) -> None:
        self._outbox, self._inbox = asyncio.Queue(), asyncio.Queue()
        request_id = new_request_id()
        edge = border(self._settings.address, request_id)
        with border(self._settings.address, request_id):
            call = self._stub.ExplainStream(
                _until_none(self._outbox, HESITATION if self._hesitant else 0),
                metadata=self._settings.metadata_with(request_id),
            )
        self._reader = asyncio.create_task(_read(call, self._inbox, edge))
        self._call = call

    async def _drop(self) -> None:
        self._outbox.put_nowait(None)
        if self._call is not None and self._reader is not None:
            self._call.cancel()
            await asyncio.wait({self._reader})
            self._call = None


async def _until_none(outbox: _Outbox, seconds: float) -> AsyncIterator[explain_pb2.ExplainStreamRequest]:
    await asyncio.sleep(seconds)
    while (request := await outbox.get()) is not None:
        yield request


async def _read(
    answers: AsyncIterable[explain_pb2.ExplainStreamResponse],
    inbox: _Inbox,
    edge: AbstractContextManager[None],
) -> None:
    try:
        with edge:
            async for answer in answers:
                inbox.put_nowait(answer)
        inbox.put_nowait(_stream.ended())
    except asyncio.CancelledError:
        inbox.put_nowait(Cancelled("the client was closed"))
    except Exception as error:  # noqa: BLE001 -- the caller waits for whatever ends the stream
        inbox.put_nowait(error)
