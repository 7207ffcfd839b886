"""Convolutions and linear maps that call oneDNN directly, on a CPU.

torch passes linear maps in float32 to MKL, and with one thread small batches of 1 × 1 convolutions too. On an AMD EPYC
(AVX-512) MKL takes 2.0 to 2.3 times as long as oneDNN. With direct calls the weights stay in oneDNN's own memory order,
while torch reorders them in every batch, and the following activation is applied in the same pass. The functions are
private ones that torch has for its own compiler (`torch.ops.mkldnn`). They cannot be differentiated, so they are used
only before the default layer.

Measured in float32 at batch 8, as multiples of the speed of the plain module, without and with this: with two threads
convnext_tiny 0.99 and 1.91, resnet50 1.31 and 1.39, mobilenet_v3_large 1.46 and 1.53, vit_b_16 0.87 and 1.20; with one
thread 1.00 and 1.99, 1.16 and 1.82, 1.21 and 1.80, 0.91 and 1.27. Maps moved by at most 3e-6 of their maximum.
On an AMD EPYC with AVX2 only, one thread, the gain is small: convnext_tiny 1.02 and 1.05, resnet50 1.26 and 1.32,
mobilenet_v3_large 1.78 and 1.71, as multiples of the speed with `accelerate=false`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from camserve_server.models.acceleration.usage import Usage
from camserve_server.models.hooks import has_forward_hooks

Forward: TypeAlias = Callable[..., Any]
_Patchable: TypeAlias = nn.Conv2d | nn.Linear

Activation: TypeAlias = tuple[str, list[float], str]
"""The name of an activation, its numbers and its variant, as oneDNN's functions take them."""

NO_ACTIVATION: Activation = ("none", [], "")

BATCH_SIZE = 8
"""Batch size for which weights are reordered. All other batch sizes but 1 use the same order."""

APPLIED_ACTIVATION = "_applied_activation"
"""Attribute of a tensor: the activation module that oneDNN has already applied to it."""

_ACTIVATIONS: Mapping[Forward, Callable[..., Activation]] = {
    functional.hardswish: lambda *_, **__: ("hardswish", [], ""),
    functional.silu: lambda *_, **__: ("swish", [], ""),
    functional.gelu: lambda approximate="none": ("gelu", [], approximate),
}
"""For a function of torch: from its other arguments to those of oneDNN.

ReLU and other activations that clamp are missing on purpose: oneDNN's max(0, NaN) is 0, which would hide a broken
model.
"""


def is_supported(device: str, dtype: torch.dtype) -> bool:
    """Return whether torch has oneDNN for a device, and the processor supports a precision."""
    if device != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch's
        return False
    checks = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    return dtype == torch.float32 or (dtype in checks and bool(_function(checks[dtype])()))


def _function(name: str) -> Callable[..., Any]:
    """Return a private function that torch has for its own compiler."""
    function: Callable[..., Any] = getattr(torch.ops.mkldnn, name)
    return function


@dataclass(frozen=True, slots=True)
class PatchSite:
    """A convolution or a linear map that can call oneDNN.

    Attributes:
        name: the name of the module.
        size: the shape of its input.
        activation: the activation that is the only consumer of its output.
        activation_module: the name of the module that applies the activation; empty without one.
    """

    name: str
    size: torch.Size
    activation: Activation = NO_ACTIVATION
    activation_module: str = ""


def find_sites(module: nn.Module, usage: Usage, folded: Mapping[str, str]) -> list[PatchSite]:
    """Find the convolutions and linear maps that are called exactly once, before the default layer has finished.

    Args:
        module: the frozen model.
        usage: the recorded usage of its tensors.
        folded: by the name of a convolution, the name of the batch norm that is folded into it.
    """
    sites = []
    for name, child in module.named_modules():
        outputs = usage.outputs.get(name, [])
        if len(outputs) == 1 and _is_patchable(child) and _owns_its_parameters(child, outputs[0], usage):
            last = usage.norms[outputs[0]][1] if name in folded else outputs[0]
            sites.append(PatchSite(name, usage.input_shapes[id(child.weight)], *_find_activation(module, last, usage)))
    return sites


def _is_patchable(module: nn.Module) -> bool:
    if has_forward_hooks(module):
        return False
    if type(module) is nn.Conv2d:
        return module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return type(module) is nn.Linear


def _owns_its_parameters(module: nn.Module, output: int, usage: Usage) -> bool:
    """Return whether a single call of a module is the only use of its parameters."""
    once = usage.before[id(module.weight)] == 1 and all(map(usage.only_before, module.parameters()))
    return once and usage.weights[output] is module.weight


def _find_activation(module: nn.Module, output: int, usage: Usage) -> tuple[Activation, str]:
    consumer = usage.consumers.get(output)
    if consumer is None or not consumer.module or usage.consumer_counts[output] != 1:
        return NO_ACTIVATION, ""
    if consumer.function not in _ACTIVATIONS or has_forward_hooks(module.get_submodule(consumer.module)):
        return NO_ACTIVATION, ""
    return _ACTIVATIONS[consumer.function](*consumer.arguments, **consumer.keywords), consumer.module


class OneDNNPatch:
    """Replaces the forwards of convolutions and linear maps in a copy of a model by calls of oneDNN.

    Args:
        module: the frozen copy; it belongs to the caller alone.
        sites: which of its modules to patch; nothing is patched before `enable` is called.
        shared: ids of the weights that the copy shares with the model. These are not reordered, because a second copy
            of them would cost memory.

    Attributes:
        sites: the patched modules.
        weights: by module name, the weights for one row and for several. A single row on several threads needs an order
            of its own (resnet50: 94 MB more). In the order for eight rows, oneDNN uses one core of two for most
            convolutions: 52 ms, against 35 ms by torch and 27 ms in the right order. One thread uses the order for
            several rows for a single row too: 46 ms, against 107 ms in the other order.
    """

    def __init__(self, module: nn.Module, sites: Sequence[PatchSite], shared: set[int]) -> None:
        self.sites = tuple(sites)
        self.weights: dict[str, tuple[Tensor, Tensor]] = {}
        self._forwards: list[tuple[nn.Module, Forward]] = []
        self._reordered: list[nn.Module] = []
        for site in sites:
            child = cast("_Patchable", module.get_submodule(site.name))
            activation_module = module.get_submodule(site.activation_module) if site.activation_module else None
            own = id(child.weight) not in shared
            weights = self.weights[site.name] = _reorder(child, site.size) if own else (child.weight, child.weight)
            self._reordered += [child] if own else []
            self._forwards.append((child, _onednn_forward(child, weights, site.activation, activation_module)))
            if activation_module is not None:
                self._forwards.append((activation_module, _skip_if_applied(activation_module)))

    def enable(self) -> None:
        """Call oneDNN in all further runs."""
        for module, forward in self._forwards:
            module.forward = forward

    def disable(self) -> None:
        """Call torch in all further runs."""
        for module, _ in self._forwards:
            vars(module).pop("forward", None)

    def finalize(self) -> None:
        """Call oneDNN permanently: release the weights of which a copy in oneDNN's order exists."""
        self.enable()
        for module in self._reordered:
            module.register_parameter("weight", None)


def _reorder(module: _Patchable, size: torch.Size) -> tuple[Tensor, Tensor]:
    """Return a weight in oneDNN's order for one row, and in its order for several rows."""
    weight: Tensor = module.weight.detach()
    if isinstance(module, nn.Linear):
        reordered: Tensor = _function("_reorder_linear_weight")(weight, BATCH_SIZE * size[:-1].numel())
        return reordered, reordered
    order, reorder = (module.padding, module.stride, module.dilation, module.groups), "_reorder_convolution_weight"
    single, several = (_function(reorder)(weight, *order, (rows, *size[1:])) for rows in (1, BATCH_SIZE))
    return single, several


def _onednn_forward(
    module: _Patchable, weights: tuple[Tensor, Tensor], activation: Activation, activation_module: nn.Module | None
) -> Forward:
    arguments: tuple[Any, ...] = (module.bias, *activation)
    function = _function("_linear_pointwise")
    if isinstance(module, nn.Conv2d):
        arguments = (module.bias, module.padding, module.stride, module.dilation, module.groups, *activation)
        function = _function("_convolution_pointwise")

    def forward(images: Tensor) -> Tensor:
        several = images.shape[0] > 1 or torch.get_num_threads() == 1
        output: Tensor = function(images, weights[several], *arguments)
        if activation_module is not None:
            setattr(output, APPLIED_ACTIVATION, activation_module)
        return output

    return forward


def _skip_if_applied(module: nn.Module) -> Forward:
    """Return a forward for an activation that skips a tensor, once, if oneDNN has already applied the activation."""
    forward = module.forward

    def forward_unless_applied(images: Tensor) -> Any:
        if getattr(images, APPLIED_ACTIVATION, None) is not module:
            return forward(images)
        delattr(images, APPLIED_ACTIVATION)  # the tensor may be changed in place, and be an input again
        return images

    return forward_unless_applied
