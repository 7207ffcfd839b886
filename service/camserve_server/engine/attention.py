"""Run passes over attention: the matrix of every block of a transformer, and the score's gradients there.

torch's fused attention never computes the matrix. A `TorchFunctionMode`, which intercepts every call of a torch
function, computes it step by step while the model runs; no module is replaced or changed. The matrices pass through
the probes of `hooks`. The first one is cut from the graph, so that nothing before it is differentiated.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from camserve_server.core.errors import FailedPrecondition
from camserve_server.engine.batch import (
    BackwardPass,
    find_unique_inputs,
    forward,
    in_row_order,
    make_inputs,
    read_outputs,
    run_backward_passes,
    score_passes,
)
from camserve_server.engine.values import Row, RowResult
from camserve_server.imaging.values import KeepAspect
from camserve_server.methods import METHODS, Attention, method_of, wrong_shape
from camserve_server.methods.values import MethodCall
from camserve_server.models import LoadedModel
from camserve_server.models.grid import fitting
from camserve_server.models.hooks import Capture, Span, pass_through_probe, record_spans, replace_output
from camserve_server.models.outputs import Outputs
from camserve_server.models.values import Layout, ModelInfo, Pass

Arguments = tuple[Any, ...]


def run(model: LoadedModel, pass_: Pass, rows: Sequence[Row]) -> list[RowResult]:  # noqa: ARG001 -- as every pass
    """Run one batch: one forward pass, then the backward passes."""
    unique = find_unique_inputs(rows)
    results: dict[int, RowResult] = {}
    with torch.enable_grad():
        with AttentionCapture() as captured:
            outputs = forward(model, make_inputs(model.info, unique.rows))
        layout = captured.layout(model.info, unique.rows)
        for backward in run_backward_passes(outputs, unique, rows):
            gradients = torch.stack([_take_gradient(block) for block in captured.blocks])
            results |= _results(backward, captured.attention, gradients, layout, rows)
    return in_row_order(results)


def run_each(model: LoadedModel, pass_: Pass, rows: Sequence[Row]) -> list[RowResult]:  # noqa: ARG001 -- as every pass
    """Run one batch for LeGrad: the gradient of each block is that of the score of the block's own tokens.

    The head runs once on the tokens of all blocks, and is differentiated once for each target. With a backward pass
    through the head for each block, vit_tiny_patch16_224 took 2.70 s instead of 0.86 s (four images, one CPU thread;
    the forward pass alone 0.22 s).
    """
    unique = find_unique_inputs(rows)
    inputs = make_inputs(model.info, unique.rows)
    results: dict[int, RowResult] = {}
    with torch.enable_grad():
        with AttentionCapture() as captured, record_spans(model.module, lambda: len(captured.blocks)) as spans:
            outputs = forward(model, inputs)
        layout = captured.layout(model.info, unique.rows)
        head = _run_head_on_blocks(model, inputs, _find_blocks(model.info, spans, len(captured.blocks)))
        for backward, _ in score_passes(outputs, unique, rows):
            mean_gradients = head.mean_gradients(backward, rows)
            gradients = torch.stack(
                [
                    _gradient(mean, block.source, mean_gradient).float()
                    for mean, mean_gradient, block in zip(head.means, mean_gradients, captured.blocks, strict=True)
                ]
            )
            results |= _results(backward, captured.attention, gradients, layout, rows)
    return in_row_order(results)


def _results(
    backward: BackwardPass, attention: Tensor, gradients: Tensor, layout: Layout, rows: Sequence[Row]
) -> dict[int, RowResult]:
    """Return the results of a backward pass by row index; attention and gradients are [L,inputs,heads,N,N]."""
    nonzero = gradients.transpose(0, 1).flatten(1).any(1)[backward.at]
    pass_rows = [
        (rows[row], slice(index, index + 1)) for row, index in zip(backward.rows, backward.inputs, strict=True)
    ]
    maps = [_map(row, attention[:, at].contiguous(), gradients[:, at].contiguous(), layout) for row, at in pass_rows]
    pass_results, (nonzero_array, *map_arrays) = backward.fetch([nonzero, *maps])
    return pass_results.single_map_results(map_arrays, nonzero_array.tolist())


def _map(row: Row, attention: Tensor, gradients: Tensor, layout: Layout) -> Tensor:
    call = row.calls[0]
    method = method_of(Attention, call.name)
    patches = method.combine(attention, gradients, layout.prefix, **call.parameters)
    return map_of_patches(call, patches, layout)


def map_of_patches(call: MethodCall, patches: Tensor, layout: Layout) -> Tensor:
    """Return the map [h,w] of a method's values of the patches [1, h · w].

    Raises:
        Internal: the method returned another shape.
    """
    if patches.numel() != layout.height * layout.width:
        expected = f"a value for each patch, {[1, layout.height * layout.width]}"
        raise wrong_shape(call.name, patches.shape, expected)
    return patches.reshape(layout.height, layout.width)


def _take_gradient(block: Capture) -> Tensor:
    """Return a block's gradient and clear it for the next backward pass."""
    gradient, block.gradient = block.gradient, None
    return torch.zeros_like(block.activation).float() if gradient is None else gradient.float()


def _gradient(outputs: Tensor, source: Tensor, output_gradient: Tensor | None = None) -> Tensor:
    """Return the gradient at a source, given that at the outputs; zero if the outputs do not depend on the source."""
    return torch.autograd.grad(
        outputs, source, output_gradient, retain_graph=True, allow_unused=True, materialize_grads=True
    )[0]


def _find_blocks(info: ModelInfo, spans: Sequence[Span], count: int) -> list[Span]:
    """Return the calls of a transformer's blocks.

    A block is the outermost module that contains exactly one attention and returns tokens.

    Args:
        info: the model.
        spans: calls of modules that contain exactly one attention, an inner module before the outer one.
        count: the number of attentions.

    Raises:
        FailedPrecondition: the tokens that a block returns are not those that the next one receives.
    """
    outermost = {span.step: span for span in spans if span.output is not None and span.output.dim() == 3}  # noqa: PLR2004 -- [B,N,C]
    chain = [outermost[step] for step in sorted(outermost)]
    linked = all(_same(block.output, following.input) for block, following in pairwise(chain))
    # With one block, an outer module that contains the norm after the block cannot be told from the block.
    if not len(chain) == count > 1 or not linked:
        raise FailedPrecondition(
            "this method needs a transformer of several blocks that are modules and pass their tokens on unchanged: "
            f"those of {info.name} do not"
        )
    return chain


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


@dataclass(frozen=True, slots=True)
class _HeadOutputs:
    """Outputs of the head for the tokens of every block.

    Attributes:
        means: for each block, the mean of its tokens [B,1,C], on the graph.
        head_input: the same means [L·B,1,C], cut from the graph.
        outputs: outputs of the head for these.
    """

    means: list[Tensor]
    head_input: Tensor
    outputs: Outputs

    def mean_gradients(self, backward: BackwardPass, rows: Sequence[Row]) -> list[Tensor]:
        """Return, for each block, the gradient [B,1,C] of the scores of a pass at the mean of the block's tokens."""
        batch = len(self.means[0])
        fixed_rows = [
            replace(rows[index], target=target) for index, target in zip(backward.rows, backward.targets, strict=True)
        ]
        blocks = [_shift(backward.at, block * batch) for block in range(len(self.means))]
        score = torch.stack([read_outputs(self.outputs[at], fixed_rows)[1] for at in blocks]).sum()
        return list(_gradient(score, self.head_input).chunk(len(self.means)))


def _shift(at: slice | Tensor, by: int) -> slice | Tensor:
    """Move an index along the batch axis; see `UniqueInputs.index_of`."""
    return slice(by, by + at.stop) if isinstance(at, slice) else at + by


def _run_head_on_blocks(model: LoadedModel, inputs: Tensor, chain: Sequence[Span]) -> _HeadOutputs:
    """Run the head, which is everything after the last block, on the tokens of each block.

    As in LeGrad's own code, the mean of a block's tokens stands for each of them. So the head needs no finished class
    token, and the kind of its pooling does not matter. The blocks themselves run again for one image only, because
    their result is replaced.

    Raises:
        FailedPrecondition: the head does not accept other tokens.
    """
    tokens = [cast("Tensor", block.output) for block in chain]
    means = [block_tokens.mean(1, keepdim=True) for block_tokens in tokens]
    head_input = torch.cat(means).detach().requires_grad_()
    with replace_output(chain[-1].module, head_input.expand(-1, tokens[-1].shape[1], -1)):
        outputs = forward(model, inputs[:1])
    if len(outputs.values) != len(head_input):
        raise FailedPrecondition(f"the head of {model.info.name}, after its last block, does not accept other tokens")
    return _HeadOutputs(means, head_input, outputs)


class PlainAttention(TorchFunctionMode):
    """Mode that computes every attention step by step, without fused kernels, in the current thread only.

    torch's own switch, `sdpa_kernel`, sets flags of the whole process. It would change the rounding of a batch that
    runs in another thread.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: Arguments = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return self._attend(*args, **options)
        if func is functional.multi_head_attention_forward:
            return self._attend_many(*args, **options)
        return func(*args, **options)

    def _attend(  # noqa: PLR0913, PLR0917 -- torch's signature
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002 -- torch's signature
        scale: float | None = None,
        enable_gqa: bool = False,  # noqa: FBT001, FBT002 -- torch's signature
    ) -> Tensor:
        """Compute `scaled_dot_product_attention`: softmax(q kᵀ · scale + mask) v, with `_on_attention` in between."""
        if enable_gqa:  # several heads of queries share one head of keys
            repeats = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        weights = query * scale @ key.transpose(-2, -1)
        if is_causal:
            attn_mask = torch.ones(weights.shape[-2:], dtype=torch.bool, device=weights.device).tril()
        if attn_mask is not None:
            boolean = attn_mask.dtype == torch.bool
            weights = weights.masked_fill(~attn_mask, -torch.inf) if boolean else weights + attn_mask
        return functional.dropout(self._on_attention(weights.softmax(-1)), dropout_p).to(value.dtype) @ value

    def _attend_many(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Compute `multi_head_attention_forward`."""
        return self._multi_head(*args, **kwargs)

    def _multi_head(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        # Made for each call. The function refers to this object: as an attribute of it, both would form a cycle, which
        # keeps the graphs of finished batches alive until the garbage collector runs.
        return _with_attention(self._attend)(*args, **kwargs)

    def _on_attention(self, matrix: Tensor) -> Tensor:
        """Return the attention [B,heads,queries,keys] that the model continues with."""
        return matrix


class AttentionCapture(PlainAttention):
    """Passes the matrix of every attention through a probe.

    Attributes:
        blocks: captures of the matrices of self-attention [B,heads,N,N], in the order in which they were computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[Capture] = []
        self._shapes: list[torch.Size] = []
        self._parallel = False  # True if an attention does not depend on the one before it

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: Arguments = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        output = super().__torch_function__(func, types, args, kwargs)
        # Some models compute attention themselves, and call only the softmax.
        if func in _SOFTMAXES and _is_attention(output, *args[1:2], **kwargs or {}):
            return self._on_attention(output)
        return output

    def _attend_many(
        self, *args: Any, need_weights: bool = True, average_attn_weights: bool = True, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Compute `multi_head_attention_forward`."""
        # With need_weights=True torch would not call the attention that was put inside.
        output, _ = self._multi_head(*args, need_weights=False, **kwargs)
        if not need_weights:
            return output, None
        return output, self._last.mean(1) if average_attn_weights else self._last

    def _on_attention(self, matrix: Tensor) -> Tensor:
        """Capture an attention [B,heads,queries,keys] or [B,queries,keys]; return it as it leaves the probe."""
        heads = matrix.unsqueeze(1) if matrix.dim() == 3 else matrix  # noqa: PLR2004 -- one head
        self._shapes.append(heads.shape)
        self._last = matrix
        if heads.shape[-2] != heads.shape[-1]:
            return matrix
        self._parallel |= bool(self.blocks) and not matrix.requires_grad
        capture, through = pass_through_probe(heads)
        self.blocks.append(capture)
        self._last = through.view_as(matrix)
        return self._last

    @property
    def attention(self) -> Tensor:
        """The attention of every block, [L,B,heads,N,N], float32."""
        return torch.stack([block.activation for block in self.blocks]).float()

    def layout(self, info: ModelInfo, rows: Sequence[Row]) -> Layout:
        """Return the layout of the image's grid among the tokens.

        Args:
            info: the model.
            rows: for each input of the batch, one row.

        Raises:
            FailedPrecondition: the attention is not between all of an image's patches, block after block.
        """
        grids = token_grids(info, self.blocks[0].activation.shape[-1] if self.blocks else 0)
        if fault := self._fault(len(rows), grids):
            name = rows[0].calls[0].name
            raise FailedPrecondition(f"{name} needs {METHODS[name].needs}: {fault.format(name=info.name)}")
        return grids[self.blocks[0].activation.shape[-1]]

    def _fault(self, images: int, grids: Collection[int]) -> str:
        """Return the reason why the attention cannot be explained, with `{name}` for the model's; empty if it can."""
        for *around, queries, keys in self._shapes:
            if keys < queries:
                return f"in {{name}} {queries} tokens see {keys} summaries of them"
            if queries == keys and (len(around) != 2 or around[0] != images):  # noqa: PLR2004 -- images, heads
                return f"{{name}}'s blocks see windows of {keys}"
        square = list(dict.fromkeys(tuple(block.activation.shape[1:3]) for block in self.blocks))
        if not square:
            return "{name} has none"
        if len(square) > 1:
            return "{name}'s blocks are not alike: " + ", ".join(f"{heads} heads of {n} tokens" for heads, n in square)
        if square[0][1] not in grids:
            return f"{{name}}'s attention is between {square[0][1]} items that are not the patches of a known grid"
        return "{name} has blocks that do not follow one another" if self._parallel else ""


def _with_attention(attend: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return torch's own `multi_head_attention_forward` with another attention inside.

    The copy shares torch's code, so that projections, masks and added keys stay those of the installed version. Two
    global names are replaced: the attention; and the check for overrides, which this call has already passed.
    """
    original = functional.multi_head_attention_forward
    names = {"scaled_dot_product_attention": attend, "has_torch_function": lambda _tensors: False}
    return FunctionType(original.__code__, vars(functional) | names, original.__name__, original.__defaults__)


def token_grids(info: ModelInfo, tokens: int) -> dict[int, Layout]:
    """Return the layouts of layers of tokens, by their number of tokens.

    Args:
        info: the model.
        tokens: the number of tokens that is looked for; 0 for none.
    """
    # Reversed, so that the first layer with a number of tokens wins: its grid is the most certain, because no attention
    # has mixed the tokens yet.
    layers = reversed(list(info.layers.values()))
    grids = {layer.layout.tokens: layer.layout for layer in layers if layer.layout and not layer.layout.suffix}
    if tokens and isinstance(info.preprocess.resize, KeepAspect):  # grids are known to a row and a column
        grids = {layout.tokens: layout for layout in (fitting(layout, tokens) for layout in grids.values())}
    return grids


_SOFTMAXES = (functional.softmax, torch.softmax, torch.special.softmax, Tensor.softmax)


def _is_attention(output: Tensor, dim: int | None = None, **_options: Any) -> bool:
    """Return True if the output of a softmax can be self-attention: square matrices whose rows add up to 1."""
    along_rows = dim in (-1, output.dim() - 1)
    return along_rows and output.dim() > 2 and output.shape[-1] == output.shape[-2] > 1  # noqa: PLR2004 -- a matrix
