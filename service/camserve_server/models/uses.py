"""Which functions of torch a model calls before a layer is done and after, and what they take.

That is found by running it once: no graph of the model is needed, and any that runs will do.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree  # every shape of output that torch itself knows

from camserve_server.hooks import first_tensor, output_of


@dataclass(slots=True)
class Applied:
    """A function that a convolution's output, or a linear map's or a batch norm's, was given to.

    Attributes:
        function: of torch.
        arguments: its others, by position.
        keywords: its others, by name.
        returned: the id of what it returned.
        module: the name of one without others in it that did nothing else, or nothing.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    returned: int
    module: str = ""


@dataclass(slots=True)
class Uses:
    """Which functions of torch took what, before the layer was done and after.

    Attributes:
        before: tensors, by id.
        after: likewise.
        mapped: by the id of what a convolution or a linear map returned, its weight.
        sizes: by the id of a weight, the shape of what was convolved or mapped with it.
        normed: by the id of what a batch norm was given, its running mean and the id of what it returned.
        takers: by the id of what one of these three returned, how many functions took it.
        applied: by the same, the last of them, while the layer was not done.
        calls: by the name of a module, the ids of what it returned of a convolution or a linear map, likewise.
        spread: the weights of linear maps over all tokens, after the layer was done.
        held: what the ids are of.
    """

    before: Counter[int] = field(default_factory=Counter)
    after: Counter[int] = field(default_factory=Counter)
    mapped: dict[int, Tensor] = field(default_factory=dict)
    sizes: dict[int, torch.Size] = field(default_factory=dict)
    normed: dict[int, tuple[Tensor | None, int]] = field(default_factory=dict)
    takers: Counter[int] = field(default_factory=Counter)
    applied: dict[int, Applied] = field(default_factory=dict)
    calls: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    spread: set[int] = field(default_factory=set)
    held: list[Tensor] = field(default_factory=list)
    done: bool = False
    _watched: set[int] = field(default_factory=set)

    def only_before(self, tensor: Tensor) -> bool:
        """Tell whether all that takes a tensor does so before the layer is done."""
        return bool(self.before[id(tensor)]) and not self.after[id(tensor)]

    def take(self, function: Any, args: tuple[Any, ...], keywords: Mapping[str, Any], found: Any) -> None:
        """Count a call."""
        given = (*args, *keywords.values())
        taken = {id(part) for part in pytree.tree_leaves(given) if isinstance(part, Tensor)}
        (self.after if self.done else self.before).update(taken)
        self.takers.update(taken & self._watched)
        first = id(given[0]) if given else 0
        watched = first in self._watched
        if watched and not self.done:
            self.applied[first] = Applied(function, args[1:], keywords, id(found))
        if first == id(found):  # changed in place: from now on it is something else
            self._watched.discard(first)
        if function in (functional.conv2d, functional.linear):
            self._map(function, given[0], given[1], found)
        if function is functional.batch_norm and watched:
            self.normed[first] = (given[1], id(found))
            self._watch(found)

    def _map(self, function: Any, given: Tensor, weight: Tensor, found: Tensor) -> None:
        self.mapped[id(found)] = weight
        self.sizes[id(weight)] = given.shape
        self._watch(found)
        if function is functional.linear and self.done and given.dim() == 3:  # noqa: PLR2004 -- [B,N,C]
            self.spread.add(id(weight))

    def _watch(self, found: Tensor) -> None:
        self._watched.add(id(found))
        self.held.append(found)

    def call(self, name: str, args: tuple[Any, ...], output: Any) -> None:
        """Tell which module made the last call, which is one without others in it."""
        if self.done or not args:
            return
        if id(output) in self.mapped:
            self.calls[name].append(id(output))
        applied = self.applied.get(id(args[0]))
        if applied and applied.returned == id(output):
            applied.module = name


class _Watch(TorchFunctionMode):
    """Tells of every call that returns a tensor."""

    def __init__(self, uses: Uses) -> None:
        super().__init__()
        self._uses = uses

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if first_tensor(found) is not None:
            self._uses.take(func, args, kwargs or {}, found)
        return found


def hooked(module: nn.Module) -> bool:
    """Tell whether somebody listens to a module, or changes what it takes or returns: it must stay what it is."""
    return bool(module._forward_hooks or module._forward_pre_hooks)  # noqa: SLF001 -- there is no other way to ask


def used(module: nn.Module, layer: str, image: Tensor) -> tuple[Uses, Tensor]:
    """Run a model on one image; return what it used, and what the layer returned."""
    uses = Uses()

    def finish(_layer: nn.Module, _args: Any, _output: Any) -> None:
        uses.done = True

    with ExitStack() as stack:
        for name, one in module.named_modules():
            if not any(one.children()):
                hook = one.register_forward_hook(lambda _module, args, output, name=name: uses.call(name, args, output))
                stack.enter_context(hook)
        stack.enter_context(module.get_submodule(layer).register_forward_hook(finish))
        stack.enter_context(_Watch(uses))
        return uses, output_of(module, layer, image)
