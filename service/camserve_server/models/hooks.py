"""Forward and backward hooks that capture, observe and change what layers return.

    with capture_layers({"layer4": model.layer4}) as captures:
        score(model(images)).backward()
    captures["layer4"].activation, captures["layer4"].gradient

A forward hook captures a layer's output, and a full backward hook captures the gradient there. The full backward hook
is not on the layer itself but on a probe: an `nn.Identity` through which the forward hook passes the layer's output. On
the layer it would fail wherever the model changes the output in place afterwards: `nn.ReLU(inplace=True)` after a
convolution, `F.relu(x, inplace=True)` in DenseNet, `out += identity` in a ResNet. It would also make autograd
differentiate the layer, for a gradient at its input that nobody uses. The probe's output is cloned outside the hooked
module. So in-place changes by the model cannot reach the capture, and the clone has ordinary strides: see
`_attach_probe`.

The benchmark divided Grad-CAM's time by that of a plain forward pass, with the hook on the probe and on the layer
(batch 8, float32, 2 CPU cores, torch 2.14). It measured 1.00 and 1.19 for resnet50 at layer4, 1.15 and 1.53 at layer3,
and 1.07 and 2.64 for mobilenet_v3_large at features.

The hooks rely on frozen parameters. The output of a captured layer then requires no gradient, and the graph starts at
it: nothing up to and including the layer is differentiated. If another captured layer comes earlier on the way to it,
the output is on that layer's graph already and stays on it. With trainable parameters the captured gradients are the
same, but autograd differentiates the layers before, too.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # flattens every output structure that torch knows

from camserve_server.core.errors import FailedPrecondition
from camserve_server.models.values import Layout

ForwardHook = Callable[[nn.Module, tuple[Any, ...], Any], Any]
"""Receives a module, its arguments and its output; returns the output to continue with."""

BackwardHook = Callable[[nn.Module, Any, Any], None]
"""Receives a module, the gradients at its inputs and those at its outputs."""

OutputObserver = Callable[[str, Tensor], Callable[[Tensor], None]]
"""Receives a layer's name and its output, detached; returns a callback for the gradient at that output."""


@dataclass(slots=True)
class Capture:
    """The output of a layer's latest call, and the gradient with respect to it.

    Attributes:
        activation: the layer's output, detached.
        source: the tensor from which the later layers are computed, on their graph, for repeated differentiation.
        gradient: the gradient of the score with respect to the output; None before a backward pass, or if the score
            does not depend on the output.
    """

    activation: Tensor
    source: Tensor = field(repr=False)
    gradient: Tensor | None = None
    _version: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        self._version = changes_in_place(self.activation)

    def intact(self) -> bool:
        """Return whether nothing has changed the activation in place since the layer returned it."""
        return changes_in_place(self.activation) == self._version

    def keep(self, _probe: nn.Module, _grad_input: Any, grad_output: tuple[Tensor | None, ...]) -> None:
        """Keep a copy of the gradient: the full backward hook of the probe."""
        # A copy, because autograd may accumulate into this memory later. The gradient is None when the score is
        # differentiated twice and the model is linear after the layer: autograd has no second derivative to pass back.
        self.gradient = None if grad_output[0] is None else grad_output[0].detach().clone()


@contextmanager
def capture_layers(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, Capture]]:
    """Capture the outputs of layers, and the gradients at these outputs.

    The hooks are removed when the block ends, also after an error. If one pass calls a layer several times, the last
    call is captured.

    Args:
        layers: the modules, by the names of their captures.

    Yields:
        The captures by name; empty until the model has run.
    """
    captures: dict[str, Capture] = {}
    with ExitStack() as stack:
        for name, layer in layers.items():
            stack.enter_context(layer.register_forward_hook(_capture_hook(name, captures)))
        yield captures


@contextmanager
def observe_layers(layers: Mapping[str, nn.Module], observer: OutputObserver) -> Iterator[None]:
    """Pass the outputs of layers, and the gradients at these outputs, to an observer without keeping them.

    The hooks are removed when the block ends, also after an error. If one pass calls a layer several times, each call
    is observed. Outputs without a floating-point tensor, or with an empty one, are not observed.

    Args:
        layers: the modules, by name.
        observer: receives each output; the callback that it returns receives the gradient, if there is one.
    """
    with ExitStack() as stack:
        for name, layer in layers.items():
            stack.enter_context(layer.register_forward_hook(_observe_hook(name, observer)))
        yield


def _observe_hook(name: str, observer: OutputObserver) -> ForwardHook:
    def forward_hook(_layer: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        parts, structure = pytree.tree_flatten(output)
        index = first_index(parts)
        if index is None or not parts[index].numel():
            return output
        on_gradient = observer(name, parts[index].detach())
        parts[index] = _attach_probe(
            _on_graph(parts[index]), lambda _probe, _grad_input, grad_output: on_gradient(grad_output[0].detach())
        )
        return pytree.tree_unflatten(parts, structure)

    return forward_hook


@contextmanager
def zero_channels(layer: nn.Module, layout: Layout, channels: Sequence[int | None]) -> Iterator[None]:
    """Set channels of a layer's output to zero inside the block.

    If the output is that of one image, the model continues with a copy of it for each item of `channels`.

    Args:
        layer: the module.
        layout: the layout of its output.
        channels: for each image of the batch, or each copy, the index of a channel; None leaves it unchanged.
    """

    def forward_hook(_layer: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        parts, structure = pytree.tree_flatten(output)
        index = next(i for i, part in enumerate(parts) if _is_float_tensor(part))
        is_repeated = len(parts[index]) == 1 < len(channels)
        parts[index] = torch.cat([parts[index]] * len(channels)) if is_repeated else parts[index].clone()
        for image, channel in enumerate(channels):
            if channel is not None:
                _channel_view(parts[index][image], layout, channel).zero_()
        return pytree.tree_unflatten(parts, structure)

    with layer.register_forward_hook(forward_hook):
        yield


def _channel_view(output: Tensor, layout: Layout, channel: int) -> Tensor:
    """Return a view of one channel over the grid, in one image's output."""
    if layout.axes == "nchw":
        return output[channel]
    if layout.axes == "tokens":
        return output[layout.prefix : len(output) - layout.suffix, channel]
    return output[..., channel]


def _capture_hook(name: str, captures: dict[str, Capture]) -> ForwardHook:
    def forward_hook(_layer: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        parts, structure = pytree.tree_flatten(output)
        index = first_index(parts)
        if index is None:
            raise FailedPrecondition(f'layer "{name}" returns no floating-point tensor')
        captures[name], parts[index] = pass_through_probe(parts[index])
        return pytree.tree_unflatten(parts, structure)

    return forward_hook


def pass_through_probe(output: Tensor) -> tuple[Capture, Tensor]:
    """Pass a tensor through a probe that captures it and the gradient there.

    Returns:
        The capture of the tensor, and the tensor that the model continues with.
    """
    source = _on_graph(output)
    capture = Capture(source.detach(), source)
    return capture, _attach_probe(source, capture.keep)


def _on_graph(output: Tensor) -> Tensor:
    """Return the output if it requires grad; else start a graph at it."""
    return output if output.requires_grad else output.detach().requires_grad_()


def _attach_probe(source: Tensor, backward_hook: BackwardHook) -> Tensor:
    """Attach a backward hook to a tensor; return the copy that the model continues with."""
    probe = nn.Identity()
    probe.register_full_backward_hook(backward_hook)
    output: Tensor = probe(source)
    # The clone also has ordinary strides. The probe's view of a single channels-last image has unusual ones. With them
    # the backward pass of torch 2.14's batch norm permutes gradients on a CPU: a map of mobilenet_v3_small was wrong by
    # 173 % of its maximum.
    return output.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, slots=True)
class Span:
    """A call of a module in which the model's step counter rises by one, such as by one attention.

    Attributes:
        module: the module.
        step: the index of the step.
        input: the first floating-point tensor in the arguments of the call.
        output: the first floating-point tensor in the output.
    """

    module: nn.Module
    step: int
    input: Tensor | None
    output: Tensor | None


@contextmanager
def record_spans(model: nn.Module, steps: Callable[[], int]) -> Iterator[list[Span]]:
    """Record the module calls in which the model takes one step.

    Args:
        model: the model.
        steps: function that returns the number of steps that the model has taken so far.

    Yields:
        The calls, those of inner modules before those of outer ones; empty until the model has run.
    """
    spans: list[Span] = []
    started: list[tuple[int, Tensor | None]] = []

    def enter(_module: nn.Module, args: Any, kwargs: Any) -> None:
        started.append((steps(), first_tensor((args, kwargs))))

    def leave(module: nn.Module, _args: Any, output: Any) -> None:
        step, first_input = started.pop()
        if steps() == step + 1:
            spans.append(Span(module, step, first_input, first_tensor(output)))

    with ExitStack() as stack:
        for module in model.modules():
            stack.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
            stack.enter_context(module.register_forward_hook(leave))
        yield spans


@contextmanager
def replace_output(layer: nn.Module, tensor: Tensor) -> Iterator[None]:
    """Replace the first floating-point tensor that a layer returns by another tensor inside the block."""

    def forward_hook(_layer: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        parts, structure = pytree.tree_flatten(output)
        index = next(i for i, part in enumerate(parts) if _is_float_tensor(part))
        parts[index] = tensor
        return pytree.tree_unflatten(parts, structure)

    with layer.register_forward_hook(forward_hook):
        yield


@contextmanager
def record_embeddings(model: nn.Module, layer: str) -> Iterator[list[Tensor]]:
    """Record the inputs of a linear layer, on the graph.

    Args:
        model: the model.
        layer: the name of the layer; empty to record nothing.

    Yields:
        The inputs, [B,E] each, one for each call.
    """
    inputs: list[Tensor] = []
    if not layer:
        yield inputs
        return
    with model.get_submodule(layer).register_forward_pre_hook(lambda _layer, args: inputs.append(args[0])):
        yield inputs


def output_of(model: nn.Module, layer: str, images: Tensor) -> Tensor:
    """Run a model and return a copy of the first tensor, of any dtype, that a layer returned."""
    outputs: list[Tensor] = []

    def forward_hook(_layer: nn.Module, _args: Any, output: Any) -> None:
        tensors = [part for part in pytree.tree_leaves(output) if isinstance(part, Tensor)]
        outputs.extend(tensor.clone() for tensor in tensors[:1])

    with model.get_submodule(layer).register_forward_hook(forward_hook):
        model(images.clone())
    return outputs[-1]


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether a module has forward hooks or forward pre-hooks, which observe or change its input and output."""
    return bool(module._forward_hooks or module._forward_pre_hooks)  # noqa: SLF001 -- torch has no public name for it


def hook_count(model: nn.Module) -> int:
    """Count the hooks of all kinds on a model and its modules: between two passes, only those of the network itself."""
    return sum(
        len(hooks)
        for module in model.modules()
        for name, hooks in vars(module).items()
        if name.endswith("_hooks") and "state_dict" not in name
    )


def changes_in_place(tensor: Tensor | None) -> int:
    """Return how often a tensor was changed in place; 0 for one of `torch.inference_mode`, which is not counted."""
    if tensor is None or tensor.is_inference():
        return 0
    return tensor._version  # noqa: SLF001 -- torch has no public name for it


def first_tensor(output: Any) -> Tensor | None:
    """Return the first floating-point tensor of a module's output, which is the one captured, or None."""
    return next((part for part in pytree.tree_leaves(output) if _is_float_tensor(part)), None)


def first_index(parts: Sequence[Any]) -> int | None:
    """Return the index of the first floating-point tensor among the parts of an output or of arguments, or None."""
    return next((i for i, part in enumerate(parts) if _is_float_tensor(part)), None)


def _is_float_tensor(part: Any) -> bool:
    return isinstance(part, Tensor) and part.is_floating_point()
