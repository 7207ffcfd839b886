"""A small detector of balls and balloons, which are balls with a string, for docs/tutorials/detector.md.

It is trained in some seconds on one core, on scenes that are drawn here. It has a feature pyramid of two scales, and
returns objects as torchvision's detectors do.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torchvision import ops

from camserve_server.models import Preprocess, Source

LABELS = ("background", "ball", "balloon")
COLOURS = ((220, 50, 50), (240, 210, 60), (60, 180, 75), (50, 90, 220), (230, 80, 190))
SIDE = 96
STRIDES = (8, 16)
LARGE = 16
"""Objects as wide as this, in pixels, are found on the coarse scale."""

Item = tuple[str, float, float, float]
"""An object: its label, the left and top edge of its box, and the radius of its ball."""


def box_of(item: Item) -> tuple[float, float, float, float]:
    """Return the left, top, right and bottom edge of an object; a balloon is twice as high as a ball."""
    label, left, top, radius = item
    return left, top, left + 2 * radius, top + radius * (4 if label == "balloon" else 2)


def scene(rng: np.random.Generator) -> list[Item]:
    """Return up to four objects that do not overlap, large and small ones in turn."""
    items: list[Item] = []
    for _ in range(20):
        radius = rng.uniform(4, 6) if len(items) % 2 else rng.uniform(9, 15)
        left, top = rng.uniform(2, SIDE - 2 - 2 * radius), rng.uniform(2, SIDE - 2 - 4 * radius)
        new = box_of(item := (LABELS[rng.integers(1, 3)], left, top, radius))
        boxes = [box_of(other) for other in items]
        if all(new[0] > b[2] + 3 or new[2] < b[0] - 3 or new[1] > b[3] + 3 or new[3] < b[1] - 3 for b in boxes):
            items.append(item)
    return items[:4]


def draw(items: list[Item], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Return a photo of objects, uint8 [96,96,3]; background and colours are random."""
    photo = rng.uniform(110, 190, 3) + rng.normal(0, 8, (SIDE, SIDE, 3))
    for label, left, top, radius in items:
        y, x = np.arange(SIDE)[:, None] + 0.5 - top - radius, np.arange(SIDE)[None] + 0.5 - left - radius
        photo[np.hypot(y, x) <= radius] = COLOURS[rng.integers(len(COLOURS))]
        if label == "balloon":
            photo[(abs(x) <= max(0.1 * radius, 0.7)) & (y > radius) & (y <= 3 * radius)] = 30
    return photo.clip(0, 255).astype(np.uint8)


class Detector(nn.Module):
    """An anchor-free detector: each cell of two grids may be the middle of an object, whose edges it predicts."""

    def __init__(self) -> None:
        super().__init__()
        self.score_thresh = 0.3  # camserve lowers an attribute of this name while it looks for the layers
        self.stem = nn.Sequential(_block(3, 16, 2), _block(16, 32, 2), _block(32, 48, 2))
        self.deep = nn.Sequential(_block(48, 64, 2), _block(64, 48))
        self.fine, self.coarse = _block(48, 48), _block(48, 48)
        self.classes, self.edges = nn.Conv2d(48, 2, 3, padding=1), nn.Conv2d(48, 4, 3, padding=1)
        nn.init.constant_(self.classes.bias, -4.0)  # type: ignore[arg-type]  # a tensor

    def forward(self, images: Tensor) -> list[dict[str, Tensor]]:
        """Return boxes [n,4], labels [n], scores [n] and class_scores [n,3] of the objects of each image."""
        objects = []
        logits, boxes = self.cells(images)
        for scores, box in zip(logits.sigmoid(), boxes, strict=True):
            best, label = scores.max(1)
            likely = (best > self.score_thresh).nonzero()[:, 0]
            kept = likely[ops.nms(box[likely].detach(), best[likely].detach(), 0.4)]
            all_scores = functional.pad(scores[kept], (1, 0))  # 0 for the background; camserve.contrast() needs them
            objects.append(
                {"boxes": box[kept], "labels": label[kept] + 1, "scores": best[kept], "class_scores": all_scores}
            )
        return objects

    def cells(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [B,cells,2] and boxes [B,cells,4] of the cells of both grids."""
        stem = self.stem(images)
        deep = self.deep(stem)
        grids = self.fine(stem + functional.interpolate(deep, scale_factor=2.0)), self.coarse(deep)
        logits = torch.cat([self.classes(grid).flatten(2).mT for grid in grids], 1)
        edges = torch.cat(
            [functional.softplus(self.edges(grid)).flatten(2).mT * s for grid, s in zip(grids, STRIDES, strict=True)], 1
        )
        middles = _middles()
        return logits, torch.cat([middles - edges[..., :2], middles + edges[..., 2:]], -1)


def _block(channels: int, out: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU())


def _middles() -> Tensor:
    """Return x and y of the middles of all cells [cells,2]."""
    grids = []
    for stride in STRIDES:
        places = torch.arange(SIDE // stride) * stride + stride / 2
        grids.append(torch.stack(torch.meshgrid(places, places, indexing="xy"), -1).reshape(-1, 2))
    return torch.cat(grids)


def inputs(photos: list[NDArray[np.uint8]]) -> Tensor:
    """Return the detector's input, float32 [N,3,96,96] from -1 to 1."""
    return torch.from_numpy(np.stack(photos)).permute(0, 3, 1, 2) / 127.5 - 1


def _aims(items: list[Item]) -> tuple[Tensor, Tensor]:
    """Return the class of each cell [cells], 0 for none, and the box of its object [cells,4]."""
    boxes, middles = torch.tensor([box_of(item) for item in items]), _middles()
    strides = torch.cat([torch.full(((SIDE // stride) ** 2,), stride) for stride in STRIDES])
    distances = (middles[:, None] - (boxes[:, :2] + boxes[:, 2:]) / 2).abs()
    near = distances <= torch.maximum((boxes[:, 2:] - boxes[:, :2]) / 4, 0.51 * strides[:, None, None])
    inside = near.all(2) & ((boxes[:, 2] - boxes[:, 0] >= LARGE) == (strides == STRIDES[1])[:, None])
    owner = inside.float().argmax(1)
    labels = torch.tensor([LABELS.index(item[0]) for item in items])
    return torch.where(inside.any(1), labels[owner], 0), boxes[owner]


def train(count: int = 400, epochs: int = 8, seed: int = 0) -> Detector:
    """Return a detector that was trained on random scenes.

    Args:
        count: the number of scenes.
        epochs: how often each is used.
        seed: of the scenes and the weights.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    scenes, network = [scene(rng) for _ in range(count)], Detector()
    images, aims = inputs([draw(items, rng) for items in scenes]), [_aims(items) for items in scenes]
    classes, boxes = (torch.stack(parts) for parts in zip(*aims, strict=True))
    optimizer = torch.optim.AdamW(network.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, epochs * -(-count // 16))
    for _ in range(epochs):
        for batch in torch.split(torch.randperm(count), 16):
            logits, found = network.cells(images[batch])
            objects = classes[batch] > 0
            wanted = functional.one_hot(classes[batch], len(LABELS))[..., 1:].float()
            loss = ops.sigmoid_focal_loss(logits, wanted, reduction="sum") / objects.sum()
            loss = loss + ops.generalized_box_iou_loss(found[objects], boxes[batch][objects], reduction="mean")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return network.eval()


def build() -> Source:
    """Return the model to serve, by --model "balloons=balloons:build?weights=balloons.safetensors"."""
    preprocess = Preprocess((SIDE, SIDE), (SIDE, SIDE), "bilinear", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    return Source(Detector(), preprocess, labels=LABELS)
