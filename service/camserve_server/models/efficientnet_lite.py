"""EfficientNet-Lite0, the embedded model: the same network as timm's `tf_efficientnet_lite0`.

Tan, Le 2019, arXiv:1905.11946, without squeeze-and-excitation and with ReLU6 (tensorflow/tpu, efficientnet/lite). Names
of modules, names of classes and computations are those of timm, so layers, maps and receipts do not change with the
implementation. timm draws the random weights of `?weights=none`. It is not used for other weights: its import takes
longer than the rest of a server's start with this model (docs/decisions/040-startup.md).
"""

import math
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional

EPS = 1e-3  # TensorFlow's, in every batch norm
STEM, FEATURES = 32, 1280  # channels of the first and the last convolution


class Stage(NamedTuple):
    """A stage: blocks of the same kind, of which only the first changes the size and the number of channels."""

    blocks: int
    kernel: int
    stride: int
    expansion: int
    channels: int


STAGES = (
    Stage(1, 3, 1, 1, 16),
    Stage(2, 3, 2, 6, 24),
    Stage(2, 5, 2, 6, 40),
    Stage(3, 3, 2, 6, 80),
    Stage(3, 5, 1, 6, 112),
    Stage(4, 5, 2, 6, 192),
    Stage(1, 3, 1, 6, 320),
)


class Conv2dSame(nn.Conv2d):
    """Convolution with TensorFlow's padding, which depends on the size of the image."""

    def forward(self, images: Tensor) -> Tensor:
        """Pad the images, more at the bottom and the right where the padding is odd, and convolve them."""
        height, width = (self._padding(axis, images.shape[axis + 2]) for axis in (0, 1))
        padded = functional.pad(images, (width // 2, width - width // 2, height // 2, height - height // 2))
        return functional.conv2d(padded, self.weight, self.bias, self.stride, (0, 0), self.dilation, self.groups)

    def _padding(self, axis: int, length: int) -> int:
        stride = self.stride[axis]
        return max((math.ceil(length / stride) - 1) * stride + self.kernel_size[axis] - length, 0)


class BatchNormAct2d(nn.BatchNorm2d):
    """Batch norm with the activation after it."""

    def __init__(self, channels: int, *, activation: bool = True) -> None:
        super().__init__(channels, eps=EPS)
        self.drop = nn.Identity()
        self.act = nn.ReLU6(inplace=True) if activation else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """Normalise the images and apply the activation."""
        activated: Tensor = self.act(self.drop(super().forward(images)))
        return activated


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    if stride > 1:
        return Conv2dSame(inputs, outputs, kernel, stride, groups=groups, bias=False)
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups, bias=False)


class DepthwiseSeparableConv(nn.Module):
    """Block of the first stage: a depthwise convolution and a linear projection."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.has_skip = stride == 1 and inputs == outputs
        self.conv_dw = _convolution(inputs, inputs, kernel, stride, groups=inputs)
        self.bn1 = BatchNormAct2d(inputs)
        self.aa = nn.Identity()
        self.se = nn.Identity()
        self.conv_pw = _convolution(inputs, outputs, 1)
        self.bn2 = BatchNormAct2d(outputs, activation=False)
        self.drop_path = nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """Compute the block, and add its input if both have the same shape."""
        filtered = self.se(self.aa(self.bn1(self.conv_dw(images))))
        projected: Tensor = self.bn2(self.conv_pw(filtered))
        return self.drop_path(projected) + images if self.has_skip else projected


class InvertedResidual(nn.Module):
    """Block of all other stages: an expansion, a depthwise convolution and a linear projection."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        self.has_skip = stride == 1 and inputs == outputs
        expanded = inputs * expansion
        self.conv_pw = _convolution(inputs, expanded, 1)
        self.bn1 = BatchNormAct2d(expanded)
        self.conv_dw = _convolution(expanded, expanded, kernel, stride, groups=expanded)
        self.bn2 = BatchNormAct2d(expanded)
        self.aa = nn.Identity()
        self.se = nn.Identity()
        self.conv_pwl = _convolution(expanded, outputs, 1)
        self.bn3 = BatchNormAct2d(outputs, activation=False)
        self.drop_path = nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """Compute the block, and add its input if both have the same shape."""
        filtered = self.se(self.aa(self.bn2(self.conv_dw(self.bn1(self.conv_pw(images))))))
        projected: Tensor = self.bn3(self.conv_pwl(filtered))
        return self.drop_path(projected) + images if self.has_skip else projected


class SelectAdaptivePool2d(nn.Module):
    """Mean over all places."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten(1)

    def forward(self, images: Tensor) -> Tensor:
        """Return one vector per image."""
        vectors: Tensor = self.flatten(self.pool(images))
        return vectors


class EfficientNet(nn.Module):
    """The network.

    Args:
        classes: number of its classes.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv_stem = _convolution(3, STEM, 3, stride=2)
        self.bn1 = BatchNormAct2d(STEM)
        stages, channels = [], STEM
        for stage in STAGES:
            stages.append(_stage(stage, channels))
            channels = stage.channels
        self.blocks = nn.Sequential(*stages)
        self.conv_head = _convolution(channels, FEATURES, 1)
        self.bn2 = BatchNormAct2d(FEATURES)
        self.global_pool = SelectAdaptivePool2d()
        self.classifier = nn.Linear(FEATURES, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits [B,classes] of images [B,3,h,w]."""
        features = self.bn2(self.conv_head(self.blocks(self.bn1(self.conv_stem(images)))))
        logits: Tensor = self.classifier(self.global_pool(features))
        return logits


def _stage(stage: Stage, inputs: int) -> nn.Sequential:
    blocks: list[nn.Module] = []
    for index in range(stage.blocks):
        stride = 1 if index else stage.stride
        if stage.expansion == 1:
            blocks.append(DepthwiseSeparableConv(inputs, stage.channels, stage.kernel, stride))
        else:
            blocks.append(InvertedResidual(inputs, stage.channels, stage.kernel, stride, stage.expansion))
        inputs = stage.channels
    return nn.Sequential(*blocks)
