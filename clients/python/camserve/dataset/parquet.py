"""Parquet files, read a row at a time: in a few hundred bytes of a file, a row can be repeated to gigabytes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from camserve._core.errors import InvalidArgument
from camserve._core.files import MAX_PHOTO_BYTES, check_photo

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

MAX_ROWS = 1 << 24
"""Most rows of a file: whole groups of empty rows take no bytes, and counting them would not end."""

MAX_TABLE_BYTES = 256 << 20
"""Most bytes of a table that is held: a part of the results has the rows of a thousand photos."""

_MAX_FOOTER_BYTES = 64 << 20
_TAIL_BYTES = 8  # of a file: the length of the footer, and "PAR1"
_BUFFER_BYTES = 8 << 20  # that are read ahead of a column
_KEPT_ROWS = 16  # that were read before their turn: threads ask for the rows of photos almost in order
_HEAD_BYTES = 64  # in which check_photo finds the format


def arrow(module: str = "") -> Any:
    """Return pyarrow, or one of its modules.

    Raises:
        InvalidArgument: pyarrow is not installed.
    """
    try:
        return import_module(f"pyarrow.{module}" if module else "pyarrow")
    except ModuleNotFoundError as error:
        raise InvalidArgument('this needs pyarrow: `pip install "camserve[data]"`') from error


def errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of a file that cannot be read, or is not what it should be."""
    return OSError, ValueError, LookupError, arrow().ArrowException


def open_file(source: Any) -> Any:
    """Return the ParquetFile of an open file of Arrow.

    Raises:
        ValueError: It is no Parquet file, its footer is too large, or the numbers of rows in it are wrong or too large.
    """
    size = source.size()
    source.seek(max(size - _TAIL_BYTES, 0))
    if int.from_bytes(source.read(4), "little") > _MAX_FOOTER_BYTES:
        raise ValueError(f"its footer has more than {_MAX_FOOTER_BYTES:,} bytes")
    source.seek(0)
    file = arrow("parquet").ParquetFile(source, buffer_size=_BUFFER_BYTES, pre_buffer=False)
    groups = _rows_of_groups(file)
    if file.metadata.num_rows != sum(groups) or min(groups, default=0) < 0:
        raise ValueError("its footer has a wrong number of rows")
    if sum(groups) > MAX_ROWS:
        raise ValueError(f"it has {sum(groups):,} rows, more than {MAX_ROWS:,}: divide it")
    return file


def _rows_of_groups(file: Any) -> list[int]:
    return [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)]


def rows(file: Any, columns: Sequence[str], groups: Sequence[int] | None = None) -> Generator[Any, None, None]:
    """Yield each row of some columns as a RecordBatch; of all row groups, or of some."""
    chosen = range(file.num_row_groups) if groups is None else groups
    yield from file.iter_batches(1, row_groups=list(chosen), columns=list(columns), use_threads=False)


def table(file: Any, columns: Sequence[str] | None = None) -> Any:
    """Return a table of all rows.

    Raises:
        KeyError: A column does not exist.
        ValueError: The table would take more than ``MAX_TABLE_BYTES``.
    """
    names = list(file.schema_arrow.names) if columns is None else list(columns)
    schema = arrow("").schema([file.schema_arrow.field(name) for name in names], file.schema_arrow.metadata)
    batches, size = list[Any](), 0
    for batch in rows(file, names):
        batches.append(batch)
        size += batch.nbytes
        if size > MAX_TABLE_BYTES:
            raise ValueError(f"it has more than {MAX_TABLE_BYTES:,} bytes of rows")
    return arrow("").Table.from_batches(batches, schema).combine_chunks()


class Cells:
    """Cells of a column with photos, which are read in about the order of the rows.

    Args:
        file: The ParquetFile.
        column: Name of the column: bytes, or structs with the field "bytes".
    """

    def __init__(self, file: Any, column: str) -> None:
        self._file, self._column = file, column
        self._group = range(0)  # rows of the group that is read
        self._next = 0  # row that comes next
        self._rest: Generator[Any, None, None] | None = None  # the rows from there on
        self._kept: dict[int, Any] = {}  # rows that were read and not yet returned

    def read(self, row: int, limit: int = MAX_PHOTO_BYTES) -> bytes:
        """Return a photo; no bytes for a cell that is null.

        Raises:
            ValueError: The row does not exist, or its cell is not bytes.
            InvalidArgument: The cell is no photo.
            TooLarge: It has more bytes than the limit.
        """
        batch = self._kept.pop(row, None) or self._seek(row)
        cells = batch.column(0)
        if arrow("types").is_struct(cells.type):
            cells = arrow("compute").struct_field(cells, "bytes")
        if not is_bytes(cells.type):
            raise ValueError("its cell has no bytes")
        buffer = cells[0].as_buffer()
        if buffer is None:
            return b""
        if buffer.size > limit:
            self._keep(row, batch)
        check_photo(buffer[:_HEAD_BYTES].to_pybytes(), buffer.size, limit)
        data: bytes = buffer.to_pybytes()
        return data

    def _seek(self, row: int) -> Any:
        """Return a row, and keep the last ones that are passed over."""
        if self._rest is None or row not in self._group or row < self._next:
            self._open_group(row)
        rest, self._rest = self._rest, None  # unless it fails
        for batch in rest or ():
            self._next += 1
            if self._next > row:
                self._rest = rest
                return batch
            self._keep(self._next - 1, batch)
        raise ValueError("the row does not exist")

    def _keep(self, row: int, batch: Any) -> None:
        self._kept[row] = batch
        while len(self._kept) > _KEPT_ROWS or sum(each.nbytes for each in self._kept.values()) > MAX_PHOTO_BYTES:
            del self._kept[next(iter(self._kept))]

    def _open_group(self, row: int) -> None:
        self._kept.clear()
        start = 0
        for index, count in enumerate(_rows_of_groups(self._file)):
            self._group, self._next = range(start, start + count), start
            if row in self._group:
                self._rest = rows(self._file, [self._column], [index])
                return
            start += count
        self._rest = None


def is_bytes(kind: Any) -> bool:
    """Return True for the types of Arrow that have bytes."""
    types = arrow("types")
    return bool(types.is_binary(kind) or types.is_large_binary(kind))
