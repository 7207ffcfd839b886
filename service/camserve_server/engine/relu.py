"""Other rules for the backward step of a ReLU: guided backpropagation and the deconvnet.

A `TorchFunctionMode`, which intercepts every call of a torch function, finds each ReLU where it is called: as a module,
a function or a method. Hooks would miss functions and methods, and replacing modules would change the model.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from camserve_server.core.errors import FailedPrecondition
from camserve_server.models.values import Kind

Arguments = tuple[Any, ...]


@contextmanager
def relu_rule(kind: Kind) -> Iterator[None]:
    """Make every ReLU and ReLU6 in the block use the backward rule of a kind of pass.

    guided: R = 1[x > 0] · max(g, 0), Springenberg et al. 2015, section 3.4. deconvnet: R = max(g, 0), Zeiler and Fergus
    2014, section 2.1. Any other kind leaves the chain rule as it is.

    Raises:
        FailedPrecondition: no ReLU was called in the block, so the rule would change nothing.
    """
    if kind not in ("guided", "deconvnet"):
        yield
        return
    with _ReluRule(guided=kind == "guided") as rule:
        yield
    if not rule.called:
        raise FailedPrecondition(
            "the model has no ReLU, whose backward step this method changes: its map would be that of saliency; "
            "use that method instead"
        )


class _ReluRule(TorchFunctionMode):
    """Replaces the backward step of each ReLU that is called in the block.

    Args:
        guided: True for guided backpropagation, False for the deconvnet.

    Attributes:
        called: True if a ReLU was called.
    """

    def __init__(self, *, guided: bool) -> None:
        super().__init__()
        self._guided = guided
        self.called = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: Arguments = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        read_arguments = _RELUS.get(func)
        arguments = read_arguments(*args, **(kwargs or {})) if read_arguments else None
        if arguments is None:
            return func(*args, **(kwargs or {}))
        self.called = True
        values, top, inplace = arguments
        output = cast("Tensor", _Relu.apply(values.clone(), top, self._guided))
        return values.copy_(output) if inplace else output


class _Relu(torch.autograd.Function):
    """min(max(x, 0), top), with the backward step of a rule.

    A hook could not do this for the deconvnet: the chain rule drops the gradient where x ≤ 0 before any hook sees it.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, top: float, guided: bool) -> Tensor:  # noqa: FBT001 -- torch passes it so
        ctx.active = (values > 0) & (values < top) if guided else None
        return values.clamp(0, top)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        positive = gradients[0].clamp(min=0)
        return (positive if ctx.active is None else positive * ctx.active), None, None


_ReluArguments = tuple[Tensor, float, bool]
"""The input of a ReLU, its upper bound, and True if it works in place."""


def _relu(input: Tensor, inplace: bool = False) -> _ReluArguments:  # noqa: A002, FBT001, FBT002 -- torch's signature
    return input, float("inf"), inplace


def _relu_(input: Tensor) -> _ReluArguments:  # noqa: A002 -- torch's signature
    return input, float("inf"), True


def _relu6(input: Tensor, inplace: bool = False) -> _ReluArguments:  # noqa: A002, FBT001, FBT002 -- torch's signature
    return input, 6.0, inplace


def _hardtanh(
    input: Tensor,  # noqa: A002 -- torch's signature
    min_val: float = -1.0,
    max_val: float = 1.0,
    inplace: bool = False,  # noqa: FBT001, FBT002 -- torch's signature
) -> _ReluArguments | None:
    return (input, max_val, inplace) if min_val == 0 else None  # any other hardtanh is no ReLU


_RELUS: Mapping[Any, Callable[..., _ReluArguments | None]] = {
    functional.relu: _relu,
    torch.relu: _relu,
    Tensor.relu: _relu,
    functional.relu_: _relu_,
    torch.relu_: _relu_,
    Tensor.relu_: _relu_,
    functional.relu6: _relu6,
    functional.hardtanh: _hardtanh,
}
"""For each torch function that can be a ReLU, a function that reads its arguments; it returns None if it is none."""
