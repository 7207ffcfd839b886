"""Small and fast models for tests of everything around a model."""

import torch
from torch import nn

from camserve_server.models import Preprocess, Source

TINY = "tiny=robustness.nets:tiny?size=32"
OTHERS = ("grey=robustness.nets:grey", "bands=robustness.nets:bands", "attention=robustness.nets:Attention?size=32")
"""Models of 1 and of 12 channels, and one with attention."""


def tiny(channels=3):
    """Return a network of 5 classes."""
    return nn.Sequential(
        nn.Conv2d(channels, 4, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    )


def grey():
    """Return the network for one channel."""
    return of_channels(1)


def bands():
    """Return the network for twelve channels."""
    return of_channels(12)


def of_channels(count):
    return Source(tiny(count), Preprocess((32, 32), (32, 32), "bilinear", (0.4,) * count, (0.25,) * count))


class Attention(nn.Module):
    """Network of 5 classes with one attention of two heads over 8 x 8 patches."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.places = nn.Parameter(torch.linspace(-1, 1, 64 * 8).reshape(1, 64, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, images):
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.places
        return self.head(self.block(tokens).mean(1))
