"""A closed loop of a number of callers, each asking for the next photo as soon as it has its answer."""

import concurrent.futures
import contextlib
import http.client
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from benchmarks.photos import photos, requests
from benchmarks.torchserve.servers import Group
from camserve.v1 import explain_pb2

LEAD_SECONDS = 1.5  # a window begins when the callers have been at it so long
TIMEOUT_SECONDS = 300
MOST_BYTES = 64 * 2**20

Send = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True)
class Side:
    """One of the servers that are compared.

    Attributes:
        name: name in the report.
        ask: sends a request and returns the reply; from any thread.
        requests: one for each photo, packed.
        group: the server's processes.
        picture: takes the picture out of a reply, or None if replies have no picture.
    """

    name: str
    ask: Send
    requests: Sequence[bytes]
    group: Group
    picture: Callable[[bytes], bytes] | None


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """Answers within a window of time.

    Attributes:
        rate: replies a second.
        latency: seconds, the median.
        cpu: seconds of processor time that the server used for a reply.
    """

    rate: float
    latency: float
    cpu: float


def measure(side: Side, callers: int, seconds: float) -> TimeWindow:
    """Let callers ask for a while; return what came back, once all of them have their last answer."""
    used, began = side.group.cpu(), time.perf_counter()
    start, end = began + LEAD_SECONDS, began + LEAD_SECONDS + seconds
    numbers = count()

    def calling() -> list[tuple[float, float]]:
        done = []
        while (sent := time.perf_counter()) < end:
            side.ask(side.requests[next(numbers) % len(side.requests)])
            done.append((time.perf_counter(), sent))
        return done

    with concurrent.futures.ThreadPoolExecutor(callers) as threads:
        calls = [threads.submit(calling) for _ in range(callers)]
        done = sorted(pair for call in calls for pair in call.result())
    times = [finished for finished, _ in done]
    latencies = [finished - sent for finished, sent in done if finished > start]
    return TimeWindow(
        rate(times, began, start, end), statistics.median(latencies), (side.group.cpu() - used) / len(done)
    )


def rate(times: Sequence[float], began: float, start: float, end: float) -> float:
    """Return replies a second in a window, of servers too that answer eight at once.

    Counted from the last reply before the window to the last one in it, so that it does not matter how batches lie to
    the window's edges, but where an edge falls among the replies of one batch. A window too short for that counts for
    nothing: then all replies are counted, from the first question to the last reply.

    Args:
        times: when the replies came, ascending.
        began: when the callers did.
        start: of the window.
        end: of the window.

    Example:
        >>> rate([2.0, 2.0, 4.0, 4.0, 6.0, 6.0], began=0.0, start=3.0, end=5.0)
        1.0
    """
    before = [at for at in times if at <= start]
    within = [at for at in times if start < at <= end]
    if not (before and within):
        return len(times) / (times[-1] - began)
    return len(within) / (within[-1] - before[-1])


@contextlib.contextmanager
def over_grpc(address: str, method: str) -> Iterator[Send]:
    """Open a channel inside the block; yield a call of bytes for bytes, so that both servers' replies cost as much."""
    options = (("grpc.max_receive_message_length", MOST_BYTES), ("grpc.enable_http_proxy", 0))
    with grpc.insecure_channel(address, options) as channel:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            method, request_serializer=None, response_deserializer=None
        )
        yield lambda request: bytes(call(request, timeout=TIMEOUT_SECONDS, wait_for_ready=True))


def over_rest(address: str, path: str) -> Send:
    """Return a call by POST, over a connection that each thread keeps open."""
    kept = threading.local()

    def ask(body: bytes) -> bytes:
        if not hasattr(kept, "connection"):
            kept.connection = http.client.HTTPConnection(address, timeout=TIMEOUT_SECONDS)
        kept.connection.request("POST", path, body, {"Content-Type": "image/jpeg"})
        reply = kept.connection.getresponse()
        body = reply.read()
        if reply.status != http.client.OK:
            raise RuntimeError(f"TorchServe answered {reply.status}: {body[:500]!r}")
        return body

    return ask


CAMSERVE_EXPLAIN = "/camserve.v1.ExplainService/Explain"


def camserve_side(ask: Send, model: str, group: Group) -> Side:
    """Ask camserve for Grad-CAM of the most probable class, as a JPEG overlay."""
    asked = [request.SerializeToString() for request in requests(model)]

    def picture(reply: bytes) -> bytes:
        return explain_pb2.ExplainResponse.FromString(reply).explanations[0].overlay.data

    return Side(f"camserve {model}", ask, asked, group, picture)


PREDICTIONS = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"


def torchserve_side(ask: Send, model: str, group: Group) -> Side:
    """Ask the handler in TorchServe the same, through its gRPC Predictions."""
    request, response = _messages()
    asked = [request(model_name=model, input={"data": photo}).SerializeToString() for photo in photos()]

    def picture(reply: bytes) -> bytes:
        return bytes(response.FromString(reply).prediction)

    return Side(f"TorchServe, {model}", ask, asked, group, picture)


def _messages() -> tuple[Any, ...]:
    """Describe the fields of TorchServe's inference.proto that are used: a model's name, its input, and the answer."""
    field = descriptor_pb2.FieldDescriptorProto
    one, many, text, data = field.LABEL_OPTIONAL, field.LABEL_REPEATED, field.TYPE_STRING, field.TYPE_BYTES
    file = descriptor_pb2.FileDescriptorProto(name="torchserve.proto", package="torchserve", syntax="proto3")
    request = file.message_type.add(name="PredictionsRequest")
    request.field.add(name="model_name", number=1, label=one, type=text)
    entry = request.nested_type.add(name="InputEntry", options=descriptor_pb2.MessageOptions(map_entry=True))
    entry.field.add(name="key", number=1, label=one, type=text)
    entry.field.add(name="value", number=2, label=one, type=data)
    kind = ".torchserve.PredictionsRequest.InputEntry"
    request.field.add(name="input", number=3, label=many, type=field.TYPE_MESSAGE, type_name=kind)
    file.message_type.add(name="PredictionResponse").field.add(name="prediction", number=1, label=one, type=data)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = ("torchserve.PredictionsRequest", "torchserve.PredictionResponse")
    return tuple(message_factory.GetMessageClass(pool.FindMessageTypeByName(name)) for name in names)
