"""Requests of every protocol whose fields are as large as they may be, one field at a time and all at once.

The fields are read from the descriptors, so that new ones are included.
"""

import functools
import io
import struct

import numpy as np
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor as Kind

from camserve.v1 import explain_pb2
from camserve_server.api.codec.sizes import LISTS
from camserve_server.core.limits import Limits
from robustness import fields
from support import jpeg

LIMITS = Limits()
NUMBERS = 30_000  # in a list of numbers without a limit of its own; a message has at most 32,768 fields
LARGE = 7 << 20  # bytes of a field; a message has 8 MiB
SMALL = 200  # bytes of one among many
RPCS = {**fields.RPCS, **fields.INFERENCE}
NUMBERED = {Kind.TYPE_UINT32, Kind.TYPE_INT32, Kind.TYPE_UINT64, Kind.TYPE_INT64}


def _npy():
    file = io.BytesIO()
    np.save(file, np.zeros((1024, 1024, 3), np.uint8))
    return file.getvalue()


def _fill(head, part):
    return (head + part * (LARGE // len(part)))[:LARGE]


JPEG = jpeg(np.zeros((64, 64, 3), np.uint8))
FILES = {
    "zeros": bytes(LARGE),
    "JPEG and 0xff": _fill(JPEG[:2], b"\xff"),
    "JPEG of comments": _fill(JPEG[:2], b"\xff\xfe\0\2"),
    "JPEG of markers": _fill(JPEG[:2], b"\xff\xfe\0\1"),
    "JPEG and zeros": _fill(JPEG[:2], b"\0"),
    "PNG of empty chunks": _fill(b"\x89PNG\r\n\x1a\n", b"\0\0\0\0tEXt\0\0\0\0"),
    "PNG without chunks": _fill(b"\x89PNG\r\n\x1a\n" + b"\0\0\0\rIHDR", b"\0"),
    "WebP of empty chunks": _fill(
        b"RIFF" + struct.pack("<I", LARGE - 8) + b"WEBPVP8X\n\0\0\0" + bytes(10), b"ICCP\0\0\0\0"
    ),
    "TIFF of tags": _fill(b"II*\0\x08\0\0\0\xff\xff", struct.pack("<HHII", 256, 3, 1, 8)),
    "TIFF of pages": _fill(b"II*\0\x08\0\0\0", struct.pack("<HHHIII", 1, 256, 3, 1, 8, 8)),
    "NPY": _npy()[:LARGE],
    "NPY without an end": _fill(b"\x93NUMPY\1\0\xff\xff{", b"'"),
    "BMP": _fill(b"BM" + struct.pack("<IHHIIiiHHI", LARGE, 0, 0, 54, 40, 30_000, 30_000, 1, 24, 0), b"\0"),
    "text": _fill(b"<", b" "),
}


def requests(rpc, *, files=True, variants=10):
    """Yield a label and a request of an RPC: for each field, and for all fields together.

    A field that is part of several requests is in that of the first RPC.

    Args:
        rpc: name of the RPC.
        files: False to leave out fields of bytes.
        variants: requests with all fields, of which each has other alternatives.
    """
    for first, chain in _first_paths().values():
        if first == rpc and (files or chain[-1].type != Kind.TYPE_BYTES):
            yield from _of_field(rpc, chain)
    for variant in range(variants):
        request = message_factory.GetMessageClass(RPCS[rpc].input_type)()
        fill(request, variant)
        yield f"{rpc}, all fields, {variant}", request


@functools.cache
def _first_paths():
    """Return the first RPC of each field, and the path to it there."""
    found = {}
    for rpc, method in RPCS.items():
        for chain in paths(method.input_type):
            found.setdefault(chain[-1].full_name, (rpc, chain))
    return found


def paths(kind, chain=()):
    """Yield the chain of fields to every field of a message and of the messages in it."""
    for field in kind.fields:
        longer = (*chain, field)
        yield longer
        if field.message_type is not None and field.message_type not in [each.message_type for each in chain]:
            yield from paths(field.message_type, longer)


def base(rpc, chain=()):
    """Return a request that is valid apart from one field."""
    if rpc in fields.RPCS:
        return fields.valid_request(fields.FieldPath(rpc, chain or tuple(RPCS[rpc].input_type.fields[:1])))
    request = message_factory.GetMessageClass(RPCS[rpc].input_type)()
    if rpc in {"ModelInfer", "ModelStreamInfer"}:
        request.inputs.add(name="image", datatype="BYTES", shape=[1]).contents.bytes_contents.append(fields.PHOTO)
    return request


def _of_field(rpc, chain):
    name, field = f"{rpc} {'.'.join(each.name for each in chain)}", chain[-1]
    if field.containing_type.GetOptions().map_entry:
        return  # a map is filled as a whole
    if field.type != Kind.TYPE_BYTES:
        request = base(rpc, chain)
        enlarge(parent(request, chain), field)
        yield name, request
        return
    for kind, content in FILES.items():
        request = base(rpc, chain)
        message = parent(request, chain)
        if field.is_repeated:
            del getattr(message, field.name)[:]
            getattr(message, field.name).append(content)
        else:
            setattr(message, field.name, content)
        yield f"{name}: {kind}", request


def parent(request, chain):
    """Return the message that has the last field of the chain, after creating the messages above it."""
    message = request
    for field in chain[:-1]:
        if field.containing_type.GetOptions().map_entry:
            continue  # the message is the value already
        inner = getattr(message, field.name)
        if fields.is_map(field):
            message = inner["k"]
        elif field.is_repeated:
            message = inner[0] if inner else inner.add()
        else:
            message = inner
    return message


def fill(message, variant):
    """Set every field of a message, but only one of each alternative."""
    for field in message.DESCRIPTOR.fields:
        others = field.containing_oneof.fields if field.containing_oneof else [field]
        if others[variant % len(others)] is field or len(others) == 1:
            enlarge(message, field, variant)


def enlarge(message, field, variant=0):
    """Set a field of a message to as much as it may have."""
    count = getattr(LIMITS, LISTS[field.full_name]) if field.full_name in LISTS else NUMBERS
    if fields.is_map(field):
        for number in range(count):
            fill(getattr(message, field.name)[_text(number)], variant)
    elif field.message_type is not None:
        inner = getattr(message, field.name)
        for _ in range(count if field.is_repeated else 1):
            part = inner.add() if field.is_repeated else inner
            part.SetInParent()
            fill(part, variant)
    elif field.is_repeated:
        del getattr(message, field.name)[:]
        getattr(message, field.name).extend(_scalar(field, number) for number in range(count))
    else:
        setattr(message, field.name, _scalar(field, variant))


def _text(number):
    return f"name {number} ".ljust(LIMITS.text, "x")


def _scalar(field, number):
    if field.type == Kind.TYPE_STRING:
        return _text(number)
    if field.type == Kind.TYPE_BYTES:
        return bytes([number % 256]) * SMALL
    if field.type == Kind.TYPE_ENUM:
        return field.enum_type.values[-1].number
    if field.type == Kind.TYPE_BOOL:
        return True
    return number % 4 if field.type in NUMBERED else 0.5


def valid():
    """Yield valid requests to Explain that ask for much: what passes the checks costs more than what does not."""
    everything = explain_pb2.ExplainRequest(image=fields.PHOTO, model="tiny", methods=[{"name": "gradcam"}])
    # The channels of an input are known only when the model runs.
    changed = [{"layer": "1", "channels": range(2000), "input": True, "scale": 0.5}] * LIMITS.interventions
    yield (
        "interventions with many channels",
        explain_pb2.ExplainRequest(image=fields.PHOTO, model="tiny", interventions=changed),
    )
    texts = [_text(number) for number in range(LIMITS.texts)]
    names = [{"label": text} for text in texts[-(LIMITS.against + 1) * LIMITS.targets :]]
    step = LIMITS.against + 1
    targets = [{"finer": {"why": names[at], "against": names[at + 1 : at + step]}} for at in range(0, len(names), step)]
    yield (
        "labels among many texts",
        explain_pb2.ExplainRequest(image=fields.PHOTO, model="named", texts=texts, targets=targets),
    )
    for index in range(LIMITS.targets):
        everything.targets.add(class_index=index % 5)
    everything.rendering.regions.max_regions, everything.rendering.regions.draw = 64, True
    yield "targets with regions", everything
