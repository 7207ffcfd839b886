"""Faithfulness: what becomes of the target's probability when the image is edited as the map says.

An edit replaces pixels of the normalised input: by 0, which is the mean colour; by a blurred image; or by what their
neighbours suggest. The probability is the softmax's (the sigmoid's of a model with many labels, or of a contrast).
"""

from collections.abc import Generator, Iterator, Sequence
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage, sparse
from scipy.sparse import linalg

from camserve_server.methods.values import Edit
from camserve_server.metrics.kinds import Array, Curve, MetricInput, Reading

Judging = Generator[Sequence[Edit], Array, Reading]

BLUR_TAPS, BLUR_SIGMA = 11, 5.0
AT_ONCE = 64  # edits that are made and tried at a time, and so held in memory
IMPUTED = 8  # the same for imputed images, each of which takes up to 0.2 s to make

NEIGHBOURS = (
    *((down, across, 1 / 6) for down, across in ((-1, 0), (0, -1), (0, 1), (1, 0))),
    *((down, across, 1 / 12) for down, across in ((-1, -1), (-1, 1), (1, -1), (1, 1))),
)
"""Rows down, columns across, and weight of each neighbour: Rong et al. 2022, section 4.2."""


def deletion(metric_input: MetricInput, *, steps: float) -> Judging:
    """Measure how fast the probability falls when the hottest pixels are taken away first.

    The area under p(share of pixels set to 0), by the trapezoid rule. Petsiuk et al. 2018, arXiv:1806.07421,
    section 3.3.
    """
    counts = _counts(metric_input.pixels.size, steps)
    place = ranks(metric_input.pixels)
    found = yield from _tried(Edit((place >= count).astype(np.float32)) for count in counts[1:])
    return _area("deletion", counts, [metric_input.probability, *found])


def insertion(metric_input: MetricInput, *, steps: float) -> Judging:
    """Measure how fast the probability rises when the hottest pixels are put into a blurred image first.

    The area under p(share of pixels restored), by the trapezoid rule. Petsiuk et al. 2018, arXiv:1806.07421,
    section 3.3; the blur is the one that its authors use, of 11 pixels and σ = 5.
    """
    counts = _counts(metric_input.pixels.size, steps)
    place, fill = ranks(metric_input.pixels), blurred(metric_input.image)
    found = yield from _tried(Edit((place < count).astype(np.float32), fill) for count in counts[:-1])
    return _area("insertion", counts, [*found, metric_input.probability])


def each_step(*, steps: float) -> int:
    """Count one edit for each step."""
    return int(steps)


def ranks(pixels: Array) -> NDArray[np.intp]:
    """Return each pixel's place [H,W] in the order from the hottest down; of equal ones the first comes first."""
    order = np.argsort(-pixels, axis=None, kind="stable")
    place = np.empty(pixels.size, np.intp)
    place[order] = np.arange(pixels.size)
    return place.reshape(pixels.shape)


def blurred(image: Array) -> Array:
    """Blur an image [3,H,W]; beyond its edges it is 0."""
    kernel = ndimage.gaussian_filter1d(np.eye(1, BLUR_TAPS, BLUR_TAPS // 2)[0], BLUR_SIGMA)
    once = ndimage.convolve1d(image, kernel, axis=1, mode="constant")
    twice: Array = ndimage.convolve1d(once, kernel, axis=2, mode="constant")
    return twice


def _counts(pixels: int, steps: float) -> list[int]:
    """Return how many pixels are changed after each step: even steps, the last one perhaps shorter."""
    step = -(-pixels // int(steps))
    return [min(step * number, pixels) for number in range(int(steps) + 1)]


def _area(name: str, counts: Sequence[int], probabilities: Sequence[float]) -> Reading:
    x = np.array(counts) / counts[-1]
    curve = Curve(name, tuple(x.tolist()), tuple(probabilities))
    return Reading(float(np.trapezoid(probabilities, x)), (curve,))


def road(metric_input: MetricInput, *, steps: float, noise: float, seed: float) -> Judging:
    """Measure how far the probability is apart when the coldest and when the hottest pixels are imputed.

    Half of (mean p without the coldest − mean p without the hottest), over shares of 10, 20, … 90 % (steps = 9). A
    pixel that is gone becomes the weighted mean of its eight neighbours, ⅙ for those beside it and 1/12 for those
    across, and noise N(0, σ²) on top, so that the shape of what is gone cannot be seen. Rong et al. 2022,
    arXiv:2202.00449, sections 4.2 and 4.3.
    """
    place, total = ranks(metric_input.pixels), metric_input.pixels.size
    shares = np.arange(1, int(steps) + 1) / (int(steps) + 1)
    counts = np.round(shares * total).astype(int)
    gone = chain((place < count for count in counts), (place >= total - count for count in counts))
    random = np.random.default_rng(int(seed))
    found = yield from _tried((Edit(fill=impute(metric_input.image, one, noise, random)) for one in gone), IMPUTED)
    hottest, coldest = found[: len(shares)], found[len(shares) :]
    x = tuple(shares.tolist())
    curves = Curve("hottest first", x, tuple(hottest)), Curve("coldest first", x, tuple(coldest))
    return Reading(float(np.mean(coldest) - np.mean(hottest)) / 2, curves)


def both_ways(*, steps: float, **_parameters: float) -> int:
    """Count two edits for each step."""
    return 2 * int(steps)


def _tried(edits: Iterator[Edit], at_once: int = AT_ONCE) -> Generator[Sequence[Edit], Array, list[float]]:
    """Try edits, `at_once` at a time; return their probabilities."""
    found: list[float] = []
    while some := list(islice(edits, at_once)):
        found += (yield some).tolist()
    return found


def impute(image: Array, gone: NDArray[np.bool_], noise: float, random: np.random.Generator) -> Array:
    """Fill in the pixels [H,W] of an image [3,H,W] that are gone, at least one of them not.

    For each, Σ_n w_n (x − x_n) = 0 over the neighbours n that the image has: a sparse system, solved for the three
    colours at once.
    """
    number = np.full((gone.shape[0] + 2, gone.shape[1] + 2), -2)  # -2: beyond the edge, -1: known, else an unknown
    number[1:-1, 1:-1] = np.where(gone, (np.cumsum(gone) - 1).reshape(gone.shape), -1)
    down, across = np.nonzero(number >= 0)
    values = np.pad(image, ((0, 0), (1, 1), (1, 1)))
    unknowns = np.arange(len(down))
    weights, known = np.zeros(len(down)), np.zeros((len(down), image.shape[0]))
    entries = []
    for by, along, weight in NEIGHBOURS:
        neighbour = number[down + by, across + along]
        weights += weight * (neighbour > -2)  # noqa: PLR2004 -- as above
        known += np.where(neighbour == -1, weight * values[:, down + by, across + along], 0).T
        entries.append((unknowns[neighbour >= 0], neighbour[neighbour >= 0], -weight))
    matrix = _matrix(entries, weights)
    filled = image.copy()
    filled[:, gone] = (linalg.spsolve(matrix, known) + noise * random.standard_normal(known.shape)).T
    return filled


def _matrix(entries: list[tuple[NDArray[np.intp], NDArray[np.intp], float]], diagonal: NDArray[np.float64]) -> object:
    rows, columns = (np.concatenate([one[axis] for one in entries]) for axis in (0, 1))
    values = np.concatenate([np.full(len(row), weight) for row, _, weight in entries])
    size = len(diagonal)
    return sparse.csc_matrix((values, (rows, columns)), (size, size)) + sparse.diags_array(diagonal, format="csc")


def average_drop(metric_input: MetricInput) -> Judging:
    """Measure how much of the probability is lost when only what the map shows is left of the image.

    max(0, p − p′) / p, where p′ is the probability of the normalised image times the map, which is cut at 0 and divided
    by its maximum before; the mean over photos is the average drop. Chattopadhyay et al. 2018, arXiv:1710.11063,
    section 4.1.
    """
    (shown,) = yield [Edit(metric_input.intensity)]
    lost = max(0.0, metric_input.probability - float(shown))
    return Reading(lost / metric_input.probability if metric_input.probability else 0.0)


def increase(metric_input: MetricInput) -> Judging:
    """Tell whether the probability rises when only what the map shows is left of the image: 1, or else 0.

    1[p < p′], with p′ as in average_drop; the mean over photos is the share of increases. Chattopadhyay et al. 2018,
    arXiv:1710.11063, section 4.1.
    """
    (shown,) = yield [Edit(metric_input.intensity)]
    return Reading(float(shown > metric_input.probability))


def single() -> int:
    """Count one edit."""
    return 1
