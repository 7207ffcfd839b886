"""Decode photos and masks."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from camserve_server.core.arrays import Mask, Photo
from camserve_server.core.errors import InvalidArgument
from camserve_server.core.limits import Limits
from camserve_server.imaging import channels as raw
from camserve_server.imaging.headers import COLOURS, DEEP, GREY, MASK_DEPTH, RAW, broken_file, check_file, strip_png
from camserve_server.imaging.opencv import cv2

_GREY_16_BITS = bytes((DEEP, GREY))  # depth and colour type in a PNG's header


def decode(data: bytes, limits: Limits, channels: int = 3, *, keep_depth: bool = False) -> Photo:
    """Decode a JPEG, PNG, WebP, BMP, TIFF or NPY file, upright.

    The EXIF orientation is applied. Grey becomes RGB, and 16 bits of a PNG become the upper 8, unless `keep_depth` is
    true. CMYK is converted as stored, without its colour profile. Alpha is dropped and the colour below it kept, as
    Pillow's `convert("RGB")` does. An animated WebP gives its first frame; an animated PNG gives the picture that
    viewers without animation show.

    For a model with one channel, colours become grey as by Pillow's `convert("L")`, and a grey PNG keeps its 16 bits.
    TIFF and NPY files keep their channels and their values: uint8, uint16 or float32.

    Args:
        data: the file.
        limits: limits on one request.
        channels: the number of channels of the model's input.
        keep_depth: True to keep the 16 bits of a PNG, for a range of values that is not that of 8 bits.

    Returns:
        The pixels [height, width, channels], contiguous, owned by the caller: uint8 RGB from most files.

    Raises:
        InvalidArgument: the file is empty, of another format, larger than `limits`, truncated or broken. Format and
            size are checked before anything is decoded.
    """
    kind, size = check_file(data, limits)
    if read := RAW.get(kind):
        return raw.with_channels(read(data, channels, raw.RGB * limits.pixels), channels)
    still = strip_png(data, size, limits) if kind == "PNG" else data
    if channels == 1 and kind == "PNG" and data[24:26] == _GREY_16_BITS:
        return _read_pixels(still, kind, cv2.IMREAD_GRAYSCALE | cv2.IMREAD_ANYDEPTH)[:, :, None]
    if keep_depth and channels == raw.RGB and kind == "PNG" and data[24] == DEEP:
        return _read_pixels(still, kind, cv2.IMREAD_COLOR_RGB | cv2.IMREAD_ANYDEPTH)
    pixels = _read_pixels(still, kind, cv2.IMREAD_COLOR_RGB).astype(np.uint8, copy=False)
    if channels == 1:
        return np.array(Image.fromarray(pixels).convert("L"))[:, :, None]
    return pixels if channels == raw.RGB else raw.with_channels(pixels, channels)


def _read_pixels(data: bytes, kind: str, flag: int) -> NDArray[Any]:
    try:
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), flag)
    except cv2.error:
        pixels = None
    if pixels is None:
        raise broken_file(kind)
    return pixels


def decode_mask(data: bytes, limits: Limits) -> Mask:
    """Decode a grey PNG file, upright: True for the pixels that are not 0.

    Returns:
        bool [height, width].

    Raises:
        InvalidArgument: the file is refused as by `decode`, is no PNG, or has colours or more than 8 bits per pixel.
    """
    kind, size = check_file(data, limits)
    if kind != "PNG":  # around edges a compressed mask would have pixels that are nearly 0
        raise InvalidArgument(f"a mask must be a PNG file, and this one is a {kind}", field="image")
    depth, colour = data[24], data[25]
    if colour != GREY or depth > MASK_DEPTH:
        pixels = f"{COLOURS.get(colour, 'unknown')} pixels of {depth} bits"
        raise InvalidArgument(f"a mask must be a grey PNG of at most 8 bits per pixel: it has {pixels}", field="image")
    return _read_pixels(strip_png(data, size, limits), kind, cv2.IMREAD_GRAYSCALE) > 0
