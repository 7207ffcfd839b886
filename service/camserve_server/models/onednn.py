"""Convolutions and linear maps, asked of oneDNN itself.

On a CPU torch gives linear maps in float32 to another library, and with one thread small batches of 1 × 1 convolutions
too: on processors that this one knows less well they take twice as long. Asked directly, oneDNN also keeps weights in
the order that suits it, where torch's convolutions bring them into it for every batch, and applies the activation
behind as it goes. The functions are those that torch's own compiler calls. They cannot be differentiated.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from camserve_server.models.uses import Uses, hooked

Forward: TypeAlias = Callable[..., Any]
_Part: TypeAlias = nn.Conv2d | nn.Linear

Activation: TypeAlias = tuple[str, list[float], str]
"""A function, its numbers and its kind, as oneDNN wants to be told."""

NONE: Activation = ("none", [], "")

ROWS = 8
"""Of the batch for whose sake weights are put in order; those of another size take the same, but for a single row."""

ACTIVATED = "_activated_for"
"""The attribute of a tensor that says which module has nothing left to do."""

_ACTIVATIONS: Mapping[Forward, Callable[..., Activation]] = {
    functional.hardswish: lambda *_, **__: ("hardswish", [], ""),
    functional.silu: lambda *_, **__: ("swish", [], ""),
    functional.gelu: lambda approximate="none": ("gelu", [], approximate),
}
"""By torch's function, how its other arguments are told to oneDNN.

Those that cut off are not among them: to oneDNN the larger of 0 and NaN is 0, which would hide that a model is broken.
"""


def usable(device: str, dtype: torch.dtype) -> bool:
    """Tell whether there is oneDNN for a device, and the processor has a precision that it can compute in."""
    if device != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch's
        return False
    asked = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    return dtype == torch.float32 or (dtype in asked and bool(_function(asked[dtype])()))


def _function(name: str) -> Callable[..., Any]:
    """Return one of the functions that torch has for its own compiler."""
    found: Callable[..., Any] = getattr(torch.ops.mkldnn, name)
    return found


@dataclass(frozen=True, slots=True)
class Site:
    """A convolution or a linear map.

    Attributes:
        name: of the module.
        size: of what it was given.
        activation: of what it returns, which is nobody else's.
        activating: the name of the module that applies it, or nothing.
    """

    name: str
    size: torch.Size
    activation: Activation = NONE
    activating: str = ""


def sites(module: nn.Module, uses: Uses, folded: Mapping[str, str]) -> list[Site]:
    """Find the convolutions and linear maps that are called once, before the layer is done.

    Args:
        module: frozen.
        uses: of it.
        folded: by the name of a convolution, that of the batch norm which will be folded into it.
    """
    found = []
    for name, one in module.named_modules():
        outputs = uses.calls.get(name, [])
        if len(outputs) == 1 and _is_known(one) and _is_its_own(one, outputs[0], uses):
            last = uses.normed[outputs[0]][1] if name in folded else outputs[0]
            found.append(Site(name, uses.sizes[id(one.weight)], *_activation(module, last, uses)))
    return found


def _is_known(module: nn.Module) -> bool:
    if hooked(module):
        return False
    if type(module) is nn.Conv2d:
        return module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return type(module) is nn.Linear


def _is_its_own(module: nn.Module, output: int, uses: Uses) -> bool:
    """Tell whether a module's call is all that takes its parameters."""
    once = uses.before[id(module.weight)] == 1 and all(map(uses.only_before, module.parameters()))
    return once and uses.mapped[output] is module.weight


def _activation(module: nn.Module, output: int, uses: Uses) -> tuple[Activation, str]:
    applied = uses.applied.get(output)
    if applied is None or not applied.module or uses.takers[output] != 1 or applied.function not in _ACTIVATIONS:
        return NONE, ""
    if hooked(module.get_submodule(applied.module)):
        return NONE, ""
    return _ACTIVATIONS[applied.function](*applied.arguments, **applied.keywords), applied.module


class Direct:
    """The convolutions and linear maps of a module, to be asked of oneDNN or of torch.

    Args:
        module: frozen, and nobody else's.
        found: which of its modules; none is asked of oneDNN before `on` is called.
        shared: weights that somebody else has too, by id: there will be no second one in oneDNN's order.

    Attributes:
        sites: which of its modules.
        weights: by their names, what oneDNN is given for one row, and for several. What suits these, convolutions of
            one row take twice as long with, on one of the cores. A single thread takes it for one row too: with what
            suits several threads, it would take twice as long.
    """

    def __init__(self, module: nn.Module, found: Sequence[Site], shared: set[int]) -> None:
        self.sites = tuple(found)
        self.weights: dict[str, tuple[Tensor, Tensor]] = {}
        self._forwards: list[tuple[nn.Module, Forward]] = []
        self._ordered: list[nn.Module] = []
        for site in found:
            one = cast("_Part", module.get_submodule(site.name))
            activating = module.get_submodule(site.activating) if site.activating else None
            own = id(one.weight) not in shared
            weights = self.weights[site.name] = _in_order(one, site.size) if own else (one.weight, one.weight)
            self._ordered += [one] if own else []
            self._forwards.append((one, _forward(one, weights, site.activation, activating)))
            if activating is not None:
                self._forwards.append((activating, _unless_done(activating, activating.forward)))

    def on(self) -> None:
        """Ask oneDNN from now on."""
        for one, forward in self._forwards:
            one.forward = forward

    def off(self) -> None:
        """Ask torch from now on."""
        for one, _ in self._forwards:
            vars(one).pop("forward", None)

    def settle(self) -> None:
        """Ask oneDNN for good: let the weights go that are there in its order too."""
        self.on()
        for one in self._ordered:
            one.register_parameter("weight", None)


def _in_order(module: _Part, size: torch.Size) -> tuple[Tensor, Tensor]:
    """Return a weight in the order that suits oneDNN for one row, and in that for several."""
    weight: Tensor = module.weight.detach()
    if isinstance(module, nn.Linear):
        ordered: Tensor = _function("_reorder_linear_weight")(weight, ROWS * size[:-1].numel())
        return ordered, ordered
    order, reorder = (module.padding, module.stride, module.dilation, module.groups), "_reorder_convolution_weight"
    single, several = (_function(reorder)(weight, *order, (rows, *size[1:])) for rows in (1, ROWS))
    return single, several


def _forward(
    module: _Part, weights: tuple[Tensor, Tensor], activation: Activation, activating: nn.Module | None
) -> Forward:
    rest: tuple[Any, ...] = (module.bias, *activation)
    function = _function("_linear_pointwise")
    if isinstance(module, nn.Conv2d):
        rest = (module.bias, module.padding, module.stride, module.dilation, module.groups, *activation)
        function = _function("_convolution_pointwise")

    def forward(given: Tensor) -> Tensor:
        several = given.shape[0] > 1 or torch.get_num_threads() == 1
        found: Tensor = function(given, weights[several], *rest)
        if activating is not None:
            setattr(found, ACTIVATED, activating)
        return found

    return forward


def _unless_done(module: nn.Module, otherwise: Forward) -> Forward:
    """Return an activation that returns what oneDNN has applied it to already, the first time."""

    def forward(given: Tensor) -> Any:
        if getattr(given, ACTIVATED, None) is not module:
            return otherwise(given)
        delattr(given, ACTIVATED)  # it may be changed in place, and come again
        return given

    return forward
