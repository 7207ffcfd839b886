"""Run passes over biases, for FullGrad: the score's gradients at the input and at the sums with every bias.

A `TorchFunctionMode`, which intercepts every call of a torch function, records each bias where it is added: in a
convolution, a normalisation or a linear layer. Hooks on modules would miss functions, and would see only the output of
normalisations that apply an activation of their own, as timm's do.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from camserve_server.core.errors import FailedPrecondition
from camserve_server.engine.batch import find_unique_inputs, forward, in_row_order, make_inputs, score_passes
from camserve_server.engine.values import Row, RowResult
from camserve_server.methods import FullGradient, method_of
from camserve_server.models import LoadedModel
from camserve_server.models.grid import to_grid
from camserve_server.models.outputs import Outputs
from camserve_server.models.values import Layout, Pass

Axes: TypeAlias = Literal["nchw", "nhwc"]


def run(model: LoadedModel, _pass: Pass, rows: Sequence[Row]) -> list[RowResult]:
    """Run one batch: one forward pass, then the backward passes."""
    unique = find_unique_inputs(rows)
    results: dict[int, RowResult] = {}
    with torch.enable_grad():
        inputs = make_inputs(model.info, unique.rows).requires_grad_()
        outputs, biases = run_with_biases(model, inputs)
        for backward, scores in score_passes(outputs, unique, rows):
            terms = score_terms(scores, inputs, biases)
            nonzero = torch.stack([term.flatten(1).any(1) for term in terms]).any(0)[backward.at]
            pass_rows = [(rows[row], index) for row, index in zip(backward.rows, backward.inputs, strict=True)]
            size = model.info.preprocess.size
            maps = [_map(row, [term[index : index + 1] for term in terms], size) for row, index in pass_rows]
            pass_results, (nonzero_array, *map_arrays) = backward.fetch([nonzero, *maps])
            results |= pass_results.single_map_results(map_arrays, nonzero_array.tolist())
    return in_row_order(results)


def _map(row: Row, terms: list[Tensor], size: tuple[int, int]) -> Tensor:
    """Return a row's map: the sum of all terms, each resized to the input's pixels by the method."""
    call = row.calls[0]
    method = method_of(FullGradient, call.name)
    return cast("Tensor", sum(method.spread(term, size=size, **call.parameters)[0] for term in terms))


@dataclass(frozen=True, slots=True)
class AddedBias:
    """A bias that a model added.

    Attributes:
        output: the sum with the bias, on the graph.
        value: the bias of each channel [C].
        grid: layout by which a tensor of the output's shape becomes [B,C,h,w].
    """

    output: Tensor
    value: Tensor
    grid: Layout


def run_with_biases(model: LoadedModel, inputs: Tensor) -> tuple[Outputs, list[AddedBias]]:
    """Run a model; return its outputs and every bias whose sum has a grid over the image.

    Raises:
        FailedPrecondition: no bias has one.
    """
    with _BiasRecorder() as recorder:
        # A clone: a model may change its input in place, which autograd forbids for a leaf.
        outputs = forward(model, inputs.clone())
    layouts = [model.info.layers[name].layout for name in model.info.default_layers]
    tokens = next((layout for layout in layouts if layout and layout.axes == "tokens"), None)
    grids = [_grid(output, axes, inputs, tokens) for output, _, axes in recorder.sums]
    biases = [
        AddedBias(output, value, grid) for (output, value, _), grid in zip(recorder.sums, grids, strict=True) if grid
    ]
    if not biases:
        raise FailedPrecondition("the model has no bias whose sum has a grid over the image")
    return outputs, biases


def score_terms(scores: Tensor, inputs: Tensor, biases: Sequence[AddedBias]) -> list[Tensor]:
    """Return the terms of each score, [B,C,h,w] each: the gradient times the input, and times each bias."""
    sources = [inputs, *(bias.output for bias in biases)]
    if not scores.requires_grad:
        return [torch.zeros_like(inputs)]
    optional = cast(
        "tuple[Tensor | None, ...]",
        torch.autograd.grad(scores.sum(), sources, retain_graph=True, allow_unused=True),
    )
    gradients = [
        torch.zeros_like(source) if gradient is None else gradient
        for source, gradient in zip(sources, optional, strict=True)
    ]
    terms = [gradients[0] * inputs.detach()]
    return terms + [
        to_grid(gradient, bias.grid) * bias.value.float()[:, None, None]
        for gradient, bias in zip(gradients[1:], biases, strict=True)
    ]


def _grid(output: Tensor, axes: Axes, inputs: Tensor, tokens: Layout | None) -> Layout | None:
    """Return the layout of a sum's grid over the image; None if it has no such grid."""
    if output.shape[0] != inputs.shape[0]:
        return None
    if output.dim() == 4:  # noqa: PLR2004 -- batch, channels, height, width, in either order
        height, width = output.shape[1:3] if axes == "nhwc" else output.shape[2:]
        return Layout(axes, height, width) if _has_image_shape(height, width, inputs) else None
    if output.dim() == 3 and axes == "nhwc" and tokens:  # noqa: PLR2004 -- batch, tokens, channels
        return tokens if output.shape[1] == tokens.tokens else None
    return None


def _has_image_shape(height: int, width: int, inputs: Tensor) -> bool:
    """Return True if a grid has the image's aspect ratio, give or take one cell."""
    return abs(height * inputs.shape[3] - width * inputs.shape[2]) <= max(inputs.shape[2:])


class _BiasRecorder(TorchFunctionMode):
    """Records every sum with a bias that is computed in the block.

    Attributes:
        sums: the sums, the biases [C], and the order of the axes if the sum has a grid.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sums: list[tuple[Tensor, Tensor, Axes]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        axes, read_bias = _BIASES.get(func, ("nchw", _no_bias))
        bias = read_bias(*args, **(kwargs or {}))
        if bias is None or not output.requires_grad:
            return output
        self.sums.append((output, bias.detach(), axes))
        return output.clone()  # the model may change its copy in place


def _no_bias(*_args: Any, **_options: Any) -> None:
    return None


def _bias_argument(
    _input: Tensor, _weight: Tensor, bias: Tensor | None = None, *_args: Any, **_options: Any
) -> Tensor | None:
    return bias


def _batch_norm_bias(  # noqa: PLR0913, PLR0917 -- torch's signature
    _input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,  # noqa: FBT001, FBT002 -- torch's signature
    momentum: float = 0.1,  # noqa: ARG001 -- torch names it
    eps: float = 1e-5,
) -> Tensor | None:
    """Return the constant that a batch normalisation adds: β − γ μ / √(σ² + ε)."""
    if training or running_mean is None or running_var is None:
        return None
    shift = -running_mean / (running_var + eps).sqrt()
    shift = shift if weight is None else shift * weight
    return shift if bias is None else shift + bias


def _norm_bias(
    _input: Tensor, _shape: Any, _weight: Tensor | None = None, bias: Tensor | None = None, *_args: Any, **_options: Any
) -> Tensor | None:
    return bias if bias is not None and bias.dim() == 1 else None


_BIASES: Mapping[Any, tuple[Axes, Callable[..., Tensor | None]]] = {
    functional.conv2d: ("nchw", _bias_argument),
    functional.linear: ("nhwc", _bias_argument),
    functional.batch_norm: ("nchw", _batch_norm_bias),
    functional.group_norm: ("nchw", _norm_bias),
    functional.layer_norm: ("nhwc", _norm_bias),
}
"""For each torch function that adds a bias: the order of its output's axes, and a function that finds the bias."""
