"""Whether a map can be read as an explanation."""

import numpy as np

from camserve_server.types import Map, Verdict


def judge(heatmap: Map, *, zero_gradient: bool) -> Verdict:
    """Judge whether a raw map can be read as an explanation.

    Args:
        heatmap: float32 [h,w].
        zero_gradient: whether the gradient that it was made from is zero everywhere.
    """
    if not np.isfinite(heatmap).all():
        return Verdict.NON_FINITE
    if zero_gradient:
        return Verdict.ZERO_GRADIENT
    if heatmap.max() == heatmap.min():
        return Verdict.FLAT
    return Verdict.OK if heatmap.max() > 0 else Verdict.ALL_NEGATIVE
