"""A model that is ready to run."""

import copy
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from camserve_server.core.errors import ConfigError
from camserve_server.models import live, recomputation
from camserve_server.models.acceleration import AcceleratedModel, AccelerationOptions, accelerate
from camserve_server.models.hooks import has_forward_hooks, output_of
from camserve_server.models.text import TextTower
from camserve_server.models.values import ModelInfo, Pass

log = logging.getLogger(__name__)


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
        return accelerate_loaded(
            module, info, AccelerationOptions(enabled=self.accelerate), frozen_tower(tower, device)
        )


def _record_run(module: nn.Module, layer: str, image: Tensor) -> tuple[list[str], Tensor]:
    """Run a model; return the names of its modules in the order in which they finished, and the output of a layer."""
    finished: list[str] = []
    with ExitStack() as stack, torch.no_grad():
        for name, child in module.named_modules():
            hook = child.register_forward_hook(lambda _module, _args, _output, name=name: finished.append(name))
            stack.enter_context(hook)
        return finished, output_of(module, layer, image)


def accelerate_loaded(
    module: nn.Module, info: ModelInfo, options: AccelerationOptions, tower: TextTower | None
) -> LoadedModel:
    """Return a model with its accelerated copy and its memory layout."""
    acceleration = accelerate(module, info, options)
    info = replace(info, channels_last=acceleration.channels_last)
    dtype = live.dtype_of(module)
    return LoadedModel(info, module, acceleration.model, dtype, accelerate=options.enabled, text=tower)


def frozen_tower(tower: TextTower | None, device: str) -> TextTower | None:
    """Return the text side of a model on a device, in evaluation mode and without gradients; None without one."""
    if tower is None:
        return None
    if not isinstance(tower.encoder, nn.Module):
        raise ConfigError(f"the encoder of its texts is a {type(tower.encoder).__name__}, not a torch.nn.Module")
    return replace(tower, encoder=live.to_evaluation(tower.encoder, device))
