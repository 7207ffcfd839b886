"""Run passes over the last attention of a transformer: its queries, keys and values, and the gradient at its output.

The attention is that of the last block; or that of a pooling after the blocks, whose query is a token of the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from camserve_server.core.errors import FailedPrecondition
from camserve_server.engine.attention import PlainAttention, map_of_patches, token_grids
from camserve_server.engine.batch import find_unique_inputs, forward, in_row_order, make_inputs, score_passes
from camserve_server.engine.values import Row, RowResult
from camserve_server.methods import METHODS, Attention, method_of
from camserve_server.models import LoadedModel
from camserve_server.models.values import Layout, ModelInfo, Pass


def run(model: LoadedModel, pass_: Pass, rows: Sequence[Row]) -> list[RowResult]:  # noqa: ARG001 -- as every pass
    """Run one batch: one forward pass, then the backward passes from the scores to the last attention."""
    unique = find_unique_inputs(rows)
    results: dict[int, RowResult] = {}
    with torch.enable_grad():
        with _LastAttention() as captured:
            outputs = forward(model, make_inputs(model.info, unique.rows))
        last, layout = captured.last(model.info, unique.rows)
        for backward, scores in score_passes(outputs, unique, rows):
            gradients = _gradient(scores, last.output)[backward.at]
            tensors = [tensor.detach()[backward.at].float() for tensor in (last.query, last.key, last.value)]
            maps = [
                _map(rows[row], [tensor[place : place + 1] for tensor in (*tensors, gradients)], layout)
                for place, row in enumerate(backward.rows)
            ]
            pass_results, (nonzero, *map_arrays) = backward.fetch([gradients.flatten(1).any(1), *maps])
            results |= pass_results.single_map_results(map_arrays, nonzero.tolist())
    return in_row_order(results)


def _gradient(scores: Tensor, output: Tensor) -> Tensor:
    """Return the gradient of the scores at the attention's output; zero if they do not depend on it."""
    gradient = torch.zeros_like(output)
    if scores.requires_grad:
        (gradient,) = torch.autograd.grad(
            scores.sum(), output, retain_graph=True, allow_unused=True, materialize_grads=True
        )
    # An attention without heads has outputs [B,T,d].
    return (gradient if gradient.dim() == 4 else gradient.unsqueeze(1)).float()  # noqa: PLR2004 -- [B,heads,T,d]


def _map(row: Row, tensors: Sequence[Tensor], layout: Layout) -> Tensor:
    call = row.calls[0]
    patches = method_of(Attention, call.name).combine(*tensors, layout.prefix, **call.parameters)
    return map_of_patches(call, patches, layout)


@dataclass(frozen=True, slots=True)
class _Captured:
    """Tensors of an attention: queries [B,heads,T,d], keys and values [B,heads,N,d], and the output, on the graph."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor


class _LastAttention(PlainAttention):
    """Captures every attention, and forgets it when the next one runs."""

    def __init__(self) -> None:
        super().__init__()
        self._captured: _Captured | None = None
        self._matrix = torch.empty(0)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        output = super()._attend(query, key, value, *args, **options)
        source = output if output.requires_grad else output.detach().requires_grad_()
        if query.dim() == key.dim() == 4 and (repeats := query.shape[1] // key.shape[1]) > 1:  # noqa: PLR2004 -- [B,heads,N,d]
            key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
        if query.dim() == key.dim() == value.dim() == 3:  # noqa: PLR2004 -- [B,N,d], an attention without heads
            query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        self._captured = _Captured(query, key, value, source)
        return source.clone()  # the model may change it in place

    def _attend_many(
        self, *args: Any, need_weights: bool = True, average_attn_weights: bool = True, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Compute `multi_head_attention_forward`."""
        # With need_weights=True torch would not call the attention that was put inside.
        output, _ = self._multi_head(*args, need_weights=False, **kwargs)
        if not need_weights:
            return output, None
        return output, self._matrix.mean(1) if average_attn_weights else self._matrix

    def _on_attention(self, matrix: Tensor) -> Tensor:
        self._matrix = matrix
        return matrix

    def last(self, info: ModelInfo, rows: Sequence[Row]) -> tuple[_Captured, Layout]:
        """Return the last attention, and the layout of the image's grid among its keys.

        Args:
            info: the model.
            rows: for each input of the batch, one row.

        Raises:
            FailedPrecondition: the model has no attention to all patches of an image, or computes it in its own way.
        """
        fault, captured = "{name} has none that torch computes", self._captured
        if captured is not None:
            images, tokens = captured.key.shape[0], captured.key.shape[-2]
            layout = token_grids(info, tokens).get(tokens)
            if captured.key.dim() == 4 and images == len(rows) and layout is not None:  # noqa: PLR2004 -- [B,heads,N,d]
                return captured, layout
            fault = f"the last one of {{name}} is to {tokens} items that are not the patches of an image"
        name = rows[0].calls[0].name
        raise FailedPrecondition(f"{name} needs {METHODS[name].needs}: {fault.format(name=info.name)}")
