"""Models of object detection as torchvision builds them: their own resize, their thresholds, their pyramids."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils import _pytree as pytree  # every shape of output that torch itself knows
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import FeaturePyramidNetwork

from camserve_server.core.errors import ConfigError
from camserve_server.imaging.values import Preprocess


def preprocess_of(model: nn.Module, usual: Preprocess) -> Preprocess:
    """Return how a model wants its input; a detector that resizes and normalises by itself says so in its transform.

    All images of a batch have one size here, so the photo is resized to a square, whole: an object at its edge must not
    be cut off.
    """
    transform = getattr(model, "transform", None)
    if not isinstance(transform, GeneralizedRCNNTransform):
        return usual
    width, height = transform.fixed_size or (transform.min_size[-1],) * 2
    mean, std = (_triple(values) for values in (transform.image_mean, transform.image_std))
    return Preprocess((height, width), (height, width), "bilinear", mean, std)


def _triple(values: Sequence[float]) -> tuple[float, float, float]:
    red, green, blue = values
    return red, green, blue


def hand_over(model: nn.Module, size: tuple[int, int]) -> None:
    """Take resizing and normalising from a detector: it gets its input of that height and width made.

    Raises:
        ConfigError: it would enlarge such an input with a border.
    """
    transform = getattr(model, "transform", None)
    if not isinstance(transform, GeneralizedRCNNTransform):
        return
    if any(side % transform.size_divisible for side in size):
        raise ConfigError(f"size= is a multiple of {transform.size_divisible} for it, not {size[0]}")
    transform.image_mean, transform.image_std = [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]
    transform.min_size, transform.max_size = (min(size),), max(size)
    transform.fixed_size = (size[1], size[0]) if transform.fixed_size else None


def classes_of(model: nn.Module, labels: Collection[str]) -> int:
    """Return how many classes a detector knows, the background among them.

    Raises:
        ConfigError: it does not say.
    """
    for name, module in model.named_modules():
        if name.endswith(("cls_score", "classification_head")) or not name:
            for attribute in ("num_classes", "num_columns", "out_features"):
                if isinstance(found := getattr(module, attribute, None), int):
                    return found
    if labels:
        return len(labels)
    raise ConfigError("it does not say how many classes it knows: name them with labels=PATH, or set its num_classes")


@contextmanager
def lenient(model: nn.Module) -> Iterator[None]:
    """Let a detector report what it is not sure of: random weights are sure of nothing."""
    strict = [(module, module.score_thresh) for module in model.modules() if hasattr(module, "score_thresh")]
    for module, _ in strict:
        module.score_thresh = -1.0  # type: ignore[assignment]  # a float, which torch does not say of any attribute
    try:
        yield
    finally:
        for module, threshold in strict:
            module.score_thresh = threshold


@dataclass(slots=True)
class Pyramid:
    """What a model's backbone showed when it ran.

    Attributes:
        maps: that it returned, on the graph, one for each scale; none without a backbone.
        gatherers: names of the modules that return several maps, the backbone among them.
    """

    maps: list[Tensor] = field(default_factory=list)
    gatherers: set[str] = field(default_factory=set)


@contextmanager
def pyramid_of(model: nn.Module) -> Iterator[Pyramid]:
    """Yield what a model's backbone shows when it runs in the block."""
    pyramid, backbone = Pyramid(), getattr(model, "backbone", None)
    if not isinstance(backbone, nn.Module):
        yield pyramid
        return

    def keep(name: str, output: Any) -> None:
        maps = [part for part in pytree.tree_leaves(output) if isinstance(part, Tensor)]
        if len(maps) > 1:
            pyramid.gatherers.add(name)
        if name == "backbone":
            pyramid.maps[:] = maps

    with ExitStack() as stack:
        for name, module in backbone.named_modules(prefix="backbone"):
            hook = module.register_forward_hook(lambda _module, _args, output, name=name: keep(name, output))
            stack.enter_context(hook)
        yield pyramid


def below(model: nn.Module, pyramid: Pyramid, outputs: Mapping[str, Tensor | None]) -> set[str]:
    """Return the modules that every map of a pyramid was made from, but for those of the pyramid itself.

    An object's score depends on the maps of its own scale alone; what they all come from explains each object.

    Args:
        model: that the modules are of.
        pyramid: that it showed.
        outputs: of each module, on the graph, by name.
    """
    pyramids = [name for name, module in model.named_modules() if isinstance(module, FeaturePyramidNetwork)]
    reached = [_reached(one.grad_fn) for one in pyramid.maps]
    return {
        name
        for name, output in outputs.items()
        if output is not None
        and name not in pyramid.gatherers
        and not any(name == one or name.startswith(f"{one}.") for one in pyramids)
        and all(output.grad_fn in nodes for nodes in reached)
    }


def _reached(start: Node | None) -> set[Node | None]:
    reached: set[Node | None] = set()
    waiting = [start]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in reached:
            reached.add(node)
            waiting += [before for before, _ in node.next_functions]
    return reached
