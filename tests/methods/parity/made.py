"""Models made for parity: all their biases are random, because nearly all of those of a fresh model are zero."""

from timm.models.resnet import BasicBlock, ResNet
from torch import nn
from torchvision.models import get_model


def resnet18():
    """A resnet18 whose batch normalisations have seen something, with 100 classes."""
    return with_biases(get_model("resnet18", weights=None, num_classes=100))


def small():
    """The same with a tenth of the channels, which is loaded and explained in a fraction of the time."""
    return with_biases(ResNet(BasicBlock, [1, 1, 1, 2], 20, stem_width=8, channels=(8, 12, 16, 48)))


def with_biases(model):
    """Draw the biases and the statistics of batch normalisations."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.bias, 0.1, 0.2)
            nn.init.normal_(module.running_mean, 0.1, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    nn.init.normal_(model.fc.bias)
    return model


def relu6_apart(module):
    """Take each of timm's batch normalisations with an activation of its own apart, so that its sum can be hooked."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.BatchNorm2d) and hasattr(child, "act"):
            plain = nn.BatchNorm2d(child.num_features, child.eps)
            plain.to(child.weight.dtype).load_state_dict(child.state_dict())
            setattr(module, name, nn.Sequential(plain, child.act))
        else:
            relu6_apart(child)
    return module.eval()
