"""Models of torchvision and timm.

`sources` imports this module when such a model is built or checked: both libraries together take longer to import than
torch (docs/decisions/040-startup.md).
"""

import inspect
from typing import Any, Literal, cast

import timm
import timm.data
from torch import nn
from torchvision import models as zoo

from camserve_server.core.errors import ConfigError, did_you_mean
from camserve_server.imaging.values import Preprocess
from camserve_server.models import stem
from camserve_server.models.source import DEFAULT_PREPROCESS, IMAGENET_LABELS, LITE, Source
from camserve_server.models.spec import ModelSpec


def from_torchvision(spec: ModelSpec) -> Source:
    """Build a model of torchvision; see `sources.build`."""
    check_known(spec)
    weights = zoo.get_model_weights(spec.arch)
    best = weights["DEFAULT"] if "DEFAULT" in weights.__members__ else None
    options: dict[str, Any] = {} if spec.classes is None else {"num_classes": spec.classes}
    builder = inspect.signature(zoo.get_model_builder(spec.arch))
    if "weights_backbone" in builder.parameters and spec.weights != "default":
        options["weights_backbone"] = None  # otherwise torchvision fetches them
    if spec.weights == "default":
        module = _fetch(spec, lambda: zoo.get_model(spec.arch, weights=best, **options))
    else:
        module = _fetch(spec, lambda: _torchvision_module(spec, options))
    if spec.channels not in (None, stem.RGB):
        stem.rebuild(module, spec.channels)
    if best is None:
        return Source(module, DEFAULT_PREPROCESS)
    preprocess = _torchvision_preprocess(best.transforms(), getattr(module, "image_size", None))
    return Source(module, preprocess, tuple(best.meta.get("categories", ())))


def _torchvision_module(spec: ModelSpec, options: dict[str, Any]) -> nn.Module:
    """Build a model without weights, for the requested size if the architecture depends on it."""
    size = spec.size
    size_options: list[dict[str, Any]] = [] if size is None else [{"image_size": size}, {"input_size": (size, size)}]
    for option in size_options:
        try:
            return cast("nn.Module", zoo.get_model(spec.arch, weights=None, **options, **option))
        except TypeError:  # only torchvision's vision transformers and its MaxViT are built for a size
            pass
    return cast("nn.Module", zoo.get_model(spec.arch, weights=None, **options))


def _torchvision_preprocess(transform: Any, built_for: int | None) -> Preprocess:
    if not hasattr(transform, "resize_size"):
        return DEFAULT_PREPROCESS
    interpolation = _interpolation(transform.interpolation.value)
    mean, std = tuple(transform.mean), tuple(transform.std)
    side = resize = transform.resize_size[0]
    if not hasattr(transform, "crop_size"):  # a segmentation model: the whole photo, resized to a square
        return Preprocess((side, side), (side, side), interpolation, mean, std)
    side = transform.crop_size[0]
    if built_for and built_for != side:  # the best weights may be for another size than the module
        side, resize = built_for, round(resize * built_for / side)
    return Preprocess((side, side), resize, interpolation, mean, std)


def from_timm(spec: ModelSpec) -> Source:
    """Build a model of timm; see `sources.build`."""
    check_known(spec)
    options: dict[str, Any] = {} if spec.classes is None else {"num_classes": spec.classes}
    if spec.channels is not None:
        options["in_chans"] = spec.channels
    module = _fetch(spec, lambda: _timm_module(spec, options))
    config = timm.data.resolve_model_data_config(module)
    if config["crop_mode"] == "border":
        raise ConfigError(
            f"{spec.origin} needs photos with a border around them, which this server does not support: "
            "build it in a factory of your own that takes photos without one, and name it as your.module:factory"
        )
    _, height, width = config["input_size"]
    scaled = (int(height / config["crop_pct"]), int(width / config["crop_pct"]))
    preprocess = Preprocess(
        size=(height, width),
        resize=scaled if config["crop_mode"] == "squash" or height != width else scaled[0],
        interpolation=_interpolation(config["interpolation"]),
        mean=config["mean"],
        std=config["std"],
    )
    return Source(module, preprocess, _timm_labels(module))


def _timm_module(spec: ModelSpec, options: dict[str, Any]) -> nn.Module:
    pretrained = spec.weights == "default"
    module: nn.Module
    if spec.size is not None:
        try:
            module = timm.create_model(spec.arch, pretrained=pretrained, img_size=spec.size, **options)
        except TypeError:  # only transformers are built for a size
            pass
        else:
            return module
    module = timm.create_model(spec.arch, pretrained=pretrained, **options)
    return module


def _timm_labels(module: nn.Module) -> tuple[str, ...]:
    subset = timm.data.infer_imagenet_subset(module)
    if subset == "imagenet-1k":
        return IMAGENET_LABELS
    if subset is None:
        return ()
    info = timm.data.ImageNetInfo(subset)
    return tuple(info.index_to_description(i) for i in range(info.num_classes()))


def check_known(spec: ModelSpec) -> None:
    """Check that the library of a spec has its model.

    Raises:
        ConfigError: it does not.
    """
    names = zoo.list_models() if spec.source == "torchvision" else timm.list_models()
    if spec.arch.split(".")[0] not in names:
        hint = did_you_mean(spec.arch, names)
        raise ConfigError(f'{spec.source} has no model "{spec.arch}"{hint}')


def _fetch(spec: ModelSpec, make: Any) -> nn.Module:
    try:
        return cast("nn.Module", make())
    except Exception as error:
        if spec.weights != "default":
            raise ConfigError(f"{spec.origin} cannot be made: {error}") from error
        raise ConfigError(
            f"the default weights of {spec.origin} cannot be fetched ({type(error).__name__}): "
            "give weights=PATH of a .safetensors or .pth file, or weights=none for random ones"
        ) from error


def _interpolation(name: str) -> Literal["nearest", "bilinear", "bicubic"]:
    return cast("Any", name) if name in ("nearest", "bilinear") else "bicubic"


def _random_lite(spec: ModelSpec) -> Source:
    return Source(timm.create_model("tf_efficientnet_lite0", num_classes=spec.classes), LITE, IMAGENET_LABELS)


MAKERS = {"torchvision": from_torchvision, "timm": from_timm, "embedded": _random_lite}
"""Functions that make a model, by source."""
