"""The folder of a job: on this machine, or a prefix of an object store."""

from __future__ import annotations

import os
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from camserve import _local
from camserve._errors import FailedPrecondition, InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Generator

_LOCK = ".lock"


def arrow(module: str = "") -> Any:
    """Return pyarrow, or a module of it.

    Raises:
        InvalidArgument: It is not installed.
    """
    try:
        return import_module(f"pyarrow.{module}" if module else "pyarrow")
    except ModuleNotFoundError as error:
        raise InvalidArgument('this needs pyarrow: `pip install "camserve[data]"`') from error


def filesystem(place: str) -> tuple[Any, str]:
    """Return the file system that a path or URI is of, and the path in it.

    ``s3://``, ``gs://``, ``abfs://`` and ``hdfs://`` are Arrow's own; others are fsspec's.

    Raises:
        InvalidArgument: Nothing here knows such a URI.
    """
    fs = arrow("fs")
    if "://" not in place:
        return fs.LocalFileSystem(), os.path.abspath(place)  # noqa: PTH100 -- resolve() would follow links
    try:
        found, path = fs.FileSystem.from_uri(place)
    except (ValueError, OSError, NotImplementedError) as error:
        return _foreign(place, error)
    return found, path


def _foreign(place: str, error: Exception) -> tuple[Any, str]:
    fs = arrow("fs")
    try:
        found, path = import_module("fsspec.core").url_to_fs(place)
    except (ImportError, ValueError):
        raise InvalidArgument(f"{place}: {error}") from error
    return fs.PyFileSystem(fs.FSSpecHandler(found)), path


class Store:
    """A folder of this machine or an object store, in which a file is written completely or not at all.

    On this machine a file is written in the folder itself first, and then moved to its place; an
    object store shows nothing of an object before it is complete.

    Args:
        place: A path, or a URI.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        self._fs, self._root = filesystem(place)
        self._local = self._fs.type_name == "local"
        self._made: set[str] = set()

    def path(self, name: str) -> str:
        """Return the path of a file in its file system."""
        return f"{self._root}/{name}"

    def write(self, name: str, data: bytes, *, lasting: bool = False) -> None:
        """Write a file, in place of the one that may be there.

        Args:
            name: Its path in the folder.
            data: What is in it.
            lasting: Whether to wait until the disk has it.

        Raises:
            OSError: It cannot be written.
        """
        path = self.path(name)
        self._make(path.rpartition("/")[0])
        if self._local:
            _local.write(path, data, lasting=lasting, unfinished=self._root)
        else:
            with self._fs.open_output_stream(path) as stream:
                stream.write(data)

    def _make(self, folder: str) -> None:
        if folder not in self._made:
            if self._local and not Path(folder).resolve().is_relative_to(Path(self._root).resolve()):
                raise FailedPrecondition(f"{folder} is a link out of {self.place}: write to another folder")
            self._fs.create_dir(folder, recursive=True)
            self._made.add(folder)

    def read(self, name: str) -> bytes | None:
        """Return what is in a file; None where there is none."""
        path = self.path(name)
        try:
            with _local.open_regular(path) if self._local else self._fs.open_input_stream(path) as stream:
                data: bytes = stream.read()
                return data
        except FileNotFoundError:
            return None

    def names(self, folder: str, suffix: str) -> list[str]:
        """Return the files of a folder that end so, sorted, as paths in the store; none where there is no folder."""
        selector = arrow("fs").FileSelector(self.path(folder), allow_not_found=True)
        found = sorted(str(info.base_name) for info in self._fs.get_file_info(selector) if info.is_file)
        return [f"{folder}/{name}" for name in found if name.endswith(suffix) and not name.startswith(".")]

    def table(self, name: str, columns: list[str] | None = None) -> Any:
        """Read a Parquet file.

        Raises:
            InvalidArgument: It is none, or cannot be read.
        """
        try:
            return arrow("parquet").read_table(self.path(name), columns=columns, filesystem=self._fs)
        except (ValueError, OSError) as error:
            words = f"{self.place}/{name} cannot be read: delete it, and its photos are explained again"
            raise InvalidArgument(f"{words} ({error})") from error


@contextmanager
def locked(folder: Path) -> Generator[None, None, None]:
    """Lock a job's folder inside the block, and create the folder if it is missing.

    The lock ends with the process, however that ends.

    Raises:
        FailedPrecondition: Another process has locked it.
        OSError: The lock is a link, or cannot be opened.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _local.open_regular(folder / _LOCK, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), "r+b") as file:
        try:
            import fcntl  # noqa: PLC0415 -- where there is none, there is no lock
        except ModuleNotFoundError:  # pragma: no cover -- Windows
            yield
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FailedPrecondition(f"another run is at work in {folder}: wait for it, or stop it") from error
        _local.sweep(folder)
        yield
