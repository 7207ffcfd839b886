"""Interventions: hooks that change what layers receive and return, and the gradients at their outputs, in one pass.

    with intervene(model, [Intervention("layer4", "silence", channels=(12, 40))]):
        model.module(images)

A forward pre-hook changes a layer's input, and a forward hook its output. A change is made to a copy with the same
strides, so that the model's own tensors stay as they are. A gradient is cut by a hook on a copy of the output: a
backward hook on the layer itself would fail where the model changes the output in place, as `hooks` explains.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.utils import _pytree as pytree  # flattens every output structure that torch knows
from torch.utils.hooks import RemovableHandle

from camserve_server.core.devices import device_for
from camserve_server.core.errors import FailedPrecondition, InvalidArgument
from camserve_server.models.hooks import first_index
from camserve_server.models.loaded import LoadedModel
from camserve_server.models.values import Change, Intervention, Layout, channel_axis

Index: TypeAlias = tuple[Any, ...]
"""The index of the values that change: for each axis a slice, or the indices of channels."""

TOKEN_AXES = 3
"""The number of axes of a tensor of tokens, [B,N,C]."""

GRID_AXES = 4
"""The number of axes of a tensor with a grid, [B,C,h,w] or [B,h,w,C]."""


@contextmanager
def intervene(model: LoadedModel, interventions: Sequence[Intervention]) -> Iterator[None]:
    """Change what layers receive and return, and the gradients at their outputs, inside the block.

    The hooks are removed when the block ends, also after an error. A capture of a layer that starts inside the block
    captures the changed output, and the gradient after it was cut.

    Args:
        model: the model.
        interventions: the changes, in the order in which they apply.

    Raises:
        InvalidArgument: the input of a layer has no such channel.
        FailedPrecondition: a layer did not run, or a change does not fit its tensor.
    """
    hooks = [
        _Hook(each, model.info.layers[each.layer].grid, f"interventions[{index}]")
        for index, each in enumerate(interventions)
    ]
    with ExitStack() as stack:
        for hook in hooks:
            hook.place_on(model.module.get_submodule(hook.intervention.layer), stack)
        yield
    for hook in hooks:
        if not hook.ran:
            message = f'layer "{hook.intervention.layer}" did not run, so it could not be changed'
            raise FailedPrecondition(message, field=f"{hook.path}.layer")


@dataclass(slots=True)
class _Hook:
    """The hook of one intervention on its layer.

    Attributes:
        intervention: the intervention.
        layout: the layout of the layer's output; None without a grid.
        path: path of the intervention in the request.
        ran: True if the layer was called.
    """

    intervention: Intervention
    layout: Layout | None
    path: str
    ran: bool = False
    _handles: list[RemovableHandle] = field(default_factory=list)

    def place_on(self, layer: nn.Module, stack: ExitStack) -> None:
        """Place the hook on the layer until the stack ends."""
        if self.intervention.change == "clip_gradient":
            stack.enter_context(layer.register_forward_pre_hook(self._be_last))
            stack.callback(self._remove)
        elif self.intervention.input:
            stack.enter_context(layer.register_forward_pre_hook(self._change_input, with_kwargs=True))
        else:
            stack.enter_context(layer.register_forward_hook(self._change_output))

    def _change_input(self, _layer: nn.Module, args: Any, kwargs: Any) -> Any:
        return self._change_first((args, kwargs), self._changed)

    def _change_output(self, _layer: nn.Module, _args: Any, output: Any) -> Any:
        return self._change_first(output, self._changed)

    def _be_last(self, layer: nn.Module, _args: Any) -> None:
        """Cut the gradient of this call's output after all other hooks, so that a capture gets the cut gradient.

        Hooks run in the order in which they were registered, and captures register theirs later than this one.
        """
        self._remove()
        self._handles.append(layer.register_forward_hook(self._cut_output))

    def _remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _cut_output(self, _layer: nn.Module, _args: Any, output: Any) -> Any:
        return self._change_first(output, self._with_cut_gradient)

    def _change_first(self, values: Any, change: Callable[[Tensor], Tensor]) -> Any:
        """Change the first floating-point tensor in the arguments or the output of a call."""
        parts, structure = pytree.tree_flatten(values)
        index, self.ran = first_index(parts), True
        if index is None:
            verb = "receives" if self.intervention.input else "returns"
            message = f'layer "{self.intervention.layer}" {verb} no floating-point tensor'
            raise FailedPrecondition(message, field=f"{self.path}.layer")
        parts[index] = change(parts[index])
        return pytree.tree_unflatten(parts, structure)

    def _changed(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor with the change."""
        return self._replace(tensor, *self._index_in(tensor))

    def _with_cut_gradient(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor at which the gradient is cut; the tensor itself if there is no gradient at it.

        The gradient at the copy is that of this call alone: other modules may use the tensor as well.
        """
        if not tensor.requires_grad:
            return tensor
        own, (place, axis) = tensor.clone(), self._index_in(tensor)
        own.register_hook(lambda gradient: self._replace(gradient, place, axis))  # type: ignore[no-untyped-call]
        return own

    def _replace(self, tensor: Tensor, place: Index, axis: int) -> Tensor:
        """Return a copy of a tensor, with the same strides, that has other values at a place."""
        changed = tensor.clone()
        changed[place] = _CHANGES[self.intervention.change](tensor[place], self.intervention, axis)
        return changed

    def _index_in(self, tensor: Tensor) -> tuple[Index, int]:
        """Return the index of the values of a tensor that change, and the axis of its channels."""
        axis, change = channel_axis(tensor.dim(), self.layout), self.intervention.change
        if axis is None:
            axes = f"its tensor has {tensor.dim()} axes"
            message = f'the channels of layer "{self.intervention.layer}" are unknown: {axes}'
            raise FailedPrecondition(message, field=f"{self.path}.layer")
        place: list[Any] = [slice(None)] * tensor.dim()
        if self.intervention.channels:
            check_channels(self.intervention, tensor.shape[axis], self.path)
            place[axis] = device_for(tensor.device).tensor(self.intervention.channels)
        if change == "replace_mean" and tensor.dim() == TOKEN_AXES and self.layout:
            place[1] = slice(self.layout.prefix, tensor.shape[1] - self.layout.suffix)
        elif change == "replace_mean" and tensor.dim() != GRID_AXES:
            message = f'replace_mean needs a grid, and the input of layer "{self.intervention.layer}" has none'
            raise FailedPrecondition(message, field=f"{self.path}.replace_mean")
        return tuple(place), axis


def check_channels(intervention: Intervention, count: int, path: str) -> None:
    """Check that a layer has the channels of an intervention.

    Args:
        intervention: the intervention.
        count: the number of channels.
        path: path of the intervention in the request.

    Raises:
        InvalidArgument: it has not.
    """
    largest = max(intervention.channels, default=0)
    if largest >= count:
        what = f'the input of layer "{intervention.layer}"' if intervention.input else f'layer "{intervention.layer}"'
        message = f"there is no channel {largest}: {what} has {count} channels, from 0"
        raise InvalidArgument(message, field=f"{path}.channels")


def _limit(values: Tensor, intervention: Intervention, _axis: int) -> Tensor:
    # A copy, because autograd keeps it, and the model may change its own tensor in place before the backward pass.
    return values.clone().clamp(intervention.minimum, intervention.maximum)


def _mean(values: Tensor, _intervention: Intervention, axis: int) -> Tensor:
    """Return the mean of each channel over the grid of each image."""
    return values.mean([other for other in range(1, values.dim()) if other != axis], keepdim=True)


_CHANGES: Mapping[Change, Callable[[Tensor, Intervention, int], Tensor | float]] = {
    "silence": lambda _values, _intervention, _axis: 0.0,
    "scale": lambda values, intervention, _axis: values * intervention.factor,
    "clamp": _limit,
    "replace_mean": _mean,
    "clip_gradient": _limit,
}
"""For each change, a function of the values, the intervention, and the axis of the channels."""
