"""Surrogates: KernelSHAP and LIME, whose linear models Captum fits.

The features are the cells of a square grid over the image: a cell is there, or hidden by the input's zero. Captum draws
which cells are there, and is asked twice with the same seed: for the first time to learn what it draws, for the second
with the scores that these images have.
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

MOST_CELLS = 1_000_000  # samples times cells squared: a fit of this size takes 48 MB, measured with scikit-learn 1.9

NEEDS = 'the package Captum: pip install "camserve[captum]"'

Exploring = Generator[list[Edit], Array, Array]

_CHANCE = Lock()  # Captum draws from torch's one generator for the whole process


def kernel_shap(scene: Scene, **parameters: float) -> Exploring:
    """Estimate the Shapley value of each cell of a grid over the image.

    The values of a linear model of the score in which cells are there, fitted to random sets of cells with the Shapley
    kernel. Lundberg and Lee 2017, theorem 2. They add up to the score of the image less that of the input's zero.
    """
    return (yield from _fitted("KernelShap", scene, **parameters))


def lime(scene: Scene, **parameters: float) -> Exploring:
    """Fit a sparse linear model of the score to the image with random cells hidden.

    Lasso with λ = 0.01 on which cells are there, each with probability 1/2; an image counts by exp(−d²/2), where d is
    the cosine distance between its cells and all. Ribeiro et al. 2016, section 3.4, with Captum's choices.
    """
    return (yield from _fitted("Lime", scene, **parameters))


def samples(*, samples: float, cells: float, **_parameters: float | str) -> int:
    """Return the parameter `samples`.

    Raises:
        InvalidArgument: this number of samples of a grid with this number of cells takes too much memory.
    """
    if samples * cells**2 > MOST_CELLS:
        most = int(MOST_CELLS // cells**2)
        words = f"samples times cells squared is at most {MOST_CELLS:,}: at most {most:,} samples with {cells:g} cells"
        raise InvalidArgument(words, field="methods")
    return int(samples)


def _fitted(name: str, scene: Scene, *, samples: float, cells: float, seed: float) -> Exploring:
    _require()
    side, count = int(cells), int(samples)
    drawn, _ = _asked(name, side * side, int(seed), np.zeros(count, np.float32))
    scores = np.zeros((count, len(scene.scores)), np.float32)
    for start in range(0, count, AT_ONCE):
        some = slice(start, start + AT_ONCE)
        scores[some] = yield [Edit(_onto(kept, side, scene.image.shape[1:])) for kept in drawn[some]]
    found = [_asked(name, side * side, int(seed), scores[:, target])[1] for target in range(scores.shape[1])]
    return np.stack([_onto(values, side, scene.image.shape[1:]) for values in found])


def _require() -> None:
    if find_spec("captum") is None or find_spec("sklearn") is None:
        raise FailedPrecondition(f"this method needs {NEEDS}, on the server")


def _asked(name: str, features: int, seed: int, scores: Array) -> tuple[NDArray[np.bool_], Array]:
    """Let Captum draw sets of features and explain their scores.

    Returns:
        Which features each set holds, [n,features], and the value of each feature.
    """
    from captum import attr  # noqa: PLC0415 -- an extra, and slow to import

    drawn: list[torch.Tensor] = []

    def score(sets: torch.Tensor) -> torch.Tensor:
        drawn.append(sets)
        return torch.from_numpy(scores[: len(sets)])

    with _CHANCE, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        values = getattr(attr, name)(score).attribute(
            torch.ones(1, features), n_samples=len(scores), perturbations_per_eval=len(scores)
        )
    return drawn[-1].numpy().astype(np.bool_), values[0].detach().numpy()


def _onto(values: Array | NDArray[np.bool_], cells: int, size: Sequence[int]) -> Array:
    """Give every pixel [H,W] the value of its cell, values [cells²]."""
    rows, columns = (np.arange(side) * cells // side for side in size)
    return np.asarray(values, np.float32).reshape(cells, cells)[rows[:, None], columns]
