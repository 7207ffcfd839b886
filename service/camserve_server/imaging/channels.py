"""Photos that are not 8-bit RGB: TIFF and NPY files of any number of channels, and how they are shown.

A TIFF file is checked before tifffile reads it. Its directories are read here: a tag may claim gigabytes, and many tags
may refer to the same bytes. tifffile then gets only the tags that make the picture.
"""

import io
import math
import re
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from camserve_server.core.arrays import Map, Photo, Pixels
from camserve_server.core.errors import InvalidArgument
from camserve_server.imaging.opencv import cv2

Size = tuple[int, int]
"""Height and width."""

TYPES = ("uint8", "uint16", "float32")
"""Types of the values of a photo."""

RGB = 3
MAX_CHANNELS = 512  # of OpenCV's arrays
_GREY_AXES = 2  # of an array
_NPY_HEADER = 4096  # bytes
_NPY_ENTRY = re.compile(
    rb"""['"](descr|fortran_order|shape)['"]\s*:\s*(['"][^'"]{1,16}['"]|\[[^][]*\]|True|False|\([\d,\s]*\))"""
)
_NPY_ENTRIES = re.compile(rb"\s*\{\s*(?:%b\s*,\s*){2}%b\s*(?:,\s*)?\}\s*" % ((_NPY_ENTRY.pattern,) * 2))
_MOST = (1 << 31) - 1  # values along an axis
_SHAPE_TEXT = 60  # characters of a shape in an error

_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC, _SAMPLES, _ORIENTATION = 256, 257, 258, 259, 262, 277, 274
_EXTRA_SAMPLES, _SAMPLE_FORMAT = 338, 339
_PICTURE_TAGS = frozenset(
    {_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC, _SAMPLES, _EXTRA_SAMPLES, _SAMPLE_FORMAT}
    | {266, 273, 278, 279, 284, 317, 322, 323, 324, 325}  # order of bits, strips, planes, predictor, tiles
)
_PARTS = frozenset((273, 279, 324, 325))  # have a value for each strip or tile
# Of all pages that are read: one row in each strip of the tallest picture. tifffile takes 12 us for each.
_MAX_PARTS = 1 << 14
_STRIP_BYTES, _TILE_WIDTH, _TILE_HEIGHT, _TILE_BYTES = 279, 322, 323, 325
_LEAST_TILE = 16  # rows and columns, by the specification
_TYPE_BYTES: Mapping[int, int] = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8}
_SHORT = 3
_MAX_TAGS = 1024
_COPIES = 3  # of the values, while a file is read
_FLOAT = 4  # bytes
_STRIP = 1 << 16  # pixels that become a picture at a time
_SMALLEST = 1e-30  # width of a window, so that pixels of one value are black
_RANGES: Mapping[str, tuple[float, float]] = {"uint8": (0, 255), "uint16": (0, 65535), "float32": (0, 1)}
_WHITE_IS_ZERO, _BLACK_IS_ZERO, _COLOURS = 0, 1, 2
_PLAIN, _LZW, _DEFLATE, _OLD_DEFLATE, _PACKBITS = 1, 5, 8, 32946, 32773
_ALPHA = frozenset((1, 2))  # kinds of an extra sample
_BY_OPENCV = frozenset((_LZW, _PACKBITS))
_OPENCV_SAMPLES = frozenset((1, 3))  # it multiplies colours by an alpha channel
_TURNS: Mapping[int, tuple[int, int, bool]] = {
    2: (1, -1, False),
    3: (-1, -1, False),
    4: (-1, 1, False),
    5: (1, 1, True),
    6: (-1, 1, True),
    7: (-1, -1, True),
    8: (1, -1, True),
}
"""By orientation: the steps through the rows and columns, and True if they are exchanged after that."""


def npy_shape(data: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Return the shape of an NPY file, if its columns come first, its type, and where its values start.

    Raises:
        InvalidArgument: the header is broken, or the values are not of one of `TYPES`.
    """
    try:
        header, start = _npy_header(data)
        kind, shape = header[b"descr"].decode("ascii"), tuple(map(int, re.findall(rb"\d+", header[b"shape"])))
        dtype = np.dtype("void" if kind.startswith("[") else kind.strip("'\""))  # a list of fields
    except Exception as error:  # NumPy raises many types for a text that is no type
        raise _broken("NPY") from error
    if dtype.newbyteorder("=").name not in TYPES:
        raise InvalidArgument(
            f"the NPY file has values of type {dtype.name}: {_list(TYPES)} are accepted", field="image"
        )
    if len(shape) not in (_GREY_AXES, RGB) or not all(0 < side <= _MOST for side in shape):
        found = str(shape) if len(str(shape)) <= _SHAPE_TEXT else f"{str(shape)[:_SHAPE_TEXT]}…"
        raise InvalidArgument(
            f"the NPY file has the shape {found}: [height, width] or [height, width, channels] is accepted",
            field="image",
        )
    return shape, header[b"fortran_order"] == b"True", dtype, start


def _npy_header(data: bytes) -> tuple[Mapping[bytes, bytes], int]:
    """Return the three entries of an NPY file's header, and where its values start.

    NumPy has Python parse the header: 30 ms on the event loop for one of 4 KiB, or seconds if it is no Python.

    Raises:
        ValueError: the header does not have these entries, once each.
    """
    form, at = ("<H", 10) if data[6] == 1 else ("<I", 12)
    (length,) = struct.unpack_from(form, data, 8)
    text = data[at : at + length]
    if length > _NPY_HEADER or not _NPY_ENTRIES.fullmatch(text):
        raise ValueError
    header = {found[1]: found[2] for found in _NPY_ENTRY.finditer(text)}
    return header, at + length


def npy_size(data: bytes) -> Size:
    """Return the height and width of an NPY file."""
    height, width, *_ = npy_shape(data)[0]
    return height, width


def read_npy(data: bytes, _channels: int, most: int) -> Photo:
    """Read an NPY file: uint8, uint16 or float32, [height, width] or [height, width, channels]."""
    shape, columns_first, dtype, start = npy_shape(data)
    count = math.prod(shape)
    _check_bytes(count * dtype.itemsize, most)
    if len(data) != start + count * dtype.itemsize:
        raise _broken("NPY")
    values = np.frombuffer(data, dtype, count, start).reshape(shape, order="F" if columns_first else "C")
    return _checked(values.astype(dtype.newbyteorder("="), order="C"))


def tiff_size(data: bytes) -> Size:
    """Return the height and width of the first page of a TIFF file."""
    page = _page(data, struct.unpack_from(_order(data) + "I", data, 4)[0])
    return page.value(_HEIGHT), page.value(_WIDTH)


def read_tiff(data: bytes, channels: int, most: int) -> Photo:
    """Read the first page of a TIFF file, or as many pages as there are channels, if each has one.

    Args:
        data: the file.
        channels: the number of channels of the model's input.
        most: largest number of bytes of the pixels.

    Returns:
        The pixels [height, width, channels of the file], upright, without an alpha channel beyond `channels`.

    Raises:
        InvalidArgument: the file is broken or too large, or has pixels that are not accepted.
    """
    try:
        return _read_pages(data, channels, most)
    except InvalidArgument:
        raise
    except Exception as error:  # tifffile raises many types, and so do numbers that are no offsets or sizes
        raise _broken("TIFF") from error


def _read_pages(data: bytes, channels: int, most: int) -> Photo:
    pages = _pages(data, channels + 1)
    first = pages[0]
    used = pages if len(pages) == channels and all(page.value(_SAMPLES, 1) == 1 for page in pages) else pages[:1]
    _check_number_of_parts(used)
    for page in used:
        _check_page(page, first)
        _check_parts(page, most)
    own = len(used) * first.value(_SAMPLES, 1)
    has_alpha = own == channels + 1 and first.value(_EXTRA_SAMPLES, 0) in _ALPHA
    _check_channels(channels if has_alpha else own, first.type, channels)  # before anything is decoded
    _check_bytes(len(used) * first.bytes, most)
    arrays = _read_with_opencv(data, used) or _read_with_tifffile(data, used, most)
    photo: NDArray[Any] = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, 2)
    del arrays  # their memory is needed for the upright photo
    if photo.dtype.name != first.type or photo.shape != (first.value(_HEIGHT), first.value(_WIDTH), own):
        raise _broken("TIFF")
    photo = photo[:, :, :channels] if has_alpha else photo
    return _checked(np.ascontiguousarray(_upright(photo, first.value(_ORIENTATION, 1))))


@dataclass(frozen=True, slots=True)
class _Page:
    """Directory of a TIFF.

    Attributes:
        order: byte order, as in `struct`.
        data: the file.
        tags: the entries of 12 bytes, by tag.
        following: start of the next directory; 0 after the last.
    """

    order: str
    data: bytes
    tags: Mapping[int, bytes]
    following: int

    def value(self, tag: int, default: int | None = None) -> int:
        """Return the first value of a tag.

        Raises:
            KeyError: the tag is missing and has no default, or is not a whole number.
        """
        if tag not in self.tags and default is not None:
            return default
        return self.values(tag, 1)[0]

    def count(self, tag: int) -> int:
        """Return the number of values of a tag; 0 without the tag."""
        return int(struct.unpack_from(self.order + "I", self.tags[tag], 4)[0]) if tag in self.tags else 0

    def values(self, tag: int, most: int) -> tuple[int, ...]:
        """Return the values of a tag, at most this number.

        Raises:
            KeyError: the tag is missing, or has no whole numbers.
            struct.error: the values are beyond the end of the file.
        """
        entry = self.tags[tag]
        (kind,), count = struct.unpack_from(self.order + "H", entry, 2), self.count(tag)
        letter, size = {1: ("B", 1), _SHORT: ("H", 2), 4: ("I", 4)}[kind]
        form = f"{self.order}{min(count, most)}{letter}"
        if count * size <= 4:  # noqa: PLR2004 -- bytes that fit the entry itself
            return struct.unpack_from(form, entry, 8)
        return struct.unpack_from(form, self.data, struct.unpack_from(self.order + "I", entry, 8)[0])

    @property
    def bytes(self) -> int:
        """The number of bytes of the pixels."""
        return self.value(_HEIGHT) * self.value(_WIDTH) * self.value(_SAMPLES, 1) * self.value(_BITS, 1) // 8

    @property
    def type(self) -> str:
        """The name of the values' type."""
        kinds = {1: "uint", 2: "int", 3: "float"}
        return f"{kinds.get(self.value(_SAMPLE_FORMAT, 1), 'unknown')}{self.value(_BITS, 1)}"


def _order(data: bytes) -> str:
    return "<" if data[:2] == b"II" else ">"


def _pages(data: bytes, most: int) -> list[_Page]:
    """Return the directories of a TIFF, at most this number."""
    pages: list[_Page] = []
    start = struct.unpack_from(_order(data) + "I", data, 4)[0]
    while start and len(pages) < most:
        pages.append(_page(data, start))
        start = pages[-1].following
    return pages


def _page(data: bytes, start: int) -> _Page:
    """Return the directory that starts here.

    Raises:
        ValueError: it has more tags or values than the file can hold.
    """
    order = _order(data)
    (count,) = struct.unpack_from(order + "H", data, start)
    if not 0 < count <= _MAX_TAGS:
        raise ValueError
    entries = [data[at : at + 12] for at in range(start + 2, start + 2 + 12 * count, 12)]
    tags = {struct.unpack_from(order + "H", entry)[0]: entry for entry in entries}
    (following,) = struct.unpack_from(order + "I", data, start + 2 + 12 * count)
    kept = {tag: entry for tag, entry in tags.items() if tag in _PICTURE_TAGS or tag == _ORIENTATION}
    for kind, values in (struct.unpack_from(order + "HI", entry, 2) for entry in kept.values()):
        if _TYPE_BYTES.get(kind, 8) * values > len(data):
            raise ValueError
    return _Page(order, data, kept, following)


def _check_page(page: _Page, first: _Page) -> None:
    """Check that a page has pixels that are accepted, and those of the first page's size and type."""
    kind, photometric, compression = page.type, page.value(_PHOTOMETRIC), page.value(_COMPRESSION, 1)
    same = all(page.value(tag, 1) == first.value(tag, 1) for tag in (_WIDTH, _HEIGHT, _BITS, _SAMPLE_FORMAT))
    if not same or page.bytes < 1:
        raise _broken("TIFF")
    if kind not in TYPES:
        raise InvalidArgument(f"the TIFF file has values of type {kind}: {_list(TYPES)} are accepted", field="image")
    if photometric not in (_WHITE_IS_ZERO, _BLACK_IS_ZERO, _COLOURS):
        raise InvalidArgument(
            "the TIFF file has neither grey values nor plain channels: save it without a palette, as RGB or grey",
            field="image",
        )
    # OpenCV's inversion of grey values differs between their types, so files whose 0 is white are left to tifffile.
    fits_opencv = page.value(_SAMPLES, 1) in _OPENCV_SAMPLES and photometric != _WHITE_IS_ZERO
    by_opencv = compression in _BY_OPENCV and fits_opencv
    if not by_opencv and compression not in (_PLAIN, _DEFLATE, _OLD_DEFLATE):
        raise InvalidArgument(
            f"the TIFF file has {page.value(_SAMPLES, 1)} channels with compression {compression}, which cannot be "
            "read: save it without compression, or with deflate",
            field="image",
        )


def _check_parts(page: _Page, most: int) -> None:
    """Check that a page has no more strips or tiles than pixels for them, and that these do not share bytes.

    Otherwise each of a million strips could be the whole file, and tifffile would read a million times that.
    """
    height, width, samples = page.value(_HEIGHT), page.value(_WIDTH), page.value(_SAMPLES, 1)
    parts = samples * max(height, -(-height // _LEAST_TILE) * -(-width // _LEAST_TILE))
    if any(page.count(tag) > (parts if tag in _PARTS else samples) for tag in page.tags):
        raise _broken("TIFF")
    for tag in {_STRIP_BYTES, _TILE_BYTES} & page.tags.keys():
        if sum(page.values(tag, page.count(tag))) > len(page.data):
            raise _broken("TIFF")
    _check_bytes(_tile_bytes(page), most)


def _check_number_of_parts(pages: Sequence[_Page]) -> None:
    parts = sum(max(page.count(tag) for tag in _PARTS) for page in pages)
    if parts > _MAX_PARTS:
        raise InvalidArgument(
            f"the TIFF file has {parts:,} strips or tiles: {_MAX_PARTS:,} are accepted, so save it with larger ones",
            field="image",
        )


def _tile_bytes(page: _Page) -> int:
    """Return the bytes of a whole tile, which may be larger than the page; 0 for a page in strips."""
    tile = page.value(_TILE_WIDTH, 0) * page.value(_TILE_HEIGHT, 0)
    return tile * page.value(_SAMPLES, 1) * page.value(_BITS, 1) // 8


def _read_with_opencv(data: bytes, pages: Sequence[_Page]) -> list[NDArray[Any]]:
    """Read pages whose compression tifffile does not know; return none for other compressions."""
    if pages[0].value(_COMPRESSION, 1) not in _BY_OPENCV:
        return []
    arrays: list[NDArray[Any]] = []
    for page in pages:
        file = np.frombuffer(_only_picture(data, [page]), np.uint8)
        pixels = cv2.imdecode(file, cv2.IMREAD_UNCHANGED)
        if pixels is None:
            raise _broken("TIFF")
        photo = pixels.reshape(*pixels.shape[:2], -1)
        arrays.append(photo[:, :, ::-1])  # OpenCV returns blue first
    return arrays


def _read_with_tifffile(data: bytes, pages: Sequence[_Page], most: int) -> list[NDArray[Any]]:
    import tifffile  # noqa: PLC0415 -- it takes a while to import, and few requests need it

    arrays: list[NDArray[Any]] = []
    with tifffile.TiffFile(io.BytesIO(_only_picture(data, pages))) as file:
        for page, own in zip(cast("Any", file.pages), pages, strict=True):
            if len(page.dataoffsets) != math.prod(page.chunked):  # tifffile would leave the others black
                raise _broken("TIFF")
            if own.value(_COMPRESSION, 1) != _PLAIN:
                _check_inflated(data, page, most)
            values = page.asarray(maxworkers=1)
            planes = page.axes == "SYX"
            photo = np.moveaxis(values, 0, 2) if planes else values.reshape(*values.shape[:2], -1)
            white = own.value(_PHOTOMETRIC) == _WHITE_IS_ZERO and photo.dtype.kind == "u"
            arrays.append(np.invert(photo) if white else photo)
    return arrays


def _check_inflated(data: bytes, page: Any, most: int) -> None:
    """Check that no compressed part of a page inflates to more than its pixels: tifffile inflates without a limit."""
    size = math.prod(page.chunks) * page.dtype.itemsize
    _check_bytes(size, most)
    for start, length in zip(page.dataoffsets, page.databytecounts, strict=True):
        if len(zlib.decompressobj().decompress(data[start : start + length], size + 1)) > size:
            raise _broken("TIFF")


def _only_picture(data: bytes, pages: Sequence[_Page]) -> bytes:
    """Return a TIFF of these pages with the tags that make the picture, whose values stay where they are."""
    start = len(data) + len(data) % 2
    added = bytearray(start - len(data))
    for index, page in enumerate(pages):
        entries = [entry for tag, entry in sorted(page.tags.items()) if tag in _PICTURE_TAGS]
        after = len(data) + len(added) + 2 + 12 * len(entries) + 4
        added += struct.pack(page.order + "H", len(entries)) + b"".join(entries)
        added += struct.pack(page.order + "I", after if index + 1 < len(pages) else 0)
    return data[:4] + struct.pack(pages[0].order + "I", start) + data[8:] + bytes(added)


def _upright(photo: NDArray[Any], orientation: int) -> NDArray[Any]:
    """Turn a photo as the tag says: 1 is upright."""
    rows, columns, exchanged = _TURNS.get(orientation, (1, 1, False))
    photo = photo[::rows, ::columns]
    return photo.transpose(1, 0, 2) if exchanged else photo


def _checked(photo: NDArray[Any]) -> Photo:
    """Return pixels [height, width, channels] after a check that they are finite."""
    if photo.dtype.kind == "f" and not np.isfinite(photo).all():
        raise InvalidArgument("the image has pixels that are NaN or infinite", field="image")
    return cast("Photo", photo.reshape(*photo.shape[:2], -1))


def _check_bytes(size: int, most: int) -> None:
    if size > most:
        raise InvalidArgument(f"the image takes {size:,} bytes, and {most:,} are accepted", field="image")


def _broken(kind: str) -> InvalidArgument:
    return InvalidArgument(f"the {kind} file is truncated or broken", field="image")


def _list(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def memory_to_read(kind: str, data: bytes, channels: int, most: int, *, as_float: bool) -> int:
    """Return the bytes of memory to read a file, and then to make a model's input or a picture; 0 if it is too large.

    Args:
        kind: "NPY" or "TIFF".
        data: the file, of which only headers are read.
        channels: the number of channels of the model's input.
        most: largest number of bytes of the pixels.
        as_float: True if a range of values is asked for, so that those of 8 bits become float32, too.

    Raises:
        ValueError, struct.error, KeyError, InvalidArgument: a header is broken.
    """
    if kind == "NPY":
        shape, _, dtype, _ = npy_shape(data)
        pixels, own, item, tile = shape[0] * shape[1], math.prod(shape[2:]), dtype.itemsize, 0
    else:
        page = _page(data, struct.unpack_from(_order(data) + "I", data, 4)[0])
        own = page.value(_SAMPLES, 1)
        own = channels if own == 1 and _has_pages(data, channels) else own
        pixels, item, tile = page.value(_HEIGHT) * page.value(_WIDTH), page.value(_BITS, 1) // 8, _tile_bytes(page)
    read = max(pixels * own * item, tile)
    if read > most:
        return 0
    values = pixels * (RGB if (own, channels) == (1, RGB) else own)
    floats = _FLOAT * values if as_float or item > 1 else 0
    return max(_COPIES * read, item * values + max(read, floats, RGB * pixels))


def _has_pages(data: bytes, count: int) -> bool:
    """Return True if a TIFF has this number of pages, without reading their tags."""
    order, at, found = _order(data), 4, 0
    while (start := struct.unpack_from(order + "I", data, at)[0]) and found <= count:
        at, found = start + 2 + 12 * struct.unpack_from(order + "H", data, start)[0], found + 1
    return found == count


def with_channels(photo: Photo, channels: int) -> Photo:
    """Return a photo with the channels of a model's input; grey is repeated for a model of RGB.

    Raises:
        InvalidArgument: it has others.
    """
    own = photo.shape[2]
    _check_channels(own, photo.dtype.name, channels)
    return photo if own == channels else cast("Photo", np.repeat(photo, RGB, 2))


def _check_channels(own: int, kind: str, channels: int) -> None:
    """Check that a photo with these channels of this type fits a model with `channels`."""
    if own == channels or (own, channels) == (1, RGB):
        return
    photographed = own == RGB and kind == "uint8"
    hint = ": send a TIFF or NPY file with these channels" if photographed and channels != 1 else ""
    raise InvalidArgument(f"the image has {count_of(own)}, and the model takes {channels}{hint}", field="image")


def count_of(channels: int) -> str:
    """Return a number of channels in words, such as "1 channel"."""
    return f"{channels} channel{'s' * (channels != 1)}"


def as_unit(photo: Photo, value_range: tuple[float, float] | None) -> Map:
    """Return the values of a photo as float32, with a range of them, or that of their type, as 0 to 1.

    Args:
        photo: the photo.
        value_range: the values that become 0 and 1. Others become values outside of 0 to 1.
    """
    low, high = value_range or _RANGES[photo.dtype.name]
    values: NDArray[np.float32] = photo.astype(np.float32)
    values -= np.float32(low)
    values /= np.float32(high - low)
    return values


def normalised(values: Map, mean: Sequence[float], std: Sequence[float]) -> Map:
    """Return values 0 to 1 [h,w,channels] minus the mean and divided by the standard deviation of each channel."""
    return cast("Map", (values - np.asarray(mean, np.float32)) / np.asarray(std, np.float32))


def denormalised(values: Map, mean: Sequence[float], std: Sequence[float]) -> Map:
    """Return the values 0 to 1 [h,w,channels] of normalised ones."""
    restored: Any = values * np.asarray(std, np.float32) + np.asarray(mean, np.float32)
    return cast("Map", np.nan_to_num(restored))


def picture(photo: Photo, bands: Sequence[int] = (), window: tuple[float, float] | None = None) -> Pixels:
    """Return a photo as uint8 RGB.

    Args:
        photo: the photo.
        bands: the channels to show, one as grey or three as RGB; empty for the first three if there are three, or else
            the first.
        window: the values that become black and white; None for 0 and 255 if the values have 8 bits, and otherwise for
            the smallest and the largest value of these channels.

    Raises:
        InvalidArgument: the photo has no such channel.
    """
    own = photo.shape[2]
    if photo.dtype == np.uint8 and own == RGB and not bands and window is None:
        return cast("Pixels", photo)
    if any(band >= own for band in bands):
        raise InvalidArgument(f"the image has {count_of(own)}, 0 to {own - 1}", field="rendering.bands")
    shown = list(bands) or ([0, 1, 2] if own >= RGB else [0])
    pixels = np.empty((*photo.shape[:2], RGB), np.uint8)
    scaled = _scaled(photo, shown, window) if photo.dtype != np.uint8 or window is not None else None
    rows = max(1, _STRIP // photo.shape[1])
    for strip in (slice(start, start + rows) for start in range(0, len(photo), rows)):
        values = photo[strip][:, :, shown]
        pixels[strip] = scaled(values) if scaled else values
    return pixels


def _scaled(
    photo: Photo, bands: Sequence[int], window: tuple[float, float] | None
) -> Callable[[NDArray[Any]], NDArray[np.uint8]]:
    """Return a function that makes bytes of values of a photo, as in `picture`."""
    low, high = window or (
        min(float(photo[:, :, band].min()) for band in bands),
        max(float(photo[:, :, band].max()) for band in bands),
    )
    black, factor = np.float32(low), np.float32(255 / max(high - low, _SMALLEST))
    return lambda values: ((values.astype(np.float32) - black) * factor).round().clip(0, 255).astype(np.uint8)
