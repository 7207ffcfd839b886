"""The local proxy of the page: it serves the page below a key, and forwards calls with the token."""

import gzip
import json
import re
import signal
import stat
import sys
import threading
import webbrowser
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest

import camserve
import fork_server
from api.running_server import item, request, write_nets
from camserve.v1 import explain_pb2
from camserve.web import assets, browser, connect, proxy
from camserve_server.api import auth, tokens
from http_calls import EXPLAIN, LIST, STREAM, body_of, exchange, head, lines_of, post, statuses
from http_calls import connect as connect_to
from http_calls import request as send
from support import rows_waiting, serving, wait_until


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nets")
    with pytest.MonkeyPatch.context() as patch:
        spec = write_nets(folder)
        patch.syspath_prepend(folder)
        patch.delitem(sys.modules, "camserve_nets", raising=False)
        yield spec
        sys.modules.pop("camserve_nets", None)


@contextmanager
def page_of(address, **access):
    """Serve the page for a server, in a thread."""
    with camserve.Client(address, **access) as client, proxy.PageServer(client, 0) as page:
        thread = threading.Thread(target=page.serve_forever, args=(0.01,))
        thread.start()
        yield page
        page.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def served(model):
    with serving(models=(model,), device="cpu", threads=1, http_address="0") as server:
        yield server


@pytest.fixture(scope="module")
def page(served):
    with page_of(served.address) as page:
        yield page


def below(page, path):
    return f"/{page.key}{path}"


def test_page_and_its_files_are_below_the_key(page):
    for path, asset in assets.load().items():
        response = send(page.server_port, "GET", below(page, f"/{path}"))
        assert (response.status, response.body, response.headers["content-type"]) == (
            200,
            asset.body,
            asset.content_type,
        )
        compressed = send(page.server_port, "GET", below(page, f"/{path}"), accept_encoding="gzip")
        assert asset.body in (compressed.body, gzip.decompress(compressed.body) if asset.compressed else b"")
        unchanged = send(page.server_port, "GET", below(page, f"/{path}"), if_none_match=response.headers["etag"])
        assert unchanged.status == 304
        assert connect.SECURITY_HEADERS.items() <= {k.lower(): v for k, v in response.headers.items()}.items()


def test_health_of_the_server_is_below_the_key(page):
    response = send(page.server_port, "GET", below(page, "/health"))

    assert (response.status, response.json) == (200, {"status": "SERVING"})


@pytest.mark.parametrize("prefix", ["", "/", "/x", "//"])
def test_request_without_the_key_is_not_found(prefix, page):
    assert send(page.server_port, "GET", f"{prefix}/").status == 404
    assert post(page.server_port, prefix + LIST, {}).status == 404


def test_request_for_another_host_or_from_another_origin_is_not_found(page):
    path = below(page, LIST)
    for name in ("evil.example.com", f"evil.example.com:{page.server_port}", "localhost"):
        lines = ("Content-Type: application/json", "Content-Length: 2", "Connection: close")
        assert statuses(exchange(page.server_port, head(path, *lines, host=name) + b"{}")) == [404]
    assert post(page.server_port, path, {}, origin="http://evil.example.com").status == 404
    assert post(page.server_port, path, {}, origin=f"http://127.0.0.1:{page.server_port}").status == 200


def test_forwarded_reply_equals_that_of_the_server(page, served):
    message = request(rendering=explain_pb2.Rendering(heatmap=True, overlay=explain_pb2.IMAGE_FORMAT_PNG))
    replies = [
        post(port, path, message, x_request_id="same").json
        for port, path in ((page.server_port, below(page, EXPLAIN)), (served.http_port, EXPLAIN))
    ]
    for reply in replies:
        del reply["timing"]

    assert replies[0] == replies[1]


@pytest.mark.parametrize("message", [{}, {"image": "AAAA"}, {"model": "none"}])
def test_forwarded_error_equals_that_of_the_server(message, page, served):
    forwarded = post(page.server_port, below(page, EXPLAIN), message, x_request_id="same")
    direct = post(served.http_port, EXPLAIN, message, x_request_id="same")

    assert (forwarded.status, forwarded.json) == (direct.status, direct.json)


def test_malformed_json_and_unknown_paths_are_refused(page):
    assert post(page.server_port, below(page, EXPLAIN), b"{").json["code"] == "invalid_argument"
    assert post(page.server_port, below(page, "/camserve.v1.ExplainService/Nothing"), {}).status == 404
    assert post(page.server_port, below(page, "/grpc.health.v1.Health/Check"), {}).status == 404
    too_long = head(below(page, LIST), "Content-Length: 999999999", host=f"127.0.0.1:{page.server_port}")
    assert statuses(exchange(page.server_port, too_long)) == [413]


def test_stream_is_forwarded_with_its_progress(page):
    message = item("a", progress=True, methods=[explain_pb2.Method(name="smoothgrad")])
    line = json.dumps(json.loads(body_of(message))).encode()
    replies = lines_of(post(page.server_port, below(page, STREAM), line + b"\n\n" + line, connect.NDJSON))

    assert sum("response" in reply for reply in replies) == 2
    assert any("progress" in reply for reply in replies)


@pytest.mark.parametrize("path", [EXPLAIN, STREAM])
def test_call_is_cancelled_when_the_browser_hangs_up(path, page, served):
    body = body_of(request() if path == EXPLAIN else item("a")).replace(b"\n", b"")
    served.do(served.pipeline.batcher.pause)
    with connect_to(page.server_port) as connection:
        lines = ("Content-Type: application/json", f"Content-Length: {len(body)}")
        connection.sendall(head(below(page, path), *lines, host=f"127.0.0.1:{page.server_port}") + body)
        wait_until(lambda: rows_waiting(served) == 1)
    wait_until(lambda: rows_waiting(served) == 0)
    served.do(served.pipeline.batcher.resume)


def test_token_is_added_to_the_calls(model, tmp_path, monkeypatch):
    monkeypatch.setattr(auth, "RECHECK_INTERVAL", 0.0)
    secret, token = tokens.new("someone", ("explain",))
    path = tmp_path / "tokens"
    path.write_text(token.line())
    stream = body_of(item("a")).replace(b"\n", b"")
    with (
        serving(models=(model,), device="cpu", threads=1, tokens_file=str(path)) as served,
        page_of(served.address, token=secret) as page,
    ):
        allowed = post(page.server_port, below(page, EXPLAIN), request(), authorization="Bearer other")
        forbidden = post(page.server_port, below(page, LIST), {})
        path.write_text("")
        revoked = post(page.server_port, below(page, STREAM), stream, connect.NDJSON)

    assert (allowed.status, forbidden.status) == (200, 403)
    assert revoked.json["code"] == "unauthenticated"


def test_server_that_does_not_answer_is_unavailable():
    with page_of("127.0.0.1:1", retries=0, timeout=60) as page:
        response = post(page.server_port, below(page, LIST), {}, connect_timeout_ms="60000")
        health = send(page.server_port, "GET", below(page, "/health"))

    assert (response.status, response.json["code"]) == (503, "unavailable")
    assert health.status == 503


def test_command_serves_the_page_until_ctrl_c(served, tmp_path):
    # A shell that starts a program in the background makes it ignore Ctrl-C, and its children do too.
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from camserve.cli import main; main()"
    )
    out = tmp_path / "out"
    with out.open("w") as file:
        process = fork_server.start(program, "ui", "--no-browser", "--server", served.address, stdout=file)
    with process:
        url = wait_until(lambda: re.search(r"http://127\.0\.0\.1:(\d+)(/\S+)\n", out.read_text()))
        page = send(int(url[1]), "GET", url[2])
        process.send_signal(signal.SIGINT)

    assert page.body == assets.load()[""].body
    assert process.returncode == 0


def test_browser_is_opened_by_a_file_of_the_user_without_the_key(monkeypatch, served, tmp_path):
    opened = []

    def open_browser(address):
        file = Path(url2pathname(urlsplit(address).path))
        opened.append((address, file, stat.S_IMODE(file.parent.stat().st_mode), file.read_text()))

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(webbrowser, "open", open_browser)
    with camserve.Client(served.address) as client, proxy.PageServer(client, 0) as page:
        opening = threading.Thread(target=browser._open_browser, args=(page,))
        opening.start()
        wait_until(lambda: opened)
        serving_page = threading.Thread(target=page.serve_forever, args=(0.01,))
        serving_page.start()
        address, file, mode, text = opened[0]
        found = send(page.server_port, "GET", re.search(r"url=http://127\.0\.0\.1:\d+(/[^\"]+)\"", text)[1])
        opening.join()
        page.shutdown()
        serving_page.join()

    assert (page.key in address, mode, found.status) == (False, 0o700, 200)
    assert file.is_relative_to(tmp_path)
    assert not file.parent.exists()


def test_browser_is_opened_unless_it_is_not_wanted(monkeypatch, served):
    opened = []
    monkeypatch.setattr(browser, "_open_browser", opened.append)
    monkeypatch.setattr(proxy.PageServer, "serve_forever", lambda _self: wait_until(lambda: opened))
    with camserve.Client(served.address) as client:
        for wanted in (True, False):
            browser.run(client, 0, open_browser=wanted)

    assert len(opened) == 1
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/key-[\w-]{43}/", opened[0].url)
