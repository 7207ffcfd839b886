"""Load a model: build it, read its weights, freeze it, probe its layers and accelerate it."""

import copy
import hashlib
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # flattens every output structure that torch knows

from camserve_server.core.devices import restore_settings
from camserve_server.core.errors import ConfigError
from camserve_server.imaging.values import KeepAspect, Preprocess
from camserve_server.models import (
    checkpoint,
    detectors,
    live,
    probe,
    probe_cache,
    pyramid,
    recomputation,
    stem,
    tasks,
    text,
)
from camserve_server.models.acceleration import TIMED_ROWS, AcceleratedModel, AccelerationOptions, accelerate
from camserve_server.models.endings import Ending
from camserve_server.models.hooks import has_forward_hooks, output_of
from camserve_server.models.pickles import CorruptFileError, printable
from camserve_server.models.probe_cache import Probed
from camserve_server.models.source import Source
from camserve_server.models.sources import BUILT_IN, build, register_hidden, with_logits
from camserve_server.models.spec import ModelSpec
from camserve_server.models.text import TextTower
from camserve_server.models.values import ModelInfo, Pass

log = logging.getLogger(__name__)

VECTOR_TASKS = ("classify", "multilabel", "regress")
"""Tasks of models whose output is one row of numbers, computed from an embedding."""

WRAPPERS = ("model.", "module.", "_orig_mod.")
"""Prefixes that training tools add to the name of every weight."""

PART_WRAPPER = re.compile(r"\.(module|_orig_mod)(?=\.)")
"""What they add to the names of weights in a part of the network."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model that is ready to run.

    Attributes:
        info: the description of the model.
        module: the frozen module, in evaluation mode, on its device.
        accelerated: an accelerated copy for passes that look at the default layer or layers after it, or None.
        dtype: the type of the module's input: float32, except for an accelerated copy in half precision, and for a
            network in float64.
        random_weights: random weights for the model, by seed and by name; see `randomise`.
        accelerate: True if the model may be accelerated.
        is_callers_own: True if the module is the caller's own network, whose modes are restored after each batch.
        text: the text side of a model that compares images with texts, on the device, or None.
        runs_versions: by layer, True if the modules after it can run for several versions of its output for one image;
            see `engine.score`.
    """

    info: ModelInfo
    module: nn.Module
    accelerated: AcceleratedModel | None = None
    dtype: torch.dtype = torch.float32
    random_weights: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    accelerate: bool = True
    is_callers_own: bool = False
    text: TextTower | None = None
    runs_versions: dict[str, bool] = field(default_factory=dict)

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """Run without activation checkpointing inside the block, and the caller's own network in evaluation mode."""
        own = live.frozen(self.module) if self.is_callers_own else nullcontext()
        with recomputation.disabled(), own:
            yield

    def for_pass(self, pass_: Pass) -> "LoadedModel":
        """Return the model that runs a pass: this one, or its accelerated copy, described for inputs of that size."""
        if pass_.size != self.info.preprocess.size:  # the accelerated copy is made for inputs of one size
            return replace(self, info=self.info.at_size(pass_.size))
        copied = self.accelerated
        if copied is None or not copied.can_run(pass_):
            return self
        return replace(self, module=copied.module, dtype=copied.dtype)

    def replica(self) -> "LoadedModel | None":
        """Return a copy of the model for a second batch at the same time: own modules and hooks, shared weights.

        Returns:
            The replica, which takes hardly any memory; None if the model cannot be copied, or the copy gives other
            outputs.
        """
        if any(map(has_forward_hooks, self.module.modules())):
            words = "model %s runs one batch at a time: its own hooks may not support two batches at once"
            log.info(words, self.info.name)
            return None
        modules = nn.ModuleList([self.module, *([self.accelerated.module] if self.accelerated else [])])
        tensors = (*modules.parameters(), *modules.buffers())
        # deepcopy takes the tensors in `memo` instead of copying the originals.
        memo: dict[int, Any] = {id(tensor): live.alias(tensor) for tensor in tensors}
        try:
            module, *copied = copy.deepcopy(modules, memo)
            accelerated = replace(self.accelerated, module=copied[0]) if self.accelerated else None
            replica = replace(self, module=module, accelerated=accelerated)
            if self._equals(replica):
                return replica
            reason = "its copy gives other outputs"
        except Exception as error:  # noqa: BLE001 -- a user's module may raise anything: run one batch at a time
            reason = f"{type(error).__name__}: {error}"
        log.info("model %s runs one batch at a time: %s", self.info.name, reason)
        return None

    def _equals(self, replica: "LoadedModel") -> bool:
        """Return whether a replica and its accelerated copy give the same outputs as this model, to the bit."""
        shape = (1, self.info.channels, *self.info.preprocess.size)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        images, layer = noise.to(self.info.device, self.dtype), self.info.default_layer
        comparisons = [(self.module, replica.module, images)]
        if (accelerated := self.accelerated) and replica.accelerated:
            comparisons.append((accelerated.module, replica.accelerated.module, images.to(accelerated.dtype)))
        for original, copied, image in comparisons:
            names, expected = _record_run(original, layer, image)
            copied_names, output = _record_run(copied, layer, image)
            if names != copied_names or not torch.equal(expected, output):
                return False
        return True

    def copy_to(self, device: str) -> "LoadedModel":
        """Return a copy on a device, which shares nothing with this model.

        Raises:
            ConfigError: the model cannot be copied.
        """
        try:
            module = copy.deepcopy(self.module).to(device)
            tower = copy.deepcopy(self.text)
        except Exception as error:  # a user's module may raise anything
            raise ConfigError(f"model {self.info.name} cannot be copied to a second device: {error}") from error
        info = replace(self.info, device=device)
        return _accelerate(module, info, AccelerationOptions(enabled=self.accelerate), _frozen_tower(tower, device))


def _record_run(module: nn.Module, layer: str, image: Tensor) -> tuple[list[str], Tensor]:
    """Run a model; return the names of its modules in the order in which they finished, and the output of a layer."""
    finished: list[str] = []
    with ExitStack() as stack, torch.no_grad():
        for name, child in module.named_modules():
            hook = child.register_forward_hook(lambda _module, _args, _output, name=name: finished.append(name))
            stack.enter_context(hook)
        return finished, output_of(module, layer, image)


def load(spec: ModelSpec, device: str = "cpu", *, rows: int = TIMED_ROWS) -> LoadedModel:
    """Load a model and find the layers that can be explained.

    Args:
        spec: the spec of the model.
        device: the device to run it on, "cpu" or "cuda:0".
        rows: the size of its largest batches; on a GPU, memory layouts are timed with such a batch.

    Raises:
        ConfigError: the model cannot be built, its weights cannot be read, or its output cannot be explained.
    """
    source = build(spec)
    if spec.live is None:
        restore_settings()
    is_callers_own = spec.live is not None and source.module is spec.live.module
    with recomputation.disabled(), live.frozen(source.module) if is_callers_own else nullcontext():
        return replace(_prepare(spec, source, device, rows), is_callers_own=is_callers_own)


def _prepare(spec: ModelSpec, source: Source, device: str, rows: int) -> LoadedModel:
    weights = _read_weights(spec, source.module)
    if weights == "none":
        _randomise_zeros(source.module)
        log.warning("model %s has random weights: its explanations mean nothing", spec.name)
    try:
        if spec.live is None and spec.source not in BUILT_IN:
            register_hidden(spec, source.module)  # after the weights, whose file may lack them
        module = live.to_evaluation(source.module, device)
        labels = _read_labels(spec.labels) if spec.labels else source.labels
        preprocess = _with_size(detectors.preprocess_of(module, source.preprocess), spec.size)
        preprocess = stem.with_statistics(preprocess, spec)
        detectors.disable_preprocessing(module, preprocess.size)
        tower = _frozen_tower(source.text, device)
        prepared = replace(source, module=module, preprocess=preprocess, labels=labels, text=tower)
        info = _describe(spec, prepared, weights, device)
    except (ConfigError, RuntimeError, AttributeError) as error:
        raise ConfigError(f"model {spec.name} ({spec.origin}): {error}") from error
    return _accelerate(module, info, AccelerationOptions(spec.accelerate, spec.compile, rows), tower)


def _accelerate(
    module: nn.Module, info: ModelInfo, options: AccelerationOptions, tower: TextTower | None
) -> LoadedModel:
    """Return a model with its accelerated copy and its memory layout."""
    acceleration = accelerate(module, info, options)
    info = replace(info, channels_last=acceleration.channels_last)
    dtype = live.dtype_of(module)
    return LoadedModel(info, module, acceleration.model, dtype, accelerate=options.enabled, text=tower)


def _frozen_tower(tower: TextTower | None, device: str) -> TextTower | None:
    """Return the text side of a model on a device, in evaluation mode and without gradients; None without one."""
    if tower is None:
        return None
    if not isinstance(tower.encoder, nn.Module):
        raise ConfigError(f"the encoder of its texts is a {type(tower.encoder).__name__}, not a torch.nn.Module")
    return replace(tower, encoder=live.to_evaluation(tower.encoder, device))


def _describe(spec: ModelSpec, source: Source, weights: str, device: str) -> ModelInfo:
    probed, sha256 = _probe_or_recall(spec, source, device)
    if (probed.task, probed.classes) == ("classify", 1):
        words = "model %s has one output, whose softmax is always 1: set its task to binary, multilabel or regress"
        log.warning(words, spec.name)
    if probed.dependence.mates:
        log.warning("model %s runs one image at a time, which is slower: %s", spec.name, probed.dependence.mates)
    if probed.dependence.run:
        words = "model %s has another output in each run, first in %s: is a dropout on, or does a run change a state?"
        log.warning(words, spec.name, probed.dependence.run)
    if not probed.differentiable:
        words = (
            "model %s has no gradient at its input: methods without gradients explain it, such as occlusion and rise"
        )
        log.warning(words, spec.name)
    modules = [source.module, *([source.text.encoder] if source.text else [])]
    return ModelInfo(
        name=spec.name,
        source=spec.origin,
        weights=weights,
        digest=_digest_with_text(sha256, source.text) if source.text else sha256,
        labels=_texts_of(source, probed) if source.text else _labels_of(spec, source, probed),
        classes=probed.classes,
        parameters=sum(p.numel() for module in modules for p in module.parameters()),
        preprocess=source.preprocess,
        layers=probed.layers,
        default_layer=probed.default_layer,
        precision="float64" if live.dtype_of(source.module) == torch.float64 else spec.precision,
        device=device,
        task=probed.task,
        embedding=probed.embedding,
        text=source.text.head(probed.classes) if source.text else None,
        pyramid=probed.pyramid,
        object_classes=probed.object_classes,
        independent_rows=not probed.dependence.mates,
        differentiable=probed.differentiable,
        is_opaque=any(isinstance(part, live.Program) for part in source.module.modules()),
    )


def _labels_of(spec: ModelSpec, source: Source, probed: Probed) -> tuple[str, ...]:
    """Return one label per class, or none."""
    classes = probed.classes
    if (spec.labels or (spec.live and source.labels)) and len(source.labels) != classes:
        hint = "; task=binary makes two classes of one logit" if (len(source.labels), classes) == (2, 1) else ""
        raise ConfigError(f"{len(source.labels)} labels for {classes} classes{hint}")
    return source.labels if len(source.labels) == classes and probed.task != "embed" else ()


def _texts_of(source: Source, probed: Probed) -> tuple[str, ...]:
    """Return the texts of a model's entry, after a run of its text side."""
    if source.text is None or probed.task != "embed":
        raise ConfigError(f'a model that takes texts returns an embedding: its task is "embed", not "{probed.task}"')
    source.text.check(probed.classes)
    for fault in text.faults(source.labels):
        raise ConfigError(f"its labels are texts, and {fault.message}")
    return source.labels


def _digest_with_text(sha256: str, tower: TextTower) -> str:
    """Return the digest of a model with its text side."""
    text = f"{sha256} {digest(tower.encoder)} {tower.scale} {tower.bias}"
    return hashlib.sha256(text.encode()).hexdigest()


def _probe_or_recall(spec: ModelSpec, source: Source, device: str) -> tuple[Probed, str]:
    """Probe a model, unless an earlier start has left the result; return it with the digest of the weights."""
    module = source.module
    if not probe_cache.is_cacheable(spec, device):
        return _probe(spec, source, device), digest(module)
    sha256, state, kinds = digest(module), _state_of(module), _kinds_of(module)
    key = probe_cache.key_of(spec, source.preprocess.size, len(source.labels), sha256)
    if probed := probe_cache.load(key, module):
        return probed, sha256
    probed = _probe(spec, source, device)
    if _state_of(module) != state:  # the model changes its buffers while it runs
        return probed, digest(module)
    if _kinds_of(module) == kinds:  # otherwise it was changed to return logits
        probe_cache.store(key, probed)
    return probed, sha256


def _kinds_of(module: nn.Module) -> list[type[nn.Module]]:
    return [type(part) for part in module.modules()]


def _state_of(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the memory address and the number of changes in place of all parameters and buffers, by name."""
    state = module.state_dict(keep_vars=True)
    return {name: (tensor.data_ptr(), tensor._version) for name, tensor in state.items()}  # noqa: SLF001 -- as in `hooks`


def _probe(spec: ModelSpec, source: Source, device: str) -> Probed:
    # Two classes have been made of the logit of a binary task.
    task, module = None if source.task == "binary" else source.task, source.module
    trial = tasks.Trial(task, source.labels, source.queries, source.activation)
    layers, classes = probe.probe(module, source.preprocess.size, device, trial, channels=source.preprocess.channels)
    if trial.ending.probabilities and _can_return_logits(spec, source, trial.ending):
        return _probe(spec, with_logits(source, trial.ending), device)
    trunk = layers if trial.trunk is None else {name: layer for name, layer in layers.items() if name in trial.trunk}
    is_trunk = partial(probe.is_trunk, modules=dict(module.named_modules()))
    return Probed(
        task=trial.task,
        classes=classes,
        layers=layers,
        default_layer=probe.default_layer(module, trunk) or probe.default_layer(module, layers),
        embedding=tasks.embedding_layer(module, layers, classes) if trial.task in VECTOR_TASKS else "",
        pyramid=pyramid.find_scales(trial.graph, layers, is_trunk),
        object_classes=trial.object_classes,
        dependence=trial.dependence,
        differentiable=trial.differentiable,
    )


def _can_return_logits(spec: ModelSpec, source: Source, ending: Ending) -> bool:
    """Log that a network returns probabilities; return False if it is the caller's own, which is not changed."""
    if spec.live is not None and source.module is spec.live.module:
        words = "model %s returns probabilities of a %s, which are read as logits: return the logits from forward"
        log.warning(words, spec.name, ending.probabilities)
        return False
    is_own = ending.module or ending.leaf is not None or ending.probabilities == "sigmoid"
    score = "logit" if is_own else "logarithm of a probability"
    words = "model %s returns probabilities of a %s: its scores are the %s (activation=none reads them as logits)"
    log.warning(words, spec.name, ending.probabilities, score)
    return True


def _read_weights(spec: ModelSpec, module: nn.Module) -> str:
    if spec.weights in ("default", "none"):
        if spec.sha256:
            raise ConfigError(f"model {spec.name}: sha256= needs a weights file, not weights={spec.weights}")
        if spec.source == "hf":
            _check_folder_weights(spec, module)
        # The default weights of a factory are those that it returned.
        return spec.weights
    path = Path(spec.weights)
    if not path.exists():
        raise ConfigError(f"model {spec.name}: there is no weights file {path.name}")
    log.info("reading the weights of model %s from %s", spec.name, path)
    prefix, budget = "", checkpoint.SizeBudget.of(module)
    try:
        state, prefix = _without_prefix(checkpoint.load(path, budget, spec.sha256, spec.model_folder), module)
        module.load_state_dict(stem.adapt_state(state, module, spec.channels))
        _check_finite(module)
    except checkpoint.LfsPointerError as error:
        raise ConfigError(f"model {spec.name}: {error}") from error
    except Exception as error:  # also from load_state_dict, and from a module's own way of loading
        # The log has the whole path. The error may reach a caller, so it has the file's name without the folder.
        raise ConfigError(
            f"model {spec.name}: the weights in {path.name} do not fit {spec.origin}"
            f"{f', also without the prefix {prefix!r} of all their names' if prefix else ''}: {_shorten(error)}"
        ) from error
    return "file"


def _without_prefix(state: Mapping[str, Tensor], module: nn.Module) -> tuple[Mapping[str, Tensor], str]:
    """Return the weights by the module's own names, and the prefix that was removed from all names.

    Lightning saves a network as its attribute "model.", DataParallel as "module.", torch.compile as "_orig_mod.". The
    last two may also be around a part of the network, such as "features.module.0.weight".
    """
    names, removed = module.state_dict().keys(), ""
    while state and names.isdisjoint(state):
        prefix = next(iter(state)).partition(".")[0] + "."
        if prefix not in WRAPPERS or not all(name.startswith(prefix) for name in state):
            break
        state, removed = {name.removeprefix(prefix): tensor for name, tensor in state.items()}, removed + prefix
    return {name if name in names else PART_WRAPPER.sub("", name): state[name] for name in state}, removed


def _check_folder_weights(spec: ModelSpec, module: nn.Module) -> None:
    try:
        _check_finite(module)
    except CorruptFileError as error:
        raise ConfigError(f"the weights of {spec.origin} cannot be used: {error}") from error


def _check_finite(module: nn.Module) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        # One pass over the values, without a temporary tensor as `isfinite` needs one: 0.015 s for resnet50. Both
        # results are NaN if a value is.
        least, greatest = torch.aminmax(tensor.detach())
        # A mask may be minus infinity, a weight may not.
        if least.isnan() or (isinstance(tensor, nn.Parameter) and (least.isinf() or greatest.isinf())):
            raise CorruptFileError(f"{name} is not finite")


def _shorten(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    rest = f" (and {len(lines) - 3} more lines)" if len(lines) > 3 else ""  # noqa: PLR2004 -- lines that fit a message
    first = lines[:3] if isinstance(error, CorruptFileError) else (printable(line, 120) for line in lines[:3])
    return "; ".join(first) + rest


def _randomise_zeros(module: nn.Module) -> None:
    """Give random values to weights that are zero by design, so that the output depends on every layer."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name.endswith(("weight", "gain", "gamma", "class_token", "cls_token")) and not weight.any():
                weight.copy_(
                    torch.randn(weight.shape, generator=generator, dtype=torch.float32) * 0.02 + (weight.dim() == 1)
                )


def _read_labels(path: str) -> tuple[str, ...]:
    try:
        return tuple(line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"cannot read the labels in {path}: {reason}") from error


def _with_size(preprocess: Preprocess, size: int | None) -> Preprocess:
    if size is None or preprocess.size == (size, size):
        return preprocess
    resize = preprocess.resize
    if isinstance(resize, KeepAspect):
        limits = replace(resize, shortest=size, longest=round(resize.longest * size / resize.shortest))
        return replace(preprocess, size=limits.largest, resize=limits)
    # The crop keeps the same share of the photo at every size.
    scale = size / preprocess.size[0]
    scaled = round(resize * scale) if isinstance(resize, int) else (round(resize[0] * scale), round(resize[1] * scale))
    return replace(preprocess, size=(size, size), resize=scaled)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor's values."""
    values = tensor.dequantize() if tensor.is_quantized else tensor.detach()
    return values.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def digest(module: nn.Module) -> str:
    """Return the SHA-256 of the names and values of all parameters and buffers, in hexadecimal."""
    sha256 = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        sha256.update(name.encode())
        for part in pytree.tree_leaves(value):  # quantised weights are tuples
            sha256.update(_bytes_of(part) if isinstance(part, Tensor) else repr(part).encode())
    return sha256.hexdigest()
