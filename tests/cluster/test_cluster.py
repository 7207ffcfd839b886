"""The parts of the Ray integration, without Ray: ingress, engine, proxy, and the actors of a job."""

import asyncio
import os
import socket
import sys
import types
from collections import Counter
from contextlib import ExitStack, asynccontextmanager
from threading import Event
from unittest.mock import Mock

import grpc
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2

from camserve import dataset
from camserve.v1 import evaluate_pb2, explain_pb2, models_pb2
from camserve_server.cli.commands import program
from camserve_server.cluster import application, commands, job, proxy
from camserve_server.cluster.calls import RowsInFlight
from camserve_server.cluster.engine import Engine
from camserve_server.cluster.ingress import HEALTH_CHECK_INTERVAL, UNARY, Ingress
from camserve_server.core import config, device_names
from camserve_server.core.errors import ConfigError
from support import PHOTOS, StoppedClock

MODEL = "small=timm:test_resnet?weights=none&size=64"
SETTINGS = {"models": (MODEL,), "isolation": "thread", "device": "cpu", "threads": 1, "log_level": "warning"}


METHOD = explain_pb2.Method(name="smoothgrad", parameters={"samples": explain_pb2.Parameter(number=12)})


class Lost(Exception):
    """Fake of Ray's error for an actor that dies."""


class Handle:
    """Fake of Ray's handle of a deployment, in one process; the first `losses` calls lose their engine."""

    def __init__(self, engine, losses=0):
        self.engine, self.losses = engine, losses

    def options(self, stream):
        assert stream
        return self

    def __getattr__(self, name):
        def remote(*args):
            if self.losses:
                self.losses -= 1
                return self.lose()
            return getattr(self.engine, name)(*args)

        return types.SimpleNamespace(remote=remote)

    async def lose(self):
        raise Lost


class Context:
    """Fake of Ray's context."""

    def __init__(self, request_id="mine"):
        self.request_id, self.code, self.details, self.trailers = request_id, None, "", ()

    def invocation_metadata(self):
        return [("x-request-id", self.request_id)]

    def peer(self):
        return "ipv4:10.0.0.1:4567"

    def set_code(self, code):
        self.code = code

    def set_details(self, words):
        self.details = words

    def set_trailing_metadata(self, trailers):
        self.trailers = dict(trailers)


@asynccontextmanager
async def opened(losses=0, **options):
    engine = Engine.__new__(Engine)
    await engine.__init__(SETTINGS)
    try:
        yield Ingress(Handle(engine, losses), {Lost: "UNAVAILABLE"}, **options), engine
    finally:
        await engine.close()


def request(**options):
    return explain_pb2.ExplainRequest(image=PHOTOS["chelsea"].read_bytes(), **options)


async def items(*requests):
    for place, each in enumerate(requests):
        yield explain_pb2.ExplainStreamRequest(request_id=str(place), request=each)


def test_each_rpc_has_a_name_of_its_own():
    """Ray dispatches by the name alone, whatever the service."""
    assert len({*UNARY, "ExplainStream"}) == len(UNARY) + 1
    assert callable(Ingress.EstimateCost)


async def test_unary_calls_are_passed_to_an_engine():
    async with opened() as (ingress, _):
        context = Context()
        reply = await ingress.Explain(request(), grpc_context=context)
        listed = await ingress.ListModels(models_pb2.ListModelsRequest(), Context())
        evaluated = await ingress.ListMetrics(evaluate_pb2.ListMetricsRequest(), Context())

    assert (reply.model, reply.request_id, len(reply.explanations)) == ("small", "mine", 1)
    assert context.trailers["x-request-id"] == "mine"
    assert context.trailers["x-camserve-engine"]
    assert [model.name for model in listed.models] == ["small"]
    assert evaluated.metrics


async def test_error_keeps_its_status_message_and_details():
    async with opened(max_bytes=10**6) as (ingress, _):
        bad, large = Context(), Context()
        await ingress.Explain(request(layers=["nothing"]), bad)
        await ingress.Explain(explain_pb2.ExplainRequest(image=bytes(10**6)), large)

    assert bad.code is grpc.StatusCode.NOT_FOUND
    assert 'unknown layer "nothing"' in bad.details
    assert bad.trailers["grpc-status-details-bin"]
    assert large.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max_message_mib" in large.details


async def test_only_a_call_that_lost_its_engine_can_be_retried():
    async with opened(losses=1) as (ingress, engine):
        lost, after, broken = Context(), Context(), Context()
        await ingress.Explain(request(), lost)
        reply = await ingress.Explain(request(), after)
        engine.answer = None
        await ingress.Explain(request(), broken)

    assert (lost.code, lost.details) == (grpc.StatusCode.UNAVAILABLE, "the engine that ran this was lost")
    assert int(lost.trailers["grpc-retry-pushback-ms"]) > 0
    assert (after.code, reply.model) == (None, "small")
    assert broken.code is grpc.StatusCode.INTERNAL
    assert broken.details == "internal error; the log has more under request id mine"


async def test_stream_request_that_loses_its_engine_fails_alone():
    asked = (request(), request(layers=["nothing"]), request(progress=True, methods=[METHOD]), request())
    async with opened(losses=1) as (ingress, _):
        replies = [reply async for reply in ingress.ExplainStream(items(*asked), Context())]

    ends = {reply.request_id: reply for reply in replies if reply.WhichOneof("outcome") != "progress"}
    codes = {name: grpc.StatusCode(_code(reply.error.code)) for name, reply in ends.items() if reply.HasField("error")}
    assert codes == {"0": grpc.StatusCode.UNAVAILABLE, "1": grpc.StatusCode.NOT_FOUND}
    assert ends["0"].error.retry_after_ms > 0
    assert {name for name, reply in ends.items() if reply.response.model == "small"} == {"2", "3"}
    assert {reply.request_id for reply in replies if reply.HasField("progress")} == {"2"}


def _code(number):
    return next(code.value for code in grpc.StatusCode if code.value[0] == number)


async def test_stream_limits_its_requests_in_flight():
    under_way = most = 0

    class Slow:
        async def explain_item(self, item, _caller):
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            for _ in range(5):
                await asyncio.sleep(0)
            under_way -= 1
            return explain_pb2.ExplainStreamResponse(request_id=item.request_id)

    ingress = Ingress(Handle(Slow()), {}, in_flight=3)
    replies = [
        r async for r in ingress.ExplainStream(items(*(explain_pb2.ExplainRequest() for _ in range(20))), Context())
    ]

    assert (len(replies), most) == (20, 3)


async def test_stream_stops_reading_a_client_that_takes_no_responses():
    class FastEngine:
        async def explain_item(self, item, _caller):
            return explain_pb2.ExplainStreamResponse(request_id=item.request_id)

    sent = 0

    async def endless():
        nonlocal sent
        while sent < 100:
            sent += 1
            yield explain_pb2.ExplainStreamRequest(request_id=str(sent))

    answers = Ingress(Handle(FastEngine()), {}, in_flight=3).ExplainStream(endless(), Context())
    await anext(answers)
    for _ in range(50):
        await asyncio.sleep(0)
    read = sent
    rest = [reply async for reply in answers]

    assert read <= 4
    assert (len(rest), sent) == (99, 100)


async def test_health_is_that_of_the_engines_and_watch_reports_changes():
    kinds = health_pb2.HealthCheckResponse

    class One:
        well = True

        async def ready(self):
            return self.well

    engine = One()
    ingress, asked = Ingress(Handle(engine), {}), health_pb2.HealthCheckRequest()
    watch = ingress.Watch(asked, Context())
    heard = [(await anext(watch)).status]
    engine.well = False
    with StoppedClock() as clock:
        change = asyncio.ensure_future(anext(watch))
        while not change.done():
            clock.advance(HEALTH_CHECK_INTERVAL)
            await asyncio.sleep(0)
    heard.append(change.result().status)
    await watch.aclose()
    gone = await Ingress(Handle(engine, losses=1), {}).Check(asked, Context())

    assert heard == [kinds.SERVING, kinds.NOT_SERVING]
    assert gone.status == kinds.NOT_SERVING


async def test_engine_reports_its_rows_in_flight_and_its_health_to_ray():
    async with opened() as (_, engine):
        assert engine.record_autoscaling_stats() == {"rows": 0.0}
        async with engine._state.pipeline.batcher.admit(5):
            assert engine.record_autoscaling_stats() == {"rows": 5.0}
        engine.check_health()
        engine._set_healthy(healthy=False)
        assert not await engine.ready()
        with pytest.raises(RuntimeError, match="unhealthy"):
            engine.check_health()


@pytest.mark.parametrize(("rows", "engines"), [([], 3), ([0, 0], 0), ([60, 5], 2), ([64, 64], 2), ([300, 1], 5)])
def test_number_of_engines_follows_the_rows_in_flight(rows, engines):
    metrics = {"rows": dict(enumerate(rows))} if rows else None
    context = types.SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=3)

    assert RowsInFlight(64)(context) == (engines, {})


@pytest.mark.parametrize(("count", "bounds"), [("2", (2, 2)), ("1-4", (1, 4))])
def test_engines_are_a_number_or_a_range(count, bounds):
    engines = commands.engines_of(count, 64, 1, 0)
    assert (engines.least, engines.most) == bounds


@pytest.mark.parametrize("count", ["", "0", "4-1", "some", "1-", "-2"])
def test_invalid_number_of_engines_is_refused(count):
    with pytest.raises(ConfigError, match="write a number such as 2"):
        commands.engines_of(count, 64, 1, 0)


@pytest.mark.parametrize(
    ("name", "value"), [("tokens_file", "x"), ("tls_cert", "x"), ("admin", True), ("metrics_address", "127.0.0.1:1")]
)
def test_settings_that_rays_proxy_does_not_support_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"{name} is not supported with Ray"):
        application.check(config.Settings(insecure=True, **{name: value}))
    with pytest.raises(ConfigError, match="listens on every interface"):
        application.check(config.Settings())


def test_engine_has_the_settings_of_the_server_except_address_and_cores():
    settings = config.Settings(models=(MODEL,), insecure=True, max_batch_rows=4)
    result = application._settings_of(settings, application.Engines(cpus=3))

    assert config.load(flags=result, environment={}).model_dump() == settings.model_dump() | {
        "insecure": False,
        "isolation": "thread",
        "device": "cpu",
        "threads": 3,
    }


@pytest.mark.parametrize(
    ("device", "gpus", "expected"),
    [("auto", 0, "cpu"), ("cpu", 0, "cpu"), ("auto", 1, "cuda"), ("auto", 0.5, "cuda"), ("cuda", 2, "cuda")],
)
def test_engine_runs_on_the_gpus_that_ray_reserves_else_on_the_cpu(device, gpus, expected):
    settings, engines = config.Settings(insecure=True, device=device), application.Engines(gpus=gpus)

    assert application._settings_of(settings, engines)["device"] == expected
    assert application._options(settings, engines)["ray_actor_options"]["num_gpus"] == gpus


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "cpu,cuda"])
def test_gpu_that_ray_does_not_reserve_is_refused(device):
    """Ray would let the engine see every GPU of its machine."""
    with pytest.raises(ConfigError, match=f"device = {device}: Ray reserves no GPU"):
        application._settings_of(config.Settings(insecure=True, device=device), application.Engines())


def test_engine_starts_a_worker_for_each_visible_gpu_and_fails_without_one(gpus):
    for visible, expected in ((1, ["cuda:0"]), (2, ["cuda:0", "cuda:1"])):
        gpus(*[(9, 0)] * visible)
        assert device_names.parse_devices(application.device_of("auto", visible)) == expected
    gpus()
    with pytest.raises(ConfigError, match="torch sees 0 CUDA devices here"):
        device_names.parse_devices(application.device_of("auto", 1))


@pytest.mark.parametrize(
    ("device", "gpus_option", "gpus_in_cluster", "gpus"),
    [("auto", -1, 4, 1), ("auto", -1, 0, 0), ("cuda", -1, 4, 1), ("cpu", -1, 4, 0), ("auto", 0.5, 4, 0.5)],
)
def test_each_engine_gets_a_gpu_if_the_cluster_has_any(device, gpus_option, gpus_in_cluster, gpus, monkeypatch):
    cluster = Mock(cluster_resources=lambda: {"CPU": 8, "GPU": gpus_in_cluster} if gpus_in_cluster else {"CPU": 8})
    monkeypatch.setattr(commands, "ray", lambda _module="": cluster)
    with commands.cluster(None, commands.engines_of("2", 64, 1, gpus_option), device) as engines:
        assert engines == application.Engines(2, 2, 64, 1, gpus)


def test_job_describes_its_model_on_the_cpu_and_gives_its_actors_the_gpu(photos, monkeypatch):
    monkeypatch.setattr(job, "GRACE_PERIOD", 0.0)
    ran = []
    monkeypatch.setattr(job, "run", lambda each, *_: ran.append(each.settings["device"]))
    for engines in (application.Engines(gpus=1), application.Engines()):
        job.explain(new_job(photos, device="auto"), engines)
    assert ran == ["cuda", "cpu"]
    with pytest.raises(ConfigError, match="Ray reserves no GPU"):
        job.explain(new_job(photos, device="cuda"), application.Engines())


def test_error_of_an_engine_that_cannot_start_is_extracted():
    message = "ray::engine.__init__()\n  File x, line 1\ncamserve_server.core.errors.ConfigError: no model x\nThe error"

    assert commands.reason(["", message]) == "no model x"
    assert "see Ray's log" in commands.reason([])


def test_error_without_ray_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    served = CliRunner().invoke(program, ["ray", "serve", "--insecure"])
    explained = CliRunner().invoke(program, ["ray", "explain", str(tmp_path), "-o", str(tmp_path / "out")])

    for each in (served, explained):
        assert each.exit_code == 2
        assert 'pip install "camserve[server,ray]"' in " ".join(each.output.split())


def new_job(folder, device="cpu", **wishes):
    settings = commands.settings_for_job((MODEL,), device, 1)
    given = {"methods": ("gradcam",), "overlay": "jpeg", "heatmap": False, "receipts": False, **wishes}
    return job.Job.new(settings, [str(folder / "photos")], "", str(folder / "out"), given)


@pytest.fixture
def photos(tmp_path):
    (tmp_path / "photos").mkdir()
    for name in ("chelsea", "coffee"):
        (tmp_path / "photos" / f"{name}.png").write_bytes(PHOTOS[name].read_bytes())
    (tmp_path / "photos" / "bad.png").touch()
    return tmp_path


@pytest.fixture
def make_actor():
    """Return a function that makes actors. Their servers end with the test."""
    with ExitStack() as opened:

        def make(new):
            actor = job.Explainer(new)
            opened.callback(actor._open.close)
            return actor

        yield make


def test_actor_that_repeats_a_batch_overwrites_the_same_part(photos, monkeypatch, make_actor):
    monkeypatch.setattr(job, "GRACE_PERIOD", 0.0)
    new = new_job(photos)
    left, tally = job.start_run(new)
    actor = make_actor(new)
    results = [actor({"image": list(map(job._bytes, left))}) for _ in range(2)]

    assert (len(left), tally.before) == (3, 0)
    assert all((int(each["explained"][0]), int(each["failed"][0])) == (2, 1) for each in results)
    rows = pq.read_table(photos / "out" / "results").to_pylist()
    assert Counter(row["image"] for row in rows) == dict.fromkeys(left, 1)

    later = new_job(photos)
    assert job.start_run(later) == ([], dataset.Tally(before=3, failed_before=1))
    assert "another run of this job was started" in actor({"image": list(map(job._bytes, left))})["error"][0]


def test_actor_skips_a_photo_whose_server_fails_and_repeats_the_same_part(photos, monkeypatch, make_actor):
    monkeypatch.setattr(job, "GRACE_PERIOD", 0.0)
    new = new_job(photos)
    left, _ = job.start_run(new)
    actor = make_actor(new)
    with monkeypatch.context() as patch:
        patch.setattr(dataset.job, "is_photo_error", lambda _error: False)
        patch.setattr(dataset.job, "is_request_error", lambda _error: False)
        first = actor({"image": list(map(job._bytes, left))})
    second = actor({"image": list(map(job._bytes, left))})

    assert [int(first[name][0]) for name in ("explained", "failed", "left")] == [2, 0, 1]
    assert first["why"][0]
    assert [int(second[name][0]) for name in ("explained", "failed", "left")] == [2, 1, 0]
    rows = pq.read_table(photos / "out" / "results").to_pylist()
    assert Counter(row["image"] for row in rows) == dict.fromkeys(left, 1)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a file's name is text there")
def test_actor_gets_a_name_that_is_not_valid_text_as_bytes(photos, make_actor):
    name = bytes(photos / "photos") + b"/\xff.png"
    (photos / "photos" / "coffee.png").rename(os.fsdecode(name))
    new = new_job(photos)
    left, _ = job.start_run(new)
    result = make_actor(new)({"image": pa.array(map(job._bytes, left), pa.binary()).to_pylist()})

    assert name in map(job._bytes, left)
    assert [int(result[each][0]) for each in ("explained", "failed", "left")] == [2, 1, 0]


def test_error_that_concerns_every_photo_ends_the_job(photos, make_actor):
    new = new_job(photos, methods=("gradcm",))
    result = make_actor(new)({"image": [bytes(photos / "photos" / "chelsea.png")]})

    assert 'unknown method "gradcm"' in result["error"][0]
    assert not (photos / "out" / "results").exists()


@pytest.mark.usefixtures("forked")
def test_cluster_resumes_the_job_of_a_single_machine(photos, monkeypatch):
    monkeypatch.setattr(job, "GRACE_PERIOD", 0.0)
    out, model = photos / "out", ["--model", MODEL, "--device", "cpu"]
    arguments = ["explain", str(photos / "photos"), "-o", str(out), "--resume", *model]
    done = CliRunner().invoke(program, arguments)
    assert done.exit_code == 0, done.output
    wishes = {"layers": (), "targets": (), "fusion": None, "top_k": 1, "colormap": "jet", "alpha": 0.5}
    again = new_job(photos, **wishes, intensity=False, profile="paper", max_side=None)

    assert job.start_run(again) == ([], dataset.Tally(before=3, failed_before=1))


class Server:
    """Fake of Ray's gRPC server, which has its own handler for each method."""

    def __init__(self, made):
        self.service_handler_factory, self.handlers = made, {}

    def add_generic_rpc_handlers(self, handlers):
        pass

    def add_registered_method_handlers(self, service, methods):
        for name in methods:
            self.handlers[service, name] = self.service_handler_factory(service_method=name)


class ProxyContext:
    """Fake of the gRPC context in Ray's proxy."""

    def __init__(self, code, words):
        self.status, self.trailers = (code, words), ()

    def code(self):
        return self.status[0]

    def details(self):
        return self.status[1]

    def trailing_metadata(self):
        return self.trailers

    def set_code(self, code):
        self.status = (code, self.status[1])

    def set_details(self, words):
        self.status = (self.status[0], words)

    def set_trailing_metadata(self, trailers):
        self.trailers = trailers


@pytest.mark.parametrize(
    ("code", "words", "ends"),
    [
        (grpc.StatusCode.INTERNAL, "The actor died unexpectedly before finishing this task.", "UNAVAILABLE"),
        (grpc.StatusCode.INTERNAL, "internal error; the log has more", "INTERNAL"),
        (grpc.StatusCode.NOT_FOUND, "The actor of that name", "NOT_FOUND"),
    ],
)
async def test_proxy_makes_calls_that_lost_their_ingress_retryable(code, words, ends):
    async def unary(request, _context):
        return request

    async def several(request, _context):
        yield request

    for handler in (unary, several):
        server = Server(lambda handler=handler, **_: handler)
        proxy.add_services_to_server(Mock(), server)
        served = server.handlers["camserve.v1.ExplainService", "Explain"]
        context = ProxyContext(code, words)
        answer = served("asked", context)
        replies = [await answer] if handler is unary else [each async for each in answer]

        assert replies == ["asked"]
        assert context.code().name == ends
        assert (dict(context.trailers).get("grpc-retry-pushback-ms") is not None) == (ends == "UNAVAILABLE")
        assert server.service_handler_factory(service_method="other") is handler


def test_proxy_gets_all_services_and_their_methods():
    async def unary(request, _context):
        return request

    server = Server(lambda **_: unary)
    (path,) = application.SERVICERS
    assert path == f"{proxy.__name__}.{proxy.add_services_to_server.__name__}"
    proxy.add_services_to_server(Mock(), server)

    assert {name for _, name in server.handlers} == {*UNARY, "ExplainStream", "Check", "Watch", "List"}


@pytest.mark.parametrize("address", ["unix:/tmp/one", "0.0.0.0:0", "localhost"])
def test_rays_proxy_needs_a_port(address):
    assert commands._port("0.0.0.0:50051") == 50051
    with pytest.raises(ConfigError, match="needs a port"):
        commands._port(address)


def test_unreachable_cluster_is_reported_at_once():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"no cluster at {address}"):
            commands._check_reachable(address)


def test_invalid_model_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="needs a source"):
        application.check(config.Settings(insecure=True, models=("resnet50",)))


class Serve:
    """Fake of Ray Serve that reports one state of an application after another."""

    def __init__(self, *states):
        self.states = list(states)

    def status(self):
        state, *messages = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        engines = {place: types.SimpleNamespace(message=words) for place, words in enumerate(messages)}
        application = types.SimpleNamespace(status=state, message="", deployments=engines)
        return types.SimpleNamespace(applications={commands.NAME: application})


def test_waiting_for_the_application_reports_errors_and_can_be_stopped(monkeypatch, caplog):
    monkeypatch.setattr(commands, "WARN_AFTER", 0.0)
    starting, stop = ("DEPLOYING", "", "no node has 8 CPUs"), Event()
    commands._wait_until_running(Serve(starting, starting, ("RUNNING",)), stop)
    assert [record.getMessage() for record in caplog.records] == ["waiting for the cluster: no node has 8 CPUs"]

    with pytest.raises(ConfigError, match=r"^no model x$"):
        commands._wait_until_running(Serve(("DEPLOYING", "Retrying 5 times.\nerrors.ConfigError: no model x")), stop)
    with pytest.raises(ConfigError, match="see Ray's log"):
        commands._wait_until_running(Serve(("DEPLOY_FAILED", "")), stop)
    stop.set()
    commands._wait_until_running(Serve(starting), stop)


class Controller:
    """Fake of Ray in which Ray Serve's controller ends after a number of look-ups."""

    def __init__(self, looks):
        self.looks, self.asked = looks, []
        self.graceful_shutdown = types.SimpleNamespace(remote=lambda **options: self.asked.append(options))

    def get(self, _reference):
        return None

    def get_actor(self, name, namespace):
        self.looks -= 1
        if self.looks < 0:
            raise ValueError(f"no actor {namespace}/{name}")
        return self


@pytest.mark.parametrize("looks", [1, 3])
def test_stop_waits_for_ray_serve_without_a_pending_call(looks, caplog):
    """A pending call would fail when the controller is killed, and Ray would report it."""
    controller = Controller(looks)
    commands.stop_ray_serve(controller, timeout=60)

    assert controller.asked == [{"wait": False}]
    assert controller.looks < 0
    assert not caplog.records


def test_stop_without_ray_serve_returns_at_once():
    controller = Controller(0)
    commands.stop_ray_serve(controller, timeout=60)

    assert controller.asked == []


def test_controller_that_does_not_stop_is_logged(caplog):
    commands.stop_ray_serve(Controller(10), timeout=0)

    assert [record.message for record in caplog.records] == ["Ray Serve did not stop within 0 s"]


@pytest.mark.parametrize(
    ("photos", "engines", "size"), [(100, 8, 13), (100, 1, 64), (10_000, 8, 64), (3, 8, 1), (64, 1, 64)]
)
def test_few_photos_are_divided_among_all_actors(photos, engines, size):
    assert job.batch_size(photos, engines) == size
