"""A network from a source, with its preprocessing and labels; and those of ImageNet."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from camserve_server.core.errors import ConfigError
from camserve_server.imaging.values import Preprocess
from camserve_server.models.heads import Output
from camserve_server.models.text import TextTower
from camserve_server.models.values import Activation, DeclaredTask

Labels: TypeAlias = Iterable[Any] | Mapping[Any, Any]
"""One label for each class; or a mapping from indices of classes to labels, as `id2label`, or from labels to them."""

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
IMAGENET_LABELS = tuple(Path(__file__).with_name("imagenet_labels.txt").read_text(encoding="utf-8").splitlines())
"""Labels of the 1000 classes, with torchvision's spelling."""

DEFAULT_PREPROCESS = Preprocess((224, 224), 256, "bilinear", IMAGENET_MEAN, IMAGENET_STD)
"""The usual preprocessing of ImageNet models, for models that specify none."""

# Mean and deviation are the authors' 127/255 and 128/255. The crop keeps the whole shorter side, because a part of the
# photo that the model does not see cannot be explained. With timm's crop of 0.875 the probabilities for the sample
# photo are a near tie (tiger cat 0.39, Egyptian cat 0.36); with the whole shorter side they are 0.33 and 0.38.
LITE = Preprocess((224, 224), 224, "bicubic", (0.498, 0.498, 0.498), (0.502, 0.502, 0.502))


@dataclass(frozen=True, slots=True)
class Source:
    """A network from a source, with everything the source knows about it.

    Attributes:
        module: the network, with the source's weights or random ones.
        preprocess: the preprocessing of its input.
        labels: one label per class; empty if unknown.
        task: the task; None if unknown.
        output: the key, attribute or index of the output to explain, if the module has several; or a function from the
            module's output to logits [B, classes]. Needed only if the output is neither that tensor nor an object whose
            attribute `logits` or first tensor it is.
        text: the text encoder of a model whose output is an embedding; None if it takes no texts. Its labels are texts.
        queries: the number of learned tokens that ask for one object each, as in DETR; 0 without such tokens.
        activation: the softmax or sigmoid that the network applies to its logits itself; "none" if its output are
            logits; None to find it out.

    Example:
        >>> from torch import nn
        >>> from camserve_server.models import Source
        >>> network = nn.Sequential(nn.Conv2d(3, 2, 8, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        >>> source = Source(network, labels=("cat", "dog"))
        >>> source.preprocess.size, source.labels  # the default is the usual preprocessing of ImageNet
        ((224, 224), ('cat', 'dog'))
    """

    module: nn.Module
    preprocess: Preprocess = DEFAULT_PREPROCESS
    labels: tuple[str, ...] = ()
    task: DeclaredTask | None = None
    output: Output | str | int | None = None
    text: TextTower | None = None
    queries: int = 0
    activation: Activation | None = None


def names_of(labels: Labels | None) -> tuple[str, ...]:
    """Return labels as texts, in the order of the classes; none for None.

    Args:
        labels: one for each class, in their order, such as texts, numbers or an array; or a mapping from the indices of
            classes, such as `config.id2label` of transformers, or to them, such as `class_to_idx` of torchvision.

    Raises:
        ConfigError: it is a single text, or a mapping without each index once.

    Example:
        >>> from camserve_server.models.source import names_of
        >>> names_of({0: "cat", 1: "dog"}), names_of({"dog": 1, "cat": 0}), names_of([3, 5])
        (('cat', 'dog'), ('cat', 'dog'), ('3', '5'))
    """
    if labels is None:
        return ()
    if isinstance(labels, str | bytes):
        raise ConfigError(f"labels={labels!r} is a single text: give one label for each class")
    if isinstance(labels, Mapping):
        labels = _in_order(labels)
    elif hasattr(labels, "tolist"):  # an array or a tensor
        labels = labels.tolist()
    try:
        return tuple(map(str, labels))
    except TypeError as error:
        raise ConfigError(f"labels={labels!r} is a {type(labels).__name__}: give one label for each class") from error


def _in_order(labels: Mapping[Any, Any]) -> Iterable[Any]:
    """Return the labels of a mapping in the order of their indices, which are its keys, or else its values."""
    for pairs in (labels.items(), ((index, label) for label, index in labels.items())):
        by_index = {_index_of(index): label for index, label in pairs}
        if by_index.keys() == set(range(len(labels))):
            return (by_index[index] for index in range(len(labels)))
    raise ConfigError(f"labels is a mapping of {len(labels)}: its keys must be the indices 0 to {len(labels) - 1}")


def _index_of(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None
