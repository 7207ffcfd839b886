"""A request as the engine sees it: planned into rows, joined again into raw maps.

It may import `engine` and the rooms below.
"""

from camserve_server.core.arrays import Input
from camserve_server.jobs.cost import channels_of, is_clean, part, rows_of
from camserve_server.jobs.evaluate import Assessment, MetricCall, Readings, evaluate
from camserve_server.jobs.report import reported, unheard
from camserve_server.jobs.runs import examine
from camserve_server.jobs.study import Executor, ExplanationRun, Progress, RowRunner, at_once
from camserve_server.jobs.values import Collect, Explanation, Job, LayerMaps, Outcome, RawMap, Submit
from camserve_server.jobs.verdict import judge


async def explain(
    job: Job, image: Input, submit: Submit, *, chunk: int = 64, think: Executor = at_once, progress: Progress = unheard
) -> Outcome:
    """Run a job.

    The image as it is goes first: what the model predicts for it fixes the targets given by rank, so that no noisy copy
    of the image decides by itself what is explained.

    Args:
        job: what to explain.
        image: what the model sees.
        submit: runs rows.
        chunk: rows under way at most.
        think: runs what takes a while beside them.
        progress: is told how many rows are done, and of how many.
    """
    explanation, by_method = await examine(
        ExplanationRun(job, image, RowRunner(submit, chunk, job.rows, progress, think))
    )
    return reported(explanation, by_method)


__all__ = [
    "Assessment",
    "Collect",
    "Explanation",
    "ExplanationRun",
    "Job",
    "LayerMaps",
    "MetricCall",
    "Outcome",
    "Progress",
    "RawMap",
    "Readings",
    "RowRunner",
    "Submit",
    "channels_of",
    "evaluate",
    "explain",
    "is_clean",
    "judge",
    "part",
    "rows_of",
    "unheard",
]
