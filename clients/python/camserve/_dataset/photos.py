"""Which photos there are, and what is in each: folders, globs, Parquet files and object stores, never all at once."""

from __future__ import annotations

import glob
import os
import posixpath
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from camserve._dataset.store import arrow, filesystem
from camserve._errors import CamserveError, InvalidArgument
from camserve._files import SUFFIXES

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

Key: TypeAlias = str
"""What a photo is known by: its absolute path or URI, or that of a Parquet file, "#" and the row."""

_ROW = re.compile(r"(?P<table>.+\.parquet)#(?P<row>\d+)", re.DOTALL)
_CARD = "job.json"
_ROWS_AT_ONCE = 4096  # of a column of paths
_LOCAL = frozenset({"", "file://"})  # no network between


class Photos:
    """The photos of a job, by their keys; nothing is held of them but the row group that was read last.

    Args:
        paths: Files, folders, globs, Parquet files, or URIs of any of them but globs.
        column: Of a Parquet file: that has the photos. Default: "image", or the only one with bytes.
        without: A folder that is left out where it lies in others: the job's own.
    """

    def __init__(self, paths: Iterable[str], column: str = "", without: str = "") -> None:
        self._paths = tuple(paths)
        self._column = column
        self._without = filesystem(without)[1] if without else ""
        self._roots: dict[str, Any] = {}
        for path in self._paths:
            fs, inside = filesystem(path)
            self._roots[_root(_scheme(path) + inside)] = fs
        self._table: tuple[str, Any, str] = ("", None, "")
        self._group: tuple[int, int, Any] = (0, 0, None)
        self._turn = threading.Lock()  # of the two above

    def __iter__(self) -> Generator[Key, None, None]:
        """Yield the key of every photo, folder by folder in the order of their names.

        Raises:
            InvalidArgument: There is no such file or column.
        """
        for path in self._paths:
            yield from self._of(path)

    def _of(self, path: str) -> Generator[Key, None, None]:
        scheme, (fs, inside) = _scheme(path), filesystem(path)
        (info,) = fs.get_file_info([inside])
        kinds = arrow("fs").FileType
        if info.type == kinds.Directory:
            yield from self._below(fs, inside, scheme) if scheme else self._walked(inside)
        elif info.type == kinds.NotFound:
            yield from self._globbed(path)
        elif inside.endswith(".parquet"):
            yield from self._listed(scheme + inside)
        else:
            yield scheme + inside

    def _globbed(self, path: str) -> Generator[Key, None, None]:
        if not is_there(path) or "://" in path:
            raise InvalidArgument(f"there is no {path}")
        for each in files([path]):
            yield from self._of(each)

    def _walked(self, folder: str) -> Generator[Key, None, None]:
        """Yield the photos below a folder of this machine; links to folders could lead round in a circle."""
        with os.scandir(folder) as entries:
            found = sorted((entry.name, entry.is_dir(follow_symlinks=False), entry.is_file()) for entry in entries)
        ours = _CARD in (name for name, _, _ in found)
        for name, is_folder, is_file in found:
            path = f"{folder}/{name}"
            if is_folder and not name.startswith(".") and not self._is_a_jobs(path, ours=ours):
                yield from self._walked(path)
            elif is_file and _is_photo(name):
                yield path

    def _below(self, fs: Any, folder: str, scheme: str) -> Generator[Key, None, None]:
        """Yield the photos below a prefix of an object store."""
        fs_ = arrow("fs")
        infos = sorted(fs.get_file_info(fs_.FileSelector(folder)), key=lambda info: info.base_name)
        ours = _CARD in (info.base_name for info in infos)
        for info in infos:
            if info.type == fs_.FileType.Directory and not self._is_a_jobs(info.path, ours=ours):
                yield from self._below(fs, info.path, scheme)
            elif info.type == fs_.FileType.File and _is_photo(info.base_name):
                yield scheme + info.path

    def _is_a_jobs(self, folder: str, *, ours: bool) -> bool:
        """Say whether a folder has the pictures of a job: this one's, or whose card lies beside it."""
        return folder == self._without or (ours and folder.endswith("/overlays"))

    def _listed(self, table: str) -> Generator[Key, None, None]:
        file, column = self._opened(table)  # its own: threads that read are at other tables
        if not _is_text(file.schema_arrow.field(column).type):
            yield from (f"{table}#{row}" for row in range(file.metadata.num_rows))
            return
        for batch in file.iter_batches(_ROWS_AT_ONCE, columns=[column]):
            yield from (_beside(table, each or "") for each in batch.column(0).to_pylist())

    def read(self, key: Key) -> bytes:
        """Return the file of a photo; from any thread.

        Raises:
            InvalidArgument: It cannot be read.
            CamserveError: A store failed, which may do better another time.
        """
        try:
            row = _ROW.fullmatch(key)
            return self._cell(row["table"], int(row["row"])) if row else self._file(key)
        except (OSError, ValueError) as error:  # ValueError: Arrow's, or a path with a NUL
            reason = getattr(error, "strerror", None) or str(error)
            words = f"cannot read {key!r}: {reason}"
            if isinstance(error, OSError) and _scheme(key) not in _LOCAL and not isinstance(error, FileNotFoundError):
                raise CamserveError(words) from error
            raise InvalidArgument(words, fields={"image": reason}) from error

    def _file(self, key: Key) -> bytes:
        scheme = _scheme(key)
        if not scheme:
            return Path(key).read_bytes()
        with self._home(key).open_input_stream(key.removeprefix(scheme), compression=None) as stream:
            data: bytes = stream.read()
            return data

    def _home(self, key: Key) -> Any:
        """Return the file system of a photo or table; two buckets may be in two regions."""
        root = _root(key)
        return self._roots.get(root) or self._roots.setdefault(root, filesystem(key)[0])

    def _cell(self, table: str, row: int) -> bytes:
        with self._turn:
            if self._table[0] != table:
                self._table, self._group = (table, *self._opened(table)), (0, 0, None)
            _, file, column = self._table
            first, behind, cells = self._group
            if cells is None or not first <= row < behind:
                first, behind, cells = self._group = _group_with(file, column, row)
            data: bytes | None = cells[row - first].as_py()
        return data or b""

    def _opened(self, table: str) -> tuple[Any, str]:
        """Open a table; return it and the name of the column that has the photos."""
        try:
            file = arrow("parquet").ParquetFile(self._home(table).open_input_file(table.removeprefix(_scheme(table))))
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"{table} is no Parquet file: {error}") from error
        return file, _chosen(table, file.schema_arrow, self._column)


def _group_with(file: Any, column: str, row: int) -> tuple[int, int, Any]:
    """Read the row group that has a row; return its first row, the one behind its last, and its cells."""
    first = 0
    for group in range(file.num_row_groups):
        behind = first + file.metadata.row_group(group).num_rows
        if row < behind:
            cells = file.read_row_group(group, columns=[column]).column(0)
            nested = arrow("types").is_struct(cells.type)
            return first, behind, arrow("compute").struct_field(cells, "bytes") if nested else cells
        first = behind
    raise ValueError("it has no such row")


def _chosen(table: str, schema: Any, column: str) -> str:
    """Return which column has the photos."""
    could_be = [field.name for field in schema if _is_bytes(field.type) or _is_text(field.type)]
    if column in could_be:
        return column
    likely = [field.name for field in schema if _is_bytes(field.type)]
    if not column and ("image" in could_be or len(likely) == 1):
        return "image" if "image" in could_be else likely[0]
    there = f"there are {', '.join(could_be)}" if could_be else "there is none with bytes or text"
    asked = f"no column {column} of bytes or paths" if column else "which column has the photos? Name it by --column"
    raise InvalidArgument(f"{table}: {asked}; {there}")


def _is_text(kind: Any) -> bool:
    types = arrow("types")
    return bool(types.is_string(kind) or types.is_large_string(kind))


def _is_bytes(kind: Any) -> bool:
    """Say whether that is bytes, or the way in which Hugging Face's datasets keep an image: bytes and a path."""
    types = arrow("types")
    if types.is_struct(kind):
        return any(field.name == "bytes" and _is_bytes(field.type) for field in kind)
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _is_photo(name: str) -> bool:
    return posixpath.splitext(name)[1].lower() in SUFFIXES and not name.startswith(".")


def _scheme(place: str) -> str:
    head, mark, _ = place.partition("://")
    return head + mark if mark else ""


def _root(key: Key) -> str:
    """Return what all paths of a key's file system begin with: the scheme, and the bucket where there are any."""
    scheme = _scheme(key)
    inside = key.removeprefix(scheme)
    return scheme if not scheme or inside.startswith("/") else scheme + inside.partition("/")[0]


def _beside(table: str, path: str) -> Key:
    """Return the key of a photo that a table names: a URI, or a path in the table's own file system."""
    if "://" in path:
        return path
    if path.startswith("/"):
        return _root(table) + path
    scheme = _scheme(table)
    folder = table.removeprefix(scheme).rpartition("/")[0]
    return scheme + posixpath.normpath(f"{folder}/{path}")


def is_there(path: str) -> bool:
    """Say whether a path, or a glob, names something; of a URI that is found out later."""
    return "://" in path or bool(_matches(path))


def files(paths: Sequence[str]) -> list[str]:
    """Return paths as they are, and for each glob what it names.

    Raises:
        InvalidArgument: One is a URI.
    """
    for path in paths:
        if "://" in path:
            raise InvalidArgument(f"{path} is read by --resume only")
    return [each for path in paths for each in _matches(path)]


def _matches(path: str) -> list[str]:
    there = os.path.exists(path)  # noqa: PTH110 -- a Path would lose how it was written
    return [path] if there else sorted(glob.glob(path, recursive=True))  # noqa: PTH207 -- it may be absolute
