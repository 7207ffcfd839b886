"""Jobs that explain many photos and can be interrupted and resumed. They need ``camserve[data]``.

`camserve explain --resume` uses this module as follows:

    from pathlib import Path

    import camserve
    from camserve import dataset

    photos = dataset.Photos(["photos/", "s3://bucket/more"])
    spec = dataset.JobSpec({"methods": ["gradcam"]}, dataset.Outputs("jpeg", heatmaps=False, receipts=False))
    store = dataset.Store("out")
    with camserve.Client("localhost:50051") as client, dataset.locked(Path("out")):
        dataset.open_job(store, spec, client.model())
        tally = dataset.run(client, photos, store, spec)

``run`` explains every photo that no earlier run has done. A program that distributes the photos to several
machines uses the functions that ``run`` calls: ``completed`` returns the photos that are done, ``explain``
explains some of the others, and ``write_results`` marks them as done. docs/datasets.md describes a job's folder.
"""

from camserve.dataset.job import Tally, explain, run, skip_completed
from camserve.dataset.parquet import arrow
from camserve.dataset.photos import Key, Photos, exists
from camserve.dataset.progress import progress_bar
from camserve.dataset.results import KeySet, Rows, completed, failed, open_job, remove_failed, write_results
from camserve.dataset.rows import Outputs, schema
from camserve.dataset.spec import JobSpec
from camserve.dataset.store import Store, locked

__all__ = [
    "JobSpec",
    "Key",
    "KeySet",
    "Outputs",
    "Photos",
    "Rows",
    "Store",
    "Tally",
    "arrow",
    "completed",
    "exists",
    "explain",
    "failed",
    "locked",
    "open_job",
    "progress_bar",
    "remove_failed",
    "run",
    "schema",
    "skip_completed",
    "write_results",
]
