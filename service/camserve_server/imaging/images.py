"""Photos: bytes to pixels, and pixels to what a model sees.

A file is looked at before it is decoded: its kind by its first bytes, its size from its header. The headers are read
here and not with Pillow, because Pillow reports a large picture by a process-wide warning and opens a WebP by setting
up its decoder.
"""

import itertools
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from camserve_server.core.arrays import Input, Pixels
from camserve_server.core.errors import InvalidArgument
from camserve_server.core.limits import Limits
from camserve_server.imaging.opencv import cv2
from camserve_server.imaging.values import Box, Preprocess

Size = tuple[int, int]
"""Height and width."""

_OTHERS = (
    (0, b"GIF8", "a GIF"),
    (0, b"II*\0", "a TIFF"),
    (0, b"MM\0*", "a TIFF"),
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
    (0, b"\x93NUMPY", "a NumPy array"),
)

_MARKER = re.compile(rb"\xff([^\x00\x01\xd0-\xd8\xff])")
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_BASELINE, _SCAN, _END = 0xC0, 0xDA, 0xD9
# A scan of a few bytes costs a pass over the whole picture: 25 ms at 50 megapixels. Encoders write 20 at most.
_MAX_SCANS = 64
_MAX_SEGMENTS = 4096

# What a picture is made of. Beside it stand animation, texts and profiles, which libpng inflates for nobody.
_PICTURE = frozenset((b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND", b"eXIf"))
_ONCE = frozenset((b"tRNS", b"eXIf"))  # libpng ignores another one, with a line of warning each
_MAX_CHUNKS = 1 << 16
# Each of 65,535 entries may be a text of all of it, and OpenCV copies them all. In a JPEG there is no room for more.
_MAX_EXIF = 1 << 16
_CHANNELS: Mapping[int, int] = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_DEFLATES = 1032  # times, at most
_SLICE = 1 << 15

_RGB = 3  # bytes of a pixel


def decode(data: bytes, limits: Limits) -> Pixels:
    """Decode a JPEG, PNG, WebP or BMP file to upright RGB.

    The EXIF orientation is applied, grey becomes RGB, 16 bits become the upper 8, CMYK is converted as stored, without
    its colour profile. Alpha is dropped and the colour below it kept, as Pillow's `convert("RGB")` does. Of an animated
    WebP the first frame is taken; of an animated PNG the picture that viewers without animation show.

    Returns:
        uint8 [height, width, 3], contiguous, owned by the caller.

    Raises:
        InvalidArgument: empty, of another kind, larger than `limits`, cut short or broken. Kind and size are found out
            before anything is decoded.
    """
    kind, size = _measured(data, limits)
    still = _picture(data, size, limits) if kind == "PNG" else data
    try:
        pixels = cv2.imdecode(np.frombuffer(still, np.uint8), cv2.IMREAD_COLOR_RGB)
    except cv2.error:
        pixels = None
    if pixels is None:
        raise _broken(kind)
    return pixels.astype(np.uint8, copy=False)


def pixels_of(data: bytes, limits: Limits) -> int:
    """Return how many pixels a file has, from its header.

    Raises:
        InvalidArgument: it is empty, of another kind, larger than `limits`, or its header is broken.
    """
    _, (height, width) = _measured(data, limits)
    return height * width


def memory_to_decode(data: bytes) -> int:
    """Return how many bytes of memory it takes to decode a file, by its header; 0 if the header cannot be read.

    Unlike `pixels_of` it looks at nothing behind the header, so the event loop may call it with any file.
    """
    try:
        kind = _kind(data)
        size: Size = struct.unpack_from(">II", data, 16) if kind == "PNG" else _SIZES[kind](data)
        return max(0, size[0] * size[1]) * _pixel_bytes(kind, data)
    except (InvalidArgument, struct.error, IndexError, ValueError):
        return 0


def _pixel_bytes(kind: str, data: bytes) -> int:
    """Return how many bytes a pixel takes while a file is decoded: its RGB, and what the decoder holds beside it."""
    if kind == "JPEG" and _frame(data)[0] != _BASELINE:
        return 3 * _RGB  # libjpeg holds all coefficients of a progressive file, of two bytes each
    return 2 * _RGB + (kind == "WebP")  # OpenCV decodes into an array of its own, and copies that


def _measured(data: bytes, limits: Limits) -> tuple[str, Size]:
    kind = _kind(data)
    size = _size(kind, data)
    _check_size(size, limits)
    if kind == "JPEG":
        _check_scans(data)
    _check_exif(kind, data)
    return kind, size


def _kind(data: bytes) -> str:
    if not data:
        raise InvalidArgument("the image is empty", field="image")
    # OpenCV would try AVIF whenever these bytes stand here, whatever stands before them.
    if data[4:8] != b"ftyp":
        for kind, magic in _MAGIC.items():
            if magic.match(data):
                return kind
    likely = next((name for at, start, name in _OTHERS if data.startswith(start, at)), "")
    raise InvalidArgument(
        "not a JPEG, PNG, WebP or BMP file" + (f": it starts like {likely}" if likely else ""),
        field="image",
    )


def _broken(kind: str) -> InvalidArgument:
    return InvalidArgument(f"the {kind} file is cut short or broken", field="image")


def _size(kind: str, data: bytes) -> Size:
    try:
        height, width = _SIZES[kind](data)
    except (struct.error, IndexError, ValueError):
        raise _broken(kind) from None
    if height < 1 or width < 1:
        raise _broken(kind)
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
        raise _broken(kind) from None
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
    """Yield kind, start and stop of each chunk of a PNG up to its end.

    Raises:
        ValueError: a chunk says that it is longer than the file. OpenCV would set aside as much memory, up to 4 GB.
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
    # The rows of a picture of negative height are stored from top to bottom.
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
    """Return the marker of a JPEG's frame, which says how it is encoded, and where the frame's header begins."""
    segments = itertools.islice(_segments(data), _MAX_SEGMENTS)
    return next(((code, at) for code, at in segments if code in _FRAMES), (0, len(data)))


def _segments(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the code of each JPEG marker and where its segment starts, as libjpeg finds them."""
    at = 2
    while found := _MARKER.search(data, at):
        code, at = found[1][0], found.end()
        yield code, at
        if code == _END:
            return
        at += int.from_bytes(data[at : at + 2], "big")


def _check_scans(data: bytes) -> None:
    # Counting bytes is fast and never too low; only a file full of them is walked.
    if data.count(bytes((0xFF, _SCAN))) <= _MAX_SCANS:
        return
    codes = [code for code, _ in itertools.islice(_segments(data), _MAX_SEGMENTS)]
    if codes.count(_SCAN) > _MAX_SCANS or len(codes) == _MAX_SEGMENTS:
        raise InvalidArgument(f"a JPEG file of more than {_MAX_SCANS} scans is not accepted", field="image")


def _picture(data: bytes, size: Size, limits: Limits) -> bytes:
    """Leave out the chunks of a PNG that are not its picture or are ignored; refuse one that inflates to more than it.

    libpng goes on inflating behind the last row: for 16 MB that are sent, a minute.
    """
    chunks = list(_chunks(data))
    most = _most_inflated(data, size)
    rows = [chunk for chunk in chunks if chunk[0] == b"IDAT"]
    length = sum(stop - start - 12 for _, start, stop in rows)
    # Inflating twice costs an honest photo three quarters of its time again, so a little goes uncounted: no more than
    # the largest photo that is accepted inflates to, with four channels of 16 bits.
    if length > most + _SLICE or (length * _DEFLATES > 8 * limits.pixels and _inflates_to_more(data, rows, most)):
        raise _broken("PNG")
    first = {kind: start for kind, start, _ in reversed(chunks)}
    kept = [
        (start, stop)
        for kind, start, stop in chunks
        if kind in _PICTURE and (kind not in _ONCE or start == first[kind])
    ]
    if len(kept) == len(chunks):
        return data
    return data[:8] + b"".join(data[start:stop] for start, stop in kept)


def _most_inflated(data: bytes, size: Size) -> int:
    """Bytes of a PNG's rows, twice: that covers interlacing, and encoders that pad."""
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
                raise _broken("PNG") from None
            rest = stream.unconsumed_tail
    return total > most


_MAGIC: Mapping[str, re.Pattern[bytes]] = {
    "JPEG": re.compile(rb"\xff\xd8\xff"),
    "PNG": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "WebP": re.compile(rb"RIFF.{4}WEBPVP8[ LX]", re.DOTALL),
    "BMP": re.compile(rb"BM"),
}
_SIZES: Mapping[str, Callable[[bytes], Size]] = {
    "JPEG": _jpeg_size,
    "PNG": _png_size,
    "WebP": _webp_size,
    "BMP": _bmp_size,
}
_EXIF: Mapping[str, Callable[[bytes], Iterator[int]]] = {"PNG": _png_exif, "WebP": _webp_exif}


@dataclass(frozen=True, slots=True)
class _Axis:
    """One axis of a resize and centre crop, in pixels.

    Attributes:
        photo: length before the resize.
        resized: length after it.
        crop: length of the model's input.
        floors: as `Preprocess` has it.
    """

    photo: int
    resized: int
    crop: int
    floors: bool = False

    @property
    def pad(self) -> int:
        """Pixels of black before the photo, where it is smaller than the crop."""
        return max(0, self.crop - self.resized) // 2

    @property
    def start(self) -> int:
        """First pixel of the resized photo that is kept."""
        spare = max(0, self.resized - self.crop)
        return spare // 2 if self.floors else round(spare / 2)  # half to even

    @property
    def stop(self) -> int:
        return self.start + min(self.crop, self.resized)

    @property
    def scale(self) -> float:
        """Pixels of the photo per pixel of the input."""
        return self.photo / self.resized

    @property
    def edges(self) -> tuple[float, float]:
        """Where the input begins and ends in the photo; outside of it where there is padding."""
        first = self.start - self.pad
        return first * self.scale, (first + self.crop) * self.scale


def prepared(photo: Pixels, data: bytes, preprocess: Preprocess) -> tuple[Input, Box]:
    """Make a model's input of a photo: by the model's own `prepare` if it has one, else by a resize and a crop.

    Args:
        photo: decoded, uint8 [height, width, 3].
        data: its file.
        preprocess: of the model.

    Returns:
        The input, and the part of the photo that it shows.
    """
    return fit(photo, preprocess) if preprocess.prepare is None else preprocess.prepare(photo, data)


def displayed(image: Input, preprocess: Preprocess) -> Pixels:
    """Return a model's input as a picture: one that is already normalised is scaled back by mean and deviation."""
    if image.dtype == np.uint8:
        return cast("Pixels", image)
    values = np.nan_to_num(255 * (image * preprocess.std + preprocess.mean))
    return cast("Pixels", values.round().clip(0, 255).astype(np.uint8))


def seen(size: Size, preprocess: Preprocess) -> Box:
    """Return the part of a photo of that height and width that a resize and a crop leave."""
    rows, columns = _axes(size, preprocess)
    (top, bottom), (left, right) = rows.edges, columns.edges
    return Box(left, top, right, bottom)


def fit(photo: Pixels, preprocess: Preprocess) -> tuple[Pixels, Box]:
    """Resize and crop a photo as torchvision's and timm's evaluation transforms do.

    Values equal those of the transforms on a PIL image to 1, save for some at hard edges with "bicubic": it overshoots
    black and white there, and Pillow cuts that off between its two passes, in an order that depends on its version. A
    photo of extreme proportions is never resized whole, so that it costs no more than another.

    Args:
        photo: uint8 [height, width, 3].
        preprocess: how the model wants it; mean and std are not applied.

    Returns:
        uint8 [*preprocess.size, 3], black where the resized photo is smaller than the crop, and the box of it in the
        photo's pixels, which then reaches beyond the photo's edges.
    """
    size = photo.shape[0], photo.shape[1]
    rows, columns = _axes(size, preprocess)
    cropped = _resampler(rows, columns, preprocess)(photo, rows, columns, preprocess.interpolation)
    return _padded(cropped, rows, columns), seen(size, preprocess)


def _axes(size: Size, preprocess: Preprocess) -> tuple[_Axis, _Axis]:
    resized = _resized_size(size, preprocess.resize)
    rows, columns = (_Axis(*each, preprocess.floors) for each in zip(size, resized, preprocess.size, strict=True))
    return rows, columns


def _resized_size(size: Size, resize: int | Size) -> Size:
    if not isinstance(resize, int):
        return resize
    height, width = size
    longer = int(resize * max(size) / min(size))
    return (longer, resize) if width <= height else (resize, longer)


_Resampler = Callable[[Pixels, _Axis, _Axis, str], Pixels]


def _resampler(rows: _Axis, columns: _Axis, preprocess: Preprocess) -> _Resampler:
    if preprocess.interpolation == "nearest":
        return _pick
    # Resizing whole is five times faster than Pillow up to here, and a photo of 1 x 16384 would become 256 x 4194304.
    kept = (rows.stop - rows.start) * (columns.stop - columns.start)
    return _resize_part if rows.resized * columns.resized > 8 * kept else _resize_whole


def _resize_whole(photo: Pixels, rows: _Axis, columns: _Axis, interpolation: str) -> Pixels:
    tensor = torch.from_numpy(np.require(photo, requirements=["C", "W"])).permute(2, 0, 1)
    resized = functional.resize_image(
        tensor,
        [rows.resized, columns.resized],
        interpolation=InterpolationMode(interpolation),
        antialias=True,
    )
    kept = resized[:, rows.start : rows.stop, columns.start : columns.stop]
    pixels: Pixels = kept.permute(1, 2, 0).numpy()
    return pixels


def _resize_part(photo: Pixels, rows: _Axis, columns: _Axis, interpolation: str) -> Pixels:
    """Resize the kept part alone: Pillow weighs the pixels around its box as if it resized the whole."""
    (above, below), (top, bottom) = _window(rows)
    (before, after), (left, right) = _window(columns)
    part = Image.fromarray(np.ascontiguousarray(photo[above:below, before:after]))
    size = (columns.stop - columns.start, rows.stop - rows.start)
    resample = Image.Resampling[interpolation.upper()]
    return np.asarray(part.resize(size, resample, box=(left, top, right, bottom)))


def _window(axis: _Axis) -> tuple[tuple[int, int], tuple[float, float]]:
    """Find the photo's pixels that the kept ones are made of, and the edges of the kept ones in these."""
    first, last = axis.start * axis.scale, axis.stop * axis.scale
    reach = 2 * max(axis.scale, 1) + 1
    begin, end = max(0, int(first - reach)), min(axis.photo, int(last + reach) + 1)
    return (begin, end), (first - begin, min(last, axis.photo) - begin)


def _pick(photo: Pixels, rows: _Axis, columns: _Axis, _interpolation: str) -> Pixels:
    return photo[_nearest(rows)][:, _nearest(columns)]


def _nearest(axis: _Axis) -> NDArray[np.intp]:
    # Pillow adds up the steps; multiplying them rounds to another pixel now and then.
    steps = np.full(axis.stop, axis.scale)
    steps[0] /= 2
    return np.cumsum(steps)[axis.start :].astype(np.intp)


def _padded(seen: Pixels, rows: _Axis, columns: _Axis) -> Pixels:
    if seen.shape[:2] == (rows.crop, columns.crop):
        return np.ascontiguousarray(seen)
    whole = np.zeros((rows.crop, columns.crop, 3), np.uint8)
    whole[rows.pad :, columns.pad :][: seen.shape[0], : seen.shape[1]] = seen
    return whole
