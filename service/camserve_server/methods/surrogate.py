"""Surrogates: KernelSHAP and LIME, whose linear models Captum fits.

The features are the cells of a square grid over the image. A cell is shown, or hidden by the input's zero. Captum draws
the sets of cells, and is called twice with the same seed: first to record the sets that it draws, and then with the
scores of those images.
"""

from collections.abc import Generator, Sequence
from importlib.util import find_spec
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray

from camserve_server.core.errors import FailedPrecondition, InvalidArgument
from camserve_server.methods.kinds import Array, Scene
from camserve_server.methods.values import Edit

AT_ONCE = 64
"""The largest number of edits to yield at a time, and so to hold in memory."""

MAX_VALUES = 1_000_000
"""The largest product of samples and cells squared: a fit of this size takes 48 MB, measured with scikit-learn 1.9."""

NEEDS = 'the package Captum: pip install "camserve[captum]"'

Exploration = Generator[list[Edit], Array, Array]

_RANDOM_STATE_LOCK = Lock()  # Captum draws from torch's global generator, which all threads share


def kernel_shap(scene: Scene, **parameters: float) -> Exploration:
    """Estimate the Shapley value of each cell of a grid over the image.

    M is the coefficient of each cell in a linear model of the score, fitted to random sets of shown cells with the
    Shapley kernel as weights.

    Lundberg and Lee 2017, theorem 2. Hidden cells are zero in the normalised input, the mean colour of the training
    set. The coefficients add up to the score of the image minus the score of an input of zeros.
    """
    return (yield from _fit("KernelShap", scene, **parameters))


def lime(scene: Scene, **parameters: float) -> Exploration:
    """Fit a sparse linear model of the score to copies of the image with random cells hidden.

    M is the coefficient of each cell in a Lasso with λ = 0.01 on which cells are shown, each with probability 1/2. A
    copy has the weight exp(−d²/2), where d is the cosine distance between its cells and all cells.

    Ribeiro et al. 2016, section 3.4, with Captum's choices. Hidden cells are zero in the normalised input, the mean
    colour of the training set.
    """
    return (yield from _fit("Lime", scene, **parameters))


def samples(*, samples: float, cells: float, **_parameters: float | str) -> int:
    """Return the parameter `samples`.

    Raises:
        InvalidArgument: this number of samples of a grid with this number of cells needs too much memory.
    """
    if samples * cells**2 > MAX_VALUES:
        most = int(MAX_VALUES // cells**2)
        message = (
            f"samples times cells squared is at most {MAX_VALUES:,}: at most {most:,} samples with {cells:g} cells"
        )
        raise InvalidArgument(message, field="methods")
    return int(samples)


def _fit(name: str, scene: Scene, *, samples: float, cells: float, seed: float) -> Exploration:
    """Yield the edits that Captum's explainer of this name draws; return its values as maps [T,H,W]."""
    _require_captum()
    side, count = int(cells), int(samples)
    sets, _ = _run_captum(name, side * side, int(seed), np.zeros(count, np.float32))
    scores = np.zeros((count, len(scene.scores)), np.float32)
    for start in range(0, count, AT_ONCE):
        chunk = slice(start, start + AT_ONCE)
        scores[chunk] = yield [Edit(_spread_cells(shown, side, scene.image.shape[1:])) for shown in sets[chunk]]
    values = [_run_captum(name, side * side, int(seed), scores[:, target])[1] for target in range(scores.shape[1])]
    return np.stack([_spread_cells(cell_values, side, scene.image.shape[1:]) for cell_values in values])


def _require_captum() -> None:
    if find_spec("captum") is None or find_spec("sklearn") is None:
        raise FailedPrecondition(f"this method needs {NEEDS}, on the server")


def _run_captum(name: str, features: int, seed: int, scores: Array) -> tuple[NDArray[np.bool_], Array]:
    """Let Captum draw sets of features and explain their scores.

    Returns:
        The features in each set, bool [n,features], and the value of each feature [features].
    """
    from captum import attr  # noqa: PLC0415 -- an extra, and slow to import

    drawn_sets: list[torch.Tensor] = []

    def score(sets: torch.Tensor) -> torch.Tensor:
        drawn_sets.append(sets)
        return torch.from_numpy(scores[: len(sets)])

    with _RANDOM_STATE_LOCK, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        values = getattr(attr, name)(score).attribute(
            torch.ones(1, features), n_samples=len(scores), perturbations_per_eval=len(scores)
        )
    return drawn_sets[-1].numpy().astype(np.bool_), values[0].detach().numpy()


def _spread_cells(values: Array | NDArray[np.bool_], cells: int, size: Sequence[int]) -> Array:
    """Return a map [H,W] in which each pixel has the value of its cell, given the values [cells²]."""
    rows, columns = (np.arange(side) * cells // side for side in size)
    return np.asarray(values, np.float32).reshape(cells, cells)[rows[:, None], columns]
