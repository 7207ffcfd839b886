"""A small detector of synthetic scenes with small and large objects, trained in less than a minute on one core."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torchvision import ops

Photo: TypeAlias = NDArray[np.uint8]
"""Image, uint8 [H,W,3]."""
Neck: TypeAlias = Literal["fpn", "pan", "mixed"]
"""How the maps of the scales reach the scores.

fpn: coarse maps are added to finer ones, and the score of an object depends on the map of its own scale. pan: the map
of a scale also continues to the next coarser one, as in YOLO. mixed: as fpn, but the score depends on all maps at the
object's place, as in detectors with attention over several scales.
"""

SIDE = 96
STRIDES = (4, 8, 16)
LIMITS = (14.0, 28.0)
"""Longest side of the objects of each scale but the last, in pixels."""
SMALL, LARGE = (6.0, 11.0), (30.0, 44.0)
"""Least and greatest side of a small and of a large object."""
COLOURS = ((215, 60, 60), (60, 95, 215), (220, 190, 50))
LABELS = ("background", "red", "blue", "yellow")
WIDTH = 32


@dataclass(frozen=True, slots=True)
class Scene:
    """An image and its objects.

    Attributes:
        photo: the image.
        boxes: left, top, right and bottom of each object, float32 [n,4].
        labels: class of each object, from 1, [n].
    """

    photo: Photo
    boxes: NDArray[np.float32]
    labels: NDArray[np.int64]

    @property
    def small(self) -> NDArray[np.bool_]:
        """For each object, True if it is small [n]."""
        return (self.boxes[:, 2] - self.boxes[:, 0]) <= LIMITS[0]


class Backbone(nn.Module):
    """Three stages and their neck: returns a map for each scale, the finest first.

    Args:
        neck: how the maps of the scales reach the scores.
    """

    def __init__(self, neck: Neck) -> None:
        super().__init__()
        self.stem = nn.Sequential(_block(3, 16, 2), _block(16, 24, 2))
        self.stages = nn.ModuleList([_block(24, WIDTH, 1), _block(WIDTH, 48, 2), _block(48, 64, 2)])
        self.lateral = nn.ModuleList([nn.Conv2d(width, WIDTH, 1) for width in (WIDTH, 48, 64)])
        self.scales = nn.ModuleList([nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in STRIDES])
        self.down = nn.ModuleList([_block(WIDTH, WIDTH, 2) for _ in STRIDES[1:]] if neck == "pan" else [])

    def forward(self, images: Tensor) -> list[Tensor]:
        """Return the maps [B,WIDTH,h,w]."""
        grid, levels = self.stem(images), []
        for stage, lateral in zip(self.stages, self.lateral, strict=True):
            grid = stage(grid)
            levels.append(lateral(grid))
        for index in (1, 0):
            levels[index] = levels[index] + functional.interpolate(levels[index + 1], scale_factor=2.0)
        maps: list[Tensor] = []
        for index, (level, scale) in enumerate(zip(levels, self.scales, strict=True)):
            maps.append(scale(level + self.down[index - 1](maps[-1]) if index and len(self.down) else level))
        return maps


class Detector(nn.Module):
    """An anchor-free detector with three scales, whose heads are shared; it returns objects as torchvision's do.

    Args:
        neck: how the maps of the scales reach the scores.
    """

    num_classes = len(LABELS)

    def __init__(self, neck: Neck = "fpn") -> None:
        super().__init__()
        self.score_thresh = 0.3
        self.backbone = Backbone(neck)
        self.shared = nn.ModuleList([nn.Conv2d(WIDTH, WIDTH, 1) for _ in STRIDES] if neck == "mixed" else [])
        self.classes = nn.Sequential(_block(WIDTH, WIDTH, 1), nn.Conv2d(WIDTH, len(COLOURS), 3, padding=1))
        self.sides = nn.Sequential(_block(WIDTH, WIDTH, 1), nn.Conv2d(WIDTH, 4, 3, padding=1))
        nn.init.constant_(self.classes[1].bias, -4.0)  # type: ignore[arg-type]  # a tensor

    def forward(self, images: Tensor) -> list[dict[str, Tensor]]:
        """Return the boxes, labels and scores of each image's objects, the most certain first."""
        logits, boxes = self.raw(torch.stack(list(images)))
        return [self._objects(*pair) for pair in zip(logits.sigmoid(), boxes, strict=True)]

    def raw(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [B,cells,classes] and the boxes [B,cells,4] of the cells of all scales."""
        maps: list[Tensor] = self.backbone(images)
        logits = [self.classes(each).flatten(2).mT for each in self._mixed(maps)]
        boxes = [_boxes(self.sides(each), stride) for each, stride in zip(maps, STRIDES, strict=True)]
        return torch.cat(logits, 1), torch.cat(boxes, 1)

    def _mixed(self, maps: Sequence[Tensor]) -> Sequence[Tensor]:
        """Add what the maps of all scales share to each map, if the neck is mixed."""
        if not len(self.shared):
            return maps
        parts = [share(each) for share, each in zip(self.shared, maps, strict=True)]
        return [each + torch.stack([_resized(part, each) for part in parts]).sum(0) for each in maps]

    def _objects(self, scores: Tensor, boxes: Tensor) -> dict[str, Tensor]:
        best, labels = scores.max(1)
        likely = (best > self.score_thresh).nonzero()[:, 0]
        kept = likely[ops.nms(boxes[likely].detach(), best[likely].detach(), 0.5)][:50]
        return {"boxes": boxes[kept].clamp(0, SIDE), "labels": labels[kept] + 1, "scores": best[kept]}


def _block(channels: int, out: int, stride: int) -> nn.Sequential:
    convolution = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(out), nn.ReLU())


def _resized(grid: Tensor, like: Tensor) -> Tensor:
    return functional.interpolate(grid, like.shape[2:], mode="bilinear", align_corners=False)


def _centres(height: int, width: int, stride: int) -> Tensor:
    """Return x and y of the cells' centres [h·w,2]."""
    rows, columns = (torch.arange(length) * stride + stride / 2 for length in (height, width))
    return torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1).reshape(-1, 2)


def _boxes(sides: Tensor, stride: int) -> Tensor:
    """Return the boxes [B,h·w,4] at the distances [B,4,h,w] from the cells' centres, in cells before the softplus."""
    distances = functional.softplus(sides).flatten(2).mT * stride
    centres = _centres(sides.shape[2], sides.shape[3], stride).to(sides)
    return torch.cat([centres - distances[..., :2], centres + distances[..., 2:]], -1)


def scenes(count: int, seed: int) -> list[Scene]:
    """Return scenes of one or two large and three or four small objects over a textured background."""
    rng = np.random.default_rng(seed)
    return [_scene(rng) for _ in range(count)]


def _scene(rng: np.random.Generator) -> Scene:
    photo = _background(rng)
    boxes: list[list[float]] = []
    labels: list[int] = []
    for sides, number in ((LARGE, rng.integers(1, 3)), (SMALL, rng.integers(3, 5))):
        for _ in range(number):
            box = _free_place(rng, rng.uniform(*sides), boxes)
            if box is not None:
                labels.append(int(rng.integers(1, len(LABELS))))
                boxes.append(box)
                _draw(photo, box, COLOURS[labels[-1] - 1], rng)
    return Scene(photo, np.array(boxes, np.float32), np.array(labels, np.int64))


def _background(rng: np.random.Generator) -> Photo:
    """Return a smooth background with noise, stripes, and grey and green rectangles that are no objects."""
    coarse = torch.from_numpy(rng.uniform(70, 180, (1, 3, 8, 8)))
    smooth = functional.interpolate(coarse, (SIDE, SIDE), mode="bicubic")[0].permute(1, 2, 0).numpy()
    phase = np.add.outer(np.arange(SIDE) * rng.uniform(-1, 1), np.arange(SIDE) * rng.uniform(-1, 1))
    texture = 12 * np.sin(phase)[..., None] + rng.normal(0, 10, smooth.shape)
    photo: Photo = (smooth + texture).clip(0, 255).astype(np.uint8)
    for _ in range(8):
        height, width = rng.integers(4, 20, 2)
        top, left = rng.integers(0, SIDE - height), rng.integers(0, SIDE - width)
        grey = rng.uniform(40, 210)
        paint = np.array((grey, grey + 50 * rng.integers(0, 2), grey))
        photo[top : top + height, left : left + width] = paint.clip(0, 255).astype(np.uint8)
    return photo


def _free_place(rng: np.random.Generator, side: float, taken: Sequence[Sequence[float]]) -> list[float] | None:
    """Return a box of a side that overlaps no other box; None if twenty random places were not free."""
    for _ in range(20):
        left, top = rng.uniform(1, SIDE - 1 - side, 2)
        box = [left, top, left + side, top + side]
        if all(box[0] > b[2] + 2 or box[2] < b[0] - 2 or box[1] > b[3] + 2 or box[3] < b[1] - 2 for b in taken):
            return box
    return None


def _draw(photo: Photo, box: Sequence[float], colour: Sequence[int], rng: np.random.Generator) -> None:
    """Draw a disc, a square or a cross into a box."""
    radius, x, y = (box[2] - box[0]) / 2, (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    rows, columns = (np.abs(np.arange(SIDE) + 0.5 - centre) for centre in (y, x))
    rows, columns = rows[:, None], columns[None]
    inside = (
        rows**2 + columns**2 <= radius**2,
        np.maximum(rows, columns) <= radius,
        (np.minimum(rows, columns) <= 0.4 * radius) & (np.maximum(rows, columns) <= radius),
    )[rng.integers(3)]
    paint = np.array(colour) + rng.normal(0, 12, 3) + rng.normal(0, 10, photo.shape)
    photo[inside] = paint.clip(0, 255).astype(np.uint8)[inside]


def inputs(photos: Sequence[Photo]) -> Tensor:
    """Return the detector's input, float32 [N,3,H,W] from -1 to 1."""
    return torch.from_numpy(np.stack(photos)).permute(0, 3, 1, 2).float() / 127.5 - 1


def _aims(scene: Scene) -> tuple[Tensor, Tensor]:
    """Return the class of each cell [cells], 0 for none, and the box of its object [cells,4]."""
    boxes, labels = torch.from_numpy(scene.boxes), torch.from_numpy(scene.labels)
    longest = (boxes[:, 2:] - boxes[:, :2]).amax(1)
    scale_of = torch.bucketize(longest, torch.tensor(LIMITS))
    classes, aims = [], []
    for index, stride in enumerate(STRIDES):
        centres = _centres(SIDE // stride, SIDE // stride, stride)
        middles, halves = (boxes[:, :2] + boxes[:, 2:]) / 2, (boxes[:, 2:] - boxes[:, :2]) / 4
        near = (centres[:, None] - middles).abs() <= halves.clamp(min=stride * 0.51)
        inside = near.all(2) & (scale_of == index)
        owner = inside.float().argmax(1)
        classes.append(torch.where(inside.any(1), labels[owner], 0))
        aims.append(boxes[owner])
    return torch.cat(classes), torch.cat(aims)


def trained(neck: Neck = "fpn", seed: int = 0, count: int = 600, epochs: int = 12) -> Detector:
    """Return a detector that was trained from a seed, on scenes of that seed."""
    torch.manual_seed(seed)
    network, training = Detector(neck), scenes(count, 100 + seed)
    images, aims = inputs([scene.photo for scene in training]), [_aims(scene) for scene in training]
    classes, boxes = (torch.stack(parts) for parts in zip(*aims, strict=True))
    optimiser = torch.optim.AdamW(network.parameters(), weight_decay=1e-2)
    steps = epochs * -(-count // 16)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for batch in torch.split(torch.randperm(count, generator=generator), 16):
            optimiser.zero_grad()
            loss = _loss(*network.raw(images[batch]), classes[batch], boxes[batch])
            loss.backward()  # type: ignore[no-untyped-call]  # of torch
            optimiser.step()
            schedule.step()
    return network.eval()


def _loss(logits: Tensor, boxes: Tensor, classes: Tensor, aims: Tensor) -> Tensor:
    """Return the focal loss of the classes and the overlap loss of the boxes of cells with an object."""
    objects = classes > 0
    wanted = functional.one_hot(classes, len(LABELS))[..., 1:].to(logits)
    found = ops.sigmoid_focal_loss(logits, wanted, reduction="sum") / objects.sum()
    overlap: Tensor = ops.generalized_box_iou_loss(boxes[objects], aims[objects], reduction="mean")
    total: Tensor = found + overlap
    return total


def options() -> dict[str, Any]:
    """Return how an `Explainer` prepares photos for the detector."""
    return {"size": SIDE, "crop": "whole", "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "labels": list(LABELS)}
