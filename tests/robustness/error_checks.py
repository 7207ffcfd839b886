"""Checks of error messages: they help the caller and reveal no internals of the server."""

import re

from google.rpc import code_pb2, error_details_pb2, status_pb2

from camserve_server.api.codec.checks import shorten

MAX_MESSAGE = 512  # bytes

LEAKS = {
    "a path": r"(?<![\w.])(~|\.{1,2})?/[\w.-]|\b[A-Za-z]:\\",
    "a traceback": r"Traceback|\bFile \"|\.py\b|, line \d|\b[A-Za-z]+(Error|Exception|Warning)\b",
    "a module": r"camserve_server|site-packages|<class |<function |<built-in |<module "
    r"|\b(torch|torchvision|timm|numpy|cv2|PIL|asyncio|concurrent|google|grpc\.(_|aio))\.\w",
    "an address in memory": r"\b0x[0-9a-fA-F]{4,}|object at ",
    "an address of a machine": r"\b\d{1,3}(\.\d{1,3}){3}\b|\[::|\blocalhost\b",
}


def leaks(text, sent=()):
    """Return the kinds of internals that a message reveals. It may repeat the texts that the caller sent."""
    for own in sorted(filter(None, sent), key=len, reverse=True):
        text = text.replace(own, "").replace(shorten(own), "")
    kinds = [kind for kind, pattern in LEAKS.items() if re.search(pattern, text)]
    return kinds + [f"more than {MAX_MESSAGE} bytes"] * (len(text.encode()) > MAX_MESSAGE)


def faults(error, sent=()):
    """Return what is wrong with a call's error: leaks in its texts, or trailers without the request's id."""
    trailers, status = dict(error.trailing_metadata() or ()), _status(error)
    wrong = leaks(error.details() or "", sent) + ["no message"] * (not error.details())
    if (status.message, code_pb2.Code.Name(status.code)) != (error.details(), error.code().name):
        wrong.append("the details say something else")
    ids = {info.request_id for info in _details(status, error_details_pb2.RequestInfo)}
    if not trailers.get("x-request-id") or ids != {trailers["x-request-id"]}:
        wrong.append("no request id")
    return wrong + [leak for violation in _violations(status) for leak in leaks(violation.description, sent)]


def client_faults(error, sent=()):
    """Return what is wrong with an error of the Python client."""
    return leaks(error.message, sent) + ["no request id"] * (not error.request_id)


def field_of(error):
    """Return the field that an error names."""
    return next((violation.field for violation in _violations(_status(error))), "")


def _status(error):
    return status_pb2.Status.FromString(dict(error.trailing_metadata() or ()).get("grpc-status-details-bin", b""))


def _details(status, kind):
    messages = [(kind(), detail) for detail in status.details]
    return [message for message, detail in messages if detail.Unpack(message)]


def _violations(status):
    return [violation for bad in _details(status, error_details_pb2.BadRequest) for violation in bad.field_violations]
