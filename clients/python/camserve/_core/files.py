"""Read and write local files safely in folders that an attacker may have prepared."""

from __future__ import annotations

import errno
import io
import os
import re
import secrets
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, cast

import numpy as np

from camserve._core.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path


class Readable(Protocol):
    """A file, or an object in an object store."""

    def read(self, size: int = ..., /) -> bytes:
        """Return up to ``size`` bytes, or all."""
        ...


NOT_A_PHOTO = "not a JPEG, PNG, WebP, BMP, TIFF or NPY file"

# The formats that a server accepts. For a BMP, the size of its header is checked too: a text may also begin with "BM".
_PHOTO_START = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|RIFF.{4}WEBP|BM.{12}[\x0c\x10\x28\x34\x38\x40\x6c\x7c]\0\0\0"
    rb"|II\*\0|MM\0\*|\x93NUMPY",
    re.DOTALL,
)
_HEAD_BYTES = 18  # the longest start that identifies a format
MAX_PHOTO_BYTES = 128 << 20
"""Most bytes of a photo: 16 megapixels in 8 channels. A server accepts 8 MiB, unless it is configured otherwise.

Each byte is held several times while it is sent, and a sparse file can have any size and take no room on the disk.
"""

MAX_TEXT_BYTES = 64 << 20
"""Most bytes of a file of JSON: a receipt with the largest map has some megabytes."""


class TooLarge(InvalidArgument):
    """A photo has more bytes than may be read."""


def read_photo(file: Readable, size: int, limit: int = MAX_PHOTO_BYTES) -> bytes:
    """Read a photo. If the file is not a photo or is too large, only its first bytes are read.

    Args:
        file: The file, positioned at its start.
        size: Size of the file in bytes; 0 if unknown.
        limit: Most bytes to read.

    Raises:
        InvalidArgument: The file is not a photo, and therefore must not leave this machine.
        TooLarge: The file has more bytes than the limit.
    """
    head = file.read(_HEAD_BYTES)
    check_photo(head, size, limit)
    data = head + file.read(size or limit + 1)
    check_photo(head, len(data), limit)
    return data


def check_photo(data: bytes, size: int, limit: int = MAX_PHOTO_BYTES) -> None:
    """Check the first bytes of a photo, and its size in bytes; the errors are those of ``read_photo``."""
    if data and not _PHOTO_START.match(data):
        raise InvalidArgument(f"image: {NOT_A_PHOTO}, so it was not sent", fields={"image": NOT_A_PHOTO})
    if size > limit:
        reason = f"it has {size:,} bytes; a photo may have {limit:,}"
        raise TooLarge(f"image: {reason}", fields={"image": reason})


def read_regular(path: str | os.PathLike[str], limit: int = MAX_TEXT_BYTES) -> bytes:
    """Return the content of a regular file that is not larger than a limit.

    Args:
        path: Path of the file.
        limit: Most bytes of the file.

    Raises:
        OSError: The file cannot be read, is not a regular file, or is larger.
    """
    with open_regular(path) as file:
        return read_within(file, limit, path)


def read_within(file: Readable, limit: int, path: str | os.PathLike[str]) -> bytes:
    """Return the content of an open file; an ``OSError`` names the path of one that is larger than a limit."""
    data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit:,} bytes", os.fspath(path))
    return data


def write_file(path: str | os.PathLike[str], data: bytes, *, sync: bool = False, temporary_folder: str = "") -> None:
    """Write a file atomically. A link at its path is replaced, not followed.

    Args:
        path: Path of the file.
        data: Content of the file.
        sync: True to wait until the content is on the disk.
        temporary_folder: Folder on the same file system for the temporary file. Default: the file's own folder.

    Raises:
        OSError: The file cannot be written, or its path is a device, a pipe or a folder.
    """
    with replacing(path, temporary_folder) as file:
        file.write(data)
        if sync:
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def replacing(path: str | os.PathLike[str], temporary_folder: str = "") -> Generator[BinaryIO, None, None]:
    """Return a context with a file to write in parts, which replaces the one at a path at the end: see ``write``.

    After an exception, the path is as it was before.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # noqa: PTH110, PTH113 -- creating a Path costs more than the call
        raise OSError(errno.EINVAL, "exists and is not a regular file", os.fspath(path))
    # An attacker cannot prepare a file under a random name, and mode x never opens a file that exists.
    folder = temporary_folder or os.path.dirname(path)  # noqa: PTH120 -- as above
    temporary = os.path.join(folder, f".{secrets.token_hex(8)}.tmp")  # noqa: PTH118 -- as above
    try:
        with open(temporary, "xb") as file:  # noqa: PTH123 -- as above
            yield file
        os.replace(temporary, path)  # noqa: PTH105 -- as above
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)  # noqa: PTH108 -- as above
        raise


def remove_temporary_files(folder: Path) -> None:
    """Delete the temporary files that a killed process left in a folder."""
    for file in folder.glob(f".{'[0-9a-f]' * 16}.tmp"):
        file.unlink(missing_ok=True)


def npy_file(values: Any) -> bytes:
    """Return the content of a .npy file with an array."""
    file = io.BytesIO()
    np.save(file, values, allow_pickle=False)
    return file.getvalue()


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: str = "rb") -> BinaryIO:
    """Open a regular file. Unlike ``open``, this never blocks on a pipe and never reads a device.

    Args:
        path: Path of the file.
        flags: Flags of ``os.open``.
        mode: Mode of ``open``; it must match the flags.

    Raises:
        OSError: The file cannot be opened, or is not a regular file.
    """
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0), 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return cast("BinaryIO", open(descriptor, mode))  # noqa: PTH123 -- the caller closes it
