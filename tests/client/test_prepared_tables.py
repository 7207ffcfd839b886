"""A prepared Parquet file of a few hundred bytes is read within limits, or refused."""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import camserve
from camserve import dataset
from camserve._core.files import TooLarge
from camserve.dataset import parquet

if TYPE_CHECKING:
    from pathlib import Path

PHOTO = b"\xff\xd8\xff\xe0"
MEBIBYTE = 1 << 20


@pytest.fixture
def taken() -> Any:
    """The pool of Arrow, which counts the bytes that a test takes."""
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    pa.set_memory_pool(pool)
    yield pool
    pa.set_memory_pool(before)


def repeated(path: Path, value: str | bytes, rows: int, **columns: Any) -> str:
    """Write a table whose rows share one value, which takes a few hundred bytes."""
    column = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([value]))
    path.parent.mkdir(exist_ok=True)
    options: Any = {"compression": "zstd", "store_schema": False, "dictionary_pagesize_limit": 1 << 30}
    pq.write_table(pa.table({"image": column, **columns}), path, **options)
    assert path.stat().st_size < 2000
    return str(path)


def test_rows_that_share_a_photo_are_read_one_at_a_time(tmp_path: Path, taken: Any) -> None:
    photo = PHOTO + bytes(MEBIBYTE)
    photos = dataset.Photos([repeated(tmp_path / "a.parquet", photo, 100)])
    keys = list(photos)

    assert len(keys) == 100
    assert {photos.read(key) == photo for key in (keys[0], keys[50], keys[49], keys[20])} == {True}
    assert taken.max_memory() < 40 * MEBIBYTE  # all rows have 100 MiB


def test_photos_of_a_table_are_read_in_any_order(tmp_path: Path) -> None:
    cells = [PHOTO + bytes([row]) for row in range(60)]
    for name, values in {"bytes": cells, "struct": [{"bytes": cell, "path": ""} for cell in cells]}.items():
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"image": values}), path, row_group_size=25)
        photos = dataset.Photos([str(path)])
        order = [0, 2, 1, 59, 30, 24, 25, 26, 3, 58, 57]
        assert [photos.read(f"{path}#{row}") for row in order] == [cells[row] for row in order]


def test_photo_that_is_too_large_at_first_is_read_with_a_higher_limit(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": [PHOTO + bytes(99)] * 3}), tmp_path / "a.parquet")
    photos = dataset.Photos([str(tmp_path / "a.parquet")])

    for key in photos:
        with pytest.raises(TooLarge):
            photos.read(key, 50)
        assert photos.read(key) == PHOTO + bytes(99)


def test_path_in_a_table_has_a_limit(tmp_path: Path, taken: Any) -> None:
    photos = dataset.Photos([repeated(tmp_path / "a.parquet", "x" * MEBIBYTE, 100)])

    with pytest.raises(camserve.InvalidArgument, match="a path of 1,048,576 characters"):
        next(iter(photos))
    assert taken.max_memory() < 20 * MEBIBYTE


def varint(number: int) -> bytes:
    """Encode a number as Thrift does."""
    number <<= 1
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes([*encoded, number])


def with_rows(path: Path, claimed: int) -> str:
    """Write a table of 70,000 empty rows whose footer claims another number."""
    pq.write_table(pa.table({"image": pa.array([None] * 70_000, pa.binary())}), path, store_schema=False)
    data = path.read_bytes()
    (length,) = struct.unpack("<I", data[-8:-4])
    footer = data[-8 - length : -8].replace(b"\x16" + varint(70_000), b"\x16" + varint(claimed), 1)
    path.write_bytes(data[: -8 - length] + footer + struct.pack("<I", len(footer)) + b"PAR1")
    assert pq.ParquetFile(path).metadata.num_rows == claimed
    return str(path)


def test_number_of_rows_must_be_that_of_the_row_groups(tmp_path: Path) -> None:
    with pytest.raises(camserve.InvalidArgument, match="wrong number of rows"):
        next(iter(dataset.Photos([with_rows(tmp_path / "a.parquet", 1 << 40)])))


def test_number_of_rows_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "MAX_ROWS", 69_999)
    with pytest.raises(camserve.InvalidArgument, match="70,000 rows, more than 69,999: divide it"):
        next(iter(dataset.Photos([with_rows(tmp_path / "a.parquet", 70_000)])))


def test_footer_has_a_limit(tmp_path: Path, taken: Any) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1")
    os.truncate(path, 1 << 30)
    with path.open("ab") as file:
        file.write(struct.pack("<I", 900 * MEBIBYTE) + b"PAR1")

    with pytest.raises(camserve.InvalidArgument, match="its footer has more than 67,108,864 bytes"):
        next(iter(dataset.Photos([str(path)])))
    assert taken.max_memory() < MEBIBYTE


def test_part_of_the_results_has_a_limit(tmp_path: Path, taken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "MAX_TABLE_BYTES", 5 * MEBIBYTE)
    errors = pa.nulls(100, pa.string())
    repeated(tmp_path / "results" / "part-x.parquet", "x" * MEBIBYTE, 100, error=errors)

    for read in (dataset.completed, dataset.failed):
        with pytest.raises(camserve.InvalidArgument, match=r"part-x\.parquet cannot be read: delete it"):
            read(dataset.Store(str(tmp_path)))
    assert taken.max_memory() < 30 * MEBIBYTE


@pytest.mark.parametrize(
    "columns",
    [
        {"image": [1], "error": ["x"]},
        {"image": pa.array([None], pa.string()), "error": ["x"]},
        {"image": [["a"]], "error": ["x"]},
        {"no": ["x"]},
    ],
)
def test_part_of_the_results_that_names_no_photos_is_refused(tmp_path: Path, columns: Any) -> None:
    (tmp_path / "results").mkdir()
    pq.write_table(pa.table(columns), tmp_path / "results" / "part-x.parquet")

    for read in (dataset.completed, dataset.failed):
        with pytest.raises(camserve.InvalidArgument, match=r"part-x\.parquet .*delete it, and the next run"):
            read(dataset.Store(str(tmp_path)))
