"""Rules that say whether a candidate looks elsewhere than its baseline, and how often they say so."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

SHARE = 0.05
"""Share of the photos that may change."""
LEVEL = 0.01
"""Probability with which an exact binomial test may find more than that share by chance."""

LITERAL, COUNTED, STRICT = "literal", "counted", "strict"
RULES = (LITERAL, COUNTED, STRICT)


@dataclass(frozen=True, slots=True)
class Sample:
    """Rank correlations with the baseline's maps, and changes of its prediction, for some photos.

    Attributes:
        candidate: Correlations of the candidate, [photos].
        changed: Whether the candidate predicts another class, [photos].
        floor: Correlations of the baseline with itself, [kinds,photos].
        floor_changed: Whether the baseline itself predicts another class, [kinds,photos].
        ceiling: Correlations of the baseline with random weights, [photos].
    """

    candidate: NDArray[np.float64]
    changed: NDArray[np.bool_]
    floor: NDArray[np.float64]
    floor_changed: NDArray[np.bool_]
    ceiling: NDArray[np.float64]

    def of(self, places: NDArray[np.int64]) -> "Sample":
        """Return the sample of some of the photos."""
        return Sample(
            self.candidate[places],
            self.changed[places],
            self.floor[:, places],
            self.floor_changed[:, places],
            self.ceiling[places],
        )

    @property
    def limit(self) -> float:
        """The 5 % quantile of the floor."""
        return float(np.nanquantile(self.floor, SHARE))

    @property
    def middle(self) -> float:
        """The middle between the medians of the floor and of the ceiling."""
        return float(np.nanmedian(self.floor) + np.nanmedian(self.ceiling)) / 2


def verdicts(sample: Sample) -> dict[str, bool]:
    """Return whether each of the rules says that the candidate changed.

    - literal: the median leaves the floor's band, or more than 5 % of the photos are nearer to the ceiling, or more
      than 5 % of the predictions changed.
    - counted: as before, but a share counts only if an exact binomial test finds that it is more than 5 %, and more
      than the floor's own share.
    - strict: as counted, but every photo below the floor's band counts as one that changed.
    """
    floor_elsewhere = (sample.floor < sample.middle).mean()
    elsewhere, below = sample.candidate < sample.middle, sample.candidate < sample.limit
    median = bool(np.nanmedian(sample.candidate) < sample.limit)
    predictions = more_than(sample.changed, float(sample.floor_changed.mean()))
    return {
        LITERAL: bool(median or elsewhere.mean() > SHARE or sample.changed.mean() > SHARE),
        COUNTED: median or more_than(elsewhere, float(floor_elsewhere)) or predictions,
        STRICT: more_than(below) or predictions,
    }


def more_than(found: NDArray[np.bool_], own: float = 0.0) -> bool:
    """Return whether an exact binomial test finds more than 5 % of the photos, and more than the floor's own share."""
    return bool(binom.sf(found.sum() - 1, found.size, max(SHARE, own)) <= LEVEL)


def rates(sample: Sample, photos: int, draws: int, seed: int = 0) -> dict[str, float]:
    """Return how often each rule says that the candidate changed, over random draws of some photos."""
    rng = np.random.default_rng(seed)
    found = [verdicts(sample.of(rng.permutation(len(sample.candidate))[:photos])) for _ in range(draws)]
    return {rule: float(np.mean([one[rule] for one in found])) for rule in RULES}
