"""Metrics that compute the map again: for an image with a little noise, or a model with random weights."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from camserve_server.core.arrays import Map
from camserve_server.imaging.values import View
from camserve_server.metrics.kinds import Array, Curve, Reading, Variation

MAX_CORRELATION = 0.5
"""Mean rank correlation above which a map hardly depends on the weights.

Measured: Grad-CAM stays below 0.2, and guided backpropagation above 0.8.
"""


def noisy_views(image: Array, *, samples: float, noise: float, seed: float) -> Sequence[Variation]:
    """Return views of the image with noise N(0, σ²), where σ = noise · (max x − min x)."""
    deviation = noise * float(image.max() - image.min())
    return [Variation(View(noise=deviation, seed=int(seed) * 100_003 + index)) for index in range(int(samples))]


def max_sensitivity(distances: Sequence[float], _random: Sequence[float], **_parameters: float) -> Reading:
    """Measure the largest change of the map when the image has a little noise.

    max ‖L(x + ε) − L(x)‖ / ‖L(x)‖ over noisy copies of the image, with ε from N(0, σ²) and σ = noise · (max x − min x).

    Yeh et al. 2019, arXiv:1901.09392, definition 4, estimated by sampling. It is relative, so that maps of any
    magnitude can be compared.
    """
    return Reading(max(distances), words=f"mean {np.mean(distances):.2f} over {len(distances)} copies")


def relative_distance(heatmap: Map, other: Map) -> float:
    """Return the distance of two maps divided by the norm of the first."""
    return float(np.linalg.norm(other - heatmap) / np.linalg.norm(heatmap))


def view_per_sample(*, samples: float, **_parameters: float) -> int:
    """Return the number of views: one for each sample."""
    return int(samples)


def cascade(_image: Array, *, stages: float, seed: float) -> Sequence[Variation]:
    """Return the stages of a randomisation from the output to the input: the last module, …, all modules."""
    return [Variation(modules=exponent, seed=int(seed)) for exponent in np.linspace(0, 1, int(stages)).tolist()]


def randomisation(correlations: Sequence[float], random: Sequence[float], **_parameters: float) -> Reading:
    """Measure how similar the map stays when the model gets random weights, from its output to its input.

    The mean, over the stages, of Spearman's rank correlation between the map of the model and that of the randomised
    model.

    The stages have 1, …, n random modules of n, in geometric steps from the output. Each random parameter is drawn from
    the normal distribution with its own mean and standard deviation. A map that stays similar does not show what the
    model has learned. Adebayo et al. 2018, arXiv:1810.03292, section 3.1, cascading randomisation.
    """
    curve = Curve("rank correlation", (0.0, *random), (1.0, *correlations))
    mean = float(np.mean(correlations))
    warning = "the map hardly depends on what the model has learned" if mean > MAX_CORRELATION else ""
    return Reading(mean, (curve,), warning)


def model_per_stage(*, stages: float, **_parameters: float) -> int:
    """Return the number of randomised models: one for each stage."""
    return int(stages)


def rank_correlation(heatmap: Map, other: Map) -> float:
    """Return Spearman's rank correlation of two maps, with mean ranks for equal values.

    It is 0 if a map has the same value everywhere, or if the other one is not finite.
    """
    ranks, other_ranks = _ranks(heatmap), _ranks(other)
    if not np.isfinite(other).all() or np.ptp(ranks) == 0 or np.ptp(other_ranks) == 0:
        return 0.0
    return float(np.asarray(np.corrcoef(ranks, other_ranks))[0, 1])


def _ranks(heatmap: Map) -> NDArray[np.float64]:
    """Return the ranks of all values from 1; equal values have the mean of their ranks.

    As `scipy.stats.rankdata`, for which a server would import half a second of other statistics.
    """
    _, place, counts = np.unique(heatmap, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place.ravel()]
