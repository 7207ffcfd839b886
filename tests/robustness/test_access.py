"""Access control: valid and invalid uses of TLS, client certificates and tokens."""

import datetime as dt
import hashlib
import io
import logging
import queue
import socket
import ssl
import sys
import threading
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
from camserve_server.api import auth, exposure, grpc_server, oip, tokens
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
    """Specification of a model that loads at once."""
    folder = tmp_path_factory.mktemp("nets")
    (folder / "access_nets.py").write_text(NETS)
    sys.path.insert(0, str(folder))
    yield "tiny=access_nets:tiny?size=32"
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def start(tiny):
    """Function that starts a server with settings."""
    return lambda **settings: serving(models=(tiny,), device="cpu", threads=1, **settings)


@pytest.fixture(scope="module")
def authority():
    return Authority()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, authority):
    """Folder with the certificates of an authority and of an untrusted one."""
    path = tmp_path_factory.mktemp("certificates")
    (path / "ca.pem").write_bytes(authority.pem)
    (path / "untrusted.pem").write_bytes(Authority("untrusted").pem)
    return path


@pytest.fixture(scope="module")
def ca(folder):
    return folder / "ca.pem"


@pytest.fixture(scope="module")
def encrypted(start, authority, folder):
    """Address of a server with TLS that needs no client certificates."""
    cert, key = authority.issue("127.0.0.1", "localhost").write(folder, "server")
    with start(tls_cert=cert, tls_key=key) as served:
        yield served.address


@pytest.fixture(scope="module")
def mutual(start, authority, folder, ca):
    """Address of a server that requires client certificates."""
    cert, key = authority.issue("127.0.0.1").write(folder, "mutual")
    with start(tls_cert=cert, tls_key=key, tls_client_ca=str(ca)) as served:
        yield served.address


def models_of(address, **options):
    """Return the names of a server's models, over a new connection."""
    with camserve.Client(address, retries=0, **options) as client:
        return [model.name for model in client.models()]


def refusal(address, **options):
    """Return the message of the error that a call raises."""
    with pytest.raises(camserve.Unavailable) as caught:
        models_of(address, **options)
    return caught.value.message


def test_client_that_trusts_the_authority_is_answered_over_tls(encrypted, ca):
    assert models_of(encrypted, tls=ca) == ["tiny"]


async def test_async_client_uses_tls(encrypted, ca):
    async with camserve.AsyncClient(encrypted, tls=ca) as client:
        assert (await client.explain(PHOTOS["chelsea"], overlay=None)).model == "tiny"


def test_plaintext_call_is_refused_with_a_hint_at_tls(encrypted):
    assert "may want TLS" in refusal(encrypted)


def test_plaintext_call_to_a_name_gets_a_hint_at_tls_or_the_refusing_address(encrypted):
    """gRPC reports one address of a name, at random: 127.0.0.1, or ::1, where no server listens."""
    address = f"localhost:{encrypted.rpartition(':')[2]}"
    with camserve.Client(address, retries=camserve.Retry(first=0.01)) as client:
        for _ in range(3):
            with pytest.raises(camserve.Unavailable, match=r"may want TLS|refused at \[::1\]"):
                client.models()


def test_server_certificate_of_another_authority_is_refused(encrypted, folder):
    assert "not trusted here: unable to get local issuer certificate" in refusal(
        encrypted, tls=folder / "untrusted.pem"
    )


def test_self_signed_server_is_refused_with_public_authorities(encrypted):
    assert "not trusted here" in refusal(encrypted, tls=True)


def test_expired_server_certificate_is_refused(start, authority, tmp_path, ca):
    cert, key = authority.issue("127.0.0.1", days=-1).write(tmp_path, "over")
    with start(tls_cert=cert, tls_key=key) as served:
        assert "certificate has expired" in refusal(served.address, tls=ca)


def test_certificate_for_another_name_is_refused_unless_expected(start, authority, tmp_path, ca):
    cert, key = authority.issue("other.example").write(tmp_path, "other")
    with start(tls_cert=cert, tls_key=key) as served:
        assert "a certificate for another name" in refusal(served.address, tls=ca)
        assert models_of(served.address, tls=ca, tls_name="other.example") == ["tiny"]


def test_client_certificate_is_required_if_configured(mutual, authority, ca, tmp_path):
    cert, key = authority.issue("caller").write(tmp_path, "caller")

    assert models_of(mutual, tls=ca, client_cert=cert, client_key=key) == ["tiny"]
    assert "a certificate of yours" in refusal(mutual, tls=ca)


def test_untrusted_or_expired_client_certificate_is_refused(mutual, authority, ca, tmp_path):
    for name, pair in {"alien": Authority().issue("caller"), "old": authority.issue("caller", days=-1)}.items():
        cert, key = pair.write(tmp_path, name)
        refusal(mutual, tls=ca, client_cert=cert, client_key=key)


@contextmanager
def tls_1_1_server(cert, key):
    """Serve TLS 1.1, which OpenSSL still supports."""
    context = _use_tls_1_1(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    context.load_cert_chain(cert, key)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept():
            with listener.accept()[0] as connection, context.wrap_socket(connection, server_side=True):
                pass

        thread = threading.Thread(target=accept)
        thread.start()
        yield listener.getsockname()
        thread.join()


def _use_tls_1_1(context):
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    return context


def handshake(endpoint, context, ca):
    """Return the negotiated version of TLS and the server's certificate."""
    context.load_verify_locations(ca)
    with (
        socket.create_connection(endpoint) as connection,
        context.wrap_socket(connection, server_hostname="127.0.0.1") as tls,
    ):
        return tls.version(), tls.getpeercert(binary_form=True)


def client_context():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    return context


def endpoint_of(address):
    host, _, port = address.rpartition(":")
    return host, int(port)


def test_tls_below_1_2_is_refused(encrypted, authority, ca, tmp_path):
    old = _use_tls_1_1(client_context())
    with tls_1_1_server(*authority.issue("127.0.0.1").write(tmp_path, "old")) as endpoint:
        assert handshake(endpoint, old, ca)[0] == "TLSv1.1", "the test's own client must support TLS 1.1"

    with pytest.raises((ssl.SSLError, ConnectionError)):  # the server may send a reason or just close the connection
        handshake(endpoint_of(encrypted), old, ca)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_tls_1_2_and_1_3_are_accepted(encrypted, ca, version):
    context = client_context()
    context.minimum_version = context.maximum_version = version

    assert handshake(endpoint_of(encrypted), context, ca)[0] == version.name.replace("_", ".")


class Callers:
    """Threads that call all the time, alternately over a lasting connection and over a new one."""

    def __init__(self, address, ca):
        self.options, self.done, self.outcomes = {"address": address, "tls": ca, "retries": 0}, threading.Event(), []
        self.threads = [threading.Thread(target=self.work) for _ in range(3)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.done.set()
        for thread in self.threads:
            thread.join()

    def work(self):
        with camserve.Client(**self.options) as lasting:
            while not self.done.is_set():
                self.call(lasting)
                with camserve.Client(**self.options) as fresh:
                    self.call(fresh)

    def call(self, client):
        try:
            self.outcomes.append(client.health())
        except camserve.CamserveError as error:
            self.outcomes.append(error)


def der(pair):
    return ssl.PEM_cert_to_DER_cert(pair.cert.decode())


def test_certificates_are_renewed_under_load_without_a_failed_call(start, authority, tmp_path, ca):
    """The files are written one after the other, as tools do, so that they do not match for a moment."""
    cert, key = authority.issue("127.0.0.1").write(tmp_path, "server")
    with start(tls_cert=cert, tls_key=key) as served, Callers(served.address, ca) as callers:
        for renewal in range(1, 9):
            wait_until(lambda: len(callers.outcomes) >= 12 * renewal)  # noqa: B023 -- called at once
            pair = authority.issue("127.0.0.1")
            pair.write(tmp_path, "server")
            wait_until(lambda: handshake(endpoint_of(served.address), client_context(), ca)[1] == der(pair))  # noqa: B023 -- called at once

    assert set(callers.outcomes) == {camserve.Health.SERVING}


def test_invalid_new_certificate_is_logged_once_and_not_used(start, authority, tmp_path, ca, our_log):
    pair = authority.issue("127.0.0.1")
    cert, key = pair.write(tmp_path, "server")
    with start(tls_cert=cert, tls_key=key) as served:
        for spoil in (lambda path: path.write_bytes(b"rubbish"), lambda path: path.unlink()):
            spoil(tmp_path / "server.key")
            for _ in range(3):
                assert handshake(endpoint_of(served.address), client_context(), ca)[1] == der(pair)

    reasons = [
        line.partition(" previous ones: ")[2] for line in our_log.messages if "keeping the previous ones" in line
    ]
    assert [reason.split()[:2] for reason in reasons] == [[cert, "and"], ["cannot", "read"]]


@pytest.fixture
def our_log(caplog, monkeypatch):
    """The server's log, which by default does not reach pytest's caplog."""
    monkeypatch.setattr(logging.getLogger("camserve_server"), "propagate", True)
    caplog.set_level("INFO")
    return caplog


def settings(**changes):
    return config.load(flags={"address": "127.0.0.1:0", **changes}, environment={})


def test_invalid_certificate_files_are_configuration_errors(authority, tmp_path, ca):
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
    for message, changes in wrong.items():
        with pytest.raises(ConfigError, match=message):
            auth.credentials(settings(**changes))
    assert auth.credentials(settings(tls_cert=cert, tls_key=key, tls_client_ca=str(ca)))


def test_key_readable_by_every_user_is_logged_as_a_warning(authority, tmp_path, our_log):
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
    for changes in ({}, tls, keys, {"tls_client_ca": "d"}):
        with pytest.raises(ConfigError, match=r"can be reached from other machines: set tls_cert.*--insecure"):
            exposure.check(settings(address=address, **changes))
    for changes in ({**tls, **keys}, {**tls, "tls_client_ca": "d"}, {"insecure": True}):
        exposure.check(settings(address=address, **changes))


@pytest.mark.parametrize("address", LOCAL)
def test_local_port_needs_no_access_control(address):
    exposure.check(settings(address=address))


async def test_unprotected_server_is_refused_before_it_loads_models():
    with pytest.raises(ConfigError, match="can be reached from other machines"):
        await server.serve(settings(address="0.0.0.0:0", models=("no_such:model",)), grpc_server.Stop())


def test_insecure_is_logged_as_a_warning(our_log):
    exposure.check(settings(address="0.0.0.0:1", insecure=True))

    assert [record.levelname for record in our_log.records] == ["WARNING"]


class TokenFile:
    """File of tokens, and their secrets."""

    def __init__(self, path):
        self.path, self.secrets, self.lines = path, {}, {}

    def add(self, name, *roles, last_day=None):
        self.secrets[name], known = tokens.new(name, roles, last_day)
        self.lines[name] = known.line()
        return self.secrets[name]

    def write(self):
        self.path.write_text("# tokens\n\n" + "\n".join(self.lines.values()) + "  # the last\n")


@pytest.fixture(scope="module")
def token_file(tmp_path_factory):
    token_file = TokenFile(tmp_path_factory.mktemp("tokens") / "tokens")
    token_file.add("all", "explain", "observe")
    token_file.add("explainer", "explain")
    token_file.add("observer", "observe")
    token_file.add("admin", "admin")
    token_file.add("old", "explain", last_day=TODAY - dt.timedelta(days=1))
    token_file.add("fresh", "explain", last_day=TODAY + dt.timedelta(days=1))
    token_file.write()
    return token_file


@pytest.fixture(scope="module")
def decoded():
    """List of the sizes of decoded requests, in bytes."""
    return []


@pytest.fixture(scope="module")
def log_text():
    """The log of all loggers at level DEBUG, in both formats."""
    out, root = io.StringIO(), logging.getLogger()
    handlers = [logging.StreamHandler(out), logging.StreamHandler(out)]
    handlers[0].setFormatter(logs.TextFormatter())
    handlers[1].setFormatter(logs.JsonFormatter())
    logger, level = logging.getLogger("camserve_server"), root.level
    logger.propagate, before = True, logger.level
    root.setLevel(logging.DEBUG)
    logger.setLevel(logging.DEBUG)
    for handler in handlers:
        root.addHandler(handler)
    yield out
    for handler in handlers:
        root.removeHandler(handler)
    root.setLevel(level)
    logger.setLevel(before)


@pytest.fixture(scope="module")
def guarded(start, token_file, decoded, log_text):  # noqa: ARG001 -- records the log from its start
    """Server that requires tokens, and records the sizes of the Explain requests that it decodes."""

    def record_size(packed):
        decoded.append(len(packed))
        return explain_pb2.ExplainRequest.FromString(packed)

    recording = types.SimpleNamespace(**vars(explain_pb2))
    recording.ExplainRequest = types.SimpleNamespace(FromString=record_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explain_pb2_grpc, "camserve_dot_v1_dot_explain__pb2", recording)
        served = start(tokens_file=str(token_file.path), log_level="debug")
        running = served.__enter__()
    yield running
    served.__exit__(None, None, None)


@pytest.fixture
def channel(guarded):
    with grpc.insecure_channel(guarded.address) as channel:
        yield channel


def bearer(*secrets):
    return tuple(("authorization", f"Bearer {secret}") for secret in secrets)


NOT_UTF_8 = b"\x0a\xa0\x8d\x06" + b"\xff" * 100_000
"""A text field that is not UTF-8: only parsing shows that the message is invalid."""


def status_of(channel, metadata, method=EXPLAIN, request=NOT_UTF_8):
    """Call with bytes that are not a message; return the error."""
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(method)(request, metadata=metadata)
    return caught.value


def test_token_permits_the_rpcs_of_its_roles(guarded, token_file):
    photo = PHOTOS["chelsea"]
    with camserve.Client(guarded.address, token=token_file.secrets["all"], retries=0) as client:
        assert client.explain(photo, overlay=None).model == "tiny"
        assert [result.model for result in client.explain_many([photo], overlay=None)] == ["tiny"]
        assert client.models()[0].name == "tiny"
        assert client.metrics()
    with camserve.Client(guarded.address, token=token_file.secrets["fresh"], retries=0) as client:
        assert client.explain(photo, overlay=None).model == "tiny"


def invalid_metadata(secret):
    """Return metadata without exactly one valid token, by the fault."""
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
        "doubled with an invalid one": (*bearer(secret), ("authorization", "x")),
        "in another place": (("x-authorization", f"Bearer {secret}"), ("cookie", f"authorization=Bearer {secret}")),
    }


@pytest.mark.parametrize("fault", invalid_metadata("x" * 20))
def test_call_without_exactly_one_valid_token_is_not_decoded(channel, token_file, decoded, fault):
    before = len(decoded)
    error = status_of(channel, invalid_metadata(token_file.secrets["all"])[fault])

    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "authorization: Bearer TOKEN" in error.details() or "ask the server's operator" in error.details()
    assert len(decoded) == before


def test_large_request_without_a_token_is_unauthenticated(channel, decoded):
    before = len(decoded)
    for size in (12 * 2**20, 40 * 2**20):  # below the limit for messages, and above
        assert status_of(channel, (), request=bytes(size)).code() is grpc.StatusCode.UNAUTHENTICATED
    assert len(decoded) == before


def test_same_bytes_with_a_valid_token_are_decoded(channel, token_file, decoded):
    """Control: the sizes above are recorded."""
    before = len(decoded)
    error = status_of(channel, bearer(token_file.secrets["all"]))

    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert decoded[before:] == [len(NOT_UTF_8)]


def test_bearer_scheme_is_case_insensitive(channel, token_file):
    error = status_of(channel, (("authorization", f"bEARER  {token_file.secrets['all']}"),))

    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_expired_token_is_refused_with_its_last_day(channel, token_file):
    error = status_of(channel, bearer(token_file.secrets["old"]))

    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    assert f"expired after {TODAY - dt.timedelta(days=1)}" in error.details()


def rpcs():
    """Return every RPC, and some unknown ones, with the role that it needs."""
    return [
        *auth.REQUIRED_ROLES.items(),
        ("/camserve.v1.ModelService/ReloadModel", "admin"),
        ("/camserve.v1.ExplainService/explain", "admin"),
        ("/nothing/AtAll", "admin"),
        ("/grpc.health.v1.Healthy/Check", "admin"),
    ]


@pytest.mark.parametrize(("method", "role"), rpcs(), ids=str)
def test_every_rpc_is_refused_without_its_role(channel, token_file, decoded, method, role):
    others = {"explain": "observer", "observe": "explainer", "admin": "all"}
    before = len(decoded)
    without_token = status_of(channel, (), method)
    other = status_of(channel, bearer(token_file.secrets[others[role]]), method)

    assert without_token.code() is grpc.StatusCode.UNAUTHENTICATED
    assert other.code() is grpc.StatusCode.PERMISSION_DENIED
    assert f"the role {role}; your token has " in other.details()
    assert len(decoded) == before


def test_roles_cover_every_rpc():
    observing = {method.rpartition("/")[2] for method, role in auth.REQUIRED_ROLES.items() if role == "observe"}
    others = {"ServerLive", "ServerReady", "ServerMetadata", "RepositoryIndex"}
    others |= {"ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics"}

    assert {"ListModels", "GetModel", "ListLayers", "ListMethods", "ServerReflectionInfo"} | others == observing
    assert {role for method, role in auth.REQUIRED_ROLES.items() if "Explain" in method or "Evaluat" in method} == {
        "explain"
    }
    assert {role for method, role in auth.REQUIRED_ROLES.items() if method.endswith("Infer")} == {"explain"}
    assert {auth.REQUIRED_ROLES[f"/camserve.v1.ModelService/{action}Model"] for action in ("Load", "Unload")} == {
        "admin"
    }
    assert {auth.REQUIRED_ROLES[f"/{oip.NAME}/RepositoryModel{action}"] for action in ("Load", "Unload")} == {"admin"}
    assert {f"/{oip.NAME}/{rpc.name}" for rpc in oip.SERVICE.methods} <= set(auth.REQUIRED_ROLES)


def test_unknown_rpc_is_unimplemented_for_an_admin(channel, token_file):
    error = status_of(channel, bearer(token_file.secrets["admin"]), "/camserve.v1.ModelService/NoSuchThing")

    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_stream_without_a_token_is_refused_before_its_first_message(guarded):
    """Repeated, because gRPC may lose the error if the stream breaks during a write."""
    for _ in range(20):
        async with camserve.AsyncClient(guarded.address) as client:
            with pytest.raises(camserve.Unauthenticated):
                _ = [result async for result in client.explain_many([PHOTOS["chelsea"]])]


def test_reflection_needs_a_token_and_health_needs_none(channel, token_file):
    reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    with pytest.raises(grpc.RpcError, match="requires a token"):
        next(reflect(iter([request])))

    assert next(reflect(iter([request]), metadata=bearer(token_file.secrets["observer"])))
    health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert health.status == health_pb2.HealthCheckResponse.SERVING


def test_error_is_short_has_the_request_id_and_no_internals(channel, token_file):
    for metadata in (*invalid_metadata(token_file.secrets["all"]).values(), bearer(token_file.secrets["observer"])):
        error = status_of(channel, (*metadata, ("x-request-id", "custom-id")))

        assert dict(error.trailing_metadata())["x-request-id"] == "custom-id"
        assert error_checks.faults(error) == []


def test_tokens_can_be_changed_while_the_server_runs(start, tmp_path, monkeypatch):
    monkeypatch.setattr(auth, "RECHECK_INTERVAL", 0.0)  # the file is checked at every call
    token_file = TokenFile(tmp_path / "tokens")
    first, second = token_file.add("first", "observe"), token_file.add("second", "observe")
    token_file.write()
    with start(tokens_file=str(token_file.path)) as served, grpc.insecure_channel(served.address) as channel:

        def allows(secret):
            call = models_pb2_grpc.ModelServiceStub(channel).ListModels.future(
                models_pb2.ListModelsRequest(), metadata=bearer(secret)
            )
            return {grpc.StatusCode.OK: True, grpc.StatusCode.UNAUTHENTICATED: False}[call.code()]

        assert (allows(first), allows(second)) == (True, True)
        third = token_file.add("third", "observe")
        token_file.path.write_text(f"{token_file.lines['second']}\n{token_file.lines['third']}\n")
        assert (allows(first), allows(second), allows(third)) == (False, True, True)
        token_file.path.write_text(f"{token_file.lines['first']}\nan invalid line\n")
        assert (allows(first), allows(second), allows(third)) == (False, True, True), (
            "an invalid file must change nothing"
        )
        token_file.path.write_text("# no tokens\n")
        assert (allows(first), allows(second), allows(third)) == (False, False, False)


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
    make_request, name_of = STREAMS[method]
    token_file = TokenFile(tmp_path / "tokens")
    secret = token_file.add("revoked", "explain", "observe")
    token_file.write()
    with start(tokens_file=str(token_file.path)) as served, grpc.insecure_channel(served.address) as channel:
        requests, answered = queue.SimpleQueue(), []
        replies = channel.stream_stream(method)(iter(requests.get, None), metadata=bearer(secret))
        for name in ("first", "second"):
            requests.put(make_request(name).SerializeToString())
            answered.append(name_of(next(replies)))
        token_file.path.write_text("# no tokens\n")
        requests.put(make_request("third").SerializeToString())
        with pytest.raises(grpc.RpcError) as caught:
            next(replies)
        requests.put(None)

    assert answered == ["first", "second"]
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert error_checks.faults(caught.value) == []


def test_stream_answers_what_it_accepted_before_its_token_was_revoked(start, tmp_path, monkeypatch):
    monkeypatch.setattr(auth, "RECHECK_INTERVAL", 0.0)
    token_file = TokenFile(tmp_path / "tokens")
    secret = token_file.add("revoked", "explain")
    token_file.write()
    go_on, started = threading.Event(), threading.Event()
    decode = images.decode

    def blocking_decode(*args, **options):
        started.set()
        assert go_on.wait(60)
        return decode(*args, **options)

    request = {"image": PHOTOS["chelsea"].read_bytes()}
    with start(tokens_file=str(token_file.path)) as served, grpc.insecure_channel(served.address) as channel:
        monkeypatch.setattr(images, "decode", blocking_decode)
        requests = queue.SimpleQueue()
        call = channel.stream_stream("/camserve.v1.ExplainService/ExplainStream")
        replies = call(iter(requests.get, None), metadata=bearer(secret))
        requests.put(explain_pb2.ExplainStreamRequest(request_id="accepted", request=request).SerializeToString())
        assert started.wait(60)
        token_file.path.write_text("# no tokens\n")
        requests.put(explain_pb2.ExplainStreamRequest(request_id="late", request=request).SerializeToString())
        go_on.set()
        reply = explain_pb2.ExplainStreamResponse.FromString(next(replies))
        with pytest.raises(grpc.RpcError) as caught:
            next(replies)
        requests.put(None)

    assert (reply.request_id, len(reply.response.explanations)) == ("accepted", 1)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_invalid_line_is_reported_by_number_without_its_content(tmp_path):
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

    for content, message in ((b"\xff\xfe", "is not a text file"), (b"x", "line 1"), (None, "cannot read")):
        path = tmp_path / "tokens"
        path.write_bytes(content) if content else path.unlink()
        with pytest.raises(ConfigError, match=message):
            auth.Authorizer(str(path))


def test_token_that_is_not_utf_8_is_refused():
    with pytest.raises(tokens.Unauthenticated, match="not a bearer token"):
        tokens.authenticate((), [b"Bearer \xff"])


def test_token_is_valid_until_the_end_of_its_last_day_in_utc():
    secret, known = tokens.new("name", ("explain",), dt.date(2027, 1, 31))
    headers = [f"Bearer {secret}"]

    assert tokens.authenticate((known,), headers, dt.date(2027, 1, 31)) is known
    with pytest.raises(tokens.Unauthenticated, match="expired after 2027-01-31"):
        tokens.authenticate((known,), headers, dt.date(2027, 2, 1))


def test_token_is_compared_with_every_entry_in_constant_time(monkeypatch):
    entries = [tokens.new(str(number), ("explain",)) for number in range(5)]
    known, compared = tuple(token for _, token in entries), []
    compare = tokens.hmac.compare_digest
    monkeypatch.setattr(tokens.hmac, "compare_digest", lambda *values: compared.append(values) or compare(*values))
    for secret, token in entries:
        assert tokens.authenticate(known, [f"Bearer {secret}"]) is token
        assert len(compared) == 5
        compared.clear()
    with pytest.raises(tokens.Unauthenticated):
        tokens.authenticate(known, ["Bearer unknown"])
    assert len(compared) == 5


def test_command_prints_a_new_token_and_its_line():
    run = CliRunner()
    first = run.invoke(commands.program, ["token", "new", "alice", "--role", "explain", "--expires", "2030-01-31"])
    second = run.invoke(commands.program, ["token", "new", "alice"])
    outputs = [dict(line.split(None, 1) for line in result.stdout.splitlines()) for result in (first, second)]

    assert outputs[0]["token:"] != outputs[1]["token:"]
    (known,) = tokens.parse(outputs[0]["line:"])
    assert (known.name, known.roles, known.last_day) == ("alice", {"explain"}, dt.date(2030, 1, 31))
    assert tokens.authenticate((known,), [f"Bearer {outputs[0]['token:']}"], dt.date(2029, 1, 1)) is known
    assert outputs[0]["token:"] not in outputs[0]["line:"]
    assert tokens.parse(outputs[1]["line:"])[0].roles == {"explain", "observe"}

    wrong = run.invoke(commands.program, ["token", "new", "a b"])
    assert (wrong.exit_code, wrong.stderr.count("\n")) == (2, 1)
    assert "invalid name" in wrong.stderr
    assert run.invoke(commands.program, ["token", "new", "a", "--role", "root"]).exit_code == 2


def leaked(text, token_file):
    """Return the secrets and hashes of tokens that a text contains."""
    hashes = [hashlib.sha256(secret.encode()).hexdigest() for secret in token_file.secrets.values()]
    return [value for value in (*token_file.secrets.values(), *hashes) if value[:-1] in text]


def test_log_names_callers_and_refusals_but_no_token(guarded, channel, token_file, log_text):
    for secret in token_file.secrets.values():
        for metadata in invalid_metadata(secret).values():
            status_of(channel, metadata)
        status_of(channel, bearer(secret), "/nothing/AtAll")
    test_token_permits_the_rpcs_of_its_roles(guarded, token_file)
    expected = ("Explain code=OK", "caller=all", '"caller": "fresh"', "Explain code=UNAUTHENTICATED", '"unknown RPC"')
    wait_until(lambda: all(text in log_text.getvalue() for text in expected))  # lines are written after the answers
    log = log_text.getvalue()

    assert {"caller=all", "caller=fresh"} <= set(log.split())
    assert leaked(log, token_file) == []
    logging.getLogger("camserve_server").debug("a token %s", token_file.secrets["admin"])
    assert leaked(log_text.getvalue(), token_file) == [token_file.secrets["admin"]]


def test_command_line_combines_tls_client_certificates_and_tokens(start, authority, folder, token_file, monkeypatch):
    cert, key = authority.issue("127.0.0.1").write(folder, "whole")
    client_cert, client_key = authority.issue("caller").write(folder, "caller")
    known = ("--ca", folder / "ca.pem", "--client-cert", client_cert, "--client-key", client_key)
    with start(
        tls_cert=cert, tls_key=key, tls_client_ca=str(folder / "ca.pem"), tokens_file=str(token_file.path)
    ) as served:

        def run(command, *flags):
            return CliRunner().invoke(cli.main, [command, "--server", served.address, *map(str, flags)])

        assert "requires a token" in run("models", *known).stderr
        assert run("health", *known).exit_code == 0
        monkeypatch.setenv("CAMSERVE_TOKEN", token_file.secrets["observer"])
        assert "tiny" in run("models", *known).stdout
        assert "the role explain; your token has observe" in run("metrics", *known).stderr
        without_certificate = run("models", *known[:2], "--timeout", 1)  # real timeout: it also ends with exit code 1
        assert (without_certificate.exit_code, without_certificate.stdout) == (1, "")


def test_attributes_of_a_client_show_no_token(guarded, token_file):
    secret = token_file.secrets["all"]
    with camserve.Client(guarded.address, token=secret) as client:
        assert secret not in repr(vars(client))
        assert secret not in repr(client._settings)
