"""Verdicts on raw maps: a map can be read as an explanation, or a reason why not."""

import math
from enum import Enum

import numpy as np

from camserve_server.core.arrays import Map


class Verdict(Enum):
    """Verdict on a map: it can be read as an explanation, or the reason why not."""

    OK = "the map has positive evidence"
    ALL_NEGATIVE = (
        "no value of the map is above zero: this method finds no positive evidence here; another method or layer may"
    )
    FLAT = "the map has the same value everywhere"
    ZERO_GRADIENT = "the gradient is zero everywhere: the score does not depend on this layer"
    NON_FINITE = "the map holds NaN or infinity"


def judge(heatmap: Map, *, zero_gradient: bool) -> Verdict:
    """Return the verdict on a raw map.

    Args:
        heatmap: the map, float32 [h,w].
        zero_gradient: True if the gradient that it was made from is zero everywhere.
    """
    lowest, highest = float(np.minimum.reduce(heatmap, None)), float(np.maximum.reduce(heatmap, None))  # NaN if any is
    if not (math.isfinite(lowest) and math.isfinite(highest)):
        return Verdict.NON_FINITE
    if zero_gradient:
        return Verdict.ZERO_GRADIENT
    if highest == lowest:
        return Verdict.FLAT
    return Verdict.OK if highest > 0 else Verdict.ALL_NEGATIVE
