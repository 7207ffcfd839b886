"""HTTP as users call it: curl, buf, TLS with renewed certificates, several processes, and a server that stays small."""

import base64
import contextlib
import http.client
import json
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

import fork_server
from camserve.web import connect
from http_calls import EXPLAIN, STREAM, head, post, read_all, request
from http_calls import connect as connect_to
from robustness.authority import Authority
from server_process import server_process
from support import PHOTOS, serving, wait_until

ROOT = Path(__file__).parents[2]
SMALL = "small=torchvision:mobilenet_v3_small?weights=none&size=64"
RESNET = "resnet=timm:test_resnet?weights=none&size=64"
FEATURES = "/camserve.v1.ExplainService/ExtractFeatures"
MAX_GROWTH = 6 * 2**20
KEEPS = """
from camserve_server.api.http.protocol import Connection

kept, receive = [], Connection.data_received
Connection.data_received = lambda connection, data: receive(connection, kept.append(data) or data)
"""
IMAGE = base64.b64encode(PHOTOS["chelsea"].read_bytes()).decode()


@pytest.fixture(scope="module")
def url():
    with serving(models=(SMALL,), device="cpu", threads=1, http_address="0") as served:
        yield f"http://127.0.0.1:{served.http_port}"


def curl(*arguments, **options):
    return subprocess.run(["curl", "-sS", *arguments], check=True, capture_output=True, **options).stdout


def test_curl_explains_a_photo(url, tmp_path):
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"image": IMAGE, "topK": 2, "rendering": {"heatmap": True}}))
    reply = json.loads(curl("--json", f"@{body}", url + EXPLAIN))

    assert [len(base64.b64decode(each["heatmap"]["data"])) for each in reply["explanations"]] == [4 * 2 * 2] * 2


def test_curl_gets_an_overlay(url, tmp_path):
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"image": IMAGE}))
    picture = curl("--json", f"@{body}", "-H", "Accept: image/png", url + EXPLAIN)

    assert picture.startswith(b"\x89PNG")


def test_curl_explains_many_photos(url):
    items = [{"requestId": str(number), "request": {"image": IMAGE}} for number in range(4)]
    lines = "".join(json.dumps(item) + "\n" for item in items)
    arguments = ("-H", f"Content-Type: {connect.NDJSON}", "-T", "-", "-X", "POST", "--no-progress-meter")
    replies = [json.loads(line) for line in curl(*arguments, url + STREAM, input=lines.encode()).splitlines()]

    assert sorted(reply["requestId"] for reply in replies) == ["0", "1", "2", "3"]
    assert all(reply["response"]["predictions"] for reply in replies)


def test_components_over_json_are_the_same_again_in_their_basis(url):
    port = int(url.rpartition(":")[2])
    body = {"image": IMAGE, "layer": "features.1", "rank": "CHANNEL_RANK_PCA", "top": 2, "raw": True}
    first = post(port, FEATURES, {**body, "fitImages": [IMAGE], "foreground": True}).json
    again = post(port, FEATURES, {**body, "basis": first["basis"]}).json
    concepts = post(port, FEATURES, {**body, "rank": "CHANNEL_RANK_FACTORS"}).json
    refused = post(port, FEATURES, {**body, "rank": "CHANNEL_RANK_HEADS"})

    assert len(base64.b64decode(first["maps"])) == 4 * 2 * first["gridHeight"] * first["gridWidth"]
    assert (again["maps"], again["basis"]) == (first["maps"], first["basis"])
    assert sum(each["share"] for each in concepts["channels"]) == pytest.approx(1)
    assert (refused.status, refused.json["code"]) == (400, "failed_precondition")


def buf(url, path, message, folder):
    body = folder / "body.json"
    body.write_text(json.dumps(message))
    command = [Path(sys.executable).with_name("buf"), "curl", "--protocol", "connect", "--schema", ROOT / "protos"]
    return subprocess.run([*command, "-d", f"@{body}", url + path], check=False, capture_output=True)


def test_buf_calls_over_the_connect_protocol(url, tmp_path):
    explained = buf(url, EXPLAIN, {"image": IMAGE}, tmp_path)
    refused = buf(url, EXPLAIN, {"image": IMAGE, "model": "none"}, tmp_path)
    error = json.loads(refused.stderr)

    assert json.loads(explained.stdout)["model"] == "small"
    assert refused.returncode
    assert error["code"] == "not_found"
    assert error["details"][1]["debug"]["fieldViolations"][0]["field"] == "model"


# --- TLS ---


@pytest.fixture(scope="module")
def authority():
    return Authority()


def https(port, authority, pair=None):
    """Return a connection that trusts an authority, with a client's certificate."""
    context = ssl.create_default_context(cadata=authority.pem.decode())
    if pair:
        context.load_cert_chain(*pair)
    return http.client.HTTPSConnection("127.0.0.1", port, context=context)


def status(connection, path="/health"):
    connection.request("GET", path)
    response = connection.getresponse()
    response.read()
    return response.status


def test_renewed_certificate_is_used_for_new_connections(authority, tiny, tmp_path):
    cert, key = authority.issue("127.0.0.1").write(tmp_path, "server")
    with serving(models=(tiny,), device="cpu", threads=1, tls_cert=cert, tls_key=key, http_address="0") as served:
        serials = []
        open_before = https(served.http_port, authority)
        for _ in range(2):
            assert status(open_before) == 200
            fresh = https(served.http_port, authority)
            assert status(fresh) == 200
            serials += [each.sock.getpeercert()["serialNumber"] for each in (open_before, fresh)]
            fresh.close()
            authority.issue("127.0.0.1").write(tmp_path, "server")
        open_before.close()

    before, first, still, second = serials
    assert before == first == still != second


def test_certificate_that_does_not_fit_its_key_keeps_the_previous_pair(authority, tiny, tmp_path):
    cert, key = authority.issue("127.0.0.1").write(tmp_path, "server")
    with serving(models=(tiny,), device="cpu", threads=1, tls_cert=cert, tls_key=key, http_address="0") as served:
        Path(cert).write_bytes(authority.issue("127.0.0.1").cert)
        connection = https(served.http_port, authority)

        assert status(connection) == 200
        connection.close()


def test_caller_without_a_certificate_of_the_authority_is_refused(authority, tiny, tmp_path):
    cert, key = authority.issue("127.0.0.1").write(tmp_path, "server")
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    known, unknown = (
        authority.issue("caller").write(tmp_path, "known"),
        Authority().issue("caller").write(tmp_path, "x"),
    )
    tls = {"tls_cert": cert, "tls_key": key, "tls_client_ca": str(tmp_path / "ca.pem")}
    with serving(models=(tiny,), device="cpu", threads=1, http_address="0", **tls) as served:
        allowed = https(served.http_port, authority, known)
        assert status(allowed) == 200
        allowed.close()
        for pair in (None, unknown):
            with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
                status(https(served.http_port, authority, pair))


def test_connection_counts_before_its_handshake(authority, tiny, tmp_path):
    """One that says nothing holds a file of the server like any other."""
    cert, key = authority.issue("127.0.0.1").write(tmp_path, "server")
    options = {"tls_cert": cert, "tls_key": key, "http_address": "0", "max_connections": 3}
    with serving(models=(tiny,), device="cpu", threads=1, **options) as served, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect_to(served.http_port)) for _ in range(3)]
        with pytest.raises((ssl.SSLError, ConnectionError)):
            status(https(served.http_port, authority))
        silent[0].shutdown(socket.SHUT_RDWR)
        wait_until(lambda: answers(served.http_port, authority))


def answers(port, authority):
    """Return True if a new connection is answered."""
    connection = https(port, authority)
    try:
        return status(connection) == 200
    except OSError:
        return False
    finally:
        connection.close()


def test_data_that_arrives_with_the_end_of_a_handshake_is_read(authority, tiny, tmp_path):
    """TLS 1.3 lets a client send its request together with the last message of the handshake."""
    cert, key = authority.issue("127.0.0.1").write(tmp_path, "server")
    with serving(models=(tiny,), device="cpu", threads=1, tls_cert=cert, tls_key=key, http_address="0") as served:
        context, incoming, outgoing = ssl.create_default_context(), ssl.MemoryBIO(), ssl.MemoryBIO()
        context.load_verify_locations(cadata=authority.pem.decode())
        tls = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
        with connect_to(served.http_port) as connection:
            while True:
                try:
                    tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    connection.sendall(outgoing.read())
                    incoming.write(connection.recv(65536))
            tls.write(head("/health", "Connection: close", method="GET"))
            connection.sendall(outgoing.read())  # the end of the handshake, and the request
            incoming.write(read_all(connection))

        assert b"200 OK" in tls.read(65536)


def test_plain_request_to_a_port_with_tls_is_refused(authority, tiny, tmp_path):
    cert, key = authority.issue("127.0.0.1").write(tmp_path, "server")
    with (
        serving(models=(tiny,), device="cpu", threads=1, tls_cert=cert, tls_key=key, http_address="0") as served,
        pytest.raises((ConnectionError, http.client.HTTPException)),
    ):
        request(served.http_port, "GET", "/health")


# --- processes ---


def resident(pid):
    return 1024 * int(Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2].split()[0])


def growth(server, warm, calls):
    """Return the bytes by which the server grows with some calls, after others that fill its caches."""
    sizes = []
    for count in (warm, calls):
        for _ in range(count):
            assert post(server.http_port, EXPLAIN, {"image": IMAGE}, accept="image/jpeg").status == 200
            assert post(server.http_port, EXPLAIN, {"image": IMAGE[:-99]}).status in (200, 400)
        sizes.append(resident(server.pid))
    return sizes[1] - sizes[0]


@pytest.mark.slow
def test_memory_of_the_server_does_not_grow_with_the_calls():
    with server_process((RESNET,), "--threads", "1", "--http-address", "0", forked=True) as server:
        assert growth(server, warm=25, calls=40) < MAX_GROWTH


@pytest.mark.slow
def test_server_that_keeps_what_it_receives_grows_with_the_calls():
    """Control of the check above."""
    flags = ("--threads", "1", "--http-address", "0")
    with server_process((RESNET,), *flags, forked=True, program=KEEPS + fork_server.SERVER) as server:
        assert growth(server, warm=5, calls=20) > MAX_GROWTH
