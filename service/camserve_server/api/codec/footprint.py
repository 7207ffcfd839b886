"""Estimate the memory that a message takes once it is parsed, from its bytes, before it is parsed.

A few bytes of protobuf may become a message of a hundred bytes in memory, and gzip packs thousands of bytes into a few.
So the fields are counted first. A field of bytes or text is skipped, however long it is, and the rest of an ordinary
request is a few dozen fields, so the estimate takes a few microseconds.
"""

from typing import TypeAlias

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

Shape: TypeAlias = "dict[int, Shape | int]"
"""The fields of a message that grow when they are parsed: by tag, the shape of a message, or bytes for each byte."""

ELEMENT = 256  # bytes of memory that a field takes at most, besides its contents; measured: 158 (upb, protobuf 7.36)
COPIES = 2  # copies of a field's bytes: in the message, and where it is read, for example the image
GROWTH = 2  # a packed list of varints grows by doubling, in memory that is only released with the message
_VARINTS = {
    FieldDescriptor.TYPE_INT32: 4,
    FieldDescriptor.TYPE_INT64: 8,
    FieldDescriptor.TYPE_UINT32: 4,
    FieldDescriptor.TYPE_UINT64: 8,
    FieldDescriptor.TYPE_SINT32: 4,
    FieldDescriptor.TYPE_SINT64: 8,
    FieldDescriptor.TYPE_ENUM: 4,
    FieldDescriptor.TYPE_BOOL: 1,
}
"""Bytes in memory of a number that takes one byte in a message."""
_VARINT, _DELIMITED = 0, 2
_FIXED = {1: 8, 5: 4}  # bytes of numbers, by their wire type
_ONE_BYTE, _LONGEST = 0x7F, 10  # the greatest varint of one byte; bytes of the longest


def shape_of(kind: Descriptor, known: dict[str, Shape] | None = None) -> Shape:
    """Return the shape of a kind of message.

    Args:
        kind: of the message.
        known: the shapes made so far, because a kind of message may contain itself.
    """
    known = {} if known is None else known
    if kind.full_name not in known:
        shape = known[kind.full_name] = {}
        for field in kind.fields:
            if field.message_type is not None:
                shape[field.number << 3 | _DELIMITED] = shape_of(field.message_type, known)
            elif field.is_repeated and field.type in _VARINTS:
                shape[field.number << 3 | _DELIMITED] = GROWTH * _VARINTS[field.type]
    return known[kind.full_name]


def footprint(data: bytes, shape: Shape, most: int) -> int | None:
    """Return an upper bound of the memory, in bytes, that a message itself takes until it is answered.

    Returns None if the message has more than `most` fields.

    Args:
        data: the message.
        shape: the shape of its kind.
        most: how many fields are counted, including those of nested messages.

    Raises:
        DecodeError: the data is not a message.
    """
    try:
        return _counted(data, shape, most)
    except IndexError:  # it ends within a varint
        raise DecodeError from None


def _counted(data: bytes, shape: Shape, most: int) -> int | None:
    memory, fields = COPIES * len(data), 0
    parts = [(0, len(data), shape)]  # in any order: the parts are independent
    while parts:
        at, end, shape = parts.pop()
        while at < end:
            fields += 1
            if fields > most:
                return None
            tag, at = data[at], at + 1
            if tag > _ONE_BYTE:
                tag, at = _varint(data, at - 1)
            if tag & 7 != _DELIMITED:
                at = _skipped(data, at, tag & 7)
                continue
            size, at = _varint(data, at)
            if inner := shape.get(tag):
                memory += _inside(inner, at, size, parts)
            at += size
        if at != end:
            raise DecodeError
    return memory + ELEMENT * fields


def _inside(inner: "Shape | int", at: int, size: int, parts: list[tuple[int, int, Shape]]) -> int:
    """Return the memory of a packed list; add a message to the parts that are still to be counted."""
    if isinstance(inner, int):
        return inner * size
    parts.append((at, at + size, inner))
    return 0


def _skipped(data: bytes, at: int, kind: int) -> int:
    """Return where a number that begins here ends."""
    if kind == _VARINT:
        return at + 1 if data[at] <= _ONE_BYTE else _varint(data, at)[1]
    if kind in _FIXED:
        return at + _FIXED[kind]
    raise DecodeError  # a group, which none of our messages has, or an unknown wire type


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number and where it ends."""
    number = 0
    for place in range(_LONGEST):
        byte = data[at + place]
        number |= (byte & _ONE_BYTE) << 7 * place
        if byte <= _ONE_BYTE:
            return number, at + place + 1
    raise DecodeError
