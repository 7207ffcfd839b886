"""What runs on a Ray cluster, without Ray: doors and engines that call one another, and the job's actors."""

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
from camserve_server.cluster.ingress import UNARY, Ingress
from camserve_server.core import config, devices
from camserve_server.core.errors import ConfigError
from support import PHOTOS

MODEL = "small=torchvision:mobilenet_v3_small?weights=none&size=64"
SETTINGS = {"models": (MODEL,), "isolation": "thread", "device": "cpu", "threads": 1, "log_level": "warning"}


METHOD = explain_pb2.Method(name="smoothgrad", parameters={"samples": explain_pb2.Parameter(number=12)})


class Lost(Exception):
    """What Ray raises for an actor that dies."""


class Handle:
    """What Ray's handle of a deployment does, in one process; the first `losses` calls lose their engine."""

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
    """What Ray gives for gRPC's context."""

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


async def test_every_call_of_one_message_is_passed_to_an_engine_and_answered_by_the_servers_own_servicers():
    services = (explain_pb2, evaluate_pb2, models_pb2)
    methods = [m for one in services for s in one.DESCRIPTOR.services_by_name.values() for m in s.methods]
    assert set(UNARY) == {method.name for method in methods if not method.client_streaming}
    async with opened() as (door, _):
        context = Context()
        reply = await door.Explain(request(), grpc_context=context)
        listed = await door.ListModels(models_pb2.ListModelsRequest(), Context())
        evaluated = await door.ListMetrics(evaluate_pb2.ListMetricsRequest(), Context())

    assert (reply.model, reply.request_id, len(reply.explanations)) == ("small", "mine", 1)
    assert context.trailers["x-request-id"] == "mine"
    assert context.trailers["x-camserve-engine"]
    assert [model.name for model in listed.models] == ["small"]
    assert evaluated.metrics


async def test_an_error_keeps_its_status_its_words_and_its_details():
    async with opened(longest=10**6) as (door, _):
        bad, large = Context(), Context()
        await door.Explain(request(layers=["nothing"]), bad)
        await door.Explain(explain_pb2.ExplainRequest(image=bytes(10**6)), large)

    assert bad.code is grpc.StatusCode.NOT_FOUND
    assert 'unknown layer "nothing"' in bad.details
    assert bad.trailers["grpc-status-details-bin"]
    assert large.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max_message_mib" in large.details


async def test_a_call_whose_engine_is_lost_is_to_be_sent_again_soon_and_one_that_fails_otherwise_is_not():
    async with opened(losses=1) as (door, engine):
        lost, after, broken = Context(), Context(), Context()
        await door.Explain(request(), lost)
        reply = await door.Explain(request(), after)
        engine.answer = None
        await door.Explain(request(), broken)

    assert (lost.code, lost.details) == (grpc.StatusCode.UNAVAILABLE, "the engine that ran this was lost")
    assert int(lost.trailers["grpc-retry-pushback-ms"]) > 0
    assert (after.code, reply.model) == (None, "small")
    assert broken.code is grpc.StatusCode.INTERNAL
    assert broken.details == "internal error; the log has more under request id mine"


async def test_of_a_stream_each_request_is_answered_by_itself_and_one_that_loses_its_engine_alone_is_unavailable():
    asked = (request(), request(layers=["nothing"]), request(progress=True, methods=[METHOD]), request())
    async with opened(losses=1) as (door, _):
        replies = [reply async for reply in door.ExplainStream(items(*asked), Context())]

    ends = {reply.request_id: reply for reply in replies if reply.WhichOneof("outcome") != "progress"}
    codes = {name: grpc.StatusCode(_code(reply.error.code)) for name, reply in ends.items() if reply.HasField("error")}
    assert codes == {"0": grpc.StatusCode.UNAVAILABLE, "1": grpc.StatusCode.NOT_FOUND}
    assert ends["0"].error.retry_after_ms > 0
    assert {name for name, reply in ends.items() if reply.response.model == "small"} == {"2", "3"}
    assert {reply.request_id for reply in replies if reply.HasField("progress")} == {"2"}


def _code(number):
    return next(code.value for code in grpc.StatusCode if code.value[0] == number)


async def test_of_a_stream_so_many_requests_are_under_way_and_no_more():
    under_way = most = 0

    class Slow:
        async def one(self, item, _caller):
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(0.001)
            under_way -= 1
            return explain_pb2.ExplainStreamResponse(request_id=item.request_id)

    door = Ingress(Handle(Slow()), {}, in_flight=3)
    replies = [
        r async for r in door.ExplainStream(items(*(explain_pb2.ExplainRequest() for _ in range(20))), Context())
    ]

    assert (len(replies), most) == (20, 3)


async def test_a_caller_that_takes_no_answers_is_not_read_on_and_on():
    class Quick:
        async def one(self, item, _caller):
            return explain_pb2.ExplainStreamResponse(request_id=item.request_id)

    sent = 0

    async def endless():
        nonlocal sent
        while sent < 100:
            sent += 1
            yield explain_pb2.ExplainStreamRequest(request_id=str(sent))

    answers = Ingress(Handle(Quick()), {}, in_flight=3).ExplainStream(endless(), Context())
    await anext(answers)
    for _ in range(50):
        await asyncio.sleep(0)
    read = sent
    rest = [reply async for reply in answers]

    assert read <= 4
    assert (len(rest), sent) == (99, 100)


async def test_health_is_that_of_the_engines_and_a_watch_hears_of_a_change(monkeypatch):
    monkeypatch.setattr("camserve_server.cluster.ingress.LOOK", 0.02)
    kinds = health_pb2.HealthCheckResponse

    class One:
        well = True

        async def ready(self):
            return self.well

    engine = One()
    door, asked = Ingress(Handle(engine), {}), health_pb2.HealthCheckRequest()
    watch = door.Watch(asked, Context())
    heard = [(await anext(watch)).status]
    engine.well = False
    heard.append((await anext(watch)).status)
    await watch.aclose()
    gone = await Ingress(Handle(engine, losses=1), {}).Check(asked, Context())

    assert heard == [kinds.SERVING, kinds.NOT_SERVING]
    assert gone.status == kinds.NOT_SERVING


async def test_an_engine_tells_ray_its_rows_in_flight_and_that_it_is_to_be_replaced():
    async with opened() as (_, engine):
        assert engine.record_autoscaling_stats() == {"rows": 0.0}
        async with engine._house.pipeline.batcher.admit(5):
            assert engine.record_autoscaling_stats() == {"rows": 5.0}
        engine.check_health()
        engine._told(well=False)
        assert not await engine.ready()
        with pytest.raises(RuntimeError, match="no explanations"):
            engine.check_health()


@pytest.mark.parametrize(("rows", "engines"), [([], 3), ([0, 0], 0), ([60, 5], 2), ([64, 64], 2), ([300, 1], 5)])
def test_there_is_an_engine_for_so_many_rows_in_flight(rows, engines):
    metrics = {"rows": dict(enumerate(rows))} if rows else None
    context = types.SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=3)

    assert RowsInFlight(64)(context) == (engines, {})


@pytest.mark.parametrize(("count", "bounds"), [("2", (2, 2)), ("1-4", (1, 4))])
def test_engines_are_a_number_or_two(count, bounds):
    engines = commands.engines_of(count, 64, 1, 0)
    assert (engines.least, engines.most) == bounds


@pytest.mark.parametrize("count", ["", "0", "4-1", "some", "1-", "-2"])
def test_what_is_no_number_of_engines_is_refused(count):
    with pytest.raises(ConfigError, match="write a number such as 2"):
        commands.engines_of(count, 64, 1, 0)


@pytest.mark.parametrize(
    ("name", "value"), [("tokens_file", "x"), ("tls_cert", "x"), ("admin", True), ("metrics_address", "127.0.0.1:1")]
)
def test_settings_that_would_not_hold_behind_rays_proxy_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"{name} has no meaning behind Ray"):
        application.check(config.Settings(insecure=True, **{name: value}))
    with pytest.raises(ConfigError, match="listens on every interface"):
        application.check(config.Settings())


def test_an_engine_has_the_settings_of_the_server_but_for_its_port_and_its_cores():
    settings = config.Settings(models=(MODEL,), insecure=True, max_batch_rows=4)
    found = application._settings_of(settings, application.Engines(cpus=3))

    assert config.load(flags=found, environment={}).model_dump() == settings.model_dump() | {
        "insecure": False,
        "isolation": "thread",
        "device": "cpu",
        "threads": 3,
    }


@pytest.mark.parametrize(
    ("device", "gpus", "found"),
    [("auto", 0, "cpu"), ("cpu", 0, "cpu"), ("auto", 1, "cuda"), ("auto", 0.5, "cuda"), ("cuda", 2, "cuda")],
)
def test_an_engine_computes_on_the_gpus_that_ray_reserves_for_it_and_on_the_cpu_without_one(device, gpus, found):
    settings, engines = config.Settings(insecure=True, device=device), application.Engines(gpus=gpus)

    assert application._settings_of(settings, engines)["device"] == found
    assert application._options(settings, engines)["ray_actor_options"]["num_gpus"] == gpus


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "cpu,cuda"])
def test_a_gpu_that_ray_does_not_reserve_is_refused(device):
    """Ray would let the engine see every GPU of its machine."""
    with pytest.raises(ConfigError, match=f"device = {device}: Ray reserves no GPU"):
        application._settings_of(config.Settings(insecure=True, device=device), application.Engines())


def test_an_engine_starts_a_worker_for_each_gpu_that_it_sees_and_does_not_start_without_one(gpus):
    for seen, found in ((1, ["cuda:0"]), (2, ["cuda:0", "cuda:1"])):
        gpus(*[(9, 0)] * seen)
        assert devices.devices_named(application.device_of("auto", seen)) == found
    gpus()
    with pytest.raises(ConfigError, match="torch sees 0 CUDA devices here"):
        devices.devices_named(application.device_of("auto", 1))


@pytest.mark.parametrize(
    ("device", "said", "there", "gpus"),
    [("auto", -1, 4, 1), ("auto", -1, 0, 0), ("cuda", -1, 4, 1), ("cpu", -1, 4, 0), ("auto", 0.5, 4, 0.5)],
)
def test_engines_have_a_gpu_each_where_the_cluster_has_any_and_they_are_not_for_a_cpu(
    device, said, there, gpus, monkeypatch
):
    cluster = Mock(cluster_resources=lambda: {"CPU": 8, "GPU": there} if there else {"CPU": 8})
    monkeypatch.setattr(commands, "ray", lambda _module="": cluster)
    with commands.cluster(None, commands.engines_of("2", 64, 1, said), device) as engines:
        assert engines == application.Engines(2, 2, 64, 1, gpus)


def test_a_job_describes_its_model_on_the_cpu_and_gives_its_actors_the_gpu(photos, monkeypatch):
    monkeypatch.setattr(job, "GRACE", 0.0)
    ran = []
    monkeypatch.setattr(job, "run", lambda one, *_: ran.append(one.settings["device"]))
    for engines in (application.Engines(gpus=1), application.Engines()):
        job.explain(new_job(photos, device="auto"), engines)
    assert ran == ["cuda", "cpu"]
    with pytest.raises(ConfigError, match="Ray reserves no GPU"):
        job.explain(new_job(photos, device="cuda"), application.Engines())


def test_of_an_engine_that_cannot_begin_its_own_words_are_told():
    said = "ray::engine.__init__()\n  File x, line 1\ncamserve_server.core.errors.ConfigError: no model x\nThe error"

    assert commands.reason(["", said]) == "no model x"
    assert "Ray's log says why" in commands.reason([])


def test_without_ray_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    served = CliRunner().invoke(program, ["ray", "serve", "--insecure"])
    explained = CliRunner().invoke(program, ["ray", "explain", str(tmp_path), "-o", str(tmp_path / "out")])

    for found in (served, explained):
        assert found.exit_code == 2
        assert 'pip install "camserve[server,ray]"' in " ".join(found.output.split())


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
def acting():
    """Make actors, whose servers end with the test."""
    with ExitStack() as opened:

        def made(one):
            actor = job.Explainer(one)
            opened.callback(actor._open.close)
            return actor

        yield made


def test_an_actor_that_does_a_batch_again_writes_the_same_part_again(photos, monkeypatch, acting):
    monkeypatch.setattr(job, "GRACE", 0.0)
    one = new_job(photos)
    left, tally = job.begun(one)
    actor = acting(one)
    said = [actor({"image": list(map(job._bytes, left))}) for _ in range(2)]

    assert (len(left), tally.before) == (3, 0)
    assert all((int(each["explained"][0]), int(each["failed"][0])) == (2, 1) for each in said)
    rows = pq.read_table(photos / "out" / "results").to_pylist()
    assert Counter(row["image"] for row in rows) == dict.fromkeys(left, 1)

    later = new_job(photos)
    assert job.begun(later) == ([], dataset.Tally(before=3))
    assert "another run of this job was begun" in actor({"image": list(map(job._bytes, left))})["wrong"][0]


def test_an_actor_leaves_a_photo_at_which_its_server_fails_and_does_the_same_part_again(photos, monkeypatch, acting):
    monkeypatch.setattr(job, "GRACE", 0.0)
    one = new_job(photos)
    left, _ = job.begun(one)
    actor = acting(one)
    with monkeypatch.context() as patch:
        patch.setattr(dataset.job, "_is_photo_error", lambda _error: False)
        patch.setattr(dataset.job, "_is_request_error", lambda _error: False)
        first = actor({"image": list(map(job._bytes, left))})
    second = actor({"image": list(map(job._bytes, left))})

    assert [int(first[name][0]) for name in ("explained", "failed", "left")] == [2, 0, 1]
    assert first["why"][0]
    assert [int(second[name][0]) for name in ("explained", "failed", "left")] == [2, 1, 0]
    rows = pq.read_table(photos / "out" / "results").to_pylist()
    assert Counter(row["image"] for row in rows) == dict.fromkeys(left, 1)


@pytest.mark.skipif(sys.platform != "linux", reason="a file's name is text there")
def test_an_actor_is_told_of_a_name_that_is_no_text_by_its_bytes(photos, acting):
    name = bytes(photos / "photos") + b"/\xff.png"
    (photos / "photos" / "coffee.png").rename(os.fsdecode(name))
    one = new_job(photos)
    left, _ = job.begun(one)
    said = acting(one)({"image": pa.array(map(job._bytes, left), pa.binary()).to_pylist()})

    assert name in map(job._bytes, left)
    assert [int(said[each][0]) for each in ("explained", "failed", "left")] == [2, 1, 0]


def test_what_would_be_wrong_with_every_photo_is_told_by_the_actor_and_marks_none(photos, acting):
    one = new_job(photos, methods=("gradcm",))
    said = acting(one)({"image": [bytes(photos / "photos" / "chelsea.png")]})

    assert 'unknown method "gradcm"' in said["wrong"][0]
    assert not (photos / "out" / "results").exists()


def test_a_job_on_a_cluster_and_one_on_a_machine_go_on_with_one_another(photos, monkeypatch):
    monkeypatch.setattr(job, "GRACE", 0.0)
    out, model = photos / "out", ["--model", MODEL, "--device", "cpu"]
    arguments = ["explain", str(photos / "photos"), "-o", str(out), "--resume", *model]
    done = CliRunner().invoke(program, arguments)
    assert done.exit_code == 0, done.output
    wishes = {"layers": (), "targets": (), "fusion": None, "top_k": 1, "colormap": "jet", "alpha": 0.5}
    again = new_job(photos, **wishes, intensity=False, profile="paper", max_side=None)

    assert job.begun(again) == ([], dataset.Tally(before=3))


class Server:
    """What Ray's gRPC server does with a service: it has a handler of its own for each method."""

    def __init__(self, made):
        self.service_handler_factory, self.handlers = made, {}

    def add_generic_rpc_handlers(self, handlers):
        pass

    def add_registered_method_handlers(self, service, methods):
        for name in methods:
            self.handlers[service, name] = self.service_handler_factory(service_method=name)


class Told:
    """What gRPC gives Ray's proxy for a context."""

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
async def test_in_rays_proxy_a_call_and_a_stream_whose_door_is_lost_are_to_be_sent_again_and_others_end_as_they_did(
    code, words, ends
):
    async def one(request, _context):
        return request

    async def several(request, _context):
        yield request

    for handler in (one, several):
        server = Server(lambda handler=handler, **_: handler)
        proxy.add_services_to_server(Mock(), server)
        served = server.handlers["camserve.v1.ExplainService", "Explain"]
        context = Told(code, words)
        answer = served("asked", context)
        replies = [await answer] if handler is one else [each async for each in answer]

        assert replies == ["asked"]
        assert context.code().name == ends
        assert (dict(context.trailers).get("grpc-retry-pushback-ms") is not None) == (ends == "UNAVAILABLE")
        assert server.service_handler_factory(service_method="other") is handler


def test_the_proxy_is_told_of_all_services_and_their_calls():
    async def one(request, _context):
        return request

    server = Server(lambda **_: one)
    (path,) = application.SERVICERS
    assert path == f"{proxy.__name__}.{proxy.add_services_to_server.__name__}"
    proxy.add_services_to_server(Mock(), server)

    assert {name for _, name in server.handlers} == {*UNARY, "ExplainStream", "Check", "Watch", "List"}


@pytest.mark.parametrize("address", ["unix:/tmp/one", "0.0.0.0:0", "localhost"])
def test_rays_proxy_wants_a_port(address):
    assert commands._port("0.0.0.0:50051") == 50051
    with pytest.raises(ConfigError, match="wants a port"):
        commands._port(address)


def test_a_cluster_at_which_nothing_listens_is_told_at_once():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"no cluster at {address}"):
            commands._reached(address)


def test_a_model_that_is_none_by_its_name_is_refused_before_anything_is_begun():
    with pytest.raises(ConfigError, match="needs a source"):
        application.check(config.Settings(insecure=True, models=("resnet50",)))


class Serve:
    """What Ray says of an application, one state after another."""

    def __init__(self, *states):
        self.states = list(states)

    def status(self):
        state, *messages = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        engines = {place: types.SimpleNamespace(message=words) for place, words in enumerate(messages)}
        one = types.SimpleNamespace(status=state, message="", deployments=engines)
        return types.SimpleNamespace(applications={commands.NAME: one})


def test_while_the_application_starts_its_state_is_heeded_and_so_is_a_stop(monkeypatch, caplog):
    monkeypatch.setattr(commands, "PATIENCE", 0.0)
    starting, stop = ("DEPLOYING", "", "no node has 8 CPUs"), Event()
    commands._until_running(Serve(starting, starting, ("RUNNING",)), stop)
    assert [record.getMessage() for record in caplog.records] == ["waiting for the cluster: no node has 8 CPUs"]

    with pytest.raises(ConfigError, match=r"^no model x$"):
        commands._until_running(Serve(("DEPLOYING", "Retrying 5 times.\nerrors.ConfigError: no model x")), stop)
    with pytest.raises(ConfigError, match="Ray's log says why"):
        commands._until_running(Serve(("DEPLOY_FAILED", "")), stop)
    stop.set()
    commands._until_running(Serve(starting), stop)


class Controller:
    """Ray with Ray Serve's controller, which has ended after a number of look-ups."""

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


def test_a_stop_without_ray_serve_has_nothing_to_wait_for():
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
