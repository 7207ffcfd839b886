"""The RPCs. Read a request's way from `ExplainServicer.Explain` downward."""

import asyncio
import logging
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar, cast

import grpc
from google.rpc import code_pb2, error_details_pb2, status_pb2

from camserve.v1 import (
    evaluate_pb2,
    evaluate_pb2_grpc,
    explain_pb2,
    explain_pb2_grpc,
    models_pb2,
    models_pb2_grpc,
)
from camserve_server import errors, jobs, logs, wire, xray
from camserve_server.admission import address_of
from camserve_server.errors import Internal, InvalidArgument, ServiceError, Unavailable
from camserve_server.methods import METHODS
from camserve_server.metrics import METRICS
from camserve_server.pipeline import Pipeline
from camserve_server.telemetry import Record, Telemetry
from camserve_server.types import KnownModel, ModelInfo

log = logging.getLogger(__name__)

STATUS: Mapping[type[ServiceError], grpc.StatusCode] = {
    errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.FailedPrecondition: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ResourceExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.OutOfMemory: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.WorkerLost: grpc.StatusCode.UNAVAILABLE,
    errors.Internal: grpc.StatusCode.INTERNAL,
}
"""What each of our errors is on the wire."""

STREAMS = frozenset({"ExplainStream", "ModelStreamInfer"})
"""RPCs of many requests, of which each is told of by itself."""

NAMES: Mapping[str, str] = {
    rpc.name: f"{service.full_name}/{rpc.name}"
    for file in (explain_pb2, evaluate_pb2, models_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for rpc in service.methods
}
"""The full names of the RPCs, by their own, which none has in common with another."""

LONGEST_ID = 128
RECORDED_METHODS = 9  # methods of a request that are looked at before its size is checked

K = TypeVar("K", bound=KnownModel)
Q = TypeVar("Q")
T = TypeVar("T")

Context = grpc.aio.ServicerContext[Any, Any]
ROUNDING = 0.95  # of a deadline: gRPC rounds the time left up, so the caller may give up slightly before our deadline


@dataclass(slots=True)
class House:
    """What the RPCs answer from, once it is there.

    Attributes:
        stream_in_flight: requests of one stream under way at most.
        idle: seconds that a stream may be open with nothing of it under way.
        pipeline: None until the models are warm.
        draining: set when the server stops.
        active: calls under way.
        arrived: calls that came so far.
        telemetry: what is told of each request, if anything is.
        names: that spans have, by those of the RPCs.
    """

    stream_in_flight: int
    idle: float = math.inf
    pipeline: Pipeline | None = None
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    active: int = 0
    arrived: int = 0
    telemetry: Telemetry | None = None
    names: Mapping[str, str] = field(default_factory=dict)

    def open(self) -> Pipeline:
        """Return the pipeline.

        Raises:
            Unavailable: the server is starting or stopping.
        """
        if self.draining.is_set():
            raise Unavailable("the server is draining", retry_after=1.0, shed="draining")
        return self.accepted()

    def accepted(self) -> Pipeline:
        """Return the pipeline for a request that was accepted before the server began to drain.

        Raises:
            Unavailable: the server is starting.
        """
        if self.pipeline is None:
            raise Unavailable("the server is starting: its models are not warm yet", retry_after=1.0, shed="starting")
        return self.pipeline

    @contextmanager
    def visited(self) -> Iterator[None]:
        """Count a call as under way inside the block."""
        self.arrived += 1
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1


class ExplainServicer(explain_pb2_grpc.ExplainServiceServicer):
    """Explains."""

    def __init__(self, house: House) -> None:
        self._house = house

    async def Explain(  # noqa: N802 -- the RPC's name
        self, request: explain_pb2.ExplainRequest, context: Context
    ) -> explain_pb2.ExplainResponse:
        """Explain one image."""
        async with answering(self._house, context, "Explain") as call:
            response = await explained(self._house.open(), request, call)
            response.request_id = call.request_id
            call.seen(response)
            return response

    async def ExplainStream(  # type: ignore[override]  # noqa: N802 -- the RPC's name; writes rather than yields
        self, requests: AsyncIterator["Received[explain_pb2.ExplainStreamRequest]"], context: Context
    ) -> None:
        """Explain many images, each answered as it is ready."""
        async with answering(self._house, context, "ExplainStream") as call:

            async def answer(item: explain_pb2.ExplainStreamRequest, write: Write) -> None:
                one = call.item(item.request_id)
                with one.unsent:
                    async with _telling(item, write) as progress:
                        reply = await self._reply(item, one, progress)
                    await write(reply)

            await conversing(self._house, context, requests, answer)

    async def _reply(
        self, item: explain_pb2.ExplainStreamRequest, call: "Call", progress: jobs.Progress
    ) -> explain_pb2.ExplainStreamResponse:
        outcome = await attempted(self._house, call, "ExplainStream", self._explained(item, call, progress))
        if isinstance(outcome, ServiceError):
            return explain_pb2.ExplainStreamResponse(request_id=item.request_id, error=_message(outcome))
        return explain_pb2.ExplainStreamResponse(request_id=item.request_id, response=outcome)

    async def _explained(
        self, item: explain_pb2.ExplainStreamRequest, call: "Call", progress: jobs.Progress
    ) -> explain_pb2.ExplainResponse:
        _check_id(item.request_id)
        logs.REQUEST_ID.set(item.request_id)
        response = await explained(self._house.accepted(), item.request, call, wait=True, progress=progress)
        response.request_id = item.request_id
        call.seen(response)
        return response

    async def InspectLayers(  # noqa: N802 -- the RPC's name
        self, request: explain_pb2.InspectLayersRequest, context: Context
    ) -> explain_pb2.InspectLayersResponse:
        """Measure every layer for one image."""
        async with answering(self._house, context, "InspectLayers") as call:
            pipeline = self._house.open()
            order = wire.read_inspection(request, pipeline.models, pipeline.limits)
            result = await xray.inspect(call.bound(pipeline), order, deadline=call.deadline)
            response = wire.inspect_response(order, result)
            response.request_id = call.request_id
            call.fields = {"model": response.model, "layers": len(response.layers)}
            return response

    async def ExtractFeatures(  # noqa: N802 -- the RPC's name
        self, request: explain_pb2.ExtractFeaturesRequest, context: Context
    ) -> explain_pb2.ExtractFeaturesResponse:
        """Return channels of a layer."""
        async with answering(self._house, context, "ExtractFeatures") as call:
            pipeline = self._house.open()
            order = wire.read_extraction(request, pipeline.models, pipeline.limits)
            result = await xray.features(call.bound(pipeline), order, call.unsent, deadline=call.deadline)
            response = wire.features_response(order, result)
            response.request_id = call.request_id
            call.fields = {"model": response.model, "channels": len(response.channels)}
            return response


async def explained(
    pipeline: Pipeline,
    request: explain_pb2.ExplainRequest,
    call: "Call",
    *,
    wait: bool = False,
    progress: jobs.Progress = jobs.unheard,
) -> explain_pb2.ExplainResponse:
    """Explain one image: read the request, and encode the result.

    Args:
        pipeline: explains it.
        request: as it came.
        call: that it is part of.
        wait: for room in the queue, rather than be refused.
        progress: is notified how many rows are done, and of how many.

    Raises:
        ServiceError: whatever was wrong.
    """
    call.asks(request, pipeline.models)
    order = wire.read_order(request, pipeline.models, pipeline.limits)
    return await call.bound(pipeline).explain(
        order,
        call.unsent,
        encode=partial(wire.explain_response, order),
        deadline=call.deadline,
        wait=wait,
        progress=progress,
    )


async def _evaluated(
    pipeline: Pipeline, request: evaluate_pb2.EvaluateRequest, call: "Call"
) -> evaluate_pb2.EvaluateResponse:
    call.asks(request.explain, pipeline.models)
    order = wire.read_evaluation(request, pipeline.models, pipeline.limits)
    with wire.within_explain():
        response, readings = await call.bound(pipeline).evaluate(
            order, call.unsent, encode=partial(wire.explain_response, order.explain), deadline=call.deadline
        )
    return wire.evaluate_response(order, response, readings)


@dataclass(frozen=True, slots=True)
class Received(Generic[Q]):
    """A message of a stream.

    Attributes:
        message: the message.
        release: releases the memory that is reserved for it.
    """

    message: Q
    release: Callable[[], None] = lambda: None


async def conversing(
    house: House,
    context: Context,
    requests: AsyncIterator[Received[Q]],
    answer: Callable[[Q, Callable[[Any], Awaitable[None]]], Awaitable[None]],
) -> None:
    """Answer the requests of a stream, some at a time, until there are no more or the server stops.

    Args:
        house: says how many at a time, and when it stops.
        context: of the call.
        requests: as they come.
        answer: answers one of them, by what writes to the stream.

    Raises:
        ServiceError: the stream was idle for long, or what came is no request; those before it are answered first.
    """
    house.open()
    free, writing, pulse = asyncio.Semaphore(house.stream_in_flight), asyncio.Lock(), _Pulse(house.idle)
    handler = cast("asyncio.Task[None]", asyncio.current_task())

    async def write(reply: Any) -> None:
        async with writing:
            try:
                await context.write(reply)
            except grpc.aio.InternalError:  # the caller has gone: a write may know it before gRPC cancels us
                handler.cancel()

    async def answered(item: Received[Q]) -> None:
        await answer(item.message, write)
        item.release()
        pulse.ended()
        free.release()

    ended: ServiceError | None = None
    async with asyncio.TaskGroup() as group:
        await free.acquire()
        try:
            while (item := await _next(house, requests, pulse)) is not None:
                pulse.began()
                group.create_task(answered(item))
                del item  # or it would stay until the next one comes
                await free.acquire()
        except ServiceError as error:
            ended = error  # those that came before it are answered first
    if ended:
        raise ended
    if house.draining.is_set():
        raise Unavailable("the server is draining: send the rest to another", retry_after=1.0, shed="draining")


async def _next(house: House, requests: AsyncIterator[Received[Q]], pulse: "_Pulse") -> Received[Q] | None:
    """Return the next request, or None when there are no more or the server stops.

    Raises:
        Unavailable: nothing is under way, and nothing came for long.
        InvalidArgument: what came is no request.
    """
    reading = asyncio.ensure_future(anext(requests, None))
    draining = asyncio.ensure_future(house.draining.wait())
    try:
        while not (reading.done() or draining.done()):
            waiting = (reading, draining)
            await asyncio.wait(waiting, timeout=pulse.left(), return_when=asyncio.FIRST_COMPLETED)
        return reading.result() if reading.done() else None
    finally:
        draining.cancel()
        reading.cancel()


class _Pulse:
    """What tells a stream that waits for its answers from one that nobody uses.

    Args:
        idle: seconds that it may be open with nothing of it under way.
    """

    def __init__(self, idle: float) -> None:
        self._idle, self._under_way, self._since = idle, 0, asyncio.get_running_loop().time()

    def began(self) -> None:
        """Note that a request came."""
        self._under_way += 1

    def ended(self) -> None:
        """Note that one was answered."""
        self._under_way -= 1
        self._since = asyncio.get_running_loop().time()

    def left(self) -> float:
        """Return how many seconds from now to look again.

        Raises:
            Unavailable: it was idle for too long; a client may open another when it has more to ask.
        """
        left = self._idle if self._under_way else self._since + self._idle - asyncio.get_running_loop().time()
        if left <= 0:
            raise Unavailable(f"the stream was idle for {self._idle:g} s")
        return left


class EvaluateServicer(evaluate_pb2_grpc.EvaluateServiceServicer):
    """Judges explanations."""

    def __init__(self, house: House) -> None:
        self._house = house

    async def Evaluate(  # noqa: N802 -- the RPC's name
        self, request: evaluate_pb2.EvaluateRequest, context: Context
    ) -> evaluate_pb2.EvaluateResponse:
        """Explain one image, and judge every map."""
        async with answering(self._house, context, "Evaluate") as call:
            response = await _evaluated(self._house.open(), request, call)
            response.request_id = response.explained.request_id = call.request_id
            call.seen(response.explained)
            return response

    async def ListMetrics(  # noqa: N802 -- the RPC's name
        self, _request: evaluate_pb2.ListMetricsRequest, context: Context
    ) -> evaluate_pb2.ListMetricsResponse:
        """List the metrics."""
        async with answering(self._house, context, "ListMetrics"):
            self._house.open()
            return evaluate_pb2.ListMetricsResponse(metrics=map(wire.describe_metric, METRICS))


class ModelServicer(models_pb2_grpc.ModelServiceServicer):
    """Describes models, layers and methods; loads and unloads models."""

    def __init__(self, house: House) -> None:
        self._house = house

    async def ListModels(  # noqa: N802 -- the RPC's name
        self, _request: models_pb2.ListModelsRequest, context: Context
    ) -> models_pb2.ListModelsResponse:
        """List the models."""
        async with answering(self._house, context, "ListModels"):
            models = self._house.open().models.values()
            return models_pb2.ListModelsResponse(models=map(wire.describe_model, models))

    async def GetModel(  # noqa: N802 -- the RPC's name
        self, request: models_pb2.GetModelRequest, context: Context
    ) -> models_pb2.GetModelResponse:
        """Describe one model."""
        async with answering(self._house, context, "GetModel"):
            pipeline = self._house.open()
            wire.check_sizes(request, pipeline.limits)
            model = wire.find_model(request.name, pipeline.models, "name")
            labels = model.labels if isinstance(model, ModelInfo) else ()
            return models_pb2.GetModelResponse(model=wire.describe_model(model), labels=labels)

    async def ListLayers(  # noqa: N802 -- the RPC's name
        self, request: models_pb2.ListLayersRequest, context: Context
    ) -> models_pb2.ListLayersResponse:
        """List the layers of a model."""
        async with answering(self._house, context, "ListLayers"):
            pipeline = self._house.open()
            wire.check_sizes(request, pipeline.limits)
            layers = wire.read_model(request.model, pipeline.models, "model").layers.values()
            return models_pb2.ListLayersResponse(layers=map(wire.describe_layer, layers))

    async def ListMethods(  # noqa: N802 -- the RPC's name
        self, _request: models_pb2.ListMethodsRequest, context: Context
    ) -> models_pb2.ListMethodsResponse:
        """List the methods, CAMs first."""
        async with answering(self._house, context, "ListMethods"):
            names = sorted(METHODS, key=lambda name: wire.kind_of(METHODS[name]))
            return models_pb2.ListMethodsResponse(methods=map(wire.describe_method, names))

    async def LoadModel(  # noqa: N802 -- the RPC's name
        self, request: models_pb2.LoadModelRequest, context: Context
    ) -> models_pb2.LoadModelResponse:
        """Load a model, or load it again."""
        async with answering(self._house, context, "LoadModel") as call:
            model = await loaded(self._house, request)
            call.fields = {"model": model.name, "version": model.version}
            return models_pb2.LoadModelResponse(model=wire.describe_model(model))

    async def UnloadModel(  # noqa: N802 -- the RPC's name
        self, request: models_pb2.UnloadModelRequest, context: Context
    ) -> models_pb2.UnloadModelResponse:
        """Unload a model."""
        async with answering(self._house, context, "UnloadModel") as call:
            model = await unloaded(self._house, request)
            call.fields = {"model": model.name, "version": model.version}
            return models_pb2.UnloadModelResponse(model=wire.describe_model(model))


async def loaded(house: House, request: models_pb2.LoadModelRequest) -> ModelInfo:
    """Load a model, or load it again.

    Raises:
        ServiceError: a field is wrong, that is not allowed, or it cannot be loaded.
    """
    pipeline = house.open()
    asked = wire.read_loading(request, pipeline.models, pipeline.limits)
    return await _unless_draining(house, pipeline.lifecycle.load(asked))


async def unloaded(house: House, request: models_pb2.UnloadModelRequest) -> KnownModel:
    """Unload a model, and return when its last request is answered.

    Raises:
        ServiceError: a field is wrong, or that is not allowed.
    """
    pipeline = house.open()
    name = wire.read_unloading(request, pipeline.models, pipeline.limits)
    return await _unless_draining(house, pipeline.lifecycle.unload(name))


async def _unless_draining(house: House, work: Coroutine[Any, Any, K]) -> K:
    """Wait for what concerns a server that goes on, and for no longer than it does."""
    working = asyncio.ensure_future(work)
    draining = asyncio.ensure_future(house.draining.wait())
    try:
        await asyncio.wait((working, draining), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Unavailable("the server is draining", retry_after=1.0, shed="draining")
    finally:
        working.cancel()
        draining.cancel()


@dataclass(slots=True)
class Call:
    """One RPC.

    Attributes:
        request_id: the caller's, or one of ours.
        deadline: on the event loop's clock.
        caller: the name of a token, or an address.
        unsent: closed when its reply is sent: releases what is held for it.
        fields: that its line in the log shall have.
        telemetry: what is told of it, if anything is.
        record: what of it is told.
        stream: the record of the stream that it is an item of.
    """

    request_id: str
    deadline: float
    caller: str
    unsent: ExitStack = field(default_factory=ExitStack)
    fields: dict[str, object] = field(default_factory=dict)
    telemetry: Telemetry | None = None
    record: Record | None = None
    stream: Record | None = None

    def item(self, request_id: str) -> "Call":
        """Return the call of one item of this stream."""
        return Call(request_id, self.deadline, self.caller, stream=self.record)

    def bound(self, pipeline: Pipeline) -> Pipeline:
        """Return the pipeline for the requests of this call."""
        return pipeline.called_by(self.caller, self.record)

    def heard(self, house: House, rpc: str, context: Context | None = None) -> None:
        """Begin to record it, where somebody wants to hear of it; without a context it is one request of a stream."""
        if house.telemetry:
            name = house.names.get(rpc, rpc) if context else f"{rpc} item"
            stream = context is not None and rpc in STREAMS
            record = Record(rpc, self.request_id if _is_id(self.request_id) else "", stream)
            house.telemetry.begin(record, name, _metadata(context), self.stream)
            self.telemetry, self.record = house.telemetry, record
            logs.TRACE_ID.set(record.trace_id)

    def asks(self, request: explain_pb2.ExplainRequest, models: Mapping[str, KnownModel]) -> None:
        """Record which model and methods a request names, before it is checked: names that do not exist are left out.

        Args:
            request: as it came.
            models: that there are; the first is the default.
        """
        if self.record:
            model = request.model or next(iter(models), "")
            named = [one.name if one.name in METHODS else "" for one in request.methods[:RECORDED_METHODS]]
            self.record.about(model if model in models else "", named or [wire.DEFAULT_METHOD])

    def seen(self, response: explain_pb2.ExplainResponse) -> None:
        """Note for the log what was answered."""
        self.fields = {
            "model": response.model,
            "explanations": len(response.explanations),
            "batch_rows": response.timing.batch_rows,
        }

    def failed(self, error: ServiceError) -> grpc.StatusCode:
        """Note what went wrong; return its status."""
        self.fields["error"] = error.message
        if self.record:
            self.record.reason = error.shed
        return STATUS[type(error)]

    def ended(self, what: str, code: grpc.StatusCode, began: float) -> None:
        """Write the line of the log, and tell whoever wants to hear of it."""
        now = asyncio.get_running_loop().time()
        if code is grpc.StatusCode.CANCELLED and now - began >= ROUNDING * (self.deadline - began):
            code = grpc.StatusCode.DEADLINE_EXCEEDED
        log.info(what, extra=logs.fields(code=code.name, ms=round(1e3 * (now - began), 1), **self.fields))
        if self.telemetry and self.record:
            self.telemetry.end(self.record, code.name)


@asynccontextmanager
async def answering(house: House, context: Context, rpc: str) -> AsyncIterator[Call]:
    """Give the block its request id and deadline; turn what it raises into a status; log how it went."""
    loop = asyncio.get_running_loop()
    began, remaining = loop.time(), cast("float | None", context.time_remaining())
    deadline = math.inf if remaining is None else began + remaining
    call = Call(_request_id(context), deadline, caller_of(context))
    context.add_done_callback(lambda _context: call.unsent.close())  # type: ignore[arg-type]  # any callable will do
    logs.REQUEST_ID.set(call.request_id)
    call.heard(house, rpc, context)
    context.set_trailing_metadata((("x-request-id", call.request_id),))
    code = grpc.StatusCode.CANCELLED
    try:
        with house.visited():
            yield call
        code = grpc.StatusCode.OK
    except Exception as error:  # noqa: BLE001 -- the border: nothing of ours goes out unmapped
        ours = ours_of(error)
        code = call.failed(ours)
        await context.abort(code, ours.message, _trailers(ours, call.request_id))
    finally:
        call.ended(rpc, code, began)


async def attempted(house: House, call: Call, rpc: str, work: Awaitable[T]) -> T | ServiceError:
    """Wait for one request of a stream, whose failure leaves the stream open; log how it went.

    Args:
        house: says who is told of it.
        call: what its line in the log shall say.
        rpc: of the stream.
        work: that answers it.
    """
    began, code = asyncio.get_running_loop().time(), grpc.StatusCode.CANCELLED
    call.heard(house, rpc)
    try:
        answer = await work
    except Exception as error:  # noqa: BLE001 -- one request's failure leaves the stream open
        ours = ours_of(error)
        code = call.failed(ours)
        return ours
    else:
        code = grpc.StatusCode.OK
        return answer
    finally:
        call.ended(f"{rpc} item", code, began)


Write = Callable[[explain_pb2.ExplainStreamResponse], Awaitable[None]]


@asynccontextmanager
async def _telling(item: explain_pb2.ExplainStreamRequest, write: Write) -> AsyncIterator[jobs.Progress]:
    """Tell the caller how far its request has come, where it wants to know; never faster than it listens."""
    if not item.request.progress:
        yield jobs.unheard
        return
    news: asyncio.Queue[explain_pb2.Progress | None] = asyncio.Queue()

    def progress(done: int, rows: int) -> None:
        news.put_nowait(explain_pb2.Progress(rows_done=done, rows_total=rows))

    async def tell() -> None:
        while (latest := await news.get()) is not None:
            if news.empty():
                await write(explain_pb2.ExplainStreamResponse(request_id=item.request_id, progress=latest))

    telling = asyncio.create_task(tell())
    try:
        yield progress
    finally:
        news.put_nowait(None)  # not cancelled: half a message would end the stream
        await asyncio.gather(telling, return_exceptions=True)


def caller_of(context: Context) -> str:
    """Return who makes a call: the name of its token, or else its address."""
    return logs.CALLER.get() or address_of(context.peer())


def _metadata(context: Context | None) -> dict[str, Any]:
    return dict(context.invocation_metadata() or ()) if context else {}


def _request_id(context: Context) -> str:
    theirs = str(_metadata(context).get("x-request-id", ""))
    # Unlike uuid4, this asks nothing of the kernel, which would let go of the interpreter on every call.
    return theirs if _is_id(theirs) else f"{random.getrandbits(128):032x}"


def _check_id(request_id: str) -> None:
    if not _is_id(request_id):
        raise InvalidArgument(f"a request_id has 1 to {LONGEST_ID} printable characters", field="request_id")


def _is_id(text: str) -> bool:
    return text.isprintable() and 0 < len(text) <= LONGEST_ID


def ours_of(error: Exception) -> ServiceError:
    """Return our own errors as they are, and Internal for every other error, which is logged.

    Our errors lose their tracebacks. A traceback refers to frames that refer to the error, and this cycle would keep
    the request, perhaps many megabytes, in memory until the next garbage collection.
    """
    if isinstance(error, ServiceError):
        return error.with_traceback(None)
    log.error("an RPC failed", exc_info=error)
    return Internal(f"internal error; the server's log has more under request id {logs.REQUEST_ID.get()}")


def _trailers(error: ServiceError, request_id: str) -> tuple[tuple[str, str | bytes], ...]:
    status = status_pb2.Status(code=code_pb2.Code.Value(STATUS[type(error)].name), message=error.message)
    status.details.add().Pack(error_details_pb2.RequestInfo(request_id=request_id))
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    trailers = (("x-request-id", request_id), ("grpc-status-details-bin", status.SerializeToString()))
    if error.retry_after is None:
        return trailers
    return *trailers, ("grpc-retry-pushback-ms", str(math.ceil(1e3 * error.retry_after)))


def _message(error: ServiceError) -> explain_pb2.Error:
    violations = [explain_pb2.FieldViolation(field=error.field, description=error.message)] if error.field else []
    retry = None if error.retry_after is None else math.ceil(1e3 * error.retry_after)
    code = code_pb2.Code.Value(STATUS[type(error)].name)
    return explain_pb2.Error(code=code, message=error.message, fields=violations, retry_after_ms=retry)
