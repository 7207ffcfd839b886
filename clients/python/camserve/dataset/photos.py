"""Photos of a job, read from folders, globs, Parquet files and object stores."""

from __future__ import annotations

import os
import posixpath
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from camserve._core.errors import CamserveError, FailedPrecondition, InvalidArgument
from camserve._core.files import MAX_PHOTO_BYTES, open_regular, read_photo
from camserve._files.finding import expand_glob, is_photo, leads_below, root_of, scheme_of, walk
from camserve.dataset import parquet
from camserve.dataset.parquet import arrow
from camserve.dataset.store import filesystem

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

Key: TypeAlias = str
"""Identifier of a photo: its absolute path or URI, or those of a Parquet file with "#" and the row's number."""

_ROW = re.compile(r"(?P<table>.+\.parquet)#(?P<row>\d+)", re.DOTALL)
_JOB_FILE = "job.json"
_OVERLAYS_FOLDER = "overlays"
_MAX_PATH = 1 << 15  # characters of a path in a table
_LOCAL_SCHEMES = frozenset({"", "file://"})


class Photos:
    """Photos of a job. Iterating yields their keys; ``read`` returns the file of one.

    Of a Parquet file, only a few rows are held in memory.

    Args:
        paths: Files, folders, globs and Parquet files, or URIs of them, except of globs.
        column: Column of a Parquet file that has the photos. Default: "image", or the only column
            with bytes.
        without: Folder to leave out: that of the job's own results.
        allow_outside: True to read files outside of the named folders, through links and by the paths in a
            Parquet file. Whoever created these could name any file on this machine.
    """

    def __init__(
        self, paths: Iterable[str], column: str = "", without: str = "", *, allow_outside: bool = False
    ) -> None:
        self._paths = tuple(paths)
        self._allow_outside = allow_outside
        self._column = column
        self._without = filesystem(without)[1] if without else ""
        self._file_systems: dict[str, Any] = {}  # by scheme and bucket
        self._allowed_files: set[str] = set()  # local files that the caller named
        self._allowed_folders: set[str] = set()  # local folders that contain all other files
        for path in self._paths:
            fs, inner_path = filesystem(path)
            self._file_systems[_root(scheme_of(path) + inner_path)] = fs
            if scheme_of(path) in _LOCAL_SCHEMES:
                self._allow(inner_path)
        self._cells: tuple[str, parquet.Cells | None] = ("", None)  # path of the last table, and its cells
        self._table_lock = threading.Lock()  # guards the cells

    def _allow(self, path: str) -> None:
        folder = root_of(path)
        if folder is None:
            self._allowed_files.add(path)
        if folder is None and path.endswith(".parquet"):
            folder = os.path.realpath(Path(path).parent)
        if folder:
            self._allowed_folders.add(folder)

    def __str__(self) -> str:
        return " ".join(self._paths)

    def __iter__(self) -> Generator[Key, None, None]:
        """Yield the key of every photo, path by path, and in a folder ordered by name.

        Raises:
            InvalidArgument: A path or column does not exist.
        """
        for path in self._paths:
            yield from self._keys(path)

    def _keys(self, path: str) -> Generator[Key, None, None]:
        scheme, (fs, inner_path) = scheme_of(path), filesystem(path)
        if scheme in _LOCAL_SCHEMES:
            yield from self._local_keys(path, scheme, inner_path)
            return
        (info,) = fs.get_file_info([inner_path])
        kinds = arrow("fs").FileType
        if info.type == kinds.Directory:
            yield from self._keys_below_prefix(fs, inner_path, scheme)
        elif info.type == kinds.NotFound:
            raise InvalidArgument(f"{path} does not exist")
        elif inner_path.endswith(".parquet"):
            yield from self._keys_in_table(scheme + inner_path)
        else:
            yield scheme + inner_path

    def _local_keys(self, path: str, scheme: str, inner_path: str) -> Generator[Key, None, None]:
        """Yield the keys of a local path. Arrow is not used, because it supports only file names in UTF-8."""
        if Path(inner_path).is_dir():
            yield from (scheme + image for image in walk(inner_path, self._should_enter))
        elif not Path(inner_path).exists():
            yield from self._keys_of_glob(path)
        elif inner_path.endswith(".parquet") and Path(inner_path).is_file():
            yield from self._keys_in_table(scheme + inner_path)
        else:
            yield scheme + inner_path

    def _keys_of_glob(self, path: str) -> Generator[Key, None, None]:
        if not exists(path) or scheme_of(path):
            raise InvalidArgument(f"{path} does not exist")
        for match in expand_glob(path):
            yield from self._keys(match)

    def _should_enter(self, folder: str) -> bool:
        """Return True for a local folder to search: any but those with the overlays of a job."""
        path = Path(folder)
        in_job = path.name == _OVERLAYS_FOLDER and (path.parent / _JOB_FILE).exists()
        return not self._is_output(folder, in_job=in_job)

    def _keys_below_prefix(self, fs: Any, folder: str, scheme: str) -> Generator[Key, None, None]:
        """Yield the photos below a prefix of an object store."""
        fs_module = arrow("fs")
        infos = sorted(fs.get_file_info(fs_module.FileSelector(folder)), key=lambda info: info.base_name)
        in_job = _JOB_FILE in (info.base_name for info in infos)
        for info in infos:
            if info.type == fs_module.FileType.Directory and not self._is_output(info.path, in_job=in_job):
                yield from self._keys_below_prefix(fs, info.path, scheme)
            elif info.type == fs_module.FileType.File and is_photo(info.base_name):
                yield scheme + info.path

    def _is_output(self, folder: str, *, in_job: bool) -> bool:
        """Return True for this job's folder, and for the overlays folder beside the job file of any job."""
        return folder == self._without or (in_job and folder.endswith(f"/{_OVERLAYS_FOLDER}"))

    def _keys_in_table(self, table: str) -> Generator[Key, None, None]:
        file, column = self._open_table(table)  # not the file that threads read from
        if not _is_text(file.schema_arrow.field(column).type):
            yield from (f"{table}#{row}" for row in range(file.metadata.num_rows))
            return
        try:
            for batch in parquet.rows(file, [column]):
                yield self._key_in_table(table, batch.column(0)[0].as_py() or "")
        except parquet.errors() as error:
            raise InvalidArgument(f"{table} cannot be read: {error}") from error

    def _key_in_table(self, table: str, path: str) -> Key:
        """Return the key of a photo whose path is in a table.

        Raises:
            InvalidArgument: The photo is outside of the table's folder, and ``allow_outside`` is False; or the path is
                too long, or names a row of a table, whose bytes are not those that the caller named.
        """
        if len(path) > _MAX_PATH:
            raise InvalidArgument(f"{table} has a path of {len(path):,} characters")
        key = _resolve(table, path)
        if _ROW.fullmatch(key):
            raise InvalidArgument(f"{table} names {path}, which is a row of a Parquet file: a path must name a photo")
        if self._allow_outside or (key.startswith(table.rpartition("/")[0] + "/") and ".." not in key.split("/")):
            return key
        raise InvalidArgument(f"{table} names {path}, which is outside of its folder: use --allow-outside to read it")

    def read(self, key: Key, limit: int = MAX_PHOTO_BYTES) -> bytes:
        """Return the file of a photo. This method is thread-safe.

        Args:
            key: Key of the photo.
            limit: Most bytes of the file.

        Raises:
            InvalidArgument: The photo cannot be read, is larger, or is not a photo.
            CamserveError: An object store failed; a later attempt may succeed.
        """
        try:
            cell = _ROW.fullmatch(key)
            return self._read_cell(cell["table"], int(cell["row"]), limit) if cell else self._read_file(key, limit)
        except parquet.errors() as error:  # ValueError: also a path with a NUL
            reason = getattr(error, "strerror", None) or str(error)
            message = f"cannot read {key!r}: {reason}"
            is_remote = scheme_of(key) not in _LOCAL_SCHEMES
            if isinstance(error, OSError) and is_remote and not isinstance(error, FileNotFoundError):
                raise CamserveError(message) from error
            raise InvalidArgument(message, fields={"image": reason}) from error

    def _read_file(self, key: Key, limit: int) -> bytes:
        scheme = scheme_of(key)
        path = key.removeprefix(scheme)
        if scheme in _LOCAL_SCHEMES:
            with open_regular(self._check_links(path)) as file:
                return read_photo(file, os.fstat(file.fileno()).st_size, limit)
        with self._file_system(key).open_input_stream(path, compression=None) as stream:
            return read_photo(stream, 0, limit)

    def _check_links(self, path: str) -> str:
        """Return a local path if its links do not lead out of the named folders.

        Raises:
            FailedPrecondition: They do. A later run with --allow-outside can read the photo.
        """
        is_allowed = self._allow_outside or path in self._allowed_files
        if is_allowed or any(leads_below(path, folder) for folder in self._allowed_folders):
            return path
        raise FailedPrecondition(f"{path} is a link out of the named folders: use --allow-outside to follow it")

    def _file_system(self, key: Key) -> Any:
        """Return the file system of a photo or table. Each bucket has its own: their regions can differ."""
        root = _root(key)
        return self._file_systems.get(root) or self._file_systems.setdefault(root, filesystem(key)[0])

    def _read_cell(self, table: str, row: int, limit: int) -> bytes:
        with self._table_lock:
            cells = self._cells[1]
            if cells is None or self._cells[0] != table:
                cells = parquet.Cells(*self._open_table(table))
                self._cells = table, cells
            return cells.read(row, limit)

    def _open_table(self, table: str) -> tuple[Any, str]:
        """Open a Parquet file; return it and the name of the column with the photos."""
        try:
            path = table.removeprefix(scheme_of(table))
            path = self._check_links(path) if scheme_of(table) in _LOCAL_SCHEMES else path
            file = parquet.open_file(self._file_system(table).open_input_file(path))
        except parquet.errors() as error:
            raise InvalidArgument(f"{table} is not a Parquet file: {error}") from error
        return file, _choose_column(table, file.schema_arrow, self._column)


def _choose_column(table: str, schema: Any, column: str) -> str:
    """Return the name of the column with the photos.

    Raises:
        InvalidArgument: The named column does not exist, or no column is named and there are several.
    """
    candidates = [field.name for field in schema if _is_bytes(field.type) or _is_text(field.type)]
    if column in candidates:
        return column
    with_bytes = [field.name for field in schema if _is_bytes(field.type)]
    if not column and ("image" in candidates or len(with_bytes) == 1):
        return "image" if "image" in candidates else with_bytes[0]
    columns = f"candidates are {', '.join(candidates)}" if candidates else "no column has bytes or text"
    problem = f"no column {column} of bytes or paths" if column else "name the column with the photos by --column"
    raise InvalidArgument(f"{table}: {problem}; {columns}")


def _is_text(kind: Any) -> bool:
    types = arrow("types")
    return bool(types.is_string(kind) or types.is_large_string(kind))


def _is_bytes(kind: Any) -> bool:
    """Return True for bytes, and for the struct of bytes and path in which Hugging Face's datasets store an image."""
    types = arrow("types")
    if types.is_struct(kind):
        return any(field.name == "bytes" and parquet.is_bytes(field.type) for field in kind)
    return parquet.is_bytes(kind)


def _root(key: Key) -> str:
    """Return the common start of all keys of a file system: the scheme, and the bucket if there is one."""
    scheme = scheme_of(key)
    inner_path = key.removeprefix(scheme)
    return scheme if not scheme or inner_path.startswith("/") else scheme + inner_path.partition("/")[0]


def _resolve(table: str, path: str) -> Key:
    """Return the key of a photo whose path is in a table: a URI, or a path in the table's own file system."""
    if scheme_of(path):
        return path
    if path.startswith("/"):
        return _root(table) + path
    scheme = scheme_of(table)
    folder = table.removeprefix(scheme).rpartition("/")[0]
    return scheme + posixpath.normpath(f"{folder}/{path}")


def exists(path: str) -> bool:
    """Return True if a path or glob matches a file or folder. A URI is not checked."""
    return bool(scheme_of(path)) or bool(expand_glob(path))
