"""Explain a data set with Ray Data: the same photos, rows and pictures as on one machine, but on many at once.

Each batch of photos is one part of the results, named after its photos. When Ray repeats a batch because its actor was
lost, the batch overwrites the same part. Photos that are done already are skipped when the job starts.
"""

import logging
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

from camserve import CamserveError, Client, FailedPrecondition, Model, dataset
from camserve.cli import job_spec
from camserve_server.app import server
from camserve_server.cluster.application import Engines, device_of, ray
from camserve_server.core import config

RUN = "run"
"""File with the ID of the run that may write results: actors of an older run with a dead driver may still exist."""

GRACE_PERIOD = 3.0  # seconds in which an older run finishes the part that it is writing
MAX_BATCH = 64  # photos in a batch, and so in a part
PHOTO_TIMEOUT = 600.0  # seconds that one photo may take

_COUNTED = ("explained", "failed", "left")

ProgressCallback: TypeAlias = Callable[[dataset.Tally], object]


@dataclass(frozen=True, slots=True)
class Job:
    """Description of a job for its actors.

    Attributes:
        settings: settings of an actor's server.
        spec: options of the job.
        paths: paths or URIs of the photos.
        column: column of a Parquet file with the photos.
        output: folder of the results, as a path or a URI that all machines can write to.
        run: ID of this run.
        allow_outside: True to read photos outside of the given folders.
        retry_failed: True to explain photos again whose row has an error.
    """

    settings: Mapping[str, Any]
    spec: dataset.JobSpec
    paths: tuple[str, ...]
    column: str
    output: str
    run: str
    allow_outside: bool = False
    retry_failed: bool = False

    @staticmethod
    def new(settings: Mapping[str, Any], paths: Sequence[str], column: str, output: str, options: Any) -> "Job":
        """Return a new run of a job. Paths are made absolute, since actors run in other folders.

        Raises:
            InvalidArgument: an option is invalid.
        """
        absolute = tuple(path if "://" in path else str(Path(path).absolute()) for path in paths)
        folder = output if "://" in output else str(Path(output).absolute())
        options = {"model": None, **options}
        allow_outside, retry_failed = options.pop("allow_outside", False), options.pop("retry_failed", False)
        spec = job_spec(cast("Any", options))
        return Job(settings, spec, absolute, column, folder, uuid.uuid4().hex, allow_outside, retry_failed)

    def photos(self, excluded: str = "") -> dataset.Photos:
        """Return the photos, without those in an excluded folder."""
        return dataset.Photos(self.paths, self.column, excluded, allow_outside=self.allow_outside)


class Explainer:
    """Actor that explains batches of photos with a server of its own.

    Args:
        job: the job.
        path: `sys.path` of the process that started the job.
    """

    def __init__(self, job: Job, path: Sequence[str] = ()) -> None:
        sys.path.extend(folder for folder in path if folder not in sys.path)
        self._job = job
        self._open = ExitStack()
        self._client = self._open.enter_context(_serving(job.settings))
        self._photos = job.photos()
        self._store = dataset.Store(job.output)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Explain a batch of photos.

        Returns:
            The number of photos that were explained, failed and are left, and the error that ends the job, if any. It
            is returned, because Ray would repeat a batch that raises, or hide the error in a traceback.
        """
        keys, tally, results = list(map(_text, batch["image"])), dataset.Tally(), list[dataset.Rows]()
        try:
            for result in dataset.explain(self._client, self._photos, keys, self._store, self._job.spec):
                tally.add(result)
                if not isinstance(result, CamserveError):
                    results.append(result)
        except CamserveError as error:
            return _batch_result(dataset.Tally(), str(error))
        if _run_of(self._store) != self._job.run:
            return _batch_result(dataset.Tally(), "another run of this job was started: this one ends")
        dataset.write_results(self._store, results, keys)
        return _batch_result(tally)


def _batch_result(tally: dataset.Tally, error: str = "") -> dict[str, Any]:
    counts = {name: np.array([getattr(tally, name)]) for name in _COUNTED}
    return counts | {"why": np.array([tally.why]), "error": np.array([error])}


def _bytes(key: str) -> bytes:
    """Return a key as bytes for Arrow and Ray: the name of a file may not be valid text."""
    return key.encode("utf-8", "surrogateescape")


def _text(key: bytes) -> str:
    return bytes(key).decode("utf-8", "surrogateescape")


def _run_of(store: dataset.Store) -> str:
    return (store.read(RUN) or b"").decode()


def start_run(job: Job) -> tuple[list[str], dataset.Tally]:
    """Take over the job; return the keys of the remaining photos, and a tally with the number of completed ones.

    Raises:
        CamserveError: the folder belongs to another job, or a path does not exist.
        ConfigError: the model cannot be loaded.
    """
    store, tally = dataset.Store(job.output), dataset.Tally()
    dataset.open_job(store, job.spec, _describe_model(job.settings))
    previous_run = _run_of(store)
    store.write(RUN, job.run.encode())
    if previous_run:
        time.sleep(GRACE_PERIOD)
    photos = job.photos(job.output)
    if job.retry_failed:
        dataset.remove_failed(store, photos)
    return list(dataset.skip_completed(photos, store, tally)), tally


def _describe_model(settings: Mapping[str, Any]) -> Model:
    """Return the server's description of the model. A model that cannot be loaded fails here, before the job starts.

    It runs on the CPU: the driver's machine may have no GPU, and the cluster's GPUs are for the actors.
    """
    with _serving({**settings, "device": "cpu"}) as client:
        return client.model()


@contextmanager
def _serving(settings: Mapping[str, Any]) -> Iterator[Client]:
    """Serve inside the block on a socket in a temporary folder, which only this process uses; yield a client."""
    with tempfile.TemporaryDirectory() as folder:
        chosen = config.load(flags={**settings, "address": f"unix:{folder}/camserve"}, environment={})
        with server.serve_in_thread(chosen) as address, Client(address, timeout=PHOTO_TIMEOUT) as client:
            yield client


def batch_size(photos: int, engines: int) -> int:
    """Return the number of photos in a batch, such that even a few photos are divided among all actors."""
    return min(MAX_BATCH, -(-photos // engines))


def run(
    job: Job, engines: Engines, remaining: Sequence[str], tally: dataset.Tally, on_progress: ProgressCallback
) -> None:
    """Explain photos on the cluster.

    Args:
        job: the job.
        engines: number and resources of the actors.
        remaining: keys of the photos to explain.
        tally: tally that is updated.
        on_progress: callback for each finished batch.

    Raises:
        FailedPrecondition: the options are invalid for all photos, or another run of the job was started.
    """
    if not remaining:
        return
    arrow, data = dataset.arrow(), ray("data")
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # its messages would break the progress bar
    data.DataContext.get_current().enable_progress_bars = False
    names = arrow.array(map(_bytes, remaining), arrow.binary())
    size = batch_size(len(remaining), engines.most)
    parts = [arrow.table({"image": names[at : at + size]}) for at in range(0, len(remaining), size)]
    results = data.from_arrow(parts).map_batches(
        Explainer,
        fn_constructor_args=(job, tuple(sys.path)),
        batch_size=None,  # a part is a batch, also when Ray repeats it
        batch_format="numpy",
        concurrency=engines.most if engines.least == engines.most else (engines.least, engines.most),
        num_cpus=engines.cpus,
        num_gpus=engines.gpus,
    )
    for batch in results.iter_batches(batch_size=None, prefetch_batches=0):
        if errors := [str(error) for error in batch["error"] if error]:
            raise FailedPrecondition(errors[0])
        for name in _COUNTED:
            setattr(tally, name, getattr(tally, name) + int(batch[name].sum()))
        tally.why = next((str(reason) for reason in batch["why"] if reason), tally.why)
        on_progress(tally)


def explain(job: Job, engines: Engines) -> dataset.Tally:
    """Run a job with a progress bar; return the tally.

    Raises:
        CamserveError: the folder belongs to another job, or a path does not exist.
        ConfigError: the model cannot be loaded, or the device is a GPU and actors have none.
    """
    job = replace(job, settings={**job.settings, "device": device_of(str(job.settings["device"]), engines.gpus)})
    remaining, tally = start_run(job)
    with dataset.progress_bar(len(remaining) + tally.before) as on_progress:
        on_progress(tally)
        run(job, engines, remaining, tally, on_progress)
    return tally
