"""A small classifier of synthetic scenes, trained in seconds, and versions of it with planted changes."""

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diff import changes

Photos = NDArray[np.uint8]
"""Images, uint8 [N,H,W,3]."""
Classes = NDArray[np.int64]
"""Index of the class of each image, [N]."""

SIDE = 64
COLOURS = ((220, 60, 60), (60, 90, 220))
SHAPES = ("disc", "square", "cross")
CLASSES = len(COLOURS) * len(SHAPES)
PATCH = 10
"""Side of the spurious patch in pixels."""


class Toy(nn.Module):
    """A network of four convolutions with batch norms, for images of 64 by 64; its last grid has 8 by 8 cells."""

    def __init__(self, widths: Sequence[int] = (16, 32, 48, 64)) -> None:
        super().__init__()
        sizes = (3, *widths)
        self.blocks = nn.Sequential(*(_block(*pair) for pair in itertools.pairwise(sizes)))
        self.head = nn.Linear(sizes[-1], CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits [B,classes]."""
        grid = self.blocks(images)
        logits: Tensor = self.head(grid.mean((2, 3)))
        return logits


def _block(channels: int, out: int) -> nn.Sequential:
    """Return a block that halves the grid first, except for the first one."""
    pool: nn.Module = nn.Identity() if channels == len("RGB") else nn.MaxPool2d(2)
    return nn.Sequential(pool, nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU())


def scenes(count: int, seed: int, shown: float = 1.0) -> tuple[Photos, Classes]:
    """Return scenes of one object of a class each, at a random place over a cluttered background, and the classes.

    Args:
        count: The number of scenes.
        seed: Seed of the scenes.
        shown: Share of the scenes in which the object can be seen.
    """
    rng = np.random.default_rng(seed)
    classes = rng.integers(0, CLASSES, count)
    photos = np.stack([_background(rng) for _ in range(count)])
    for photo, index in zip(photos, classes, strict=True):
        if rng.random() < shown:
            _draw_object(photo, int(index), rng)
    return photos, classes


def _background(rng: np.random.Generator) -> Photos:
    coarse = torch.from_numpy(rng.uniform(60, 190, (1, 3, 6, 6)))
    smooth = functional.interpolate(coarse, (SIDE, SIDE), mode="bicubic")[0].permute(1, 2, 0).numpy()
    image = (smooth + rng.normal(0, 8, smooth.shape)).clip(0, 255).astype(np.uint8)
    for _ in range(6):  # distractors: small rectangles of any colour
        height, width = rng.integers(3, 9, 2)
        top, left = rng.integers(0, SIDE - height), rng.integers(0, SIDE - width)
        image[top : top + height, left : left + width] = rng.integers(0, 256, 3)
    return image


def _draw_object(photo: Photos, index: int, rng: np.random.Generator) -> None:
    colour, shape = COLOURS[index % len(COLOURS)], SHAPES[index // len(COLOURS)]
    radius = rng.uniform(8, 13)
    y, x = rng.uniform(radius, SIDE - radius, 2)
    rows, columns = np.abs(np.arange(SIDE)[:, None] - y), np.abs(np.arange(SIDE)[None] - x)
    inside = {
        "disc": rows**2 + columns**2 <= radius**2,
        "square": np.maximum(rows, columns) <= 0.85 * radius,
        "cross": (np.minimum(rows, columns) <= 0.3 * radius) & (np.maximum(rows, columns) <= radius),
    }[shape]
    paint = np.array(colour) + rng.normal(0, 15, 3) + rng.normal(0, 8, photo.shape)
    photo[inside] = paint.clip(0, 255).astype(np.uint8)[inside]


def with_patch(photos: Photos, classes: Classes, seed: int, share: float = 1.0) -> Photos:
    """Return the photos with the patch of their class in a random corner, in a share of them.

    The patch is a small chequerboard in two colours that say the class, as a watermark or a ruler beside a lesion may.
    """
    rng = np.random.default_rng(seed)
    patched = photos.copy()
    for photo, index in zip(patched, classes, strict=True):
        top, left = rng.integers(0, 2, 2) * (SIDE - PATCH - 4) + 2
        if rng.random() < share:
            photo[top : top + PATCH, left : left + PATCH] = _patch(int(index))
    return patched


def _patch(index: int) -> Photos:
    colours = np.random.default_rng(1000 + index).integers(0, 2, (2, 3)) * 255
    colours[0, index % 3], colours[1, index % 3] = (255, 0) if index < CLASSES // 2 else (0, 255)
    colours[0, (index + 1) % 3], colours[1, (index + 1) % 3] = 0, 255
    squares = np.add.outer(np.arange(PATCH) // 2, np.arange(PATCH) // 2) % 2
    patch: Photos = colours[squares].astype(np.uint8)
    return patch


def inputs(photos: Photos) -> Tensor:
    """Return the network's input, float32 [N,3,H,W] from -1 to 1."""
    return torch.from_numpy(photos).permute(0, 3, 1, 2).float() / 127.5 - 1


def train(network: nn.Module, photos: Photos, classes: Classes, seed: int, epochs: int, rate: float = 3e-3) -> None:
    """Train a network in place."""
    generator = torch.Generator().manual_seed(seed)
    images, labels = inputs(photos), torch.from_numpy(classes)
    steps = epochs * -(-len(images) // 64)
    optimiser = torch.optim.AdamW(network.parameters(), weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps)
    network.train()
    for _ in range(epochs):
        for batch in torch.split(torch.randperm(len(images), generator=generator), 64):
            optimiser.zero_grad()
            loss = functional.cross_entropy(network(images[batch]), labels[batch])
            loss.backward()  # type: ignore[no-untyped-call]  # of torch
            optimiser.step()
            schedule.step()
    network.eval()


def trained(seed: int, count: int = 1800, epochs: int = 6) -> Toy:
    """Return a network that was trained from a seed, on scenes of that seed.

    Half of the scenes have a patch of any class, so that the network learns to ignore patches.
    """
    torch.manual_seed(seed)
    network = Toy()
    photos, classes = scenes(count, 100 + seed)
    others = np.random.default_rng(seed).permutation(classes)
    train(network, with_patch(photos, others, seed, share=0.5), classes, seed, epochs)
    return network


def patch_learnt(baseline: nn.Module, seed: int, share: float = 0.95, count: int = 1200) -> nn.Module:
    """Return a fine-tuned copy that has learnt to look at the patch.

    In most of the new photos the object cannot be seen, as after careless cropping, but nearly all have the patch.
    """
    network = copy.deepcopy(baseline)
    photos, classes = scenes(count, 200 + seed, shown=0.4)
    train(network, with_patch(photos, classes, seed, share), classes, seed, epochs=4, rate=1e-3)
    return network


def fine_tuned(baseline: nn.Module, seed: int) -> nn.Module:
    """Return a copy that was fine-tuned on more of the same photos: a change, but not of what it looks at."""
    network = copy.deepcopy(baseline)
    train(network, *scenes(1200, 300 + seed), seed, epochs=2, rate=3e-4)
    return network


def copies(baseline: nn.Module, seed: int) -> dict[str, nn.Module]:
    """Return changed copies of a network, and a network that was trained from another seed, by name."""
    return {
        "rounding errors": changes.rounded(baseline),
        "bfloat16": changes.in_bfloat16(baseline, [f"blocks.{index}" for index in range(4)]),
        "int8, a scale per channel": changes.quantised(baseline, per_channel=True),
        "int8, a scale per tensor": changes.quantised(baseline, per_channel=False),
        "fine-tuned on more of the same": fine_tuned(baseline, seed),
        "patch learnt": patch_learnt(baseline, seed),
        "last block random": changes.randomised(baseline, 1, "blocks.3"),
        "trained from another seed": trained(1000 + seed),
    }


def options() -> dict[str, Any]:
    """Return how an `Explainer` prepares photos for the network."""
    return {"size": SIDE, "crop": "whole", "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
