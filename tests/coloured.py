"""Models that detect red and green, so that the right explanation is known."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from camserve_server.models import KeepAspect, Preprocess, Source, TextTower

RED, GREEN = (255, 0, 0), (0, 255, 0)


def painted(size=64, **squares):
    """Return a black image with squares: colour name = (top, left, side)."""
    image = np.zeros((size, size, 3), np.uint8)
    for name, (top, left, side) in squares.items():
        image[top : top + side, left : left + side] = {"red": RED, "green": GREEN}[name]
    return image


class Colours(nn.Module):
    """Segmentation model: scores of black, red and green around every pixel."""

    def __init__(self):
        super().__init__()
        self.colours = nn.Conv2d(3, 3, 1, bias=False)
        self.smooth = nn.AvgPool2d(6, 2, 2)
        self.head = nn.Conv2d(3, 3, 1)
        with torch.no_grad():
            self.colours.weight.copy_(torch.eye(3)[:, :, None, None])
            self.head.weight.copy_(torch.tensor([[-1.0, -1.0, 0], [2.0, -1.0, 0], [-1.0, 2.0, 0]])[:, :, None, None])
            self.head.bias.copy_(torch.tensor([0.5, -1.0, -1.0]))

    def forward(self, images):
        raw = images * 0.225 + 0.45
        smooth = self.smooth(torch.relu(self.colours(raw)))
        logits = self.head(smooth)
        return {"out": functional.interpolate(logits, images.shape[2:], mode="bilinear", align_corners=False)}


def proportional() -> Source:
    """Return the segmentation model with inputs that keep a photo's proportions, with borders."""
    resize = KeepAspect(64, 64, multiple=32, fit="pad")
    preprocess = Preprocess(resize.largest, resize, "bilinear", (0.45,) * 3, (0.225,) * 3)
    return Source(Colours(), preprocess, ("background", "red", "green"))


class Finder(nn.Module):
    """Detector of one red and one green object, with the brightness as score."""

    num_classes = 3

    def __init__(self):
        super().__init__()
        self.seen = nn.Conv2d(3, 2, 1)
        self.smooth = nn.AvgPool2d(6, 2, 2)
        with torch.no_grad():
            self.seen.weight.copy_(torch.tensor([[1.0, -1.0, 0], [-1.0, 1.0, 0]])[:, :, None, None])
            self.seen.bias.fill_(-0.05)  # black is no colour

    def forward(self, images):
        bright = self.smooth(torch.relu(self.seen(torch.stack(list(images)) * 0.225 + 0.45)))
        return [self._objects(image) for image in bright]

    def _objects(self, bright):
        scores, boxes, labels = [], [], []
        for label, colour in enumerate(bright, start=1):
            places = (colour > 0.03).nonzero() * 2.0
            if len(places):
                (top, left), (bottom, right) = places.amin(0), places.amax(0) + 2
                scores.append(1 - torch.exp(-colour.sum() / 64))
                boxes.append(torch.stack([left, top, right, bottom]))
                labels.append(label)
        if not scores:
            return {
                "boxes": bright.new_zeros(0, 4),
                "labels": torch.zeros(0, dtype=torch.int64),
                "scores": bright.new_zeros(0),
            }
        return {"boxes": torch.stack(boxes), "labels": torch.tensor(labels), "scores": torch.stack(scores)}


class Pooled(Colours):
    def forward(self, images):
        return self.smooth(torch.relu(self.colours(images * 0.225 + 0.45))).mean((2, 3))


class Words(nn.Module):
    """Text side of a model whose embedding is how red, green and blue an image is: it knows the names of colours."""

    def __init__(self):
        super().__init__()
        self.vectors = nn.Parameter(torch.eye(3))

    def forward(self, texts):
        named = [[name in text for name in ("red", "green", "blue")] for text in texts]
        return torch.tensor(named, dtype=torch.float32) @ self.vectors + self.vectors.mean(0) / 10


def named():
    """Return a model that compares images with the names of colours, as a factory of a user makes it."""
    return Source(Pooled(), task="embed", text=TextTower(Words(), scale=10.0))
