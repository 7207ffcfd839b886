"""Plan a job into rows, run them, and turn their results into raw maps.

`values` has the jobs and their results, `run_methods` how each kind of method gets its maps, and `evaluate` how metrics
rate them.

This package may import `engine` and the packages below.
"""

from camserve_server.core.arrays import Input
from camserve_server.jobs.cost import channels_of, default_call, rows_of, runs_unchanged
from camserve_server.jobs.evaluate import EvaluationJob, MetricCall, Readings, evaluate
from camserve_server.jobs.explanation_run import ExplanationRun
from camserve_server.jobs.result import make_result
from camserve_server.jobs.row_runner import Executor, Progress, RowRunner, call_directly, ignore_progress
from camserve_server.jobs.run_methods import run_job
from camserve_server.jobs.texts import TextEmbeddings, embed_texts
from camserve_server.jobs.values import Collect, Explanation, Job, JobResult, LayerMaps, RawMap, Submit, texts_of
from camserve_server.jobs.verdict import judge


async def explain(
    job: Job,
    image: Input,
    submit: Submit,
    *,
    chunk: int = 64,
    execute: Executor = call_directly,
    progress: Progress = ignore_progress,
) -> JobResult:
    """Run a job.

    The unchanged image runs first: its prediction resolves the targets given by rank. Otherwise each noisy copy of the
    image would decide for itself which class is explained.

    Args:
        job: the methods, layers and targets to explain.
        image: the model's input.
        submit: runs rows.
        chunk: maximum number of rows queued or running at a time.
        execute: runs slow functions without blocking the event loop.
        progress: called with the number of rows done and the number of all rows.
    """
    run, maps_by_method = await run_job(
        ExplanationRun(job, image, RowRunner(submit, chunk, job.rows, progress, execute))
    )
    return make_result(run, maps_by_method)


__all__ = [
    "Collect",
    "EvaluationJob",
    "Explanation",
    "ExplanationRun",
    "Job",
    "JobResult",
    "LayerMaps",
    "MetricCall",
    "Progress",
    "RawMap",
    "Readings",
    "RowRunner",
    "Submit",
    "TextEmbeddings",
    "channels_of",
    "default_call",
    "embed_texts",
    "evaluate",
    "explain",
    "ignore_progress",
    "judge",
    "rows_of",
    "runs_unchanged",
    "texts_of",
]
