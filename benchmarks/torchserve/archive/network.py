"""The network of the archive: TorchServe builds the one class that it finds here, and loads the weights into it."""

from torchvision.models.resnet import Bottleneck, ResNet


class ResNet50(ResNet):
    """ResNet-50 for the 1,000 classes of ImageNet."""

    def __init__(self) -> None:
        super().__init__(Bottleneck, [3, 4, 6, 3])
