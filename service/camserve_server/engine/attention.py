"""The passes over attention: its matrices in every block of a transformer, and the score's gradients there.

Fast attention never has the matrix. A mode of torch that sees every call computes it where it is wanted, and only while
the model runs: no module is exchanged or changed. The matrices pass through the probes of `hooks`; the first of them is
cut from the graph, so that nothing before it is differentiated.
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
    differentiated,
    forward,
    in_order,
    inputs_of,
    resolve_targets,
    scored,
    units_of,
)
from camserve_server.engine.values import Row, RowResult
from camserve_server.methods import METHODS, Attention, method_of
from camserve_server.models import LoadedModel
from camserve_server.models.hooks import Capture, Span, probed, record_spans, replacing
from camserve_server.models.outputs import Outputs
from camserve_server.models.values import Layout, ModelInfo, Pass

Arguments = tuple[Any, ...]


def run(model: LoadedModel, pass_: Pass, rows: Sequence[Row]) -> list[RowResult]:  # noqa: ARG001 -- as every pass
    """Run one batch: one forward pass, and one backward pass a turn."""
    units = units_of(rows)
    results: dict[int, RowResult] = {}
    with torch.enable_grad():
        with _Explicit() as seen:
            outputs = forward(model, inputs_of(model.info, units.rows))
        layout = seen.layout(model.info, units.rows)
        for turn in differentiated(outputs, units, rows):
            gradients = torch.stack([_taken(block) for block in seen.blocks])
            results |= _results(turn, seen.attention, gradients, layout, rows)
    return in_order(results)


def run_each(model: LoadedModel, pass_: Pass, rows: Sequence[Row]) -> list[RowResult]:  # noqa: ARG001 -- as every pass
    """Run one batch where the gradient of each block is that of the score of the block's own tokens."""
    units = units_of(rows)
    inputs = inputs_of(model.info, units.rows)
    results: dict[int, RowResult] = {}
    with torch.enable_grad():
        with _Explicit() as seen, record_spans(model.module, lambda: len(seen.blocks)) as spans:
            outputs = forward(model, inputs)
        layout = seen.layout(model.info, units.rows)
        own = _own(model, inputs, _chain(model.info, spans, len(seen.blocks)))
        for turn, _ in scored(outputs, units, rows):
            gradients = torch.stack(
                [_through(*one) for one in zip(own.means, own.rise(turn, rows), seen.blocks, strict=True)]
            )
            results |= _results(turn, seen.attention, gradients, layout, rows)
    return in_order(results)


def _results(
    turn: BackwardPass, attention: Tensor, gradients: Tensor, layout: Layout, rows: Sequence[Row]
) -> dict[int, RowResult]:
    """Return the rows' results; attention and gradients are [L,units,heads,N,N]."""
    alive = gradients.transpose(0, 1).flatten(1).any(1)[turn.at]
    mine = [(rows[index], slice(unit, unit + 1)) for index, unit in zip(turn.rows, turn.units, strict=True)]
    maps = [_map(row, attention[:, at].contiguous(), gradients[:, at].contiguous(), layout) for row, at in mine]
    answers, (found, *read) = turn.read([alive, *maps])
    return answers.single_maps(read, found.tolist())


def _map(row: Row, attention: Tensor, gradients: Tensor, layout: Layout) -> Tensor:
    call = row.calls[0]
    method = method_of(Attention, call.name)
    patches = method.combine(attention, gradients, layout.prefix, **call.parameters)
    return patches.reshape(layout.height, layout.width)


def _taken(block: Capture) -> Tensor:
    """Take a block's gradient away, so that the next backward pass starts from nothing."""
    gradient, block.gradient = block.gradient, None
    return torch.zeros_like(block.activation).float() if gradient is None else gradient.float()


def _through(means: Tensor, rise: Tensor, block: Capture) -> Tensor:
    """Take the gradient of a block's tokens through the rest of the block to its attention."""
    return _gradient(means, block.source, rise).float()


def _gradient(score: Tensor, source: Tensor, rise: Tensor | None = None) -> Tensor:
    return torch.autograd.grad(score, source, rise, retain_graph=True, allow_unused=True, materialize_grads=True)[0]


def _chain(info: ModelInfo, spans: Sequence[Span], blocks: int) -> list[Span]:
    """Return the transformer's blocks: for each attention, the outermost module that has it alone and returns tokens.

    Raises:
        FailedPrecondition: the tokens that one returns are not those that the next is given.
    """
    found = {span.step: span for span in spans if span.returned is not None and span.returned.dim() == 3}  # noqa: PLR2004 -- [B,N,C]
    chain = [found[step] for step in sorted(found)]
    linked = all(_same(one.returned, after.given) for one, after in pairwise(chain))
    if not len(chain) == blocks > 1 or not linked:  # around a single block, its module and the norm behind are alike
        raise FailedPrecondition(
            "this method needs a transformer of several blocks that are modules and hand their tokens to one another as"
            f" they are: those of {info.name} do not"
        )
    return chain


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


@dataclass(frozen=True, slots=True)
class _Own:
    """What the head says to the tokens of every block.

    Attributes:
        means: of each block, the mean of its tokens [B,1,C], on the graph.
        given: the same [L·B,1,C], cut off from it.
        outputs: to those.
    """

    means: list[Tensor]
    given: Tensor
    outputs: Outputs

    def rise(self, turn: BackwardPass, rows: Sequence[Row]) -> list[Tensor]:
        """Return, for each block, the gradient of a turn's scores at the mean of its tokens [B,1,C]."""
        batch = len(self.means[0])
        aims = [replace(rows[index], target=target) for index, target in zip(turn.rows, turn.targets, strict=True)]
        blocks = [_shifted(turn.at, block * batch) for block in range(len(self.means))]
        score = torch.stack([resolve_targets(self.outputs[at], aims)[1] for at in blocks]).sum()
        return list(_gradient(score, self.given).chunk(len(self.means)))


def _shifted(at: slice | Tensor, by: int) -> slice | Tensor:
    """Move an index along the batch axis; see `UniqueInputs.index_of`."""
    return slice(by, by + at.stop) if isinstance(at, slice) else at + by


def _own(model: LoadedModel, inputs: Tensor, chain: Sequence[Span]) -> _Own:
    """Let what follows the last block look at the tokens of each one.

    Every token is the mean of its block's, as the authors of LeGrad have it, so that neither a class token that is not
    yet made nor the kind of pooling matters. What comes before is run on one image alone, for it is thrown away.
    """
    tokens = [cast("Tensor", block.returned) for block in chain]
    means = [one.mean(1, keepdim=True) for one in tokens]
    given = torch.cat(means).detach().requires_grad_()
    with replacing(chain[-1].module, given.expand(-1, tokens[-1].shape[1], -1)):
        outputs = forward(model, inputs[:1])
    if len(outputs.values) != len(given):
        raise FailedPrecondition(f"what follows the last block of {model.info.name} cannot be given other tokens")
    return _Own(means, given, outputs)


class PlainAttention(TorchFunctionMode):
    """Mode that computes every attention step by step, without fused kernels, in the current thread only.

    torch's own switch, `sdpa_kernel`, sets flags of the whole process, so it would change the rounding of a batch in
    another thread.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: Arguments = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return self._attend(*args, **given)
        if func is functional.multi_head_attention_forward:
            return self._attend_many(*args, **given)
        return func(*args, **given)

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
        """Do as `scaled_dot_product_attention` does, softmax(q kᵀ · scale + mask) v, and see the softmax."""
        if enable_gqa:  # several heads of queries share one of keys
            shared = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(shared, -3), value.repeat_interleave(shared, -3)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        weights = query * scale @ key.transpose(-2, -1)
        if is_causal:
            attn_mask = torch.ones(weights.shape[-2:], dtype=torch.bool, device=weights.device).tril()
        if attn_mask is not None:
            blocked = attn_mask.dtype == torch.bool
            weights = weights.masked_fill(~attn_mask, -torch.inf) if blocked else weights + attn_mask
        return functional.dropout(self._seen(weights.softmax(-1)), dropout_p).to(value.dtype) @ value

    def _attend_many(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Do as `multi_head_attention_forward` does."""
        return self._multi_head(*args, **kwargs)

    def _multi_head(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        # Made for each call. It refers to this object: kept by it, it would keep the graphs of finished batches alive
        # until the garbage collector runs.
        return _with_attention(self._attend)(*args, **kwargs)

    def _seen(self, matrix: Tensor) -> Tensor:
        """Return the attention [B,heads,queries,keys] that the model continues with."""
        return matrix


class _Explicit(PlainAttention):
    """Lets the matrix of every attention pass through a probe.

    Attributes:
        blocks: the matrices [B,heads,N,N] that relate things to themselves, in the order in which they were made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[Capture] = []
        self._shapes: list[torch.Size] = []
        self._side_by_side = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: Arguments = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = super().__torch_function__(func, types, args, kwargs)
        return self._seen(found) if func in _SOFTMAXES and _is_attention(found, *args[1:2], **kwargs or {}) else found

    def _attend_many(
        self, *args: Any, need_weights: bool = True, average_attn_weights: bool = True, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Do as `multi_head_attention_forward` does."""
        output, _ = self._multi_head(*args, need_weights=False, **kwargs)  # True would go round the attention inside
        if not need_weights:
            return output, None
        return output, self._last.mean(1) if average_attn_weights else self._last

    def _seen(self, matrix: Tensor) -> Tensor:
        """Keep an attention [B,heads,queries,keys] or [B,queries,keys]; return what the model shall go on with."""
        heads = matrix.unsqueeze(1) if matrix.dim() == 3 else matrix  # noqa: PLR2004 -- one head
        self._shapes.append(heads.shape)
        self._last = matrix
        if heads.shape[-2] != heads.shape[-1]:
            return matrix
        self._side_by_side |= bool(self.blocks) and not matrix.requires_grad
        capture, through = probed(heads)
        self.blocks.append(capture)
        self._last = through.view_as(matrix)
        return self._last

    @property
    def attention(self) -> Tensor:
        """Of every block, [L,B,heads,N,N], float32."""
        return torch.stack([block.activation for block in self.blocks]).float()

    def layout(self, info: ModelInfo, units: Sequence[Row]) -> Layout:
        """Say where the image's grid is among the tokens.

        Args:
            info: of the model.
            units: the inputs that it was given.

        Raises:
            FailedPrecondition: the attention is not between all of an image's patches, block after block.
        """
        layers = reversed(list(info.layers.values()))  # the first shows best where its grid is: nothing is mixed yet
        grids = {_tokens(one.layout): one.layout for one in layers if one.layout}
        if trouble := self._trouble(len(units), grids):
            name = units[0].calls[0].name
            raise FailedPrecondition(f"{name} needs {METHODS[name].needs}: {trouble.format(name=info.name)}")
        return grids[self.blocks[0].activation.shape[-1]]

    def _trouble(self, images: int, grids: Collection[int]) -> str:
        """Say in words what is wrong with the attention, if anything is."""
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
            return f"{{name}}'s attention is between {square[0][1]} things that are no patches of a known grid"
        return "{name} has blocks that do not follow one another" if self._side_by_side else ""


def _tokens(layout: Layout) -> int:
    """Return how many tokens there are; 0 where the layout has none."""
    return layout.prefix + layout.height * layout.width if layout.axes == "tokens" else 0


def _with_attention(attend: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return torch's own `multi_head_attention_forward` with another attention inside."""
    whole = functional.multi_head_attention_forward
    names = {"scaled_dot_product_attention": attend, "has_torch_function": lambda _tensors: False}
    return FunctionType(whole.__code__, vars(functional) | names, whole.__name__, whole.__defaults__)


_SOFTMAXES = (functional.softmax, torch.softmax, torch.special.softmax, Tensor.softmax)


def _is_attention(found: Tensor, dim: int | None = None, **_more: Any) -> bool:
    """Tell whether what a softmax returned relates things to themselves: square, each row adding up to 1."""
    along_rows = dim in (-1, found.dim() - 1)
    return along_rows and found.dim() > 2 and found.shape[-1] == found.shape[-2] > 1  # noqa: PLR2004 -- a matrix
