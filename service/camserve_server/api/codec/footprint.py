"""Estimate of the memory that a message takes once it is parsed, from its bytes.

A few bytes of protobuf may become a message of a hundred bytes in memory, and gzip packs thousands of bytes into a few.
So the fields are counted before the message is parsed. Fields of bytes or text are skipped, however long they are, and
an ordinary request has a few dozen fields. The estimate therefore takes a few microseconds.
"""

from typing import TypeAlias

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

Shape: TypeAlias = "dict[int, Shape | int]"
"""The fields of a message type that grow when they are parsed, by tag.

The value of a nested message is its shape. The value of a packed list is its bytes in memory for each serialized byte.
"""

ELEMENT = 256  # bytes of memory of a field without its contents, at most; measured: 158 (upb, protobuf 7.36)
COPIES = 2  # copies of the bytes of a field: in the message, and in the value that is read from it, such as the image
GROWTH = (
    2  # a packed list of varints doubles its memory when it grows, and the old memory is only freed with the message
)
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
"""Bytes in memory of a number that may take one byte in a serialized message."""
_VARINT, _DELIMITED = 0, 2
_FIXED = {1: 8, 5: 4}  # sizes of fixed-size numbers in bytes, by their wire type
_MAX_SINGLE_BYTE, _MAX_VARINT_BYTES = 0x7F, 10  # largest varint of one byte; bytes of the longest varint


def shape_of(message_type: Descriptor, shapes: dict[str, Shape] | None = None) -> Shape:
    """Return the shape of a message type.

    Args:
        message_type: descriptor of the message type.
        shapes: shapes by full name, for types that contain themselves; this function adds to it.
    """
    shapes = {} if shapes is None else shapes
    if message_type.full_name not in shapes:
        shape = shapes[message_type.full_name] = {}
        for field in message_type.fields:
            if field.message_type is not None:
                shape[field.number << 3 | _DELIMITED] = shape_of(field.message_type, shapes)
            elif field.is_repeated and field.type in _VARINTS:
                shape[field.number << 3 | _DELIMITED] = GROWTH * _VARINTS[field.type]
    return shapes[message_type.full_name]


def footprint(data: bytes, shape: Shape, max_fields: int) -> int | None:
    """Return an upper bound of the memory, in bytes, that a message takes until it is answered.

    Returns None if the message has more than `max_fields` fields.

    Args:
        data: the serialized message.
        shape: shape of the message's type.
        max_fields: the largest number of fields to count, including those of nested messages.

    Raises:
        DecodeError: the data is not a message.
    """
    try:
        return _count(data, shape, max_fields)
    except IndexError:  # the data ends within a varint
        raise DecodeError from None


def _count(data: bytes, shape: Shape, max_fields: int) -> int | None:
    memory, fields = COPIES * len(data), 0
    parts = [(0, len(data), shape)]  # messages that are not counted yet: start, end and shape
    while parts:
        at, end, shape = parts.pop()
        while at < end:
            fields += 1
            if fields > max_fields:
                return None
            tag, at = data[at], at + 1
            if tag > _MAX_SINGLE_BYTE:
                tag, at = _varint(data, at - 1)
            if tag & 7 != _DELIMITED:
                at = _skip_number(data, at, tag & 7)
                continue
            size, at = _varint(data, at)
            if inner := shape.get(tag):
                memory += _count_inner(inner, at, size, parts)
            at += size
        if at != end:
            raise DecodeError
    return memory + ELEMENT * fields


def _count_inner(inner: "Shape | int", at: int, size: int, parts: list[tuple[int, int, Shape]]) -> int:
    """Return the memory of a packed list, or 0 for a nested message, which is added to the parts to count."""
    if isinstance(inner, int):
        return inner * size
    parts.append((at, at + size, inner))
    return 0


def _skip_number(data: bytes, at: int, wire_type: int) -> int:
    """Return the end of a number that starts at a position."""
    if wire_type == _VARINT:
        return at + 1 if data[at] <= _MAX_SINGLE_BYTE else _varint(data, at)[1]
    if wire_type in _FIXED:
        return at + _FIXED[wire_type]
    raise DecodeError  # a group, which no message here has, or an unknown wire type


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a varint that starts at a position, and its end."""
    number = 0
    for index in range(_MAX_VARINT_BYTES):
        byte = data[at + index]
        number |= (byte & _MAX_SINGLE_BYTE) << 7 * index
        if byte <= _MAX_SINGLE_BYTE:
            return number, at + index + 1
    raise DecodeError
