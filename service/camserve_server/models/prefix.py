"""What a transformer computes behind a layer that its answer is not made of.

Many transformers answer by their class token alone, so that of what the last block computes behind its attention, that
token's part is all that reaches the answer, and all that a gradient comes back through. The rest need not be computed.
Whether that is so is found by trying, with NaN in place of the other tokens: where they matter, it reaches the answer.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree  # every shape of output that torch itself knows

from camserve_server.hooks import first_tensor, watching
from camserve_server.models.uses import hooked
from camserve_server.types import ModelInfo

Forward: TypeAlias = Callable[..., Any]

APART = 1e-5
"""How far the gradient at the layer may be from the model's, as a share of its norm."""

_TOKENS = 3
"""Dimensions of tokens [B,N,C]."""


def partial_to(module: nn.Module, info: ModelInfo, image: Tensor, attentions: Collection[str]) -> dict[str, int]:
    """Find the modules behind the default layer that need to be run on its prefix alone: class and register tokens.

    Args:
        module: frozen.
        info: of it.
        image: one, as the model gets it.
        attentions: the names of those behind the layer that can do so.

    Returns:
        By the names of attentions that only the prefix has to ask, and of modules that treat each token by itself (none
        of them inside of another), how many tokens that is.
    """
    layout = info.layers[info.default_layer].layout
    if layout is None or layout.axes != "tokens" or not layout.prefix:
        return {}
    prefix, length = layout.prefix, layout.prefix + layout.height * layout.width
    expected, gradient = _answers(module, info.default_layer, image)
    with torch.no_grad():
        plain = _said(module, image)  # attention without a graph has other kernels, which round in another way
    found: dict[str, int] = {}
    for name, given in _called(module, info.default_layer, image, length).items():
        if any(name.startswith(outer + ".") for outer in found):
            continue
        alone = name in attentions or _treats_each_alone(module.get_submodule(name), given, prefix)
        if alone and _is_last(module, name, image, prefix, plain):
            found[name] = prefix
    with _changed(module, found, lambda tokens: padded(tokens[:, :prefix], length)):
        answer, back = _answers(module, info.default_layer, image)
    same = torch.equal(answer, expected) and float((back - gradient).norm()) <= APART * float(gradient.norm())
    return found if same else {}


def on_prefix(forward: Forward, prefix: int, tokens: Tensor) -> Tensor:
    """Call what treats each token by itself with the first tokens of [B,N,C]; what it returns is 0 for the others."""
    return padded(forward(tokens[:, :prefix]), tokens.shape[1])


def padded(tokens: Tensor, length: int) -> Tensor:
    """Return [B,n,C] with zeros behind, [B,length,C]."""
    return functional.pad(tokens, (0, 0, 0, length - tokens.shape[1])) if tokens.shape[1] < length else tokens


def _answers(module: nn.Module, layer: str, image: Tensor) -> tuple[Tensor, Tensor]:
    """Return all that a model says of an image, flat, and how some score of it differentiates at a layer."""
    with torch.enable_grad(), watching({layer: module.get_submodule(layer)}) as captures:
        said = _said(module, image)
        weights = torch.randn(len(said), generator=torch.Generator().manual_seed(0))
        (said * weights.to(said)).sum().backward()  # type: ignore[no-untyped-call]  # torch's
    gradient = captures[layer].gradient
    return said.detach(), torch.zeros_like(captures[layer].activation) if gradient is None else gradient


def _said(module: nn.Module, image: Tensor) -> Tensor:
    return torch.cat([part.flatten() for part in pytree.tree_leaves(module(image)) if isinstance(part, Tensor)])


def _called(module: nn.Module, layer: str, image: Tensor, length: int) -> dict[str, Tensor]:
    """Run a model; return what modules behind a layer were given, where that is so many tokens, and nothing else."""
    given: dict[str, list[Tensor]] = {}
    done: list[bool] = []

    def note(name: str, args: tuple[Any, ...], output: Any) -> None:
        first = first_tensor(output)
        if done and first is not None and all(one is args[0] for one in args):
            known = [one for one in (args[0], first) if isinstance(one, Tensor) and one.dim() == _TOKENS]
            if [one.shape[1] for one in known] == [length, length]:
                given.setdefault(name, []).append(args[0])

    with ExitStack() as stack, torch.no_grad():
        for name, one in module.named_modules():
            weighs = any(True for _ in one.parameters())  # else there is little to save
            if weighs and not (hooked(one) or f"{layer}.".startswith(f"{name}.".lstrip("."))):
                hook = one.register_forward_hook(lambda _module, args, output, name=name: note(name, args, output))
                stack.enter_context(hook)
        stack.enter_context(module.get_submodule(layer).register_forward_hook(lambda *_: done.append(True)))
        module(image)
    return {name: given[name][0] for name, _ in module.named_modules() if len(given.get(name, ())) == 1}


def _treats_each_alone(one: nn.Module, given: Tensor, prefix: int) -> bool:
    """Tell whether a module returns the same for the first tokens, whether others are there or not."""
    with torch.no_grad():
        try:
            whole, poisoned, apart = one(given), one(_without(given, prefix)), one(given[:, :prefix])
        except (RuntimeError, TypeError, ValueError):  # it wants more than that
            return False
        if not all(isinstance(found, Tensor) and found.dim() == _TOKENS for found in (whole, poisoned, apart)):
            return False
        first = whole[:, :prefix]
        same = torch.equal(poisoned[:, :prefix], first) and apart.shape == first.shape
        return same and torch.allclose(apart, first, atol=APART)


def _is_last(module: nn.Module, name: str, image: Tensor, prefix: int, expected: Tensor) -> bool:
    """Tell whether nothing else of what a module returns has a part in the answer that is expected without a graph."""
    with torch.no_grad(), _changed(module, [name], lambda tokens: _without(tokens, prefix)):
        return torch.equal(_said(module, image), expected)


def _without(tokens: Tensor, prefix: int) -> Tensor:
    """Return tokens with NaN behind the prefix."""
    poisoned = tokens.clone()
    poisoned[:, prefix:] = torch.nan
    return poisoned


@contextmanager
def _changed(module: nn.Module, names: Collection[str], change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Change the first tensor that some modules return."""

    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        parts, structure = pytree.tree_flatten(output)
        place = next(i for i, part in enumerate(parts) if isinstance(part, Tensor))
        parts[place] = change(parts[place])
        return pytree.tree_unflatten(parts, structure)

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(module.get_submodule(name).register_forward_hook(hook))
        yield
