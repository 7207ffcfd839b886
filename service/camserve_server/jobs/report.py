"""What a study found, put together."""

from collections.abc import Sequence

from camserve_server.jobs.study import Study
from camserve_server.jobs.values import Finding, Outcome, Sheet
from camserve_server.jobs.verdict import judge


def unheard(_done: int, _rows: int) -> None:
    """Tell nobody how far it has come."""


def reported(study: Study, sheets: Sequence[Sequence[Sheet]]) -> Outcome:
    """Judge every map: for each method its layers, for each layer the targets."""
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
        for call, layers in zip(study.job.calls, sheets, strict=True)
        for sheet in layers
        for answer, one in zip(study.answers, sheet.evidence, strict=True)
    ]
    return Outcome(study.answers[0].logits, tuple(findings))
