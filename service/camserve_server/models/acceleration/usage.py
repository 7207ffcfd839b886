"""Record the torch functions that a model calls before and after its default layer, and the tensors they take.

A `TorchFunctionMode` records the calls of one run. No graph of the model is needed, so this works for every model that
runs. It costs one forward pass when a model is loaded.
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
from torch.utils import _pytree as pytree  # flattens every output structure that torch knows

from camserve_server.models.hooks import first_tensor, output_of


@dataclass(slots=True)
class Consumer:
    """A call whose first argument is the output of a convolution, a linear map or a batch norm.

    Attributes:
        function: the torch function.
        arguments: its other positional arguments.
        keywords: its keyword arguments.
        returned: the id of its result.
        module: the name of the leaf module that made this call and no other; empty if unknown.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    returned: int
    module: str = ""


@dataclass(slots=True)
class Usage:
    """The calls of one run; "before" and "after" mean before and after the default layer has finished.

    Attributes:
        before: by the id of a tensor, the number of calls before that took it.
        after: the same for calls after.
        weights: by the id of the output of a convolution or a linear map, its weight.
        input_shapes: by the id of such a weight, the shape of the input.
        norms: by the id of the input of a batch norm, its running mean and the id of its output.
        consumer_counts: by the id of an output of one of these three, the number of calls that took it.
        consumers: by the same id, the last of these calls before.
        outputs: by the name of a module, the ids of the outputs of convolutions or linear maps that it returned before.
        token_weights: the ids of the weights of linear maps over all tokens [B,N,C], after.
        kept_alive: the tensors with these ids, kept so that no id is reused.
        finished: True after the default layer has finished.
    """

    before: Counter[int] = field(default_factory=Counter)
    after: Counter[int] = field(default_factory=Counter)
    weights: dict[int, Tensor] = field(default_factory=dict)
    input_shapes: dict[int, torch.Size] = field(default_factory=dict)
    norms: dict[int, tuple[Tensor | None, int]] = field(default_factory=dict)
    consumer_counts: Counter[int] = field(default_factory=Counter)
    consumers: dict[int, Consumer] = field(default_factory=dict)
    outputs: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    token_weights: set[int] = field(default_factory=set)
    kept_alive: list[Tensor] = field(default_factory=list)
    finished: bool = False
    _tracked: set[int] = field(default_factory=set)

    def only_before(self, tensor: Tensor) -> bool:
        """Return whether a tensor is used, and only before the layer has finished."""
        return bool(self.before[id(tensor)]) and not self.after[id(tensor)]

    def record_call(self, function: Any, args: tuple[Any, ...], keywords: Mapping[str, Any], result: Any) -> None:
        """Record a call of a torch function."""
        arguments = (*args, *keywords.values())
        taken = {id(part) for part in pytree.tree_leaves(arguments) if isinstance(part, Tensor)}
        (self.after if self.finished else self.before).update(taken)
        self.consumer_counts.update(taken & self._tracked)
        first = id(arguments[0]) if arguments else 0
        is_tracked = first in self._tracked
        if is_tracked and not self.finished:
            self.consumers[first] = Consumer(function, args[1:], keywords, id(result))
        if first == id(result):  # changed in place: the tensor now has another value
            self._tracked.discard(first)
        if function in (functional.conv2d, functional.linear):
            self._record_weight(function, arguments[0], arguments[1], result)
        if function is functional.batch_norm and is_tracked:
            self.norms[first] = (arguments[1], id(result))
            self._track(result)

    def _record_weight(self, function: Any, image: Tensor, weight: Tensor, result: Tensor) -> None:
        self.weights[id(result)] = weight
        self.input_shapes[id(weight)] = image.shape
        self._track(result)
        if function is functional.linear and self.finished and image.dim() == 3:  # noqa: PLR2004 -- [B,N,C]
            self.token_weights.add(id(weight))

    def _track(self, result: Tensor) -> None:
        self._tracked.add(id(result))
        self.kept_alive.append(result)

    def record_module(self, name: str, args: tuple[Any, ...], output: Any) -> None:
        """Record which leaf module made the latest call."""
        if self.finished or not args:
            return
        if id(output) in self.weights:
            self.outputs[name].append(id(output))
        consumer = self.consumers.get(id(args[0]))
        if consumer and consumer.returned == id(output):
            consumer.module = name


class _CallRecorder(TorchFunctionMode):
    """Records every call that returns a tensor."""

    def __init__(self, usage: Usage) -> None:
        super().__init__()
        self._usage = usage

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if first_tensor(result) is not None:
            self._usage.record_call(func, args, kwargs or {}, result)
        return result


def record_usage(module: nn.Module, layer: str, image: Tensor) -> tuple[Usage, Tensor]:
    """Run a model on one image; return the recorded usage, and the output of a layer."""
    usage = Usage()

    def finish(_layer: nn.Module, _args: Any, _output: Any) -> None:
        usage.finished = True

    with ExitStack() as stack:
        for name, child in module.named_modules():
            if not any(child.children()):
                hook = child.register_forward_hook(
                    lambda _module, args, output, name=name: usage.record_module(name, args, output)
                )
                stack.enter_context(hook)
        stack.enter_context(module.get_submodule(layer).register_forward_hook(finish))
        stack.enter_context(_CallRecorder(usage))
        return usage, output_of(module, layer, image)
