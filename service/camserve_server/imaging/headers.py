"""Check files of unknown origin by their headers, before a decoder reads them: format, size, memory and metadata."""

import itertools
import re
import struct
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from camserve_server.core.arrays import Photo
from camserve_server.core.errors import InvalidArgument
from camserve_server.core.limits import Limits
from camserve_server.imaging import channels as raw

Size = tuple[int, int]
"""Height and width."""

_OTHER_FORMATS = (
    (0, b"GIF8", "a GIF"),
    (0, b"II+\0", "a BigTIFF, which is for files above 4 GB: save a TIFF"),
    (0, b"MM\0+", "a BigTIFF, which is for files above 4 GB: save a TIFF"),
    (0, b"%PDF", "a PDF"),
    (0, b"PK\3\4", "a ZIP archive"),
    (0, b"\0\0\0\x0cjP", "a JPEG 2000"),
    (4, b"ftypavi", "an AVIF"),
    (4, b"ftyphei", "a HEIC"),
    (4, b"ftypmif1", "a HEIC"),
    (4, b"ftyp", "a video"),
    (0, b"<svg", "an SVG"),
    (0, b"<?xml", "XML"),
    (0, b"<", "a web page"),
    (0, b"data:", "a data URL: send the bytes themselves"),
    (0, b"/9j/", "base64: send the bytes themselves"),
    (0, b"iVBOR", "base64: send the bytes themselves"),
    (128, b"DICM", "a DICOM file: send its pixels as an array"),
)

_MARKER = re.compile(rb"\xff([^\x00\x01\xd0-\xd8\xff])")
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_BASELINE, _SCAN, _END = 0xC0, 0xDA, 0xD9
# Decoding a scan takes a pass over the whole picture, even if it has a few bytes: 40 ms at 16 megapixels. Encoders
# write at most about 20. Smaller pictures may have more, if these take no longer than 20 of the largest picture.
_USUAL_SCANS, _MAX_SCANS = 20, 64
_MAX_SEGMENTS = 4096
_MAX_FILL = 1 << 16  # bytes between the segments before a JPEG's frame; searching them takes a millisecond

# The chunks of a PNG that make its picture. The others hold animation, texts and profiles, which libpng would inflate
# although nothing uses them.
_PICTURE_CHUNKS = frozenset((b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND", b"eXIf"))
_SINGLE_CHUNKS = frozenset((b"tRNS", b"eXIf"))  # libpng ignores further ones, and prints a warning for each
_MAX_CHUNKS = 1 << 16
# Each of 65,535 EXIF entries may refer to the whole block as its text, and OpenCV copies every one. In a JPEG the block
# cannot be larger.
_MAX_EXIF = 1 << 16  # bytes
_CHANNELS: Mapping[int, int] = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by PNG colour type
COLOURS: Mapping[int, str] = {0: "grey", 2: "RGB", 3: "palette", 4: "grey and alpha", 6: "RGB and alpha"}
GREY = 0
DEEP = 16  # bits of each value
MASK_DEPTH = 8  # bits; of 16 bits OpenCV would keep the upper 8, which are 0 in the masks of some programs
_MAX_DEFLATE_RATIO = 1032
_SLICE = 1 << 15  # bytes to inflate at a time

_RGB_BYTES = 3  # of a pixel
_FLOAT_BYTES = 4 * _RGB_BYTES
_GREY_BYTES = 8  # of a pixel that Pillow makes grey: RGB, Pillow's own four bytes, and the result
_STILL_BYTES, _ANIMATED_BYTES = 7, 11  # of a pixel of a WebP
_ANIMATION = 2  # flag


def pixels_of(data: bytes, limits: Limits) -> int:
    """Return the number of pixels of a file, from its header.

    Raises:
        InvalidArgument: the file is empty, of another format, larger than `limits`, or its header is broken.
    """
    _, (height, width) = check_file(data, limits)
    return height * width


def memory_to_decode(data: bytes, limits: Limits, channels: int = raw.RGB, *, as_float: bool = False) -> int:
    """Return the bytes of memory to decode a file, and then to make a model's input or a picture, from its header.

    It is 0 if the file is refused by its header. Unlike `pixels_of` this reads nothing after the header, so the event
    loop may call it with any file.

    Args:
        data: the file.
        limits: limits on one request.
        channels: the number of channels of the model's input.
        as_float: True if a range of values is asked for: then 16 bits of a PNG are kept, and all values become float32
            before they are resized.
    """
    try:
        kind = _kind(data)
        size: Size = struct.unpack_from(">II", data, 16) if kind == "PNG" else _SIZES[kind](data)
        _check_size(size, limits)
        if kind in RAW:
            return raw.memory_to_read(kind, data, channels, raw.RGB * limits.pixels, as_float=as_float)
        held = _RGB_BYTES * (1 + (as_float and kind == "PNG" and data[24] == DEEP))
        each = max(
            2 * held,  # OpenCV decodes into an array of its own, and copies that.
            _MEMORY[kind](data) if kind in _MEMORY else 0,
            held + as_float * _FLOAT_BYTES,
            _GREY_BYTES * (channels == 1),
        )
        return max(0, size[0] * size[1]) * each
    except (InvalidArgument, struct.error, IndexError, KeyError, ValueError):
        return 0


def _memory_of_jpeg(data: bytes) -> int:
    """Return the bytes of a pixel while libjpeg decodes a file.

    It holds all coefficients, of two bytes each, if the first scan does not complete the picture.
    """
    marker = components = 0
    for code, at in itertools.islice(_segments(data, _MAX_FILL), _MAX_SEGMENTS):
        if code in _FRAMES:
            marker, components = code, data[at + 7]
        if code == _SCAN:
            if marker == _BASELINE and data[at + 2] == components:
                return _RGB_BYTES
            break
    return _RGB_BYTES + 2 * components


def _memory_of_webp(data: bytes) -> int:
    """Return the bytes of a pixel while a file is decoded; libwebp draws each frame of an animation on a canvas."""
    return _ANIMATED_BYTES if data[12:16] == b"VP8X" and data[20] & _ANIMATION else _STILL_BYTES


def check_file(data: bytes, limits: Limits) -> tuple[str, Size]:
    """Return a file's format and size; raise InvalidArgument if it is not accepted."""
    kind = _kind(data)
    size = _size(kind, data)
    _check_size(size, limits)
    if kind == "JPEG":
        _check_scans(data, min(_MAX_SCANS, _USUAL_SCANS * limits.pixels // (size[0] * size[1])))
    _check_exif(kind, data)
    return kind, size


def _kind(data: bytes) -> str:
    if not data:
        raise InvalidArgument("the image is empty", field="image")
    # OpenCV would try to decode AVIF because of these bytes, whatever the four before them are.
    if data[4:8] != b"ftyp":
        for kind, magic in _MAGIC.items():
            if magic.match(data):
                return kind
    likely = next((name for at, start, name in _OTHER_FORMATS if data.startswith(start, at)), "")
    raise InvalidArgument(
        "not a JPEG, PNG, WebP, BMP, TIFF or NPY file" + (f": it starts like {likely}" if likely else ""),
        field="image",
    )


def broken_file(kind: str) -> InvalidArgument:
    """Return the error of a file that cannot be decoded."""
    return InvalidArgument(f"the {kind} file is truncated or broken", field="image")


def _size(kind: str, data: bytes) -> Size:
    try:
        height, width = _SIZES[kind](data)
    except (struct.error, IndexError, KeyError, ValueError):
        raise broken_file(kind) from None
    if height < 1 or width < 1:
        raise broken_file(kind)
    return height, width


def _check_size(size: Size, limits: Limits) -> None:
    height, width = size
    if max(size) > limits.side:
        at_most = f"{limits.side:,} on a side"
    elif height * width > limits.pixels:
        at_most = f"{limits.pixels:,} in all"
    else:
        return
    raise InvalidArgument(f"the image has {width:,} x {height:,} pixels: {at_most} are accepted", field="image")


def _check_exif(kind: str, data: bytes) -> None:
    if kind not in _EXIF:
        return
    try:
        total = sum(_EXIF[kind](data))
    except (struct.error, ValueError):
        raise broken_file(kind) from None
    if total > _MAX_EXIF:
        raise InvalidArgument(f"more than {_MAX_EXIF:,} bytes of EXIF in a {kind} file are not accepted", field="image")


def _png_exif(data: bytes) -> Iterator[int]:
    return (stop - start - 12 for kind, start, stop in _chunks(data) if kind == b"eXIf")


def _webp_exif(data: bytes) -> Iterator[int]:
    at = 12
    for _ in range(_MAX_CHUNKS):
        if at + 8 > len(data):
            return
        kind, length = struct.unpack_from("<4sI", data, at)
        if kind == b"EXIF":
            yield length
        at += 8 + length + length % 2
    raise ValueError


def _png_size(data: bytes) -> Size:
    kinds = [kind for kind, _, _ in itertools.islice(_chunks(data), _MAX_CHUNKS)]
    if kinds[0] != b"IHDR" or kinds[-1] != b"IEND":
        raise ValueError
    width, height = struct.unpack_from(">II", data, 16)
    return height, width


def _chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield kind, start and stop of each chunk of a PNG, up to the last one.

    Raises:
        ValueError: a chunk's length is beyond the end of the file. OpenCV would allocate that much memory, up to 4 GB.
        struct.error: the file ends between two chunks.
    """
    kind, stop = b"", 8
    while kind != b"IEND":
        start = stop
        length, kind = struct.unpack_from(">I4s", data, start)
        stop = start + 12 + length
        if stop > len(data):
            raise ValueError
        yield kind, start, stop


def _bmp_size(data: bytes) -> Size:
    (header,) = struct.unpack_from("<I", data, 14)
    # A negative height means that the rows are stored from top to bottom.
    width, height = struct.unpack_from("<HH" if header == 12 else "<ii", data, 18)  # noqa: PLR2004  OS/2's
    return abs(height), width


def _webp_size(data: bytes) -> Size:
    chunk = data[12:16]
    if chunk == b"VP8X":
        return _uint24(data, 27) + 1, _uint24(data, 24) + 1
    if chunk == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    width, height = struct.unpack_from("<HH", data, 26)
    return height & 0x3FFF, width & 0x3FFF


def _uint24(data: bytes, at: int) -> int:
    return data[at] | data[at + 1] << 8 | data[at + 2] << 16


def _jpeg_size(data: bytes) -> Size:
    _, frame = _frame(data)
    height, width = struct.unpack_from(">HH", data, frame + 3)
    return height, width


def _frame(data: bytes) -> tuple[int, int]:
    """Return the marker of a JPEG's frame, which names its encoding, and the start of the frame's header.

    Bytes between segments are not searched for long, because this runs on the event loop.
    """
    segments = itertools.islice(_segments(data, _MAX_FILL), _MAX_SEGMENTS)
    return next(((code, at) for code, at in segments if code in _FRAMES), (0, len(data)))


def _segments(data: bytes, fill: int = sys.maxsize) -> Iterator[tuple[int, int]]:
    """Yield the code of each JPEG marker and the start of its segment, in the way that libjpeg finds them.

    Args:
        data: the file.
        fill: bytes between segments, in all; those after more are not found.
    """
    at = 2
    while marker := _MARKER.search(data, at, min(at + fill, len(data))):
        fill -= marker.start() - at
        code, at = marker[1][0], marker.end()
        yield code, at
        if code == _END:
            return
        at += int.from_bytes(data[at : at + 2], "big")


def _check_scans(data: bytes, most: int) -> None:
    # The count of these bytes is fast and never too low. Segments are only read if it is high.
    if _count_pairs(data, 0xFF, _SCAN) <= most:
        return
    codes = [code for code, _ in itertools.islice(_segments(data), _MAX_SEGMENTS)]
    if codes.count(_SCAN) > most or len(codes) == _MAX_SEGMENTS:
        raise InvalidArgument(f"a JPEG file of this size with more than {most} scans is not accepted", field="image")


def _count_pairs(data: bytes, first: int, second: int) -> int:
    """Count the places where a byte follows another one: 7 us for 57 KB, where `bytes.count` takes 63."""
    pair = first | second << 8
    if len(data) < 3:  # noqa: PLR2004 -- numpy refuses empty buffers
        return data.count(bytes((first, second)))
    even = np.frombuffer(data, "<u2", len(data) // 2)
    odd = np.frombuffer(data, "<u2", (len(data) - 1) // 2, 1)
    return int(np.count_nonzero(even == pair) + np.count_nonzero(odd == pair))


def strip_png(data: bytes, size: Size, limits: Limits) -> bytes:
    """Remove the chunks of a PNG that are not part of its picture; refuse a picture that inflates beyond its size.

    libpng continues to inflate after the last row: for 16 MB of a file, a minute.
    """
    chunks = list(_chunks(data))
    most = _most_inflated(data, size)
    rows = [chunk for chunk in chunks if chunk[0] == b"IDAT"]
    length = sum(stop - start - 12 for _, start, stop in rows)
    # Inflating a valid photo a second time adds three quarters to its decoding time. So the check is skipped for files
    # that cannot inflate to more than the largest accepted photo, with four channels of 16 bits.
    may_exceed = length * _MAX_DEFLATE_RATIO > 8 * limits.pixels
    if length > most + _SLICE or (may_exceed and _inflates_to_more(data, rows, most)):
        raise broken_file("PNG")
    first = {kind: start for kind, start, _ in reversed(chunks)}
    kept = [
        (start, stop)
        for kind, start, stop in chunks
        if kind in _PICTURE_CHUNKS and (kind not in _SINGLE_CHUNKS or start == first[kind])
    ]
    if len(kept) == len(chunks):
        return data
    return data[:8] + b"".join(data[start:stop] for start, stop in kept)


def _most_inflated(data: bytes, size: Size) -> int:
    """Return twice the bytes of a PNG's rows, which allows for interlacing and for encoders that pad."""
    depth, colour = data[24], data[25]
    return 2 * size[0] * (size[1] * depth * _CHANNELS.get(colour, 4) // 8 + 2) + 64


def _inflates_to_more(data: bytes, chunks: list[tuple[bytes, int, int]], most: int) -> bool:
    stream, total = zlib.decompressobj(), 0
    for at, end in ((at, stop - 4) for _, start, stop in chunks for at in range(start + 8, stop - 4, _SLICE)):
        rest = data[at : min(at + _SLICE, end)]
        while rest and total <= most:
            try:
                total += len(stream.decompress(rest, _SLICE))
            except zlib.error:
                raise broken_file("PNG") from None
            rest = stream.unconsumed_tail
    return total > most


_MAGIC: Mapping[str, re.Pattern[bytes]] = {
    "JPEG": re.compile(rb"\xff\xd8\xff"),
    "PNG": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "WebP": re.compile(rb"RIFF.{4}WEBPVP8[ LX]", re.DOTALL),
    "BMP": re.compile(rb"BM"),
    "TIFF": re.compile(rb"II\*\0|MM\0\*"),
    "NPY": re.compile(rb"\x93NUMPY"),
}
_SIZES: Mapping[str, Callable[[bytes], Size]] = {
    "JPEG": _jpeg_size,
    "PNG": _png_size,
    "WebP": _webp_size,
    "BMP": _bmp_size,
    "TIFF": raw.tiff_size,
    "NPY": raw.npy_size,
}
RAW: Mapping[str, Callable[[bytes, int, int], Photo]] = {"TIFF": raw.read_tiff, "NPY": raw.read_npy}
_MEMORY: Mapping[str, Callable[[bytes], int]] = {"JPEG": _memory_of_jpeg, "WebP": _memory_of_webp}
_EXIF: Mapping[str, Callable[[bytes], Iterator[int]]] = {"PNG": _png_exif, "WebP": _webp_exif}
