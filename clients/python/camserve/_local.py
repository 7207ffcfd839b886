"""Local files, read and written safely in folders that somebody else may have prepared."""

from __future__ import annotations

import errno
import io
import os
import re
import secrets
import stat
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from camserve._errors import InvalidArgument

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO, Protocol

    class Readable(Protocol):
        """A file, or an object of a store."""

        def read(self, size: int = ..., /) -> bytes:
            """Return up to ``size`` bytes, or all."""
            ...


NO_PHOTO = "not a JPEG, PNG, WebP or BMP file"

# The formats that a server accepts. For a BMP the header's size is checked as well, because a text may begin with "BM".
_PHOTO = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|RIFF.{4}WEBP|BM.{12}[\x0c\x10\x28\x34\x38\x40\x6c\x7c]\0\0\0", re.DOTALL
)
_HEAD = 18  # bytes
_LARGEST = 1 << 30


def read_photo(file: Readable, size: int) -> bytes:
    """Read a photo. If the file is not a photo, or too large for any server, only its first bytes are read.

    Args:
        file: The file, at its beginning.
        size: Its size in bytes; 0 if unknown.

    Raises:
        InvalidArgument: The file is not a photo, so it must not be sent, or it is too large.
    """
    head = file.read(_HEAD)
    if head and not _PHOTO.match(head):
        raise InvalidArgument(f"image: {NO_PHOTO}, so it is not sent", fields={"image": NO_PHOTO})
    if size > _LARGEST:
        reason = f"it has {size:,} bytes, more than any server takes"
        raise InvalidArgument(f"image: {reason}", fields={"image": reason})
    return head + file.read()


def write(path: str | os.PathLike[str], data: bytes, *, lasting: bool = False, unfinished: str = "") -> None:
    """Write a file completely or not at all. A link at its path is replaced, not followed.

    Args:
        path: Where the file is to be.
        data: Its content.
        lasting: Whether to wait until it is on the disk.
        unfinished: A folder on the same file system in which it is written first. Default: the file's own folder.

    Raises:
        OSError: It cannot be written, or there is a device, a pipe or a folder at its path.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # noqa: PTH110, PTH113 -- a Path would cost more than the call
        raise OSError(errno.EINVAL, "exists and is not a regular file", os.fspath(path))
    # A random name cannot be prepared in advance, and mode x never opens a file that exists.
    folder = unfinished or os.path.dirname(path)  # noqa: PTH120 -- as above
    first = os.path.join(folder, f".{secrets.token_hex(8)}.tmp")  # noqa: PTH118 -- as above
    try:
        with open(first, "xb") as file:  # noqa: PTH123 -- as above
            file.write(data)
            if lasting:
                file.flush()
                os.fsync(file.fileno())
        os.replace(first, path)  # noqa: PTH105 -- as above
    except BaseException:
        with suppress(OSError):
            os.unlink(first)  # noqa: PTH108 -- as above
        raise


def sweep(folder: Path) -> None:
    """Delete the unfinished files that a killed process left in a folder."""
    for each in folder.glob(f".{'[0-9a-f]' * 16}.tmp"):
        each.unlink(missing_ok=True)


def npy(values: Any) -> bytes:
    """Return an array as a .npy file."""
    file = io.BytesIO()
    np.save(file, values, allow_pickle=False)
    return file.getvalue()


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: str = "rb") -> BinaryIO:
    """Open a regular file, without waiting for a pipe or reading a device.

    Args:
        path: The file.
        flags: For ``os.open``.
        mode: For ``open``; it must match the flags.

    Raises:
        OSError: It cannot be opened, or is not a regular file.
    """
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0), 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return cast("BinaryIO", open(descriptor, mode))  # noqa: PTH123 -- for the caller to close
