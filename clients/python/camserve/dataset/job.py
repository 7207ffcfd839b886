"""Jobs: explain every photo once, write the results, and continue after an interruption."""

from __future__ import annotations

import hashlib
import io
import json
import re
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
import numpy as np
from google.protobuf import json_format

from camserve import _codec, _files
from camserve._errors import CamserveError, FailedPrecondition
from camserve._retry import RETRYABLE, too_large
from camserve._settings import IN_FLIGHT
from camserve.dataset import rows
from camserve.dataset.store import arrow

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence
    from concurrent.futures import Future

    from camserve._stream import Outcome
    from camserve._sync.client import Client
    from camserve._values import Model
    from camserve.dataset.photos import Key, Photos
    from camserve.dataset.store import Store

FORMAT = "camserve job 1"
CARD = "job.json"
RESULTS = "results"

PART_PHOTOS = 1000
LONGEST_PART = 20.0  # seconds of work that a process that is killed may lose
SHORTEST_PART = 1.0
TOGETHER = 1 << 16  # marks that are sorted in together
THREADS = 8  # that read photos and write pictures
TRIED = 32  # photos at which the server failed, before each of them is asked about alone
_STEM = 60  # bytes

_QUESTIONS = frozenset(
    {
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
_PHOTOS = {
    # What is not to be read or too large, and a box of which this photo has no part.
    grpc.StatusCode.INVALID_ARGUMENT: re.compile(r"image|rendering\.max_side|targets\[\d+\]\..*(box|region)"),
    # What the model does not find in this photo.
    grpc.StatusCode.FAILED_PRECONDITION: re.compile(r"targets.*|top_k"),
}
"""The fields at fault where an error is of the photo, by the code."""

Rows: TypeAlias = "list[dict[str, Any]]"
"""The rows of one photo in the table of results, with the columns of ``schema``."""

Found: TypeAlias = "Rows | CamserveError"
"""The outcome of a photo: its rows, or the error for which a later run tries it again."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The options of a job: how every photo is explained, and which files are written.

    Attributes:
        options: The options of ``Client.explain_many``.
        outputs: The files.
    """

    options: _codec.ExplainOptions
    outputs: rows.Outputs

    def plain(self) -> dict[str, Any]:
        """Return it as values for JSON, to compare it with the job that a folder already has."""
        message = _codec.Question(**self.options).request()
        message.ClearField("model")
        asked: dict[str, Any] = json_format.MessageToDict(message)
        return asked | {"heatmaps": self.outputs.heatmaps, "receipts": self.outputs.receipts}


@dataclass(slots=True)
class Tally:
    """The number of photos, by outcome.

    Attributes:
        before: Photos done by earlier runs.
        explained: Photos explained by this run.
        failed: Photos at fault themselves, for which this run wrote an error.
        left: Photos that the server failed at; the next run tries them again.
        why: The error of the last photo that was left.
    """

    before: int = 0
    explained: int = 0
    failed: int = 0
    left: int = 0
    why: str = ""

    @property
    def total(self) -> int:
        """The number of photos that are done."""
        return self.before + self.explained + self.failed

    def add(self, found: Found) -> None:
        """Count the outcome of a photo."""
        if isinstance(found, CamserveError):
            self.left, self.why = self.left + 1, str(found)
        else:
            self.failed += bool(found[0].get("error"))
            self.explained += not found[0].get("error")


class KeySet:
    """A set of photos, by their keys; it holds 16 bytes for each, however long its key."""

    def __init__(self) -> None:
        self._old = np.empty(0, "S16")
        self._new: set[bytes] = set()

    def add(self, key: Key) -> bool:
        """Add a photo; return whether it is new."""
        mark = _mark(key).rstrip(b"\0")  # as NumPy does
        if mark in self._new or self._is_old(mark):
            return False
        self._new.add(mark)
        if len(self._new) >= TOGETHER:
            self._old, self._new = np.sort(np.concatenate([self._old, np.array(list(self._new), "S16")])), set()
        return True

    def _is_old(self, mark: bytes) -> bool:
        place = int(np.searchsorted(self._old, np.array(mark, self._old.dtype)))
        return place < self._old.size and self._old[place] == mark


def _mark(key: Key) -> bytes:
    return hashlib.blake2b(_shown(key).encode(), digest_size=16).digest()


def _shown(key: Key) -> str:
    """Return a key as text: on Linux a file's name may be none."""
    return key.encode("utf-8", "backslashreplace").decode()


def open_job(store: Store, spec: JobSpec, model: Model) -> None:
    """Begin a job in a folder, or check that the job in the folder has the same options.

    Raises:
        FailedPrecondition: The folder has another job.
    """
    card = {"format": FORMAT, "model": model.name, "weights": model.digest, **spec.plain()}
    written = store.read(CARD)
    if written is None:
        store.write(CARD, _packed(card), lasting=True)
        return
    try:
        before = dict(json.loads(written))
    except ValueError as error:
        raise FailedPrecondition(f"{store.place}/{CARD} is no job: choose another folder") from error
    other = sorted(name for name in card.keys() | before.keys() if card.get(name) != before.get(name))
    if other and not store.names(RESULTS, ".parquet"):
        store.write(CARD, _packed(card), lasting=True)  # nothing came of the other
    elif other:
        words = f"{store.place} has a job with other {', '.join(other)}: say the same as then, or choose another folder"
        raise FailedPrecondition(words)


def _packed(card: dict[str, Any]) -> bytes:
    return json.dumps(card, indent=2, ensure_ascii=False).encode()


def completed(store: Store) -> KeySet:
    """Return the photos that earlier runs have done."""
    seen = KeySet()
    for part in store.names(RESULTS, ".parquet"):
        for each in store.table(part, ["image"]).column(0).unique().to_pylist():
            seen.add(each)
    return seen


def write_results(store: Store, done: Sequence[Rows], batch: Iterable[Key] = ()) -> None:
    """Write the rows of photos as one Parquet file, which marks all of these photos as done.

    The file's name depends on the photos alone: explaining the same photos again replaces the file.

    Args:
        store: The job's folder.
        done: The rows of each photo.
        batch: The photos that the file's name is computed from, where some may be left. Default:
            those that have rows.
    """
    if not done:
        return
    names = sorted(map(_shown, batch)) or sorted(each[0]["image"] for each in done)
    name = hashlib.blake2b("\n".join(names).encode(), digest_size=12).hexdigest()
    table = arrow("").Table.from_pylist([row for each in done for row in each], schema=rows.schema())
    file = io.BytesIO()
    arrow("parquet").write_table(table, file, compression="zstd")
    store.write(f"{RESULTS}/part-{name}.parquet", file.getvalue(), lasting=True)


def explain(
    client: Client, photos: Photos, keys: Iterable[Key], store: Store, spec: JobSpec
) -> Generator[Found, None, None]:
    """Explain photos and write their pictures; yield the rows of each photo after its pictures are written.

    A photo that the server fails at is sent once more, alone, because another photo of the same batch
    may have caused the failure. If it fails again, its error is yielded, and the photo is not done.

    Args:
        client: The client of the server that explains.
        photos: Where the photos are read from.
        keys: The photos to explain.
        store: The job's folder.
        spec: The options of the job.

    Raises:
        CamserveError: The server is lost, or the options are wrong for every photo. An error that
            concerns one photo becomes its row instead.
        OSError: A picture cannot be written.
    """
    digest = client.model(spec.options.get("model") or "").digest
    waiting = iter(keys)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="photo") as pool:
        asking = _Asking(pool, client, photos, store, spec, digest)
        for key in waiting:
            again: list[Key] = []
            lost = True
            for each, found in asking.about(_until_many(chain([key], waiting), again)):
                lost = lost and _is_lost(found)
                if isinstance(found, CamserveError):
                    again.append(each)
                else:
                    yield found
            yield from _alone(asking, again, lost=lost)


def _is_lost(found: Found) -> bool:
    return isinstance(found, CamserveError) and found.code in RETRYABLE


def _until_many(keys: Iterable[Key], again: list[Key]) -> Generator[Key, None, None]:
    for key in keys:
        yield key
        if len(again) >= TRIED:
            return


def _alone(asking: _Asking, keys: Sequence[Key], *, lost: bool) -> Generator[Found, None, None]:
    """Ask about one photo at a time; if neither this nor another gets through, ``lost``, the server is to blame."""
    for count, (_, found) in enumerate(asking.about(keys, in_flight=1), 1):
        lost = lost and _is_lost(found)
        if lost and count >= TRIED and isinstance(found, CamserveError):
            raise found
        yield found


@dataclass(frozen=True, slots=True)
class _Asking:
    """What it takes to ask a server about photos, and to write what it says."""

    pool: ThreadPoolExecutor
    client: Client
    photos: Photos
    store: Store
    spec: JobSpec
    digest: str

    def about(self, keys: Iterable[Key], in_flight: int = IN_FLIGHT) -> Generator[tuple[Key, Found], None, None]:
        """Yield photos, in order, each with its rows when its pictures are there, or what the server failed with."""
        under_way: deque[tuple[Key, CamserveError | None]] = deque()
        writing: deque[tuple[Key, Future[Found]]] = deque()
        images = _read_ahead(self.pool, self.photos, keys, under_way)
        answers = self.client.explain_many(images, on_error="return", in_flight=in_flight, **self.spec.options)
        with closing(answers) as outcomes:
            for outcome in outcomes:
                key, trouble = under_way.popleft()
                if trouble is None and isinstance(outcome, CamserveError) and _is_questions(outcome):
                    raise outcome
                writing.append((key, self.pool.submit(self._written, key, trouble or outcome)))
                while len(writing) > THREADS or (writing and writing[0][1].done()):
                    done, found = writing.popleft()
                    yield done, found.result()
        yield from ((each, found.result()) for each, found in writing)

    def _written(self, key: Key, outcome: Outcome) -> Found:
        """Write the pictures of a photo; return its rows."""
        name = _shown(key)
        if isinstance(outcome, CamserveError):
            return [rows.failed(name, outcome)] if _is_photos_own(outcome) else outcome
        stem = _files.cut(PurePosixPath(name).stem, _STEM)
        found: Rows = []
        for place, (overlay, files) in enumerate(
            rows.pictures(stem, _mark(key).hex()[:16], outcome, self.spec.outputs)
        ):
            for path, data in files.items():
                self.store.write(path, data)
            found.append(rows.explained(name, place, outcome, self.digest, overlay))
        return found


def _read_ahead(
    pool: ThreadPoolExecutor,
    photos: Photos,
    keys: Iterable[Key],
    under_way: deque[tuple[Key, CamserveError | None]],
) -> Generator[bytes, None, None]:
    """Yield the files of photos, some of them read before they are asked for; note which they are."""
    ahead: deque[tuple[Key, Future[bytes]]] = deque()

    def first() -> bytes:
        key, reading = ahead.popleft()
        try:
            data, trouble = reading.result(), None
        except CamserveError as error:
            data, trouble = b"", error  # which no server is asked about
        under_way.append((key, trouble))
        return data

    for key in keys:
        ahead.append((key, pool.submit(photos.read, key)))
        if len(ahead) > THREADS:
            yield first()
    while ahead:
        yield first()


def _is_questions(error: CamserveError) -> bool:
    """Say whether no other photo would do better: then none is to be marked as done."""
    return error.code in _QUESTIONS or (error.code in _PHOTOS and not _is_photos_own(error))


def _is_photos_own(error: CamserveError) -> bool:
    """Say whether the photo is at fault, whenever and by whomever it is tried again."""
    if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return too_large(error)
    wrong = _PHOTOS.get(error.code)
    return bool(wrong and error.fields) and all(wrong.fullmatch(field) for field in error.fields if wrong)


@dataclass(slots=True)
class _Part:
    """Photos that are done, and not yet known to be: the longer a job runs, the more of them may be lost."""

    store: Store
    began: float = field(default_factory=time.monotonic)
    since: float = field(default_factory=time.monotonic)
    done: list[Rows] = field(default_factory=list["Rows"])

    def add(self, found: Rows) -> None:
        self.done.append(found)
        now = time.monotonic()
        patience = min(LONGEST_PART, max(SHORTEST_PART, (now - self.began) / 4))
        if len(self.done) >= PART_PHOTOS or now - self.since >= patience:
            self.close()

    def close(self) -> None:
        write_results(self.store, self.done)
        self.done, self.since = [], time.monotonic()


def run(
    client: Client,
    photos: Photos,
    store: Store,
    spec: JobSpec,
    on_progress: Callable[[Tally], object] = lambda _tally: None,
) -> Tally:
    """Explain every photo that no earlier run has, and write rows and pictures.

    Args:
        client: The client of the server that explains.
        photos: The photos.
        store: The job's folder, which ``open_job`` has opened. No other run may write to it: see
            ``locked``.
        spec: The options of the job.
        on_progress: Called after every photo, such as by ``progress_bar``.

    Returns:
        How many photos are done, failed, or left for the next run.

    Raises:
        CamserveError: The server is lost, or the options are wrong for every photo. The photos that
            are done stay done.
    """
    seen, tally, part = completed(store), Tally(), _Part(store)

    def to_do() -> Generator[Key, None, None]:
        for key in photos:
            if seen.add(key):
                yield key
            else:
                tally.before += 1

    try:
        for found in explain(client, photos, to_do(), store, spec):
            if not isinstance(found, CamserveError):
                part.add(found)
            tally.add(found)
            on_progress(tally)
    finally:
        part.close()
    return tally
