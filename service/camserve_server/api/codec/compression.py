"""Decompress messages, with a limit on their size: gRPC would decompress all of a message before it can be checked."""

import zlib

from google.protobuf.message import DecodeError

from camserve_server.core.errors import ResourceExhausted

_GZIP = b"\x1f\x8b"  # no protobuf message starts with these bytes, which would be a field of an unknown wire type
_ZLIB = (
    0x78  # first byte of gRPC's "deflate"; in a message it would start field 15 as a varint, which no message here has
)
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS  # flag of zlib: detect the format by the header


def is_compressed(data: bytes) -> bool:
    """Return True if a message is compressed. Its first bytes tell, because gRPC does not expose the header."""
    return data[:2] == _GZIP or (len(data) > 1 and data[0] == _ZLIB and int.from_bytes(data[:2]) % 31 == 0)


def decompress(data: bytes, limit: int) -> bytes:
    """Decompress a message.

    Args:
        data: the compressed message.
        limit: the largest size of the decompressed message, in bytes.

    Raises:
        ResourceExhausted: the decompressed message is larger than the limit.
        DecodeError: the data is corrupt.
    """
    decompressor = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        result = decompressor.decompress(data, limit + 1)
    except zlib.error as error:
        raise DecodeError from error
    if len(result) > limit:
        raise ResourceExhausted(f"the decompressed message is larger than {limit:,} bytes, which is the limit")
    if not decompressor.eof:
        raise DecodeError
    return result
