"""Load a model: build it, read its weights, freeze it, probe its layers and accelerate it."""

import logging
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from camserve_server.core.devices import restore_settings
from camserve_server.core.errors import ConfigError
from camserve_server.imaging.values import KeepAspect, Preprocess
from camserve_server.models import detectors, live, probe, probe_cache, pyramid, recomputation, stem, tasks, text
from camserve_server.models.acceleration import TIMED_ROWS, AccelerationOptions
from camserve_server.models.endings import Ending
from camserve_server.models.loaded import LoadedModel, accelerate_loaded, frozen_tower
from camserve_server.models.probe_cache import Probed
from camserve_server.models.source import Source
from camserve_server.models.sources import BUILT_IN, build, register_hidden, with_logits
from camserve_server.models.spec import ModelSpec
from camserve_server.models.values import ModelInfo
from camserve_server.models.weights import digest, digest_with_text, randomise_zeros, read_weights

log = logging.getLogger(__name__)

VECTOR_TASKS = ("classify", "multilabel", "regress")
"""Tasks of models whose output is one row of numbers, computed from an embedding."""


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
    weights = read_weights(spec, source.module)
    if weights == "none":
        randomise_zeros(source.module)
        log.warning("model %s has random weights: its explanations mean nothing", spec.name)
    try:
        if spec.live is None and spec.source not in BUILT_IN:
            register_hidden(spec, source.module)  # after the weights, whose file may lack them
        module = live.to_evaluation(source.module, device)
        labels = _read_labels(spec.labels) if spec.labels else source.labels
        preprocess = _with_size(detectors.preprocess_of(module, source.preprocess), spec.size)
        preprocess = stem.with_statistics(preprocess, spec)
        detectors.disable_preprocessing(module, preprocess.size)
        tower = frozen_tower(source.text, device)
        prepared = replace(source, module=module, preprocess=preprocess, labels=labels, text=tower)
        info = _describe(spec, prepared, weights, device)
    except (ConfigError, RuntimeError, AttributeError) as error:
        raise ConfigError(f"model {spec.name} ({spec.origin}): {error}") from error
    return accelerate_loaded(module, info, AccelerationOptions(spec.accelerate, spec.compile, rows), tower)


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
        digest=digest_with_text(sha256, source.text) if source.text else sha256,
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
