"""Valid TIFF, NPY and grey PNG files for models of 1, 3 and 12 channels, and mutations that know their structure."""

import io
import re
import struct

import numpy as np
import tifffile
from PIL import Image

CHANNELS = {"tiny": 3, "grey": 1, "bands": 12}
"""The number of channels of each model."""

SIZE = (9, 17)
NUMBERS = (0, 1, 2, 3, 8, 16, 17, 255, 4096, 0x7FFF, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFF0, 0xFFFFFFFF)
TAGS = (256, 257, 258, 259, 262, 266, 273, 274, 277, 278, 279, 284, 317, 320, 322, 323, 324, 325, 338, 339, 65000)
TYPES = (
    "|O",
    "<f8",
    ">u2",
    "<u2",
    "<f4",
    "|u1",
    "<i2",
    "|V8",
    "<M8[s]",
    "<U999999999",
    "<f2",
    "<c8",
    "?",
    ("<f4", (4, 4)),
)
FIELDS = [(f"field number {number}", "<f4") for number in range(80)]
SIZES = ((), (9,), (0, 17), (9, 17, 0), (-1, 17), (17, 9), (9, 17, 1), (9, 17, 13), (True, 17), (2.5, 3), (1, 1),
         (65536, 65536), (16384, 1024, 512), (1 << 32, 1 << 32), None, (9, (17,)), (1,) * 300, (10**600, 17),
         (9, 17, 10**600))  # fmt: skip
HEADERS = {
    "type": (rb"(?<='descr': )[^,]*", [repr(kind).encode() for kind in (*TYPES, FIELDS[:1], FIELDS, 1, None)]),
    "shape": (rb"(?<='shape': )\([^)]*\)", [repr(size).encode() for size in SIZES]),
    "order": (rb"(?<='fortran_order': )\w*", [b"True", b"False", b"None", b"[]", b"1"]),
    "whole": (rb"(?s).*", [b"{}", b"-" * 2000 + b"1", b"(" * 150 + b")" * 150, b"{" + b" " * 3000 + b"}"]),
}
"""For parts of the header of an NPY file: what it is there, and by what it is replaced."""


def _array(dtype, *channels):
    noise = np.random.default_rng(len(channels)).random((*SIZE, *channels))
    return (noise * {"uint8": 255, "uint16": 65535, "float32": 1}[dtype]).astype(dtype)


def tiff(values, **options):
    file = io.BytesIO()
    tifffile.imwrite(file, values, **{"photometric": "minisblack", "metadata": None, **options})
    return file.getvalue()


def by_pillow(values, form, **options):
    file = io.BytesIO()
    Image.fromarray(values).save(file, form, **options)
    return file.getvalue()


def npy(values):
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def files():
    """Return valid files by name, which begins with a model that takes them, and a dash."""
    deep, whole = _array("uint16"), {"planarconfig": "contig"}
    bands = {dtype: _array(dtype, 12) for dtype in ("uint8", "uint16", "float32")}
    planes = np.moveaxis(bands["uint16"], 2, 0)
    upside_down = Image.Exif()
    upside_down[274] = 3
    return {
        "grey-strips": tiff(_array("uint8"), rowsperstrip=4),
        "grey-deep": tiff(deep, byteorder=">"),
        "grey-floats": tiff(_array("float32"), compression="zlib", rowsperstrip=8),
        "grey-tiles": tiff(deep, tile=(16, 16)),
        "grey-predictor": tiff(deep, compression="zlib", predictor=2),
        "grey-white": tiff(_array("uint8"), photometric="miniswhite"),
        "grey-lzw": by_pillow(deep, "TIFF", compression="tiff_lzw", exif=upside_down),
        "grey-packbits": by_pillow(_array("uint8"), "TIFF", compression="packbits"),
        "grey-png": by_pillow(deep, "PNG"),
        "grey-npy": npy(_array("uint8")),
        "grey-npy-by-columns": npy(np.asfortranarray(deep)),
        "grey-npy-of-floats": npy(_array("float32", 1)),
        "bands-strips": tiff(bands["uint8"], rowsperstrip=4, **whole),
        "bands-planes": tiff(planes, planarconfig="separate"),
        "bands-pages": tiff(np.moveaxis(bands["uint8"], 2, 0)),
        "bands-tiles": tiff(bands["float32"], tile=(16, 16), compression="zlib", **whole),
        "bands-tiled-planes": tiff(planes, planarconfig="separate", tile=(16, 16)),
        "bands-npy": npy(bands["uint8"]),
        "bands-npy-deep": npy(bands["uint16"].astype(">u2")),
        "bands-npy-of-floats": npy(np.asfortranarray(bands["float32"])),
        "tiny-tiff": tiff(_array("uint16", 4), photometric="rgb", extrasamples=["unassalpha"], **whole),
        "tiny-pages": tiff(np.stack([_array("uint8")] * 5), compression="zlib"),
        "tiny-npy": npy(_array("uint8", 3)),
    }


def small_photo():
    """Return a small NPY file of 12 channels."""
    return npy(_array("uint16", 12)[:8, :8])


def mutate(chance, data):
    """Change the structure of a TIFF or NPY file in place; return False for other files."""
    change = {b"II*": _change_tiff, b"MM\0": _change_tiff, b"\x93NU": _change_npy}.get(bytes(data[:3]))
    if change is None:
        return False
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        change(chance, data)
    return True


def _change_tiff(chance, data):
    """Change the place of a directory, one of its entries, or a value to which an entry refers."""
    order, entries, pointers = _directories(data)
    if not entries:
        return
    number = chance.choice((*NUMBERS, *pointers, len(data), chance.randrange(len(data))))
    at, part = chance.choice(entries), chance.choice(("next", "tag", "type", "count", "copy", "far", "value", "value"))
    if part == "copy":
        other = chance.choice(entries)
        data[at : at + 12] = data[other : other + 12]
    elif part == "tag":
        struct.pack_into(order + "H", data, at, chance.choice(TAGS))
    elif part == "type":
        struct.pack_into(order + "H", data, at + 2, chance.choice((*range(20), 0xFFFF)))
    else:
        (far,) = struct.unpack_from(order + "I", data, at + 8)
        places = {"next": chance.choice(pointers), "count": at + 4, "far": min(far, len(data) - 4), "value": at + 8}
        struct.pack_into(order + "I", data, places[part], number)


def _directories(data):
    """Return the byte order, and where the entries and the offsets of directories are, for at most 20 directories."""
    order, entries, pointers = "<" if data[:2] == b"II" else ">", [], [4]
    while len(pointers) <= 20:
        try:
            (start,) = struct.unpack_from(order + "I", data, pointers[-1])
            (count,) = struct.unpack_from(order + "H", data, start)
        except struct.error:
            break
        after = start + 2 + 12 * count
        if start == 0 or after + 4 > len(data):
            break
        entries += range(start + 2, after, 12)
        pointers.append(after)
    return order, entries, pointers


def _change_npy(chance, data):
    """Change a value of the header, whose length is mostly corrected; or the version or the length alone."""
    part, end = chance.choice(("version", "length", *HEADERS)), 10 + int.from_bytes(data[8:10], "little")
    if part == "version":
        data[6] = chance.choice((0, 1, 2, 3, 255))
    elif part == "length":
        data[8:10] = chance.choice((0, 1, 10, 118, 4096, 4097, 0xFFFF)).to_bytes(2, "little")
    else:
        pattern, values = HEADERS[part]
        changed = re.sub(pattern, lambda _: chance.choice(values), bytes(data[10:end]), count=1)
        if chance.random() < 0.9:
            data[8:10] = len(changed).to_bytes(2, "little")
        data[10:end] = changed
