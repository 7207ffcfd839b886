"""Whether a map can be read as an explanation."""

from enum import Enum

import numpy as np

from camserve_server.core.arrays import Map


class Verdict(Enum):
    """Whether a map can be read as an explanation."""

    OK = "the map has positive evidence"
    ALL_NEGATIVE = "no value of the map is above zero: nothing here speaks for the target"
    FLAT = "the map has the same value everywhere"
    ZERO_GRADIENT = "the gradient is zero everywhere: the score does not depend on this layer"
    NON_FINITE = "the map holds NaN or infinity"


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
