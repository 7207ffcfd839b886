"""Principal components of the features of a layer, over one image or several.

The cells of the grid are the samples, and the channels are the variables. Everything is computed in float64 and stored
in float32. Features are always projected on the stored basis, so that the same basis gives the same scores again.

    basis = fit([maps_of_one, maps_of_another], 3, foreground=True)
    project(maps_of_one, basis)  # float32 [3,h,w]
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from camserve_server.core.arrays import Map
from camserve_server.core.errors import FailedPrecondition

PERCENTILES = (1, 99)
"""The scores that are drawn darkest and brightest. A few cells, such as outlier tokens, do not set the contrast."""

CONSTANT = 1e-24
"""Share of the sum of squares below which the variance of float32 features is rounding of the mean."""


@dataclass(frozen=True, slots=True, eq=False)
class Basis:
    """Principal components of features, all arrays float32; C is the number of channels, k that of components.

    Attributes:
        mean: mean of the features [C].
        vectors: orthonormal components [k,C], the largest variance first. Of each, the value with the largest absolute
            value is positive.
        shares: share of the variance that each component explains [k].
        ranges: the percentiles `PERCENTILES` of the scores on each component [k,2].
        background_mean: mean of the features of all cells, background included [C]; None if no background is left out.
        background_vector: the first component of these [C]; cells with a negative score, or 0, are background.
    """

    mean: Map
    vectors: Map
    shares: Map
    ranges: Map
    background_mean: Map | None = None
    background_vector: Map | None = None


def fit(maps: Sequence[Map], count: int, *, foreground: bool = False) -> Basis:
    """Compute the principal components of the cells of all maps together.

    x ≈ μ + Σ_k s_k v_k for the features x of a cell, with the mean μ and the eigenvectors v_k of the covariance.

    As in the figures of DINOv2 (Oquab et al. 2023, section 7.5): with `foreground`, the first component of all cells
    splits them at a score of 0, and the final components are those of the cells above it.

    Args:
        maps: the feature maps of each image, float32 [C,h,w], with the same number of channels.
        count: the number of components. Features that span fewer dimensions have fewer.
        foreground: True to leave out the background: the side of the first component with the lower mean score along
            the border of the grids.

    Raises:
        FailedPrecondition: the features of the cells are all equal, or not finite.
    """
    cells = torch.cat([_cells(each) for each in maps])
    if not bool(cells.isfinite().all()):
        raise FailedPrecondition("the features have values that are not finite, so they have no principal components")
    if not foreground:
        return _basis(cells, count)
    mean, vectors, _ = _principal(cells, 1)
    border = torch.from_numpy(np.concatenate([_border(each.shape[1:]).ravel() for each in maps]))
    scores = _scores(cells, mean.numpy(), vectors.numpy())[:, 0]
    # Without an inside, both means are those of all cells, and the sign stays that of the component.
    if not bool(border.all()) and bool(scores[border].mean() > scores[~border].mean()):
        vectors, scores = -vectors, -scores
    inner = _basis(cells[scores > 0], count)
    background = (mean.numpy(), vectors[0].numpy())
    return Basis(inner.mean, inner.vectors, inner.shares, inner.ranges, *background)


def project(maps: Map, basis: Basis) -> Map:
    """Return the score of each cell on each component, float32 [k,h,w]; NaN in the background.

    Args:
        maps: feature maps, float32 [C,h,w].
        basis: the components.
    """
    cells = _cells(maps)
    scores = _scores(cells, basis.mean, basis.vectors)
    if basis.background_mean is not None and basis.background_vector is not None:
        inside = _scores(cells, basis.background_mean, basis.background_vector[None])[:, 0]
        scores[~(inside > 0)] = torch.nan
    return scores.T.float().reshape(-1, *maps.shape[1:]).numpy()


def _cells(maps: Map) -> Tensor:
    """Return feature maps [C,h,w] as float64 [cells,C]."""
    return torch.from_numpy(maps).flatten(1).T.double().contiguous()


def _scores(cells: Tensor, mean: Map, vectors: Map) -> Tensor:
    return (cells - torch.from_numpy(mean).double()) @ torch.from_numpy(vectors).double().T


def _border(grid: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return True for the outermost cells of a grid."""
    border = np.ones(grid, np.bool_)
    border[1:-1, 1:-1] = False
    return border


def _basis(cells: Tensor, count: int) -> Basis:
    mean, vectors, shares = _principal(cells, count)
    basis = (mean.numpy(), vectors.numpy())
    ranges = np.percentile(_scores(cells, *basis).numpy(), PERCENTILES, axis=0)
    return Basis(*basis, shares.numpy(), ranges.T.astype(np.float32))


def _principal(cells: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean [C], the first components [k,C] and their shares of the variance [k] of cells [n,C], in float32.

    The eigenvectors are those of the smaller of the two products of the centred matrix with itself. In float64 the
    squared condition number does not matter: components that lose digits by it explain less than 1e-12 of the variance,
    and are left out.

    Raises:
        FailedPrecondition: the cells are all equal, or the matrix is empty.
    """
    mean = cells.mean(0) if len(cells) else cells.new_zeros(cells.shape[1])
    centred = cells - mean
    variance = centred.square().sum()
    if not bool(variance > CONSTANT * cells.square().sum()):
        raise FailedPrecondition(f"{len(cells)} cells with equal features have no principal components")
    wide = centred.shape[0] < centred.shape[1]
    values, vectors = torch.linalg.eigh(centred @ centred.T if wide else centred.T @ centred)
    values, vectors = values.flip(0)[:count], vectors.flip(1)[:, :count]
    known = values > torch.finfo(torch.float64).eps * max(centred.shape) * values[0]
    values, vectors = values[known], vectors[:, known]
    rows = torch.nn.functional.normalize(centred.T @ vectors, dim=0).T if wide else vectors.T
    largest = rows.gather(1, rows.abs().argmax(1, keepdim=True))
    return mean.float(), (rows * largest.sign()).float().contiguous(), (values / variance).float()
