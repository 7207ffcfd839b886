"""A real server at the other end of a socket: every error with its status and details, and nothing lost on the way."""

import asyncio
import base64
import contextlib
import hashlib
import importlib
import importlib.metadata
import io
import json
import logging
import math
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from PIL import Image

from camserve.v1 import explain_pb2, explain_pb2_grpc, models_pb2, models_pb2_grpc
from camserve_server.api import deserialization, grpc_server, rpc, statuses, streams
from camserve_server.app import server
from camserve_server.core import config, logs
from camserve_server.core.errors import ConfigError, ServiceError, WorkerLost
from camserve_server.core.limits import Limits
from camserve_server.imaging import images, render
from camserve_server.methods import METHODS, Cam, Parameter
from camserve_server.serving import drawing, explain
from camserve_server.serving.explain import Pipeline
from support import StoppedClock, wait_in_loop_until

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
FLAGS = {"isolation": "thread", "address": "127.0.0.1:0", "device": "cpu", "threads": 1, "drain_seconds": 10}
BUF = Path(sys.executable).with_name("buf")

NETS = """
import threading
from collections import OrderedDict

import torch
from torch import nn

GATE = threading.Event()


def tiny():
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(
        stem=nn.Conv2d(3, 4, 3, 2, 1), act=nn.ReLU(), features=nn.Conv2d(4, 4, 3, 2, 1), pool=nn.AdaptiveAvgPool2d(1),
        flat=nn.Flatten(), head=nn.Linear(4, 5),
    ))


def gated():
    assert GATE.wait(30)
    return tiny()
"""


def picture(color="red"):
    out = io.BytesIO()
    Image.new("RGB", (40, 30), color).save(out, "PNG")
    return out.getvalue()


PHOTO = picture()


RAW = explain_pb2.Rendering(heatmap=True)


def request(**fields):
    return explain_pb2.ExplainRequest(**{"image": PHOTO, **fields})


@dataclass
class Running:
    """A server, and stubs of it."""

    port: int
    pipeline: Pipeline
    stop: grpc_server.Stop
    task: asyncio.Task
    channel: grpc.aio.Channel

    def __post_init__(self):
        self.batcher = self.pipeline.batcher
        self.explain = explain_pb2_grpc.ExplainServiceStub(self.channel).Explain
        self.stream = explain_pb2_grpc.ExplainServiceStub(self.channel).ExplainStream
        self.models = models_pb2_grpc.ModelServiceStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    async def status(self, service=""):
        return (await self.health.Check(health_pb2.HealthCheckRequest(service=service))).status


@pytest.fixture
def nets(tmp_path, monkeypatch):
    (tmp_path / "camserve_nets.py").write_text(NETS)
    (tmp_path / "words.txt").write_text("ant\nbee\ncat\ndog\nelk\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "camserve_nets", raising=False)
    yield f"tiny=camserve_nets:tiny?size=32&labels={tmp_path / 'words.txt'}"
    sys.modules.pop("camserve_nets", None)


@pytest.fixture
def serving(nets):
    """Start a server, and stop it at the end of the block."""

    @contextlib.asynccontextmanager
    async def start(**settings):
        ready, stop = asyncio.get_running_loop().create_future(), grpc_server.Stop()
        chosen = config.load(flags={**FLAGS, "models": (nets,), **settings}, environment={})
        task = asyncio.create_task(server.serve(chosen, stop, lambda *what: ready.set_result(what)))
        await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        port, pipeline = ready.result()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                yield Running(port, pipeline, stop, task, channel)
        finally:
            pipeline.batcher.resume()
            stop.requested.set()
            await task

    return start


@pytest.fixture
async def running(serving):
    async with serving() as one:
        yield one


@pytest.fixture
def logged(monkeypatch):
    """Read the log as it would be written in JSON."""
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


@dataclass
class Refused:
    """An error as a caller sees it, its details unpacked."""

    code: grpc.StatusCode
    message: str
    trailers: dict[str, Any]
    ids: int

    def detail(self, kind):
        """Return the one detail of this kind, or None."""
        status = status_pb2.Status.FromString(self.trailers["grpc-status-details-bin"])
        assert code_pb2.Code.Name(status.code) == self.code.name
        assert status.message == self.message
        found = [one for one in status.details if one.Is(kind.DESCRIPTOR)]
        assert len(found) <= 1
        message = kind()
        return message if found and found[0].Unpack(message) else None


async def refused(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    trailers = caught.value.trailing_metadata()
    ids = sum(key == "x-request-id" for key, _ in trailers)
    return Refused(caught.value.code(), caught.value.details(), dict(trailers), ids)


def subclasses(kind):
    return {kind}.union(*map(subclasses, kind.__subclasses__()))


# WorkerLost is the batcher's to answer: it runs the rows again, or names the cause. See test_batcher.py.
KINDS = sorted(subclasses(ServiceError) - {ServiceError, WorkerLost}, key=lambda kind: kind.__name__)


# ------------------------------------------------------------------------------------------------------------- errors


def test_every_error_of_ours_has_a_status():
    assert set(statuses.STATUS) == {*KINDS, WorkerLost}


@pytest.mark.parametrize("kind", KINDS)
async def test_error_becomes_a_status_with_id_field_and_retry_delay(kind, running):
    def fail(_pass, _rows):
        raise kind("words for the caller", field="targets[0].label", retry_after=0.0415)

    running.batcher._workers[0].run = fail
    error = await refused(running.explain(request(), metadata=[("x-request-id", "call-7")]))

    assert error.code == statuses.STATUS[kind]
    assert error.message == "words for the caller"
    assert error.trailers["x-request-id"] == "call-7"
    assert error.ids == 1
    assert error.trailers["grpc-retry-pushback-ms"] == "42"  # rounded up: never too early
    assert error.detail(error_details_pb2.RequestInfo).request_id == "call-7"
    (violation,) = error.detail(error_details_pb2.BadRequest).field_violations
    assert (violation.field, violation.description) == ("targets[0].label", "words for the caller")


@pytest.mark.parametrize("kind", KINDS)
async def test_an_error_without_field_and_retry_says_nothing_of_them(kind, running):
    def fail(_pass, _rows):
        raise kind("words for the caller")

    running.batcher._workers[0].run = fail
    error = await refused(running.explain(request()))

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
async def test_a_wrong_request_is_told_which_field_is_at_fault(fields, code, field, hint, running):
    error = await refused(running.explain(request(**fields)))
    (violation,) = error.detail(error_details_pb2.BadRequest).field_violations

    assert error.code.name == code
    assert violation.field == field
    assert hint in error.message
    assert running.batcher.stats.rows == running.batcher.admitted == 0


async def test_more_explanations_than_the_limit_are_refused_before_they_cost_anything(running):
    many = request(methods=[explain_pb2.Method(name="gradcam")] * 14, top_k=5)
    error = await refused(running.explain(many))

    assert error.code == grpc.StatusCode.INVALID_ARGUMENT
    assert "70 explanations, and 64 is the limit" in error.message
    assert running.batcher.stats.rows == 0


async def test_more_pixels_to_draw_than_the_limit_are_refused_before_they_cost_a_row(running):
    packed = io.BytesIO()
    Image.new("L", (4000, 4000)).save(packed, "PNG")
    both = {"overlay": explain_pb2.IMAGE_FORMAT_PNG, "heatmap_image": explain_pb2.IMAGE_FORMAT_PNG}
    asks = {"image": packed.getvalue(), "top_k": 5, "methods": [explain_pb2.Method(name="gradcam")] * 2}
    error = await refused(running.explain(request(rendering=explain_pb2.Rendering(**both), **asks)))
    rows = running.batcher.stats.rows
    small = await running.explain(request(rendering=explain_pb2.Rendering(**both, max_side=500), **asks))

    assert error.code == grpc.StatusCode.INVALID_ARGUMENT
    assert "320 million pixels, and 200 is the limit: set max_side" in error.message
    assert rows == 0
    assert (small.explanations[9].overlay.width, small.explanations[9].overlay.height) == (500, 500)


def explode(*_args, **_options):
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
async def test_a_fault_of_ours_says_its_request_id_and_nothing_else_and_the_log_has_it(
    where, running, logged, monkeypatch
):
    monkeypatch.setattr(f"camserve_server.{where}", explode)
    await internal_but_logged(running, logged)


async def test_a_fault_in_the_engine_says_its_request_id_and_no_more_and_the_log_has_it(running, logged):
    running.batcher._workers[0].run = explode
    await internal_but_logged(running, logged)


async def internal_but_logged(running, logged):
    drawn = request(rendering=explain_pb2.Rendering(overlay=explain_pb2.IMAGE_FORMAT_PNG))
    error = await refused(running.explain(drawn, metadata=[("x-request-id", "call-7")]))
    await wait_in_loop_until(lambda: len(logged()) == 2)
    fault, line = logged()

    assert error.code == grpc.StatusCode.INTERNAL
    assert "call-7" in error.message
    assert "secret" not in str(error)
    assert "RuntimeError" not in str(error)
    assert "Traceback" not in str(error)
    assert "camserve_server" not in str(error)
    assert "RuntimeError: /home/operator/secret.py: no such thing" in fault["exception"]
    assert fault["request_id"] == line["request_id"] == "call-7"
    assert (line["level"], line["code"]) == ("info", "INTERNAL")


async def test_every_call_has_a_line_in_the_log_that_says_how_it_went(running, logged):
    await running.explain(request(top_k=2), metadata=[("x-request-id", "good")])
    await refused(running.explain(request(model="none"), metadata=[("x-request-id", "bad")]))
    await running.models.ListModels(models_pb2.ListModelsRequest(), metadata=[("x-request-id", "list")])
    await wait_in_loop_until(lambda: len(logged()) == 3)
    good, bad, listed = logged()

    assert (good["request_id"], good["code"], good["model"], good["explanations"]) == ("good", "OK", "tiny", 2)
    assert good["batch_rows"] == 2
    assert good["ms"] > 0
    assert (bad["request_id"], bad["code"]) == ("bad", "NOT_FOUND")
    assert bad["error"].startswith('unknown model "none"')
    assert (listed["message"], listed["request_id"], listed["code"]) == ("ListModels", "list", "OK")


# -------------------------------------------------------------------------------------------------------- request ids


@pytest.mark.parametrize("theirs", ["call-7", "x" * 128, "with spaces: and = signs"])
async def test_the_callers_request_id_comes_back_in_the_reply_and_in_the_trailer(theirs, running):
    call = running.explain(request(), metadata=[("x-request-id", theirs)])

    assert (await call).request_id == theirs
    assert dict(await call.trailing_metadata())["x-request-id"] == theirs


@pytest.mark.parametrize("theirs", [None, "", "x" * 129])
async def test_a_request_id_that_is_missing_or_too_long_is_replaced(theirs, running):
    call = running.explain(request(), metadata=[] if theirs is None else [("x-request-id", theirs)])
    ours = (await call).request_id

    assert len(ours) == 32
    assert int(ours, 16)
    assert dict(await call.trailing_metadata())["x-request-id"] == ours


@pytest.mark.parametrize("theirs", ["a\nb", "a\x1b[2J", "a\0", "a\u2028b"])
def test_a_request_id_that_cannot_be_printed_is_replaced(theirs):
    """No client library sends one, but whoever speaks HTTP/2 by hand can try."""

    class Context:
        def invocation_metadata(self):
            return (("x-request-id", theirs),)

    ours = rpc._request_id(Context())

    assert ours != theirs
    assert len(ours) == 32


# ---------------------------------------------------------------------------------------------------- room and waiting


async def test_an_answer_over_the_wire_is_whole(running):
    both = [explain_pb2.Method(name="gradcam"), explain_pb2.Method(name="saliency")]
    rendering = explain_pb2.Rendering(heatmap=True, overlay=explain_pb2.IMAGE_FORMAT_PNG)
    reply = await running.explain(request(methods=both, top_k=2, rendering=rendering))
    sizes = [(one.method, one.layer, one.heatmap.height, one.heatmap.width) for one in reply.explanations]

    assert reply.model == "tiny"
    assert len(reply.predictions) == 5
    assert {one.label for one in reply.predictions} == {"ant", "bee", "cat", "dog", "elk"}
    assert sum(one.probability for one in reply.predictions) == pytest.approx(1, abs=1e-6)
    assert sizes == [("gradcam", "features", 8, 8)] * 2 + [("saliency", "", 32, 32)] * 2
    assert all(Image.open(io.BytesIO(one.overlay.data)).size == (40, 30) for one in reply.explanations)
    assert reply.timing.batch_rows >= 2
    assert min(reply.timing.decode_ms, reply.timing.compute_ms, reply.timing.render_ms) > 0


async def test_an_answer_has_a_receipt_with_all_that_is_needed_to_compute_it_again(running):
    receipt = (await running.explain(request())).receipt
    info = running.pipeline.models["tiny"]
    image, _ = images.fit(images.decode(PHOTO, Limits()), info.preprocess)

    assert (receipt.digest, receipt.weights, receipt.source) == (info.digest, info.weights, info.source)
    assert (receipt.precision, receipt.device) == ("float32", "cpu")
    assert receipt.image_sha256 == hashlib.sha256(PHOTO).hexdigest()
    assert receipt.input_sha256 == hashlib.sha256(image.tobytes()).hexdigest()
    assert receipt.versions["torch"] == importlib.metadata.version("torch")
    assert set(receipt.versions) >= {"camserve", "torch", "torchvision", "timm", "numpy"}


async def test_a_resolved_target_asks_for_the_same_again(running):
    first = (await running.explain(request(top_k=3, rendering=RAW))).explanations
    targets = [one.resolved_target for one in first]
    second = (await running.explain(request(targets=targets, rendering=RAW))).explanations

    assert [one.heatmap.data for one in first] == [one.heatmap.data for one in second]


@pytest.mark.parametrize("profile", [2, 3, 4])
async def test_the_intensities_of_a_profile_come_on_the_pixels_of_the_input(profile, running):
    rendering = explain_pb2.Rendering(heatmap=True, intensity=True, profile=profile)
    (one,) = (await running.explain(request(rendering=rendering))).explanations
    raw = np.frombuffer(one.heatmap.data, "<f4").reshape(one.heatmap.height, one.heatmap.width)
    names = {2: "grad-cam", 3: "torchcam", 4: "captum"}

    assert (one.intensity.height, one.intensity.width) == (32, 32)
    np.testing.assert_array_equal(
        np.frombuffer(one.intensity.data, "<f4").reshape(32, 32), render.intensities(raw, names[profile], (32, 32))
    )


def lightest(activations, _gradients, _scores, *, power):
    """Take the brightest channel.

    L = max_k A_k^p.
    """
    return activations.amax(1) ** power


async def test_method_added_by_one_line_works_through_the_whole_server(running, monkeypatch):
    power = Parameter("power", "Exponent.", 1.0, 0.5, 4.0)
    monkeypatch.setitem(METHODS, "lightest", Cam(lightest, "a test", (power,)))

    listed = {one.name: one for one in (await running.models.ListMethods(models_pb2.ListMethodsRequest())).methods}
    squared = explain_pb2.Method(name="lightest", parameters={"power": explain_pb2.Parameter(number=2)})
    rendering = explain_pb2.Rendering(heatmap=True, overlay=explain_pb2.IMAGE_FORMAT_PNG)
    reply = await running.explain(
        request(methods=[explain_pb2.Method(name="lightest"), squared], layers=["act"], rendering=rendering)
    )
    plain, twice = (np.frombuffer(one.heatmap.data, "<f4") for one in reply.explanations)

    assert listed["lightest"].summary == "Take the brightest channel"
    assert listed["lightest"].formula == "L = max_k A_k^p."
    assert listed["lightest"].parameters[0].name == "power"
    assert plain.max() > 0
    np.testing.assert_allclose(plain**2, twice, rtol=1e-6)
    assert all(Image.open(io.BytesIO(one.overlay.data)).size == (40, 30) for one in reply.explanations)


@pytest.mark.parametrize("extra", [1, 2, 50])
async def test_a_full_queue_refuses_exactly_what_does_not_fit_and_says_when_to_come_again(extra, serving):
    async with serving(max_queue_rows=8) as running:
        running.batcher.pause()
        calls = [asyncio.ensure_future(running.explain(request())) for _ in range(8 + extra)]
        await wait_in_loop_until(lambda: sum(call.done() for call in calls) == extra)

        assert running.batcher.admitted == 8
        running.batcher.resume()
        await asyncio.gather(*calls, return_exceptions=True)
        lost = [await refused(call) for call in calls if call.exception()]

    assert [error.code for error in lost] == [grpc.StatusCode.RESOURCE_EXHAUSTED] * extra
    assert {error.message for error in lost} == {"the queue is full: 8 rows are under way, and 8 is the limit"}
    assert all(50 <= int(error.trailers["grpc-retry-pushback-ms"]) <= 5000 for error in lost)
    assert sum(call.exception() is None for call in calls) == 8
    assert running.batcher.stats.refused == extra
    assert running.batcher.admitted == 0


async def test_a_hundred_calls_whose_deadline_passes_in_the_queue_are_never_executed(running):
    running.batcher.pause()
    calls = [running.explain(request(), timeout=0.5) for _ in range(100)]
    codes = {(await refused(call)).code for call in calls}
    await wait_in_loop_until(lambda: running.batcher.admitted == 0)
    running.batcher.resume()
    await running.explain(request())

    assert codes == {grpc.StatusCode.DEADLINE_EXCEEDED}
    assert (running.batcher.stats.batches, running.batcher.stats.rows) == (1, 1)  # the last one alone


@pytest.mark.parametrize("rpc", ["explain", "stream"])
@pytest.mark.parametrize("seconds", [20, None])
async def test_the_deadline_of_a_call_is_that_of_its_rows(rpc, seconds, running):
    running.batcher.pause()
    asked = request() if rpc == "explain" else [item("r0")]
    clock = asyncio.get_running_loop().time
    before, call = clock(), getattr(running, rpc)(asked, timeout=seconds)
    await wait_in_loop_until(lambda: running.batcher.waiting)
    after = clock()
    (ticket,) = running.batcher._queue
    call.cancel()

    # gRPC writes a call's timeout with three digits and rounds it up: from 10 to 100 s to a whole tenth of a second.
    # However late it is read, it ends when it ends: an instant, and no duration.
    assert ticket.deadline == math.inf if seconds is None else before + 19 < ticket.deadline <= after + 20.1


async def test_a_caller_who_hangs_up_frees_the_queue(running):
    running.batcher.pause()
    calls = [running.explain(request()) for _ in range(20)]
    await wait_in_loop_until(lambda: running.batcher.admitted == 20)
    for call in calls:
        call.cancel()
    await wait_in_loop_until(lambda: running.batcher.admitted == 0)
    running.batcher.resume()
    await running.explain(request())

    assert running.batcher.stats.rows == 1


EIGHT = {
    "methods": [explain_pb2.Method(name="gradcam")] * 8,
    "rendering": explain_pb2.Rendering(overlay=explain_pb2.IMAGE_FORMAT_JPEG),
}


@pytest.mark.parametrize(("pixels", "steps"), [(10**6, 1), (2 * 40 * 30, 4), (1, 8)])
async def test_pictures_are_drawn_in_as_few_steps_as_leave_others_a_turn(pixels, steps, running, monkeypatch):
    run_step, generators = explain._run_step, []
    monkeypatch.setattr(drawing, "PIXELS_PER_STEP", pixels)
    monkeypatch.setattr(explain, "_run_step", lambda steps: generators.append(steps) or run_step(steps))
    response = await running.explain(request(**EIGHT))

    assert [each.__name__ for each in generators].count("draw_and_reply") == steps
    assert len({one.overlay.data for one in response.explanations}) == 1
    assert len(response.explanations) == 8


async def test_a_caller_who_hangs_up_while_pictures_are_drawn_stops_the_rest(running, monkeypatch):
    draw, drawn, go = render.draw, [], threading.Event()

    def slowly(*args):
        drawn.append(args)
        go.wait(20)
        return draw(*args)

    monkeypatch.setattr(drawing, "PIXELS_PER_STEP", 1)
    monkeypatch.setattr(render, "draw", slowly)
    call = running.explain(request(**EIGHT))
    await wait_in_loop_until(lambda: drawn)
    call.cancel()
    await wait_in_loop_until(lambda: running.batcher.admitted == 0)
    go.set()
    await running.pipeline.in_thread(int)  # after whatever was to come

    assert len(drawn) == 1


async def test_a_caller_who_loses_the_connection_frees_the_queue(running):
    running.batcher.pause()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        calls = [explain_pb2_grpc.ExplainServiceStub(channel).Explain(request()) for _ in range(20)]
        await wait_in_loop_until(lambda: running.batcher.admitted == 20)
    await wait_in_loop_until(lambda: running.batcher.admitted == 0)

    assert all([await call.code() == grpc.StatusCode.CANCELLED for call in calls])


async def test_a_request_larger_than_the_limit_is_refused_before_it_is_read(serving):
    async with serving(max_message_mib=1) as running:
        await refused(running.explain(request(image=bytes(2**20 - 1000))))  # read, and found to be no picture
        error = await refused(running.explain(request(image=bytes(2**20 + 1))))

    assert error.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than" in error.message


# ------------------------------------------------------------------------------------------------------------- stream


def item(name, **fields):
    return explain_pb2.ExplainStreamRequest(request_id=name, request=request(**fields))


def smooth(samples):
    return explain_pb2.Method(name="smoothgrad", parameters={"samples": explain_pb2.Parameter(number=samples)})


async def test_replies_of_a_stream_say_which_request_they_answer_and_its_end_is_ok(running):
    call = running.stream(item(f"r{k}", top_k=k) for k in (1, 2, 3, 4, 5))
    replies = {reply.request_id: reply.response async for reply in call}

    assert {name: len(one.explanations) for name, one in replies.items()} == {f"r{k}": k for k in (1, 2, 3, 4, 5)}
    assert all(one.request_id == name for name, one in replies.items())
    assert await call.code() == grpc.StatusCode.OK


@pytest.mark.parametrize("kind", [*KINDS, RuntimeError])
async def test_a_request_that_fails_is_answered_by_an_error_and_the_stream_goes_on(kind, running):
    def fail(_pass, _rows):
        if kind is RuntimeError:
            explode()
        raise kind("words for the caller", field="layers[0]", retry_after=0.0415)

    call = running.stream()
    work, running.batcher._workers[0].run = running.batcher._workers[0].run, fail
    await call.write(item("bad"))
    bad = await call.read()
    running.batcher._workers[0].run = work
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
        assert [(one.field, one.description) for one in bad.error.fields] == [("layers[0]", "words for the caller")]
        assert bad.error.retry_after_ms == 42


@pytest.mark.parametrize("name", ["", "x" * 129, "a\n2026-01-01 00:00:00,000 INFO forged"])
async def test_a_stream_request_needs_an_id_that_can_be_logged(name, running):
    (reply,) = [reply async for reply in running.stream([item(name)])]

    assert reply.request_id == name
    assert reply.error.code == code_pb2.Code.INVALID_ARGUMENT
    assert reply.error.fields[0].field == "request_id"


async def test_item_that_is_no_request_fails_alone(running):
    empty = explain_pb2.ExplainStreamRequest(request_id="empty")
    replies = {reply.request_id: reply async for reply in running.stream([empty, item("good")])}

    assert replies["empty"].error.fields[0].field == "image"
    assert replies["good"].HasField("response")


@pytest.mark.usefixtures("running")
async def test_the_event_loop_waits_for_a_call_of_any_method_and_not_of_each():
    tasks = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]

    assert [name for name in tasks if "_request" in name] == ["AioServer._request_call"]


async def test_the_log_of_a_stream_has_the_fault_with_the_id_of_its_request(running, logged):
    running.batcher._workers[0].run = explode
    _ = [reply async for reply in running.stream([item("one"), item("two")])]
    faults = [entry for entry in logged() if "exception" in entry]

    assert sorted(entry["request_id"] for entry in faults) == ["one", "two"]


async def test_a_stream_is_read_only_as_far_as_there_is_room(serving, monkeypatch):
    taken = []
    read = streams._next

    async def count(house, requests, pulse):
        taken.append(await read(house, requests, pulse))
        return taken[-1]

    monkeypatch.setattr(streams, "_next", count)
    async with serving(stream_in_flight=4) as running:
        running.batcher.pause()
        call = running.stream(item(f"r{k}") for k in range(20))
        await wait_in_loop_until(lambda: running.batcher.admitted == 4)
        for _ in range(20):  # time enough for the server to read more, if it would
            await running.status()

        assert (len(taken), running.batcher.admitted) == (4, 4)
        running.batcher.resume()
        assert len([reply async for reply in call]) == 20


async def test_a_stream_waits_for_room_in_the_queue_rather_than_be_refused(serving):
    async with serving(max_queue_rows=2, stream_in_flight=16) as running:
        replies = [reply async for reply in running.stream(item(f"r{k}") for k in range(50))]

    assert {reply.request_id for reply in replies} == {f"r{k}" for k in range(50)}
    assert {reply.WhichOneof("outcome") for reply in replies} == {"response"}
    assert running.batcher.stats.refused == 0


async def test_a_stream_that_is_cancelled_frees_the_queue(serving):
    async with serving(max_queue_rows=2) as running:
        running.batcher.pause()
        call = running.stream(item(f"r{k}") for k in range(50))
        await wait_in_loop_until(lambda: running.batcher.admitted == 2)
        call.cancel()
        await wait_in_loop_until(lambda: running.batcher.admitted == 0)
        running.batcher.resume()
        await running.explain(request())

    assert running.batcher.stats.rows == 1


async def test_who_leaves_a_stream_that_is_being_answered_is_no_fault_of_ours(running, logged):
    for _ in range(20):
        call = running.stream(item(f"r{k}") for k in range(200))
        await call.read()
        call.cancel()

    def codes():
        return [entry["code"] for entry in logged() if entry["message"] == "ExplainStream"]

    await wait_in_loop_until(lambda: len(codes()) == 20)

    assert [entry for entry in logged() if "exception" in entry] == []
    assert set(codes()) == {"CANCELLED"}


async def test_a_stream_ends_as_cancelled_once_an_answer_finds_nobody():
    """However late gRPC tells that the call is over."""

    class Gone:
        async def write(self, _):
            raise grpc.aio.InternalError("the stream is closed")

    async def requests():
        yield streams.Received("one")
        await asyncio.Event().wait()

    async def answer(asked, write):
        await write(asked)

    house = rpc.ServerState(stream_in_flight=4, pipeline=object())
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(10):
            await streams.serve_stream(house, Gone(), requests(), answer)


async def test_long_method_reports_progress_on_a_stream_before_its_answer(running):
    call = running.stream([item("r", methods=[smooth(400)], progress=True)])
    replies = [reply async for reply in call]
    told = [reply.progress for reply in replies[:-1]]

    assert replies[-1].WhichOneof("outcome") == "response"
    assert {reply.request_id for reply in replies} == {"r"}
    assert len(told) >= 3
    assert [one.rows_done for one in told] == sorted({one.rows_done for one in told})
    assert {one.rows_total for one in told} == {401}
    assert 1 <= told[0].rows_done < told[-1].rows_done <= 401


async def test_who_does_not_ask_for_progress_is_told_none(running):
    call = running.stream([item("r", methods=[smooth(200)])])

    assert [reply.WhichOneof("outcome") async for reply in call] == ["response"]


async def test_a_long_method_that_is_cancelled_stops_within_a_chunk(serving):
    async with serving(max_batch_rows=1) as running:
        call = running.stream([item("r", methods=[smooth(512)] * 8, progress=True)])
        await call.read()
        call.cancel()
        await wait_in_loop_until(lambda: running.batcher.admitted == 0)
        rows = running.batcher.stats.rows
        await running.explain(request())

    assert rows <= 3 * Limits().chunk
    assert running.batcher.stats.rows == rows + 1


async def test_a_long_method_takes_no_more_of_the_queue_than_a_chunk(serving):
    async with serving(max_queue_rows=Limits().chunk + 1) as running:
        running.batcher.pause()
        long = asyncio.ensure_future(running.explain(request(methods=[smooth(512)])))
        await wait_in_loop_until(lambda: running.batcher.admitted == Limits().chunk)
        short = asyncio.ensure_future(running.explain(request()))
        await wait_in_loop_until(lambda: running.batcher.admitted == Limits().chunk + 1)
        running.batcher.resume()
        await short
        assert not long.done()
        await long


async def test_a_stream_of_which_nothing_is_under_way_is_ended_after_a_while_and_no_other(serving):
    async with serving(idle_seconds=60) as running:
        with StoppedClock() as clock:
            idle, busy = running.stream(), running.stream()
            await idle.write(item("r0"))
            assert (await idle.read()).request_id == "r0"
            running.batcher.pause()
            await busy.write(item("r1"))
            await wait_in_loop_until(lambda: running.batcher.admitted == 1)
            clock.advance(60)
            error = await refused(idle.read())
            clock.advance(60)
            running.batcher.resume()
            answer = await busy.read()
        busy.cancel()

    assert answer.request_id == "r1"
    assert error.code == grpc.StatusCode.UNAVAILABLE  # so that a client opens another when it has more to ask
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
    async with serving(idle_seconds=60) as running:
        receive_first, begun = deserialization.receive_first, []

        async def noted(requests, seconds):
            begun.append(requests)
            return await receive_first(requests, seconds)

        monkeypatch.setattr(deserialization, "receive_first", noted)
        with StoppedClock() as clock:
            call = running.channel.stream_stream(f"/{rpc}")()
            ended = asyncio.ensure_future(refused(call.read()))
            await wait_in_loop_until(lambda: begun)
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
    async with serving(max_connections=2) as running:
        await running.status()
        first, second = [await asyncio.open_connection("127.0.0.1", running.port) for _ in range(2)]

        assert await second[0].read() == b""
        assert await first[0].read(1)  # the server's half of HTTP/2
        assert await running.status() == SERVING
        for _, writer in (first, second):
            writer.close()


async def test_aged_connection_is_replaced_and_only_calls_beyond_grace_are_cut(serving):
    async with serving(connection_age_seconds=0.5, connection_grace_seconds=0.5) as running:
        watch = running.health.Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        ended = asyncio.ensure_future(refused(watch.read()))
        while not ended.done():
            await running.explain(request())  # on one connection after the other, and none of them fails
        error = await ended

    assert error.code == grpc.StatusCode.UNAVAILABLE


async def test_call_cancelled_before_its_message_is_not_logged(running, logged, monkeypatch):
    receive_first, ends = deserialization.receive_first, []

    async def noted(requests, seconds):
        try:
            return await receive_first(requests, seconds)
        except BaseException as error:
            ends.append(type(error))
            raise

    monkeypatch.setattr(deserialization, "receive_first", noted)
    with StoppedClock():  # in which CANCEL_TIMEOUT never ends
        call = running.channel.stream_unary("/camserve.v1.ExplainService/Explain")()
        await call.wait_for_connection()
        call.cancel()
        await running.status()
        await wait_in_loop_until(lambda: ends)

    assert ends == [asyncio.CancelledError]
    assert "Explain" not in {entry["message"] for entry in logged()}


async def test_a_call_without_a_message_is_refused(running):
    error = await refused(running.channel.stream_unary("/camserve.v1.ExplainService/Explain")(iter(())))

    assert error.code == grpc.StatusCode.INVALID_ARGUMENT
    assert error.message == "the call ended without a message"


async def test_a_call_whose_message_came_is_waited_for_as_long_as_it_takes(serving):
    async with serving(idle_seconds=60) as running:
        with StoppedClock() as clock:
            watch = running.health.Watch(health_pb2.HealthCheckRequest())
            await watch.read()
            running.batcher.pause()
            call = asyncio.ensure_future(running.explain(request()))
            await wait_in_loop_until(lambda: running.batcher.admitted == 1)
            clock.advance(61)
            await running.status()
            assert not call.done()
            running.batcher.resume()

            assert len((await call).explanations) == 1
            assert not watch.done()


async def test_a_call_whose_message_does_not_come_does_not_hold_up_a_stop(serving):
    async with serving(drain_seconds=3600) as running:
        call = running.channel.stream_unary("/camserve.v1.ExplainService/Explain")()
        await call.wait_for_connection()
        running.stop.requested.set()

        await running.task


async def test_the_deadline_of_a_stream_ends_it_and_frees_the_queue(running):
    running.batcher.pause()
    call = running.stream((item(f"r{k}") for k in range(3)), timeout=0.3)
    with pytest.raises(grpc.aio.AioRpcError):
        _ = [reply async for reply in call]
    await wait_in_loop_until(lambda: running.batcher.admitted == 0)

    assert await call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert running.batcher.stats.rows == 0


# -------------------------------------------------------------------------------------------------- starting, stopping


async def test_draining_stream_answers_accepted_requests_then_ends_unavailable(serving):
    async with serving() as running:
        watch = running.health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        running.batcher.pause()
        call = running.stream()
        for k in range(3):
            await call.write(item(f"r{k}"))
        await wait_in_loop_until(lambda: running.batcher.admitted == 3)
        running.stop.requested.set()
        assert (await watch.read()).status == NOT_SERVING
        running.batcher.resume()
        replies = [await call.read() for _ in range(3)]
        error = await refused(call.read())

    assert {reply.request_id for reply in replies} == {"r0", "r1", "r2"}
    assert {reply.WhichOneof("outcome") for reply in replies} == {"response"}
    assert error.code == grpc.StatusCode.UNAVAILABLE
    assert "draining" in error.message
    assert int(error.trailers["grpc-retry-pushback-ms"]) > 0


async def test_a_draining_server_answers_what_it_accepted_and_refuses_what_is_new(running):
    running.batcher.pause()
    accepted = [asyncio.ensure_future(running.explain(request())) for _ in range(5)]
    await wait_in_loop_until(lambda: running.batcher.admitted == 5)
    running.stop.requested.set()
    late = await refused(running.explain(request()))
    running.batcher.resume()

    assert late.code == grpc.StatusCode.UNAVAILABLE
    assert [len((await call).explanations) for call in accepted] == [1] * 5
    await running.task


async def test_an_idle_stream_and_a_watch_of_the_health_do_not_hold_up_a_stop(serving):
    async with serving(drain_seconds=3600) as running:
        stream, watch = running.stream(), running.health.Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        await stream.write(item("r0"))
        await stream.read()
        running.stop.requested.set()

        await running.task


async def test_work_that_outlasts_the_drain_is_cut_off(serving):
    async with serving(drain_seconds=0.1) as running:
        running.batcher.pause()
        call = running.explain(request())
        await wait_in_loop_until(lambda: running.batcher.admitted == 1)
        running.stop.requested.set()

        assert (await refused(call)).code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
        await running.task


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


async def test_the_port_is_open_before_the_models_are_warm_but_serves_nothing_yet(nets):
    address, stop = f"127.0.0.1:{free_port()}", grpc_server.Stop()
    flags = {**FLAGS, "address": address, "models": (nets.replace(":tiny", ":gated"),)}
    chosen = config.load(flags=flags, environment={})
    task = asyncio.create_task(server.serve(chosen, stop))
    async with grpc.aio.insecure_channel(address) as channel:
        running = Running(0, Pipeline({}, None, None, None), stop, task, channel)
        await channel.channel_ready()
        services = ("", "camserve.v1.ExplainService", "camserve.v1.ModelService")
        before = [await running.status(service) for service in services]
        early = [
            await refused(running.explain(request())),
            await refused(running.models.ListModels(models_pb2.ListModelsRequest())),
            await refused(running.stream([item("r0")]).read()),
        ]
        watch = running.health.Watch(health_pb2.HealthCheckRequest())
        seen = [(await watch.read()).status]
        importlib.import_module("camserve_nets").GATE.set()
        seen.append((await watch.read()).status)
        after = [await running.status(service) for service in services]
        await running.explain(request())
        stop.requested.set()
        seen.append((await watch.read()).status)
    await task

    assert before == [NOT_SERVING] * 3
    assert {(error.code, error.trailers["grpc-retry-pushback-ms"]) for error in early} == {
        (grpc.StatusCode.UNAVAILABLE, "1000")
    }
    assert all("starting" in error.message for error in early)
    assert after == [SERVING] * 3
    assert seen == [NOT_SERVING, SERVING, NOT_SERVING]


async def test_a_service_that_is_not_there_has_no_health(running):
    error = await refused(running.status("camserve.v1.Nothing"))

    assert error.code == grpc.StatusCode.NOT_FOUND


async def test_a_second_server_on_the_same_port_is_told_that_it_is_taken(running, serving):
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{running.port}: is the port taken"):
        async with serving(address=f"127.0.0.1:{running.port}"):
            pass


async def test_two_models_of_one_name_are_refused_with_how_to_tell_them_apart(nets, serving):
    with pytest.raises(ConfigError, match='two models are called "tiny": name one as NAME=camserve_nets:tiny'):
        async with serving(models=(nets, nets)):
            pass


async def test_two_names_for_one_model_are_two_models(nets, serving):
    async with serving(models=(nets, nets.replace("tiny=", "other="))) as running:
        listed = await running.models.ListModels(models_pb2.ListModelsRequest())
        replies = [await running.explain(request(model=name)) for name in ("", "tiny", "other")]

    assert [one.name for one in listed.models] == ["tiny", "other"]
    assert [reply.model for reply in replies] == ["tiny", "tiny", "other"]


async def test_models_layers_and_methods_are_described(running):
    got = await running.models.GetModel(models_pb2.GetModelRequest(name="tiny"))
    default = await running.models.GetModel(models_pb2.GetModelRequest())
    layers = (await running.models.ListLayers(models_pb2.ListLayersRequest(model="tiny"))).layers
    methods = (await running.models.ListMethods(models_pb2.ListMethodsRequest())).methods

    assert got == default
    assert (got.model.classes, got.model.default_layer, got.model.weights) == (5, "features", "default")
    assert list(got.labels) == ["ant", "bee", "cat", "dog", "elk"]
    assert [one.name for one in layers] == ["stem", "act", "features", "pool", "flat", "head"]
    assert [one.name for one in layers if one.explainable] == ["stem", "act", "features"]
    assert {one.name for one in methods} >= {"gradcam", "hirescam", "layercam", "saliency", "smoothgrad"}
    assert [one.kind for one in methods] == sorted(one.kind for one in methods)  # CAMs first


@pytest.mark.parametrize("rpc", ["GetModel", "ListLayers"])
async def test_an_unknown_model_is_told_with_the_field_of_that_very_request(rpc, running):
    field = {"GetModel": "name", "ListLayers": "model"}[rpc]
    kind = getattr(models_pb2, f"{rpc}Request")
    error = await refused(getattr(running.models, rpc)(kind(**{field: "tinny"})))

    assert error.code == grpc.StatusCode.NOT_FOUND
    assert error.detail(error_details_pb2.BadRequest).field_violations[0].field == field
    assert 'did you mean "tiny"' in error.message


async def buf(port, *arguments, say=None):
    command = [BUF, "curl", "--protocol", "grpc", "--http2-prior-knowledge", *arguments[:-1]]
    process = await asyncio.create_subprocess_exec(
        *command,
        f"http://127.0.0.1:{port}{arguments[-1]}",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate(None if say is None else json.dumps(say).encode())
    return process.returncode, out.decode(), err.decode()


async def test_reflection_allows_calls_without_the_proto_files(running):
    code, out, err = await buf(running.port, "--list-methods", "")

    assert (code, err) == (0, "")
    assert set(out.split()) >= {
        *(
            f"camserve.v1.ExplainService/{name}"
            for name in ("Explain", "ExplainStream", "InspectLayers", "ExtractFeatures")
        ),
        *(f"camserve.v1.ModelService/{name}" for name in ("ListModels", "GetModel", "ListLayers", "ListMethods")),
        "grpc.health.v1.Health/Check",
    }

    image = base64.b64encode(PHOTO).decode()
    code, out, err = await buf(
        running.port, "-d", "@-", "/camserve.v1.ExplainService/Explain", say={"image": image, "topK": 2}
    )
    reply = json.loads(out)

    assert (code, err) == (0, "")
    assert reply["model"] == "tiny"
    assert [one["method"] for one in reply["explanations"]] == ["gradcam", "gradcam"]
