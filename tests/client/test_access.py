"""TLS and tokens of the client: tokens are never sent over a network without encryption."""

from __future__ import annotations

import socketserver
import threading
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from click.testing import CliRunner

import camserve
from camserve import cli
from camserve._transport.settings import DEFAULT_TIMEOUT
from robustness.authority import Authority

if TYPE_CHECKING:
    from collections.abc import Iterator

FAR = "why.example:50051"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Write a certificate, its key, the key with a password, another key, and a file that is neither."""
    folder, authority = tmp_path_factory.mktemp("certificates"), Authority()
    pair = authority.issue("me")
    pair.write(folder, "me")
    (folder / "ca.pem").write_bytes(authority.pem)
    (folder / "locked.key").write_bytes(pair.locked())
    (folder / "other.key").write_bytes(authority.issue("other").key)
    (folder / "rubbish").write_bytes(b"\xff\x00")
    return folder


async def test_token_is_sent_with_every_call(connect: Any, server: Any) -> None:
    client = connect(server.address, token="abc", metadata={"x-who": "me"})
    await client.models()
    await client.explain(b"1")
    _ = [result async for result in client.explain_many([b"1"])]

    assert [call.metadata["authorization"] for call in server.calls] == ["Bearer abc"] * 3
    assert {call.metadata["x-who"] for call in server.calls} == {"me"}


@pytest.mark.parametrize(
    "address", ["localhost:1", "127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "unix:/run/camserve", "dns:///localhost:1"]
)
def test_token_is_sent_to_this_machine_without_encryption(connect: Any, address: str) -> None:
    connect(address, token="abc")


@pytest.mark.parametrize(
    "address",
    [
        FAR,
        "10.0.0.1:1",
        "0.0.0.0:1",
        "[::]:1",
        "localhost.example:1",
        "dns:///a:1",
        "127.0.0.1.example:1",
        "ipv4:1.2.3.4:1",
    ],
)
@pytest.mark.parametrize("options", [{"token": "abc"}, {"metadata": {"Authorization": "Bearer abc"}}])
def test_token_is_not_sent_over_a_network_without_encryption(connect: Any, address: str, options: Any) -> None:
    with pytest.raises(camserve.InvalidArgument, match=r"without encryption, .* could read it: pass tls"):
        connect(address, **options)


def test_token_is_sent_anywhere_over_tls(connect: Any, files: Any) -> None:
    connect(FAR, token="abc", tls=True)
    connect(FAR, token="abc", tls=files / "ca.pem")
    connect(FAR, token="abc", credentials=grpc.ssl_channel_credentials())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token": "two words"}, "invalid token"),
        ({"token": "line\n"}, "invalid token"),
        ({"tls": "gone.pem"}, "cannot read gone.pem"),
        ({"tls": "{files}/rubbish"}, "has no certificate in PEM"),
        ({"tls": "{files}/me.key"}, "has no certificate in PEM"),
        ({"tls": True, "client_cert": "{files}/me.pem"}, "client_cert and client_key must be given together"),
        ({"tls": True, "client_key": "{files}/me.key"}, "client_cert and client_key must be given together"),
        ({"client_cert": "{files}/me.pem", "client_key": "{files}/me.key"}, "require TLS: pass tls=True"),
        ({"tls_name": "why.example"}, "require TLS: pass tls=True"),
        (
            {"tls": True, "client_cert": "{files}/me.pem", "client_key": "{files}/other.key"},
            "not a certificate and its unencrypted key",
        ),
        ({"tls": True, "client_cert": "{files}/me.pem", "client_key": "{files}/locked.key"}, "unencrypted key"),
        ({"tls": True, "client_cert": "{files}/me.pem", "client_key": "gone.key"}, "cannot read gone.key"),
    ],
)
def test_invalid_options_are_refused_by_the_constructor(connect: Any, files: Any, options: Any, message: str) -> None:
    formatted = {
        name: value.format(files=files) if isinstance(value, str) else value for name, value in options.items()
    }
    with pytest.raises(camserve.InvalidArgument, match=message) as caught:
        connect(FAR, **formatted)
    assert "two words" not in str(caught.value)


def test_credentials_and_tls_are_exclusive(connect: Any) -> None:
    with pytest.raises(camserve.InvalidArgument, match="pass only one of them"):
        connect(FAR, credentials=grpc.ssl_channel_credentials(), tls=True)


def test_unknown_option_raises_type_error(connect: Any) -> None:
    with pytest.raises(TypeError, match="tsl"):
        connect(FAR, tsl=True)


def test_command_reads_the_token_from_the_environment(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAMSERVE_TOKEN", "abc")
    result = CliRunner().invoke(cli.main, ["models", "--server", server.address])

    assert result.exit_code == 0, result.output
    assert server.calls[0].metadata["authorization"] == "Bearer abc"


def test_flags_of_the_command_become_options_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def client(*arguments: Any, **options: Any) -> None:
        calls.append((arguments, options))
        raise camserve.InvalidArgument("stop here")

    monkeypatch.setattr(camserve, "Client", client)
    for flags, options in {
        (): {},
        ("--tls",): {"tls": True},
        ("--tls", "--ca", "a"): {"tls": "a"},
        ("--ca", "a", "--tls-name", "b", "--client-cert", "c", "--client-key", "d", "--token", "e"): {
            "tls": "a",
            "tls_name": "b",
            "client_cert": "c",
            "client_key": "d",
            "token": "e",
        },
    }.items():
        assert CliRunner().invoke(cli.main, ["health", "--server", FAR, *flags]).exit_code == 2
        assert calls.pop() == ((FAR,), {"timeout": DEFAULT_TIMEOUT, **options})
    for name in ("TLS", "CA", "TLS_NAME", "CLIENT_CERT", "CLIENT_KEY", "TOKEN"):
        monkeypatch.setenv(f"CAMSERVE_{name}", "1")
    CliRunner().invoke(cli.main, ["methods", "--server", FAR])
    assert calls[0][1].keys() == {"timeout", "tls", "tls_name", "client_cert", "client_key", "token"}


def test_unencrypted_token_is_a_one_line_error_of_the_command() -> None:
    result = CliRunner().invoke(cli.main, ["models", "--server", FAR, "--token", "abc"])

    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: the token would be sent to {FAR} without encryption")
    assert result.stderr.count("\n") == 1
    assert "abc" not in result.stderr


class RecordingProxy(socketserver.ThreadingTCPServer):
    """Proxy that records the bytes it receives and closes the connection."""

    daemon_threads = True

    def __init__(self) -> None:
        self.received: list[bytes] = []
        received = self.received

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                received.append(self.request.recv(1 << 16))

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordingProxy]:
    """Set every environment variable for proxies to a recording proxy."""
    with RecordingProxy() as proxy:
        for name in ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy"):
            for variable in (name, name.upper()):
                monkeypatch.setenv(variable, f"http://127.0.0.1:{proxy.server_address[1]}")
        for name in ("no_grpc_proxy", "no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield proxy
        proxy.shutdown()


@pytest.mark.parametrize("prefix", ["", "dns:///", "ipv4:"])
async def test_without_tls_no_request_goes_through_a_proxy(connect: Any, server: Any, proxy: Any, prefix: str) -> None:
    client = connect(prefix + server.address, token="abc", timeout=60)

    assert [model.name for model in await client.models()] == ["tiny", "large"]
    assert proxy.received == []


async def test_over_tls_a_proxy_is_used_and_cannot_read_the_token(connect: Any, proxy: Any) -> None:
    client = connect(FAR, token="secret", tls=True, retries=0)
    with pytest.raises(camserve.Unavailable):
        await client.models()

    assert proxy.received[0].startswith(f"CONNECT {FAR} HTTP/1.1".encode())
    assert not any(b"secret" in data for data in proxy.received)
