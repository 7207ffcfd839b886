"""Maps for tests, in the JSON of the API."""

import base64

import numpy as np


def heatmap(values):
    """Return an array as a `Heatmap`."""
    values = np.asarray(values, np.float32)
    return {
        "height": values.shape[0],
        "width": values.shape[1],
        "data": base64.b64encode(values.astype("<f4").tobytes()).decode(),
    }


def array(found):
    """Return a map from Node, {height, width, data}, as an array; the data are an object with indices as names."""
    values = found["data"]
    values = values if isinstance(values, list) else list(values.values())
    return np.array(values, np.float64).reshape(found["height"], found["width"])


def signed(height, width, seed=0):
    """Return a map with positive and negative values."""
    return (np.random.default_rng(seed).normal(size=(height, width)) * 3).astype(np.float32)
