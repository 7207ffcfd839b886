"""A fake server with responses that tests set, and both clients with the same interface."""

from __future__ import annotations

import asyncio
import hashlib
import io
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from click.testing import CliRunner
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import HealthServicer
from PIL import Image

import camserve
from camserve import cli
from camserve.v1 import (
    evaluate_pb2,
    evaluate_pb2_grpc,
    explain_pb2,
    explain_pb2_grpc,
    models_pb2,
    models_pb2_grpc,
)
from client import hostile

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from click.testing import Result

QUICK = camserve.Retry(attempts=4, first=0.01, longest=0.02)


def picture(kind: str = "PNG", size: tuple[int, int] = (6, 4), color: str = "red") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, color).save(out, kind)
    return out.getvalue()


@dataclass
class Refusal:
    """An error that the fake server returns."""

    code: grpc.StatusCode
    message: str = "no"
    fields: dict[str, str] = field(default_factory=dict)
    request_id: str = ""
    trailers: tuple[tuple[str, str | bytes], ...] = ()
    reason: str = ""

    def abort(self, context: grpc.ServicerContext) -> None:
        context.set_trailing_metadata((*self.trailers, ("grpc-status-details-bin", self.packed())))
        context.abort(self.code, self.message)

    def packed(self) -> bytes:
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        request = error_details_pb2.BadRequest(
            field_violations=[
                error_details_pb2.BadRequest.FieldViolation(field=name, description=text)
                for name, text in self.fields.items()
            ]
        )
        cause = error_details_pb2.ErrorInfo(reason=self.reason, domain="camserve")
        for detail in (request, error_details_pb2.RequestInfo(request_id=self.request_id), cause):
            packed = any_pb2.Any()
            packed.Pack(detail)
            status.details.append(packed)
        return status.SerializeToString()


def answer(request: explain_pb2.ExplainRequest, request_id: str = "id") -> Any:
    """Return the response of a server that predicts one class for an image: the number of its last byte."""
    index = request.image[-1]
    target = explain_pb2.Prediction(class_index=index, label=f"class {index}", probability=0.75, score=2.5)
    explanations = [
        explain_pb2.Explanation(
            method=method.name,
            layer="features",
            target=target,
            score=2.5,
            verdict=explain_pb2.VERDICT_OK,
            heatmap=heatmap() if request.rendering.heatmap else None,
            overlay=overlay(request.rendering.overlay),
            resolved_target=explain_pb2.Target(class_index=index),
            parameters=method.parameters,
            scale=2.5,
            regions=[hostile.region()] * request.rendering.HasField("regions"),
        )
        for method in request.methods
    ]
    return explain_pb2.ExplainResponse(
        request_id=request_id,
        model=request.model or "tiny",
        predictions=[target],
        explanations=explanations,
        photo=explain_pb2.Photo(width=6, height=4, seen=explain_pb2.Box(left=1, top=0, right=5, bottom=4)),
        timing=explain_pb2.Timing(decode_ms=1, queue_ms=2, compute_ms=3, render_ms=4, batch_rows=5),
        receipt=receipt(request.image),
    )


def receipt(image: bytes) -> explain_pb2.Receipt:
    digest = hashlib.sha256(image).hexdigest()
    return explain_pb2.Receipt(
        source="timm:tiny",
        weights="default",
        digest="ab" * 32,
        precision="float32",
        device="cpu",
        image_sha256=digest,
        input_sha256=digest,
        versions={"camserve": "1.0"},
    )


def inspection(request: Any) -> Any:
    seen = explain_pb2.Statistics(mean=0.5, std=1, minimum=-1, maximum=3, zeros=0.25, norm=20)
    slope = explain_pb2.Statistics(std=0.1, minimum=-0.1, maximum=0.1, norm=0.02)
    zeros = explain_pb2.Statistics(zeros=1)
    wild = explain_pb2.Statistics(norm=1, non_finite=3)
    whole = {"type": "Conv2d", "output_shape": [1, 2, 2, 2], "elements": 8}
    readings = [
        explain_pb2.LayerReading(name="stem", activation=seen, gradient=slope, **whole),
        explain_pb2.LayerReading(name="body", activation=seen, gradient=slope, container=True, **whole),
        explain_pb2.LayerReading(name="dead", activation=zeros, gradient=zeros, **whole),
        explain_pb2.LayerReading(name="wild", activation=wild, gradient=slope, **whole),
        explain_pb2.LayerReading(name="cut", activation=seen, gradient=zeros, **whole),
        explain_pb2.LayerReading(name="words", type="Words"),
    ]
    wanted = [each for each in readings if not request.layers or each.name in request.layers]
    target = explain_pb2.Prediction(class_index=7, label="tabby", probability=0.5, score=2.5)
    return explain_pb2.InspectLayersResponse(
        request_id="id", model=request.model or "tiny", target=target, score=2.5, layers=wanted, timing=timing()
    )


def extraction(request: Any) -> Any:
    target = explain_pb2.Prediction(class_index=7, label="tabby", probability=0.5, score=2.5)
    against = explain_pb2.Prediction(class_index=8, label="tiger cat")
    return explain_pb2.ExtractFeaturesResponse(
        request_id="id",
        model=request.model or "tiny",
        layer=request.layer or "features",
        target=target,
        contrast=against if request.target.HasField("contrast") else None,
        score=2.5,
        channels=[
            explain_pb2.Channel(index=5, mean_activation=2, gradient_weight=-0.5),
            explain_pb2.Channel(index=0, mean_activation=1, gradient_weight=0.25),
        ],
        channel_count=8,
        grid_height=1,
        grid_width=2,
        maps=np.arange(4, dtype="<f4").tobytes() if request.raw else b"",
        picture=overlay(request.picture),
        photo=explain_pb2.Photo(width=6, height=4),
        timing=timing(),
    )


def timing() -> explain_pb2.Timing:
    return explain_pb2.Timing(decode_ms=1, queue_ms=2, compute_ms=3, render_ms=4, batch_rows=5)


def evaluation(request: evaluate_pb2.EvaluateRequest, explained: Any) -> Any:
    """Return readings of which the first map has the best ones, and the last map has none."""
    return evaluate_pb2.EvaluateResponse(
        request_id="id",
        explained=explained,
        readings=[
            evaluate_pb2.Reading(
                explanation=place,
                metric=metric.name,
                value=float("nan") if 0 < place == len(explained.explanations) - 1 else 0.25 + place / 4,
                message="flat" if 0 < place == len(explained.explanations) - 1 else "",
                curves=[evaluate_pb2.Curve(name="p", x=[0, 1], y=[0.75, 0.25])] if metric.name != "increase" else [],
                parameters=metric.parameters,
            )
            for place in range(len(explained.explanations))
            for metric in request.metrics
        ],
    )


def heatmap() -> explain_pb2.Heatmap:
    data = np.arange(4, dtype="<f4").tobytes()
    return explain_pb2.Heatmap(height=2, width=2, data=data)


def overlay(kind: int) -> explain_pb2.Picture | None:
    if not kind:
        return None
    name = explain_pb2.ImageFormat.Name(kind).removeprefix("IMAGE_FORMAT_")
    return explain_pb2.Picture(format=kind, data=picture(name), width=6, height=4)


@dataclass
class Call:
    """A call as the server received it."""

    rpc: str
    request: Any
    metadata: dict[str, str]
    time_remaining: float | None


class FakeServer(
    evaluate_pb2_grpc.EvaluateServiceServicer,
    explain_pb2_grpc.ExplainServiceServicer,
    models_pb2_grpc.ModelServiceServicer,
):
    """Fake server. It returns the errors in `refusals` first, then valid responses."""

    def __init__(self) -> None:
        self.address = ""
        self.calls: list[Call] = []
        self.refusals: list[Refusal] = []
        self.streams: list[Callable[[Iterator[Any], grpc.ServicerContext], Iterator[Any]]] = []
        self.answer = answer
        self.inspection = inspection
        self.extraction = extraction
        self.stream_ended = threading.Event()
        self.called = threading.Event()
        self.hold = threading.Event()
        self.hold.set()

    refusal = Refusal

    @staticmethod
    def reply(each: Any) -> Any:
        return reply(each)

    @staticmethod
    def heatmap() -> explain_pb2.Heatmap:
        return heatmap()

    @staticmethod
    def error(each: Any, code: grpc.StatusCode, **rest: Any) -> Any:
        return error_reply(each, code, **rest)

    def _record(self, rpc: str, request: Any, context: grpc.ServicerContext) -> None:
        metadata = dict(context.invocation_metadata())
        self.calls.append(Call(rpc, request, metadata, context.time_remaining()))
        self.called.set()
        if self.refusals:
            self.refusals.pop(0).abort(context)
        self.hold.wait()

    def Explain(self, request: Any, context: Any) -> Any:  # noqa: N802 -- gRPC's name
        self._record("Explain", request, context)
        return self.answer(request, dict(context.invocation_metadata())["x-request-id"])

    def ExplainStream(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802 -- the same
        context.add_callback(self.stream_ended.set)
        self._record("ExplainStream", None, context)
        serve = self.streams.pop(0) if self.streams else in_order
        yield from serve(request_iterator, context)

    def EstimateCost(self, request: Any, context: Any) -> Any:  # noqa: N802 -- the same
        self._record("EstimateCost", request, context)
        explanations = len(request.explain.methods) * request.explain.top_k
        return explain_pb2.EstimateCostResponse(rows=1000 * explanations, explanations=explanations, max_rows=4096)

    def InspectLayers(self, request: Any, context: Any) -> Any:  # noqa: N802 -- the same
        self._record("InspectLayers", request, context)
        return self.inspection(request)

    def ExtractFeatures(self, request: Any, context: Any) -> Any:  # noqa: N802 -- the same
        self._record("ExtractFeatures", request, context)
        return self.extraction(request)

    def Evaluate(self, request: Any, context: Any) -> Any:  # noqa: N802 -- the same
        self._record("Evaluate", request, context)
        return evaluation(request, self.answer(request.explain))

    def ListMetrics(self, request: Any, context: Any) -> Any:  # noqa: N802 -- the same
        self._record("ListMetrics", request, context)
        steps = models_pb2.ParameterInfo(name="steps", default_value=explain_pb2.Parameter(number=20), integer=True)
        return evaluate_pb2.ListMetricsResponse(
            metrics=[
                evaluate_pb2.MetricInfo(name="deletion", summary="Deletes.", parameters=[steps], rows=20),
                evaluate_pb2.MetricInfo(name="max_sensitivity", rows=8, repeats=True, higher_is_better=True),
            ]
        )

    def ListModels(self, request: Any, context: Any) -> Any:  # noqa: N802 -- the same
        self._record("ListModels", request, context)
        return models_pb2.ListModelsResponse(models=[model("tiny"), model("large")])

    def GetModel(self, request: Any, context: Any) -> Any:  # noqa: N802 -- the same
        self._record("GetModel", request, context)
        return models_pb2.GetModelResponse(model=model(request.name or "tiny"), labels=["cat", "dog"])

    def ListLayers(self, request: Any, context: Any) -> Any:  # noqa: N802 -- the same
        self._record("ListLayers", request, context)
        return models_pb2.ListLayersResponse(
            layers=[
                models_pb2.Layer(
                    name="features",
                    type="Conv2d",
                    output_shape=[1, 8, 7, 7],
                    parameters=1200,
                    calls=1,
                    explainable=True,
                    grid_height=7,
                    grid_width=7,
                    kinds=[models_pb2.METHOD_KIND_CAM, models_pb2.METHOD_KIND_PERTURBATION],
                ),
                models_pb2.Layer(name="head", type="Linear", output_shape=[1, 2], reason="no grid"),
            ]
        )

    def ListMethods(self, request: Any, context: Any) -> Any:  # noqa: N802 -- the same
        self._record("ListMethods", request, context)
        return models_pb2.ListMethodsResponse(methods=[gradcam(), smoothgrad()])


def model(name: str) -> models_pb2.Model:
    return models_pb2.Model(
        name=name,
        source=f"timm:{name}",
        weights="default",
        digest="ab" * 32,
        classes=1000,
        input_height=224,
        input_width=224,
        default_layer="features",
        parameters=4_650_000,
        precision="float32",
        device="cpu",
        task="classify",
    )


def gradcam() -> models_pb2.MethodInfo:
    return models_pb2.MethodInfo(
        name="gradcam",
        kind=models_pb2.METHOD_KIND_CAM,
        summary="Weighs maps",
        paper="P",
        rows=1,
        layered=True,
        eigen_smoothing=True,
        formula="L = ReLU(Σ_k α_k A_k)",
    )


def smoothgrad() -> models_pb2.MethodInfo:
    number = models_pb2.ParameterInfo(
        name="samples",
        summary="How many.",
        default_value=explain_pb2.Parameter(number=16),
        minimum=1,
        maximum=256,
        integer=True,
    )
    word = models_pb2.ParameterInfo(
        name="finish",
        default_value=explain_pb2.Parameter(text="max"),
        choices=["max", "mean"],
    )
    return models_pb2.MethodInfo(
        name="smoothgrad",
        kind=models_pb2.METHOD_KIND_SALIENCY,
        summary="Averages.",
        parameters=[number, word, models_pb2.ParameterInfo(name="seed")],
        rows=16,
        needs="ReLU",
    )


def in_order(requests: Iterator[Any], _context: Any) -> Iterator[Any]:
    for item in requests:
        yield reply(item)


def reply(each: Any) -> Any:
    return explain_pb2.ExplainStreamResponse(request_id=each.request_id, response=answer(each.request, each.request_id))


def error_reply(each: Any, code: grpc.StatusCode, **rest: Any) -> Any:
    error = explain_pb2.Error(code=code.value[0], message=f"{code.name} it is", **rest)
    return explain_pb2.ExplainStreamResponse(request_id=each.request_id, error=error)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    pool = ThreadPoolExecutor(16)
    running = grpc.server(pool, options=(("grpc.so_reuseport", 0),))
    evaluate_pb2_grpc.add_EvaluateServiceServicer_to_server(fake, running)
    explain_pb2_grpc.add_ExplainServiceServicer_to_server(fake, running)
    models_pb2_grpc.add_ModelServiceServicer_to_server(fake, running)
    health = HealthServicer()
    health.set("", health_pb2.HealthCheckResponse.SERVING)
    health.set("asleep", health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(health, running)
    fake.address = f"127.0.0.1:{running.add_insecure_port('127.0.0.1:0')}"
    running.start()
    yield fake
    fake.hold.set()
    running.stop(None).wait()
    pool.shutdown()


class AsyncAdapter:
    """The sync client with async methods, which call it in threads. So the same tests run for both clients."""

    def __init__(self, client: camserve.Client) -> None:
        self.client = client

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.client, name)
        return lambda *args, **kwargs: asyncio.to_thread(method, *args, **kwargs)

    async def explain_many(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        results = self.client.explain_many(*args, **kwargs)
        try:
            while (result := await asyncio.to_thread(next, results, None)) is not None:
                yield result
        finally:
            await asyncio.to_thread(results.close)


@pytest.fixture
def run(server: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run a command against the test's server."""
    monkeypatch.setenv("CAMSERVE_SERVER", server.address)
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *args: CliRunner().invoke(cli.main, [str(each) for each in args])


TRANSPORT = {"access", "channel", "client", "connections", "explain_many", "hostile_server", "same_errors"}
"""Files of tests whose outcome may depend on how the client calls gRPC, so that they run for both clients.

Otherwise the synchronous client is the same code: it is generated, and `make sync-check` compares them.
"""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "connect" in metafunc.fixturenames:
        both = metafunc.definition.path.stem.removeprefix("test_") in TRANSPORT
        metafunc.parametrize("connect", ["sync", "async"] if both else ["async"], indirect=True)


@pytest.fixture
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[Callable[..., Any]]:
    """Return a function that makes clients. They are closed at the end of the test."""
    clients: list[Any] = []

    def make(address: str, **options: Any) -> Any:
        options.setdefault("retries", QUICK)
        kind = camserve.Client if request.param == "sync" else camserve.AsyncClient
        client = kind(address, **options)
        clients.append(AsyncAdapter(client) if request.param == "sync" else client)
        return clients[-1]

    yield make
    for client in clients:
        await client.close()


@pytest.fixture
def pauses(monkeypatch: Any) -> list[float]:
    """Record the pauses between tries, and advance the client's clock by each at once."""
    seconds_paused: list[float] = []

    async def pause(seconds: float) -> None:
        seconds_paused.append(seconds)

    monkeypatch.setattr("camserve._transport.sync.sleep", seconds_paused.append)
    monkeypatch.setattr("camserve._transport.aio.sleep", pause)
    monkeypatch.setattr(
        "camserve._transport.retry.time", SimpleNamespace(monotonic=lambda: time.monotonic() + sum(seconds_paused))
    )
    return seconds_paused


@pytest.fixture
def client(connect: Callable[..., Any], server: FakeServer) -> Any:
    return connect(server.address)


@pytest.fixture
def refusal() -> type[Refusal]:
    return Refusal


@pytest.fixture
def replies() -> Any:
    """Functions that build the replies of a scripted stream."""
    return SimpleNamespace(reply=reply, error=error_reply, in_order=in_order)
