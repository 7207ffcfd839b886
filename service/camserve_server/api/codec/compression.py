"""Unpack compressed messages here, because gRPC would unpack all of a message before we can check its size."""

import zlib

from google.protobuf.message import DecodeError

from camserve_server.core.errors import ResourceExhausted

_GZIP = b"\x1f\x8b"  # no protobuf message begins with these bytes: they would be a field of an unknown wire type
_ZLIB = 0x78  # first byte of what gRPC calls deflate; in a message it would begin field 15, which none of ours has
_EITHER = 32 + zlib.MAX_WBITS  # zlib's flag for detecting gzip or zlib by the header


def is_compressed(data: bytes) -> bool:
    """Return whether a message is compressed, judged by its first bytes, because gRPC does not expose the header."""
    return data[:2] == _GZIP or (len(data) > 1 and data[0] == _ZLIB and int.from_bytes(data[:2]) % 31 == 0)


def unpacked(data: bytes, most: int) -> bytes:
    """Unpack a message.

    Args:
        data: the compressed message.
        most: the number of bytes that it may have when unpacked.

    Raises:
        ResourceExhausted: it has more.
        DecodeError: the data is corrupt.
    """
    unpacking = zlib.decompressobj(_EITHER)
    try:
        found = unpacking.decompress(data, most + 1)
    except zlib.error as error:
        raise DecodeError from error
    if len(found) > most:
        raise ResourceExhausted(f"the message is larger than {most:,} bytes once it is unpacked, which is the limit")
    if not unpacking.eof:
        raise DecodeError
    return found
