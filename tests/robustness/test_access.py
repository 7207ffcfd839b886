"""Who may call: TLS, certificates and tokens, shown those that must be refused and one of each that must not."""

import datetime as dt
import hashlib
import io
import logging
import queue
import socket
import ssl
import sys
import threading
import time
import types
from contextlib import contextmanager

import grpc
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import camserve
from camserve import cli
from camserve.v1 import explain_pb2, explain_pb2_grpc, models_pb2, models_pb2_grpc
from camserve_server.api import auth, grpc_server, oip, tokens
from camserve_server.api.oip.v2 import inference_pb2
from camserve_server.app import server
from camserve_server.cli import commands
from camserve_server.core import config, logs
from camserve_server.core.errors import ConfigError
from camserve_server.imaging import images
from robustness import error_checks
from robustness.authority import Authority
from support import PHOTOS, serving, wait_until

NETS = """
from torch import nn


def tiny():
    return nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
"""
EXPLAIN = "/camserve.v1.ExplainService/Explain"
TODAY = dt.datetime.now(dt.UTC).date()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model that is there at once."""
    folder = tmp_path_factory.mktemp("nets")
    (folder / "access_nets.py").write_text(NETS)
    sys.path.insert(0, str(folder))
    yield "tiny=access_nets:tiny?size=32"
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def start(tiny):
    """Start a server with settings."""
    return lambda **settings: serving(models=(tiny,), device="cpu", threads=1, **settings)


@pytest.fixture(scope="module")
def authority():
    return Authority()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, authority):
    """A folder with the certificate of an authority, and of one that nobody trusts."""
    path = tmp_path_factory.mktemp("certificates")
    (path / "ca.pem").write_bytes(authority.pem)
    (path / "stranger.pem").write_bytes(Authority("stranger").pem)
    return path


@pytest.fixture(scope="module")
def ca(folder):
    return folder / "ca.pem"


@pytest.fixture(scope="module")
def encrypted(start, authority, folder):
    """A server with TLS, that wants a certificate of nobody."""
    cert, key = authority.issue("127.0.0.1", "localhost").write(folder, "server")
    with start(tls_cert=cert, tls_key=key) as served:
        yield served.address


@pytest.fixture(scope="module")
def mutual(start, authority, folder, ca):
    """A server that wants a certificate of whoever calls."""
    cert, key = authority.issue("127.0.0.1").write(folder, "mutual")
    with start(tls_cert=cert, tls_key=key, tls_client_ca=str(ca)) as served:
        yield served.address


def asked(address, **how):
    """Return the names of a server's models, asked for once over a connection of its own."""
    with camserve.Client(address, retries=0, timeout=10, **how) as client:
        return [model.name for model in client.models()]


def refused(address, **how):
    with pytest.raises(camserve.Unavailable) as caught:
        asked(address, **how)
    return caught.value.message


def test_who_trusts_the_authority_is_answered_over_tls(encrypted, ca):
    assert asked(encrypted, tls=ca) == ["tiny"]


async def test_the_awaited_client_speaks_tls_too(encrypted, ca):
    async with camserve.AsyncClient(encrypted, tls=ca) as client:
        assert (await client.explain(PHOTOS["chelsea"], overlay=None)).model == "tiny"


def test_a_caller_in_the_clear_is_refused_and_told_what_may_be_missing(encrypted):
    assert "may want TLS" in refused(encrypted)


def test_a_server_of_another_authority_is_not_believed(encrypted, folder):
    assert "not trusted here: unable to get local issuer certificate" in refused(encrypted, tls=folder / "stranger.pem")


def test_self_signed_server_is_refused_with_public_authorities(encrypted):
    assert "not trusted here" in refused(encrypted, tls=True)


def test_a_certificate_that_is_over_is_not_believed(start, authority, tmp_path, ca):
    cert, key = authority.issue("127.0.0.1", days=-1).write(tmp_path, "over")
    with start(tls_cert=cert, tls_key=key) as served:
        assert "certificate has expired" in refused(served.address, tls=ca)


def test_certificate_for_another_name_is_refused_unless_expected(start, authority, tmp_path, ca):
    cert, key = authority.issue("other.example").write(tmp_path, "other")
    with start(tls_cert=cert, tls_key=key) as served:
        assert "a certificate for another name" in refused(served.address, tls=ca)
        assert asked(served.address, tls=ca, tls_name="other.example") == ["tiny"]


def test_a_caller_needs_a_certificate_where_the_server_asks_for_one(mutual, authority, ca, tmp_path):
    cert, key = authority.issue("caller").write(tmp_path, "caller")

    assert asked(mutual, tls=ca, client_cert=cert, client_key=key) == ["tiny"]
    assert "a certificate of yours" in refused(mutual, tls=ca)


def test_a_callers_certificate_of_another_authority_or_of_yesterday_is_refused(mutual, authority, ca, tmp_path):
    for name, pair in {"alien": Authority().issue("caller"), "old": authority.issue("caller", days=-1)}.items():
        cert, key = pair.write(tmp_path, name)
        refused(mutual, tls=ca, client_cert=cert, client_key=key)


@contextmanager
def ancient_server(cert, key):
    """Serve TLS 1.1, as OpenSSL still can."""
    context = _ancient(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    context.load_cert_chain(cert, key)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def shake():
            with listening.accept()[0] as line, context.wrap_socket(line, server_side=True):
                pass

        thread = threading.Thread(target=shake)
        thread.start()
        yield listening.getsockname()
        thread.join(10)


def _ancient(context):
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    return context


def handshake(place, context, ca):
    """Return the version of TLS that is agreed on, and the server's certificate."""
    context.load_verify_locations(ca)
    with socket.create_connection(place, 10) as line, context.wrap_socket(line, server_hostname="127.0.0.1") as tls:
        return tls.version(), tls.getpeercert(binary_form=True)


def modern():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    return context


def place_of(address):
    host, _, port = address.rpartition(":")
    return host, int(port)


def test_tls_below_1_2_is_refused(encrypted, authority, ca, tmp_path):
    old = _ancient(modern())
    with ancient_server(*authority.issue("127.0.0.1").write(tmp_path, "old")) as place:
        assert handshake(place, old, ca)[0] == "TLSv1.1", "the caller of this test can speak it"

    with pytest.raises((ssl.SSLError, ConnectionError)):  # it may be told why, or just be hung up on
        handshake(place_of(encrypted), old, ca)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_tls_from_1_2_on_is_spoken(encrypted, ca, version):
    context = modern()
    context.minimum_version = context.maximum_version = version

    assert handshake(place_of(encrypted), context, ca)[0] == version.name.replace("_", ".")


class Callers:
    """Threads that call again and again, each over a lasting connection and over a new one for every call."""

    def __init__(self, address, ca):
        self.how, self.over, self.outcomes = {"address": address, "tls": ca, "retries": 0}, threading.Event(), []
        self.threads = [threading.Thread(target=self.work) for _ in range(3)]

    def __enter__(self):
        for each in self.threads:
            each.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        for each in self.threads:
            each.join()

    def work(self):
        with camserve.Client(**self.how) as lasting:
            while not self.over.is_set():
                self.call(lasting)
                with camserve.Client(**self.how) as fresh:
                    self.call(fresh)

    def call(self, client):
        try:
            self.outcomes.append(client.health())
        except camserve.CamserveError as error:
            self.outcomes.append(error)


def der(pair):
    return ssl.PEM_cert_to_DER_cert(pair.cert.decode())


def test_certificates_are_renewed_under_load_without_a_failed_call(start, authority, tmp_path, ca):
    """Written one file after the other, as a tool may do it: for a moment they do not fit together."""
    cert, key = authority.issue("127.0.0.1").write(tmp_path, "server")
    renewals = 0
    with start(tls_cert=cert, tls_key=key) as served, Callers(served.address, ca) as callers:
        while renewals < 8 or len(callers.outcomes) < 100:
            time.sleep(0.02)
            pair = authority.issue("127.0.0.1")
            pair.write(tmp_path, "server")
            renewals += 1
            wait_until(lambda: handshake(place_of(served.address), modern(), ca)[1] == der(pair))  # noqa: B023 -- now

    assert set(callers.outcomes) == {camserve.Health.SERVING}


def test_broken_certificates_leave_the_old_in_force_and_are_logged_once(start, authority, tmp_path, ca, our_log):
    pair = authority.issue("127.0.0.1")
    cert, key = pair.write(tmp_path, "server")
    with start(tls_cert=cert, tls_key=key) as served:
        for spoil in (lambda path: path.write_bytes(b"rubbish"), lambda path: path.unlink()):
            spoil(tmp_path / "server.key")
            for _ in range(3):
                assert handshake(place_of(served.address), modern(), ca)[1] == der(pair)

    told = [each.partition(" previous ones: ")[2] for each in our_log.messages if "keeping the previous ones" in each]
    assert [words.split()[:2] for words in told] == [[cert, "and"], ["cannot", "read"]]


@pytest.fixture
def our_log(caplog, monkeypatch):
    """What the server logs, which otherwise goes past pytest."""
    monkeypatch.setattr(logging.getLogger("camserve_server"), "propagate", True)
    caplog.set_level("INFO")
    return caplog


def settings(**given):
    return config.load(flags={"address": "127.0.0.1:0", **given}, environment={})


def test_files_that_are_no_certificate_and_its_key_are_told_at_the_start(authority, tmp_path, ca):
    pair, other = authority.issue("127.0.0.1"), authority.issue("127.0.0.1")
    cert, key = pair.write(tmp_path, "server")
    locked, foreign = tmp_path / "locked.key", tmp_path / "foreign.key"
    locked.write_bytes(pair.locked())
    foreign.write_bytes(other.key)
    wrong = {
        "needs both": {"tls_cert": cert},
        "both tls_cert and tls_key": {"tls_key": key},
        "which needs tls_cert": {"tls_client_ca": str(ca)},
        "cannot read": {"tls_cert": str(tmp_path / "gone.pem"), "tls_key": str(tmp_path / "gone.key")},
        "unencrypted key in PEM": {"tls_cert": cert, "tls_key": str(locked)},
        "key values mismatch": {"tls_cert": cert, "tls_key": str(foreign)},
        "contains no certificate": {"tls_cert": cert, "tls_key": key, "tls_client_ca": str(locked)},
    }
    for words, given in wrong.items():
        with pytest.raises(ConfigError, match=words):
            auth.credentials(settings(**given))
    assert auth.credentials(settings(tls_cert=cert, tls_key=key, tls_client_ca=str(ca)))


def test_a_key_that_every_user_can_read_is_warned_of(authority, tmp_path, our_log):
    cert, key = authority.issue("127.0.0.1").write(tmp_path, "server")
    auth.credentials(settings(tls_cert=cert, tls_key=key))
    assert not our_log.messages

    (tmp_path / "server.key").chmod(0o644)
    auth.credentials(settings(tls_cert=cert, tls_key=key))
    assert "every user of this machine can read the key" in our_log.text


LOCAL = ("127.0.0.1:0", "127.8.9.1:1", "localhost:1", "[::1]:1", "unix:/run/camserve")
EXPOSED = ("0.0.0.0:1", "[::]:1", "0:1", "10.1.2.3:1", "[fe80::1]:1", "[::ffff:0.0.0.0]:1", "camserve.example:1", "*:1")


@pytest.mark.parametrize("address", EXPOSED)
def test_public_port_without_access_control_needs_insecure(address):
    tls, keys = {"tls_cert": "a", "tls_key": "b"}, {"tokens_file": "c"}
    for given in ({}, tls, keys, {"tls_client_ca": "d"}):
        with pytest.raises(ConfigError, match=r"can be reached from other machines: set tls_cert.*--insecure"):
            auth.check(settings(address=address, **given))
    for given in ({**tls, **keys}, {**tls, "tls_client_ca": "d"}, {"insecure": True}):
        auth.check(settings(address=address, **given))


@pytest.mark.parametrize("address", LOCAL)
def test_a_port_of_this_machine_alone_needs_neither(address):
    auth.check(settings(address=address))


async def test_the_server_itself_refuses_to_start_before_it_loads_anything():
    with pytest.raises(ConfigError, match="can be reached from other machines"):
        await server.serve(settings(address="0.0.0.0:0", models=("no_such:model",)), grpc_server.Stop())


def test_insecure_is_said_loudly_in_the_log(our_log):
    auth.check(settings(address="0.0.0.0:1", insecure=True))

    assert [each.levelname for each in our_log.records] == ["WARNING"]


class Roll:
    """A file of tokens, and the tokens themselves."""

    def __init__(self, path):
        self.path, self.secrets, self.lines = path, {}, {}

    def add(self, name, *roles, last_day=None):
        self.secrets[name], known = tokens.new(name, roles, last_day)
        self.lines[name] = known.line()
        return self.secrets[name]

    def write(self):
        self.path.write_text("# who may call\n\n" + "\n".join(self.lines.values()) + "  # the last\n")


@pytest.fixture(scope="module")
def roll(tmp_path_factory):
    roll = Roll(tmp_path_factory.mktemp("tokens") / "tokens")
    roll.add("all", "explain", "observe")
    roll.add("explainer", "explain")
    roll.add("observer", "observe")
    roll.add("admin", "admin")
    roll.add("old", "explain", last_day=TODAY - dt.timedelta(days=1))
    roll.add("fresh", "explain", last_day=TODAY + dt.timedelta(days=1))
    roll.write()
    return roll


@pytest.fixture(scope="module")
def decoded():
    """How many bytes of requests were decoded."""
    return []


@pytest.fixture(scope="module")
def written():
    """The log, of everything at its most talkative, in both forms."""
    out, root = io.StringIO(), logging.getLogger()
    handlers = [logging.StreamHandler(out), logging.StreamHandler(out)]
    handlers[0].setFormatter(logs.TextFormatter())
    handlers[1].setFormatter(logs.JsonFormatter())
    ours, level = logging.getLogger("camserve_server"), root.level
    ours.propagate, before = True, ours.level
    root.setLevel(logging.DEBUG)
    ours.setLevel(logging.DEBUG)
    for each in handlers:
        root.addHandler(each)
    yield out
    for each in handlers:
        root.removeHandler(each)
    root.setLevel(level)
    ours.setLevel(before)


@pytest.fixture(scope="module")
def guarded(start, roll, decoded, written):  # noqa: ARG001 -- the log is kept from its start
    """A server that wants tokens, and counts what it decodes of requests to explain."""

    def counted(packed):
        decoded.append(len(packed))
        return explain_pb2.ExplainRequest.FromString(packed)

    watched = types.SimpleNamespace(**vars(explain_pb2))
    watched.ExplainRequest = types.SimpleNamespace(FromString=counted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explain_pb2_grpc, "camserve_dot_v1_dot_explain__pb2", watched)
        served = start(tokens_file=str(roll.path), log_level="debug")
        running = served.__enter__()
    yield running
    served.__exit__(None, None, None)


@pytest.fixture
def line(guarded):
    with grpc.insecure_channel(guarded.address) as channel:
        yield channel


def bearer(*secrets):
    return tuple(("authorization", f"Bearer {each}") for each in secrets)


NO_TEXT = b"\x0a\xa0\x8d\x06" + b"\xff" * 100_000
"""A text field that is not UTF-8: only parsing shows that the message is invalid."""


def status_of(channel, metadata, method=EXPLAIN, request=NO_TEXT):
    """Call with bytes that are not a message; return the error."""
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(method)(request, metadata=metadata, timeout=10)
    return caught.value


def test_a_token_opens_what_its_roles_are_for(guarded, roll):
    photo = PHOTOS["chelsea"]
    with camserve.Client(guarded.address, token=roll.secrets["all"], retries=0) as client:
        assert client.explain(photo, overlay=None).model == "tiny"
        assert [each.model for each in client.explain_many([photo], overlay=None)] == ["tiny"]
        assert client.models()[0].name == "tiny"
        assert client.metrics()
    with camserve.Client(guarded.address, token=roll.secrets["fresh"], retries=0) as client:
        assert client.explain(photo, overlay=None).model == "tiny"


def shown_wrongly(secret):
    return {
        "none": (),
        "empty": (("authorization", ""),),
        "no scheme": (("authorization", secret),),
        "another scheme": (("authorization", f"Basic {secret}"),),
        "no token": (("authorization", "Bearer "),),
        "short": bearer(secret[:-1]),
        "long": bearer(f"{secret}A"),
        "endless": bearer("A" * 5000),
        "wrong": bearer(secret[:-1] + ("B" if secret[-1] == "A" else "A")),
        "two words": bearer(f"{secret} {secret}"),
        "its hash": bearer(hashlib.sha256(secret.encode()).hexdigest()),
        "doubled": bearer(secret, secret),
        "doubled with rubbish": (*bearer(secret), ("authorization", "x")),
        "in another place": (("x-authorization", f"Bearer {secret}"), ("cookie", f"authorization=Bearer {secret}")),
    }


@pytest.mark.parametrize("how", shown_wrongly("x" * 20))
def test_without_one_good_token_a_call_is_refused_before_anything_of_it_is_decoded(line, roll, decoded, how):
    before = len(decoded)
    error = status_of(line, shown_wrongly(roll.secrets["all"])[how])

    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "authorization: Bearer TOKEN" in error.details() or "ask the server's operator" in error.details()
    assert len(decoded) == before


def test_a_large_request_without_a_token_is_refused_as_such(line, decoded):
    before = len(decoded)
    for size in (12 * 2**20, 40 * 2**20):  # below the limit for messages, and above
        assert status_of(line, (), request=bytes(size)).code() is grpc.StatusCode.UNAUTHENTICATED
    assert len(decoded) == before


def test_with_a_good_token_the_same_bytes_are_decoded(line, roll, decoded):
    """What shows that the count above can be other than zero."""
    before = len(decoded)
    error = status_of(line, bearer(roll.secrets["all"]))

    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert decoded[before:] == [len(NO_TEXT)]


def test_the_word_bearer_may_be_written_in_any_case(line, roll):
    error = status_of(line, (("authorization", f"bEARER  {roll.secrets['all']}"),))

    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_an_expired_token_is_refused_with_its_last_day(line, roll):
    error = status_of(line, bearer(roll.secrets["old"]))

    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    assert f"expired after {TODAY - dt.timedelta(days=1)}" in error.details()


def rpcs():
    """Every RPC there is, with the role that it needs."""
    return [
        *auth.REQUIRED_ROLES.items(),
        ("/camserve.v1.ModelService/ReloadModel", "admin"),
        ("/camserve.v1.ExplainService/explain", "admin"),
        ("/nothing/AtAll", "admin"),
        ("/grpc.health.v1.Healthy/Check", "admin"),
    ]


@pytest.mark.parametrize(("method", "role"), rpcs(), ids=lambda each: each)
def test_every_rpc_is_refused_without_a_token_and_with_one_for_something_else(line, roll, decoded, method, role):
    others = {"explain": "observer", "observe": "explainer", "admin": "all"}
    before = len(decoded)
    nobody = status_of(line, (), method)
    other = status_of(line, bearer(roll.secrets[others[role]]), method)

    assert nobody.code() is grpc.StatusCode.UNAUTHENTICATED
    assert other.code() is grpc.StatusCode.PERMISSION_DENIED
    assert f"the role {role}; your token has " in other.details()
    assert len(decoded) == before


def test_the_table_of_roles_holds_every_rpc_of_the_services_that_only_tell():
    told = {method.rpartition("/")[2] for method, role in auth.REQUIRED_ROLES.items() if role == "observe"}
    others = {"ServerLive", "ServerReady", "ServerMetadata", "RepositoryIndex"}
    others |= {"ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics"}

    assert {"ListModels", "GetModel", "ListLayers", "ListMethods", "ServerReflectionInfo"} | others == told
    assert {role for method, role in auth.REQUIRED_ROLES.items() if "Explain" in method or "Evaluat" in method} == {
        "explain"
    }
    assert {role for method, role in auth.REQUIRED_ROLES.items() if method.endswith("Infer")} == {"explain"}
    assert {auth.REQUIRED_ROLES[f"/camserve.v1.ModelService/{what}Model"] for what in ("Load", "Unload")} == {"admin"}
    assert {auth.REQUIRED_ROLES[f"/{oip.NAME}/RepositoryModel{what}"] for what in ("Load", "Unload")} == {"admin"}
    assert {f"/{oip.NAME}/{rpc.name}" for rpc in oip.SERVICE.methods} <= set(auth.REQUIRED_ROLES)


def test_what_only_an_admin_may_is_unknown_to_an_admin_while_there_is_none(line, roll):
    error = status_of(line, bearer(roll.secrets["admin"]), "/camserve.v1.ModelService/NoSuchThing")

    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_stream_is_refused_too_and_before_its_first_message(guarded):
    """What gRPC loses of that, when the stream breaks while it is written to, is heard of the next one."""
    for _ in range(20):
        async with camserve.AsyncClient(guarded.address) as client:
            with pytest.raises(camserve.Unauthenticated):
                _ = [each async for each in client.explain_many([PHOTOS["chelsea"]])]


def test_reflection_needs_a_token_and_health_needs_none(line, roll):
    ask = reflection_pb2_grpc.ServerReflectionStub(line).ServerReflectionInfo
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    with pytest.raises(grpc.RpcError, match="requires a token"):
        next(ask(iter([question]), timeout=10))

    assert next(ask(iter([question]), metadata=bearer(roll.secrets["observer"]), timeout=10))
    health = health_pb2_grpc.HealthStub(line).Check(health_pb2.HealthCheckRequest(), timeout=10)
    assert health.status == health_pb2.HealthCheckResponse.SERVING


def test_a_refusal_is_short_has_the_requests_id_and_tells_nothing_of_the_inside(line, roll):
    for metadata in (*shown_wrongly(roll.secrets["all"]).values(), bearer(roll.secrets["observer"])):
        error = status_of(line, (*metadata, ("x-request-id", "mine")))

        assert dict(error.trailing_metadata())["x-request-id"] == "mine"
        assert error_checks.faults(error) == []


def test_tokens_are_changed_while_the_server_runs(start, tmp_path, monkeypatch):
    monkeypatch.setattr(auth, "RECHECK_INTERVAL", 0.0)  # the file is looked at with every call
    roll = Roll(tmp_path / "tokens")
    first, second = roll.add("first", "observe"), roll.add("second", "observe")
    roll.write()
    with start(tokens_file=str(roll.path)) as served, grpc.insecure_channel(served.address) as channel:

        def may(secret):
            call = models_pb2_grpc.ModelServiceStub(channel).ListModels.future(
                models_pb2.ListModelsRequest(), metadata=bearer(secret), timeout=10
            )
            return {grpc.StatusCode.OK: True, grpc.StatusCode.UNAUTHENTICATED: False}[call.code()]

        assert (may(first), may(second)) == (True, True)
        third = roll.add("third", "observe")
        roll.path.write_text(f"{roll.lines['second']}\n{roll.lines['third']}\n")
        assert (may(first), may(second), may(third)) == (False, True, True)
        roll.path.write_text(f"{roll.lines['first']}\nthis is no line\n")
        assert (may(first), may(second), may(third)) == (False, True, True), "what is broken changes nothing"
        roll.path.write_text("# nobody\n")
        assert (may(first), may(second), may(third)) == (False, False, False)


STREAMS = {
    "/camserve.v1.ExplainService/ExplainStream": (
        lambda name: explain_pb2.ExplainStreamRequest(request_id=name),
        lambda reply: explain_pb2.ExplainStreamResponse.FromString(reply).request_id,
    ),
    "/inference.GRPCInferenceService/ModelStreamInfer": (
        lambda name: inference_pb2.ModelInferRequest(id=name),
        lambda reply: inference_pb2.ModelStreamInferResponse.FromString(reply).infer_response.id,
    ),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": (
        lambda name: reflection_pb2.ServerReflectionRequest(host=name, list_services=""),
        lambda reply: reflection_pb2.ServerReflectionResponse.FromString(reply).original_request.host,
    ),
}


@pytest.mark.parametrize("method", STREAMS)
def test_stream_accepts_no_request_once_its_token_is_revoked(start, tmp_path, method, monkeypatch):
    monkeypatch.setattr(auth, "RECHECK_INTERVAL", 0.0)
    made, name_of = STREAMS[method]
    roll = Roll(tmp_path / "tokens")
    secret = roll.add("revoked", "explain", "observe")
    roll.write()
    with start(tokens_file=str(roll.path)) as served, grpc.insecure_channel(served.address) as channel:
        asked, answered = queue.SimpleQueue(), []
        replies = channel.stream_stream(method)(iter(asked.get, None), metadata=bearer(secret), timeout=60)
        for name in ("first", "second"):
            asked.put(made(name).SerializeToString())
            answered.append(name_of(next(replies)))
        roll.path.write_text("# nobody\n")
        asked.put(made("third").SerializeToString())
        with pytest.raises(grpc.RpcError) as caught:
            next(replies)
        asked.put(None)

    assert answered == ["first", "second"]
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert error_checks.faults(caught.value) == []


def test_stream_answers_what_it_accepted_before_its_token_was_revoked(start, tmp_path, monkeypatch):
    monkeypatch.setattr(auth, "RECHECK_INTERVAL", 0.0)
    roll = Roll(tmp_path / "tokens")
    secret = roll.add("revoked", "explain")
    roll.write()
    go_on, begun = threading.Event(), threading.Event()
    decode = images.decode

    def held(*args):
        begun.set()
        assert go_on.wait(60)
        return decode(*args)

    monkeypatch.setattr(images, "decode", held)
    request = {"image": PHOTOS["chelsea"].read_bytes()}
    with start(tokens_file=str(roll.path)) as served, grpc.insecure_channel(served.address) as channel:
        asked = queue.SimpleQueue()
        call = channel.stream_stream("/camserve.v1.ExplainService/ExplainStream")
        replies = call(iter(asked.get, None), metadata=bearer(secret), timeout=60)
        asked.put(explain_pb2.ExplainStreamRequest(request_id="accepted", request=request).SerializeToString())
        assert begun.wait(60)
        roll.path.write_text("# nobody\n")
        asked.put(explain_pb2.ExplainStreamRequest(request_id="late", request=request).SerializeToString())
        go_on.set()
        reply = explain_pb2.ExplainStreamResponse.FromString(next(replies))
        with pytest.raises(grpc.RpcError) as caught:
            next(replies)
        asked.put(None)

    assert (reply.request_id, len(reply.response.explanations)) == ("accepted", 1)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_line_that_is_wrong_is_told_by_its_number_and_never_by_what_it_says(tmp_path):
    secret, known = tokens.new("name", ("explain",))
    digest = known.line().split()[2]
    wrong = [
        f"name explain {secret}",
        secret,
        f"name {secret} {digest}",
        f"{secret}! explain {digest}",
        f"name explain {digest[:-1]}",
        f"name explain {digest} {secret}",
        f"name explain {digest} expires=2026-02-30",
        f"name explain {digest} expires={secret}",
        f"name root {digest}",
        f"name explain, {digest}",
        "name explain",
    ]
    for line in wrong:
        with pytest.raises(ConfigError, match=r"^line 3") as caught:
            tokens.parse(f"# tokens\n{known.line()}\n{line}\n")
        assert secret not in str(caught.value)
        assert digest not in str(caught.value)
    assert tokens.parse(f"\n  {known.line()}  # name's\n") == (known,)

    for content, words in ((b"\xff\xfe", "is not a text file"), (b"x", "line 1"), (None, "cannot read")):
        path = tmp_path / "tokens"
        path.write_bytes(content) if content else path.unlink()
        with pytest.raises(ConfigError, match=words):
            auth.AuthInterceptor(str(path), None)


def test_what_is_no_text_is_no_token():
    with pytest.raises(tokens.Unauthenticated, match="not a bearer token"):
        tokens.authenticate((), [b"Bearer \xff"])


def test_a_token_is_good_on_its_last_day_in_utc_and_not_on_the_next():
    secret, known = tokens.new("name", ("explain",), dt.date(2027, 1, 31))
    shown = [f"Bearer {secret}"]

    assert tokens.authenticate((known,), shown, dt.date(2027, 1, 31)) is known
    with pytest.raises(tokens.Unauthenticated, match="expired after 2027-01-31"):
        tokens.authenticate((known,), shown, dt.date(2027, 2, 1))


def test_every_entry_is_compared_in_constant_time_wherever_the_token_stands(monkeypatch):
    made = [tokens.new(str(number), ("explain",)) for number in range(5)]
    known, compared = tuple(each for _, each in made), []
    honest = tokens.hmac.compare_digest
    monkeypatch.setattr(tokens.hmac, "compare_digest", lambda *two: compared.append(two) or honest(*two))
    for secret, each in made:
        assert tokens.authenticate(known, [f"Bearer {secret}"]) is each
        assert len(compared) == 5
        compared.clear()
    with pytest.raises(tokens.Unauthenticated):
        tokens.authenticate(known, ["Bearer nobody"])
    assert len(compared) == 5


def test_the_command_makes_a_token_once_and_the_line_to_keep():
    run = CliRunner()
    first = run.invoke(commands.program, ["token", "new", "alice", "--role", "explain", "--expires", "2030-01-31"])
    second = run.invoke(commands.program, ["token", "new", "alice"])
    words = [dict(line.split(None, 1) for line in each.stdout.splitlines()) for each in (first, second)]

    assert words[0]["token:"] != words[1]["token:"]
    (known,) = tokens.parse(words[0]["line:"])
    assert (known.name, known.roles, known.last_day) == ("alice", {"explain"}, dt.date(2030, 1, 31))
    assert tokens.authenticate((known,), [f"Bearer {words[0]['token:']}"], dt.date(2029, 1, 1)) is known
    assert words[0]["token:"] not in words[0]["line:"]
    assert tokens.parse(words[1]["line:"])[0].roles == {"explain", "observe"}

    wrong = run.invoke(commands.program, ["token", "new", "a b"])
    assert (wrong.exit_code, wrong.stderr.count("\n")) == (2, 1)
    assert "invalid name" in wrong.stderr
    assert run.invoke(commands.program, ["token", "new", "a", "--role", "root"]).exit_code == 2


def leaked(text, roll):
    """Return the tokens, and the hashes of tokens, that a text holds."""
    hashes = [hashlib.sha256(each.encode()).hexdigest() for each in roll.secrets.values()]
    return [each for each in (*roll.secrets.values(), *hashes) if each[:-1] in text]


def test_the_log_names_who_called_and_who_was_refused_and_never_a_token(guarded, line, roll, written):
    for secret in roll.secrets.values():
        for metadata in shown_wrongly(secret).values():
            status_of(line, metadata)
        status_of(line, bearer(secret), "/nothing/AtAll")
    test_a_token_opens_what_its_roles_are_for(guarded, roll)
    wait_until(lambda: '"caller": "fresh"' in written.getvalue())  # the line is written after the answer
    log = written.getvalue()

    assert "Explain code=OK" in log
    assert "caller=all" in log
    assert '"caller": "fresh"' in log
    assert "Explain code=UNAUTHENTICATED" in log
    assert '"unknown RPC"' in log
    assert leaked(log, roll) == []
    logging.getLogger("camserve_server").debug("a fault %s", roll.secrets["admin"])
    assert leaked(written.getvalue(), roll) == [roll.secrets["admin"]]


def test_tls_certificates_of_callers_and_tokens_go_together_on_the_command_line_too(
    start, authority, folder, roll, monkeypatch
):
    cert, key = authority.issue("127.0.0.1").write(folder, "whole")
    mine, mine_key = authority.issue("caller").write(folder, "caller")
    known = ("--ca", folder / "ca.pem", "--client-cert", mine, "--client-key", mine_key)
    with start(tls_cert=cert, tls_key=key, tls_client_ca=str(folder / "ca.pem"), tokens_file=str(roll.path)) as served:

        def run(command, *flags):
            return CliRunner().invoke(cli.main, [command, "--server", served.address, *map(str, flags)])

        assert "requires a token" in run("models", *known).stderr
        assert run("health", *known).exit_code == 0
        monkeypatch.setenv("CAMSERVE_TOKEN", roll.secrets["observer"])
        assert "tiny" in run("models", *known).stdout
        assert "the role explain; your token has observe" in run("metrics", *known).stderr
        stranger = run("models", *known[:2], "--timeout", 1)
        assert (stranger.exit_code, stranger.stdout) == (1, "")


def test_what_a_client_is_made_of_shows_no_token(guarded, roll):
    secret = roll.secrets["all"]
    with camserve.Client(guarded.address, token=secret) as client:
        assert secret not in repr(vars(client))
        assert secret not in repr(client._settings)
