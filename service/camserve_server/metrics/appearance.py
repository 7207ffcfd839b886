"""What can be said of a map without a model: where its peak is, and over how much it is spread."""

import math

import numpy as np

from camserve_server.imaging.values import Box
from camserve_server.metrics.kinds import Array, MetricInput, Reading


def pointing_game(metric_input: MetricInput, *, tolerance: float) -> Reading:
    """Tell whether the map's peak lies in the box, or within a tolerance of it: 1, or else 0.

    The tolerance is in pixels of the photo. The mean over photos is the accuracy. Zhang et al. 2018,
    doi:10.1007/s11263-017-1059-x, section 4.1.
    """
    box = _box(metric_input)
    across, down = peak(metric_input)
    apart = math.hypot(_outside(across, box.left, box.right), _outside(down, box.top, box.bottom))
    where = f"the peak is at {across:.0f}, {down:.0f}" + (f", {apart:.0f} pixels from the box" if apart else "")
    return Reading(float(apart <= tolerance), words=where)


def energy_in_box(metric_input: MetricInput) -> Reading:
    """Measure which share of the map's positive values lies in the box.

    Σ_box ReLU(L) / Σ ReLU(L), over the input's pixels whose centres the box holds. Wang et al. 2020, arXiv:1910.01279,
    section 4.3.
    """
    box, seen, (height, width) = _box(metric_input), metric_input.seen, metric_input.pixels.shape
    down = seen.top + (np.arange(height) + 0.5) / height * (seen.bottom - seen.top)
    across = seen.left + (np.arange(width) + 0.5) / width * (seen.right - seen.left)
    inside = np.outer((box.top <= down) & (down <= box.bottom), (box.left <= across) & (across <= box.right))
    energy = metric_input.pixels.clip(min=0)
    total = energy.sum(dtype=np.float64)
    return Reading(float(energy[inside].sum(dtype=np.float64) / total) if total else 0.0)


def _box(metric_input: MetricInput) -> Box:
    if metric_input.box is None:
        raise ValueError("there is no box")  # the request's reader refuses it before
    return metric_input.box


def peak(metric_input: MetricInput) -> tuple[float, float]:
    """Return where in the photo the map is hottest, across and down: the centre of its hottest cell."""
    height, width = metric_input.heatmap.shape
    row, column = divmod(int(metric_input.heatmap.argmax()), width)
    seen = metric_input.seen
    across = seen.left + (column + 0.5) / width * (seen.right - seen.left)
    return across, seen.top + (row + 0.5) / height * (seen.bottom - seen.top)


def _outside(value: float, low: float, high: float) -> float:
    return max(low - value, 0.0, value - high)


def sparseness(metric_input: MetricInput) -> Reading:
    """Measure how few pixels the map's absolute values are gathered in: 0 for all alike, near 1 for a single one.

    The Gini index of |L| on the input's pixels. Chalasani et al. 2020, arXiv:1810.06583, section 5.
    """
    values = np.sort(np.abs(metric_input.pixels), axis=None).astype(np.float64)
    total, count = values.sum(), values.size
    weights = 2 * np.arange(1, count + 1) - count - 1
    return Reading(float((weights * values).sum() / (count * total)) if total else 0.0)


def complexity(metric_input: MetricInput) -> Reading:
    """Measure over how many pixels the map's absolute values are spread, in nats: ln(HW) for all alike.

    The entropy −Σ q ln q of q = |L| / Σ|L| on the input's pixels. Bhatt et al. 2020, arXiv:2005.00631, definition 4.
    """
    return Reading(_entropy(metric_input.pixels))


def _entropy(pixels: Array) -> float:
    values = np.abs(pixels, dtype=np.float64)
    total = values.sum()
    shares = values[values > 0] / total if total else np.ones(1)
    return float(-(shares * np.log(shares)).sum())
