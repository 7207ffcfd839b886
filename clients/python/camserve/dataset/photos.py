"""The photos of a job: from folders, globs, Parquet files and object stores, read a few at a time."""

from __future__ import annotations

import os
import posixpath
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from camserve._errors import CamserveError, FailedPrecondition, InvalidArgument
from camserve._files import is_photo, leads_below, named, root_of, walk
from camserve._local import open_regular, read_photo
from camserve.dataset.store import arrow, filesystem

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

Key: TypeAlias = str
"""Identifies a photo: its absolute path or URI, or those of a Parquet file, "#" and the row."""

_ROW = re.compile(r"(?P<table>.+\.parquet)#(?P<row>\d+)", re.DOTALL)
_CARD = "job.json"
_OVERLAYS = "overlays"
_ROWS_AT_ONCE = 4096  # of a column of paths
_LOCAL = frozenset({"", "file://"})  # no network between


class Photos:
    """The photos of a job. Iterating yields their keys; ``read`` returns the file of one.

    Only the row group of a Parquet file that was read last is held in memory.

    Args:
        paths: Files, folders, globs, Parquet files, or URIs of any of them but globs.
        column: The column of a Parquet file that has the photos. Default: "image", or the only one
            with bytes.
        without: A folder to leave out: that of the job's own results.
        allow_outside: Whether to read files outside of the named folders, through links and by the paths in a
            Parquet file. Whoever made these could name any file on this machine.
    """

    def __init__(
        self, paths: Iterable[str], column: str = "", without: str = "", *, allow_outside: bool = False
    ) -> None:
        self._paths = tuple(paths)
        self._allow_outside = allow_outside
        self._column = column
        self._without = filesystem(without)[1] if without else ""
        self._roots: dict[str, Any] = {}
        self._named: set[str] = set()  # local files
        self._folders: set[str] = set()  # local folders that all other files must lie in
        for path in self._paths:
            fs, inside = filesystem(path)
            self._roots[_root(_scheme(path) + inside)] = fs
            if _scheme(path) in _LOCAL:
                self._allow(inside)
        self._table: tuple[str, Any, str] = ("", None, "")
        self._group: tuple[int, int, Any] = (0, 0, None)
        self._turn = threading.Lock()  # of the two above

    def _allow(self, path: str) -> None:
        folder = root_of(path)
        if folder is None:
            self._named.add(path)
        if folder is None and path.endswith(".parquet"):
            folder = os.path.realpath(Path(path).parent)
        if folder:
            self._folders.add(folder)

    def __str__(self) -> str:
        return " ".join(self._paths)

    def __iter__(self) -> Generator[Key, None, None]:
        """Yield the key of every photo, folder by folder in the order of their names.

        Raises:
            InvalidArgument: There is no such file or column.
        """
        for path in self._paths:
            yield from self._of(path)

    def _of(self, path: str) -> Generator[Key, None, None]:
        scheme, (fs, inside) = _scheme(path), filesystem(path)
        if scheme in _LOCAL:
            yield from self._here(path, scheme, inside)
            return
        (info,) = fs.get_file_info([inside])
        kinds = arrow("fs").FileType
        if info.type == kinds.Directory:
            yield from self._below(fs, inside, scheme)
        elif info.type == kinds.NotFound:
            raise InvalidArgument(f"there is no {path}")
        elif inside.endswith(".parquet"):
            yield from self._listed(scheme + inside)
        else:
            yield scheme + inside

    def _here(self, path: str, scheme: str, inside: str) -> Generator[Key, None, None]:
        """Yield the keys that a local path names. Arrow is not used, because it takes only file names that are text."""
        if Path(inside).is_dir():
            yield from (scheme + each for each in walk(inside, self._enters))
        elif not Path(inside).exists():
            yield from self._globbed(path)
        elif inside.endswith(".parquet") and Path(inside).is_file():
            yield from self._listed(scheme + inside)
        else:
            yield scheme + inside

    def _globbed(self, path: str) -> Generator[Key, None, None]:
        if not exists(path) or "://" in path:
            raise InvalidArgument(f"there is no {path}")
        for each in named(path):
            yield from self._of(each)

    def _enters(self, folder: str) -> bool:
        """Return whether to search a local folder: not one that holds the pictures of a job."""
        path = Path(folder)
        return not self._is_a_jobs(folder, ours=path.name == _OVERLAYS and (path.parent / _CARD).exists())

    def _below(self, fs: Any, folder: str, scheme: str) -> Generator[Key, None, None]:
        """Yield the photos below a prefix of an object store."""
        fs_ = arrow("fs")
        infos = sorted(fs.get_file_info(fs_.FileSelector(folder)), key=lambda info: info.base_name)
        ours = _CARD in (info.base_name for info in infos)
        for info in infos:
            if info.type == fs_.FileType.Directory and not self._is_a_jobs(info.path, ours=ours):
                yield from self._below(fs, info.path, scheme)
            elif info.type == fs_.FileType.File and is_photo(info.base_name):
                yield scheme + info.path

    def _is_a_jobs(self, folder: str, *, ours: bool) -> bool:
        """Say whether a folder has the pictures of a job: this one's, or whose card lies beside it."""
        return folder == self._without or (ours and folder.endswith(f"/{_OVERLAYS}"))

    def _listed(self, table: str) -> Generator[Key, None, None]:
        file, column = self._opened(table)  # its own: threads that read are at other tables
        if not _is_text(file.schema_arrow.field(column).type):
            yield from (f"{table}#{row}" for row in range(file.metadata.num_rows))
            return
        for batch in file.iter_batches(_ROWS_AT_ONCE, columns=[column]):
            yield from (self._named_by(table, each or "") for each in batch.column(0).to_pylist())

    def _named_by(self, table: str, path: str) -> Key:
        """Return the key of a photo that a table names.

        Raises:
            InvalidArgument: The photo is outside of the table's folder, and that was not allowed.
        """
        key = _beside(table, path)
        if self._allow_outside or (key.startswith(table.rpartition("/")[0] + "/") and ".." not in key.split("/")):
            return key
        raise InvalidArgument(f"{table} names {path}, which is outside of its folder: --allow-outside reads that too")

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
        path = key.removeprefix(scheme)
        if scheme in _LOCAL:
            with open_regular(self._followed(path)) as file:
                return read_photo(file, os.fstat(file.fileno()).st_size)
        with self._home(key).open_input_stream(path, compression=None) as stream:
            return read_photo(stream, 0)

    def _followed(self, path: str) -> str:
        """Return a local path, once it is known where its links lead.

        Raises:
            FailedPrecondition: They lead out of all named folders. A later run with --allow-outside can read the photo.
        """
        if self._allow_outside or path in self._named or any(leads_below(path, folder) for folder in self._folders):
            return path
        raise FailedPrecondition(f"{path} leads out of the folders named: --allow-outside follows such links")

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
            path = table.removeprefix(_scheme(table))
            path = self._followed(path) if _scheme(table) in _LOCAL else path
            file = arrow("parquet").ParquetFile(self._home(table).open_input_file(path))
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


def exists(path: str) -> bool:
    """Return whether a path or glob names a file or folder; for a URI, True without looking."""
    return "://" in path or bool(named(path))
