"""Torchvision's architectures with few and narrow layers: the same code as the large ones, in a tenth of the time."""

from collections import OrderedDict
from functools import partial

from torch import nn
from torchvision import models as zoo
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.mobilenetv3 import InvertedResidualConfig
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.models.vgg import cfgs, make_layers

CLASSES = 50


def resnet18():
    return zoo.ResNet(BasicBlock, [1, 1, 1, 2], CLASSES)


def resnet50():
    return zoo.ResNet(Bottleneck, [1, 1, 1, 2], CLASSES, width_per_group=16)


def densenet121():
    return zoo.DenseNet(8, (2, 4, 2, 4), 16, num_classes=CLASSES)


def vgg16():
    """Its classifier, in which nearly all weights are, has one layer."""
    layers = make_layers([each if each == "M" else min(each, 64) for each in cfgs["D"]])
    return nn.Sequential(
        OrderedDict(
            features=layers,
            avgpool=nn.AdaptiveAvgPool2d(7),
            flatten=nn.Flatten(),
            classifier=nn.Linear(64 * 7 * 7, CLASSES),
        )
    )


def mobilenet_v3_small():
    block = partial(InvertedResidualConfig, dilation=1, width_mult=1.0)
    blocks = [
        block(16, 3, 16, 16, use_se=True, activation="RE", stride=2),
        block(16, 3, 48, 24, use_se=False, activation="RE", stride=2),
        block(24, 3, 64, 24, use_se=False, activation="RE", stride=1),
        block(24, 5, 64, 40, use_se=True, activation="HS", stride=2),
    ]
    return zoo.MobileNetV3(blocks, 64, CLASSES)


def convnext_tiny():
    widths = (16, 24, 32, 48)
    blocks = [
        CNBlockConfig(width, after, count)
        for width, after, count in zip(widths, (*widths[1:], None), (1, 1, 4, 3), strict=True)
    ]
    return zoo.ConvNeXt(blocks, stochastic_depth_prob=0.1, num_classes=CLASSES)


def swin_t():
    return zoo.SwinTransformer([4, 4], 24, [2, 2, 4, 2], [1, 2, 4, 8], [7, 7], 4.0, 0.0, 0.0, 0.2, CLASSES)


def vit_b_16():
    """Its last layer, which is zero in a fresh model, is drawn."""
    result = zoo.VisionTransformer(64, 16, 6, 4, 64, 128, num_classes=CLASSES)
    nn.init.normal_(result.heads.head.weight, 0, 0.1)
    return result
