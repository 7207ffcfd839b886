"""A request as the engine sees it: planned into rows, joined again into raw maps."""

from camserve_server.jobs.cost import is_clean, part, rows_of
from camserve_server.jobs.runs import examine
from camserve_server.jobs.study import Desk, Progress, Study, Think, at_once
from camserve_server.jobs.values import Collect, Evidence, Finding, Job, Outcome, Sheet, Submit
from camserve_server.jobs.verdict import judge
from camserve_server.types import Pixels


def unheard(_done: int, _rows: int) -> None:
    """Tell nobody how far it has come."""


async def explain(
    job: Job, image: Pixels, submit: Submit, *, chunk: int = 64, think: Think = at_once, progress: Progress = unheard
) -> Outcome:
    """Run a job.

    The image as it is goes first: what the model predicts for it fixes the targets given by rank, so that no noisy copy
    of the image decides by itself what is explained.

    Args:
        job: what to explain.
        image: what the model sees, uint8 [h,w,3].
        submit: runs rows.
        chunk: rows under way at most.
        think: runs what takes a while beside them.
        progress: is told how many rows are done, and of how many.
    """
    study, sheets = await examine(Study(job, image, Desk(submit, chunk, job.rows, progress, think)))
    findings = [
        Finding(
            call,
            sheet.layer,
            answer.target,
            answer.score,
            one.heatmap,
            judge(one.heatmap, dead=one.dead),
            one.error,
            sheet.fusion,
        )
        for call, layers in zip(job.calls, sheets, strict=True)
        for sheet in layers
        for answer, one in zip(study.answers, sheet.evidence, strict=True)
    ]
    return Outcome(study.answers[0].logits, tuple(findings))


__all__ = [
    "Collect",
    "Desk",
    "Evidence",
    "Finding",
    "Job",
    "Outcome",
    "Progress",
    "Sheet",
    "Study",
    "Submit",
    "explain",
    "is_clean",
    "judge",
    "part",
    "rows_of",
    "unheard",
]
