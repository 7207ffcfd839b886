"""Looks at a model once: which layers run, where their grids are, which of them the score depends on."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from camserve_server.errors import ConfigError
from camserve_server.hooks import first_tensor
from camserve_server.models import grid
from camserve_server.types import LayerInfo, Layout

NO_GRID = "its output has no grid over the image"
NO_GRADIENT = "the score does not depend on its grid: every gradient there is zero"


def probe(model: nn.Module, size: tuple[int, int], device: str) -> tuple[dict[str, LayerInfo], int]:
    """Run the model forward and back once, and describe every layer that ran.

    Args:
        model: frozen, in evaluation mode, on its device.
        size: height and width of its input.
        device: that it is on.

    Returns:
        The layers by name, in the order in which they finish; and the number of classes.

    Raises:
        ConfigError: the model does not run, or does not answer with [batch, classes].
    """
    image = torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(0)).to(device) * 2 - 1
    with torch.enable_grad(), _outputs(model) as calls:
        logits = _logits(model, image.requires_grad_())
        gradients = _gradients(logits, {name: outputs[-1] for name, outputs in calls.items()})
    modules, layouts = dict(model.named_modules()), _layouts(model, calls)
    layers = {
        name: _describe(name, modules[name], outputs, layouts[name], gradients[name]) for name, outputs in calls.items()
    }
    return layers, logits.shape[1]


def default_layer(layers: dict[str, LayerInfo]) -> str:
    """Return the last layer to finish that can be explained; among tokens, the last norm.

    Behind the first norm of a transformer's last block, only the class token still reaches the score. What comes
    between that norm and the attention (queries, keys, values) is no feature of the image by itself.

    Raises:
        ConfigError: there is none.
    """
    explainable = [layer for layer in layers.values() if layer.layout]
    if not explainable:
        raise ConfigError("it has no layer with a grid over the image that the score depends on")
    last = explainable[-1]
    if last.layout and last.layout.axes == "tokens":
        last = next((one for one in reversed(explainable) if "norm" in one.type.lower()), last)
    return last.name


@contextmanager
def _outputs(model: nn.Module) -> Iterator[dict[str, list[Tensor | None]]]:
    """Yield what each module returned, a list entry for each call, in the order of their last calls' ends."""
    calls: dict[str, list[Tensor | None]] = {}

    def keep(name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            calls[name] = [*calls.pop(name, []), first_tensor(output)]

        return hook

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name:
                stack.enter_context(module.register_forward_hook(keep(name)))
        yield calls


def _logits(model: nn.Module, image: Tensor) -> Tensor:
    try:
        output = model(image.clone())  # it may change its input in place, but not a leaf
    except Exception as error:
        size = "x".join(map(str, image.shape[2:]))
        raise ConfigError(f"it does not run on an image of {size} pixels: {error}") from error
    logits = first_tensor(output)
    if isinstance(output, dict | list) or logits is None or logits.dim() != 2:  # noqa: PLR2004 -- [batch, classes]
        shape = f"a tensor {list(logits.shape)}" if logits is not None else "no tensor"
        raise ConfigError(f"it is no classifier: it answers with {shape}, not [batch, classes]")
    return logits


def _gradients(logits: Tensor, outputs: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Return the gradient of a score that depends on every logit, at each output."""
    wanted = {name: out for name, out in outputs.items() if out is not None and out.requires_grad}
    mix = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits)
    found = torch.autograd.grad((logits * mix).sum(), list(wanted.values()), allow_unused=True)
    return dict.fromkeys(outputs) | dict(zip(wanted, found, strict=True))


def _layouts(model: nn.Module, calls: dict[str, list[Tensor | None]]) -> dict[str, Layout | None]:
    last = {name: outputs[-1] for name, outputs in calls.items()}
    tokens = {one.shape[1] for one in last.values() if one is not None and one.dim() == 3}  # noqa: PLR2004 -- [B,N,C]
    found = {name: None if one is None else grid.find(one, model, tokens) for name, one in last.items()}
    if any(layout and layout.axes == "nhwc" for layout in found.values()):
        # Where some layers have their channels last, a layer that does not show which way round it is has no grid.
        found |= {name: None for name, one in last.items() if one is not None and grid.ambiguous(one)}
    return found


def _describe(
    name: str, module: nn.Module, outputs: list[Tensor | None], layout: Layout | None, gradient: Tensor | None
) -> LayerInfo:
    output = outputs[-1]
    alive = layout is not None and _alive(gradient, layout)
    return LayerInfo(
        name=name,
        type=type(module).__name__,
        shape=tuple(output.shape) if output is not None else (),
        parameters=sum(p.numel() for p in module.parameters()),
        calls=len(outputs),
        layout=layout if alive else None,
        reason="" if alive else NO_GRADIENT if layout else NO_GRID,
    )


def _alive(gradient: Tensor | None, layout: Layout) -> bool:
    return gradient is not None and bool(grid.to_grid(gradient, layout).any())
