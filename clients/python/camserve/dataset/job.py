"""Jobs: explain every photo once, write the results, and continue after an interruption."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, TypeAlias

from camserve._core.errors import CamserveError
from camserve._core.files import TooLarge
from camserve._files.naming import truncate
from camserve._transport.photo_errors import is_photo_error, is_request_error
from camserve._transport.retry import RETRYABLE
from camserve._transport.settings import DEFAULT_IN_FLIGHT
from camserve.dataset import rows
from camserve.dataset.results import Rows, completed, failed, hash_key, key_text, write_results

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from camserve._sync.client import Client
    from camserve._transport.stream import Outcome
    from camserve.dataset.photos import Key, Photos
    from camserve.dataset.spec import JobSpec
    from camserve.dataset.store import Store

MAX_PART_PHOTOS = 1000
MAX_PART_SECONDS = 20.0  # of work that is lost if the process is killed
MIN_PART_SECONDS = 1.0
THREADS = 8  # that read photos and write pictures
READ_AHEAD_BYTES = 16 << 20  # most bytes of a photo that is read ahead: twice what a server accepts by default
RETRY_AFTER = 32  # failures of the server, after which each of these photos is sent again, alone
_MAX_STEM_BYTES = 60

PhotoOutcome: TypeAlias = "Rows | CamserveError"
"""Outcome of a photo: its rows, or the error because of which a later run tries it again."""


@dataclass(slots=True)
class Tally:
    """Numbers of photos, by outcome.

    Attributes:
        before: Photos that earlier runs have done.
        explained: Photos that this run explained.
        failed: Photos that this run could not explain because of the photo; their rows have the error.
        left: Photos that the server failed to explain; the next run tries them again.
        why: The error of the last photo that was left.
        failed_before: Photos of ``before`` whose rows have an error.
    """

    before: int = 0
    explained: int = 0
    failed: int = 0
    left: int = 0
    why: str = ""
    failed_before: int = 0

    @property
    def total(self) -> int:
        """The number of photos that are done."""
        return self.before + self.explained + self.failed

    def add(self, outcome: PhotoOutcome) -> None:
        """Count the outcome of a photo."""
        if isinstance(outcome, CamserveError):
            self.left, self.why = self.left + 1, str(outcome)
        else:
            self.failed += bool(outcome[0].get("error"))
            self.explained += not outcome[0].get("error")


def explain(
    client: Client, photos: Photos, keys: Iterable[Key], store: Store, spec: JobSpec
) -> Generator[PhotoOutcome, None, None]:
    """Explain photos and write their pictures; yield each photo's rows after its pictures are written.

    If the server fails to explain a photo, the photo is sent again alone, because another photo of the
    same batch may have caused the failure. If this fails too, the error is yielded, and the photo is
    not done.

    Args:
        client: Client of the server.
        photos: Source that the photos are read from.
        keys: Photos to explain.
        store: The job's folder.
        spec: Options of the job.

    Raises:
        CamserveError: The server is unavailable, or the options are wrong for every photo. An error that is
            caused by one photo becomes its row instead.
        OSError: A picture cannot be written.
    """
    digest = client.model(spec.options.get("model") or "").digest
    remaining = iter(keys)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="photo") as pool:
        explainer = _PhotoExplainer(pool, client, photos, store, spec, digest)
        for first in remaining:
            failed: list[Key] = []
            all_unavailable = True
            for key, outcome in explainer.explain(_until_many_failed(chain([first], remaining), failed)):
                all_unavailable = all_unavailable and _is_unavailable(outcome)
                if isinstance(outcome, CamserveError):
                    failed.append(key)
                else:
                    yield outcome
            yield from _retry_one_by_one(explainer, failed, all_unavailable=all_unavailable)


def _is_unavailable(outcome: PhotoOutcome) -> bool:
    return isinstance(outcome, CamserveError) and outcome.code in RETRYABLE


def _until_many_failed(keys: Iterable[Key], failed: list[Key]) -> Generator[Key, None, None]:
    for key in keys:
        yield key
        if len(failed) >= RETRY_AFTER:
            return


def _retry_one_by_one(
    explainer: _PhotoExplainer, keys: Sequence[Key], *, all_unavailable: bool
) -> Generator[PhotoOutcome, None, None]:
    """Explain failed photos one at a time; raise the error if the server has been unavailable for all photos.

    Args:
        explainer: The explainer that failed.
        keys: The failed photos.
        all_unavailable: True if the server was unavailable for all photos before.
    """
    for count, (_, outcome) in enumerate(explainer.explain(keys, in_flight=1), 1):
        all_unavailable = all_unavailable and _is_unavailable(outcome)
        if all_unavailable and count >= RETRY_AFTER and isinstance(outcome, CamserveError):
            raise outcome
        yield outcome


@dataclass(frozen=True, slots=True)
class _PhotoExplainer:
    """Reads photos, explains them with a server, and writes their pictures."""

    pool: ThreadPoolExecutor
    client: Client
    photos: Photos
    store: Store
    spec: JobSpec
    digest: str

    def explain(
        self, keys: Iterable[Key], in_flight: int = DEFAULT_IN_FLIGHT
    ) -> Generator[tuple[Key, PhotoOutcome], None, None]:
        """Yield photos in order, each with its rows after its pictures are written, or with the server's error."""
        sent: deque[tuple[Key, CamserveError | None]] = deque()
        writing: deque[tuple[Key, Future[PhotoOutcome]]] = deque()
        images = _prefetch(self.pool, self.photos, keys, sent)
        results = self.client.explain_many(images, on_error="return", in_flight=in_flight, **self.spec.options)
        with closing(results) as outcomes:
            for outcome in outcomes:
                key, read_error = sent.popleft()
                if read_error is None and isinstance(outcome, CamserveError) and is_request_error(outcome):
                    raise outcome
                writing.append((key, self.pool.submit(self._write, key, read_error or outcome)))
                while len(writing) > THREADS or (writing and writing[0][1].done()):
                    written_key, future = writing.popleft()
                    yield written_key, future.result()
        yield from ((key, future.result()) for key, future in writing)

    def _write(self, key: Key, outcome: Outcome) -> PhotoOutcome:
        """Write the pictures of a photo; return its rows."""
        name = key_text(key)
        if isinstance(outcome, CamserveError):
            return [rows.failed(name, outcome, regions=self.spec.regions)] if is_photo_error(outcome) else outcome
        stem = truncate(PurePosixPath(name).stem, _MAX_STEM_BYTES)
        pictures = rows.pictures(stem, hash_key(key).hex()[:16], outcome, self.spec.outputs)
        photo_rows: Rows = []
        for index, (overlay, files) in enumerate(pictures):
            for path, data in files.items():
                self.store.write(path, data)
            row = rows.explained(name, index, outcome, self.digest, overlay, regions=self.spec.regions)
            photo_rows.append(row)
        return photo_rows


def _prefetch(
    pool: ThreadPoolExecutor,
    photos: Photos,
    keys: Iterable[Key],
    sent: deque[tuple[Key, CamserveError | None]],
) -> Generator[bytes, None, None]:
    """Yield the files of photos, reading a few of them ahead, unless they are large.

    The key of each photo is appended to ``sent``, with the error if it cannot be read. Such a photo is yielded as an
    empty file, which keeps the order and which the client does not send.
    """
    reading: deque[tuple[Key, Future[bytes]]] = deque()

    def next_file() -> bytes:
        key, future = reading.popleft()
        try:
            data, error = bytes(_finish_reading(photos, key, future)), None  # a text would be sent as the file it names
        except CamserveError as read_error:
            data, error = b"", read_error
        sent.append((key, error))
        return data

    for key in keys:
        reading.append((key, pool.submit(photos.read, key, READ_AHEAD_BYTES)))
        if len(reading) > THREADS:
            yield next_file()
    while reading:
        yield next_file()


def _finish_reading(photos: Photos, key: Key, future: Future[bytes]) -> bytes:
    """Return the file of a photo that was read ahead, or read it now if it is large: so one of these is held."""
    try:
        return future.result()
    except TooLarge:
        return photos.read(key)


@dataclass(slots=True)
class _ResultsPart:
    """Photos that are done but not yet written to the results.

    The time between two writes, whose work a killed process loses, grows with the time that the job has run.
    """

    store: Store
    started: float = field(default_factory=time.monotonic)
    last_write: float = field(default_factory=time.monotonic)
    done: list[Rows] = field(default_factory=list["Rows"])

    def add(self, photo_rows: Rows) -> None:
        self.done.append(photo_rows)
        now = time.monotonic()
        interval = min(MAX_PART_SECONDS, max(MIN_PART_SECONDS, (now - self.started) / 4))
        if len(self.done) >= MAX_PART_PHOTOS or now - self.last_write >= interval:
            self.write()

    def write(self) -> None:
        write_results(self.store, self.done)
        self.done, self.last_write = [], time.monotonic()


def run(
    client: Client,
    photos: Photos,
    store: Store,
    spec: JobSpec,
    on_progress: Callable[[Tally], object] = lambda _tally: None,
) -> Tally:
    """Explain every photo that no earlier run has done, and write rows and pictures.

    Args:
        client: Client of the server.
        photos: The photos.
        store: The job's folder, which ``open_job`` has opened. No other run may write to it: see
            ``locked``.
        spec: Options of the job.
        on_progress: Function to call after every photo, such as that of ``progress_bar``.

    Returns:
        The numbers of photos that are done, failed, or left for the next run.

    Raises:
        CamserveError: The server is unavailable, or the options are wrong for every photo. The photos
            that are done stay done.
    """
    tally, part = Tally(), _ResultsPart(store)
    keys = skip_completed(photos, store, tally)
    try:
        for outcome in explain(client, photos, keys, store, spec):
            if not isinstance(outcome, CamserveError):
                part.add(outcome)
            tally.add(outcome)
            on_progress(tally)
    finally:
        part.write()
    return tally


def skip_completed(photos: Iterable[Key], store: Store, tally: Tally) -> Generator[Key, None, None]:
    """Yield the photos that are not done, each once; count the others.

    Args:
        photos: Photos of the job.
        store: The job's folder.
        tally: The tally whose ``before`` and ``failed_before`` are counted.
    """
    seen, failed_before = completed(store), failed(store)
    for key in photos:
        if seen.add(key):
            yield key
        else:
            tally.before += 1
            tally.failed_before += key in failed_before
