"""Deep feature factorisation: concepts in the features of a layer, by non-negative matrix factorisation."""

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from camserve_server.core.arrays import Map
from camserve_server.core.errors import FailedPrecondition

MAX_STEPS = 200
"""The largest number of steps, each of which updates both factors; scikit-learn's default."""

TOLERANCE = 1e-4
"""The factors are final when the gradient has fallen to this share of its first value; scikit-learn's default."""

_Matrix = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """Concepts in feature maps, the one with the largest share first.

    Attributes:
        maps: strength of each concept in each cell, float32 [k,h,w], not negative.
        vectors: features of each concept, float32 [k,C], not negative: features ≈ lowest + maps · vectors.
        lowest: the lowest value of each channel, which the features are reduced by, float32 [C].
        shares: share of each concept in the sum of maps · vectors [k].
    """

    maps: Map
    vectors: Map
    lowest: Map
    shares: Map


def factorise(maps: Map, count: int) -> Generator[None, None, Factors]:
    """Factorise feature maps into concepts: vectors of features, and where in the image each one is.

    The generator pauses after each step of some milliseconds, and returns the factors.

    A_cij − min A_c ≈ Σ_k v_kc M_kij, with v and M ≥ 0 that minimise the sum of squared differences.

    Collins et al. 2018, "Deep Feature Factorization for Concept Discovery", section 3. As in pytorch-grad-cam, the
    minimum of each channel takes the place of the paper's ReLU: for features after a ReLU it is 0 in most channels, and
    others, such as a transformer's, have negative values that mean something. The share of concept k is
    Σ_cij v_kc M_kij / Σ_lcij v_lc M_lij.

    Args:
        maps: feature maps, float32 [C,h,w].
        count: the number of concepts; at most one for each cell and channel is returned.

    Raises:
        FailedPrecondition: the features of the cells are all equal, or not finite.
    """
    features = maps.reshape(len(maps), -1).astype(np.float64)
    if not np.isfinite(features).all():
        raise FailedPrecondition("the features have values that are not finite, so they cannot be factorised")
    lowest = features.min(1, keepdims=True)
    features -= lowest
    if not features.any():
        raise FailedPrecondition(f"{features.shape[1]} cells with equal features have no factors")
    vectors, strengths = yield from _nmf(features, min(count, *features.shape))
    sums = vectors.sum(0) * strengths.sum(0)
    order = np.argsort(-sums, kind="stable")
    return Factors(
        strengths.T[order].reshape(-1, *maps.shape[1:]).astype(np.float32),
        vectors.T[order].astype(np.float32),
        lowest[:, 0].astype(np.float32),
        (sums[order] / sums.sum()).astype(np.float32),
    )


def _nmf(matrix: _Matrix, count: int) -> Generator[None, None, tuple[_Matrix, _Matrix]]:
    """Factorise a matrix [m,n] by coordinate descent into [m,k] and [n,k], from a fixed random start.

    Cichocki and Phan 2009, "Fast local algorithms for large scale nonnegative matrix and tensor factorizations". Start,
    order of the updates and end are those of scikit-learn's `NMF(init="random", random_state=0)`, so that the result is
    the same local minimum as pytorch-grad-cam's. See docs/decisions/047-factors-without-scikit-learn.md.
    """
    random, scale = np.random.RandomState(0), np.sqrt(matrix.mean() / count)
    right = np.ascontiguousarray(np.abs(scale * random.standard_normal((count, matrix.shape[1]))).T)
    left = np.abs(scale * random.standard_normal((matrix.shape[0], count)))
    first = 0.0
    for step in range(MAX_STEPS):
        change = _update(matrix, left, right)
        yield
        change += _update(matrix.T, right, left)
        yield
        first = first if step else change
        if change <= TOLERANCE * first:
            break
    return left, right


def _update(matrix: _Matrix, factor: _Matrix, other: _Matrix) -> float:
    """Minimise over one column of a factor after the other, in place; return the sum of the projected gradients."""
    gram, product, change = other.T @ other, matrix @ other, 0.0
    for column in range(factor.shape[1]):
        values = factor[:, column]
        gradient = factor @ gram[column] - product[:, column]
        change += float(np.abs(np.where(values == 0, np.minimum(gradient, 0), gradient)).sum())
        if gram[column, column]:
            factor[:, column] = np.maximum(values - gradient / gram[column, column], 0)
    return change
