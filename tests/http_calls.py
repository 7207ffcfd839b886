"""Plain HTTP requests to a server on this machine, by the standard library and by raw sockets."""

import contextlib
import http.client
import json
import re
import socket
from dataclasses import dataclass

from google.protobuf import json_format
from google.protobuf.message import Message

EXPLAIN = "/camserve.v1.ExplainService/Explain"
STREAM = "/camserve.v1.ExplainService/ExplainStream"
LIST = "/camserve.v1.ModelService/ListModels"
JSON = "application/json"


@dataclass
class Response:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)

    def detail(self, kind):
        """Return the only detail of this type of an error, as `debug` has it."""
        (detail,) = [detail for detail in self.json["details"] if detail["type"] == f"google.rpc.{kind}"]
        return detail["debug"]


def body_of(message):
    """Return a message or a dict as JSON, and bytes as they are."""
    if isinstance(message, Message):
        return json_format.MessageToJson(message).encode()
    return message if isinstance(message, bytes) else json.dumps(message).encode()


def request(port, method, path, body=None, **headers):
    """Send a request, and return the response. `content_type` is the header Content-Type."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    with contextlib.closing(connection):
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return Response(response.status, response.headers, response.read())


def post(port, path, message, content_type=JSON, **headers):
    return request(port, "POST", path, body_of(message), content_type=content_type, **headers)


def connect(port):
    return socket.create_connection(("127.0.0.1", port))


def head(path, *lines, method="POST", host="localhost"):
    """Return the head of a request."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", f"Host: {host}", *lines, "", ""]).encode()


def read_all(connection):
    """Return everything that a connection sends until it is closed."""
    received = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            received += part
    return bytes(received)


def exchange(port, *parts):
    """Send bytes over a new connection, and return everything that comes back until the server closes it."""
    with connect(port) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for part in parts:
                connection.sendall(part)
        return read_all(connection)


def statuses(received):
    """Return the statuses of all responses in what a connection received."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]


def lines_of(response):
    return [json.loads(line) for line in response.body.splitlines()]
