"""Looks at a model once: which layers run, where their grids are, which of them the score depends on."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # every shape of output that torch itself knows

from camserve_server.core.errors import ConfigError
from camserve_server.models import grid, layout_probe
from camserve_server.models.hooks import first_tensor
from camserve_server.models.layout_probe import Reading
from camserve_server.models.tasks import Trial
from camserve_server.models.values import LayerInfo, Layout

NO_TENSOR = "it returns no tensor of numbers"
NO_GRID = "its output has no grid over the image"
NO_IMAGES = "its output has no grid over the image: its first axis is not the images, but windows, heads or a table"
NO_ORDER = "its output has no grid over the image: what it holds is not in the order of the image's rows and columns"
NO_CERTAINTY = "its output has no grid over the image that can be told: neither its shape nor a trial run shows it"
NO_GRADIENT = "the score does not depend on its grid: every gradient there is zero"

Place: TypeAlias = Layout | str
"""Where a layer's grid is, or the reason why it has none."""


@dataclass(frozen=True, slots=True)
class LayerObservation:
    """What one run of the ramps showed of a layer.

    Attributes:
        shape: of its output; None if it returned no tensor.
        readings: of the grids that it may have.
        images: whether its first axis is the images.
    """

    shape: tuple[int, ...] | None
    readings: tuple[Reading, ...] = ()
    images: bool = True


def probe(
    model: nn.Module, size: tuple[int, int], device: str, trial: Trial | None = None
) -> tuple[dict[str, LayerInfo], int]:
    """Run the model forward and back once, then forward on the ramps, and describe every layer that ran.

    Args:
        model: frozen, in evaluation mode, on its device.
        size: height and width of its input.
        device: that it is on.
        trial: learns what the model answers with.

    Returns:
        The layers by name, in the order in which they finish; and the number of classes.

    Raises:
        ConfigError: the model does not run, or does not answer with what it should.
    """
    images, trial = layout_probe.images(size).to(device), trial or Trial()
    with torch.enable_grad(), trial.running(model), _watched(model, _own) as calls:
        scores = trial.scores(model, _output(model, images[:1].requires_grad_()))
        last = {name: outputs[-1] for name, outputs in calls.items()}
        trial.seek(model, last)
        gradients = _gradients(scores, last)
    places = find(_sights(model, images) or _shapes(calls), size)
    modules = dict(model.named_modules())
    layers = {
        name: _describe(name, modules[name], outputs, places.get(name, NO_IMAGES), gradients[name])
        for name, outputs in calls.items()
    }
    return layers, trial.classes


def default_layer(model: nn.Module, layers: Mapping[str, LayerInfo]) -> str:
    """Return the last layer to finish that can be explained and that is a feature map of the trunk.

    What is inside an attention (queries, keys, values) is no feature of the image by itself: the norm before it is
    taken, which in the last block of a transformer with a class token is the last through which its patches reach the
    score. Among tokens it is a norm, or a module with modules inside, as a block: no lone linear map. Modules that
    only pass on what they get are named by whose output it is.

    Raises:
        ConfigError: there is none.
    """
    explainable = [layer for layer in layers.values() if layer.layout]
    if not explainable:
        raise ConfigError("it has no layer with a grid over the image that the score depends on")
    modules = dict(model.named_modules())
    trunk = (one for one in reversed(explainable) if _is_trunk(one, modules))
    return next(trunk, explainable[-1]).name


def _is_trunk(layer: LayerInfo, modules: Mapping[str, nn.Module]) -> bool:
    parts = layer.name.split(".")
    above = [type(modules[".".join(parts[:end])]).__name__.lower() for end in range(1, len(parts))]
    if any("attn" in kind or "attention" in kind for kind in above) or layer.type in PASSING:
        return False
    tokens = layer.layout is not None and layer.layout.axes == "tokens"
    return not tokens or "norm" in layer.type.lower() or any(modules[layer.name].children())


PASSING = ("Identity", "Dropout", "DropPath", "StochasticDepth", "Permute", "AdaptiveAvgPool2d")
"""Types of modules that only pass on what they get, in evaluation mode and at the size that the model is made for."""


@contextmanager
def _watched(model: nn.Module, look: Callable[[Any, Any], tuple[Any, Any]]) -> Iterator[dict[str, list[Any]]]:
    """Yield what `look` sees in each module's output, an entry for each call, in the order of their last ends.

    Args:
        model: whose modules are watched.
        look: takes what a module got and returned; gives what is kept, and what the model goes on with.
    """
    calls: dict[str, list[Any]] = {}

    def keep(name: str) -> Any:
        def hook(_module: nn.Module, args: Any, output: Any) -> Any:
            kept, passed = look(args, output)
            calls[name] = [*calls.pop(name, []), kept]
            return passed

        return hook

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name:
                stack.enter_context(module.register_forward_hook(keep(name)))
        yield calls


def _own(args: Any, output: Any) -> tuple[Tensor | None, Any]:
    """Give an output a tensor of its own, to differentiate by, where others may have the tensor that is returned.

    A module that returns what it got would otherwise share the gradient of all else that is done with that. One that
    returns several tensors may have made the others from the first, and what is behind it may take those alone: then
    the score does not depend on the first where it is captured.
    """
    first = first_tensor(output)
    parts, structure = pytree.tree_flatten(output)
    several = sum(isinstance(part, Tensor) for part in parts) > 1
    if first is None or not (several or any(first is part for part in pytree.tree_leaves(args))):
        return first, output
    own = first.clone()
    changed = [own if part is first else part for part in parts]
    return own, pytree.tree_unflatten(changed, structure)


def _output(model: nn.Module, image: Tensor) -> Any:
    try:
        return model(image.clone())  # it may change its input in place, but not a leaf
    except Exception as error:
        size = "x".join(map(str, image.shape[2:]))
        raise ConfigError(f"it does not run on an image of {size} pixels: {error}") from error


def _gradients(scores: Tensor, outputs: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Return the gradient of a mixture of all scores [1, n], at each output."""
    wanted = {name: out for name, out in outputs.items() if out is not None and out.requires_grad}
    mix = torch.randn(scores.shape, generator=torch.Generator().manual_seed(1)).to(scores)
    found = torch.autograd.grad((scores * mix).sum(), list(wanted.values()), allow_unused=True)
    return dict.fromkeys(outputs) | dict(zip(wanted, found, strict=True))


def _sights(model: nn.Module, images: Tensor) -> dict[str, LayerObservation]:
    """Run the ramps, and read each layer's output at once, so that no two outputs need be held."""
    size = (images.shape[2], images.shape[3])
    last: list[Any] = [None, None]

    def look(_args: Any, output: Any) -> tuple[LayerObservation, Any]:
        tensor = first_tensor(output)
        if tensor is None:
            return LayerObservation(None), output
        if tensor is not last[0]:  # a block returns what its last module returned
            last[:] = tensor, _see(tensor, size)
        return last[1], output

    try:
        with torch.no_grad(), _watched(model, look) as calls:
            model(images)
    except Exception:  # noqa: BLE001 -- a model that takes one image at a time is read by its shapes alone
        return {}
    return {name: seen[-1] for name, seen in calls.items()}


def _see(output: Tensor, size: tuple[int, int]) -> LayerObservation:
    shape = tuple(output.shape)
    if not shape or shape[0] != layout_probe.COPIES:
        return LayerObservation(shape, images=False)
    return LayerObservation(shape, layout_probe.read(output, grid.candidates(shape, size)))


def _shapes(calls: Mapping[str, list[Tensor | None]]) -> dict[str, LayerObservation]:
    shapes = {name: None if one is None else tuple(one.shape) for name, (*_, one) in calls.items()}
    return {
        name: LayerObservation(shape, images=shape is not None and shape[:1] == (1,)) for name, shape in shapes.items()
    }


def find(seen: Mapping[str, LayerObservation], size: tuple[int, int]) -> dict[str, Place]:
    """Find each layer's grid: by what the ramps showed; else by other layers of its shape; else by its own shape.

    Args:
        seen: of each layer.
        size: height and width of the image.
    """
    sure = {name: one.readings[-1].layout for name, one in seen.items() if one.readings and one.readings[-1].sure}
    usual = _usual((layout for layout in sure.values() if layout.axes == "tokens"), size)
    sure = {name: usual.get(_count(layout), layout) for name, layout in sure.items()}
    known = _Known(
        size=size,
        alike={(seen[name].shape or ())[1:]: layout for name, layout in sure.items()},
        prefixes={layout.prefix for layout in sure.values() if layout.axes == "tokens"},
        tokens={layout.prefix + layout.height * layout.width for layout in sure.values()}
        | {one.shape[1] for one in seen.values() if one.shape and len(one.shape) == 3},  # noqa: PLR2004 -- [B,N,C]
    )
    return {name: sure.get(name) or _doubtful(one, known) for name, one in seen.items()}


def _usual(layouts: Iterable[Layout], size: tuple[int, int]) -> dict[int, Layout]:
    """Return, by how many tokens there are, the layout that layers with so many have.

    A part of a grid fits nearly as well as the whole: 16 tokens and one more can be read as the last three rows of four
    and five more. What happens in one layer by chance does not in most of them, and it happens the likelier the fewer
    places there are: each layer's vote counts by how many it has. Of those with some votes the ones nearest to the
    image's proportions are left, for patches are cut from the image in both directions alike.
    """
    found: dict[int, Counter[Layout]] = {}
    for layout in layouts:
        found.setdefault(_count(layout), Counter())[layout] += layout.height * layout.width
    return {tokens: _elected(votes, size) for tokens, votes in found.items()}


def _elected(votes: Counter[Layout], size: tuple[int, int]) -> Layout:
    some = [layout for layout, count in votes.items() if count * 4 >= votes.total()] or list(votes)
    least = min(grid.distortion(layout, size) for layout in some)
    return max((layout for layout in some if grid.distortion(layout, size) == least), key=votes.__getitem__)


def _count(layout: Layout) -> int:
    """Return how many tokens a layout has; 0 where it has none, which no layout of tokens does."""
    return layout.prefix + layout.height * layout.width if layout.axes == "tokens" else 0


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of a model from the layers in which places show.

    Attributes:
        size: height and width of the image.
        alike: layouts by the shape, without the batch.
        prefixes: how many tokens come before a grid's first.
        tokens: how many tokens there are.
    """

    size: tuple[int, int]
    alike: Mapping[tuple[int, ...], Layout]
    prefixes: Collection[int]
    tokens: Collection[int]


def _doubtful(one: LayerObservation, known: _Known) -> Place:
    """Find the grid of a layer in which the ramps showed nothing for certain."""
    if one.shape is None:
        return NO_TENSOR
    if not one.images or not one.shape:
        return NO_IMAGES if len(one.shape) > 2 else NO_GRID  # noqa: PLR2004 -- [B,C] is no window
    likely = grid.candidates(one.shape, known.size)
    if not likely:
        return NO_GRID
    wrong = [reading.layout for reading in one.readings if reading.wrong]
    if any(layout.axes == "tokens" for layout in wrong):  # the order is the same, whatever rectangle it is read as
        return NO_ORDER
    left = [layout for layout in likely if layout not in wrong and not _is_matrix(layout, one.shape, known)]
    return (_by_shape(one, left, known) or NO_CERTAINTY) if left else NO_ORDER


def _by_shape(one: LayerObservation, likely: list[Layout], known: _Known) -> Layout | None:
    """Take what layers of the same shape have; else the only grid that fits. Tokens fit several, behind any prefix."""
    alike = known.alike.get((one.shape or ())[1:])
    if alike in likely:
        return alike
    if likely[0].axes == "tokens":
        blind = bool(one.readings) and all(reading.blind for reading in one.readings)
        likely = [layout for layout in likely if blind and layout.prefix in known.prefixes]
    return likely[0] if len(likely) == 1 else None


def _is_matrix(layout: Layout, shape: tuple[int, ...], known: _Known) -> bool:
    """Tell whether a grid is more likely attention: a row and a column for each token, and fewer heads than those."""
    side = layout.height
    return side == layout.width and side in known.tokens and math.prod(shape[1:]) < side**3


def _describe(
    name: str, module: nn.Module, outputs: list[Tensor | None], place: Place, gradient: Tensor | None
) -> LayerInfo:
    output = outputs[-1]
    layout, reason = (None, place) if isinstance(place, str) else (place, "")
    if layout and not _alive(gradient, layout):
        layout, reason = None, NO_GRADIENT
    return LayerInfo(
        name=name,
        type=type(module).__name__,
        shape=tuple(output.shape) if output is not None else (),
        parameters=sum(p.numel() for p in module.parameters()),
        calls=len(outputs),
        layout=layout,
        reason=reason,
    )


def _alive(gradient: Tensor | None, layout: Layout) -> bool:
    return gradient is not None and bool(grid.to_grid(gradient, layout).any())
