"""Files of this machine, read and written in folders that somebody else may have prepared."""

from __future__ import annotations

import errno
import io
import os
import secrets
import stat
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from typing import BinaryIO


def write(path: str | os.PathLike[str], data: bytes, *, lasting: bool = False) -> None:
    """Write a file whole or not at all. A link that lies in its place is replaced, not followed.

    Args:
        path: Of the file.
        data: What is in it.
        lasting: Whether to wait until the disk has it.

    Raises:
        OSError: It cannot be written, or a device, a pipe or a folder has its name.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # noqa: PTH110, PTH113 -- a Path would cost more than the call
        raise OSError(errno.EINVAL, "there is something that is no file", os.fspath(path))
    # Nobody can have prepared a name that is random, and what is there is not opened: that is mode x.
    beside = os.path.join(os.path.dirname(path), f".{secrets.token_hex(8)}.tmp")  # noqa: PTH118, PTH120 -- as above
    try:
        with open(beside, "xb") as file:  # noqa: PTH123 -- as above
            file.write(data)
            if lasting:
                file.flush()
                os.fsync(file.fileno())
        os.replace(beside, path)  # noqa: PTH105 -- as above
    except BaseException:
        with suppress(OSError):
            os.unlink(beside)  # noqa: PTH108 -- as above
        raise


def npy(values: Any) -> bytes:
    """Return an array as a .npy file."""
    file = io.BytesIO()
    np.save(file, values, allow_pickle=False)
    return file.getvalue()


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: str = "rb") -> BinaryIO:
    """Open a regular file, and neither wait for a pipe nor begin to read a device.

    Args:
        path: Of the file.
        flags: For ``os.open``.
        mode: That goes with them.

    Raises:
        OSError: It cannot be opened, or is no regular file.
    """
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0), 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return open(descriptor, mode)  # noqa: PTH123 -- for the caller to close
