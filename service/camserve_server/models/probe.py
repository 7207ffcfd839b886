"""Probe a model when it is loaded: which layers run, where their grids are, and which the score depends on."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # flattens every output structure that torch knows

from camserve_server.core.devices import device_for
from camserve_server.core.errors import ConfigError
from camserve_server.models import faults, grid, independence, layout_probe, live, stem
from camserve_server.models.hooks import changes_in_place, first_tensor
from camserve_server.models.independence import Dependence
from camserve_server.models.layout_probe import PLAIN, Reading
from camserve_server.models.tasks import Trial
from camserve_server.models.values import LayerInfo, Layout

NO_TENSOR = "it returns no tensor of numbers"
NO_GRID = "its output has no grid over the image"
NO_BATCH_AXIS = "its output has no grid over the image: its first axis is not the batch, but windows, heads or a table"
OTHER_ORDER = "its output has no grid over the image: its values are not in the order of the image's rows and columns"
UNKNOWN_GRID = "its output has no grid over the image that is certain: neither its shape nor a trial run shows one"
QUERIES = "its output has no grid over the image: it has one token per object, not per place"
ZERO_GRADIENT = "the score does not depend on its grid: every gradient there is zero"

RGB = 3  # channels

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)

GridOrReason: TypeAlias = Layout | str
"""The layout of a layer's grid, or the reason why it has no grid."""

PASS_THROUGH_TYPES = ("Identity", "Dropout", "Dropout2d", "DropPath", "StochasticDepth", "Permute", "AdaptiveAvgPool2d")
"""Types of modules that return their input unchanged, in evaluation mode and at the input size of the model."""


@dataclass(frozen=True, slots=True)
class LayerObservation:
    """The result of one run of a layer on the images of the layout probe.

    Attributes:
        shape: the shape of its output; None if it returned no tensor.
        readings: the possible layouts of the output, and how well each fits.
        has_batch_axis: True if the first axis is the batch.
    """

    shape: tuple[int, ...] | None
    readings: tuple[Reading, ...] = ()
    has_batch_axis: bool = True


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of a model on an image.

    Attributes:
        image: the image [1,C,H,W], a leaf of the graph.
        scores: scores [1,n] that together depend on the whole output, on the graph.
        output: the first tensor of the output.
        calls: the first tensor that each module returned, on the graph, one for each call, in the order in which the
            last calls end.
        intact: the last tensor of each module, if no later module has changed it in place.
    """

    image: Tensor
    scores: Tensor
    output: Tensor | None
    calls: dict[str, list[Tensor | None]]
    intact: dict[str, Tensor | None]

    @property
    def last(self) -> dict[str, Tensor | None]:
        """The last tensor that each module returned."""
        return {name: outputs[-1] for name, outputs in self.calls.items()}

    def gradients(self, *, image: bool = True) -> dict[str, Tensor | None]:
        """Return the gradient of a random mixture of all scores at each module's output, and at the image as ""."""
        outputs = {**self.last, "": self.image} if image else self.last
        differentiable = {name: out for name, out in outputs.items() if out is not None and out.requires_grad}
        if not self.scores.requires_grad:
            return dict.fromkeys(outputs)
        generator = torch.Generator().manual_seed(1)
        weights = torch.randn(self.scores.shape, generator=generator, dtype=torch.float32).to(self.scores)
        mixture = (self.scores * weights).sum()
        gradients = torch.autograd.grad(mixture, list(differentiable.values()), allow_unused=True)
        return dict.fromkeys(outputs) | dict(zip(differentiable, gradients, strict=True))


def probe(
    model: nn.Module, size: tuple[int, int], device: str, trial: Trial | None = None, *, channels: int = 3
) -> tuple[dict[str, LayerInfo], int]:
    """Describe every layer that runs: one forward and backward pass, and a forward pass on the layout probe's images.

    Args:
        model: the frozen module, in evaluation mode, on its device.
        size: height and width of its input.
        device: its device.
        trial: receives the model's output, and finds its task.
        channels: the number of channels of its input.

    Returns:
        The layers by name, in the order in which they finish; and the number of classes.

    Raises:
        ConfigError: the model does not run, or its output does not fit its task.
    """
    images, trial = layout_probe.images(size, channels).to(device, live.dtype_of(model)), trial or Trial()
    image = images[PLAIN : PLAIN + 1]
    with trial.recording(model):
        first = _first_run(model, image, trial, size)
        trial.find_ending(model, first.last)
        run, gradients = _find_gradients(model, first, image, trial, size)
        trial.find_trunk(model, run.last)
    alone = {**first.intact, "": first.output}
    observed, trial.dependence = _observe(model, images, trial.queries, alone)
    observations = observed or _observe_shapes(run.calls)
    grids = _with_single_cells(find_grids(observations, size, trial.queries), observations)
    modules = dict(model.named_modules())
    layers = {
        name: _describe(
            name,
            modules[name],
            outputs,
            grids.get(name, NO_BATCH_AXIS),
            gradients.get(name),
            feeds_heads=name in trial.graph.layers,
        )
        for name, outputs in run.calls.items()
    }
    trial.differentiable = gradients[""] is not None
    if not _reaches_image(gradients):
        layers = {name: _without_gradient(layer, gradients.get(name), trial) for name, layer in layers.items()}
    return layers, trial.classes


def _first_run(model: nn.Module, image: Tensor, trial: Trial, size: tuple[int, int]) -> _Run:
    """Run a model for gradients; if it fails, without: it may convert tensors to arrays, which have none."""
    try:
        return _run(model, image, trial, size)
    except ConfigError:
        with suppress(ConfigError):
            return _run(model, image, trial, size, graph=False)
        raise


def _find_gradients(
    model: nn.Module, run: _Run, image: Tensor, trial: Trial, size: tuple[int, int]
) -> tuple[_Run, dict[str, Tensor | None]]:
    """Return the gradients of a run's scores at each module's output, and the run.

    They may all be zero for one image, as those of a network that ends in a ReLU. Then other images are tried. Without
    a gradient at the input, there may be one at later modules, whose outputs are then made the start of the graph.
    """
    try:
        gradients = run.gradients()
    except RuntimeError:  # of a change in place between the image and the layers: there is a gradient at the layers
        run = _run(model, image, trial, size)
        gradients = run.gradients(image=False)
        return run, {**gradients, "": torch.ones(1)}
    if gradients[""] is None:
        with suppress(ConfigError):
            gradients = _run(model, image, trial, size, cut=True).gradients()
        return run, gradients
    for other in () if _reaches_image(gradients) else _other_images(image):
        other_run = _run(model, other, trial, size)
        found = other_run.gradients()
        if _reaches_image(found):
            return other_run, found
    return run, gradients


def _other_images(image: Tensor) -> Iterator[Tensor]:
    """Yield images of other brightness and contrast."""
    for contrast, brightness in ((0.25, 2.0), (0.25, -2.0), (1.0, 1.0), (1.0, -1.0), (4.0, 0.0), (0.0, 0.5)):
        yield contrast * image + brightness


def _reaches_image(gradients: Mapping[str, Tensor | None]) -> bool:
    """Return whether the gradient at the image has a value other than zero."""
    return gradients[""] is not None and bool(gradients[""].any())


def _without_gradient(layer: LayerInfo, gradient: Tensor | None, trial: Trial) -> LayerInfo:
    """Return the description of a layer, in a model whose image has no gradient, or one that is zero.

    Methods without gradients explain such layers. If the gradient is only zero, that of another image may not be.
    """
    differentiable = trial.differentiable or gradient is not None
    return replace(
        layer, layout=layer.grid, unread=None, differentiable=differentiable, reason="" if layer.grid else layer.reason
    )


def default_layer(model: nn.Module, layers: Mapping[str, LayerInfo]) -> str:
    """Return the last layer to finish that can be explained and is a feature map of the trunk.

    Modules inside an attention (queries, keys, values) are not features of the image, so the norm before the attention
    is used. In the last block of a transformer with a class token this norm is the last layer through which patches
    reach the score. Among tokens, the layer is a norm or a module with children, such as a block, and no single linear
    map. Modules that return their input unchanged are skipped, and grids of one cell. The name is empty if no layer can
    be explained.
    """
    explainable = [layer for layer in layers.values() if layer.layout and layer.layout.cells > 1]
    modules = dict(model.named_modules())
    trunk = (layer for layer in reversed(explainable) if is_trunk(layer, modules))
    return next(trunk, explainable[-1]).name if explainable else ""


def is_trunk(layer: LayerInfo, modules: Mapping[str, nn.Module]) -> bool:
    """Return True for a feature map of the trunk: see `default_layer`."""
    parts = layer.name.split(".")
    types = [type(modules[".".join(parts[:end])]).__name__.lower() for end in range(1, len(parts))]
    if any("attn" in name or "attention" in name for name in types) or layer.type in PASS_THROUGH_TYPES:
        return False
    tokens = layer.layout is not None and layer.layout.axes == "tokens"
    return not tokens or "norm" in layer.type.lower() or any(modules[layer.name].children())


@contextmanager
def _record_outputs(
    model: nn.Module, observe: Callable[[str, Any, Any], tuple[Any, Any]]
) -> Iterator[dict[str, list[Any]]]:
    """Record an observation of each module call.

    Args:
        model: the model.
        observe: receives the module's name, and the arguments and the output of a call; returns the observation, and
            the output with which the model continues.

    Yields:
        The observations by module name, one per call, in the order in which the last calls end.
    """
    calls: dict[str, list[Any]] = {}

    def make_hook(name: str) -> Any:
        def hook(_module: nn.Module, args: Any, output: Any) -> Any:
            observation, output = observe(name, args, output)
            calls[name] = [*calls.pop(name, []), observation]
            return output

        return hook

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name:
                stack.enter_context(module.register_forward_hook(make_hook(name)))
        yield calls


def _own_tensor(args: Any, output: Any) -> tuple[Tensor | None, Any]:
    """Replace the first tensor of an output by a copy, if other modules may use the same tensor.

    The gradient at the copy belongs to this module alone. A module that returns its input would otherwise share the
    gradient of everything else that uses the input. A module that returns several tensors may have computed the others
    from the first, and the model may use only those. The score then does not depend on the captured first tensor.
    """
    first = first_tensor(output)
    parts, structure = pytree.tree_flatten(output)
    several = sum(isinstance(part, Tensor) for part in parts) > 1
    if first is None or not (several or any(first is part for part in pytree.tree_leaves(args))):
        return first, output
    own = first.clone()
    changed = [own if part is first else part for part in parts]
    return own, pytree.tree_unflatten(changed, structure)


def _run(
    model: nn.Module, image: Tensor, trial: Trial, size: tuple[int, int], *, graph: bool = True, cut: bool = False
) -> _Run:
    """Run a model on an image.

    Args:
        model: the model.
        image: the image [1,C,H,W].
        trial: makes the scores of the output.
        size: height and width of the image.
        graph: False to record no graph.
        cut: True to start the graph at the modules' outputs instead of the image.

    Raises:
        ConfigError: the model does not run, or its output does not fit its task.
    """
    versions: dict[str, int] = {}

    def keep(name: str, args: Any, output: Any) -> tuple[Tensor | None, Any]:
        first, output = _start_of_graph(output) if cut else _own_tensor(args, output)
        versions[name] = changes_in_place(first)
        return first, output

    image = image.clone().requires_grad_(graph and not cut)
    with torch.set_grad_enabled(graph), _record_outputs(model, keep) as calls:
        output = _output(model, image)
        scores = trial.scores(model, output, size)
    last = {name: outputs[-1] for name, outputs in calls.items()}
    intact = {name: each for name, each in last.items() if changes_in_place(each) == versions[name]}
    return _Run(image, scores, first_tensor(output), calls, intact)


def _start_of_graph(output: Any) -> tuple[Tensor | None, Any]:
    """Make the first tensor of an output the start of a graph, if it is on none and gradients are recorded."""
    first = first_tensor(output)
    if first is None or first.requires_grad or not torch.is_grad_enabled():
        return first, output
    own = first.detach().clone().requires_grad_()
    parts, structure = pytree.tree_flatten(output)
    return own, pytree.tree_unflatten([own if part is first else part for part in parts], structure)


def _output(model: nn.Module, image: Tensor) -> Any:
    try:
        return model(image.clone())  # a model may change its input in place, but cannot change a leaf
    except Exception as error:
        size, channels = "x".join(map(str, image.shape[2:])), image.shape[1]
        kind = "pixels" if channels == RGB else f"pixels with {channels} channel{'s' * (channels > 1)}"
        hint = _hint(model, channels)
        place = faults.place_of(error, model)
        words = f"it does not run on an image of {size} {kind}: {faults.message_of(error)}"
        raise ConfigError(words + (f", in {place}" if place else "") + hint) from error


def _hint(model: nn.Module, channels: int) -> str:
    """Return what may be missing in the description of a model that does not run."""
    parameters = signature(model.forward).parameters
    if "input_ids" in parameters:
        return "; it takes texts, too: name its saved folder as hf:FOLDER, or give its part for texts as text="
    if any(isinstance(part, nn.Conv3d) for part in model.modules()):
        return "; it takes videos or volumes: camserve_server.models.tiled gives it the tiles of one picture"
    needed = [each.name for each in parameters.values() if each.kind in _POSITIONAL and each.default is each.empty]
    if len(needed) > 1:
        return (
            f"; its forward needs {', '.join(needed[1:])} besides the image: wrap it in a module that passes it on, or "
            "with camserve_server.models.tiled if these are pictures"
        )
    first = stem.channels_of(model)
    if first in (0, channels):
        return ""
    return f"; its first convolution takes {first} channels: give mean and std a number for each"


def _observe(
    model: nn.Module, images: Tensor, queries: int, alone: Mapping[str, Tensor | None]
) -> tuple[dict[str, LayerObservation], Dependence]:
    """Run the layout probe. Each output is read at once, so that no two outputs are held in memory.

    Args:
        model: the model.
        images: the images of the probe.
        queries: the number of tokens that ask for one object each.
        alone: outputs of modules, and of the model, for the image without noise alone.

    Returns:
        The observation of each module; none if the model does not run on several images. And what its outputs depend
        on besides the image.
    """
    size = (images.shape[2], images.shape[3])
    latest: list[Any] = [None, None]
    is_suspicious = False

    def observe(name: str, _args: Any, output: Any) -> tuple[LayerObservation, Any]:
        nonlocal is_suspicious
        tensor = first_tensor(output)
        if tensor is None:
            return LayerObservation(None), output
        if tensor is not latest[0]:  # a block returns the output of its last module
            latest[:] = tensor, _read_output(tensor, size, queries)
            is_suspicious = is_suspicious or independence.differs(alone.get(name), tensor)
        return latest[1], output

    try:
        with torch.no_grad(), _record_outputs(model, observe) as calls:
            output = model(images)
    except Exception as error:  # noqa: BLE001 -- a model may accept one image at a time: then only the shapes are used
        if device_for(images.device).is_out_of_memory(error):
            return {}, Dependence()
        return {}, Dependence(mates=f"it fails with several images: {error}")
    if is_suspicious or independence.differs(alone[""], first_tensor(output)):
        return {name: each[-1] for name, each in calls.items()}, independence.confirm(model, images[PLAIN : PLAIN + 1])
    return {name: each[-1] for name, each in calls.items()}, Dependence()


def _read_output(output: Tensor, size: tuple[int, int], queries: int) -> LayerObservation:
    shape = tuple(output.shape)
    if not shape or shape[0] != layout_probe.IMAGE_COUNT:
        return LayerObservation(shape, has_batch_axis=False)
    return LayerObservation(shape, layout_probe.read(output, grid.candidates(shape, size, queries)))


def _observe_shapes(calls: Mapping[str, list[Tensor | None]]) -> dict[str, LayerObservation]:
    shapes = {name: None if output is None else tuple(output.shape) for name, (*_, output) in calls.items()}
    return {
        name: LayerObservation(shape, has_batch_axis=shape is not None and shape[:1] == (1,))
        for name, shape in shapes.items()
    }


def find_grids(
    observations: Mapping[str, LayerObservation], size: tuple[int, int], queries: int = 0
) -> dict[str, GridOrReason]:
    """Find each layer's grid: from the probe, else from other layers of the same shape, else from its own shape.

    Args:
        observations: the observation of each layer, by name.
        size: height and width of the image.
        queries: the number of tokens that ask for one object each. They may follow the grid, or be alone.
    """
    certain = {
        name: observation.readings[-1].layout
        for name, observation in observations.items()
        if observation.readings and observation.readings[-1].is_right
    }
    common = _common_layouts((layout for layout in certain.values() if layout.axes == "tokens"), size)
    certain = {name: common.get(layout.tokens, layout) for name, layout in certain.items()}
    context = _ModelContext(
        size=size,
        queries=queries,
        layouts={(observations[name].shape or ())[1:]: layout for name, layout in certain.items()},
        prefixes={layout.prefix for layout in certain.values() if layout.axes == "tokens"},
        token_counts={layout.prefix + layout.height * layout.width + layout.suffix for layout in certain.values()}
        | {seen.shape[1] for seen in observations.values() if seen.shape and len(seen.shape) == 3},  # noqa: PLR2004 -- [B,N,C]
    )
    return {name: certain.get(name) or _infer_grid(observation, context) for name, observation in observations.items()}


def _with_single_cells(
    grids: Mapping[str, GridOrReason], observations: Mapping[str, LayerObservation]
) -> dict[str, GridOrReason]:
    """Return the grids, and a grid of one cell for each layer [B,C,1,1] after the last larger grid.

    Such are the last layers of a network for small images, and pooled features. Their maps have one value, and a
    verdict that says so. Before the last larger grid they are factors of channels, as in squeeze-and-excitation.
    """
    names = list(grids)
    last = max((index for index, name in enumerate(names) if isinstance(grids[name], Layout)), default=len(names))
    cells = {
        name: Layout("nchw", 1, 1)
        for name in names[last + 1 :]
        if observations[name].has_batch_axis and (observations[name].shape or ())[2:] == (1, 1)
    }
    return {**grids, **cells}


def _common_layouts(layouts: Iterable[Layout], size: tuple[int, int]) -> dict[int, Layout]:
    """Return the layout of all layers with the same number of tokens, by that number.

    A part of a grid fits nearly as well as the whole: 16 tokens and one prefix token can be read as the last three rows
    of four, after five prefix tokens. This happens by chance in single layers, not in most of them. It is likelier the
    fewer places a grid has, so each layer's vote is weighted by the number of its places. Of the layouts with at least
    a quarter of the votes, those closest to the proportions of the image are kept, because patches are cut from the
    image in the same way in both directions.
    """
    votes: dict[int, Counter[Layout]] = {}
    for layout in layouts:
        votes.setdefault(layout.tokens, Counter())[layout] += layout.height * layout.width
    return {tokens: _choose_layout(counter, size) for tokens, counter in votes.items()}


def _choose_layout(votes: Counter[Layout], size: tuple[int, int]) -> Layout:
    frequent = [layout for layout, count in votes.items() if count * 4 >= votes.total()] or list(votes)
    least = min(grid.distortion(layout, size) for layout in frequent)
    return max((layout for layout in frequent if grid.distortion(layout, size) == least), key=votes.__getitem__)


@dataclass(frozen=True, slots=True)
class _ModelContext:
    """Facts about a model from the layers whose grids the probe shows.

    Attributes:
        size: height and width of the image.
        queries: the number of tokens that ask for one object each; 0 without such tokens.
        layouts: the layouts by output shape, without the batch.
        prefixes: the numbers of prefix tokens.
        token_counts: the numbers of tokens.
    """

    size: tuple[int, int]
    queries: int
    layouts: Mapping[tuple[int, ...], Layout]
    prefixes: Collection[int]
    token_counts: Collection[int]


def _infer_grid(observation: LayerObservation, context: _ModelContext) -> GridOrReason:
    """Find the grid of a layer for which the probe has no certain reading."""
    if observation.shape is None:
        return NO_TENSOR
    if not observation.has_batch_axis or not observation.shape:
        return NO_BATCH_AXIS if len(observation.shape) > 2 else NO_GRID  # noqa: PLR2004 -- [B,C] is no window
    possible = grid.candidates(observation.shape, context.size, context.queries)
    if not possible:
        return NO_GRID
    if context.queries and observation.shape[1] == context.queries:
        return QUERIES
    wrong = [reading.layout for reading in observation.readings if reading.is_wrong]
    if any(layout.axes == "tokens" for layout in wrong):  # tokens have the same order in every rectangle
        return OTHER_ORDER
    remaining = [
        layout for layout in possible if layout not in wrong and not _is_matrix(layout, observation.shape, context)
    ]
    return (_infer_from_shape(observation, remaining, context) or UNKNOWN_GRID) if remaining else OTHER_ORDER


def _infer_from_shape(observation: LayerObservation, possible: list[Layout], context: _ModelContext) -> Layout | None:
    """Return the layout of layers with the same shape, else the only possible one.

    A number of tokens fits several grids, each with another number of prefix tokens.
    """
    same_shape = context.layouts.get((observation.shape or ())[1:])
    if same_shape in possible:
        return same_shape
    if possible[0].axes == "tokens":
        blind = bool(observation.readings) and all(reading.is_blind for reading in observation.readings)
        possible = [layout for layout in possible if blind and layout.prefix in context.prefixes]
    return possible[0] if len(possible) == 1 else None


def _is_matrix(layout: Layout, shape: tuple[int, ...], context: _ModelContext) -> bool:
    """Return whether a grid is more likely attention: a row and a column per token, and fewer heads than tokens."""
    side = layout.height
    return side == layout.width and side in context.token_counts and math.prod(shape[1:]) < side**3


def _describe(
    name: str,
    module: nn.Module,
    outputs: list[Tensor | None],
    grid_or_reason: GridOrReason,
    gradient: Tensor | None,
    *,
    feeds_heads: bool,
) -> LayerInfo:
    """Describe a layer.

    A layer that feeds a detector's heads can be explained, even if no object in the trial image is of its scale and the
    gradient is zero. If only other tokens than those of its grid have a gradient, it cannot.
    """
    output = outputs[-1]
    layout, reason = (None, grid_or_reason) if isinstance(grid_or_reason, str) else (grid_or_reason, "")
    unread = None
    unused = feeds_heads and (gradient is None or not gradient.any())
    if layout and not unused and not _has_gradient(gradient, layout):
        unread, layout, reason = layout, None, ZERO_GRADIENT
    return LayerInfo(
        name=name,
        type=type(module).__name__,
        shape=tuple(output.shape) if output is not None else (),
        parameters=sum(p.numel() for p in module.parameters()),
        calls=len(outputs),
        layout=layout,
        reason=reason,
        unread=unread,
    )


def _has_gradient(gradient: Tensor | None, layout: Layout) -> bool:
    return gradient is not None and bool(grid.to_grid(gradient, layout).any())
