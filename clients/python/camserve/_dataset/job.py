"""The job: explain every photo once, write what comes of it, and know after any end what is still to do."""

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
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
import numpy as np
from google.protobuf import json_format

from camserve import _wire
from camserve._dataset import rows
from camserve._dataset.store import arrow
from camserve._errors import CamserveError, FailedPrecondition

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence
    from concurrent.futures import Future

    from camserve._client import Client
    from camserve._dataset.photos import Key, Photos
    from camserve._dataset.store import Store
    from camserve._stream import Outcome
    from camserve._values import Model

FORMAT = "camserve job 1"
CARD = "job.json"
RESULTS = "results"

PART_PHOTOS = 1000
LONGEST_PART = 20.0  # seconds of work that a process that is killed may lose
SHORTEST_PART = 1.0
TOGETHER = 1 << 16  # marks that are sorted in together
THREADS = 8  # that read photos and write pictures
_STEM = 60

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
"""The fields at fault where an error is of the photo, by the code; all other codes say nothing of the question."""

Rows: TypeAlias = "list[dict[str, Any]]"


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of every photo, and which files are written.

    Attributes:
        options: For ``explain_many``.
        wanted: The files.
    """

    options: _wire.ExplainOptions
    wanted: rows.Wanted

    def said(self) -> dict[str, Any]:
        """Return it as JSON, to compare."""
        message = _wire.Question(**self.options).request()
        message.ClearField("model")
        asked: dict[str, Any] = json_format.MessageToDict(message)
        return asked | {"heatmaps": self.wanted.heatmaps, "receipts": self.wanted.receipts}


@dataclass(slots=True)
class Tally:
    """How many photos there are.

    Attributes:
        before: Done by an earlier run.
        explained: By this one.
        failed: Of which this one wrote an error.
    """

    before: int = 0
    explained: int = 0
    failed: int = 0

    @property
    def total(self) -> int:
        """All that are done."""
        return self.before + self.explained + self.failed


class Seen:
    """Which photos are done or under way: 16 bytes of each, whatever its name."""

    def __init__(self) -> None:
        self._old = np.empty(0, "S16")
        self._new: set[bytes] = set()

    def add(self, key: Key) -> bool:
        """Take a photo in; return whether it was not there before."""
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


def opened(store: Store, question: Question, model: Model) -> None:
    """Begin a job in a folder, or find that it is the one that was begun there.

    Raises:
        FailedPrecondition: It is another.
    """
    card = {"format": FORMAT, "model": model.name, "weights": model.digest, **question.said()}
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


def taken_up(store: Store) -> Seen:
    """Return which photos earlier runs have done."""
    seen = Seen()
    for part in store.names(RESULTS, ".parquet"):
        for each in store.table(part, ["image"]).column(0).unique().to_pylist():
            seen.add(each)
    return seen


def publish(store: Store, done: Sequence[Rows]) -> None:
    """Write the rows of photos as one file: all of them are done from then on, or none.

    The name is made of theirs, so that whoever does the same photos again writes the same file again.
    """
    if not done:
        return
    name = hashlib.blake2b("\n".join(sorted(each[0]["image"] for each in done)).encode(), digest_size=12).hexdigest()
    table = arrow("").Table.from_pylist([row for each in done for row in each], schema=rows.schema())
    file = io.BytesIO()
    arrow("parquet").write_table(table, file, compression="zstd")
    store.write(f"{RESULTS}/part-{name}.parquet", file.getvalue(), lasting=True)


def ask(
    client: Client, photos: Photos, keys: Iterable[Key], store: Store, question: Question
) -> Generator[Rows, None, None]:
    """Explain photos and write their pictures; yield the rows of each when its pictures are there, in order.

    Raises:
        CamserveError: The server is lost, or the question is wrong whatever the photo; what is wrong with
            a photo becomes its row.
        OSError: A picture cannot be written.
    """
    under_way: deque[tuple[Key, CamserveError | None]] = deque()
    writing: deque[Future[Rows]] = deque()
    digest = client.model(question.options.get("model") or "").digest
    with ThreadPoolExecutor(THREADS, thread_name_prefix="photo") as pool:
        images = _read_ahead(pool, photos, keys, under_way)
        with closing(client.explain_many(images, on_error="return", **question.options)) as outcomes:
            for outcome in outcomes:
                key, trouble = under_way.popleft()
                if trouble is None and isinstance(outcome, CamserveError) and not _is_photos_own(outcome):
                    raise outcome
                writing.append(pool.submit(_written, store, key, trouble or outcome, question, digest))
                while len(writing) > THREADS or (writing and writing[0].done()):
                    yield writing.popleft().result()
        yield from (each.result() for each in writing)


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


def _is_photos_own(error: CamserveError) -> bool:
    """Say whether another photo might do better: if none could, no photo is to be marked as done."""
    if error.code in _QUESTIONS:
        return False
    if error.code not in _PHOTOS:
        return True
    return bool(error.fields) and all(_PHOTOS[error.code].fullmatch(field) for field in error.fields)


def _written(store: Store, key: Key, outcome: Outcome, question: Question, digest: str) -> Rows:
    """Write the pictures of a photo; return its rows."""
    name = _shown(key)
    if isinstance(outcome, CamserveError):
        return [rows.failed(name, outcome)]
    stem = PurePosixPath(name).stem[:_STEM]
    found: Rows = []
    for place, (overlay, files) in enumerate(rows.pictures(stem, _mark(key).hex()[:16], outcome, question.wanted)):
        for path, data in files.items():
            store.write(path, data)
        found.append(rows.explained(name, place, outcome, digest, overlay))
    return found


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
        publish(self.store, self.done)
        self.done, self.since = [], time.monotonic()


def run(
    client: Client,
    photos: Photos,
    store: Store,
    question: Question,
    told: Callable[[Tally], object] = lambda _tally: None,
) -> Tally:
    """Explain every photo that no earlier run has, and write rows and pictures.

    Args:
        client: Of the server that explains.
        photos: Which.
        store: The job's folder; nobody else may write to it meanwhile.
        question: What to ask.
        told: Called after every photo.

    Raises:
        CamserveError: The server is lost, or the job is another one; what was done is kept.
    """
    seen, tally, part = taken_up(store), Tally(), _Part(store)

    def to_do() -> Generator[Key, None, None]:
        for key in photos:
            if seen.add(key):
                yield key
            else:
                tally.before += 1

    try:
        for found in ask(client, photos, to_do(), store, question):
            part.add(found)
            tally.failed += bool(found[0].get("error"))
            tally.explained += not found[0].get("error")
            told(tally)
    finally:
        part.close()
    return tally
