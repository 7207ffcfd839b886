"""The explanations of a run, put together."""

from collections.abc import Sequence

from camserve_server.jobs.study import ExplanationRun
from camserve_server.jobs.values import Explanation, LayerMaps, Outcome
from camserve_server.jobs.verdict import judge


def unheard(_done: int, _rows: int) -> None:
    """Tell nobody how far it has come."""


def reported(explanation: ExplanationRun, by_method: Sequence[Sequence[LayerMaps]]) -> Outcome:
    """Judge every map: for each method its layers, for each layer the targets."""
    explanations = [
        Explanation(
            call,
            layer_maps.layer,
            answer.target,
            answer.score,
            one.heatmap,
            judge(one.heatmap, zero_gradient=one.zero_gradient),
            one.error,
            layer_maps.fusion,
        )
        for call, layers in zip(explanation.job.calls, by_method, strict=True)
        for layer_maps in layers
        for answer, one in zip(explanation.answers, layer_maps.maps, strict=True)
    ]
    return Outcome(explanation.answers[0].logits, tuple(explanations))
