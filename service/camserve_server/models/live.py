"""Explanations of networks of this process, without changes to them.

An explanation needs a network in evaluation mode whose parameters require no gradients. The caller's network may be in
the middle of its training. So the explained module is a copy that shares the memory of the network's parameters. A
network that cannot be copied runs itself; after each batch its modes and flags are restored.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree  # flattens every output structure that torch knows

from camserve_server.core.errors import ConfigError


def unwrap(module: nn.Module) -> nn.Module:
    """Return the network inside `DataParallel`, `DistributedDataParallel` or `torch.compile`; any other one as it is.

    Hooks do not run in a compiled network, and a wrapper adds its own attribute to the names of all layers.
    """
    while isinstance(module, nn.Module):
        wrapper = isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel)
        # The class of compiled networks is not imported for this: torch._dynamo takes seconds. A child is looked for,
        # and no attribute, because a user's module may pass on those of another one.
        inner = dict(module.named_children()).get("module" if wrapper else "_orig_mod")
        if inner is None:
            break
        module = inner
    return module


def unwrap_children(module: nn.Module) -> nn.Module:
    """Replace each wrapper in a network by what it wraps, in place, and return the network."""
    for name, child in reversed([*module.named_modules(remove_duplicate=False)]):  # inner wrappers come later
        if name and (plain := unwrap(child)) is not child:
            module.set_submodule(name, plain)
    return module


def register_hidden(module: nn.Module) -> list[str]:
    """Register the modules that a network keeps outside of torch's register, in place, such as those in a plain list.

    `eval()` and `to()` do not reach them otherwise, and they have no names. A list becomes a `ModuleList`.

    Returns:
        The names of what is registered now.
    """
    known, names = {id(part) for part in module.modules()}, list[str]()
    for path, owner in [*module.named_modules()]:
        for name, value in [*vars(owner).items()]:
            if name in _OF_TORCH or (hidden := _as_module(value, known)) is None:
                continue
            del owner.__dict__[name]
            owner.add_module(name, hidden)
            names.append(f"{path}.{name}" if path else name)
    return names + register_hidden(module) if names else []


def _as_module(value: Any, known: set[int]) -> nn.Module | None:
    """Return an attribute with modules that are not known as a module; None for any other attribute."""
    parts = [value] if isinstance(value, nn.Module) else [*value.values()] if isinstance(value, dict) else value
    if not isinstance(parts, list | tuple) or not parts or not all(isinstance(part, nn.Module) for part in parts):
        return None
    if all(id(part) in known for part in parts):
        return None
    if isinstance(value, nn.Module):
        return value
    if isinstance(value, dict):
        return nn.ModuleDict(value) if all(isinstance(key, str) and "." not in key for key in value) else None
    return nn.ModuleList(parts)


_OF_TORCH = frozenset(vars(nn.Module()))
"""Names of the attributes that every module has."""


class Program(nn.Module):
    """A TorchScript program as a single module: there are no hooks inside it, and no parameters that can be changed.

    Args:
        program: the program.
    """

    def __init__(self, program: nn.Module) -> None:
        super().__init__()
        self.program = program
        self.training = program.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program."""
        return self.program(*args, **kwargs)

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,  # noqa: FBT001, FBT002 -- torch's signature
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield this module alone."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self


def is_program(module: nn.Module) -> bool:
    """Return whether a module is a TorchScript program, or a part of one."""
    return isinstance(module, torch.jit.ScriptModule)


def enclose_programs(module: nn.Module) -> nn.Module:
    """Make each TorchScript program in a network a single module, in place, and return the network."""
    if is_program(module):
        return Program(module)
    names = [name for name, child in module.named_modules(remove_duplicate=False) if is_program(child)]
    for name in names:
        if not any(name.startswith(f"{other}.") for other in names):  # a part of another one
            module.set_submodule(name, Program(module.get_submodule(name)))
    return module


def alias(tensor: Tensor) -> Tensor:
    """Return a parameter without gradient that shares memory with this parameter; copy a buffer.

    A module may write to its buffers while it runs, so they cannot be shared. They are small.
    """
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach(), requires_grad=False)
    return tensor.detach().clone()


def check_whole(module: nn.Module) -> None:
    """Check that a network's parameters are whole tensors.

    Raises:
        ConfigError: a parameter is distributed among processes, as by FSDP2.
    """
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "full_tensor"):  # without an import of torch.distributed.tensor, which takes a second
            words = (
                f"its parameter {name} is a {type(parameter).__name__}, which is distributed among processes: "
                "load its full state dict into a network that is not, and explain that"
            )
            raise ConfigError(words)


def copy_network(module: nn.Module) -> nn.Module:
    """Return a copy of a network that shares nothing with it.

    Raises:
        ConfigError: the network cannot be copied.
    """
    check_whole(module)
    try:
        with torch.no_grad():  # TorchScript copies its parameters by operations on a graph
            return copy.deepcopy(module)
    except Exception as error:  # a user's module may raise anything
        words = f"the network cannot be copied: {type(error).__name__}: {error}"
        raise ConfigError(words) from error


def share_parameters(module: nn.Module) -> nn.Module:
    """Return a copy of a network that shares the memory of its parameters; a float32 copy of one in half precision.

    Returns:
        The copy; or the network itself if it cannot be copied. Run that inside `frozen`.
    """
    # deepcopy takes the tensors in `memo` instead of copying the originals.
    memo: dict[int, Any] = {id(tensor): alias(tensor) for tensor in (*module.parameters(), *module.buffers())}
    try:
        with torch.no_grad():  # as above
            copied = copy.deepcopy(module, memo)
    except Exception:  # noqa: BLE001 -- a user's module may raise anything
        return module
    half = any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in module.parameters())
    return copied.float() if half else copied


def used_by_copy(module: nn.Module, copied: nn.Module, shape: tuple[int, ...]) -> str | None:
    """Return the name of a module of a network that its copy runs; None if the copy runs only its own.

    A `forward` that was replaced on an instance, as by profilers and by tools for quantisation, may be a function that
    holds the original module: copying copies no function. The copy would then run modules that have no hooks of ours,
    and may be in training mode.

    Args:
        module: the network.
        copied: its copy.
        shape: shape of an input, [1,C,H,W]. If the copy does not run on it, nothing is known.
    """
    names = {id(part): name for name, part in module.named_modules()}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        names.setdefault(id(tensor), name.rpartition(".")[0])
    used: list[str] = []
    image = _zeros(copied, shape)
    with ExitStack() as stack:
        stack.enter_context(frozen(module))
        stack.enter_context(frozen(copied))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for part in (part for part in module.modules() if not is_program(part)):
            stack.enter_context(part.register_forward_pre_hook(lambda part, _: used.append(names[id(part)])))
        stack.enter_context(torch.no_grad())
        stack.enter_context(_RecordTensors(names, used))
        with suppress(Exception):  # a user's module may raise anything; the probe tells what it is
            copied(image)
    return used[0] if used else None


def runs(module: nn.Module, shape: tuple[int, ...]) -> bool:
    """Return whether a copy of a network runs on an input of a shape [1,C,H,W]."""
    copied = share_parameters(module)
    with frozen(copied), torch.random.fork_rng(devices=[]), torch.no_grad(), suppress(Exception):
        copied(_zeros(copied, shape))
        return True
    return False


def _zeros(module: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """Return an input of zeros on the device of a network, of the type of its parameters."""
    first = next(module.parameters(), None)
    return torch.zeros(shape) if first is None else torch.zeros(shape).to(first)


class _RecordTensors(TorchFunctionMode):
    """Records the names of tensors that torch's functions get inside the block."""

    def __init__(self, names: Mapping[int, str], used: list[str]) -> None:
        super().__init__()
        self._names, self._used = names, used

    def __torch_function__(
        self, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for part in pytree.tree_leaves((args, kwargs)):
            if isinstance(part, Tensor) and id(part) in self._names:
                self._used.append(self._names[id(part)])
        return function(*args, **(kwargs or {}))


def to_evaluation(module: nn.Module, device: str) -> nn.Module:
    """Put a network into evaluation mode, without gradients for its parameters, on a device; return it."""
    # The results of these calls are ignored: a network's own `train` may return nothing.
    module.eval()
    module.requires_grad_(requires_grad=False)
    module.to(device)
    return module


def dtype_of(module: nn.Module) -> torch.dtype:
    """Return the type of a network's input: float64 if its first parameter has that, otherwise float32."""
    first = next((each for each in module.parameters() if each.is_floating_point()), None)
    return torch.float64 if first is not None and first.dtype == torch.float64 else torch.float32


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """Put a network into evaluation mode, without gradients for its parameters, and restore it after the block."""
    modes = {child: child.training for child in module.modules()}
    # A copy of a TorchScript program may have parameters that are no leaves: torch does not change their flags.
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad and parameter.is_leaf]
    try:
        for child in modes:
            child.training = False  # not `eval()`, which a module may override
        for parameter in trained:
            parameter.requires_grad = False
        yield
    finally:
        for child, mode in modes.items():
            child.training = mode
        for parameter in trained:
            parameter.requires_grad = True


def with_output(module: nn.Module, output: Callable[[Any], Any]) -> nn.Module:
    """Make a network return its logits: apply a function to the output of its forward pass.

    The module gets a class of its own, derived from its present one. A wrapper module would add a level to the names of
    all layers, and a hook would look like a hook of the network's own.
    """
    kind = getattr(type(module), "_without_output", type(module))  # a factory may return the same module again

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return output(kind.__call__(self, *args, **kwargs))

    module.__class__ = type(kind.__name__, (kind,), {"__call__": call, "_without_output": kind})
    return module
