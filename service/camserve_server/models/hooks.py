"""The capture: a forward hook takes a layer's feature maps, a full backward hook their gradients.

    with watching({"layer4": model.layer4}) as captures:
        score(model(images)).backward()
    captures["layer4"].activation, captures["layer4"].gradient

The full backward hook does not sit on the layer itself but on a probe, an `nn.Identity` that the forward hook lets the
layer's output pass through. On the layer it would fail wherever the model goes on to change the output in place
(`nn.ReLU(inplace=True)` behind a convolution, `F.relu(x, inplace=True)` in DenseNet, `out += identity` in a ResNet),
and it would make autograd go back through the layer, for a gradient at its input that nobody wants. What the probe lets
through is cloned behind it, outside the hooked module, so that what the model does with it cannot reach the capture.

The output is cut from the graph before the probe (unless a layer watched before it needs the graph): nothing up to and
including the layer is differentiated.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # every shape of output that torch itself knows

from camserve_server.core.errors import FailedPrecondition
from camserve_server.models.values import Layout

Hook = Callable[[nn.Module, tuple[Any, ...], Any], Any]

Glance = Callable[[str, Tensor], Callable[[Tensor], None]]
"""A layer's name and what it returned, without a graph -> what shall be told the gradient there."""


@dataclass(slots=True)
class Capture:
    """What one layer gave in the last of its calls.

    Attributes:
        activation: its output, without a graph.
        source: the same on the graph of the layers behind it, to be differentiated more than once.
        gradient: of the score with respect to it, after a backward pass; None before one, or where the score does not
            depend on it.
    """

    activation: Tensor
    source: Tensor = field(repr=False)
    gradient: Tensor | None = None
    _version: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        self._version = self.activation._version  # noqa: SLF001 -- torch has no other count of in-place changes

    def intact(self) -> bool:
        """Tell whether the activation is still what the layer returned."""
        return self.activation._version == self._version  # noqa: SLF001 -- as above

    def keep(self, _probe: nn.Module, _input: Any, output: tuple[Tensor | None, ...]) -> None:
        """Keep the gradient: the full backward hook."""
        # A copy: autograd may go on to add to this very memory. None where what is differentiated twice is linear.
        self.gradient = None if output[0] is None else output[0].detach().clone()


@contextmanager
def capture_layers(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, Capture]]:
    """Capture what the layers return, and the gradients that come back to them.

    Leaves no hook behind, however the block ends. Where one pass calls a layer several times, the last call counts.

    Args:
        layers: the modules, by the names under which their captures are wanted.

    Yields:
        The captures by name; empty until the model has run.
    """
    captures: dict[str, Capture] = {}
    with ExitStack() as stack:
        for name, layer in layers.items():
            stack.enter_context(layer.register_forward_hook(_tap(name, captures)))
        yield captures


@contextmanager
def observe_layers(layers: Mapping[str, nn.Module], glance: Glance) -> Iterator[None]:
    """Show what the layers return, and the gradients that come back to them, without keeping any of it.

    Leaves no hook behind, however the block ends. A layer that one pass calls several times is shown each time; one
    that returns no tensor of numbers, or an empty one, is not shown.

    Args:
        layers: the modules, by name.
        glance: is shown every output as it comes; what it returns is told the gradient if one comes back.
    """
    with ExitStack() as stack:
        for name, layer in layers.items():
            stack.enter_context(layer.register_forward_hook(_shown(name, glance)))
        yield


def _shown(name: str, glance: Glance) -> Hook:
    def forward_hook(_layer: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        parts, structure = pytree.tree_flatten(output)
        place = next((i for i, part in enumerate(parts) if _differentiable(part)), None)
        if place is None or not parts[place].numel():
            return output
        tell = glance(name, parts[place].detach())
        parts[place] = _through_probe(_on_graph(parts[place]), lambda _probe, _input, found: tell(found[0].detach()))
        return pytree.tree_unflatten(parts, structure)

    return forward_hook


@contextmanager
def silencing(layer: nn.Module, layout: Layout, channels: Sequence[int | None]) -> Iterator[None]:
    """Set channels of a layer's output to zero.

    Args:
        layer: the module.
        layout: of its output.
        channels: for each image of the batch, the channel to silence, or None.
    """

    def forward_hook(_layer: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        parts, structure = pytree.tree_flatten(output)
        place = next(i for i, part in enumerate(parts) if _differentiable(part))
        parts[place] = parts[place].clone()
        for image, channel in enumerate(channels):
            if channel is not None:
                _channel(parts[place][image], layout, channel).zero_()
        return pytree.tree_unflatten(parts, structure)

    with layer.register_forward_hook(forward_hook):
        yield


def _channel(output: Tensor, layout: Layout, channel: int) -> Tensor:
    """Return a view of one channel over the grid, in one image's output."""
    if layout.axes == "nchw":
        return output[channel]
    return output[layout.prefix :, channel] if layout.axes == "tokens" else output[..., channel]


def _tap(name: str, captures: dict[str, Capture]) -> Hook:
    def forward_hook(_layer: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        parts, structure = pytree.tree_flatten(output)
        place = next((i for i, part in enumerate(parts) if _differentiable(part)), None)
        if place is None:
            raise FailedPrecondition(f'layer "{name}" returns no tensor of numbers')
        captures[name], parts[place] = probed(parts[place])
        return pytree.tree_unflatten(parts, structure)

    return forward_hook


def probed(output: Tensor) -> tuple[Capture, Tensor]:
    """Let a tensor pass through a probe.

    Returns:
        Its capture, and what the model shall go on with.
    """
    source = _on_graph(output)
    capture = Capture(source.detach(), source)
    return capture, _through_probe(source, capture.keep)


def _on_graph(output: Tensor) -> Tensor:
    return output if output.requires_grad else output.detach().requires_grad_()


def _through_probe(source: Tensor, backward_hook: Hook) -> Tensor:
    probe = nn.Identity()
    probe.register_full_backward_hook(backward_hook)
    through: Tensor = probe(source)
    # The probe's view of one channels-last image has odd strides, with which torch 2.14's batch norm goes back wrongly.
    return through.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, slots=True)
class Span:
    """One call of a module, during which something happened once.

    Attributes:
        module: that was called.
        step: what had happened before, and so the index of what happened in it.
        given: the first tensor of its arguments.
        returned: the first tensor of its output.
    """

    module: nn.Module
    step: int
    given: Tensor | None
    returned: Tensor | None


@contextmanager
def spanning(model: nn.Module, steps: Callable[[], int]) -> Iterator[list[Span]]:
    """Find the modules that take exactly one of a model's steps.

    Args:
        model: whose modules are followed.
        steps: how many the model has taken so far.

    Yields:
        Their calls, an inner module's before that of the one around it; empty until the model has run.
    """
    spans: list[Span] = []
    begun: list[tuple[int, Tensor | None]] = []

    def enter(_module: nn.Module, args: Any, kwargs: Any) -> None:
        begun.append((steps(), first_tensor((args, kwargs))))

    def leave(module: nn.Module, _args: Any, output: Any) -> None:
        step, given = begun.pop()
        if steps() == step + 1:
            spans.append(Span(module, step, given, first_tensor(output)))

    with ExitStack() as stack:
        for module in model.modules():
            stack.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
            stack.enter_context(module.register_forward_hook(leave))
        yield spans


@contextmanager
def replacing(layer: nn.Module, tensor: Tensor) -> Iterator[None]:
    """Let the model go on with another tensor in place of the first one that a layer returns."""

    def forward_hook(_layer: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        parts, structure = pytree.tree_flatten(output)
        place = next(i for i, part in enumerate(parts) if _differentiable(part))
        parts[place] = tensor
        return pytree.tree_unflatten(parts, structure)

    with layer.register_forward_hook(forward_hook):
        yield


@contextmanager
def embedding_of(model: nn.Module, layer: str) -> Iterator[list[Tensor]]:
    """Keep what goes into a linear layer, on the graph; nothing where no layer is named.

    Args:
        model: that the layer is a module of.
        layer: its name, or nothing.

    Yields:
        What went in, [B,E] each, a list entry for each call.
    """
    kept: list[Tensor] = []
    if not layer:
        yield kept
        return
    with model.get_submodule(layer).register_forward_pre_hook(lambda _layer, args: kept.append(args[0])):
        yield kept


def output_of(model: nn.Module, layer: str, images: Tensor) -> Tensor:
    """Run a model; return the first tensor that a layer returned, as it was then."""
    kept: list[Tensor] = []

    def keep(_layer: nn.Module, _args: Any, output: Any) -> None:
        kept.extend(part.clone() for part in pytree.tree_leaves(output)[:1])

    with model.get_submodule(layer).register_forward_hook(keep):
        model(images.clone())
    return kept[-1]


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether a module has forward hooks or forward pre-hooks, which observe or change its input and output."""
    return bool(module._forward_hooks or module._forward_pre_hooks)  # noqa: SLF001 -- torch has no public name for it


def hook_count(model: nn.Module) -> int:
    """Count the hooks of every kind on a model and its modules: 0 between two passes."""
    return sum(
        len(hooks)
        for module in model.modules()
        for name, hooks in vars(module).items()
        if name.endswith("_hooks") and "state_dict" not in name
    )


def first_tensor(output: Any) -> Tensor | None:
    """Return the first tensor of a module's output, which is the one captured, or None."""
    return next((part for part in pytree.tree_leaves(output) if _differentiable(part)), None)


def _differentiable(part: Any) -> bool:
    return isinstance(part, Tensor) and part.is_floating_point()
