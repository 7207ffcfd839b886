"""Object detectors of torchvision: their preprocessing, score thresholds and feature pyramids."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree  # flattens every output structure that torch knows

from camserve_server.core.errors import ConfigError
from camserve_server.core.imported import imported
from camserve_server.imaging.values import Preprocess
from camserve_server.models.pyramid import ancestors


def preprocess_of(model: nn.Module, default: Preprocess) -> Preprocess:
    """Return the preprocessing of a model: for a detector that resizes and normalises by itself, from its transform.

    All images of a batch have the same size, so the whole photo is resized to a square. Nothing is cropped, because an
    object at the edge must not be cut off.

    Args:
        model: the model.
        default: the preprocessing of any other model.
    """
    transform = _transform_of(model)
    if transform is None:
        return default
    width, height = transform.fixed_size or (transform.min_size[-1],) * 2
    mean, std = (_triple(values) for values in (transform.image_mean, transform.image_std))
    return Preprocess((height, width), (height, width), "bilinear", mean, std)


def _transform_of(model: nn.Module) -> Any:
    """Return the transform by which a detector of torchvision resizes and normalises; None for any other model."""
    transform = getattr(model, "transform", None)
    kinds = imported("torchvision.models.detection.transform", "GeneralizedRCNNTransform")
    return transform if isinstance(transform, kinds) else None


def _triple(values: Sequence[float]) -> tuple[float, float, float]:
    red, green, blue = values
    return red, green, blue


def disable_preprocessing(model: nn.Module, size: tuple[int, int]) -> None:
    """Make a detector skip its own resizing and normalisation: its input is already preprocessed.

    Args:
        model: the model; other models than detectors are not changed.
        size: height and width of its input.

    Raises:
        ConfigError: the detector would pad an input of that size.
    """
    transform = _transform_of(model)
    if transform is None:
        return
    if any(side % transform.size_divisible for side in size):
        raise ConfigError(f"size= must be a multiple of {transform.size_divisible} for this model, not {size[0]}")
    transform.image_mean, transform.image_std = [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]
    transform.min_size, transform.max_size = (min(size),), max(size)
    transform.fixed_size = (size[1], size[0]) if transform.fixed_size else None


def classes_of(model: nn.Module, labels: Collection[str]) -> int:
    """Return the number of a detector's classes, including the background.

    Raises:
        ConfigError: neither the model nor the labels give it.
    """
    for name, module in model.named_modules():
        if name.endswith(("cls_score", "classification_head")) or not name:
            for attribute in ("num_classes", "num_columns", "out_features"):
                if isinstance(classes := getattr(module, attribute, None), int):
                    return classes
    if labels:
        return len(labels)
    raise ConfigError("its number of classes is unknown: name them with labels=PATH, or set num_classes on the model")


@contextmanager
def without_score_threshold(model: nn.Module) -> Iterator[None]:
    """Make a detector report objects of any score inside the block; with random weights all scores are low."""
    thresholds = [(module, module.score_thresh) for module in model.modules() if hasattr(module, "score_thresh")]
    for module, _ in thresholds:
        module.score_thresh = -1.0  # type: ignore[assignment]  # a float, but torch types every attribute as a module
    try:
        yield
    finally:
        for module, threshold in thresholds:
            module.score_thresh = threshold


@dataclass(slots=True)
class Pyramid:
    """The feature maps that a model's backbone returned.

    Attributes:
        maps: the maps, on the graph, one per scale; empty without a backbone.
        collectors: the names of the modules that return several maps, including the backbone.
    """

    maps: list[Tensor] = field(default_factory=list)
    collectors: set[str] = field(default_factory=set)


@contextmanager
def record_pyramid(model: nn.Module) -> Iterator[Pyramid]:
    """Record the feature maps of a model's backbone while it runs inside the block."""
    pyramid, backbone = Pyramid(), getattr(model, "backbone", None)
    if not isinstance(backbone, nn.Module):
        yield pyramid
        return

    def record(name: str, output: Any) -> None:
        maps = [part for part in pytree.tree_leaves(output) if isinstance(part, Tensor)]
        if len(maps) > 1:
            pyramid.collectors.add(name)
        if name == "backbone":
            pyramid.maps[:] = maps

    with ExitStack() as stack:
        for name, module in backbone.named_modules(prefix="backbone"):
            hook = module.register_forward_hook(lambda _module, _args, output, name=name: record(name, output))
            stack.enter_context(hook)
        yield pyramid


def layers_before_pyramid(model: nn.Module, pyramid: Pyramid, outputs: Mapping[str, Tensor | None]) -> set[str]:
    """Return the modules whose output every map of a pyramid depends on, without the modules of the pyramid itself.

    An object's score depends on the maps of its own scale alone. The outputs that all maps depend on explain any
    object.

    Args:
        model: the model.
        pyramid: its recorded feature maps.
        outputs: the output of each module, on the graph, by name.
    """
    kinds = imported("torchvision.ops.feature_pyramid_network", "FeaturePyramidNetwork")
    pyramid_modules = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    nodes_before = [ancestors(feature_map.grad_fn) for feature_map in pyramid.maps]
    return {
        name
        for name, output in outputs.items()
        if output is not None
        and name not in pyramid.collectors
        and not any(name == other or name.startswith(f"{other}.") for other in pyramid_modules)
        and all(output.grad_fn in nodes for nodes in nodes_before)
    }
