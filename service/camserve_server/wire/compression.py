"""Compressed messages: unpacked here and not by gRPC, which would hold the whole of each before we see any of it."""

import zlib

from google.protobuf.message import DecodeError

from camserve_server.errors import ResourceExhausted

_GZIP = b"\x1f\x8b"  # no message of protobuf begins like this: it would be a field of a kind that there is not
_ZLIB = (
    0x78  # the first byte of what gRPC calls deflate; a message could begin so, with field 15, which none of ours has
)
_EITHER = 32 + zlib.MAX_WBITS  # zlib's own number: told by the header


def is_compressed(data: bytes) -> bool:
    """Say whether a message is compressed, by its first bytes: gRPC does not tell us what its header says."""
    return data[:2] == _GZIP or (len(data) > 1 and data[0] == _ZLIB and int.from_bytes(data[:2]) % 31 == 0)


def unpacked(data: bytes, most: int) -> bytes:
    """Unpack a message.

    Args:
        data: that is compressed.
        most: bytes that it may have then.

    Raises:
        ResourceExhausted: it has more.
        DecodeError: it is broken.
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
