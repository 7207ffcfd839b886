"""Loading: build, read the weights, freeze, look at it once."""

import copy
import hashlib
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from camserve_server.core.devices import restore_settings
from camserve_server.core.errors import ConfigError
from camserve_server.imaging.values import Preprocess
from camserve_server.models import checkpoint, detectors, live, probe, tasks
from camserve_server.models.acceleration import TIMED_ROWS, AcceleratedModel, AccelerationOptions, accelerate
from camserve_server.models.hooks import has_forward_hooks, output_of
from camserve_server.models.pickles import CorruptFileError, shown
from camserve_server.models.sources import Source, build
from camserve_server.models.spec import ModelSpec
from camserve_server.models.values import ModelInfo, Pass

log = logging.getLogger(__name__)

CLASSES = ("classify", "multilabel", "regress")
"""Tasks of models that answer with one row of numbers, made of an embedding."""

WRAPPERS = ("model.", "module.", "_orig_mod.")
"""Prefixes that training tools add to the name of every weight."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model that can be run.

    Attributes:
        info: what is known of it.
        module: frozen, in evaluation mode, on its device.
        accelerated: an accelerated copy for passes that look at the default layer or layers after it, or None.
        dtype: of the module's input: float32, where it is not such a copy in half precision.
        drawn: random weights that were drawn for it, by seed and by name; see `randomise`.
        accelerate: whether it may be accelerated.
        is_borrowed: whether the module is the caller's own, which is put back as it was after each batch.
    """

    info: ModelInfo
    module: nn.Module
    accelerated: AcceleratedModel | None = None
    dtype: torch.dtype = torch.float32
    drawn: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    accelerate: bool = True
    is_borrowed: bool = False

    def ready(self) -> AbstractContextManager[None]:
        """Have its module ready to be run inside the block."""
        return live.borrowed(self.module) if self.is_borrowed else nullcontext()

    def serving(self, pass_: Pass) -> "LoadedModel":
        """Return what a pass shall run on: this model, or its accelerated copy."""
        copied = self.accelerated
        if copied is None or not copied.can_run(pass_):
            return self
        return replace(self, module=copied.module, dtype=copied.dtype)

    def replica(self) -> "LoadedModel | None":
        """Return the same model once more: other modules, which hooks of their own can hang on, with the same weights.

        Returns:
            The twin, which takes no memory to speak of; None where it cannot be made, or does not say the same.
        """
        if any(map(has_forward_hooks, self.module.modules())):
            log.info("model %s runs one batch at a time: hooks of its own may not be ready for two", self.info.name)
            return None
        modules = nn.ModuleList([self.module, *([self.accelerated.module] if self.accelerated else [])])
        memo: dict[int, Any] = {id(one): live.alias(one) for one in (*modules.parameters(), *modules.buffers())}
        try:
            module, *copied = copy.deepcopy(modules, memo)
            accelerated = replace(self.accelerated, module=copied[0]) if self.accelerated else None
            replica = replace(self, module=module, accelerated=accelerated)
            if self._says_what(replica):
                return replica
            reason = "its copy says something else"
        except Exception as error:  # noqa: BLE001 -- whatever a user's module does: one batch after the other, then
            reason = f"{type(error).__name__}: {error}"
        log.info("model %s runs one batch at a time: %s", self.info.name, reason)
        return None

    def _says_what(self, replica: "LoadedModel") -> bool:
        """Return whether a twin and its accelerated copy answer as this model does, to the bit."""
        noise = torch.randn((1, 3, *self.info.preprocess.size), generator=torch.Generator().manual_seed(0))
        images, layer = noise.to(self.info.device), self.info.default_layer
        pairs = [(self.module, replica.module, images)]
        if (ours := self.accelerated) and replica.accelerated:
            pairs.append((ours.module, replica.accelerated.module, images.to(ours.dtype)))
        for mine, its, image in pairs:
            (first, expected), (second, found) = _done(mine, layer, image), _done(its, layer, image)
            if first != second or not torch.equal(expected, found):
                return False
        return True

    def copied(self, device: str) -> "LoadedModel":
        """Return a copy that shares nothing with this model, on a device.

        Raises:
            ConfigError: it cannot be copied.
        """
        try:
            module = copy.deepcopy(self.module).to(device)
        except Exception as error:  # whatever a user's module does
            raise ConfigError(f"model {self.info.name} cannot be copied for a second engine: {error}") from error
        info = replace(self.info, device=device)
        return _accelerated(module, info, AccelerationOptions(enabled=self.accelerate))


def _done(module: nn.Module, layer: str, image: Tensor) -> tuple[list[str], Tensor]:
    """Run a model; return the names of its modules as they were done, and what a layer returned."""
    done: list[str] = []
    with ExitStack() as stack, torch.no_grad():
        for name, one in module.named_modules():
            hook = one.register_forward_hook(lambda _module, _args, _output, name=name: done.append(name))
            stack.enter_context(hook)
        return done, output_of(module, layer, image)


def load(spec: ModelSpec, device: str = "cpu", *, rows: int = TIMED_ROWS) -> LoadedModel:
    """Load a model and find out what can be explained in it.

    Args:
        spec: which one.
        device: that it shall run on, "cpu" or "cuda:0".
        rows: of its largest batches; on a GPU, memory layouts are timed with such a batch.

    Raises:
        ConfigError: it cannot be built, its weights cannot be read, or it answers with nothing that can be
            explained.
    """
    source = build(spec)
    if spec.live is None:
        restore_settings()
    elif source.module is spec.live.module:
        with live.borrowed(source.module):
            return replace(_loaded(spec, source, device, rows), is_borrowed=True)
    return _loaded(spec, source, device, rows)


def _loaded(spec: ModelSpec, source: Source, device: str, rows: int) -> LoadedModel:
    weights = _read_weights(spec, source.module)
    if weights == "none":
        _revive(source.module)
        log.warning("model %s has random weights: its explanations mean nothing", spec.name)
    try:
        module = source.module.eval().requires_grad_(requires_grad=False).to(device)
        labels = _read_labels(spec.labels) if spec.labels else source.labels
        preprocess = _sized(detectors.preprocess_of(module, source.preprocess), spec.size)
        detectors.hand_over(module, preprocess.size)
        info = _describe(spec, replace(source, module=module, preprocess=preprocess, labels=labels), weights, device)
    except (ConfigError, RuntimeError, AttributeError) as error:
        raise ConfigError(f"model {spec.name} ({spec.origin}): {error}") from error
    return _accelerated(module, info, AccelerationOptions(spec.accelerate, spec.compile, rows))


def _accelerated(module: nn.Module, info: ModelInfo, options: AccelerationOptions) -> LoadedModel:
    """Return a model with its accelerated copy and its memory layout."""
    found = accelerate(module, info, options)
    info = replace(info, channels_last=found.channels_last)
    return LoadedModel(info, module, found.model, accelerate=options.enabled)


def _describe(spec: ModelSpec, source: Source, weights: str, device: str) -> ModelInfo:
    trial = tasks.Trial(spec.task or source.task, source.labels)
    layers, classes = probe.probe(source.module, source.preprocess.size, device, trial)
    trunk = layers if trial.trunk is None else {name: one for name, one in layers.items() if name in trial.trunk}
    if (spec.labels or (spec.live and source.labels)) and len(source.labels) != classes:
        raise ConfigError(f"{len(source.labels)} labels for {classes} classes")
    return ModelInfo(
        name=spec.name,
        source=spec.origin,
        weights=weights,
        digest=digest(source.module),
        labels=source.labels if len(source.labels) == classes and trial.task != "embed" else (),
        classes=classes,
        parameters=sum(p.numel() for p in source.module.parameters()),
        preprocess=source.preprocess,
        layers=layers,
        default_layer=probe.default_layer(source.module, trunk),
        precision=spec.precision,
        device=device,
        task=trial.task,
        embedding=tasks.embedding_layer(source.module, layers, classes) if trial.task in CLASSES else "",
    )


def _read_weights(spec: ModelSpec, module: nn.Module) -> str:
    if spec.weights in ("default", "none"):
        if spec.sha256:
            raise ConfigError(f"model {spec.name}: sha256= is of a weights file, and weights={spec.weights} is none")
        if spec.source == "hf":
            _check_saved(spec, module)
        # A user's own factory brings its own weights; there is nothing else to call the default.
        return spec.weights
    path = Path(spec.weights)
    if not path.exists():
        raise ConfigError(f"model {spec.name}: there is no weights file {path.name}")
    log.info("model %s: its weights are read from %s", spec.name, path)
    outer, room = "", checkpoint.SizeBudget.of(module)
    try:
        state, outer = _without_wrapper(checkpoint.load(path, room, spec.sha256, spec.model_folder), module)
        module.load_state_dict(state)
        _check_finite(module)
    except Exception as error:  # load_state_dict's too, and what a module's own way of loading trips over
        # The folder is the operator's own business: the log has it, words that may go further do not.
        raise ConfigError(
            f"model {spec.name}: the weights in {path.name} do not fit {spec.origin}"
            f"{f', also without the prefix {outer!r} of all their names' if outer else ''}: {_shorten(error)}"
        ) from error
    return "file"


def _without_wrapper(state: Mapping[str, Tensor], module: nn.Module) -> tuple[Mapping[str, Tensor], str]:
    """Return the weights under the module's own names, and the prefix that was removed.

    Lightning saves a network as its attribute "model.", DataParallel as "module.", torch.compile as "_orig_mod.".
    """
    own, outer = module.state_dict().keys(), ""
    while state and own.isdisjoint(state):
        prefix = next(iter(state)).partition(".")[0] + "."
        if prefix not in WRAPPERS or not all(name.startswith(prefix) for name in state):
            break
        state, outer = {name.removeprefix(prefix): tensor for name, tensor in state.items()}, outer + prefix
    return state, outer


def _check_saved(spec: ModelSpec, module: nn.Module) -> None:
    try:
        _check_finite(module)
    except CorruptFileError as error:
        raise ConfigError(f"the weights of {spec.origin} cannot be used: {error}") from error


def _check_finite(module: nn.Module) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        least, most = torch.aminmax(tensor.detach())  # one pass, without a tensor of answers; both are NaN if one is
        # A mask may be minus infinity, a weight may not.
        if least.isnan() or (isinstance(tensor, nn.Parameter) and (least.isinf() or most.isinf())):
            raise CorruptFileError(f"{name} is not finite")


def _shorten(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    more = f" (and {len(lines) - 3} lines more)" if len(lines) > 3 else ""  # noqa: PLR2004 -- enough to see
    return (
        "; ".join(lines[:3] if isinstance(error, CorruptFileError) else (shown(line, 120) for line in lines[:3])) + more
    )


def _revive(module: nn.Module) -> None:
    """Give random values to weights that were zero by design, so that every layer takes part."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name.endswith(("weight", "gain", "gamma", "class_token", "cls_token")) and not weight.any():
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.02 + (weight.dim() == 1))


def _read_labels(path: str) -> tuple[str, ...]:
    try:
        return tuple(line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"cannot read the labels in {path}: {reason}") from error


def _sized(preprocess: Preprocess, size: int | None) -> Preprocess:
    if size is None or preprocess.size == (size, size):
        return preprocess
    # The same share of the photo is cropped away at every size.
    grown = size / preprocess.size[0]
    resize = preprocess.resize
    scaled = round(resize * grown) if isinstance(resize, int) else (round(resize[0] * grown), round(resize[1] * grown))
    return replace(preprocess, size=(size, size), resize=scaled)


def digest(module: nn.Module) -> str:
    """Return the SHA-256, hexadecimal, over the names and values of all parameters and buffers."""
    total = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        total.update(name.encode())
        total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
