"""A server over a socket: errors, logs, the queue, streams, deadlines, start and stop."""

import asyncio
import importlib
import importlib.metadata
import io
import json
import logging
import math
import socket
import threading

import grpc
import numpy as np
import pytest
from google.rpc import code_pb2, error_details_pb2
from grpc_health.v1 import health_pb2
from PIL import Image

from api.running_server import (
    NOT_SERVING,
    PHOTO,
    SERVING,
    SETTINGS,
    RunningServer,
    item,
    refusal_of,
    request,
    smoothgrad,
)
from camserve.v1 import explain_pb2, explain_pb2_grpc, models_pb2
from camserve_server.api import deserialization, grpc_server, rpc, statuses, streams
from camserve_server.app import server as app_server
from camserve_server.app.server import serve
from camserve_server.core import config, logs
from camserve_server.core.errors import ConfigError, NotFound, ServiceError, Unavailable, WorkerLost
from camserve_server.core.limits import Limits
from camserve_server.imaging import render
from camserve_server.methods import METHODS, Cam, Parameter
from camserve_server.serving import drawing, explain
from camserve_server.serving.explain import Pipeline
from opened_ports import opened_ports
from robustness.http2_flood import NO_WINDOW, Connection
from support import StoppedClock, wait_in_loop_until

RAW = explain_pb2.Rendering(heatmap=True)


@pytest.fixture
def logged(monkeypatch):
    """Capture the log as JSON lines."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(logs.JsonFormatter())
    logger = logging.getLogger("camserve_server")
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "propagate", False)
    level = logger.level
    logger.setLevel("INFO")
    yield lambda: [json.loads(line) for line in written.getvalue().splitlines()]
    logger.setLevel(level)


def subclasses(kind):
    return {kind}.union(*map(subclasses, kind.__subclasses__()))


# No caller receives WorkerLost: the batcher runs the rows again, or names the cause. See test_batcher.py.
KINDS = sorted(subclasses(ServiceError) - {ServiceError, WorkerLost}, key=lambda kind: kind.__name__)


# ------------------------------------------------------------------------------------------------------------- errors


def test_every_error_class_has_a_status():
    assert set(statuses.STATUS) == {*KINDS, WorkerLost}


@pytest.mark.parametrize("kind", KINDS)
async def test_error_status_has_the_request_id_the_field_and_the_retry_delay(kind, shared_server, monkeypatch):
    def fail(_pass, _rows):
        raise kind("words for the caller", field="targets[0].label", retry_after=0.0415)

    monkeypatch.setattr(shared_server.batcher._workers[0], "run", fail)
    error = await refusal_of(shared_server.explain(request(), metadata=[("x-request-id", "call-7")]))

    assert error.code == statuses.STATUS[kind]
    assert error.message == "words for the caller"
    assert error.trailers["x-request-id"] == "call-7"
    assert error.ids == 1
    assert error.trailers["grpc-retry-pushback-ms"] == "42"  # rounded up: never too early
    assert error.detail(error_details_pb2.RequestInfo).request_id == "call-7"
    (violation,) = error.detail(error_details_pb2.BadRequest).field_violations
    assert (violation.field, violation.description) == ("targets[0].label", "words for the caller")


async def test_long_message_is_cut_to_512_bytes_in_calls_and_streams(shared_server, monkeypatch):
    def fail(_pass, _rows):
        raise NotFound("ж" * 4000, field="targets[0].label")

    monkeypatch.setattr(shared_server.batcher._workers[0], "run", fail)
    error = await refusal_of(shared_server.explain(request()))
    (bad,) = [reply.error async for reply in shared_server.stream([item("bad")])]

    (violation,) = error.detail(error_details_pb2.BadRequest).field_violations
    assert error.message == violation.description == bad.message == bad.fields[0].description == "ж" * 254 + "…"
    assert len(error.message.encode()) <= statuses.MAX_MESSAGE == 512


async def test_error_has_the_state_of_the_server_that_caused_it(shared_server, monkeypatch):
    def fail(_pass, _rows):
        raise Unavailable("words for the caller", shed_reason="queue_full")

    monkeypatch.setattr(shared_server.batcher._workers[0], "run", fail)
    caused = await refusal_of(shared_server.explain(request()))
    other = await refusal_of(shared_server.explain(request(model="tinny")))

    info = caused.detail(error_details_pb2.ErrorInfo)
    assert (info.reason, info.domain) == ("QUEUE_FULL", "camserve")
    assert other.detail(error_details_pb2.ErrorInfo) is None


@pytest.mark.parametrize("kind", KINDS)
async def test_error_without_field_and_retry_delay_has_neither_in_its_status(kind, shared_server, monkeypatch):
    def fail(_pass, _rows):
        raise kind("words for the caller")

    monkeypatch.setattr(shared_server.batcher._workers[0], "run", fail)
    error = await refusal_of(shared_server.explain(request()))

    assert error.code == statuses.STATUS[kind]
    assert "grpc-retry-pushback-ms" not in error.trailers
    assert error.detail(error_details_pb2.BadRequest) is None


@pytest.mark.parametrize(
    ("fields", "code", "field", "hint"),
    [
        ({"model": "tinny"}, "NOT_FOUND", "model", 'did you mean "tiny"'),
        ({"layers": ["head"]}, "FAILED_PRECONDITION", "layers[0]", "no grid"),
        ({"layers": ["feature"]}, "NOT_FOUND", "layers[0]", 'did you mean "features"'),
        ({"top_k": 6}, "INVALID_ARGUMENT", "top_k", "1 to 5"),
        ({"image": b""}, "INVALID_ARGUMENT", "image", "empty"),
        ({"image": PHOTO[:60]}, "INVALID_ARGUMENT", "image", "broken"),
        (
            {"rendering": explain_pb2.Rendering(colormap="jett")},
            "INVALID_ARGUMENT",
            "rendering.colormap",
            'did you mean "jet"',
        ),
        ({"model": "模型\n" + "ж" * 200}, "NOT_FOUND", "model", "模型"),
    ],
)
async def test_invalid_request_is_refused_with_the_name_of_its_field(fields, code, field, hint, shared_server):
    rows = shared_server.batcher.stats.rows
    error = await refusal_of(shared_server.explain(request(**fields)))
    (violation,) = error.detail(error_details_pb2.BadRequest).field_violations

    assert error.code.name == code
    assert violation.field == field
    assert hint in error.message
    assert (shared_server.batcher.stats.rows, shared_server.batcher.admitted) == (rows, 0)


async def test_too_many_explanations_are_refused_before_a_row_is_computed(server):
    many = request(methods=[explain_pb2.Method(name="gradcam")] * 14, top_k=5)
    error = await refusal_of(server.explain(many))

    assert error.code == grpc.StatusCode.INVALID_ARGUMENT
    assert "70 explanations, and 64 is the limit" in error.message
    assert server.batcher.stats.rows == 0


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"top_k": 3},
        {"methods": [smoothgrad(7)], "top_k": 2},
        {"methods": [smoothgrad(3), explain_pb2.Method(name="gradcam"), explain_pb2.Method(name="ablationcam")]},
        {"methods": [explain_pb2.Method(name="gradcam", augmentation_smoothing=True)], "layers": ["stem", "features"]},
    ],
)
async def test_estimated_rows_are_those_that_are_computed(fields, shared_server):
    estimated = explain_pb2.EstimateCostRequest(explain=explain_pb2.ExplainRequest(**fields))
    cost = await shared_server.estimate_cost(estimated)
    before = shared_server.batcher.stats.rows
    reply = await shared_server.explain(request(**fields))

    assert cost.rows == shared_server.batcher.stats.rows - before
    assert cost.explanations == len(reply.explanations)
    assert cost.max_rows == config.Settings().max_request_rows


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"model": "tinny"}, "NOT_FOUND", "explain.model"),
        ({"methods": [smoothgrad(256)] * 16, "top_k": 5}, "INVALID_ARGUMENT", "explain.methods"),
        ({"class_map": True}, "FAILED_PRECONDITION", "explain.class_map"),
    ],
)
async def test_cost_of_a_request_that_would_be_refused_is_refused(fields, code, field, shared_server):
    estimated = explain_pb2.EstimateCostRequest(explain=explain_pb2.ExplainRequest(**fields))
    error = await refusal_of(shared_server.estimate_cost(estimated))

    assert error.code.name == code
    assert error.detail(error_details_pb2.BadRequest).field_violations[0].field == field


async def test_too_many_pixels_to_draw_are_refused_before_a_row_is_computed(serving):
    packed = io.BytesIO()
    Image.new("L", (400, 400)).save(packed, "PNG")
    formats = {"overlay": explain_pb2.IMAGE_FORMAT_PNG, "heatmap_image": explain_pb2.IMAGE_FORMAT_PNG}
    fields = {"image": packed.getvalue(), "top_k": 5, "methods": [explain_pb2.Method(name="gradcam")] * 2}
    async with serving(max_drawn_pixels=2_000_000) as server:
        error = await refusal_of(server.explain(request(rendering=explain_pb2.Rendering(**formats), **fields)))
        rows = server.batcher.stats.rows
        small = await server.explain(request(rendering=explain_pb2.Rendering(**formats, max_side=50), **fields))

    assert error.code == grpc.StatusCode.INVALID_ARGUMENT
    assert "3 million pixels, and 2 is the limit: set max_side" in error.message
    assert rows == 0
    assert (small.explanations[9].overlay.width, small.explanations[9].overlay.height) == (50, 50)


def raise_internal(*_args, **_options):
    raise RuntimeError("/home/operator/secret.py: no such thing")


@pytest.mark.parametrize(
    "where",
    [
        "serving.photos.images.decode",
        "serving.drawing.render.draw",
        "serving.explain.jobs.explain",
        "api.servicers.explain.codec.read_explanation",
    ],
)
async def test_internal_error_is_logged_and_the_caller_gets_only_its_request_id(where, server, logged, monkeypatch):
    monkeypatch.setattr(f"camserve_server.{where}", raise_internal)
    await check_internal_and_logged(server, logged)


async def test_engine_error_is_logged_and_the_caller_gets_only_its_request_id(server, logged):
    server.batcher._workers[0].run = raise_internal
    await check_internal_and_logged(server, logged)


async def check_internal_and_logged(server, logged):
    drawn = request(rendering=explain_pb2.Rendering(overlay=explain_pb2.IMAGE_FORMAT_PNG))
    error = await refusal_of(server.explain(drawn, metadata=[("x-request-id", "call-7")]))
    await wait_in_loop_until(lambda: len(logged()) == 2)
    exception, line = logged()

    assert error.code == grpc.StatusCode.INTERNAL
    assert "call-7" in error.message
    assert "secret" not in str(error)
    assert "RuntimeError" not in str(error)
    assert "Traceback" not in str(error)
    assert "camserve_server" not in str(error)
    assert "RuntimeError: /home/operator/secret.py: no such thing" in exception["exception"]
    assert exception["request_id"] == line["request_id"] == "call-7"
    assert (line["level"], line["code"]) == ("info", "INTERNAL")


@pytest.mark.parametrize(("share", "lines"), [(0.0, 0), (1.0, 4)])
async def test_share_of_the_successful_calls_is_logged_and_every_failed_one(serving, logged, share, lines):
    async with serving(access_log_share=share) as server:
        for _ in range(4):
            await server.explain(request())
        await refusal_of(server.explain(request(model="none")))
        await wait_in_loop_until(lambda: any(line.get("code") == "NOT_FOUND" for line in logged()))

    codes = [line["code"] for line in logged() if "code" in line]
    assert codes == ["OK"] * lines + ["NOT_FOUND"]


async def test_every_call_is_logged_with_its_outcome(server, logged):
    await server.explain(request(top_k=2), metadata=[("x-request-id", "good")])
    await refusal_of(server.explain(request(model="none"), metadata=[("x-request-id", "bad")]))
    await server.models.ListModels(models_pb2.ListModelsRequest(), metadata=[("x-request-id", "list")])
    await wait_in_loop_until(lambda: len(logged()) == 3)
    good, bad, listed = logged()

    assert (good["request_id"], good["code"], good["model"], good["explanations"]) == ("good", "OK", "tiny", 2)
    assert good["batch_rows"] == 2
    assert good["ms"] > 0
    assert (bad["request_id"], bad["code"]) == ("bad", "NOT_FOUND")
    assert bad["error"].startswith('unknown model "none"')
    assert (listed["message"], listed["request_id"], listed["code"]) == ("ListModels", "list", "OK")


# -------------------------------------------------------------------------------------------------------- request ids


@pytest.mark.parametrize("sent", ["a\nb", "a\x1b[2J", "a\0", "a\u2028b"])
def test_unprintable_request_id_is_replaced(sent):
    """No client library sends such an id, but a caller can write HTTP/2 by hand."""

    class Context:
        def invocation_metadata(self):
            return (("x-request-id", sent),)

    replaced = rpc._request_id(Context())

    assert replaced != sent
    assert len(replaced) == 32


# ----------------------------------------------------------------------------------- queue, deadlines, cancelled calls


def brightest(activations, _gradients, _scores, *, power):
    """Take the brightest channel.

    L = max_k A_k^p.
    """
    return activations.amax(1) ** power


async def test_registered_method_is_listed_computed_and_drawn(server, monkeypatch):
    power = Parameter("power", "Exponent.", 1.0, 0.5, 4.0)
    monkeypatch.setitem(METHODS, "brightest", Cam(brightest, "a test", (power,)))

    listed = {
        method.name: method for method in (await server.models.ListMethods(models_pb2.ListMethodsRequest())).methods
    }
    squared = explain_pb2.Method(name="brightest", parameters={"power": explain_pb2.Parameter(number=2)})
    rendering = explain_pb2.Rendering(heatmap=True, overlay=explain_pb2.IMAGE_FORMAT_PNG)
    reply = await server.explain(
        request(methods=[explain_pb2.Method(name="brightest"), squared], layers=["act"], rendering=rendering)
    )
    plain, power_two = (np.frombuffer(each.heatmap.data, "<f4") for each in reply.explanations)

    assert listed["brightest"].summary == "Take the brightest channel"
    assert listed["brightest"].formula == "L = max_k A_k^p."
    assert listed["brightest"].parameters[0].name == "power"
    assert plain.max() > 0
    np.testing.assert_allclose(plain**2, power_two, rtol=1e-6)
    assert all(Image.open(io.BytesIO(each.overlay.data)).size == (40, 30) for each in reply.explanations)


@pytest.mark.parametrize("extra", [1, 20])
async def test_full_queue_refuses_only_the_excess_with_a_retry_delay(extra, serving):
    async with serving(max_queue_rows=8) as server:
        server.batcher.pause()
        calls = [asyncio.ensure_future(server.explain(request())) for _ in range(8 + extra)]
        await wait_in_loop_until(lambda: sum(call.done() for call in calls) == extra)

        assert server.batcher.admitted == 8
        server.batcher.resume()
        await asyncio.gather(*calls, return_exceptions=True)
        errors = [await refusal_of(call) for call in calls if call.exception()]

    assert [error.code for error in errors] == [grpc.StatusCode.RESOURCE_EXHAUSTED] * extra
    assert {error.message for error in errors} == {"the queue is full: 8 rows are under way, and 8 is the limit"}
    assert all(50 <= int(error.trailers["grpc-retry-pushback-ms"]) <= 5000 for error in errors)
    assert sum(call.exception() is None for call in calls) == 8
    assert server.batcher.stats.refused == extra
    assert server.batcher.admitted == 0


async def test_calls_whose_deadline_passes_in_the_queue_are_never_computed(server):
    with StoppedClock() as clock:  # the server's; gRPC's own does not end the calls
        server.batcher.pause()
        calls = [server.explain(request(), timeout=600) for _ in range(20)]
        await wait_in_loop_until(lambda: server.batcher.waiting == 20)
        clock.advance(601)
        server.batcher.resume()
        codes = {(await refusal_of(call)).code for call in calls}
    await server.explain(request())

    assert codes == {grpc.StatusCode.DEADLINE_EXCEEDED}
    assert server.batcher.stats.expired == 20
    assert (server.batcher.stats.batches, server.batcher.stats.rows) == (1, 1)  # only the last call


@pytest.mark.parametrize("rpc", ["explain", "stream"])
@pytest.mark.parametrize("seconds", [90, None])
async def test_rows_have_the_deadline_of_their_call(rpc, seconds, server):
    server.batcher.pause()
    requests = request() if rpc == "explain" else [item("r0")]
    clock = asyncio.get_running_loop().time
    before, call = clock(), getattr(server, rpc)(requests, timeout=seconds)
    await wait_in_loop_until(lambda: server.batcher.waiting)
    after = clock()
    (pending,) = server.batcher._queue
    call.cancel()

    # gRPC writes a call's timeout with three digits and rounds it up: from 10 to 100 s to a whole tenth of a second.
    # The deadline is an instant, so it does not depend on how late it is read.
    assert pending.deadline == math.inf if seconds is None else before + 89 < pending.deadline <= after + 90.1


async def test_cancelled_calls_free_the_queue(server):
    server.batcher.pause()
    calls = [server.explain(request()) for _ in range(20)]
    await wait_in_loop_until(lambda: server.batcher.admitted == 20)
    for call in calls:
        call.cancel()
    await wait_in_loop_until(lambda: server.batcher.admitted == 0)
    server.batcher.resume()
    await server.explain(request())

    assert server.batcher.stats.rows == 1


EIGHT_OVERLAYS = {
    "methods": [explain_pb2.Method(name="gradcam")] * 8,
    "rendering": explain_pb2.Rendering(overlay=explain_pb2.IMAGE_FORMAT_JPEG),
}


@pytest.mark.parametrize(("pixels", "steps"), [(10**6, 1), (2 * 40 * 30, 4), (1, 8)])
async def test_number_of_drawing_steps_follows_the_pixels_per_step(pixels, steps, shared_server, monkeypatch):
    run_step, generators = explain._run_step, []
    monkeypatch.setattr(drawing, "PIXELS_PER_STEP", pixels)
    monkeypatch.setattr(explain, "_run_step", lambda steps: generators.append(steps) or run_step(steps))
    response = await shared_server.explain(request(**EIGHT_OVERLAYS))

    assert [each.__name__ for each in generators].count("draw_and_reply") == steps
    assert len({each.overlay.data for each in response.explanations}) == 1
    assert len(response.explanations) == 8


async def test_cancelled_call_stops_the_drawing_of_its_other_pictures(server, monkeypatch):
    draw, drawn, go = render.draw, [], threading.Event()

    def draw_and_wait(*args, **options):
        drawn.append(args)
        go.wait(60)
        return draw(*args, **options)

    monkeypatch.setattr(drawing, "PIXELS_PER_STEP", 1)
    monkeypatch.setattr(render, "draw", draw_and_wait)
    call = server.explain(request(**EIGHT_OVERLAYS))
    await wait_in_loop_until(lambda: drawn)
    call.cancel()
    await wait_in_loop_until(lambda: server.batcher.admitted == 0)
    go.set()
    await server.pipeline.in_thread(int)  # runs after all drawing that was submitted

    assert len(drawn) == 1


async def test_calls_of_a_lost_connection_free_the_queue(server):
    server.batcher.pause()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        calls = [explain_pb2_grpc.ExplainServiceStub(channel).Explain(request()) for _ in range(20)]
        await wait_in_loop_until(lambda: server.batcher.admitted == 20)
    await wait_in_loop_until(lambda: server.batcher.admitted == 0)

    assert all([await call.code() == grpc.StatusCode.CANCELLED for call in calls])


async def test_request_larger_than_the_limit_is_refused_unread(serving):
    async with serving(max_message_mib=1) as server:
        await refusal_of(
            server.explain(request(image=bytes(2**20 - 1000)))
        )  # read, and refused because it is no picture
        error = await refusal_of(server.explain(request(image=bytes(2**20 + 1))))

    assert error.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than" in error.message


# ------------------------------------------------------------------------------------------------------------ streams


@pytest.mark.parametrize("kind", [*KINDS, RuntimeError])
async def test_failed_request_of_a_stream_has_an_error_and_the_stream_continues(kind, shared_server, monkeypatch):
    def fail(_pass, _rows):
        if kind is RuntimeError:
            raise_internal()
        raise kind("words for the caller", field="layers[0]", retry_after=0.0415)

    call = shared_server.stream()
    with monkeypatch.context() as patch:
        patch.setattr(shared_server.batcher._workers[0], "run", fail)
        await call.write(item("bad"))
        bad = await call.read()
    await call.write(item("good"))
    good = await call.read()
    await call.done_writing()

    assert await call.read() == grpc.aio.EOF
    assert await call.code() == grpc.StatusCode.OK
    assert (good.request_id, good.WhichOneof("outcome")) == ("good", "response")
    assert bad.request_id == "bad"
    if kind is RuntimeError:
        assert bad.error.code == code_pb2.Code.INTERNAL
        assert "bad" in bad.error.message
        assert "secret" not in bad.error.message
    else:
        assert code_pb2.Code.Name(bad.error.code) == statuses.STATUS[kind].name
        assert bad.error.message == "words for the caller"
        assert [(violation.field, violation.description) for violation in bad.error.fields] == [
            ("layers[0]", "words for the caller")
        ]
        assert bad.error.retry_after_ms == 42


@pytest.mark.usefixtures("server")
async def test_event_loop_has_one_task_that_accepts_calls_of_all_methods():
    tasks = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]

    assert [name for name in tasks if "_request" in name] == ["AioServer._request_call"]


async def test_internal_errors_of_a_stream_are_logged_with_their_request_ids(server, logged):
    server.batcher._workers[0].run = raise_internal
    _ = [reply async for reply in server.stream([item("r1"), item("r2")])]
    faults = [entry for entry in logged() if "exception" in entry]

    assert sorted(entry["request_id"] for entry in faults) == ["r1", "r2"]


async def test_stream_is_read_only_up_to_its_limit_of_requests_in_flight(serving, monkeypatch):
    items = []
    count = streams.IdleTimer.request_started

    def record(timer):
        items.append(timer)
        count(timer)

    monkeypatch.setattr(streams.IdleTimer, "request_started", record)
    async with serving(stream_in_flight=4) as server:
        server.batcher.pause()
        call = server.stream(item(f"r{k}") for k in range(20))
        await wait_in_loop_until(lambda: server.batcher.admitted == 4)
        for _ in range(20):  # gives the server time to read more, if it did not stop
            await server.status()

        assert (len(items), server.batcher.admitted) == (4, 4)
        server.batcher.resume()
        assert len([reply async for reply in call]) == 20


async def test_stream_waits_for_room_in_the_queue_and_no_request_is_refused(serving):
    async with serving(max_queue_rows=2, stream_in_flight=16) as server:
        replies = [reply async for reply in server.stream(item(f"r{k}") for k in range(24))]

    assert {reply.request_id for reply in replies} == {f"r{k}" for k in range(24)}
    assert {reply.WhichOneof("outcome") for reply in replies} == {"response"}
    assert server.batcher.stats.refused == 0


async def test_cancelled_stream_frees_the_queue(serving):
    async with serving(max_queue_rows=2) as server:
        server.batcher.pause()
        call = server.stream(item(f"r{k}") for k in range(50))
        await wait_in_loop_until(lambda: server.batcher.admitted == 2)
        call.cancel()
        await wait_in_loop_until(lambda: server.batcher.admitted == 0)
        server.batcher.resume()
        await server.explain(request())

    assert server.batcher.stats.rows == 1


async def test_cancelled_streams_are_logged_as_cancelled_without_an_exception(server, logged):
    for _ in range(4):
        call = server.stream(item(f"r{k}") for k in range(50))
        await call.read()
        call.cancel()

    def codes():
        return [entry["code"] for entry in logged() if entry["message"] == "ExplainStream"]

    await wait_in_loop_until(lambda: len(codes()) == 4)

    assert [entry for entry in logged() if "exception" in entry] == []
    assert set(codes()) == {"CANCELLED"}


async def test_stream_is_cancelled_if_a_response_cannot_be_written():
    """The stream does not depend on when gRPC reports the end of the call."""

    class ClosedContext:
        async def write(self, _):
            raise grpc.aio.InternalError("the stream is closed")

    async def requests():
        yield streams.Received("r0")
        await asyncio.Event().wait()

    async def respond(received, write):
        await write(received)

    state = rpc.ServerState(stream_in_flight=4, pipeline=object())
    with pytest.raises(asyncio.CancelledError):
        await streams.serve_stream(state, ClosedContext(), requests(), respond)


def hold_after(rows, batcher):
    """Let the worker compute at least this many rows; return the event for which it waits then."""
    go, run, computed = threading.Event(), batcher._workers[0].run, []

    def run_or_wait(pass_, batch):
        if len(computed) >= rows:
            go.wait(60)
        computed.extend(batch)
        return run(pass_, batch)

    batcher._workers[0].run = run_or_wait
    return go


async def test_cancelled_long_method_computes_nothing_further(serving):
    async with serving(max_batch_rows=1) as server:
        go = hold_after(Limits().chunk, server.batcher)
        call = server.stream([item("r", methods=[smoothgrad(512)] * 8, progress=True)])
        await call.read()
        call.cancel()
        await wait_in_loop_until(lambda: server.batcher.admitted == 0)
        go.set()
        await server.explain(request())

    assert server.batcher.stats.rows <= Limits().chunk + 2  # the row that was running, and that of the last call


async def test_long_method_has_at_most_one_chunk_of_rows_in_the_queue(serving):
    async with serving(max_queue_rows=Limits().chunk + 1) as server:
        go = hold_after(2 * Limits().chunk + 1, server.batcher)
        server.batcher.pause()
        long = asyncio.ensure_future(server.explain(request(methods=[smoothgrad(3 * Limits().chunk)])))
        await wait_in_loop_until(lambda: server.batcher.admitted == Limits().chunk)
        short = asyncio.ensure_future(server.explain(request()))
        await wait_in_loop_until(lambda: server.batcher.admitted == Limits().chunk + 1)
        server.batcher.resume()
        await short
        assert not long.done()
        go.set()
        await long


async def test_idle_stream_is_ended_after_a_timeout_and_a_busy_one_continues(serving):
    async with serving(idle_seconds=60) as server:
        with StoppedClock() as clock:
            idle, busy = server.stream(), server.stream()
            await idle.write(item("r0"))
            assert (await idle.read()).request_id == "r0"
            server.batcher.pause()
            await busy.write(item("r1"))
            await wait_in_loop_until(lambda: server.batcher.admitted == 1)
            clock.advance(60)
            error = await refusal_of(idle.read())
            clock.advance(60)
            server.batcher.resume()
            response = await busy.read()
        busy.cancel()

    assert response.request_id == "r1"
    assert error.code == grpc.StatusCode.UNAVAILABLE  # so that a client opens another stream for its next request
    assert error.message == "the stream was idle for 60 s"


@pytest.mark.parametrize(
    "rpc",
    [
        "camserve.v1.ExplainService/Explain",
        "inference.GRPCInferenceService/ModelInfer",
        "grpc.health.v1.Health/Watch",
    ],
)
async def test_call_without_a_message_is_ended_after_a_timeout(rpc, serving, monkeypatch):
    async with serving(idle_seconds=60) as server:
        receive_first, calls = deserialization.receive_first, []

        async def record_call(requests, seconds):
            calls.append(requests)
            return await receive_first(requests, seconds)

        monkeypatch.setattr(deserialization, "receive_first", record_call)
        with StoppedClock() as clock:
            call = server.channel.stream_stream(f"/{rpc}")()
            ended = asyncio.ensure_future(refusal_of(call.read()))
            await wait_in_loop_until(lambda: calls)
            clock.advance(59)
            await asyncio.sleep(0)
            before = ended.done()
            clock.advance(1)
            error = await ended

    assert not before
    assert error.code == grpc.StatusCode.DEADLINE_EXCEEDED
    assert error.message == "the call's message did not arrive within 60 s"
    assert error.trailers["x-request-id"]


async def test_connection_beyond_the_limit_is_closed_and_open_ones_continue(serving):
    async with serving(max_connections=2) as server:
        await server.status()
        first, second = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]

        assert await second[0].read() == b""
        assert await first[0].read(1)  # the server's half of HTTP/2
        assert await server.status() == SERVING
        for _, writer in (first, second):
            writer.close()


async def test_call_cancelled_before_its_message_is_not_logged(server, logged, monkeypatch):
    receive_first, ends = deserialization.receive_first, []

    async def record_end(requests, seconds):
        try:
            return await receive_first(requests, seconds)
        except BaseException as error:
            ends.append(type(error))
            raise

    monkeypatch.setattr(deserialization, "receive_first", record_end)
    with StoppedClock():  # CANCEL_TIMEOUT never passes
        call = server.channel.stream_unary("/camserve.v1.ExplainService/Explain")()
        await call.wait_for_connection()
        call.cancel()
        await server.status()
        await wait_in_loop_until(lambda: ends)

    assert ends == [asyncio.CancelledError]
    assert "Explain" not in {entry["message"] for entry in logged()}


async def test_idle_timeout_does_not_end_a_call_whose_message_has_arrived(serving):
    async with serving(idle_seconds=60) as server:
        with StoppedClock() as clock:
            watch = server.health.Watch(health_pb2.HealthCheckRequest())
            await watch.read()
            server.batcher.pause()
            call = asyncio.ensure_future(server.explain(request()))
            await wait_in_loop_until(lambda: server.batcher.admitted == 1)
            clock.advance(61)
            await server.status()
            assert not call.done()
            server.batcher.resume()

            assert len((await call).explanations) == 1
            assert not watch.done()


async def test_call_without_its_message_does_not_delay_a_stop(serving):
    async with serving(drain_seconds=3600) as server:
        call = server.channel.stream_unary("/camserve.v1.ExplainService/Explain")()
        await call.wait_for_connection()
        server.stop.requested.set()
        await server.task

        assert (await refusal_of(call)).code == grpc.StatusCode.UNAVAILABLE


async def test_deadline_of_a_stream_ends_it_and_frees_the_queue(server):
    server.batcher.pause()
    call = server.stream((item(f"r{k}") for k in range(3)), timeout=0.3)  # real timeout: nothing is answered before it
    with pytest.raises(grpc.aio.AioRpcError):
        _ = [reply async for reply in call]
    await wait_in_loop_until(lambda: server.batcher.admitted == 0)

    assert await call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert server.batcher.stats.rows == 0


# ------------------------------------------------------------------------------------------------------ start and stop


async def test_draining_stream_answers_accepted_requests_then_ends_unavailable(server):
    watch = server.health.Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == SERVING
    server.batcher.pause()
    call = server.stream()
    for k in range(3):
        await call.write(item(f"r{k}"))
    await wait_in_loop_until(lambda: server.batcher.admitted == 3)
    server.stop.requested.set()
    assert (await watch.read()).status == NOT_SERVING
    server.batcher.resume()
    replies = [await call.read() for _ in range(3)]
    error = await refusal_of(call.read())

    assert {reply.request_id for reply in replies} == {"r0", "r1", "r2"}
    assert {reply.WhichOneof("outcome") for reply in replies} == {"response"}
    assert error.code == grpc.StatusCode.UNAVAILABLE
    assert "draining" in error.message
    assert int(error.trailers["grpc-retry-pushback-ms"]) > 0


async def test_draining_server_answers_accepted_calls_and_refuses_new_ones(server):
    watch = server.health.Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == SERVING
    server.batcher.pause()
    accepted = [asyncio.ensure_future(server.explain(request())) for _ in range(5)]
    await wait_in_loop_until(lambda: server.batcher.admitted == 5)
    server.stop.requested.set()
    assert (await watch.read()).status == NOT_SERVING
    late = await refusal_of(server.explain(request()))
    server.batcher.resume()

    assert late.code == grpc.StatusCode.UNAVAILABLE
    assert [len((await call).explanations) for call in accepted] == [1] * 5
    await server.task


async def test_idle_stream_and_health_watch_do_not_delay_a_stop(serving):
    async with serving(drain_seconds=3600) as server:
        stream, watch = server.stream(), server.health.Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        await stream.write(item("r0"))
        await stream.read()
        server.stop.requested.set()
        await server.task

        assert (await watch.read()).status == NOT_SERVING
        assert (await refusal_of(stream.read())).code == grpc.StatusCode.UNAVAILABLE


async def test_calls_that_outlast_the_drain_timeout_are_cancelled(serving):
    async with serving(drain_seconds=0.1) as server:  # real timeout: the call never ends by itself
        server.batcher.pause()
        call = server.explain(request())
        await wait_in_loop_until(lambda: server.batcher.admitted == 1)
        server.stop.requested.set()

        assert (await refusal_of(call)).code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
        await server.task


def unread(server):
    """Send a request over a connection that does not read its reply."""
    connection = Connection("127.0.0.1", server.port, settings=NO_WINDOW)
    drawn = request(rendering=explain_pb2.Rendering(overlay=explain_pb2.IMAGE_FORMAT_PNG))
    connection.send("camserve.v1.ExplainService/Explain", drawn.SerializeToString())
    return connection


def leave(connection):
    connection.socket.shutdown(socket.SHUT_RDWR)
    connection.listener.join()
    connection.socket.close()


async def test_stop_waits_until_a_reply_has_been_read(serving):
    async with serving(drain_seconds=3600) as server:
        connection = unread(server)
        await wait_in_loop_until(lambda: server.pipeline.replies.limit.taken)
        server.stop.requested.set()
        await asyncio.wait((server.task,), timeout=0.5)  # real timeout: a server that waits does not end
        assert not server.task.done()
        connection.read_on()
        await server.task
        leave(connection)

        assert connection.statuses == 2  # the headers before the reply and those after it
        assert server.stop.code == 0


async def test_reply_that_is_not_read_in_time_is_counted_as_lost(serving, caplog):
    async with serving(drain_seconds=0.1) as server:  # real timeout: nobody reads the reply
        connection = unread(server)
        await wait_in_loop_until(lambda: server.pipeline.replies.limit.taken)
        server.stop.requested.set()
        await server.task
        leave(connection)

        assert (server.stop.unanswered, server.stop.code) == (1, 1)
        assert "stopping before every accepted call was answered" in caplog.text


class CallContext:
    """Context of a call that gRPC frees at its end, before the callbacks of that end run."""

    def __init__(self):
        self.freed, self.callbacks = False, []
        self.time_remaining = self.invocation_metadata = lambda: None
        self.set_trailing_metadata, self.add_done_callback = lambda _metadata: None, self.callbacks.append

    def peer(self):
        assert not self.freed, "grpcio ends the process here"
        return "ipv4:127.0.0.1:4567"


async def test_end_of_a_call_while_the_server_stops_asks_nothing_of_grpc():
    state, context = rpc.ServerState(1), CallContext()
    async with rpc.rpc_scope(state, context, "Explain"):
        state.draining.set()
    assert state.unsent == 1
    context.freed = True
    for callback in context.callbacks:
        callback(context)

    assert (state.unsent, state.drained) == (0, {4567})


async def test_port_is_open_before_the_models_are_loaded_but_calls_are_refused(nets):
    stop = grpc_server.Stop()
    chosen = config.load(flags={**SETTINGS, "models": (nets.replace(":tiny", ":gated"),)}, environment={})
    with opened_ports() as ports:
        task = asyncio.create_task(serve(chosen, stop))
        await wait_in_loop_until(lambda: ports)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{ports['gRPC']}") as channel:
        server = RunningServer(0, Pipeline({}, None, None, None), channel, stop, task)
        await channel.channel_ready()
        services = ("", "camserve.v1.ExplainService", "camserve.v1.ModelService")
        before = [await server.status(service) for service in services]
        early = [
            await refusal_of(server.explain(request())),
            await refusal_of(server.models.ListModels(models_pb2.ListModelsRequest())),
            await refusal_of(server.stream([item("r0")]).read()),
        ]
        watch = server.health.Watch(health_pb2.HealthCheckRequest())
        statuses_seen = [(await watch.read()).status]
        importlib.import_module("camserve_nets").GATE.set()
        statuses_seen.append((await watch.read()).status)
        after = [await server.status(service) for service in services]
        await server.explain(request())
        stop.requested.set()
        statuses_seen.append((await watch.read()).status)
    await task

    assert before == [NOT_SERVING] * 3
    assert {(error.code, error.trailers["grpc-retry-pushback-ms"]) for error in early} == {
        (grpc.StatusCode.UNAVAILABLE, "1000")
    }
    assert all("starting" in error.message for error in early)
    assert {error.detail(error_details_pb2.ErrorInfo).reason for error in early} == {"STARTING"}
    assert after == [SERVING] * 3
    assert statuses_seen == [NOT_SERVING, SERVING, NOT_SERVING]


async def test_process_of_several_is_in_the_metadata_of_every_reply(monkeypatch, serving):
    state = rpc.ServerState
    monkeypatch.setattr(app_server, "ServerState", lambda *args, **rest: state(*args, **{**rest, "process": "1/2"}))
    async with serving() as server:
        call = server.explain(request())
        await call
        failed = await refusal_of(server.explain(request(model="tinny")))
        stream = server.stream()
        initial = await stream.initial_metadata()  # arrives before the first request is sent
        await stream.write(item("r0"))
        outcome = await stream.read()
        await stream.done_writing()
        metadata = [await call.trailing_metadata(), failed.trailers, initial, await stream.trailing_metadata()]

    assert [dict(each)["camserve-process"] for each in metadata] == ["1/2"] * 4
    assert outcome.WhichOneof("outcome") == "response"


async def test_server_of_one_process_sends_no_further_metadata(server):
    call = server.explain(request())
    await call
    failed = await refusal_of(server.explain(request(model="tinny")))
    stream = server.stream([item("r0")])
    await stream.read()

    assert set(dict(await call.trailing_metadata())) == {"x-request-id"}
    assert set(failed.trailers) == {"x-request-id", "grpc-status-details-bin"}
    assert not any(key.startswith("camserve") for key, _ in await call.initial_metadata())
    assert not any(key.startswith("camserve") for key, _ in await stream.initial_metadata())


async def test_two_models_of_one_name_are_refused_with_a_hint(nets, serving):
    with pytest.raises(ConfigError, match='two models are called "tiny": name one as NAME=camserve_nets:tiny'):
        async with serving(models=(nets, nets)):
            pass


async def test_two_names_for_one_model_are_two_models(nets, serving):
    async with serving(models=(nets, nets.replace("tiny=", "other="))) as server:
        listed = await server.models.ListModels(models_pb2.ListModelsRequest())
        replies = [await server.explain(request(model=name)) for name in ("", "tiny", "other")]

    assert [model.name for model in listed.models] == ["tiny", "other"]
    assert [reply.model for reply in replies] == ["tiny", "tiny", "other"]
