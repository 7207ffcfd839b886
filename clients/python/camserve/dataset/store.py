"""Folder of a job: a local folder, or a prefix in an object store."""

from __future__ import annotations

import os
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from camserve._core.errors import FailedPrecondition, InvalidArgument
from camserve._core.files import MAX_TEXT_BYTES, open_regular, read_within, remove_temporary_files, write_file
from camserve._files.finding import scheme_of
from camserve.dataset import parquet
from camserve.dataset.parquet import arrow

if TYPE_CHECKING:
    from collections.abc import Generator

_LOCK = ".lock"


def filesystem(place: str) -> tuple[Any, str]:
    """Return the file system of a path or URI, and the path in it.

    Arrow implements ``s3://``, ``gs://``, ``abfs://`` and ``hdfs://``; fsspec implements other schemes.

    Raises:
        InvalidArgument: Neither of them supports the URI.
    """
    fs = arrow("fs")
    if not scheme_of(place):
        return fs.LocalFileSystem(), os.path.abspath(place)  # noqa: PTH100 -- resolve() would follow links
    try:
        file_system, path = fs.FileSystem.from_uri(place)
    except (ValueError, OSError, NotImplementedError) as error:
        return _fsspec_filesystem(place, error)
    return file_system, path


def _fsspec_filesystem(place: str, error: Exception) -> tuple[Any, str]:
    fs = arrow("fs")
    try:
        file_system, path = import_module("fsspec.core").url_to_fs(place)
    except (ImportError, ValueError):
        raise InvalidArgument(f"{place}: {error}") from error
    return fs.PyFileSystem(fs.FSSpecHandler(file_system)), path


class Store:
    """Local folder or object store whose files are written atomically.

    In a local folder, a temporary file is written first and then moved to its path. An object store does
    not show an object before it is complete.

    Args:
        place: A path, or a URI.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        self._fs, self._root = filesystem(place)
        self._local = self._fs.type_name == "local"
        self._created_folders: set[str] = set()

    def path(self, name: str) -> str:
        """Return the path of a file in its file system."""
        return f"{self._root}/{name}"

    def write(self, name: str, data: bytes, *, lasting: bool = False) -> None:
        """Write a file, or replace it.

        Args:
            name: Path of the file in the folder.
            data: Content of the file.
            lasting: True to wait until the content is on the disk.

        Raises:
            FailedPrecondition: The file would be outside of the folder, because of a link.
            OSError: The file cannot be written.
        """
        path = self.path(name)
        self._create_folder(path.rpartition("/")[0])
        if self._local:
            write_file(path, data, sync=lasting, temporary_folder=self._root)
        else:
            with self._fs.open_output_stream(path) as stream:
                stream.write(data)

    def remove(self, name: str) -> None:
        """Remove a file.

        Raises:
            OSError: The file cannot be removed.
        """
        self._fs.delete_file(self.path(name))

    def _create_folder(self, folder: str) -> None:
        if folder not in self._created_folders:
            if self._local and not Path(folder).resolve().is_relative_to(Path(self._root).resolve()):
                raise FailedPrecondition(f"{folder} is a link out of {self.place}: choose another folder")
            self._fs.create_dir(folder, recursive=True)
            self._created_folders.add(folder)

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if it does not exist.

        Raises:
            OSError: It cannot be read, is not a regular file, or has more than 64 MiB.
        """
        path = self.path(name)
        try:
            with open_regular(path) if self._local else self._fs.open_input_stream(path) as stream:
                return read_within(stream, MAX_TEXT_BYTES, path)
        except FileNotFoundError:
            return None

    def names(self, folder: str, suffix: str) -> list[str]:
        """Return the paths of the files with a suffix in a folder, sorted; an empty list if there is no such folder."""
        selector = arrow("fs").FileSelector(self.path(folder), allow_not_found=True)
        names = sorted(str(info.base_name) for info in self._fs.get_file_info(selector) if info.is_file)
        return [f"{folder}/{name}" for name in names if name.endswith(suffix) and not name.startswith(".")]

    def table(self, name: str, columns: list[str] | None = None) -> Any:
        """Read a Parquet file.

        Raises:
            InvalidArgument: It cannot be read, is not a Parquet file, or has more than 256 MiB of rows.
        """
        try:
            with self._fs.open_input_file(self.path(name)) as file:
                return parquet.table(parquet.open_file(file), columns)
        except parquet.errors() as error:
            message = f"{self.place}/{name} cannot be read: delete it, and the next run explains its photos again"
            raise InvalidArgument(f"{message} ({error})") from error


@contextmanager
def locked(folder: Path) -> Generator[None, None, None]:
    """Lock a job's folder inside the block; create the folder if it is missing.

    The operating system releases the lock when the process ends, also when it is killed. On Windows there is
    no lock.

    Raises:
        FailedPrecondition: Another process has locked the folder.
        OSError: The lock file is a link, or cannot be opened.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open_regular(folder / _LOCK, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), "r+b") as file:
        try:
            import fcntl  # noqa: PLC0415 -- not available on Windows
        except ModuleNotFoundError:  # pragma: no cover -- Windows
            yield
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FailedPrecondition(f"another run uses {folder}: wait for it, or stop it") from error
        remove_temporary_files(folder)
        yield
