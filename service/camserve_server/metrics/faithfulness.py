"""Faithfulness: how the target's probability changes when the image is edited according to the map.

An edit replaces pixels of the normalised input: by 0, which is the mean colour; by a blurred image; or by values
imputed from their neighbours. The probability is that of the softmax; or of the sigmoid, for a multi-label model or a
contrast.
"""

from collections.abc import Generator, Iterator, Sequence
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from camserve_server.methods.values import Edit
from camserve_server.metrics.kinds import Array, Curve, MetricInput, Reading

Evaluation = Generator[Sequence[Edit], Array, Reading]

BLUR_TAPS, BLUR_SIGMA = 11, 5.0  # pixels
AT_ONCE = 64  # the largest number of edits to yield at a time, and so to hold in memory
IMPUTED_AT_ONCE = 8  # the same for imputed images, each of which takes up to 0.2 s to make

NEIGHBOURS = (
    *((down, across, 1 / 6) for down, across in ((-1, 0), (0, -1), (0, 1), (1, 0))),
    *((down, across, 1 / 12) for down, across in ((-1, -1), (-1, 1), (1, -1), (1, 1))),
)
"""Offset in rows, offset in columns, and weight of each neighbour: Rong et al. 2022, section 4.2."""


def deletion(metric_input: MetricInput, *, steps: float) -> Evaluation:
    """Measure how fast the probability falls when pixels are removed, the greatest first.

    The area under p(share of pixels set to 0), by the trapezoid rule.

    Petsiuk et al. 2018, arXiv:1806.07421, section 3.3.
    """
    counts = _counts(metric_input.pixels.size, steps)
    rank = ranks(metric_input.pixels)
    probabilities = yield from _try_edits(Edit((rank >= count).astype(np.float32)) for count in counts[1:])
    return _area("deletion", counts, [metric_input.probability, *probabilities])


def insertion(metric_input: MetricInput, *, steps: float) -> Evaluation:
    """Measure how fast the probability rises when a blurred image is restored, the greatest pixels first.

    The area under p(share of pixels restored), by the trapezoid rule.

    Petsiuk et al. 2018, arXiv:1806.07421, section 3.3. The blur is that of the authors' code: a Gaussian of σ = 5 cut
    off after 20 pixels, whose tails are mirrored into a kernel of 11 × 11 pixels.
    """
    counts = _counts(metric_input.pixels.size, steps)
    rank, fill = ranks(metric_input.pixels), blur(metric_input.image)
    probabilities = yield from _try_edits(Edit((rank < count).astype(np.float32), fill) for count in counts[:-1])
    return _area("insertion", counts, [*probabilities, metric_input.probability])


def edit_per_step(*, steps: float) -> int:
    """Return the number of edits: one for each step."""
    return int(steps)


def ranks(pixels: Array) -> NDArray[np.intp]:
    """Return each pixel's rank [H,W], 0 for the greatest value; equal pixels are ranked in reading order."""
    order = np.argsort(-pixels, axis=None, kind="stable")
    rank = np.empty(pixels.size, np.intp)
    rank[order] = np.arange(pixels.size)
    return rank.reshape(pixels.shape)


def blur(image: Array) -> Array:
    """Blur an image [3,H,W]; beyond its edges it is 0."""
    from scipy import ndimage  # noqa: PLC0415 -- SciPy takes 0.4 s to import, and few requests need it

    # The authors' kernel: a filtered impulse of 11 pixels. SciPy mirrors the Gaussian's tails at the impulse's ends.
    kernel = ndimage.gaussian_filter1d(np.eye(1, BLUR_TAPS, BLUR_TAPS // 2)[0], BLUR_SIGMA)
    columns = ndimage.convolve1d(image, kernel, axis=1, mode="constant")
    blurred: Array = ndimage.convolve1d(columns, kernel, axis=2, mode="constant")
    return blurred


def _counts(pixels: int, steps: float) -> list[int]:
    """Return the number of changed pixels after each step: equal steps, but the last may be shorter."""
    step = -(-pixels // int(steps))
    return [min(step * number, pixels) for number in range(int(steps) + 1)]


def _area(name: str, counts: Sequence[int], probabilities: Sequence[float]) -> Reading:
    x = np.array(counts) / counts[-1]
    curve = Curve(name, tuple(x.tolist()), tuple(probabilities))
    return Reading(float(np.trapezoid(probabilities, x)), (curve,))


def road(metric_input: MetricInput, *, steps: float, noise: float, seed: float) -> Evaluation:
    """Compare the probability after removing the pixels with the smallest and with the greatest values.

    ½ (mean p without the smallest − mean p without the greatest), over shares of 10, 20, … 90 % of the pixels (`steps`
    = 9).

    Each removed pixel becomes the weighted mean of its eight neighbours, removed ones included, with weight 1/6 for
    those beside, above and below it and 1/12 for the diagonal ones. Noise N(0, σ²) is added, so that the shape of the
    removed area cannot be seen. Rong et al. 2022, arXiv:2202.00449, sections 4.2 and 4.3.
    """
    rank, total = ranks(metric_input.pixels), metric_input.pixels.size
    shares = np.arange(1, int(steps) + 1) / (int(steps) + 1)
    counts = np.round(shares * total).astype(int)
    removed_masks = chain((rank < count for count in counts), (rank >= total - count for count in counts))
    random = np.random.default_rng(int(seed))
    edits = (Edit(fill=impute(metric_input.image, removed, noise, random)) for removed in removed_masks)
    probabilities = yield from _try_edits(edits, IMPUTED_AT_ONCE)
    hottest, coldest = probabilities[: len(shares)], probabilities[len(shares) :]
    x = tuple(shares.tolist())
    curves = Curve("hottest first", x, tuple(hottest)), Curve("coldest first", x, tuple(coldest))
    return Reading(float(np.mean(coldest) - np.mean(hottest)) / 2, curves)


def two_edits_per_step(*, steps: float, **_parameters: float) -> int:
    """Return the number of edits: two for each step."""
    return 2 * int(steps)


def _try_edits(edits: Iterator[Edit], at_once: int = AT_ONCE) -> Generator[Sequence[Edit], Array, list[float]]:
    """Yield edits, `at_once` at a time; return the probabilities of all."""
    probabilities: list[float] = []
    while chunk := list(islice(edits, at_once)):
        probabilities += (yield chunk).tolist()
    return probabilities


def impute(image: Array, removed: NDArray[np.bool_], noise: float, random: np.random.Generator) -> Array:
    """Fill in the removed pixels [H,W] of an image [3,H,W], at least one pixel of which is kept.

    For each removed pixel x, Σ_n w_n (x − x_n) = 0 over its neighbours n inside the image: a sparse system, solved for
    the three colours at once.
    """
    from scipy.sparse import linalg  # noqa: PLC0415 -- as above

    # The index of each unknown on the padded grid; -1 is a known pixel, -2 is beyond the edge.
    index = np.full((removed.shape[0] + 2, removed.shape[1] + 2), -2)
    index[1:-1, 1:-1] = np.where(removed, (np.cumsum(removed) - 1).reshape(removed.shape), -1)
    y, x = np.nonzero(index >= 0)
    padded = np.pad(image, ((0, 0), (1, 1), (1, 1)))
    unknowns = np.arange(len(y))
    diagonal, known = np.zeros(len(y)), np.zeros((len(y), image.shape[0]))
    entries = []
    for dy, dx, weight in NEIGHBOURS:
        neighbour = index[y + dy, x + dx]
        diagonal += weight * (neighbour > -2)  # noqa: PLR2004 -- as above
        known += np.where(neighbour == -1, weight * padded[:, y + dy, x + dx], 0).T
        entries.append((unknowns[neighbour >= 0], neighbour[neighbour >= 0], -weight))
    matrix = _sparse_matrix(entries, diagonal)
    filled = image.copy()
    filled[:, removed] = (linalg.spsolve(matrix, known) + noise * random.standard_normal(known.shape)).T
    return filled


def _sparse_matrix(
    entries: list[tuple[NDArray[np.intp], NDArray[np.intp], float]], diagonal: NDArray[np.float64]
) -> object:
    """Return the matrix with this diagonal and these entries: rows, columns and their common value."""
    from scipy import sparse  # noqa: PLC0415 -- as above

    rows, columns = (np.concatenate([entry[axis] for entry in entries]) for axis in (0, 1))
    values = np.concatenate([np.full(len(row), value) for row, _, value in entries])
    size = len(diagonal)
    return sparse.csc_matrix((values, (rows, columns)), (size, size)) + sparse.diags_array(diagonal, format="csc")


def average_drop(metric_input: MetricInput) -> Evaluation:
    """Measure the share of the probability that is lost when the image is masked with the map.

    max(0, p − p′) / p, where p is the probability of the image and p′ that of the normalised image times the map, which
    is cut at 0, divided by its maximum and resized to the pixels bilinearly. The mean over photos is the average drop.

    Chattopadhyay et al. 2018, arXiv:1710.11063, section 4.1.
    """
    (masked,) = yield [Edit(metric_input.intensity)]
    drop = max(0.0, metric_input.probability - float(masked))
    return Reading(drop / metric_input.probability if metric_input.probability else 0.0)


def increase(metric_input: MetricInput) -> Evaluation:
    """Check if the probability rises when the image is masked with the map: 1 if so, else 0.

    1[p < p′], with p and p′ as in average_drop. The mean over photos is the share of increases.

    Chattopadhyay et al. 2018, arXiv:1710.11063, section 4.1.
    """
    (masked,) = yield [Edit(metric_input.intensity)]
    return Reading(float(masked > metric_input.probability))


def one_edit() -> int:
    """Return the number of edits: one."""
    return 1
