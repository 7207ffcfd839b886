"""Checks of hosts and origins, the headers of every response, and the files of the page."""

import gzip

import pytest

from camserve.web import assets, connect
from camserve_server.api.hosts import Hosts
from http_calls import EXPLAIN, LIST, exchange, head, post, request, statuses

ORIGINS = ("https://camserve.example.com", "http://notebook:8888")


@pytest.fixture(scope="module")
def configured(serve):
    """Port of a server with two other origins."""
    with serve(http_origins=ORIGINS) as server:
        yield server.http_port


@pytest.mark.parametrize(
    ("host", "local", "anywhere"),
    [
        ("localhost:8000", True, True),
        ("LOCALHOST", True, True),
        ("127.0.0.1:8000", True, True),
        ("127.8.8.8", True, True),
        ("[::1]:8000", True, True),
        ("192.168.0.7:8000", False, True),
        ("[fe80::1]:80", False, True),
        ("camserve:8000", False, True),
        ("camserve.example.com", True, True),
        ("evil.example.com:8000", False, False),
        ("localhost.evil.example.com", False, False),
        ("127.0.0.1.evil.example.com", False, False),
        ("", False, False),
        (":8000", False, False),
    ],
)
def test_names_of_the_server(host, local, anywhere):
    """Names that a page of somebody else could have (DNS rebinding) are refused."""
    origins = ("https://camserve.example.com",)

    assert Hosts("127.0.0.1:8000", origins, tls=False).allow(host) is local
    assert Hosts("0.0.0.0:8000", origins, tls=False).allow(host) is anywhere
    assert Hosts("0.0.0.0:8000", origins, tls=True).allow(host)


def test_request_for_another_host_is_refused(port):
    for path in ("/", EXPLAIN, "/health", "/openapi.json"):
        received = exchange(port, head(path, "Content-Length: 0", method="GET", host="evil.example.com"))
        assert statuses(received) == [403]
        assert b"see http_origins" in received


@pytest.mark.parametrize("origin", ["http://evil.example.com", "null", "http://localhost:1", "https://notebook:8888"])
def test_request_from_another_origin_is_refused(origin, configured):
    assert post(configured, LIST, {}, origin=origin).status == 403
    assert request(configured, "OPTIONS", LIST, origin=origin).status == 403
    assert request(configured, "GET", "/", origin=origin).status == 403


@pytest.mark.parametrize("before", ["evil.", "evil", "evil:1@"])
def test_origin_that_only_ends_like_the_host_is_refused(before, port):
    assert post(port, LIST, {}, origin=f"http://{before}127.0.0.1:{port}").status == 403


def test_request_of_the_servers_own_page_is_answered(port):
    response = post(port, LIST, {}, origin=f"http://127.0.0.1:{port}")

    assert response.status == 200
    assert not [name for name in response.headers if name.lower().startswith("access-control")]


@pytest.mark.parametrize("origin", ORIGINS)
def test_configured_origin_may_call(origin, configured):
    asked = request(
        configured, "OPTIONS", LIST, origin=origin,
        access_control_request_method="POST", access_control_request_headers="content-type,authorization",
    )  # fmt: skip
    response = post(configured, LIST, {}, origin=origin)

    assert asked.status == 204
    assert asked.headers["access-control-allow-origin"] == response.headers["access-control-allow-origin"] == origin
    assert {"content-type", "authorization"} <= set(asked.headers["access-control-allow-headers"].split(", "))
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert (response.status, response.headers["vary"].lower()) == (200, "origin")
    assert "access-control-allow-credentials" not in response.headers


def test_host_of_a_configured_origin_is_a_name_of_the_server(configured):
    received = exchange(configured, head("/health", "Connection: close", method="GET", host="camserve.example.com"))

    assert statuses(received) == [200]


def test_every_response_has_the_security_headers(port):
    responses = [
        request(port, "GET", "/"),
        request(port, "GET", "/nothing"),
        request(port, "GET", "/health"),
        request(port, "DELETE", EXPLAIN),
        post(port, EXPLAIN, {}),
        post(port, LIST, {}),
        post(port, LIST, {}, origin="http://evil.example.com"),
    ]
    for response in responses:
        assert (
            connect.SECURITY_HEADERS.items() <= {key.lower(): value for key, value in response.headers.items()}.items()
        )
        assert "server" not in response.headers
        assert response.headers["date"]
    received = exchange(port, b"nonsense\r\n\r\n")
    assert statuses(received) == [400]
    assert all(f"{name}: {value}".encode() in received for name, value in connect.SECURITY_HEADERS.items())


def test_page_is_served_with_its_files(port):
    files = assets.load()
    for path, asset in files.items():
        response = request(port, "GET", f"/{path}")
        assert (response.status, response.body) == (200, asset.body)
        assert response.headers["content-type"] == asset.content_type
        unchanged = request(port, "GET", f"/{path}", if_none_match=response.headers["etag"])
        assert (unchanged.status, unchanged.body) == (304, b"")
        assert request(port, "HEAD", f"/{path}").body == b""
        compressed = request(port, "GET", f"/{path}", accept_encoding="br, gzip")
        is_text = not asset.content_type.endswith("webp")
        assert ("content-encoding" in compressed.headers, "vary" in response.headers) == (is_text, is_text)
        assert (gzip.decompress(compressed.body) if is_text else compressed.body) == asset.body

    assert files[""].body == files["index.html"].body
    assert {asset.content_type for asset in files.values()} >= {"text/html; charset=utf-8", "text/css; charset=utf-8"}
