"""Metrics of the map alone: the place of its peak, and how widely it is spread."""

import math

import numpy as np

from camserve_server.imaging.values import Box
from camserve_server.metrics.kinds import Array, MetricInput, Reading


def pointing_game(metric_input: MetricInput, *, tolerance: float) -> Reading:
    """Check if the map's peak lies in the box, or within a tolerance of it: 1 if so, else 0.

    1[d ≤ tolerance], where d is the distance in the photo's pixels from the centre of the map's greatest cell to the
    box, and 0 inside it. The mean over photos is the accuracy.

    Zhang et al. 2018, doi:10.1007/s11263-017-1059-x, section 4.1.
    """
    box = _box(metric_input)
    x, y = peak(metric_input)
    distance = math.hypot(_distance_outside(x, box.left, box.right), _distance_outside(y, box.top, box.bottom))
    message = f"the peak is at {x:.0f}, {y:.0f}" + (f", {distance:.0f} pixels from the box" if distance else "")
    return Reading(float(distance <= tolerance), words=message)


def energy_in_box(metric_input: MetricInput) -> Reading:
    """Measure the share of the map's positive values that lies in the box.

    Σ_box ReLU(L) / Σ ReLU(L), where L is the map on the input's pixels, and the first sum is over the pixels with their
    centre in the box; 0 if L is nowhere positive.

    Wang et al. 2020, arXiv:1910.01279, section 4.3.
    """
    box, seen, (height, width) = _box(metric_input), metric_input.seen, metric_input.pixels.shape
    y = seen.top + (np.arange(height) + 0.5) / height * (seen.bottom - seen.top)
    x = seen.left + (np.arange(width) + 0.5) / width * (seen.right - seen.left)
    inside = np.outer((box.top <= y) & (y <= box.bottom), (box.left <= x) & (x <= box.right))
    energy = metric_input.pixels.clip(min=0)
    total = energy.sum(dtype=np.float64)
    return Reading(float(energy[inside].sum(dtype=np.float64) / total) if total else 0.0)


def _box(metric_input: MetricInput) -> Box:
    if metric_input.box is None:
        raise ValueError("the metric needs a box")  # requests without a box are refused earlier
    return metric_input.box


def peak(metric_input: MetricInput) -> tuple[float, float]:
    """Return x and y in the photo of the centre of the map's greatest cell."""
    height, width = metric_input.heatmap.shape
    row, column = divmod(int(metric_input.heatmap.argmax()), width)
    seen = metric_input.seen
    x = seen.left + (column + 0.5) / width * (seen.right - seen.left)
    return x, seen.top + (row + 0.5) / height * (seen.bottom - seen.top)


def _distance_outside(value: float, low: float, high: float) -> float:
    return max(low - value, 0.0, value - high)


def sparseness(metric_input: MetricInput) -> Reading:
    """Measure how few pixels hold the map's absolute values: 0 if all are equal, near 1 for a single pixel.

    Σ_ij |v_i − v_j| / (2 n Σ_i v_i), the Gini index of the n values v = |L| on the input's pixels.

    Chalasani et al. 2020, arXiv:1810.06583, section 5.
    """
    values = np.sort(np.abs(metric_input.pixels), axis=None).astype(np.float64)
    total, count = values.sum(), values.size
    weights = 2 * np.arange(1, count + 1) - count - 1
    return Reading(float((weights * values).sum() / (count * total)) if total else 0.0)


def complexity(metric_input: MetricInput) -> Reading:
    """Measure how many pixels the map's absolute values are spread over, in nats: ln(HW) if all are equal.

    −Σ q ln q, the entropy of q = |L| / Σ|L| on the input's pixels.

    Bhatt et al. 2020, arXiv:2005.00631, definition 4.
    """
    return Reading(_entropy(metric_input.pixels))


def _entropy(pixels: Array) -> float:
    values = np.abs(pixels, dtype=np.float64)
    total = values.sum()
    shares = values[values > 0] / total if total else np.ones(1)
    return float(-(shares * np.log(shares)).sum())
