"""Photos that are not 8-bit RGB: every value arrives as it was saved, and files that lie are refused."""

import io
import re
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torchvision.transforms.v2 import InterpolationMode, functional

import fork_server
from camserve_server.core import logs
from camserve_server.core.errors import InvalidArgument
from camserve_server.core.limits import Limits
from camserve_server.imaging import channels, fitting, headers, images
from camserve_server.imaging.values import Preprocess
from methods.tools import error_ratio
from robustness.raster_files import by_pillow, npy, tiff

LIMITS = Limits()
SIZE = (33, 47)


def array(dtype, count=0):
    """Return an array of noise [33,47] or [33,47,count] that uses the whole range of its type."""
    noise = np.random.default_rng(count).random((*SIZE, count) if count else SIZE)
    top = {"uint8": 255.99, "uint16": 65535.99, "float32": 3}[dtype]
    return (noise * top).astype(dtype)


LAYOUTS = {
    "strips": {},
    "one row a strip": {"rowsperstrip": 1},
    "tiles": {"tile": (16, 16)},
    "deflate": {"compression": "zlib"},
    "deflate with predictor": {"compression": "zlib", "predictor": 2},
    "big-endian": {"byteorder": ">"},
    "planes": {"planarconfig": "separate"},
    "pages": {"metadata": None},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_tiff_keeps_every_value_of_every_channel(dtype, layout):
    if dtype == "float32" and layout == "deflate with predictor":
        pytest.skip("tifffile writes this predictor for whole numbers alone")
    for count in (1, 3, 4, 12):
        values = array(dtype, count)
        if count == 1:
            file = tiff(
                values[:, :, 0], **{name: value for name, value in LAYOUTS[layout].items() if name != "planarconfig"}
            )
        elif layout in ("planes", "pages"):
            file = tiff(np.moveaxis(values, 2, 0), **LAYOUTS[layout])
        else:
            file = tiff(values, planarconfig="contig", **LAYOUTS[layout])

        found = images.decode(file, LIMITS, count)

        assert found.dtype == values.dtype
        assert np.array_equal(found, values)
        assert headers.pixels_of(file, LIMITS) == values.shape[0] * values.shape[1]


@pytest.mark.parametrize("compression", ["raw", "tiff_lzw", "tiff_deflate", "packbits"])
@pytest.mark.parametrize(("dtype", "count"), [("uint8", 0), ("uint8", 3), ("uint16", 0), ("float32", 0)])
def test_tiff_of_pillow_keeps_every_value(dtype, count, compression):
    values = array(dtype, count)
    found = images.decode(by_pillow(values, "TIFF", compression=compression), LIMITS, count or 1)

    assert np.array_equal(found, values.reshape(*SIZE, -1))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_of_a_tiff_is_applied_as_by_pillow(orientation):
    exif = Image.Exif()
    exif[274] = orientation
    file = by_pillow(array("uint16"), "TIFF", exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(file))))

    assert np.array_equal(images.decode(file, LIMITS, 1)[:, :, 0], expected)


def test_tiff_whose_zero_is_white_is_inverted():
    values = array("uint16")

    assert np.array_equal(images.decode(tiff(values, photometric="miniswhite"), LIMITS, 1)[:, :, 0], 65535 - values)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32", ">u2", ">f4"])
def test_npy_keeps_every_value_of_every_channel(dtype):
    for count in (0, 1, 3, 12):
        values = array(np.dtype(dtype).newbyteorder("=").name, count).astype(dtype)
        for saved_values in (values, np.asfortranarray(values)):
            found = images.decode(npy(saved_values), LIMITS, count or 1)

            assert found.dtype.isnative
            assert np.array_equal(found, values.reshape(*SIZE, -1))


@pytest.mark.parametrize(
    "text",
    [
        b"{'descr': '|u1', 'fortran_order': False, 'shape': (33, 47), }      \n",
        b'{"shape":(33,47,),"descr":"|u1","fortran_order":False}',
        b" {\n'fortran_order' : False ,\n'shape' : ( 33 , 47 ) ,\n'descr' : 'uint8' }\n",
    ],
)
def test_header_of_an_npy_file_may_be_in_any_order(text):
    assert images.decode(header(text), LIMITS, 1).shape == (*SIZE, 1)


def test_header_of_an_npy_file_is_not_run_by_python(monkeypatch):
    monkeypatch.setattr("ast.literal_eval", None)
    monkeypatch.setattr("builtins.compile", None)

    assert images.decode(npy(array("uint8")), LIMITS, 1).any()
    for text in (b"1" + b"|1" * 2047, b"{" + b"1:1," * 1000 + b"}", b"{" + b" " * 4090 + b"}", b"(" * 4000):
        with pytest.raises(InvalidArgument, match="the NPY file is truncated or broken") as caught:
            images.decode(header(text), LIMITS, 1)
        assert type(caught.value.__cause__) is ValueError


def test_grey_png_keeps_16_bits_for_a_model_of_one_channel():
    values = array("uint16")
    file = by_pillow(values, "PNG")

    assert np.array_equal(images.decode(file, LIMITS, 1)[:, :, 0], values)
    assert np.array_equal(images.decode(file, LIMITS), np.repeat((values >> 8).astype(np.uint8)[:, :, None], 3, 2))


def test_photo_in_colour_becomes_grey_as_by_pillow():
    values = array("uint8", 3)

    found = images.decode(by_pillow(values, "PNG"), LIMITS, 1)

    assert np.array_equal(found[:, :, 0], np.asarray(Image.fromarray(values).convert("L")))


def test_grey_is_repeated_and_alpha_dropped_for_a_model_of_rgb():
    grey, colours = array("uint16"), array("uint16", 4)
    with_alpha = tiff(colours, photometric="rgb", extrasamples=["unassalpha"])

    assert np.array_equal(images.decode(tiff(grey), LIMITS), np.repeat(grey[:, :, None], 3, 2))
    assert np.array_equal(images.decode(with_alpha, LIMITS), colours[:, :, :3])
    assert np.array_equal(images.decode(with_alpha, LIMITS, 4), colours)


def tag(file, code, value, count=1, kind=4):
    """Change the value of a tag of a little-endian TIFF, and how many values of which type it claims to have."""
    (start,) = struct.unpack_from("<I", file, 4)
    for at in range(start + 2, start + 2 + 12 * struct.unpack_from("<H", file, start)[0], 12):
        if struct.unpack_from("<H", file, at)[0] == code:
            entry = struct.pack("<HHII", code, kind, count, value)
            return file[:at] + entry + file[at + 12 :]
    raise AssertionError(code)


def palette():
    file = io.BytesIO()
    Image.fromarray(array("uint8")).convert("P").save(file, "TIFF")
    return file.getvalue()


def with_nan():
    values = array("float32", 12)
    values[5, 6, 7] = np.nan
    return values


def header(text, version=1):
    """Return an NPY file with this header and the values of 33 x 47 pixels."""
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes((version, 0)) + length + text + bytes(33 * 47)


def long_type():
    return np.dtype([(f"field number {number}", "<f4") for number in range(80)])


def a_strip_short():
    """Return a TIFF of 33 strips that has the place and the size of the first alone."""
    file = tiff(array("uint8"), rowsperstrip=1)
    return tag(tag(file, 273, 8, count=1), 279, 47, count=1)


REFUSED = {
    "channels": (
        tiff(array("uint8", 4), planarconfig="contig"),
        12,
        "the image has 4 channels, and the model takes 12",
    ),
    "one channel": (tiff(array("uint8")), 12, "the image has 1 channel, and the model takes 12"),
    "photo": (by_pillow(array("uint8", 3), "PNG"), 12, "takes 12: send a TIFF or NPY file with these channels"),
    "colours": (npy(array("uint8", 3)), 1, "the image has 3 channels, and the model takes 1"),
    "nan": (npy(with_nan()), 12, "the image has pixels that are NaN or infinite"),
    "nan in a TIFF": (tiff(with_nan(), planarconfig="contig"), 12, "pixels that are NaN or infinite"),
    "type": (npy(np.zeros(SIZE)), 1, "values of type float64: uint8, uint16 and float32 are accepted"),
    "type in a TIFF": (tiff(np.zeros(SIZE, np.int16)), 1, "values of type int16: uint8, uint16 and float32"),
    "objects": (npy(np.zeros(SIZE, object)), 1, "values of type object"),
    "shape": (npy(np.zeros((1, 2, 3, 4), np.uint8)), 3, r"the shape \(1, 2, 3, 4\): \[height, width\] or"),
    "empty": (npy(np.zeros((0, 4), np.uint8)), 3, "the shape"),
    "palette": (palette(), 3, "without a palette"),
    "cut NPY": (npy(array("uint8"))[:-1], 1, "the NPY file is truncated or broken"),
    "long NPY": (npy(array("uint8")) + b"0", 1, "the NPY file is truncated or broken"),
    "cut TIFF": (tiff(array("uint16"))[:2000], 1, "the TIFF file is truncated or broken"),
    "cut deflate": (tiff(array("uint16"), compression="zlib")[:-900], 1, "the TIFF file is truncated or broken"),
    "compression": (tiff(array("uint8"), compression="lzma"), 1, "save it without compression, or with deflate"),
    "strips that are missing": (a_strip_short(), 1, "the TIFF file is truncated or broken"),
    "a tag of another type": (tag(tiff(array("uint8")), 277, 1, kind=12), 1, "the TIFF file is truncated or broken"),
    "an offset beyond the end": (
        tag(tiff(array("uint8", 3), photometric="rgb"), 258, 1 << 30, count=3),
        3,
        "truncated or broken",
    ),
    "orientation of another type": (
        by_pillow(array("uint8"), "TIFF", exif={274: 3}).replace(b"\x12\x01\x03\0", b"\x12\x01\x0c\0"),
        1,
        "broken",
    ),
    "bits that are not 8": (
        tag(tiff(array("uint8", 3), photometric="rgb"), 258, 1, count=1, kind=3),
        3,
        "type uint1: uint8, uint16",
    ),
    "fields": (npy(np.zeros(SIZE, long_type())), 1, "values of type void: uint8, uint16 and float32 are accepted"),
    "axes": (npy(np.zeros((1,) * 40, np.uint8)), 1, r"the shape \(1, .*…: \[height, width\] or"),
    "a huge axis": (
        header(b"{'descr': '|u1', 'fortran_order': False, 'shape': (2, " + b"9" * 400 + b")}"),
        1,
        r"the shape \(2, 9*…",
    ),
    "axes that are no numbers": (
        header(b"{'descr': '|u1', 'fortran_order': False, 'shape': (True, 47)}"),
        1,
        "the NPY file is truncated or broken",
    ),
    "other keys": (header(b"{}"), 1, "the NPY file is truncated or broken"),
    "a header of Python 2": (
        header(b"{'descr': '|u1', 'fortran_order': False, 'shape': (33L, 47L)}"),
        1,
        "the NPY file is truncated or broken",
    ),
    "a key twice": (
        header(b"{'descr': '|u1', 'shape': (33, 47), 'shape': (33, 47)}"),
        1,
        "the NPY file is truncated or broken",
    ),
    "operators": (header(b"-" * 4000 + b"1"), 1, "the NPY file is truncated or broken"),
    "side": (npy(np.zeros((1, 20000), np.uint8)), 1, "16,384 on a side are accepted"),
}


@pytest.mark.parametrize(("file", "count", "words"), REFUSED.values(), ids=REFUSED)
def test_file_that_does_not_fit_is_refused_with_a_reason(file, count, words):
    with pytest.raises(InvalidArgument, match=words) as caught:
        images.decode(file, LIMITS, count)

    assert caught.value.field == "image"
    assert len(caught.value.message) < 200
    assert headers.memory_to_decode(file, LIMITS, count) >= 0


def test_memory_of_a_tile_larger_than_its_page_is_counted():
    file = tiff(np.zeros((16, 16), np.uint8), tile=(1024, 2048), compression="zlib")

    assert headers.memory_to_decode(file, LIMITS, 1) >= 3 * 1024 * 2048


PLAIN_GREY = np.zeros((64, 64), np.uint8)


@pytest.mark.parametrize(
    ("file", "as_float", "each"),
    [
        (tiff(PLAIN_GREY), False, 1 * 3 + 3),  # repeated, and shown
        (tiff(PLAIN_GREY), True, 3 + 4 * 3),
        (npy(PLAIN_GREY.astype(np.uint16)), False, 2 * 3 + 4 * 3),
        (tiff(np.stack([PLAIN_GREY] * 3)), False, 3 * 3),
        (tiff(np.stack([PLAIN_GREY] * 3)), True, 3 + 4 * 3),
        (tiff(np.stack([PLAIN_GREY] * 4)), False, 1 * 3 + 3),  # the first page alone
        (npy(np.zeros((64, 64, 3), np.float32)), False, 3 * 4 * 3),
    ],
)
def test_memory_counts_pages_repeated_grey_and_float32(file, as_float, each):
    assert headers.memory_to_decode(file, LIMITS, as_float=as_float) == each * PLAIN_GREY.size


def test_file_that_is_refused_for_its_size_needs_no_memory():
    for file in (tiff(PLAIN_GREY), npy(PLAIN_GREY), by_pillow(PLAIN_GREY, "PNG"), by_pillow(PLAIN_GREY, "JPEG")):
        assert headers.memory_to_decode(file, Limits(pixels=64 * 64))
        assert not headers.memory_to_decode(file, Limits(pixels=64 * 64 - 1))
        assert not headers.memory_to_decode(file, Limits(side=63))
    assert not headers.memory_to_decode(BOMBS["a large tile without compression"][0], LIMITS, 1)


def test_tiff_of_more_parts_than_rows_of_the_tallest_picture_is_refused(monkeypatch):
    values = np.zeros((3, 64, 64), np.uint8)
    file = tiff(values, rowsperstrip=1)
    tiles = tiff(values, tile=(16, 16), compression="zlib", planarconfig="separate")
    assert LIMITS.side == channels._MAX_PARTS

    monkeypatch.setattr(channels, "_MAX_PARTS", 3 * 64)
    assert not images.decode(file, LIMITS).any()
    monkeypatch.setattr(channels, "_MAX_PARTS", 3 * 64 - 1)
    with pytest.raises(InvalidArgument, match="the TIFF file has 192 strips or tiles: 191 are accepted"):
        images.decode(file, LIMITS)
    monkeypatch.setattr(channels, "_MAX_PARTS", 3 * 16 - 1)
    with pytest.raises(InvalidArgument, match="the TIFF file has 48 strips or tiles"):
        images.decode(tiles, LIMITS)


def inflating():
    """Return a TIFF of 64 x 64 pixels whose only strip inflates to 64 MB."""
    file = tiff(np.zeros((64, 64), np.uint8), compression="zlib")
    bomb = zlib.compress(bytes(64 << 20))
    start = len(file) + len(file) % 2
    return tag(tag(file, 273, start), 279, len(bomb)).ljust(start, b"\0") + bomb


BOMBS = {
    "a strip that inflates": (inflating(), "truncated or broken"),
    "many channels": (tag(tiff(np.zeros((64, 64), np.uint8)), 277, 60_000), "60000 channels, and the model takes 1"),
    "a large tile": (
        tag(tiff(np.zeros((64, 64), np.uint8), compression="zlib", tile=(16, 16)), 322, 1 << 20),
        "accepted|broken",
    ),
    "many strips that are the whole file": (
        tag(tag(tiff(np.zeros((64, 64), np.uint8), rowsperstrip=1), 273, 8, count=64), 279, 300, count=64),
        "broken",
    ),
    "a large tile without compression": (
        tag(tag(tiff(np.zeros((64, 64), np.uint8), tile=(16, 16)), 322, 1 << 20), 323, 1 << 20),
        "are accepted",
    ),
    "a tag with many values": (tag(tiff(np.zeros((64, 64), np.uint8)), 273, 8, count=1 << 30), "broken"),
    "a large array": (
        npy(np.zeros((2, 2, 12), np.float32)).replace(b"(2, 2, 12)", b"(16384, 1024, 12)"),
        "takes 805,306,368 bytes, and 50,331,648 are accepted",
    ),
}


def refusal_of(file):
    with pytest.raises(InvalidArgument) as refused:
        images.decode(file, LIMITS, 12 if b"NUMPY" in file[:8] else 1)
    return str(refused.value)


def refuse_bombs():
    return {name: fork_server.allocating(refusal_of, file) for name, (file, _) in BOMBS.items()}


@pytest.fixture(scope="module")
def refusals():
    """The refusal of each bomb, and the memory that it took, measured in a process of its own."""
    return fork_server.call(refuse_bombs)


@pytest.mark.parametrize("bomb", BOMBS)
def test_bomb_is_refused_with_little_memory(bomb, refusals):
    refusal, peak = refusals[bomb]

    assert re.search(BOMBS[bomb][1], refusal)
    assert peak < (4 << 20)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("dtype", "count"), [("uint16", 1), ("float32", 12), ("uint16", 3)])
def test_input_equals_torchvision_in_float64(dtype, count, interpolation):
    values, mean, std = array(dtype, count), tuple(np.linspace(0.2, 0.5, count)), tuple(np.linspace(0.1, 0.4, count))
    values_of_unit = (-0.5, 2.5) if dtype == "float32" else None
    preprocess = Preprocess((16, 16), 20, interpolation, mean, std, value_range=values_of_unit)
    low, high = values_of_unit or (0, 65535)

    def torchvision_input(precision):
        unit = (torch.from_numpy(values.astype(np.float64)).to(precision) - low) / (high - low)
        resized = functional.resize(unit.permute(2, 0, 1), [20], InterpolationMode(interpolation), antialias=True)
        return functional.normalize(functional.center_crop(resized, [16, 16]), mean, std).permute(1, 2, 0).numpy()

    found, box = fitting.fit(values, preprocess)

    assert found.dtype == np.float32
    assert error_ratio(found, torchvision_input(torch.float32), torchvision_input(torch.float64)) <= 1
    assert box.bottom - box.top == pytest.approx(16 * 33 / 20)


def transform_in_one(photo, bands, window):
    """Return a picture of a photo whose values are all transformed at once."""
    shown = photo[:, :, list(bands)]
    low, high = window or (float(shown.min()), float(shown.max()))
    scaled = (shown.astype(np.float32) - np.float32(low)) * np.float32(255 / max(high - low, 1e-30))
    return np.broadcast_to(scaled.round().clip(0, 255).astype(np.uint8), (*shown.shape[:2], 3))


@pytest.mark.parametrize("shape", [(1, 70_000), (70_000, 1), (300, 500)])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_picture_and_unit_take_no_copy_of_the_values_in_other_types(dtype, shape):
    """Every bit is that of the plain formula, and only the result and a strip of the photo take memory."""
    photo = np.resize(array(dtype, 3), (*shape, 3))
    for bands, window in (((0, 1, 2), None), ((2,), (0.1, 200.3)), ((2, 0, 0), (5, 5))):
        if (dtype, window) == ("uint8", None):
            continue
        found, peak = fork_server.call(fork_server.allocating, channels.picture, photo, bands, window)

        assert np.array_equal(found, transform_in_one(photo, bands, window))
        assert peak <= found.nbytes + 24 * 3 * max(channels._STRIP, shape[1])

    found, peak = fork_server.call(fork_server.allocating, channels.as_unit, photo, (-3.3, 1000.7))
    expected = (photo.astype(np.float32) - np.float32(-3.3)) / np.float32(1000.7 - -3.3)

    assert found.tobytes() == expected.tobytes()
    assert peak <= found.nbytes + 10_000


def test_constant_values_and_windows_of_no_width_give_a_black_picture():
    assert not channels.picture(np.full((4, 5, 1), 7, np.uint16)).any()


@pytest.mark.parametrize("bands", [(11,), (3, 0, 7)])
def test_picture_shows_the_chosen_channels_in_the_window(bands):
    values, low, high = array("uint16", 12), 10_000, 50_000

    found = channels.picture(values, bands, (low, high))

    expected = np.clip((values[:, :, list(bands)].astype(np.float64) - low) / (high - low) * 255, 0, 255)
    assert found.shape == (*SIZE, 3)
    assert np.abs(found - expected).max() <= 0.501


def test_picture_of_a_photo_in_rgb_is_the_photo_itself():
    photo = array("uint8", 3)

    assert channels.picture(photo) is photo


def test_channel_that_the_photo_does_not_have_is_refused():
    with pytest.raises(InvalidArgument, match="the image has 3 channels, 0 to 2") as caught:
        channels.picture(array("uint8", 3), (3,))

    assert caught.value.field == "rendering.bands"


def test_broken_tiff_leaves_no_line_in_the_servers_log(caplog):
    logs.configure("info", "text")
    with pytest.raises(InvalidArgument):
        images.decode(a_strip_short(), LIMITS, 1)

    assert caplog.records == []
