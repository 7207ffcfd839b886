"""Networks that stand in for those of the readers of the documentation."""

import torch
from torch import nn


class Heads(nn.Module):
    """Network with two heads of two classes each, a map, a sequence of classes, and a single logit."""

    def __init__(self, form):
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 5, 8, 2)
        self.form = form

    def forward(self, image):
        layer = self.layer(image)
        first, second = (layer**2).mean((2, 3)).chunk(2, 1)
        return {
            "two_heads": {"colour": first, "shape": second},
            "reader": torch.stack([first, second, first - second], 1),
            "one_logit": first[:, :1],
            "depth": layer[:, :1] ** 2,
        }[self.form]


class Frames(nn.Module):
    """Network for clips that halves the number of frames."""

    def __init__(self):
        super().__init__()
        self.layer4 = nn.Conv3d(3, 4, 3, (2, 8, 8), 1)
        self.head = nn.Linear(4, 2)

    def forward(self, clip):
        return self.head((self.layer4(clip) ** 2).mean((2, 3, 4)))


class Siamese(nn.Module):
    """Network that calls one backbone for each of two pictures."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential()
        self.backbone.add_module("layer4", nn.Conv2d(3, 4, 3, 8, 1))
        self.head = nn.Linear(8, 2)

    def forward(self, first, second):
        features = torch.cat([self.backbone(first), self.backbone(second)], 1)
        return self.head((features**2).mean((2, 3)))


class Bands(nn.Module):
    """Network for images of twelve channels."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(12, 4, 3, 2, 1)
        self.head = nn.Linear(4, 2)

    def forward(self, image):
        return self.head((self.layer(image) ** 2).mean((2, 3)))
