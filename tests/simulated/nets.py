"""Small networks for the simulated GPU, where each operation takes as long as a hundred on the CPU."""

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn


class Residual(nn.Module):
    """A block of two convolutions with a bypass, which halves the sides."""

    def __init__(self, before, after):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.bn2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        self.bypass, self.act = nn.Conv2d(before, after, 1, 2), nn.ReLU(inplace=True)

    def forward(self, x):
        inner = self.act(self.bn1(self.conv1(x)))
        return self.act(self.bn2(self.conv2(inner)) + self.bypass(x))


class ResNet(nn.Module):
    """Residual network of two blocks, whose last features of an image of 64 pixels are a grid of 4x4."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 7, 4, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.layer1, self.layer2 = Residual(8, 16), Residual(16, 32)
        self.pool, self.flat, self.fc = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 12)

    def forward(self, images):
        return self.fc(self.flat(self.pool(self.layer2(self.layer1(self.stem(images))))))


def resnet():
    """Return a residual network with random weights and large scores, with which no method has a map of zeros."""
    torch.manual_seed(4)
    net = ResNet()
    with torch.no_grad():
        net.fc.weight.mul_(100)
    return net


def vit():
    """Return a transformer of two blocks that sees 4x4 patches of 16 pixels."""
    torch.manual_seed(0)
    return VisionTransformer(img_size=64, patch_size=16, embed_dim=24, depth=2, num_heads=2, num_classes=12)
