"""What can be said of a map by computing it again: of an image with a little noise, of a model with random weights."""

from collections.abc import Sequence

import numpy as np
from scipy import stats

from camserve_server.core.arrays import Map
from camserve_server.imaging.values import View
from camserve_server.metrics.kinds import Array, Curve, Reading, Variation

ALIKE = 0.5  # mean rank correlation: measured, Grad-CAM stays below 0.2, guided backpropagation above 0.8


def noisy_views(image: Array, *, samples: float, noise: float, seed: float) -> Sequence[Variation]:
    """Take copies of the image with noise N(0, σ²), where σ = noise · (max x − min x)."""
    deviation = noise * float(image.max() - image.min())
    return [Variation(View(noise=deviation, seed=int(seed) * 100_003 + index)) for index in range(int(samples))]


def max_sensitivity(apart: Sequence[float], _random: Sequence[float], **_parameters: float) -> Reading:
    """Measure how much the map changes, at most, when the image has a little noise.

    max ‖L(x + ε) − L(x)‖ / ‖L(x)‖ over noisy copies of the image, whose maps are computed anew. Yeh et al. 2019,
    arXiv:1901.09392, definition 4, estimated by sampling; relative, so that maps of any size compare.
    """
    return Reading(max(apart), words=f"mean {np.mean(apart):.2f} over {len(apart)} copies")


def relative_distance(heatmap: Map, other: Map) -> float:
    """Return the distance of two maps, as a share of the first one's norm."""
    return float(np.linalg.norm(other - heatmap) / np.linalg.norm(heatmap))


def each_sample(*, samples: float, **_parameters: float) -> int:
    """Count one condition for each sample."""
    return int(samples)


def cascade(_image: Array, *, stages: float, seed: float) -> Sequence[Variation]:
    """Randomise the model from the output down: its last module, …, all its modules, in growing steps."""
    return [Variation(modules=exponent, seed=int(seed)) for exponent in np.linspace(0, 1, int(stages)).tolist()]


def randomisation(alike: Sequence[float], random: Sequence[float], **_parameters: float) -> Reading:
    """Measure how alike the map stays when the model gets random weights, from its output down to its input.

    The mean, over the stages, of Spearman's rank correlation between the map of the model and that of the randomised
    one. A map that stays alike does not show what the model has learned. Adebayo et al. 2018, arXiv:1810.03292,
    section 3.1: the cascading randomisation. The stages have 1, …, n modules of n that are random, in geometric steps;
    each parameter is drawn from the normal distribution with its own mean and standard deviation.
    """
    curve = Curve("rank correlation", (0.0, *random), (1.0, *alike))
    mean = float(np.mean(alike))
    fails = "the map hardly depends on what the model has learned" if mean > ALIKE else ""
    return Reading(mean, (curve,), fails)


def each_stage(*, stages: float, **_parameters: float) -> int:
    """Count one condition for each stage."""
    return int(stages)


def rank_correlation(one: Map, other: Map) -> float:
    """Return Spearman's correlation of two maps' ranks, equal values sharing theirs; 0 where one map is flat."""
    ranked = [stats.rankdata(each) for each in (one, other)] if np.isfinite(other).all() else []
    if not ranked or min(np.ptp(each) for each in ranked) == 0:
        return 0.0
    return float(np.corrcoef(*ranked)[0, 1])
