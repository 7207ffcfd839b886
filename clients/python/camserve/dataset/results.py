"""The results of a job in its folder: the options, the parts of the table, and the photos that are done."""

from __future__ import annotations

import hashlib
import io
import json
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from camserve._core.errors import FailedPrecondition, InvalidArgument
from camserve.dataset import rows
from camserve.dataset.parquet import arrow

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from camserve._values.models import Model
    from camserve.dataset.photos import Key
    from camserve.dataset.spec import JobSpec
    from camserve.dataset.store import Store

FORMAT = "camserve job 1"
JOB_FILE = "job.json"
RESULTS_FOLDER = "results"
MERGE_SIZE = 1 << 16  # new hashes that are merged into the sorted array at once

Rows: TypeAlias = "list[dict[str, Any]]"
"""Rows of one photo in the table of results, with the columns of ``schema``."""


class KeySet:
    """Set of photos that holds 16 bytes for each, however long its key is.

    Hashes are held in a sorted array, and new ones in a set until there are enough to merge.
    """

    def __init__(self) -> None:
        self._merged = np.empty(0, "S16")
        self._new: set[bytes] = set()

    def add(self, key: Key) -> bool:
        """Add a photo; return True if it is new."""
        if key in self:
            return False
        self._new.add(_digest(key))
        if len(self._new) >= MERGE_SIZE:
            new = np.array(list(self._new), "S16")
            self._merged, self._new = np.sort(np.concatenate([self._merged, new])), set()
        return True

    def __contains__(self, key: Key) -> bool:
        """Return True if a photo was added."""
        digest = _digest(key)
        return digest in self._new or self._is_merged(digest)

    def _is_merged(self, digest: bytes) -> bool:
        index = int(np.searchsorted(self._merged, np.array(digest, self._merged.dtype)))
        return index < self._merged.size and self._merged[index] == digest


def hash_key(key: Key) -> bytes:
    """Return 16 bytes that stand for a key."""
    return hashlib.blake2b(key_text(key).encode(), digest_size=16).digest()


def _digest(key: Key) -> bytes:
    return hash_key(key).rstrip(b"\0")  # NumPy strips trailing zeros too


def key_text(key: Key) -> str:
    """Return a key as valid UTF-8 text: on Linux, a file name can be other bytes, which are escaped."""
    return key.encode("utf-8", "backslashreplace").decode()


def open_job(store: Store, spec: JobSpec, model: Model) -> None:
    """Create a job in a folder, or check that the folder's job has the same options.

    Raises:
        FailedPrecondition: The folder has another job.
    """
    job = {"format": FORMAT, "model": model.name, "weights": model.digest, **spec.plain()}
    existing = _existing_job(store)
    if existing is None:
        store.write(JOB_FILE, _to_json(job), lasting=True)
        return
    changed = sorted(name for name in job.keys() | existing.keys() if job.get(name) != existing.get(name))
    if changed and not store.names(RESULTS_FOLDER, ".parquet"):
        store.write(JOB_FILE, _to_json(job), lasting=True)  # the existing job has no results
    elif changed:
        message = f"{store.place} has a job with other {', '.join(changed)}: use its options, or choose another folder"
        raise FailedPrecondition(message)


def _existing_job(store: Store) -> dict[str, Any] | None:
    """Return the options of the job in a folder; None if it has no job."""
    path = f"{store.place}/{JOB_FILE}"
    try:
        content = store.read(JOB_FILE)
        existing = None if content is None else json.loads(content)
    except OSError as error:
        raise FailedPrecondition(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise FailedPrecondition(f"{path} is not a job: choose another folder") from error
    if content is None or isinstance(existing, dict):
        return cast("dict[str, Any] | None", existing)
    raise FailedPrecondition(f"{path} is not a job: choose another folder")


def _to_json(job: dict[str, Any]) -> bytes:
    return json.dumps(job, indent=2, ensure_ascii=False).encode()


def completed(store: Store) -> KeySet:
    """Return the photos that earlier runs have done."""
    photos = KeySet()
    for part in store.names(RESULTS_FOLDER, ".parquet"):
        for key in _keys_of(store, part, store.table(part, ["image"])):
            photos.add(key)
    return photos


def _keys_of(store: Store, part: str, table: Any) -> set[Key]:
    """Return the photos of a table that was read from a part of the results.

    Raises:
        InvalidArgument: It names something else than photos.
    """
    keys: list[Any] = table.column("image").to_pylist()
    if all(isinstance(key, str) for key in keys):
        return set(keys)
    raise InvalidArgument(f"{store.place}/{part} is damaged: delete it, and the next run explains its photos again")


def failed(store: Store) -> KeySet:
    """Return the photos whose rows have an error, from earlier runs."""
    photos = KeySet()
    for part in store.names(RESULTS_FOLDER, ".parquet"):
        for key in _failed_keys(store, part):
            photos.add(key)
    return photos


def _failed_keys(store: Store, part: str) -> set[Key]:
    """Return the photos of a part of the results whose rows have an error."""
    table = store.table(part, ["image", "error"])
    return _keys_of(store, part, table.filter(table.column("error").is_valid()))


def remove_failed(store: Store, photos: Iterable[Key]) -> None:
    """Remove the rows with an error of these photos from the results, so that the next run explains them again.

    Each part is replaced by one without these rows. If this is interrupted, the photos whose rows were
    removed are not done.

    Args:
        store: The job's folder.
        photos: Photos of the job. Rows of other photos are kept.
    """
    existing, removed = failed(store), KeySet()
    for key in photos:
        if key in existing:
            removed.add(key)
    for part in store.names(RESULTS_FOLDER, ".parquet"):
        if any(key in removed for key in _failed_keys(store, part)):
            table = store.table(part)
            columns = zip(table.column("image").to_pylist(), table.column("error").to_pylist(), strict=True)
            kept = table.filter([error is None or image not in removed for image, error in columns])
            if kept.num_rows:
                store.write(part, _to_parquet(kept), lasting=True)
            else:
                store.remove(part)


def write_results(store: Store, done: Sequence[Rows], batch: Iterable[Key] = ()) -> None:
    """Write the rows of photos as one Parquet file, which marks these photos as done.

    The name of the file depends only on the photos: if the same photos are explained again, it is replaced.

    Args:
        store: The job's folder.
        done: Rows of each photo.
        batch: Photos that determine the file's name, if some of them have no rows. Default: those
            with rows.
    """
    if not done:
        return
    keys = sorted(map(key_text, batch)) or sorted(photo_rows[0]["image"] for photo_rows in done)
    name = hashlib.blake2b("\n".join(keys).encode(), digest_size=12).hexdigest()
    schema = rows.schema(regions="regions" in done[0][0])
    table = arrow("").Table.from_pylist([row for photo_rows in done for row in photo_rows], schema=schema)
    store.write(f"{RESULTS_FOLDER}/part-{name}.parquet", _to_parquet(table), lasting=True)


def _to_parquet(table: Any) -> bytes:
    file = io.BytesIO()
    arrow("parquet").write_table(table, file, compression="zstd")
    return file.getvalue()
