"""A gRPC proxy that records the messages between a client and a server, and a server that replays them."""

import base64
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
from google.protobuf import descriptor_pool, message_factory
from google.rpc import error_details_pb2, status_pb2

STREAMS = {"/camserve.v1.ExplainService/ExplainStream"}
DETAILS = "grpc-status-details-bin"
IN_PYTHON = {"inference": "open_inference.v2"}
"""Protobuf packages that have another name in Python."""


def text(data):
    return base64.b64encode(data).decode()


def data_of(encoded):
    return base64.b64decode(encoded)


def messages(path):
    """Return the classes of the request and the reply of an RPC."""
    service, _, rpc = path[1:].rpartition("/")
    package, _, name = service.rpartition(".")
    descriptor = descriptor_pool.Default().FindServiceByName(f"{IN_PYTHON.get(package, package)}.{name}")
    method = descriptor.methods_by_name[rpc]
    return tuple(map(message_factory.GetMessageClass, (method.input_type, method.output_type)))


def refusal(error):
    """Return an error as it is recorded."""
    details = dict(error.trailing_metadata() or ()).get(DETAILS, b"")
    return {"code": error.code().name, "message": error.details(), "details": text(details)}


def fields_of(error):
    """Return the fields that an error reports as invalid."""
    fields = {}
    for detail in status_pb2.Status.FromString(data_of(error["details"])).details:
        request = error_details_pb2.BadRequest()
        if detail.Unpack(request):
            fields |= dict.fromkeys((violation.field for violation in request.field_violations), "")
    return fields


def exchange(channel, path, requests, *, streams):
    """Send serialized requests; return the replies or the error as they are recorded."""
    entry = {"rpc": path, "requests": [text(request) for request in requests]}
    try:
        if streams:
            entry["replies"] = [text(reply) for reply in channel.stream_stream(path)(iter(requests), timeout=60)]
        else:
            entry["replies"] = [text(channel.unary_unary(path)(requests[0], timeout=60))]
    except grpc.RpcError as error:
        entry["error"] = refusal(error)
    return entry


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, unary, stream):
        self._unary, self._stream = unary, stream

    def service(self, call):
        path = call.method
        if path in STREAMS:
            return grpc.stream_stream_rpc_method_handler(
                lambda requests, context: self._stream(path, requests, context)
            )
        return grpc.unary_unary_rpc_method_handler(lambda request, context: self._unary(path, request, context))


@contextmanager
def listening(unary, stream):
    """Serve two functions of bytes; yield the address."""
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads, handlers=[_Handler(unary, stream)])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


@contextmanager
def recording(address):
    """Forward all calls to a server; yield the address of the proxy, and the list of what was exchanged."""
    entries = []
    with grpc.insecure_channel(address) as channel:

        def unary(path, request, context):
            entries.append(exchange(channel, path, [request], streams=False))
            return respond(entries[-1], context)

        def stream(path, requests, _context):
            entry = {"rpc": path, "requests": [], "replies": []}
            entries.append(entry)

            def record_requests():
                for request in requests:
                    entry["requests"].append(text(request))
                    yield request

            for reply in channel.stream_stream(path)(record_requests()):
                entry["replies"].append(text(reply))
                yield reply

        with listening(unary, stream) as front:
            yield front, entries


def respond(entry, context):
    """Return the recorded reply, or abort with the recorded error."""
    if error := entry.get("error"):
        context.set_trailing_metadata(((DETAILS, data_of(error["details"])),))
        context.abort(grpc.StatusCode[error["code"]], error["message"])
    return data_of(entry["replies"][0])


class ReplayServer:
    """Server that answers calls with recorded replies in order.

    Attributes:
        address: The server's address.
        entries: The recorded exchanges that are left.
        requests: Pairs of an RPC and its requests, received since `play` was called.
    """

    def __init__(self):
        self.address = ""
        self.entries = []
        self.requests = []

    def play(self, entries):
        self.entries, self.requests = list(entries), []

    def unary(self, path, request, context):
        self.requests.append((path, [request]))
        return respond(self.entries.pop(0), context)

    def stream(self, path, requests, _context):
        """Send the recorded replies to the n-th request when the n-th request comes, under its new id."""
        entry, sent = self.entries.pop(0), []
        self.requests.append((path, sent))
        asked, answers = messages(path)
        names = [asked.FromString(data_of(each)).request_id for each in entry["requests"]]
        replies = [answers.FromString(data_of(each)) for each in entry["replies"]]
        for name, request in zip(names, requests, strict=False):
            sent.append(request)
            for reply in (each for each in replies if each.request_id == name):
                renamed = answers.FromString(reply.SerializeToString())
                renamed.request_id = asked.FromString(request).request_id
                yield renamed.SerializeToString()


@contextmanager
def replaying():
    """Yield a server that replays recorded replies."""
    server = ReplayServer()
    with listening(server.unary, server.stream) as server.address:
        yield server
