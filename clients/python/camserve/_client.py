"""The client."""

from __future__ import annotations

import queue
import threading
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast, overload

import grpc

from camserve import _codec, _inspection_codec, _metrics, _replay, _stream
from camserve._errors import CamserveError, FailedPrecondition, border
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
    from collections.abc import Generator, Iterable, Mapping, Sequence
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

_Outbox: TypeAlias = "queue.SimpleQueue[explain_pb2.ExplainStreamRequest | None]"
_Inbox: TypeAlias = "queue.SimpleQueue[explain_pb2.ExplainStreamResponse | Exception]"


class Client:
    """A connection to a camserve server; may be shared between threads.

    Args:
        address: HOST:PORT; or several servers that are asked in turn, ``dns:///NAME:PORT`` for all
            addresses of a name, ``ipv4:HOST:PORT,HOST:PORT`` for those.
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
        channel: grpc.Channel | None = None,
        **access: Unpack[AccessOptions],
    ) -> None:
        given = Given(timeout, retries, credentials, metadata, own_channel=channel is not None)
        self._settings = settings(address, given, access)
        self._channel = _opened(self._settings) if channel is None else channel
        self._closed = False
        self._explain = explain_pb2_grpc.ExplainServiceStub(self._channel)
        self._evaluate = evaluate_pb2_grpc.EvaluateServiceStub(self._channel)
        self._models = models_pb2_grpc.ModelServiceStub(self._channel)
        self._check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(HEALTH_CHECK)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; calls under way end with Cancelled."""
        self._closed = True
        self._channel.close()

    def file_of(self, image: _codec.ImageLike) -> bytes:
        """Return the file of an image, which is what is sent.

        Raises:
            InvalidArgument: The image cannot be read, or is no image.
        """
        return _codec.image_bytes(image)

    def explain(
        self,
        image: _codec.ImageLike,
        *,
        on_progress: OnProgress | None = None,
        timeout: float | None = None,
        **options: Unpack[_codec.ExplainOptions],
    ) -> Result:
        """Explain what the model saw in one image.

        Args:
            image: A path, bytes of a JPEG, PNG, WebP or BMP file, a PIL image, or a uint8 [H, W, 3]
                array in RGB.
            on_progress: Called with the rows (copies of the image through the model) that are done,
                and the rows that there are in all, as a long method comes along.
            timeout: Seconds, instead of the client's; with ``on_progress`` those for which the
                server may say nothing.
            **options: What to explain and what to return: see ``ExplainOptions``.

        Raises:
            CamserveError: The class below it says why; what can be seen to be wrong here is not
                sent.
        """
        return self._asked(_codec.Question(**options).request(), image, on_progress, timeout)

    def replay(
        self,
        receipt: Receipt,
        image: _codec.ImageLike,
        *,
        on_progress: OnProgress | None = None,
        timeout: float | None = None,
    ) -> Replay:
        """Ask for a receipt's explanation again, and compare.

        Args:
            receipt: Of an explanation, as ``Receipt.load("why.receipt.json")`` or ``e.receipt``.
            image: The photo that it is of: what ``explain`` takes.
            on_progress: As for ``explain``.
            timeout: As for ``explain``.

        Raises:
            CamserveError: The class below it says why: ``NotFound`` where the server has no model
                of that name. That something differs is no error.
        """
        result = self._asked(_replay.request(receipt), image, on_progress, timeout)
        return _replay.compare(receipt, _replay.explanation(result))

    @overload
    def explain_many(
        self,
        images: Iterable[_codec.ImageLike],
        *,
        progress: bool = ...,
        in_flight: int = ...,
        on_error: Literal["raise"] = ...,
        timeout: float | None = ...,
        **options: Unpack[_codec.ExplainOptions],
    ) -> Generator[Result, None, None]: ...
    @overload
    def explain_many(
        self,
        images: Iterable[_codec.ImageLike],
        *,
        progress: bool = ...,
        in_flight: int = ...,
        on_error: Literal["return"],
        timeout: float | None = ...,
        **options: Unpack[_codec.ExplainOptions],
    ) -> Generator[Result | CamserveError, None, None]: ...
    def explain_many(
        self,
        images: Iterable[_codec.ImageLike],
        *,
        progress: bool = False,
        in_flight: int = IN_FLIGHT,
        on_error: Literal["raise", "return"] = "raise",
        timeout: float | None = None,
        **options: Unpack[_codec.ExplainOptions],
    ) -> Generator[Any, None, None]:
        """Explain many images over one stream; yields one result for each, in their order.

        Images are taken as they are needed, so the iterable may be endless. Leaving the loop early
        ends the stream. A stream that breaks is opened again, and what was unanswered sent again.

        Args:
            images: What ``explain`` takes.
            progress: Whether to draw a progress bar on standard error.
            in_flight: How many images are read ahead of the last result handed on, at most.
            on_error: "raise", or "return" to yield the error of an image in place of its result.
                A server that is lost altogether is always raised.
            timeout: Seconds that the server may take for one image, instead of the client's. Since it
                may work on all that are under way at once, it is taken for dead after so long a
                silence for each of them.
            **options: What to explain and what to return: see ``ExplainOptions``.

        Raises:
            CamserveError: The class below it says why.
        """
        patience = self._settings.patience(timeout)
        window = _stream.InFlightWindow(in_flight, self._settings.retry, patience, on_error)
        question = _codec.Question(**options).request()
        question.progress = progress
        bar = progress_bar(images, shown=progress)
        return self._explained(_stream.many(images), question, window, bar)

    def inspect(
        self,
        image: _codec.ImageLike,
        *,
        timeout: float | None = None,
        **options: Unpack[_inspection_codec.InspectOptions],
    ) -> Inspection:
        """Measure every layer of a model while it looks at one image.

        Args:
            image: What ``explain`` takes.
            timeout: Seconds, instead of the client's.
            **options: What to measure: see ``InspectOptions``.

        Raises:
            CamserveError: The class below it says why.
        """
        request = _inspection_codec.inspection_request(self.file_of(image), options)
        return _inspection_codec.inspection(self._call(self._explain.InspectLayers, request, timeout))

    def features(
        self,
        image: _codec.ImageLike,
        *,
        timeout: float | None = None,
        **options: Unpack[_inspection_codec.FeaturesOptions],
    ) -> Features:
        """Return channels of a layer: the most active ones, or those that matter most for the score.

        Args:
            image: What ``explain`` takes.
            timeout: Seconds, instead of the client's.
            **options: Which channels, and how: see ``FeaturesOptions``.

        Raises:
            CamserveError: The class below it says why.
        """
        request = _inspection_codec.features_request(self.file_of(image), options)
        return _inspection_codec.features(self._call(self._explain.ExtractFeatures, request, timeout))

    def evaluate(
        self,
        image: _codec.ImageLike,
        *,
        metrics: _metrics.MetricLike | Sequence[_metrics.MetricLike] = (),
        box: BoxLike | None = None,
        timeout: float | None = None,
        **options: Unpack[_codec.ExplainOptions],
    ) -> Evaluation:
        """Explain one image, and judge every map by every metric.

        Args:
            image: What ``explain`` takes.
            metrics: One or several, each a name, a ``Metric``, or a pair of name and parameters.
                Default: deletion and insertion.
            box: Where the object is, in the photo's pixels, for the metrics that ask whether the
                map is there: a ``Box``, or left, top, right, bottom.
            timeout: Seconds, instead of the client's.
            **options: What to explain and what to return: see ``ExplainOptions``.

        Raises:
            CamserveError: The class below it says why.
        """
        question = _codec.with_image(_codec.Question(**options).request(), self.file_of(image))
        request = _metrics.request(question, metrics, box)
        return _metrics.evaluation(self._call(self._evaluate.Evaluate, request, timeout))

    def metrics(self) -> tuple[MetricInfo, ...]:
        """List the metrics that the server knows, and their parameters."""
        reply = self._call(self._evaluate.ListMetrics, evaluate_pb2.ListMetricsRequest())
        return tuple(map(_metrics.metric, reply.metrics))

    def models(self) -> tuple[Model, ...]:
        """List the models that the server is there for; the first one is its default."""
        reply = self._call(self._models.ListModels, models_pb2.ListModelsRequest())
        return tuple(map(_codec.model, reply.models))

    def model(self, name: str = "") -> Model:
        """Describe one model, with its labels; the server's first where no name is given."""
        reply = self._call(self._models.GetModel, models_pb2.GetModelRequest(name=name))
        return _codec.model(reply.model, reply.labels)

    def load_model(self, name: str, *, weights: str = "", sha256: str = "", timeout: float | None = None) -> Model:
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
        return _codec.model(self._call(self._models.LoadModel, request, timeout).model)

    def unload_model(self, name: str, *, timeout: float | None = None) -> Model:
        """Have the server unload a model; it returns when the last request for it is answered.

        Args:
            name: Of the model.
            timeout: Seconds, instead of the client's. The server goes on with what it has begun.

        Raises:
            FailedPrecondition: The server does not allow it.
        """
        request = models_pb2.UnloadModelRequest(name=name)
        return _codec.model(self._call(self._models.UnloadModel, request, timeout).model)

    def layers(self, model: str = "") -> tuple[Layer, ...]:
        """List the layers of a model in the order in which they run."""
        reply = self._call(self._models.ListLayers, models_pb2.ListLayersRequest(model=model))
        return tuple(map(_codec.layer, reply.layers))

    def methods(self) -> tuple[MethodInfo, ...]:
        """List the methods that the server knows, and their parameters."""
        reply = self._call(self._models.ListMethods, models_pb2.ListMethodsRequest())
        return tuple(map(_codec.method, reply.methods))

    def health(self, service: str = "") -> Health:
        """Ask once, without retries, whether the server, or one of its services, takes requests.

        Raises:
            NotFound: There is no such service.
            Unavailable: Nothing answers.
        """
        request = health_request(service)
        return health(self._call(self._check, request, retry=Retry(attempts=0)))

    def _call(
        self,
        rpc: grpc.UnaryUnaryMultiCallable[Q, R],
        request: Q,
        timeout: float | None = None,
        retry: Retry | None = None,
    ) -> R:
        request_id = new_request_id()
        metadata = self._settings.metadata_with(request_id)
        tries = Tries(retry or self._settings.retry, self._settings.patience(timeout))
        while True:
            self._check_open()
            try:
                with border(self._settings.address, request_id):
                    return rpc(request, timeout=tries.start(), metadata=metadata)
            except CamserveError as error:
                pause = tries.pause(error)
                if pause is None:
                    raise
            time.sleep(pause)

    def _asked(
        self,
        question: explain_pb2.ExplainRequest,
        image: _codec.ImageLike,
        on_progress: OnProgress | None,
        timeout: float | None,
    ) -> Result:
        if on_progress is not None:
            return self._watched(image, question, on_progress, timeout)
        request = _codec.with_image(question, self.file_of(image))
        return _codec.result(self._call(self._explain.Explain, request, timeout), request.targets)

    def _watched(
        self,
        image: _codec.ImageLike,
        question: explain_pb2.ExplainRequest,
        on_progress: OnProgress,
        timeout: float | None,
    ) -> Result:
        window = _stream.InFlightWindow(1, self._settings.retry, self._settings.patience(timeout), "raise")
        question.progress = True
        (result,) = self._explained((image,), question, window, nullcontext(CallbackProgress(on_progress)))
        return cast("Result", result)

    def _check_open(self) -> None:
        # A call through a closed channel that has interceptors hangs in gRPC.
        if self._closed:
            raise FailedPrecondition("the client is closed")

    def _line(self) -> StreamConnection:
        self._check_open()
        return StreamConnection(self._explain, self._settings)

    def _explained(
        self,
        images: Iterable[_codec.ImageLike],
        question: explain_pb2.ExplainRequest,
        window: _stream.InFlightWindow,
        measured: AbstractContextManager[Meter],
    ) -> Generator[_stream.Outcome, None, None]:
        source = iter(images)
        with measured as meter, self._line() as line:
            while not window.done:
                if window.room:
                    window.take(_stream.asked(question, next(source, _stream.END), self.file_of))
                line.send(window.due())
                window.hear(line.hear(window.patience()))
                if rows := window.news():
                    meter.rows(rows)
                for outcome in window.ready():
                    meter.image()
                    yield outcome
            line.finish()


def _opened(settings: Settings) -> grpc.Channel:
    address, secure, options = settings.address, settings.credentials, settings.channel_options
    return grpc.secure_channel(address, secure, options) if secure else grpc.insecure_channel(address, options)


class StreamConnection:
    """One stream at a time, opened when there is something to send and none is open.

    Both directions go through queues: gRPC takes requests in a thread of its own, and a thread here
    takes the answers, so that waiting for one has an end.
    """

    def __init__(self, stub: explain_pb2_grpc.ExplainServiceStub, settings: Settings) -> None:
        self._stub = stub
        self._settings = settings
        self._call: grpc.RpcContext | None = None
        self._outbox: _Outbox = queue.SimpleQueue()
        self._inbox: _Inbox = queue.SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._drop()

    def send(self, requests: Sequence[explain_pb2.ExplainStreamRequest]) -> None:
        """Send requests, on a new stream if there is none."""
        if requests and self._call is None:
            self._open()
        for request in requests:
            self._outbox.put(request)

    def hear(self, seconds: float) -> _stream.Event:
        """Wait for an answer, or for the error that the stream breaks with.

        Raises:
            Exception: What a channel of the caller's own raised, other than gRPC's errors.
        """
        try:
            event = self._inbox.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(event, CamserveError):
            self._drop()
        elif isinstance(event, Exception):
            raise event
        return event

    def finish(self) -> None:
        """End the stream in good order, so that the server does not see it cancelled."""
        if self._call is not None:
            self._outbox.put(None)
            self.hear(_stream.FAREWELL)

    def _open(self) -> None:
        self._outbox, self._inbox = queue.SimpleQueue(), queue.SimpleQueue()
        request_id = new_request_id()
        edge = border(self._settings.address, request_id)
        with border(self._settings.address, request_id):
            call = self._stub.ExplainStream(
                iter(self._outbox.get, None), metadata=self._settings.metadata_with(request_id)
            )
        reader = threading.Thread(target=_read, args=(call, self._inbox, edge), daemon=True)
        reader.start()
        self._call = call

    def _drop(self) -> None:
        self._outbox.put(None)  # or gRPC's thread would wait for it for ever
        if self._call is not None:
            self._call.cancel()
            self._call = None


def _read(
    answers: Iterable[explain_pb2.ExplainStreamResponse],
    inbox: _Inbox,
    edge: AbstractContextManager[None],
) -> None:
    try:
        with edge:
            for answer in answers:
                inbox.put(answer)
        inbox.put(_stream.ended())
    except Exception as error:  # noqa: BLE001 -- the caller waits for whatever ends the stream
        inbox.put(error)
