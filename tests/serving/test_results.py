"""Predictions of a model, in order."""

import numpy as np
import pytest

from camserve_server.serving.results import _largest


def draw(kind, size, rng):
    if kind == "ties":
        return rng.integers(-3, 3, size).astype(np.float32)
    values = rng.standard_normal(size).astype(np.float32)
    if kind == "not finite":
        values[rng.integers(0, size, 1 + size // 3)] = np.nan
        values[rng.integers(0, size)] = np.inf
        values[rng.integers(0, size)] = -np.inf
    return values


@pytest.mark.parametrize("kind", ["ordinary", "ties", "not finite"])
@pytest.mark.parametrize("size", [1, 2, 5, 30, 1000])
def test_largest_values_are_those_of_a_stable_sort(kind, size):
    rng = np.random.default_rng(size)
    for count in (0, 1, 3, 5, size - 1, size, size + 3):
        for _ in range(20):
            values = draw(kind, size, rng)

            assert _largest(values, count) == np.argsort(-values, kind="stable")[:count].tolist()
