"""Resumable jobs of `camserve explain`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from camserve import dataset
from camserve.commands.flags import ExplainFlags, explain_options, region_options
from camserve.commands.group import FAILED
from camserve.commands.options import Connect, as_usage_errors
from camserve.terminal import echo

if TYPE_CHECKING:
    from pathlib import Path


def run_job(photos: dataset.Photos, output: Path, connect: Connect, flags: ExplainFlags, *, retry_failed: bool) -> int:
    """Run a job until no photo is left; return the exit code."""
    with as_usage_errors():
        spec = job_spec(flags)
        client = connect()
    with client, dataset.locked(output):
        store = dataset.Store(str(output))
        with as_usage_errors():
            dataset.open_job(store, spec, client.model(flags["model"] or ""))
            total = sum(1 for _ in photos)
        if not total:
            raise click.UsageError(f"no images in {photos}")
        if retry_failed:
            dataset.remove_failed(store, photos)
        with dataset.progress_bar(total) as update:
            tally = dataset.run(client, photos, store, spec, update)
            update(tally)  # also if nothing was left to explain
    echo(job_summary(tally, str(output)))
    return FAILED if tally.left else 0


def job_spec(flags: ExplainFlags) -> dataset.JobSpec:
    """Return the options of a job.

    Raises:
        InvalidArgument: An option is out of range.
    """
    outputs = dataset.Outputs(flags["overlay"], flags["heatmap"], flags["receipts"])
    options = explain_options(flags)
    options["regions"] = region_options(flags, masks=False)  # the results are a table, which has no masks
    spec = dataset.JobSpec(options, outputs)
    spec.plain()  # validates the options
    return spec


def job_summary(tally: dataset.Tally, output: str) -> str:
    """Return a text with the outcome of a job: the numbers of photos, and the folder with the results."""
    before = f" ({tally.before:,} by earlier runs)" if tally.before else ""
    outcome = hint = ""
    if failed := tally.failed + tally.failed_before:
        earlier = f" ({tally.failed_before:,} in earlier runs)" if tally.failed_before else ""
        outcome = f": {tally.total - failed:,} explained, {failed:,} failed{earlier}"
        hint = " The rows of failed photos have the errors; --retry-failed tries these photos again."
    done = f"{tally.total:,} photos are done{before}{outcome}. The results are in {output}/results, as Parquet.{hint}"
    left = f"\n{tally.left:,} photos are left for the next run. The last error: {tally.why}" if tally.left else ""
    return done + left
