"""The scope of one RPC: its request id, deadline, caller, telemetry and line in the log; its errors become statuses."""

import asyncio
import logging
import math
import random
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import grpc

from camserve.v1 import evaluate_pb2, explain_pb2, models_pb2
from camserve_server.api import codec
from camserve_server.api.statuses import STATUS, service_error_of, trailers_of
from camserve_server.core import logs
from camserve_server.core.errors import InvalidArgument, ServiceError, Unavailable
from camserve_server.methods import METHODS
from camserve_server.models.values import KnownModel
from camserve_server.scheduling.admission import address_of
from camserve_server.serving.explain import Pipeline
from camserve_server.telemetry import RequestTrace, Telemetry

log = logging.getLogger(__name__)

T = TypeVar("T")

Context = grpc.aio.ServicerContext[Any, Any]

STREAMS = frozenset({"ExplainStream", "ModelStreamInfer"})
"""Streaming RPCs: each request of theirs is recorded by itself."""

RPC_NAMES: Mapping[str, str] = {
    rpc.name: f"{service.full_name}/{rpc.name}"
    for file in (explain_pb2, evaluate_pb2, models_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for rpc in service.methods
}
"""The full names of the RPCs, by their short names, which are unique."""

LONGEST_ID = 128  # characters of a request id
RECORDED_METHODS = 9  # methods of a request that are looked at before its size is checked
ROUNDING = 0.95  # of a deadline: gRPC rounds the time left up, so the caller may give up slightly before our deadline


@dataclass(slots=True)
class ServerState:
    """The state of the server that its RPCs share.

    Attributes:
        stream_in_flight: requests of one stream under way at most.
        idle: seconds that a stream may be open with nothing of it under way.
        pipeline: None until the models are warm.
        draining: set when the server stops.
        active: calls under way.
        arrived: calls that came so far.
        telemetry: of requests; None where it is off.
        names: of spans, by the names of the RPCs.
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


@dataclass(slots=True)
class Call:
    """One RPC, or one item of a stream.

    Attributes:
        request_id: the caller's, or one of ours.
        deadline: on the event loop's clock.
        caller: the name of a token, or an address.
        unsent: closed when its reply is sent: releases what is held for it.
        fields: of its line in the log.
        telemetry: that counts it; None where it is off.
        record: of it, for telemetry; None where it is off.
        stream: the record of the stream that it is an item of.
    """

    request_id: str
    deadline: float
    caller: str
    unsent: ExitStack = field(default_factory=ExitStack)
    fields: dict[str, object] = field(default_factory=dict)
    telemetry: Telemetry | None = None
    record: RequestTrace | None = None
    stream: RequestTrace | None = None

    def item(self, request_id: str) -> "Call":
        """Return the call of one item of this stream."""
        return Call(request_id, self.deadline, self.caller, stream=self.record)

    def bound(self, pipeline: Pipeline) -> Pipeline:
        """Return the pipeline for the requests of this call."""
        return pipeline.called_by(self.caller, self.record)

    def begin(self, state: ServerState, rpc: str, context: Context | None = None) -> None:
        """Begin its record where telemetry is on; without a context it is an item of a stream."""
        if state.telemetry:
            name = state.names.get(rpc, rpc) if context else f"{rpc} item"
            stream = context is not None and rpc in STREAMS
            record = RequestTrace(rpc, self.request_id if _is_id(self.request_id) else "", stream)
            state.telemetry.begin(record, name, _metadata(context), self.stream)
            self.telemetry, self.record = state.telemetry, record
            logs.TRACE_ID.set(record.trace_id)

    def record_request(self, request: explain_pb2.ExplainRequest, models: Mapping[str, KnownModel]) -> None:
        """Record which model and methods a request names, before it is checked: names that do not exist are left out.

        Args:
            request: as it came.
            models: that there are; the first is the default.
        """
        if self.record:
            model = request.model or next(iter(models), "")
            named = [one.name if one.name in METHODS else "" for one in request.methods[:RECORDED_METHODS]]
            self.record.about(model if model in models else "", named or [codec.DEFAULT_METHOD])

    def note_reply(self, response: explain_pb2.ExplainResponse) -> None:
        """Add what was answered to the fields of the log."""
        self.fields = {
            "model": response.model,
            "explanations": len(response.explanations),
            "batch_rows": response.timing.batch_rows,
        }

    def fail(self, error: ServiceError) -> grpc.StatusCode:
        """Add an error to the fields of the log and to the record; return its status."""
        self.fields["error"] = error.message
        if self.record:
            self.record.reason = error.shed
        return STATUS[type(error)]

    def end(self, what: str, code: grpc.StatusCode, began: float) -> None:
        """Write the line of the log, and end the record."""
        now = asyncio.get_running_loop().time()
        if code is grpc.StatusCode.CANCELLED and now - began >= ROUNDING * (self.deadline - began):
            code = grpc.StatusCode.DEADLINE_EXCEEDED
        log.info(what, extra=logs.fields(code=code.name, ms=round(1e3 * (now - began), 1), **self.fields))
        if self.telemetry and self.record:
            self.telemetry.end(self.record, code.name)


@asynccontextmanager
async def rpc_scope(state: ServerState, context: Context, rpc: str) -> AsyncIterator[Call]:
    """Give the block its request id and deadline; turn what it raises into a status; log how it went."""
    loop = asyncio.get_running_loop()
    began, remaining = loop.time(), cast("float | None", context.time_remaining())
    deadline = math.inf if remaining is None else began + remaining
    call = Call(_request_id(context), deadline, caller_of(context))
    context.add_done_callback(lambda _context: call.unsent.close())  # type: ignore[arg-type]  # any callable will do
    logs.REQUEST_ID.set(call.request_id)
    call.begin(state, rpc, context)
    context.set_trailing_metadata((("x-request-id", call.request_id),))
    code = grpc.StatusCode.CANCELLED
    try:
        with state.visited():
            yield call
        code = grpc.StatusCode.OK
    except Exception as error:  # noqa: BLE001 -- the border: nothing of ours goes out unmapped
        ours = service_error_of(error)
        code = call.fail(ours)
        await context.abort(code, ours.message, trailers_of(ours, call.request_id))
    finally:
        call.end(rpc, code, began)


async def run_item(state: ServerState, call: Call, rpc: str, work: Awaitable[T]) -> T | ServiceError:
    """Wait for one request of a stream, whose failure leaves the stream open; log how it went.

    Args:
        state: of the server.
        call: of the item.
        rpc: of the stream.
        work: that answers it.
    """
    began, code = asyncio.get_running_loop().time(), grpc.StatusCode.CANCELLED
    call.begin(state, rpc)
    try:
        answer = await work
    except Exception as error:  # noqa: BLE001 -- one request's failure leaves the stream open
        ours = service_error_of(error)
        code = call.fail(ours)
        return ours
    else:
        code = grpc.StatusCode.OK
        return answer
    finally:
        call.end(f"{rpc} item", code, began)


def caller_of(context: Context) -> str:
    """Return who makes a call: the name of its token, or else its address."""
    return logs.CALLER.get() or address_of(context.peer())


def _metadata(context: Context | None) -> dict[str, Any]:
    return dict(context.invocation_metadata() or ()) if context else {}


def _request_id(context: Context) -> str:
    theirs = str(_metadata(context).get("x-request-id", ""))
    # Unlike uuid4, this asks nothing of the kernel, which would let go of the interpreter on every call.
    return theirs if _is_id(theirs) else f"{random.getrandbits(128):032x}"


def check_id(request_id: str) -> None:
    """Refuse a request id that is empty, too long or not printable.

    Raises:
        InvalidArgument: it is one of these.
    """
    if not _is_id(request_id):
        raise InvalidArgument(f"a request_id has 1 to {LONGEST_ID} printable characters", field="request_id")


def _is_id(text: str) -> bool:
    return text.isprintable() and 0 < len(text) <= LONGEST_ID
