"""TLS and tokens from the caller's side: what is sent, and what is not sent in the clear."""

from __future__ import annotations

import socketserver
import threading
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from click.testing import CliRunner

import camserve
from camserve import cli
from robustness.authority import Authority

if TYPE_CHECKING:
    from collections.abc import Iterator

FAR = "why.example:50051"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Make a certificate, its key, the same key behind a password, the key of another, and what is none."""
    folder, authority = tmp_path_factory.mktemp("certificates"), Authority()
    pair = authority.issue("me")
    pair.write(folder, "me")
    (folder / "ca.pem").write_bytes(authority.pem)
    (folder / "locked.key").write_bytes(pair.locked())
    (folder / "other.key").write_bytes(authority.issue("other").key)
    (folder / "rubbish").write_bytes(b"\xff\x00")
    return folder


async def test_the_token_goes_with_every_call(connect: Any, server: Any) -> None:
    client = connect(server.address, token="abc", metadata={"x-who": "me"})
    await client.models()
    await client.explain(b"1")
    _ = [each async for each in client.explain_many([b"1"])]

    assert [call.metadata["authorization"] for call in server.calls] == ["Bearer abc"] * 3
    assert {call.metadata["x-who"] for call in server.calls} == {"me"}


@pytest.mark.parametrize(
    "address", ["localhost:1", "127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "unix:/run/camserve", "dns:///localhost:1"]
)
def test_a_token_may_go_to_this_machine_in_the_clear(connect: Any, address: str) -> None:
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
@pytest.mark.parametrize("how", [{"token": "abc"}, {"metadata": {"Authorization": "Bearer abc"}}])
def test_a_token_does_not_go_over_a_network_in_the_clear(connect: Any, address: str, how: Any) -> None:
    with pytest.raises(camserve.InvalidArgument, match=r"without encryption, .* could read it: pass tls"):
        connect(address, **how)


def test_a_token_may_go_anywhere_over_tls(connect: Any, files: Any) -> None:
    connect(FAR, token="abc", tls=True)
    connect(FAR, token="abc", tls=files / "ca.pem")
    connect(FAR, token="abc", credentials=grpc.ssl_channel_credentials())


@pytest.mark.parametrize(
    ("how", "words"),
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
def test_what_is_wrong_is_said_before_anything_is_sent(connect: Any, files: Any, how: Any, words: str) -> None:
    given = {name: each.format(files=files) if isinstance(each, str) else each for name, each in how.items()}
    with pytest.raises(camserve.InvalidArgument, match=words) as caught:
        connect(FAR, **given)
    assert "two words" not in str(caught.value)


def test_credentials_are_given_once(connect: Any) -> None:
    with pytest.raises(camserve.InvalidArgument, match="pass only one of them"):
        connect(FAR, credentials=grpc.ssl_channel_credentials(), tls=True)


def test_an_option_that_there_is_not_is_an_error_of_python(connect: Any) -> None:
    with pytest.raises(TypeError, match="tsl"):
        connect(FAR, tsl=True)


def test_the_command_takes_the_token_from_the_environment(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAMSERVE_TOKEN", "abc")
    done = CliRunner().invoke(cli.main, ["models", "--server", server.address])

    assert done.exit_code == 0, done.output
    assert server.calls[0].metadata["authorization"] == "Bearer abc"


def test_the_commands_flags_become_those_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def client(*where: Any, **how: Any) -> None:
        seen.append((where, how))
        raise camserve.InvalidArgument("far enough")

    monkeypatch.setattr(camserve, "Client", client)
    for flags, how in {
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
        assert seen.pop() == ((FAR,), {"timeout": 30.0, **how})
    for name in ("TLS", "CA", "TLS_NAME", "CLIENT_CERT", "CLIENT_KEY", "TOKEN"):
        monkeypatch.setenv(f"CAMSERVE_{name}", "1")
    CliRunner().invoke(cli.main, ["methods", "--server", FAR])
    assert seen[0][1].keys() == {"timeout", "tls", "tls_name", "client_cert", "client_key", "token"}


def test_a_token_in_the_clear_is_one_line_of_the_command() -> None:
    done = CliRunner().invoke(cli.main, ["models", "--server", FAR, "--token", "abc"])

    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: the token would be sent to {FAR} without encryption")
    assert done.stderr.count("\n") == 1
    assert "abc" not in done.stderr


class _Proxy(socketserver.ThreadingTCPServer):
    """A proxy that records what it receives, and closes the connection."""

    daemon_threads = True

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        heard = self.heard

        class Keep(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                heard.append(self.request.recv(1 << 16))

        super().__init__(("127.0.0.1", 0), Keep)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Proxy]:
    """Name a proxy in every environment variable for one."""
    with _Proxy() as proxy:
        for name in ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy"):
            for variable in (name, name.upper()):
                monkeypatch.setenv(variable, f"http://127.0.0.1:{proxy.server_address[1]}")
        for name in ("no_grpc_proxy", "no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield proxy
        proxy.shutdown()


@pytest.mark.parametrize("prefix", ["", "dns:///", "ipv4:"])
async def test_without_tls_no_request_goes_through_a_proxy(connect: Any, server: Any, proxy: Any, prefix: str) -> None:
    client = connect(prefix + server.address, token="abc", timeout=10)

    assert [model.name for model in await client.models()] == ["tiny", "large"]
    assert proxy.heard == []


async def test_over_tls_a_proxy_is_used_and_cannot_read_the_token(connect: Any, proxy: Any) -> None:
    client = connect(FAR, token="secret", tls=True, retries=0)
    with pytest.raises(camserve.Unavailable):
        await client.models()

    assert proxy.heard[0].startswith(f"CONNECT {FAR} HTTP/1.1".encode())
    assert not any(b"secret" in each for each in proxy.heard)
