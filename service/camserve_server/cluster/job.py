"""The job over many photos on Ray Data: the same photos, rows and pictures as on one machine, by many at once.

A batch of photos is one part of the results, and the part's name is made of theirs: a batch that Ray does again, since
its actor was lost, writes the same part again. Photos that are done are left out when the job is begun.
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
"""The file that says which run may write parts: an older one, whose driver was killed, may not be gone yet."""

GRACE = 3.0  # seconds that an older run has to finish the part that it is just writing
TOGETHER = 64  # photos in a batch, and in a part, at most
PATIENCE = 600.0  # seconds that one photo may take

_COUNTED = ("explained", "failed", "left")

Told: TypeAlias = Callable[[dataset.Tally], object]


@dataclass(frozen=True, slots=True)
class Job:
    """What an actor has to know.

    Attributes:
        settings: of its server.
        spec: the options of the job.
        paths: where the photos are.
        column: of a Parquet file.
        output: the job's folder, a path or a URI that all machines can write to.
        run: which run this is.
        allow_outside: whether to read photos outside of the named folders.
    """

    settings: Mapping[str, Any]
    spec: dataset.JobSpec
    paths: tuple[str, ...]
    column: str
    output: str
    run: str
    allow_outside: bool = False

    @staticmethod
    def new(settings: Mapping[str, Any], paths: Sequence[str], column: str, output: str, wishes: Any) -> "Job":
        """Return a run of a job; paths of this machine are made absolute, since others begin elsewhere.

        Raises:
            InvalidArgument: what is asked for makes no sense.
        """
        at_home = tuple(path if "://" in path else str(Path(path).absolute()) for path in paths)
        folder = output if "://" in output else str(Path(output).absolute())
        options = {"model": None, **wishes}
        allow_outside = options.pop("allow_outside", False)
        spec = job_spec(cast("Any", options))
        return Job(settings, spec, at_home, column, folder, uuid.uuid4().hex, allow_outside)

    def photos(self, without: str = "") -> dataset.Photos:
        """Return the photos, except those in one folder."""
        return dataset.Photos(self.paths, self.column, without, allow_outside=self.allow_outside)


class Explainer:
    """An actor: a server of its own, and the part of the job that takes photos to it.

    Args:
        job: which it is of.
        path: where modules are looked for, as in the process that began all this.
    """

    def __init__(self, job: Job, path: Sequence[str] = ()) -> None:
        sys.path.extend(each for each in path if each not in sys.path)
        self._job = job
        self._open = ExitStack()
        self._client = self._open.enter_context(_serving(job.settings))
        self._photos = job.photos()
        self._store = dataset.Store(job.output)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Explain a batch of photos.

        Returns:
            How many were explained, failed and were left, and what ends the job, if anything: Ray would do again what
            is raised, or hide it in a traceback.
        """
        keys, tally, done = list(map(_text, batch["image"])), dataset.Tally(), list[dataset.Rows]()
        try:
            for found in dataset.explain(self._client, self._photos, keys, self._store, self._job.spec):
                tally.add(found)
                if not isinstance(found, CamserveError):
                    done.append(found)
        except CamserveError as error:
            return _said(dataset.Tally(), str(error))
        if _run_of(self._store) != self._job.run:
            return _said(dataset.Tally(), "another run of this job was begun: this one ends")
        dataset.write_results(self._store, done, keys)
        return _said(tally)


def _said(tally: dataset.Tally, wrong: str = "") -> dict[str, Any]:
    counted = {name: np.array([getattr(tally, name)]) for name in _COUNTED}
    return counted | {"why": np.array([tally.why]), "wrong": np.array([wrong])}


def _bytes(key: str) -> bytes:
    """Return a key as Arrow and Ray can hold it: a file's name need be no text."""
    return key.encode("utf-8", "surrogateescape")


def _text(key: bytes) -> str:
    return bytes(key).decode("utf-8", "surrogateescape")


def _run_of(store: dataset.Store) -> str:
    return (store.read(RUN) or b"").decode()


def begun(job: Job) -> tuple[list[str], dataset.Tally]:
    """Take the job over; return the keys of the photos that are still to be explained, and how many are not.

    Raises:
        CamserveError: it is another job, or a path is none.
        ConfigError: the model cannot be loaded.
    """
    store, tally = dataset.Store(job.output), dataset.Tally()
    dataset.open_job(store, job.spec, _described(job.settings))
    before = _run_of(store)
    store.write(RUN, job.run.encode())
    if before:
        time.sleep(GRACE)
    seen, left = dataset.completed(store), list[str]()
    for key in job.photos(job.output):
        if seen.add(key):
            left.append(key)
        else:
            tally.before += 1
    return left, tally


def _described(settings: Mapping[str, Any]) -> Model:
    """Return the model as a server describes it: that it can be loaded is found out before anything is begun.

    On the CPU: the machine of the driver may have no GPU, and those that there are belong to the actors.
    """
    with _serving({**settings, "device": "cpu"}) as client:
        return client.model()


@contextmanager
def _serving(settings: Mapping[str, Any]) -> Iterator[Client]:
    """Serve for this process alone inside the block, over a socket in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        chosen = config.load(flags={**settings, "address": f"unix:{folder}/camserve"}, environment={})
        with server.serve_in_thread(chosen) as address, Client(address, timeout=PATIENCE) as client:
            yield client


def batch_size(photos: int, engines: int) -> int:
    """Return how many photos an actor gets at a time, such that even a few photos are divided among all actors."""
    return min(TOGETHER, -(-photos // engines))


def run(job: Job, engines: Engines, left: Sequence[str], tally: dataset.Tally, told: Told) -> None:
    """Explain photos on the cluster.

    Args:
        job: which.
        engines: how many actors, and what each has.
        left: the photos that are to be explained.
        tally: to count in what is done.
        told: called as batches are done.

    Raises:
        FailedPrecondition: what was asked makes no sense, whatever the photo; or another run of the job was begun.
    """
    if not left:
        return
    arrow, data = dataset.arrow(), ray("data")
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # its plans and its times would tear the bar apart
    data.DataContext.get_current().enable_progress_bars = False
    names = arrow.array(map(_bytes, left), arrow.binary())
    size = batch_size(len(left), engines.most)
    parts = [arrow.table({"image": names[at : at + size]}) for at in range(0, len(left), size)]
    done = data.from_arrow(parts).map_batches(
        Explainer,
        fn_constructor_args=(job, tuple(sys.path)),
        batch_size=None,  # a part is a batch, also when it is done again
        batch_format="numpy",
        concurrency=engines.most if engines.least == engines.most else (engines.least, engines.most),
        num_cpus=engines.cpus,
        num_gpus=engines.gpus,
    )
    for batch in done.iter_batches(batch_size=None, prefetch_batches=0):
        if wrong := [str(each) for each in batch["wrong"] if each]:
            raise FailedPrecondition(wrong[0])
        for name in _COUNTED:
            setattr(tally, name, getattr(tally, name) + int(batch[name].sum()))
        tally.why = next((str(each) for each in batch["why"] if each), tally.why)
        told(tally)


def explain(job: Job, engines: Engines) -> dataset.Tally:
    """Run a job and draw how far it has come; return what became of it.

    Raises:
        CamserveError: it is another job, or a path is none.
        ConfigError: the model cannot be loaded, or its device is a GPU and actors have none.
    """
    job = replace(job, settings={**job.settings, "device": device_of(str(job.settings["device"]), engines.gpus)})
    left, tally = begun(job)
    with dataset.progress_bar(len(left) + tally.before) as told:
        told(tally)
        run(job, engines, left, tally, told)
    return tally
