"""What a refusal may say: enough for its caller, and nothing of the server's inside."""

import re

from google.rpc import code_pb2, error_details_pb2, status_pb2

from camserve_server.api.codec.checks import shorten

LONGEST = 512  # bytes

TELLING = {
    "a path": r"(?<![\w.])(~|\.{1,2})?/[\w.-]|\b[A-Za-z]:\\",
    "a traceback": r"Traceback|\bFile \"|\.py\b|, line \d|\b[A-Za-z]+(Error|Exception|Warning)\b",
    "a module": r"camserve_server|site-packages|<class |<function |<built-in |<module "
    r"|\b(torch|torchvision|timm|numpy|cv2|PIL|asyncio|concurrent|google|grpc\.(_|aio))\.\w",
    "an address in memory": r"\b0x[0-9a-fA-F]{4,}|object at ",
    "an address of a machine": r"\b\d{1,3}(\.\d{1,3}){3}\b|\[::|\blocalhost\b",
}


def told(text, sent=()):
    """Return what a refusal tells that it should not. What the caller sent may be said back to it."""
    for own in sorted(filter(None, sent), key=len, reverse=True):
        text = text.replace(own, "").replace(shorten(own), "")
    found = [what for what, pattern in TELLING.items() if re.search(pattern, text)]
    return found + [f"more than {LONGEST} bytes"] * (len(text.encode()) > LONGEST)


def faults(error, sent=()):
    """Return what is wrong with the refusal of a call: what it tells, or its request's id is not in the trailers."""
    trailers, status = dict(error.trailing_metadata() or ()), _status(error)
    wrong = told(error.details() or "", sent) + ["no words"] * (not error.details())
    if (status.message, code_pb2.Code.Name(status.code)) != (error.details(), error.code().name):
        wrong.append("the details say something else")
    ids = {one.request_id for one in _details(status, error_details_pb2.RequestInfo)}
    if not trailers.get("x-request-id") or ids != {trailers["x-request-id"]}:
        wrong.append("no request id")
    return wrong + [each for one in _violations(status) for each in told(one.description, sent)]


def of_client(error, sent=()):
    """Return what is wrong with an error of the Python client."""
    return told(error.message, sent) + ["no request id"] * (not error.request_id)


def field_of(error):
    """Return the field that a refusal names."""
    return next((one.field for one in _violations(_status(error))), "")


def _status(error):
    return status_pb2.Status.FromString(dict(error.trailing_metadata() or ()).get("grpc-status-details-bin", b""))


def _details(status, kind):
    found = [(kind(), detail) for detail in status.details]
    return [one for one, detail in found if detail.Unpack(one)]


def _violations(status):
    return [one for bad in _details(status, error_details_pb2.BadRequest) for one in bad.field_violations]
