"""Networks of this process: explained without being changed.

An explanation needs a network in evaluation mode whose parameters want no gradients. The caller's network may be in the
middle of its training. So what is explained is a shadow: another module with the same memory for its parameters. A
network that cannot be copied is run itself, and is put back as it was after each batch.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from camserve_server.core.errors import ConfigError

Output = Callable[[Any], Any]
"""Returns a network's logits [B, classes] from whatever its forward pass returns."""


def alias(tensor: Tensor) -> Tensor:
    """Return another parameter with the same memory, which wants no gradient; of a buffer a copy.

    A module may write to its buffers as it runs. They are small.
    """
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach(), requires_grad=False)
    return tensor.detach().clone()


def copied(module: nn.Module) -> nn.Module:
    """Return a copy of a network that shares nothing with it.

    Raises:
        ConfigError: it cannot be copied.
    """
    try:
        return copy.deepcopy(module)
    except Exception as error:  # whatever a user's module does
        words = f"the network cannot be copied: {type(error).__name__}: {error}"
        raise ConfigError(words) from error


def shadow(module: nn.Module) -> nn.Module:
    """Return a copy of a network that shares the memory of its parameters; in float32 if they are in half precision.

    Returns:
        The copy; or the network itself if it cannot be copied, to be run inside `borrowed`.
    """
    memo: dict[int, Any] = {id(one): alias(one) for one in (*module.parameters(), *module.buffers())}
    try:
        copied = copy.deepcopy(module, memo)
    except Exception:  # noqa: BLE001 -- whatever a user's module does
        return module
    half = any(one.dtype in (torch.float16, torch.bfloat16) for one in module.parameters())
    return copied.float() if half else copied


@contextmanager
def borrowed(module: nn.Module) -> Iterator[None]:
    """Put a network into evaluation mode inside the block, without gradients for its parameters, and back after it."""
    modes = {one: one.training for one in module.modules()}
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    try:
        for one in modes:
            one.training = False  # not `eval()`, which a module may define in another way
        for parameter in trained:
            parameter.requires_grad = False
        yield
    finally:
        for one, mode in modes.items():
            one.training = mode
        for parameter in trained:
            parameter.requires_grad = True


def with_output(module: nn.Module, output: Output) -> nn.Module:
    """Have a network return its logits, picked out of what it returns by a function of the user's.

    The module gets a class of its own: a wrapper would add a level to the names of all layers, and a hook would be
    taken for one that belongs to the network.
    """
    kind = type(module)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return output(kind.__call__(self, *args, **kwargs))

    module.__class__ = type(kind.__name__, (kind,), {"__call__": call})
    return module
