"""Turn the raw maps of a run into explanations."""

from collections.abc import Sequence

from camserve_server.jobs.explanation_run import ExplanationRun
from camserve_server.jobs.values import Explanation, JobResult, LayerMaps
from camserve_server.jobs.verdict import judge


def make_result(run: ExplanationRun, maps_by_method: Sequence[Sequence[LayerMaps]]) -> JobResult:
    """Judge every map, and return the explanations: method by method, then by layer or channel, then by target."""
    explanations = [
        Explanation(
            call,
            layer_maps.layer,
            answer.target,
            answer.score,
            raw_map.heatmap,
            judge(raw_map.heatmap, zero_gradient=raw_map.zero_gradient),
            raw_map.error,
            layer_maps.fusion,
            input_channel=layer_maps.input_channel,
        )
        for call, maps_by_layer in zip(run.job.calls, maps_by_method, strict=True)
        for layer_maps in maps_by_layer
        for answer, raw_map in zip(run.answers, layer_maps.maps, strict=True)
    ]
    return JobResult(run.answers[0].logits, tuple(explanations), run.class_map, run.unchanged_logits)
