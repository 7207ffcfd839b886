"""Other rules by which a ReLU passes a gradient on: guided backpropagation and the deconvnet.

A ReLU is found where it is called, as a module, as a function or as a method, by a mode of torch that sees every call;
no module is exchanged and no hook is set.
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
    """Make every ReLU and ReLU6 in the block pass gradients on by the rule that a kind of pass has.

    guided: R = 1[x > 0] · max(g, 0), Springenberg et al. 2015, section 3.4. deconvnet: R = max(g, 0), Zeiler and Fergus
    2014, section 2.1. Any other kind leaves the chain rule as it is.

    Raises:
        FailedPrecondition: nothing in the block called a ReLU, so that the rule would change nothing.
    """
    if kind not in ("guided", "deconvnet"):
        yield
        return
    with _Rule(guided=kind == "guided") as rule:
        yield
    if not rule.found:
        raise FailedPrecondition(
            "the model has no ReLU, whose backward step this method changes: its map would be that of saliency, "
            "which is there under its own name"
        )


class _Rule(TorchFunctionMode):
    """Replaces the backward step of each ReLU that is called in the block.

    Attributes:
        found: whether there was any.
    """

    def __init__(self, *, guided: bool) -> None:
        super().__init__()
        self._guided = guided
        self.found = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: Arguments = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        call = _CALLS.get(func)
        read = call(*args, **(kwargs or {})) if call else None
        if read is None:
            return func(*args, **(kwargs or {}))
        self.found = True
        values, top, inplace = read
        passed = cast("Tensor", _Relu.apply(values.clone(), top, self._guided))
        return values.copy_(passed) if inplace else passed


class _Relu(torch.autograd.Function):
    """min(max(x, 0), top), whose backward step is a rule's."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, top: float, guided: bool) -> Tensor:  # noqa: FBT001 -- torch passes by place
        ctx.active = (values > 0) & (values < top) if guided else None
        return values.clamp(0, top)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        kept = gradients[0].clamp(min=0)
        return (kept if ctx.active is None else kept * ctx.active), None, None


Read = tuple[Tensor, float, bool]


def _relu(input: Tensor, inplace: bool = False) -> Read:  # noqa: A002, FBT001, FBT002 -- torch's signature
    return input, float("inf"), inplace


def _relu_(input: Tensor) -> Read:  # noqa: A002 -- torch's signature
    return input, float("inf"), True


def _relu6(input: Tensor, inplace: bool = False) -> Read:  # noqa: A002, FBT001, FBT002 -- torch's signature
    return input, 6.0, inplace


def _hardtanh(
    input: Tensor,  # noqa: A002 -- torch's signature
    min_val: float = -1.0,
    max_val: float = 1.0,
    inplace: bool = False,  # noqa: FBT001, FBT002 -- torch's signature
) -> Read | None:
    return (input, max_val, inplace) if min_val == 0 else None  # else it is no ReLU


_CALLS: Mapping[Any, Callable[..., Read | None]] = {
    functional.relu: _relu,
    torch.relu: _relu,
    Tensor.relu: _relu,
    functional.relu_: _relu_,
    torch.relu_: _relu_,
    Tensor.relu_: _relu_,
    functional.relu6: _relu6,
    functional.hardtanh: _hardtanh,
}
