"""Scope of an RPC: request id, deadline, caller, telemetry, the line in the log, and errors as gRPC statuses."""

import asyncio
import logging
import math
import random
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import grpc

from camserve.v1 import evaluate_pb2, explain_pb2, models_pb2
from camserve_server.api import codec
from camserve_server.api.statuses import STATUS, service_error_of, trailers_of
from camserve_server.core import logs
from camserve_server.core.errors import InvalidArgument, ServiceError, Unavailable
from camserve_server.core.sockets import address_of
from camserve_server.methods import METHODS
from camserve_server.models.values import KnownModel
from camserve_server.serving.explain import Pipeline
from camserve_server.serving.replies import UntilSent
from camserve_server.serving.repository import ModelChanges
from camserve_server.telemetry import RequestTrace, Telemetry

log = logging.getLogger(__name__)

T = TypeVar("T")

Context = grpc.aio.ServicerContext[Any, Any]

STREAMS = frozenset({"ExplainStream", "ModelStreamInfer"})
"""Names of the streaming RPCs. Each request of a stream has a trace of its own."""

RPC_NAMES: Mapping[str, str] = {
    rpc.name: f"{service.full_name}/{rpc.name}"
    for file in (explain_pb2, evaluate_pb2, models_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for rpc in service.methods
}
"""Full names of the RPCs by their short names, which are unique."""

PROCESS_KEY = "camserve-process"
"""Key of the metadata with the process of a server that has several. Clients open a connection to each process."""

MAX_ID_LENGTH = 128  # characters of a request id
MAX_TRACED_METHODS = 9  # methods of a request that its trace names; the trace begins before the request is checked
DEADLINE_TOLERANCE = (
    0.95  # share of a deadline: gRPC rounds the time left up, so the caller may cancel slightly earlier
)


@dataclass(slots=True)
class ServerState:
    """The state of the server that its RPCs share.

    Attributes:
        stream_in_flight: the largest number of requests of one stream in flight.
        idle: the time, in seconds, that a stream may be open without a request in flight.
        pipeline: the pipeline; None until the models are warm.
        draining: event that is set when the server stops.
        active: the number of calls in flight.
        unsent: the number of calls whose reply, or the last of it, has not been handed to the system yet.
        drained: ports of the callers whose replies were handed to it since the server drains.
        arrived: the number of calls since the server started.
        telemetry: telemetry of requests; None if it is off.
        names: names of spans by the short names of the RPCs.
        log_share: share of the successful calls that are logged, 0 to 1.
        process: number of this process and of all that share the port, such as "0/2"; empty for one process.
        changes: loads and unloads models in all processes; None for one process.
    """

    stream_in_flight: int
    idle: float = math.inf
    pipeline: Pipeline | None = None
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    active: int = 0
    unsent: int = 0
    drained: set[int] = field(default_factory=set)
    arrived: int = 0
    telemetry: Telemetry | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    log_share: float = 1.0
    process: str = ""
    changes: ModelChanges | None = None

    @property
    def process_metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata that tells a caller which of several processes its connection has reached."""
        return ((PROCESS_KEY, self.process),) if self.process else ()

    def require_open(self) -> Pipeline:
        """Return the pipeline for a new request.

        Raises:
            Unavailable: the server is starting or draining.
        """
        if self.draining.is_set():
            raise Unavailable("the server is draining", retry_after=1.0, shed_reason="draining")
        return self.require_warm()

    def require_warm(self) -> Pipeline:
        """Return the pipeline, even for a server that drains: for requests that it has already accepted.

        Raises:
            Unavailable: the server is starting.
        """
        if self.pipeline is None:
            raise Unavailable(
                "the server is starting: its models are not warm yet", retry_after=1.0, shed_reason="starting"
            )
        return self.pipeline

    @contextmanager
    def count_call(self) -> Iterator[None]:
        """Count a call as in flight inside the block."""
        self.arrived += 1
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1

    def count_sent(self, peer: str) -> None:
        """Count a call from this address as sent, of those that are unsent."""
        self.unsent -= 1
        if self.draining.is_set() and (port := peer.rpartition(":")[2]).isdecimal():
            self.drained.add(int(port))


@dataclass(slots=True)
class Call:
    """An RPC, or one item of a stream.

    Attributes:
        request_id: id of the request, from the caller or generated.
        deadline: deadline on the event loop's clock.
        caller: name of the caller's token, or the caller's address.
        until_sent: context of the reply, which releases its memory; closed when the reply has been sent.
        fields: fields of the call's line in the log.
        telemetry: telemetry that counts the call; None if it is off.
        trace: trace of the call; None if telemetry is off.
        stream_trace: trace of the stream that the item belongs to.
    """

    request_id: str
    deadline: float
    caller: str
    until_sent: UntilSent = field(default_factory=UntilSent)
    fields: dict[str, object] = field(default_factory=dict)
    telemetry: Telemetry | None = None
    trace: RequestTrace | None = None
    stream_trace: RequestTrace | None = None

    def item(self, request_id: str) -> "Call":
        """Return the call of one item of this stream."""
        until_sent = UntilSent(self.until_sent.peer)
        return Call(request_id, self.deadline, self.caller, until_sent, stream_trace=self.trace)

    def bind(self, pipeline: Pipeline) -> Pipeline:
        """Return the pipeline for the requests of this call."""
        return pipeline.for_caller(self.caller, self.trace)

    def begin(self, state: ServerState, rpc: str, context: Context | None = None) -> None:
        """Start the trace if telemetry is on. Without a context the call is an item of a stream."""
        if state.telemetry:
            name = state.names.get(rpc, rpc) if context else f"{rpc} item"
            stream = context is not None and rpc in STREAMS
            trace = RequestTrace(rpc, self.request_id if _is_id(self.request_id) else "", stream)
            state.telemetry.begin(trace, name, _metadata(context), self.stream_trace)
            self.telemetry, self.trace = state.telemetry, trace
            logs.TRACE_ID.set(trace.trace_id)

    def record_request(self, request: explain_pb2.ExplainRequest, models: Mapping[str, KnownModel]) -> None:
        """Record the model and methods of a request that is not checked yet; unknown names are left out.

        Args:
            request: the request.
            models: the models of the server by name; the first is the default.
        """
        if self.trace:
            model = request.model or next(iter(models), "")
            methods = [method.name if method.name in METHODS else "" for method in request.methods[:MAX_TRACED_METHODS]]
            self.trace.about(model if model in models else "", methods or [codec.DEFAULT_METHOD])

    def note_reply(self, response: explain_pb2.ExplainResponse) -> None:
        """Add properties of the response to the fields of the log."""
        self.fields = {
            "model": response.model,
            "explanations": len(response.explanations),
            "batch_rows": response.timing.batch_rows,
        }

    def fail(self, error: ServiceError) -> grpc.StatusCode:
        """Add an error to the fields of the log and to the trace; return its status."""
        self.fields["error"] = error.message
        if self.trace:
            self.trace.reason = error.shed_reason
        return STATUS[type(error)]

    def end(self, name: str, code: grpc.StatusCode, began: float, log_share: float) -> None:
        """Write the line of the log, and end the trace.

        Args:
            name: name of the RPC.
            code: status of the call.
            began: time at which the call began.
            log_share: share of the successful calls that are logged.
        """
        now = self.until_sent.ready = asyncio.get_running_loop().time()
        if code is grpc.StatusCode.CANCELLED and now - began >= DEADLINE_TOLERANCE * (self.deadline - began):
            code = grpc.StatusCode.DEADLINE_EXCEEDED
        if log_share == 1 or code is not grpc.StatusCode.OK or random.random() < log_share:  # noqa: S311 -- no secret
            fields = {"code": code.name, "ms": round(1e3 * (now - began), 1), **self.fields}
            logs.write_access_line(log, name, fields)
        if self.telemetry and self.trace:
            self.telemetry.end(self.trace, code.name)


@asynccontextmanager
async def rpc_scope(state: ServerState, context: Context, rpc: str) -> AsyncIterator[Call]:
    """Run an RPC in the block: give it a request id and a deadline, map its errors to statuses, and log it."""
    loop = asyncio.get_running_loop()
    began, remaining = loop.time(), cast("float | None", context.time_remaining())
    deadline = math.inf if remaining is None else began + remaining
    # Asked now: when the callbacks run, gRPC may have freed the call, and `peer` would end the process.
    call = Call(_request_id(context), deadline, caller_of(context), UntilSent(context.peer()))
    state.unsent += 1
    call.until_sent.callback(state.count_sent, call.until_sent.peer)
    context.add_done_callback(lambda _context: call.until_sent.close())  # type: ignore[arg-type]  # accepts any callable
    logs.REQUEST_ID.set(call.request_id)
    call.begin(state, rpc, context)
    context.set_trailing_metadata((("x-request-id", call.request_id), *state.process_metadata))
    if state.process and rpc in STREAMS:  # the trailing metadata of a stream would arrive too late
        await context.send_initial_metadata(state.process_metadata)
    code = grpc.StatusCode.CANCELLED
    try:
        with state.count_call():
            yield call
        code = grpc.StatusCode.OK
    except Exception as error:  # noqa: BLE001 -- every error must become a gRPC status
        service_error = service_error_of(error)
        code = call.fail(service_error)
        trailers = (*trailers_of(service_error, call.request_id), *state.process_metadata)
        await context.abort(code, service_error.message, trailers)
    finally:
        call.end(rpc, code, began, state.log_share)


async def run_item(state: ServerState, call: Call, rpc: str, work: Awaitable[T]) -> T | ServiceError:
    """Run one request of a stream and log it. Return its error, if it fails, so that the stream stays open.

    Args:
        state: state of the server.
        call: call of the item.
        rpc: name of the streaming RPC.
        work: awaitable that answers the request.
    """
    began, code = asyncio.get_running_loop().time(), grpc.StatusCode.CANCELLED
    call.begin(state, rpc)
    try:
        result = await work
    except Exception as error:  # noqa: BLE001 -- the failure of one request leaves the stream open
        service_error = service_error_of(error)
        code = call.fail(service_error)
        return service_error
    else:
        code = grpc.StatusCode.OK
        return result
    finally:
        call.end(f"{rpc} item", code, began, state.log_share)


def caller_of(context: Context) -> str:
    """Return the caller of an RPC: the name of its token, or its address if it has none."""
    return logs.CALLER.get() or address_of(context.peer())


def _metadata(context: Context | None) -> dict[str, Any]:
    return dict(context.invocation_metadata() or ()) if context else {}


def _request_id(context: Context) -> str:
    request_id = str(_metadata(context).get("x-request-id", ""))
    # Not uuid4, which makes a system call: that releases the interpreter's lock on every call.
    return request_id if _is_id(request_id) else f"{random.getrandbits(128):032x}"


def check_id(request_id: str) -> None:
    """Refuse a request id that is empty, too long or not printable.

    Raises:
        InvalidArgument: the id is empty, too long or not printable.
    """
    if not _is_id(request_id):
        raise InvalidArgument(f"a request_id has 1 to {MAX_ID_LENGTH} printable characters", field="request_id")


def _is_id(text: str) -> bool:
    return text.isprintable() and 0 < len(text) <= MAX_ID_LENGTH
