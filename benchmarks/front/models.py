"""Models that cost no processor time, for `--model NAME=benchmarks.front.models:FACTORY`.

Their input, grid and classes are those of a common ImageNet model, so that a request passes every step of the server.
This module runs in servers of other checkouts too, so it imports only names that users' own models import.
"""

import time

import torch
from torch import Tensor, nn

from camserve_server.models import Source

PER_BATCH, PER_IMAGE = 0.020, 0.001  # seconds that the sleeping model takes
CELL, CHANNELS, CLASSES = 32, 16, 1000  # pixels on a side of a cell: an input of 224 x 224 has a grid of 7 x 7


class Pause(nn.Module):
    """Sleep for a time that depends on the size of the batch, as a GPU would compute for it."""

    def forward(self, images: Tensor) -> Tensor:
        """Return the images after the pause."""
        time.sleep(PER_BATCH + PER_IMAGE * len(images))
        return images


def instant() -> Source:
    """Return a model that answers at once."""
    return Source(nn.Sequential(*_layers()), labels=_labels())


def sleeping() -> Source:
    """Return a model that takes as long as a real one, but no processor time."""
    return Source(nn.Sequential(Pause(), *_layers()), labels=_labels())


def _layers() -> tuple[nn.Module, ...]:
    grid = nn.Conv2d(3, CHANNELS, CELL, stride=CELL)
    scores = nn.Linear(CHANNELS, CLASSES)
    with torch.no_grad():  # above zero, so that maps have colours to draw
        scores.weight.abs_()
    return grid, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), scores


def _labels() -> tuple[str, ...]:
    return tuple(f"class {index}" for index in range(CLASSES))
