"""Plan and build the accelerated copy of a model, and compare it with the loaded module."""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from camserve_server.imaging.values import KeepAspect
from camserve_server.models.acceleration import layout, onednn
from camserve_server.models.acceleration.attention import attend, find_attentions
from camserve_server.models.acceleration.compilation import BATCH_SIZES, compile_before_layer
from camserve_server.models.acceleration.copying import (
    copy_model,
    find_token_linears,
    linear_in_weight_dtype,
    own_kernels,
    return_float32,
)
from camserve_server.models.acceleration.folding import FoldablePair, find_foldable
from camserve_server.models.acceleration.onednn import OneDNNPatch, PatchSite
from camserve_server.models.acceleration.prefix import find_prefix_modules, forward_prefix
from camserve_server.models.acceleration.toolchain import missing_for
from camserve_server.models.acceleration.trial import TOLERANCE, output_error
from camserve_server.models.acceleration.usage import Usage, record_usage
from camserve_server.models.hooks import output_of
from camserve_server.models.values import ModelInfo, Pass

log = logging.getLogger(__name__)

_KINDS = ("cam", "curvature", "score")
"""Kinds of passes that the copy can run: they differentiate and observe nothing before the layer."""


@dataclass(frozen=True, slots=True)
class AccelerationOptions:
    """Settings of the acceleration of one model.

    Attributes:
        enabled: False to run the model as it was loaded, on contiguous images.
        compile: True to compile the part up to the default layer.
        rows: size of the batch in which the memory layouts are timed.
    """

    enabled: bool = True
    compile: bool = False
    rows: int = layout.TIMED_ROWS


@dataclass(frozen=True, slots=True, eq=False)
class AcceleratedModel:
    """An accelerated copy of a model.

    Attributes:
        module: the copy, with the same module names; after the default layer it shares the model's parameters.
        layers: the names of the layers that can be captured in it.
        dtype: the type of its input.
        folded_norms: the number of batch norms that are folded into convolutions.
        compiled_modules: the names of its compiled modules.
        onednn: its direct calls of oneDNN.
    """

    module: nn.Module
    layers: frozenset[str]
    dtype: torch.dtype
    folded_norms: int
    compiled_modules: tuple[str, ...]
    onednn: OneDNNPatch

    def can_run(self, pass_: Pass) -> bool:
        """Return whether the copy computes all that a pass needs."""
        changes_model = pass_.randomised or pass_.interventions  # its modules are folded, and may skip tokens
        return pass_.kind in _KINDS and not changes_model and self.layers.issuperset(pass_.layers)


@dataclass(frozen=True, slots=True, eq=False)
class Acceleration:
    """The result of accelerating a model.

    Attributes:
        model: the accelerated copy; None if nothing would be faster, or if the model does not allow one.
        channels_last: True if the input of the model has that memory layout, False if it is contiguous.
    """

    model: AcceleratedModel | None
    channels_last: bool


def accelerate(module: nn.Module, info: ModelInfo, options: AccelerationOptions) -> Acceleration:
    """Make the accelerated copy of a model and choose its memory layout.

    Never raises an error of a user's model: without a copy the model runs as it was loaded, and the log has the reason.

    Args:
        module: the model, frozen, in evaluation mode, on its device. It is not changed.
        info: its description.
        options: the settings.
    """
    if not options.enabled:
        log.info("model %s runs without acceleration (accelerate=false)", info.name)
        return Acceleration(None, channels_last=False)
    one_size = not isinstance(info.preprocess.resize, KeepAspect)  # the copy's kernels are chosen for one size
    runs_once = all(info.layers[name].calls == 1 for name in info.default_layers)
    is_known = info.differentiable and info.default_layer and info.precision != "float64" and not info.is_opaque
    acceleration = None
    if info.task != "detect" and one_size and runs_once and is_known:
        recorded = layout.run_channels_last(info, partial(record_usage, module, info.default_layer))
        possible = recorded is not None
        try:
            acceleration = _accelerate(module, info, options, recorded)
        except Exception as error:  # noqa: BLE001 -- a user's model may raise anything; it can run without the copy
            _log_refusal(info, f"{type(error).__name__}: {error}")
    else:
        possible = layout.run_channels_last(info, module) is not None
        if options.compile:
            words = "it detects objects, its inputs vary in size, or it calls its default layer more than once"
            _log_refusal(info, words)
    if acceleration:
        return acceleration
    return Acceleration(None, possible and layout.is_channels_last_faster(module, info, rows=options.rows))


def _log_refusal(info: ModelInfo, reason: str) -> None:
    instead = "as it is" if info.precision == "float32" else f"in {info.precision} by autocast, which is slower"
    log.info("model %s runs %s: it cannot be accelerated (%s)", info.name, instead, reason)


def _accelerate(
    module: nn.Module, info: ModelInfo, options: AccelerationOptions, recorded: tuple[Usage, Tensor] | None
) -> Acceleration | None:
    """Make the accelerated copy; None if it would not be faster.

    Args:
        module: the model.
        info: its description.
        options: the settings.
        recorded: its usage and the output of its default layer for an image that is channels last; None if its images
            have to be contiguous.
    """
    dtype: torch.dtype = getattr(torch, info.precision)
    channels_last = recorded is not None
    image = layout.noise_images(info, 1, channels_last=channels_last)
    with torch.no_grad():
        usage, expected = recorded or record_usage(module, info.default_layer, image)
        plan = _plan(module, info, image, dtype, usage)
        if dtype == torch.float32 and not (plan.has_work or options.compile):
            return None
        copied = _build(module, info, plan, dtype)
        kernels = own_kernels(copied, module)
        layout.set_layout(kernels, channels_last=channels_last)

        def error() -> str:
            output = output_of(copied, info.default_layer, image.to(dtype))
            return output_error(output, expected, TOLERANCE[dtype])

        if reason := error():
            _log_refusal(info, reason)
            return None
        unpatched = OneDNNPatch(copied, (), set())
        patch = _patch(copied, module, plan.sites, error) or unpatched
    if channels_last:
        channels_last = layout.is_channels_last_faster(copied, info, kernels, dtype=dtype, rows=options.rows)
    compiled = _compile(copied, info, dtype, patch, channels_last=channels_last) if options.compile else ()
    if compiled:
        patch = unpatched
    patch.finalize()
    layers = _layers_after(info, plan.prefix_modules)
    model = AcceleratedModel(copied, layers, dtype, len(plan.pairs), compiled, patch)
    return Acceleration(model, channels_last)


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """The techniques that apply to a model.

    Attributes:
        usage: the recorded usage of its tensors.
        pairs: the batch norms that can be folded.
        sites: the modules that can call oneDNN.
        attentions: the attentions after the layer that can be replaced.
        token_linears: the linear maps over all tokens after the layer that run in half precision.
        prefix_modules: the modules after the layer that need only the leading tokens, with the number of these.
    """

    usage: Usage
    pairs: list[FoldablePair]
    sites: list[PatchSite]
    attentions: list[str]
    token_linears: list[str]
    prefix_modules: dict[str, int]

    @property
    def has_work(self) -> bool:
        """True if the copy would be faster than the module in float32."""
        return bool(self.pairs or self.sites or self.attentions or self.prefix_modules)


def _plan(module: nn.Module, info: ModelInfo, image: Tensor, dtype: torch.dtype, usage: Usage) -> _Plan:
    pairs = find_foldable(module, usage)
    attentions = find_attentions(module, usage)
    return _Plan(
        usage=usage,
        pairs=pairs,
        sites=onednn.find_sites(module, usage, dict(pairs)) if onednn.is_supported(info.device, dtype) else [],
        attentions=attentions,
        token_linears=find_token_linears(module, usage) if dtype != torch.float32 else [],
        prefix_modules=find_prefix_modules(module, info, image, attentions),
    )


def _build(module: nn.Module, info: ModelInfo, plan: _Plan, dtype: torch.dtype) -> nn.Module:
    """Copy a model and replace the forwards of modules after the default layer."""
    half = dtype != torch.float32
    copied = copy_model(module, plan.usage, plan.pairs, (*plan.attentions, *plan.token_linears) if half else (), dtype)
    for name in plan.attentions:
        attention: Any = copied.get_submodule(name)
        attention.forward = partial(attend, attention, attention.forward, prefix=plan.prefix_modules.get(name))
    for name in plan.token_linears:
        linear: Any = copied.get_submodule(name)
        linear.forward = partial(linear_in_weight_dtype, linear, linear.forward)
    for name, prefix in plan.prefix_modules.items():
        if name not in plan.attentions:
            child: Any = copied.get_submodule(name)
            child.forward = partial(forward_prefix, child.forward, prefix)
    if half:
        copied.get_submodule(info.default_layer).register_forward_hook(return_float32)
    return copied


def _patch(
    copied: nn.Module, module: nn.Module, sites: Collection[PatchSite], error: Callable[[], str]
) -> OneDNNPatch | None:
    """Make a copy call oneDNN; return None if that fails or gives other numbers."""
    patch = None
    try:
        patch = OneDNNPatch(copied, tuple(sites), {id(parameter) for parameter in module.parameters()})
        patch.enable()
        reason = error()
    except Exception as failure:  # noqa: BLE001 -- oneDNN may raise anything; torch's own functions can run
        reason = f"{type(failure).__name__}: {failure}"
    if not reason:
        return patch
    log.info("oneDNN is not called directly: %s", reason)
    if patch:
        patch.disable()
    return None


def _compile(
    copied: nn.Module, info: ModelInfo, dtype: torch.dtype, patch: OneDNNPatch, *, channels_last: bool
) -> tuple[str, ...]:
    """Compile a copy if that is possible and not slower; return the names of its compiled modules."""
    if reason := missing_for(info.device):
        log.warning("model %s runs without being compiled: %s", info.name, reason)
        return ()
    log.info("compiling model %s, which can take minutes", info.name)
    batches = [layout.noise_images(info, rows, channels_last=channels_last).to(dtype) for rows in BATCH_SIZES]
    result = compile_before_layer(copied, info.default_layer, batches, TOLERANCE[dtype], patch)
    for name, reason in result.failures.items():
        log.warning("%s of model %s runs without being compiled: %s", name, info.name, reason)
    if result.reason:
        log.warning("model %s runs without being compiled: %s", info.name, result.reason)
    else:
        names = ", ".join(result.modules)
        words = "model %s: %s compiled in %.0f s: %.2f of the time"
        log.info(words, info.name, names, result.seconds, result.time_ratio)
    return result.modules


def _layers_after(info: ModelInfo, prefix_modules: Collection[str]) -> frozenset[str]:
    """Return the layers that finish with the default one or after it, and before any module that skips tokens."""
    names = list(info.layers)
    start = names.index(info.default_layer)
    stops = (
        place for place, name in enumerate(names) if any(f"{name}.".startswith(f"{skip}.") for skip in prefix_modules)
    )
    return frozenset(names[start : min(stops, default=None)])
