"""Decompression bombs are refused before they are decoded, in a process whose memory is measured."""

import io
import math
import struct
import zlib

import pytest
from PIL import Image

from camserve_server.core.limits import Limits
from camserve_server.imaging import images
from robustness import decoding, error_checks, process_audit


def saved(image, form, **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width, height, rows):
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows, 1)) + chunk(b"IEND", b"")


def bmp(width, height):
    """Return a run-length encoded BMP file of one run."""
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, 0, 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 1080, 0, 0, 1078) + head + bytes(1024) + b"\0\1"


def jpeg(width, height, progressive):
    file = bytearray(saved(Image.new("RGB", (64, 64)), "JPEG", progressive=progressive))
    at = file.find(b"\xff\xc2" if progressive else b"\xff\xc0")
    file[at + 5 : at + 9] = struct.pack(">HH", height, width)
    return bytes(file)


def animated(form, frames=100):
    first, *more = (Image.new("RGB", (64, 64), (number, 0, 0)) for number in range(frames))
    return saved(first, form, save_all=True, append_images=more)


def canvas(width, height):
    """Return an animated WebP with small frames and a large canvas."""
    first, *more = (Image.new("RGB", (64, 64), color) for color in ("red", "green", "blue"))
    file = bytearray(saved(first, "WEBP", save_all=True, append_images=more))
    assert file[12:16] == b"VP8X"  # the header that has the canvas size
    file[24:30] = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return bytes(file)


def gif(width, height):
    file = bytearray(animated("GIF", 3))
    file[6:10] = struct.pack("<HH", width, height)
    return bytes(file)


def exif(length, texts=65_534):
    """Return EXIF that rotates the picture by 90 degrees, with many text entries that each refer to all its bytes."""
    orientation = struct.pack("<HHIHH", 0x0112, 3, 1, 6, 0)
    description = struct.pack("<HHII", 0x010E, 2, length - 8, 8)
    directory = struct.pack("<H", texts + 1) + orientation + description * texts + bytes(4)
    return (b"II*\0" + struct.pack("<I", 8) + directory).ljust(length, b"x")


def png_of_exif(length, **texts):
    file = png(64, 32, bytes(9 * 32))
    return file[:33] + chunk(b"eXIf", exif(length, **texts)) + file[33:]


def webp_of_exif(length, **texts):
    return saved(Image.new("RGB", (64, 32)), "WEBP", exif=exif(length, **texts))


WEBP = "524946461a000000574542505650384c0e0000002ffeffe703071011fd0f4444ff03"
"""A lossless WebP of 16,383 x 4,000 black pixels, which takes a second to pack."""

BOMBS = {
    "png": lambda: png(20_000, 20_000, bytes(2501 * 20_000)),
    "png of one line": lambda: png(50_000_000, 1, bytes(6_250_001)),
    "png that inflates on": lambda: png(64, 64, bytes(100 << 20)),
    "jpeg": lambda: jpeg(65_500, 65_500, progressive=False),
    "progressive jpeg": lambda: jpeg(20_000, 20_000, progressive=True),
    "webp": lambda: bytes.fromhex(WEBP),
    "webp of a large canvas": lambda: canvas(16_384, 16_384),
    "gif": lambda: gif(65_535, 65_535),
    "animated gif": lambda: animated("GIF"),
    "tiff": lambda: tiff(20_000, 20_000),
    "bmp": lambda: bmp(30_000, 30_000),
    "png of exif": lambda: png_of_exif(1 << 20),
    "webp of exif": lambda: webp_of_exif(1 << 20),
    "webp of a million chunks": lambda: saved(Image.new("RGB", (64, 64)), "WEBP") + b"more\0\0\0\0" * 1_000_000,
}


def tiff(width, height):
    """Return a TIFF file of one bit per pixel, deflated."""
    packed = zlib.compress(bytes(width // 8 * height), 1)
    tags = {256: width, 257: height, 258: 1, 259: 8, 262: 1, 273: 8, 277: 1, 278: height, 279: len(packed)}
    directory = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    end = 8 + len(packed) + len(packed) % 2
    file = (b"II*\0" + struct.pack("<I", end) + packed).ljust(end, b"\0")
    return file + struct.pack("<H", len(tags)) + directory + bytes(4)


def largest():
    """Return a photo of the largest number of pixels that is accepted."""
    side = math.isqrt(Limits().pixels)
    return png(side, side, bytes((side // 8 + 2) * side))


MAX_INFLATED = 2**16  # bytes inflated until a PNG with too many rows is refused
FIRST_FRAMES = {
    "apng": lambda: animated("PNG"),
    "animated webp": lambda: animated("WEBP"),
    "tiff of many pages": lambda: animated("TIFF"),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bombs")
    for name, make in {**BOMBS, **FIRST_FRAMES, "control": largest}.items():
        (folder / name).write_bytes(make())
    return process_audit.run_module("decoding", folder)


@pytest.mark.parametrize("name", BOMBS)
def test_bomb_is_refused_before_decoding_within_10_mb(outcomes, name):
    outcome = outcomes[name]
    assert outcome.get("refused") == "image"
    assert outcome["decoded"] == 0
    assert outcome["inflated"] <= MAX_INFLATED
    assert outcome["mb"] <= decoding.LITTLE
    assert error_checks.leaks(outcome["message"]) == []


@pytest.mark.parametrize("name", FIRST_FRAMES)
def test_only_the_first_frame_of_an_animation_is_decoded(outcomes, name):
    assert outcomes[name]["message"] == "(64, 64, 3)"
    assert outcomes[name]["mb"] <= decoding.LITTLE


@pytest.mark.parametrize("make", [png_of_exif, webp_of_exif])
def test_exif_of_the_largest_size_in_a_jpeg_rotates_the_picture(make):
    assert images.decode(make(1 << 16, texts=100), Limits()).shape == (64, 32, 3)


def test_memory_of_the_largest_accepted_photo_is_measured(outcomes):
    assert outcomes["control"]["mb"] > 80
    assert outcomes["control"]["decoded"] == 1
