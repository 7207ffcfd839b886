"""Probe a model when it is loaded: which layers run, where their grids are, and which the score depends on."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from camserve_server.core.devices import device_for
from camserve_server.models import grid, independence, layout_probe, live
from camserve_server.models.grids import NO_BATCH_AXIS, GridOrReason, LayerObservation, find_grids, with_single_cells
from camserve_server.models.hooks import first_tensor
from camserve_server.models.independence import Dependence
from camserve_server.models.layout_probe import PLAIN
from camserve_server.models.tasks import Trial
from camserve_server.models.trial_run import find_gradients, first_run, reaches_image, record_outputs
from camserve_server.models.values import LayerInfo, Layout

ZERO_GRADIENT = "the score does not depend on its grid: every gradient there is zero"

PASS_THROUGH_TYPES = ("Identity", "Dropout", "Dropout2d", "DropPath", "StochasticDepth", "Permute", "AdaptiveAvgPool2d")
"""Types of modules that return their input unchanged, in evaluation mode and at the input size of the model."""


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
        first = first_run(model, image, trial, size)
        trial.find_ending(model, first.last)
        run, gradients = find_gradients(model, first, image, trial, size)
        trial.find_trunk(model, run.last)
    alone = {**first.intact, "": first.output}
    observed, trial.dependence = _observe(model, images, trial.queries, alone)
    observations = observed or _observe_shapes(run.calls)
    grids = with_single_cells(find_grids(observations, size, trial.queries), observations)
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
    if not reaches_image(gradients):
        layers = {name: _without_gradient(layer, gradients.get(name), trial) for name, layer in layers.items()}
    return layers, trial.classes


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
        with torch.no_grad(), record_outputs(model, observe) as calls:
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
