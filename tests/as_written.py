"""Networks as people write them, and a plain one that computes the same.

They have the same weights, and the same names of modules, so that their explanations must be the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from camserve_server.models import Preprocess, Source

SIZE = 32


class Plain(nn.Module):
    """A small classifier, without anything special."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, classes)

    def features(self, image: Tensor) -> Tensor:
        return self.body(self.stem(image))

    def forward(self, image: Tensor) -> Any:
        return self.head(self.features(image).mean((2, 3)))


def plain(classes: int = 5) -> Plain:
    """Return the network, always the same, with statistics of a training in its batch norms."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        network = Plain(classes)
        for _ in range(5):
            network(torch.randn(8, 3, SIZE, SIZE) * 2 + 1)
    return network.eval()


def changed(kind: type[Plain], classes: int = 5) -> Plain:
    """Return the network with another class's way to run."""
    network = plain(classes)
    network.__class__ = kind
    return network


class Reentrant(Plain):
    def features(self, image: Tensor) -> Tensor:
        return checkpoint(self.body, checkpoint(self.stem, image, use_reentrant=True), use_reentrant=True)


class NotReentrant(Plain):
    def features(self, image: Tensor) -> Tensor:
        once = checkpoint(self.stem, image, use_reentrant=False)
        return checkpoint(use_reentrant=False)(self.body)(once)


class Nested(Plain):
    def features(self, image: Tensor) -> Tensor:
        return checkpoint(super().features, image, use_reentrant=False)


class TrainReturnsNothing(Plain):
    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        super().train(mode)
        self.stem[1].eval()


class LogitsInDictionary(Plain):
    def forward(self, image: Tensor) -> Any:
        features = self.features(image)
        return {"features": features, "logits": self.head(features.mean((2, 3)))}


class OneInDictionary(Plain):
    def forward(self, image: Tensor) -> Any:
        return {"scores": super().forward(image)}


@dataclass
class Result:
    features: Tensor
    logits: Tensor


class LogitsInDataclass(Plain):
    def forward(self, image: Tensor) -> Any:
        features = self.features(image)
        return Result(features, self.head(features.mean((2, 3))))


class Squeezed(Plain):
    """`squeeze()` of one image's logits removes the axis of the batch."""

    def forward(self, image: Tensor) -> Any:
        return super().forward(image).squeeze()


class Unsqueezed(Plain):
    """A fully convolutional classifier: [B,C,1,1]."""

    def forward(self, image: Tensor) -> Any:
        return super().forward(image)[:, :, None, None]


class Reshape(nn.Module):
    """Gives a tensor another shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, values: Tensor) -> Tensor:
        return values.reshape(self.shape)


def replace_forward(module: nn.Module) -> None:
    """Replace `forward` of a module by a function that holds the module."""
    original = module.forward

    def forward(image: Tensor) -> Any:
        return original(image)

    module.forward = forward  # type: ignore[method-assign]


def with_replaced_forward() -> Plain:
    """Return the network as a profiler leaves it: `forward` of one part is a function that holds the part itself."""
    network = plain()
    replace_forward(network.stem)
    return network


def with_replaced_forward_of_a_layer() -> Plain:
    """Return the network with a function in place of a single convolution's `forward`, as tools for LoRA leave it."""
    network = plain()
    replace_forward(network.body[0])
    return network


def with_replaced_whole_forward() -> Plain:
    network = plain()
    replace_forward(network)
    return network


def with_hidden_part() -> Plain:
    """Return the network with a part that torch does not know of, as in a wrapper: `eval()` does not reach it."""
    network = plain()
    body = network.body.train()
    del network.body
    object.__setattr__(network, "body", body)
    return network


class InAList(Plain):
    """Keeps its parts in a plain list, in training mode."""

    def features(self, image: Tensor) -> Tensor:
        for part in self.parts:
            image = part(image)
        return image


def in_a_list() -> InAList:
    network = changed(InAList)
    parts = [network.stem.train(), network.body.train()]
    del network.stem, network.body
    network.parts = parts
    return network


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "checkpointing": lambda: changed(NotReentrant),
    "reentrant_checkpointing": lambda: changed(Reentrant),
    "checkpointing_of_everything": lambda: changed(Nested),
    "train_returns_nothing": lambda: changed(TrainReturnsNothing),
    "logits_in_a_dictionary": lambda: changed(LogitsInDictionary),
    "dictionary_of_one": lambda: changed(OneInDictionary),
    "logits_in_a_dataclass": lambda: changed(LogitsInDataclass),
    "squeezed_logits": lambda: changed(Squeezed),
    "logits_of_one_place": lambda: changed(Unsqueezed),
    "replaced_forward": with_replaced_forward,
    "replaced_forward_of_a_layer": with_replaced_forward_of_a_layer,
    "replaced_forward_of_the_network": with_replaced_whole_forward,
    "replaced_forward_in_training": lambda: with_replaced_forward().train(),
    "hidden_part": with_hidden_part,
}
"""Networks that compute what `plain` does, by name."""

PREPROCESS = Preprocess((SIZE, SIZE), (SIZE, SIZE), "bilinear", (0.5,) * 3, (0.25,) * 3)


def __getattr__(name: str) -> Callable[[], Source]:
    """Return the factory of a network, for the spec `as_written:NAME`."""
    if name not in MAKERS:  # a function above, or `__path__`, which Python looks for
        raise AttributeError(name)
    return lambda: Source(MAKERS[name](), PREPROCESS)


class LeNet(nn.Module):
    """The network of PyTorch's tutorial, which flattens with `view`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2 = nn.Linear(400, 20), nn.Linear(20, 5)

    def flat(self, features: Tensor) -> Tensor:
        return features.view(features.size(0), -1)

    def forward(self, image: Tensor) -> Tensor:
        features = functional.max_pool2d(functional.relu(self.conv1(image)), 2)
        features = functional.max_pool2d(functional.relu(self.conv2(features)), 2)
        return self.fc2(functional.relu(self.fc1(self.flat(features))))


class ReshapingLeNet(LeNet):
    def flat(self, features: Tensor) -> Tensor:
        return features.flatten(1)


def lenet(kind: type[LeNet] = LeNet) -> LeNet:
    """Return the network, always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return kind().eval()
