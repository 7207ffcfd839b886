"""Photos: decoding, refusals, and the fit to a model's input."""

import dataclasses
import functools
import io
import json
import pickle
import random
import struct
import subprocess
import sys
import types
import warnings
import zlib

import cv2
import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from skimage import data
from timm.data import create_transform
from torch.nn import functional
from torchvision import models, transforms
from torchvision.transforms.v2.functional import _geometry

import fork_server
from camserve_server.core.errors import InvalidArgument
from camserve_server.core.limits import Limits
from camserve_server.imaging import fitting, headers, images
from camserve_server.imaging.values import Box, Preprocess

LIMITS = Limits()
PHOTO = Image.fromarray(data.chelsea()[:120, :161])
ALPHA = Image.fromarray(np.tile(np.linspace(0, 255, 161).astype(np.uint8), (120, 1)))
SIXTEEN = np.asarray(PHOTO).astype(np.uint16) * 256 + 77


def saved(image, file_format="PNG", **options):
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def turned(orientation, file_format):
    exif = Image.Exif()
    exif[0x112] = orientation
    return saved(PHOTO, file_format, exif=exif)


def with_alpha(mode):
    image = PHOTO.convert(mode)
    image.putalpha(ALPHA)
    return image


def cv2_png(bgr):
    return cv2.imencode(".png", bgr)[1].tobytes()


def palette(colours=64):
    return PHOTO.convert("P", palette=Image.Palette.ADAPTIVE, colors=colours)


KINDS = {
    "grey": saved(PHOTO.convert("L")),
    "grey jpeg": saved(PHOTO.convert("L"), "JPEG"),
    "grey with alpha": saved(with_alpha("L")),
    "grey with a transparent shade": saved(PHOTO.convert("L"), transparency=100),
    "black and white": saved(PHOTO.convert("1")),
    "palette": saved(palette()),
    "palette of 2 bits": saved(palette(4), bits=2),
    "palette with transparency": saved(palette(), transparency=bytes(range(0, 256, 4))),
    "rgb": saved(PHOTO),
    "rgba": saved(with_alpha("RGB")),
    "16-bit rgb": cv2_png(SIXTEEN[..., ::-1]),
    "16-bit rgba": cv2_png(np.dstack([SIXTEEN[..., ::-1], SIXTEEN[..., :1]])),
    "jpeg": saved(PHOTO, "JPEG", quality=90),
    "jpeg of full colour": saved(PHOTO, "JPEG", subsampling=0),
    "cmyk jpeg": saved(PHOTO.convert("CMYK"), "JPEG", quality=95),
    "progressive jpeg": saved(PHOTO, "JPEG", progressive=True),
    "camera's jpeg of two pictures": saved(PHOTO, "MPO", save_all=True, append_images=[PHOTO.rotate(180)]),
    "webp": saved(PHOTO, "WEBP"),
    "lossless webp": saved(PHOTO, "WEBP", lossless=True),
    "webp with alpha": saved(with_alpha("RGB"), "WEBP", exact=True),
    "bmp": saved(PHOTO, "BMP"),
    "bmp with alpha": saved(with_alpha("RGB"), "BMP"),
    "palette bmp": saved(palette(), "BMP"),
    "animated png": saved(PHOTO, save_all=True, append_images=[PHOTO.rotate(180)]),
    "animated png, still picture first": saved(
        PHOTO, save_all=True, append_images=[PHOTO.rotate(180), PHOTO], default_image=True
    ),
    "animated webp": saved(PHOTO, "WEBP", save_all=True, append_images=[PHOTO.rotate(180)]),
} | {
    f"orientation {turn}, {file_format}": turned(turn, file_format)
    for turn in range(1, 9)
    for file_format in ("JPEG", "PNG", "WEBP")
}


@pytest.mark.parametrize("kind", KINDS)
def test_decoded_pixels_are_those_of_pillow_upright(kind):
    with warnings.catch_warnings(action="ignore"):  # Pillow's, about transparency
        expected = ImageOps.exif_transpose(Image.open(io.BytesIO(KINDS[kind]))).convert("RGB")
    pixels = images.decode(KINDS[kind], LIMITS)
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    assert pixels.flags.writeable
    assert pixels.shape == (expected.height, expected.width, 3)
    assert np.abs(pixels.astype(int) - np.asarray(expected)).max() <= 2


def test_sixteen_bits_of_grey_become_the_upper_eight():
    """Pillow's convert("RGB") would clip the values at 255, which gives a white picture."""
    grey = np.linspace(0, 65535, 90 * 70).reshape(90, 70).astype(np.uint16)
    pixels = images.decode(saved(Image.fromarray(grey)), LIMITS)
    assert np.abs(pixels.astype(int) - (grey >> 8)[..., None]).max() <= 1


def test_transparent_pixel_keeps_its_colour():
    image = Image.new("RGBA", (4, 4), (200, 100, 50, 0))
    assert (images.decode(saved(image), LIMITS) == (200, 100, 50)).all()


@pytest.mark.parametrize("size", [(1, 1), (1, 16384), (16384, 1)])
@pytest.mark.parametrize("file_format", ["PNG", "BMP", "JPEG"])
def test_photo_of_one_row_or_one_pixel_is_decoded(size, file_format):
    pixels = images.decode(saved(Image.new("RGB", size, (9, 9, 9)), file_format), LIMITS)
    assert pixels.shape == (size[1], size[0], 3)


def test_bmp_stored_from_top_to_bottom_and_bmp_of_os2():
    rows = bytes(range(2 * 4 * 3))
    file = struct.pack("<2sIHHI", b"BM", 0, 0, 0, 54) + struct.pack("<IiiHHIIiiII", 40, 4, -2, 1, 24, 0, 0, 0, 0, 0, 0)
    top_down = images.decode(file + rows, LIMITS)
    assert np.array_equal(top_down[..., ::-1], np.frombuffer(rows, np.uint8).reshape(2, 4, 3))
    old = struct.pack("<2sIHHI", b"BM", 0, 0, 0, 26) + struct.pack("<IHHHH", 12, 4, 2, 1, 24)
    assert np.array_equal(images.decode(old + rows, LIMITS), top_down[::-1])


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (b"", "the image is empty"),
        (b"GIF89a", "not a JPEG, PNG, WebP, BMP, TIFF or NPY file: it starts like a GIF"),
        (b"\0\0\0\x20ftypavif", "it starts like an AVIF"),
        (b"\0\0\0\x20ftypheic", "it starts like a HEIC"),
        (b"BM\0\0ftypavif", "it starts like an AVIF"),
        (b"II+\0", "it starts like a BigTIFF, which is for files above 4 GB: save a TIFF"),
        (bytes(128) + b"DICM", "it starts like a DICOM file: send its pixels as an array"),
        (b"II*\0", "the TIFF file is truncated or broken"),
        (b"\x93NUMPY\x01\0", "the NPY file is truncated or broken"),
        (b"/9j/4AAQSkZJRg", "send the bytes themselves"),
        (b"hello", "not a JPEG, PNG, WebP, BMP, TIFF or NPY file"),
        (b"\xff\xd8\xff", "the JPEG file is truncated or broken"),
        (b"\x89PNG\r\n\x1a\n", "the PNG file is truncated or broken"),
        (b"\x89PNG\r\n\x1a\n" + b"\0\0\0\x0dtEXt" + b"\1" * 8, "the PNG file is truncated or broken"),
        (b"BM", "the BMP file is truncated or broken"),
        (b"BM" + bytes(60), "the BMP file is truncated or broken"),
        (b"RIFF\0\0\0\0WEBPVP8X", "the WebP file is truncated or broken"),
    ],
)
def test_other_files_are_refused_with_a_reason(start, words):
    with pytest.raises(InvalidArgument) as refusal:
        images.decode(start, LIMITS)
    assert words in refusal.value.message
    assert refusal.value.field == "image"


def png_header(width, height):
    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes((width // 8 + 1) * height), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@dataclasses.dataclass
class Work:
    """Work of decoding: files passed to OpenCV, bytes inflated, and chunks read."""

    decoded: list = dataclasses.field(default_factory=list)
    inflated: int = 0
    chunks: int = 0


@pytest.fixture
def work(monkeypatch):
    """Count the work of decoding."""
    done, imdecode, chunks = Work(), cv2.imdecode, headers._chunks

    class Inflating:
        def __init__(self):
            self._stream = zlib.decompressobj()

        def decompress(self, *given):
            inflated = self._stream.decompress(*given)
            done.inflated += len(inflated)
            return inflated

        unconsumed_tail = property(lambda self: self._stream.unconsumed_tail)

    def counted(data):
        for chunk in chunks(data):
            done.chunks += 1
            yield chunk

    def noted(file, *flags):
        done.decoded.append(file.tobytes())
        return imdecode(file, *flags)

    monkeypatch.setattr(cv2, "imdecode", noted)
    monkeypatch.setattr(headers, "_chunks", counted)
    monkeypatch.setattr(headers, "zlib", types.SimpleNamespace(decompressobj=Inflating, error=zlib.error))
    return done


@pytest.fixture(scope="module")
def bomb():
    return png_header(20_000, 20_000)


def test_bomb_is_refused_by_its_header_without_using_memory(bomb, work):
    assert len(bomb) < 60_000
    with pytest.raises(InvalidArgument, match="20,000 x 20,000 pixels: 16,384 on a side"):
        images.decode(bomb, LIMITS)
    assert (work.decoded, work.inflated) == ([], 0)


def test_file_refused_by_opencv_is_refused(monkeypatch):
    def refuse(*_):
        raise cv2.error

    monkeypatch.setattr(cv2, "imdecode", refuse)
    with pytest.raises(InvalidArgument, match="truncated or broken"):
        images.decode(KINDS["rgb"], LIMITS)


def test_opencv_has_its_own_pixel_limit(bomb, tmp_path):
    """The test runs in its own process, because the first import of OpenCV sets its limit."""
    (tmp_path / "bomb.png").write_bytes(bomb)
    program = f"""
from camserve_server.imaging.opencv import cv2
import numpy as np
try:
    cv2.imdecode(np.fromfile({str(tmp_path / "bomb.png")!r}, np.uint8), cv2.IMREAD_COLOR)
except cv2.error:
    print("refused", cv2.getNumThreads())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("refused 1\n", "")


def with_huge_chunk(kind):
    file = KINDS["rgb"]
    at = file.find(b"IDAT") - 4
    return file[:at] + b"\xcc\0\0\0" + kind + file[at + 8 :]


@pytest.mark.parametrize("kind", [b"IDAT", b"tEXt", b"eXIf"])
def test_chunk_with_a_huge_length_is_refused(kind):
    with pytest.raises(InvalidArgument, match="truncated or broken"):
        images.decode(with_huge_chunk(kind), LIMITS)


def test_texts_and_profiles_in_a_png_are_not_inflated(capfd, work):
    """libpng would, only to find out that they are too long: 30 ms for each, and a line in the log."""
    file, text = KINDS["rgb"], b"word\0\0" + zlib.compress(bytes(10 << 20), 9)
    chunk = struct.pack(">I4s", len(text), b"zTXt") + text + struct.pack(">I", zlib.crc32(b"zTXt" + text))
    at = file.find(b"IDAT") - 4
    assert np.array_equal(images.decode(file[:at] + chunk * 50 + file[at:], LIMITS), images.decode(file, LIMITS))
    assert work.decoded == [file, file]  # without them
    assert work.inflated == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("kind", "content"), [(b"tRNS", bytes(6)), (b"eXIf", b"II*\0\x08\0\0\0\0\0")])
def test_chunk_that_a_png_may_have_once_is_decoded_once(kind, content, capfd, work):
    """libpng ignores the others, with a line of warning for each."""
    file = KINDS["rgb"]
    at = file.find(b"IDAT") - 4
    chunk = struct.pack(">I4s", len(content), kind) + content + struct.pack(">I", zlib.crc32(kind + content))
    once = file[:at] + chunk + file[at:]

    assert np.array_equal(images.decode(file[:at] + chunk * 1000 + file[at:], LIMITS), images.decode(once, LIMITS))
    assert work.decoded == [once, once]
    assert capfd.readouterr().err == ""


def part(content, flush=zlib.Z_FULL_FLUSH):
    """Return a part of a deflated stream. It refers to nothing before it, and so can be repeated."""
    stream = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    return stream.compress(content) + stream.flush(flush)


@functools.cache
def inflating(side, rows):
    """Return a PNG file whose data inflates to more than its picture."""
    file, noise, zeros = png_header(side, side), np.random.default_rng(0).bytes(side * side // 8), bytes(1 << 24)
    check = functools.reduce(lambda sum_, _: zlib.adler32(zeros, sum_), range(rows >> 24), zlib.adler32(noise))
    deflated = b"\x78\xda" + part(noise) + part(zeros) * (rows >> 24) + part(b"", zlib.Z_FINISH)
    deflated += struct.pack(">I", check)
    idat = struct.pack(">I4s", len(deflated), b"IDAT") + deflated + struct.pack(">I", zlib.crc32(b"IDAT" + deflated))
    return file[: file.find(b"IDAT") - 4] + idat + file[-12:]


INFLATING = [(64, 1 << 26), (1000, 1 << 28), (2000, 1 << 24)]


@pytest.mark.parametrize(("side", "rows"), INFLATING)
def test_png_that_inflates_to_more_than_its_picture_is_refused(side, rows, work):
    bomb = inflating(side, rows)
    with pytest.raises(InvalidArgument, match="the PNG file is truncated or broken"):
        images.decode(bomb, LIMITS)
    assert work.decoded == []
    assert work.inflated <= headers._most_inflated(bomb, (side, side)) + headers._SLICE


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize("shape", [(1, 200_000), (200_000, 1), (400, 499)])
def test_valid_png_is_not_refused_as_a_bomb(shape, interlaced):
    noise = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
    file = saved(Image.fromarray(noise))
    if interlaced:  # by its header alone: nothing here writes such files; the rows are counted, then refused by libpng
        head = file[16:28] + b"\1"
        file = file[:16] + head + struct.pack(">I", zlib.crc32(b"IHDR" + head)) + file[33:]
    limits = Limits(pixels=200_000, side=200_000)
    assert headers.strip_png(file, shape, limits)


def test_png_with_too_many_chunks_is_refused(work):
    file, chunk = KINDS["rgb"], struct.pack(">I4sI", 0, b"prVt", zlib.crc32(b"prVt"))
    assert images.decode(file[:-12] + chunk * 1000 + file[-12:], LIMITS).size
    work.chunks = 0
    with pytest.raises(InvalidArgument, match="truncated or broken"):
        images.decode(file[:-12] + chunk * 1_000_000 + file[-12:], LIMITS)
    assert work.chunks <= headers._MAX_CHUNKS
    assert len(work.decoded) == 1


def webp_header(kind, width, height):
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return {
        "extended": b"RIFF\0\1\0\0WEBPVP8X\x0a\0\0\0" + bytes(4) + size,
        "lossless": b"RIFF\0\1\0\0WEBPVP8L\0\1\0\0\x2f" + struct.pack("<I", width - 1 | height - 1 << 14),
        "lossy": b"RIFF\0\1\0\0WEBPVP8 \0\1\0\0" + b"\0\0\0\x9d\x01\x2a" + struct.pack("<HH", width, height),
    }[kind]


JPEG_HEAD = b"\xff\xd8\xff\xe0\x00\x04\xff\xc0\xff\xff\xc2\x00\x11\x08"  # a marker inside of a segment is none
HUGE = {
    "png": png_header(9000, 8000),
    "jpeg": JPEG_HEAD + struct.pack(">HH", 8000, 9000) + bytes(60),
    "bmp": b"BM" + bytes(12) + struct.pack("<Iii", 40, 9000, -8000) + bytes(60),
    "extended webp": webp_header("extended", 9000, 8000),
    "lossless webp": webp_header("lossless", 9000, 8000),
    "lossy webp": webp_header("lossy", 9000, 8000),
}


@pytest.mark.parametrize("kind", HUGE)
def test_size_is_read_from_the_header_of_every_kind(kind):
    with pytest.raises(InvalidArgument, match="has 9,000 x 8,000 pixels: 16,777,216 in all are accepted"):
        images.decode(HUGE[kind], LIMITS)


@pytest.mark.parametrize("kind", KINDS)
def test_limits_are_inclusive(kind):
    height, width = images.decode(KINDS[kind], Limits(pixels=161 * 120, side=161)).shape[:2]
    assert {height, width} == {161, 120}
    for limits in (Limits(pixels=161 * 120 - 1), Limits(side=160)):
        with pytest.raises(InvalidArgument, match="accepted"):
            images.decode(KINDS[kind], limits)


def progressive_with_scans(more):
    file = saved(PHOTO, "JPEG", progressive=True)
    last = file[file.rfind(b"\xff\xda") : -2]
    return file[:-2] + last * more + file[-2:]


def test_jpeg_of_many_scans_is_refused():
    """Each scan has few bytes, but costs a pass over the whole picture."""
    assert images.decode(progressive_with_scans(50), LIMITS).shape == (120, 161, 3)
    with pytest.raises(InvalidArgument, match="more than 64 scans"):
        images.decode(progressive_with_scans(60), LIMITS)
    with pytest.raises(InvalidArgument, match="more than 64 scans"):
        images.decode(progressive_with_scans(1000), LIMITS)


def test_larger_jpeg_may_have_fewer_scans():
    """Twenty scans are accepted at any size."""
    pixels = 120 * 161
    for limit, more in ((pixels, 10), (2 * pixels, 30)):
        assert images.decode(progressive_with_scans(more), Limits(pixels=limit)).size
        with pytest.raises(InvalidArgument, match=f"of this size with more than {20 * limit // pixels} scans"):
            images.decode(progressive_with_scans(more + 1), Limits(pixels=limit))


def test_bytes_after_a_jpeg_are_not_its_scans():
    """Phones append a video to a photo."""
    photo = saved(PHOTO, "JPEG")
    assert np.array_equal(images.decode(photo + b"\xff\xda\0\2" * 200, LIMITS), images.decode(photo, LIMITS))


def broken(seed, good, bomb):
    rng = random.Random(seed)
    file = bytearray(rng.choice(good))
    kind = seed % 6
    if kind in (0, 1):
        return bytes(file[: rng.randrange(len(file))])
    if kind in (2, 3):
        for _ in range(rng.randint(1, 40)):
            file[rng.randrange(len(file))] ^= 1 << rng.randrange(8)
        return bytes(file)
    if kind == 4:
        return bytes(file[: rng.randint(4, 40)]) + rng.randbytes(rng.randint(0, 3000))
    return rng.choice([b"", b"hello", b"\xff\xd8" * 999, rng.randbytes(500), bomb, *HUGE.values()])


@pytest.fixture(scope="module")
def broken_files(bomb):
    good = [*KINDS.values(), saved(Image.fromarray(data.astronaut()), "JPEG", progressive=True)]
    return [broken(seed, good, bomb) for seed in range(300)]


def test_random_bytes_are_refused(broken_files, capfd):
    """300 broken files each give a picture or InvalidArgument."""
    decoded, refusals = 0, []
    for file in broken_files:
        try:
            decoded += images.decode(file, LIMITS).size > 0
        except InvalidArgument as refusal:
            refusals.append(refusal)
    assert all(refusal.field == "image" and len(refusal.message) < 200 for refusal in refusals)
    assert 10 < decoded < 150
    assert decoded + len(refusals) == 300
    assert "OpenCV" not in capfd.readouterr().err


ONE_FRAME = [kind for kind in KINDS if "animated" not in kind and "two pictures" not in kind]


@pytest.mark.parametrize("kind", ONE_FRAME)
@pytest.mark.parametrize("share", [0.1, 0.98])
def test_truncated_file_is_refused(kind, share):
    file = KINDS[kind]
    with pytest.raises(InvalidArgument, match="truncated or broken"):
        images.decode(file[: int(len(file) * share)], LIMITS)


# What a model sees


def photos():
    """Photos, upright and rotated, and noise in odd sizes that is too faint to overshoot black or white."""
    rng = np.random.default_rng(0)
    result = {name: getattr(data, name)() for name in ("astronaut", "chelsea", "coffee")}
    result["coffee, turned"] = np.rot90(result["coffee"])
    sizes = ((1, 1), (333, 517), (50, 37), (224, 224), (225, 224), (256, 256), (257, 300), (299, 1000), (1500, 251))
    return result | {f"{h}x{w}": rng.integers(90, 166, (h, w, 3), dtype=np.uint8) for h, w in sizes}


PHOTOS = photos()
FAST = ("coffee, turned", "1x1", "50x37", "225x224", "1500x251")
PHOTO_NAMES = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in PHOTOS]


def preprocess(size=224, resize=256, interpolation="bilinear"):
    return Preprocess((size, size), resize, interpolation, (0, 0, 0), (1, 1, 1))


def through_timm(photo, size, crop_pct, interpolation):
    # timm's create_transform is what timm.data.resolve_data_config feeds; normalisation off keeps its bytes.
    transform = create_transform((3, size, size), crop_pct=crop_pct, interpolation=interpolation, normalize=False)
    return transform(Image.fromarray(photo)).permute(1, 2, 0).numpy()


def check_equal(seen, expected, at_most=1):
    difference = np.abs(seen.astype(int) - expected)
    assert difference.max() <= at_most
    assert (difference > 1).mean() < 3e-4


@pytest.mark.parametrize("name", PHOTO_NAMES)
@pytest.mark.parametrize(
    ("size", "crop_pct", "interpolation"),
    [(224, 0.875, "bilinear"), (224, 0.875, "bicubic"), (224, 1.0, "bicubic"), (299, 0.95, "bilinear")],
)
def test_fit_equals_timms_transform(name, size, crop_pct, interpolation):
    seen, _ = fitting.fit(PHOTOS[name], preprocess(size, int(size / crop_pct), interpolation))
    expected = through_timm(PHOTOS[name], size, crop_pct, interpolation)
    check_equal(seen, expected, 2 if interpolation == "bicubic" else 1)


@pytest.mark.parametrize("name", PHOTO_NAMES)
@pytest.mark.parametrize("weights", ["ResNet50_Weights.IMAGENET1K_V1", "ResNet50_Weights.IMAGENET1K_V2"])
def test_fit_equals_torchvisions_transform(name, weights):
    transform = models.get_weight(weights).transforms()
    recipe = preprocess(transform.crop_size[0], transform.resize_size[0], transform.interpolation.value)
    seen, _ = fitting.fit(PHOTOS[name], recipe)
    mean, std = (torch.tensor(values)[:, None, None] for values in (transform.mean, transform.std))
    expected = ((transform(Image.fromarray(PHOTOS[name])) * std + mean) * 255).round()
    check_equal(seen, expected.permute(1, 2, 0).numpy().astype(int))


@pytest.mark.parametrize("name", PHOTO_NAMES)
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize(("size", "resize"), [((224, 224), (224, 224)), ((160, 320), (192, 340)), ((97, 64), 64)])
def test_exact_sizes_and_oblong_crops(name, interpolation, size, resize):
    """Bicubic overshoots at edges. Pillow clips between its passes, whose order differs here."""
    recipe = Preprocess(size, resize, interpolation, (0, 0, 0), (1, 1, 1))
    mode = transforms.InterpolationMode(interpolation)
    expected = transforms.CenterCrop(size)(transforms.Resize(resize, mode)(Image.fromarray(PHOTOS[name])))
    seen, _ = fitting.fit(PHOTOS[name], recipe)
    at_most = {"nearest": 0, "bilinear": 1, "bicubic": 8}[interpolation]
    check_equal(seen, np.asarray(expected), at_most)


@pytest.mark.parametrize("shape", [(40, 60), (41, 700), (100, 100), (101, 99)])
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
def test_input_is_black_where_the_crop_exceeds_the_photo(shape, interpolation):
    photo = np.random.default_rng(1).integers(1, 256, (*shape, 3), dtype=np.uint8)
    mode = transforms.InterpolationMode(interpolation)
    expected = transforms.CenterCrop(225)(transforms.Resize(100, mode)(Image.fromarray(photo)))
    seen, box = fitting.fit(photo, preprocess(225, 100, interpolation))
    check_equal(seen, np.asarray(expected))
    assert box.top < 0
    assert box.bottom > shape[0]


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("shape", "resize"), [((40, 61), 32), ((97, 64), (97, 64)), ((33, 50), 80), ((224, 225), 224)])
def test_fit_has_the_bytes_of_torchvisions_resize(shape, resize, interpolation, fast, monkeypatch):
    """`fast` is whether torch has instructions of the processor for uint8, as on x86 with AVX2."""
    monkeypatch.setattr(fitting, "_has_fast_bilinear", lambda: fast)
    monkeypatch.setattr(_geometry, "_do_native_uint8_resize_on_cpu", lambda mode: fast or mode.value == "bicubic")
    photo = np.random.default_rng(3).integers(0, 256, (*shape, 3), dtype=np.uint8)
    image, mode = torch.from_numpy(photo).permute(2, 0, 1), transforms.InterpolationMode(interpolation)
    resized = _geometry.resize_image(image, [resize] if isinstance(resize, int) else list(resize), mode)
    expected = resized.permute(1, 2, 0).numpy()

    size = expected.shape[0], expected.shape[1]
    seen, _ = fitting.fit(photo, Preprocess(size, size, interpolation, (0, 0, 0), (1, 1, 1)))

    assert (seen == expected).all()


def test_processor_has_fast_bilinear_where_torchvision_says_so():
    assert fitting._has_fast_bilinear() == _geometry._do_native_uint8_resize_on_cpu(
        transforms.InterpolationMode.BILINEAR
    )


@pytest.mark.parametrize("shape", [(3, 700), (700, 3), (40, 2000), (2000, 301), (7, 100)])
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
def test_long_photo_equals_the_photo_resized_whole(shape, interpolation):
    photo = np.random.default_rng(2).integers(0, 256, (*shape, 3), dtype=np.uint8)
    seen, _ = fitting.fit(photo, preprocess(64, 80, interpolation))
    check_equal(seen, through_timm(photo, 64, 0.8, interpolation), 0 if interpolation == "nearest" else 1)


EXTREME = [(1, 1), (1, 16384), (16384, 1), (3, 5000), (16384, 3), (2000, 16384)]
INTERPOLATIONS = ["nearest", "bilinear", "bicubic"]


@pytest.mark.parametrize("shape", EXTREME)
@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_photos_with_extreme_shapes_cost_little(shape, interpolation, monkeypatch):
    """Resizing computes at most eight times as many pixels as are kept."""
    whole, part, made = functional.interpolate, Image.Image.resize, [0]

    def resized(tensor, size, **how):
        made.append(size[0] * size[1])
        return whole(tensor, size, **how)

    def resized_part(image, size, *how, **more):
        made.append(size[0] * size[1])
        return part(image, size, *how, **more)

    monkeypatch.setattr(functional, "interpolate", resized)
    monkeypatch.setattr(Image.Image, "resize", resized_part)
    photo = np.full((*shape, 3), 77, np.uint8)
    seen, box = fitting.fit(photo, preprocess(interpolation=interpolation))
    assert sum(made) <= 8 * 224 * 224
    assert (seen == 77).all()
    assert seen.shape == (224, 224, 3)
    middle = (box.left + box.right) / 2, (box.top + box.bottom) / 2
    assert middle == pytest.approx((shape[1] / 2, shape[0] / 2), abs=0.01 * max(1, min(shape)))


MEASURE = """
import ctypes, gc, json, pickle, sys
from pathlib import Path

import numpy as np

from camserve_server.core.errors import InvalidArgument
from camserve_server.core.limits import Limits
from camserve_server.imaging import fitting, images


def status_mb(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024


def peak_mb(run, given):
    given = [(np.full((*shape, 3), 77, np.uint8), to) for shape, to in given] if run is fitting.fit else given
    for _ in range(2):  # the first round is to warm up
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the highest so far becomes that of now: proc(5)
        before = status_mb("VmRSS:")
        for arguments in given:
            try:
                run(*arguments)
            except InvalidArgument:
                pass
    return status_mb("VmHWM:") - before


runs = {
    "decode": lambda file: images.decode(file, Limits()),
    "fit": fitting.fit,
    "allocate": lambda megabytes: np.ones(megabytes << 20, np.uint8).size,
}
cases = pickle.loads(Path(sys.argv[1]).read_bytes())
print(json.dumps({name: peak_mb(runs[run], given) for name, (run, given) in cases.items()}))
"""
"""Program that prints for each case how far the process's memory grew, at most, in MB."""


@pytest.fixture(scope="module")
def peaks(bomb, broken_files, tmp_path_factory):
    """The growth of memory of each case in MB, measured in a process of its own."""
    cases = {
        "bomb": ("decode", [(bomb,)]),
        # OpenCV would allocate the memory before it checks the file's length.
        "huge chunks": ("decode", [(with_huge_chunk(kind),) for kind in (b"IDAT", b"tEXt", b"eXIf")]),
        "inflating": ("decode", [(inflating(*shape),) for shape in INFLATING]),
        "broken files": ("decode", [(file,) for file in broken_files]),
        "130 MB for a moment": ("allocate", [(130,)]),
    }
    for interpolation in INTERPOLATIONS:
        given = [(shape, preprocess(interpolation=interpolation)) for shape in EXTREME]
        cases[f"extreme shapes, {interpolation}"] = ("fit", given)
    file = tmp_path_factory.mktemp("cases") / "cases.pickle"
    file.write_bytes(pickle.dumps(cases))
    result = fork_server.run(MEASURE, file)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("case", ["bomb", "huge chunks", "inflating"])
def test_refused_photo_takes_no_memory(case, peaks):
    assert peaks[case] < 10


@pytest.mark.parametrize("case", ["broken files", *(f"extreme shapes, {each}" for each in INTERPOLATIONS)])
def test_broken_photo_or_extreme_shape_takes_little_memory(case, peaks):
    assert peaks[case] < 100


def test_memory_check_detects_a_short_allocation(peaks):
    assert peaks["130 MB for a moment"] > 100


def test_box_is_the_part_of_the_photo_in_the_input():
    photo = np.zeros((300, 451, 3), np.uint8)
    # 300 x 451 becomes 256 x 384 (384.85), of which rows 16 to 240 and columns 80 to 304 are kept.
    _, box = fitting.fit(photo, preprocess())
    edges = 80 * 451 / 384, 16 * 300 / 256, 304 * 451 / 384, 240 * 300 / 256
    assert (box.left, box.top, box.right, box.bottom) == pytest.approx(edges, rel=1e-12)
    _, box = fitting.fit(photo, Preprocess((224, 224), (224, 224), "bilinear", (0, 0, 0), (1, 1, 1)))
    assert box == Box(0, 0, 451, 300)


@pytest.mark.parametrize("shape", [(300, 451), (500, 333), (100, 900), (80, 81)])
def test_box_maps_positions_in_the_input_to_the_photo(shape):
    photo = np.zeros((*shape, 3), np.uint8)
    row, column = shape[0] // 2 - 11, shape[1] // 2 + 9
    photo[row, column] = 255
    seen, box = fitting.fit(photo, preprocess())
    weight = seen[..., 0].astype(float)
    down, across = (weight.sum(axis) @ (np.arange(224) + 0.5) / weight.sum() / 224 for axis in (1, 0))
    result = box.top + down * (box.bottom - box.top), box.left + across * (box.right - box.left)
    assert result == pytest.approx((row + 0.5, column + 0.5), abs=0.1)


def test_read_only_photo_is_not_written_to():
    photo = data.chelsea()[::-1]
    photo.flags.writeable = False
    for interpolation in ("nearest", "bilinear"):
        seen, _ = fitting.fit(photo, preprocess(interpolation=interpolation))
        assert seen.flags.c_contiguous


def test_pairs_of_bytes_are_counted_like_bytes_count():
    rng = np.random.default_rng(0)
    for size in [*range(12), 1000, 1001]:
        data = bytes(rng.integers(0xFD, 0x100, size, dtype=np.uint8))

        assert headers._count_pairs(data, 0xFF, 0xFD) == data.count(b"\xff\xfd")


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
@pytest.mark.parametrize("transparent", [False, True])
def test_mask_of_any_depth_has_the_pixels_that_are_not_zero(depth, transparent):
    values = np.arange(16) % 2**depth
    bits = np.unpackbits(values.astype(np.uint8)[:, None], axis=1)[:, -depth:]
    chunks = {"IHDR": struct.pack(">IIBBBBB", 16, 1, depth, 0, 0, 0, 0)}
    chunks |= {"tRNS": struct.pack(">H", 1)} if transparent else {}  # the value 1 is transparent, and in the mask
    chunks |= {"IDAT": zlib.compress(b"\0" + np.packbits(bits).tobytes()), "IEND": b""}
    file = b"\x89PNG\r\n\x1a\n"
    for kind, content in chunks.items():
        named = kind.encode() + content
        file += struct.pack(">I", len(content)) + named + struct.pack(">I", zlib.crc32(named))

    np.testing.assert_array_equal(images.decode_mask(file, LIMITS)[0], values > 0)
