"""The pass over biases: the score's gradients at the input and behind every bias.

A bias is found where it is added, in a convolution, a normalisation or a linear layer, by a mode of torch that sees
every call: a module that goes on to apply its own activation, or that is called twice, is no special case.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from camserve_server.core.errors import FailedPrecondition
from camserve_server.engine.batch import forward, in_order, inputs_of, scored, units_of
from camserve_server.engine.values import Row, RowResult
from camserve_server.methods import FullGradient, method_of
from camserve_server.models import LoadedModel
from camserve_server.models.grid import to_grid
from camserve_server.models.outputs import Outputs
from camserve_server.models.values import Layout, Pass

Axes: TypeAlias = Literal["nchw", "nhwc"]


def run(model: LoadedModel, _pass: Pass, rows: Sequence[Row]) -> list[RowResult]:
    """Run one batch: one forward pass, and one backward pass a turn."""
    units = units_of(rows)
    results: dict[int, RowResult] = {}
    with torch.enable_grad():
        inputs = inputs_of(model.info, units.rows).requires_grad_()
        outputs, biases = seen(model, inputs)
        for turn, scores in scored(outputs, units, rows):
            terms = contributions(scores, inputs, biases)
            alive = torch.stack([one.flatten(1).any(1) for one in terms]).any(0)[turn.at]
            mine = [(rows[index], unit) for index, unit in zip(turn.rows, turn.units, strict=True)]
            size = model.info.preprocess.size
            spread = [_spread(row, [one[unit : unit + 1] for one in terms], size) for row, unit in mine]
            answers, (found, *maps) = turn.read([alive, *spread])
            results |= answers.single_maps(maps, found.tolist())
    return in_order(results)


def _spread(row: Row, terms: list[Tensor], size: tuple[int, int]) -> Tensor:
    call = row.calls[0]
    method = method_of(FullGradient, call.name)
    return cast("Tensor", sum(method.spread(one, size=size, **call.parameters)[0] for one in terms))


@dataclass(frozen=True, slots=True)
class Bias:
    """One bias that was added.

    Attributes:
        output: what it was added to, and itself, on the graph.
        value: of each channel.
        grid: brings a tensor of the output's shape to [B,C,h,w].
    """

    output: Tensor
    value: Tensor
    grid: Layout


def seen(model: LoadedModel, inputs: Tensor) -> tuple[Outputs, list[Bias]]:
    """Run a model; return what it answers and every bias whose sum has a grid over the image.

    Raises:
        FailedPrecondition: there is none.
    """
    with _Watch() as watch:
        outputs = forward(model, inputs.clone())  # a model may change its input in place, but not a leaf
    layout = model.info.layers[model.info.default_layer].layout
    tokens = layout if layout and layout.axes == "tokens" else None
    grids = [_grid(output, axes, inputs, tokens) for output, _, axes in watch.found]
    found = [Bias(output, value, grid) for (output, value, _), grid in zip(watch.found, grids, strict=True) if grid]
    if not found:
        raise FailedPrecondition("the model has no bias whose sum has a grid over the image")
    return outputs, found


def contributions(scores: Tensor, inputs: Tensor, biases: Sequence[Bias]) -> list[Tensor]:
    """Return the terms of a score [B,C,h,w]: the gradient times the input, and that behind each bias times the bias."""
    wanted = [inputs, *(bias.output for bias in biases)]
    if not scores.requires_grad:
        return [torch.zeros_like(inputs)]
    found = cast(
        "tuple[Tensor | None, ...]",
        torch.autograd.grad(scores.sum(), wanted, retain_graph=True, allow_unused=True),
    )
    gradients = [torch.zeros_like(one) if got is None else got for one, got in zip(wanted, found, strict=True)]
    terms = [gradients[0] * inputs.detach()]
    return terms + [
        to_grid(gradient, bias.grid) * bias.value.float()[:, None, None]
        for gradient, bias in zip(gradients[1:], biases, strict=True)
    ]


def _grid(output: Tensor, axes: Axes, inputs: Tensor, tokens: Layout | None) -> Layout | None:
    """Find where the grid over the image is in a sum, if it has one."""
    if output.shape[0] != inputs.shape[0]:
        return None
    if output.dim() == 4:  # noqa: PLR2004 -- batch, channels, height, width, in either order
        height, width = output.shape[1:3] if axes == "nhwc" else output.shape[2:]
        return Layout(axes, height, width) if _alike(height, width, inputs) else None
    if output.dim() == 3 and axes == "nhwc" and tokens:  # noqa: PLR2004 -- batch, tokens, channels
        return tokens if output.shape[1] == tokens.prefix + tokens.height * tokens.width else None
    return None


def _alike(height: int, width: int, inputs: Tensor) -> bool:
    """Tell whether a grid has the image's shape, give or take a cell."""
    return abs(height * inputs.shape[3] - width * inputs.shape[2]) <= max(inputs.shape[2:])


class _Watch(TorchFunctionMode):
    """Keeps every sum with a bias that is computed in the block.

    Attributes:
        found: the sums, the biases [C], and where the channels are if there is a grid.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Tensor, Tensor, Axes]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        axes, read = _BIASES.get(func, ("nchw", _none))
        bias = read(*args, **(kwargs or {}))
        if bias is None or not output.requires_grad:
            return output
        self.found.append((output, bias.detach(), axes))
        return output.clone()  # the model may change in place what it gets


def _none(*_args: Any, **_options: Any) -> None:
    return None


def _third(_input: Tensor, _weight: Tensor, bias: Tensor | None = None, *_args: Any, **_options: Any) -> Tensor | None:
    return bias


def _shift(  # noqa: PLR0913, PLR0917 -- torch's signature
    _input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,  # noqa: FBT001, FBT002 -- torch's signature
    momentum: float = 0.1,  # noqa: ARG001 -- torch names it
    eps: float = 1e-5,
) -> Tensor | None:
    """Return what remains of a batch normalisation when its scale is taken away: β − γ μ / √(σ² + ε)."""
    if training or running_mean is None or running_var is None:
        return None
    shift = -running_mean / (running_var + eps).sqrt()
    shift = shift if weight is None else shift * weight
    return shift if bias is None else shift + bias


def _affine(
    _input: Tensor, _shape: Any, _weight: Tensor | None = None, bias: Tensor | None = None, *_args: Any, **_options: Any
) -> Tensor | None:
    return bias if bias is not None and bias.dim() == 1 else None


_BIASES: Mapping[Any, tuple[Axes, Callable[..., Tensor | None]]] = {
    functional.conv2d: ("nchw", _third),
    functional.linear: ("nhwc", _third),
    functional.batch_norm: ("nchw", _shift),
    functional.group_norm: ("nchw", _affine),
    functional.layer_norm: ("nhwc", _affine),
}
"""Where a function's output has its channels, and what finds the bias that it adds."""
