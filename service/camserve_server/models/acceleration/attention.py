"""Self-attention after the default layer, without the transposed copies of `nn.MultiheadAttention`.

torch's module puts the tokens first, so its backward pass copies all three projections. `attend` keeps images first.
It computes the same sums in another order, so results differ by rounding.

Measured, forward and backward pass of [8,197,768] with 12 heads in float32 (vit_b_16, AMD EPYC with AVX2, one thread):
0.52 s with torch's module, 0.29 s with `attend`.
"""

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from camserve_server.models.acceleration.prefix import pad_tokens
from camserve_server.models.acceleration.usage import Usage


def find_attentions(module: nn.Module, usage: Usage) -> list[str]:
    """Return the names of the attentions after the default layer that `attend` can replace."""
    return [
        name
        for name, child in module.named_modules()
        if type(child) is nn.MultiheadAttention and _is_plain(child) and usage.after[id(child.in_proj_weight)]
    ]


def _is_plain(attention: nn.MultiheadAttention) -> bool:
    extra = attention.bias_k is not None or attention.add_zero_attn
    return attention.batch_first and attention.kdim == attention.vdim == attention.embed_dim and not extra


def attend(
    attention: nn.MultiheadAttention,
    forward: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    prefix: int | None = None,
    **options: Any,
) -> Any:
    """Compute self-attention without a mask; call the module's own forward for anything else.

    Args:
        attention: the module.
        forward: the module's own forward.
        query: tokens [B,N,C].
        key: the same tensor, for self-attention.
        value: the same tensor, for self-attention.
        prefix: the number of leading tokens that are queries; the output of all others is 0. None for all tokens.
        options: the other arguments of the call.
    """
    relevant = {
        name: option for name, option in options.items() if option is not None and name != "average_attn_weights"
    }
    tokens = query.to(attention.in_proj_weight.dtype)
    if not (query is key is value) or query.dim() != 3 or relevant != {"need_weights": False}:  # noqa: PLR2004 -- [B,N,C]
        mixed, weights = forward(tokens, key.to(tokens.dtype), value.to(tokens.dtype), **options)
        return mixed.to(query.dtype), weights
    queries = [] if prefix is None else _heads(attention, tokens[:, :prefix], 0, 1)
    mixed = _mix_values(*queries, *_heads(attention, tokens, len(queries), 3))
    return pad_tokens(attention.out_proj(mixed.transpose(1, 2).flatten(2)).to(query.dtype), query.shape[1]), None


def _heads(attention: nn.MultiheadAttention, tokens: Tensor, start: int, stop: int) -> list[Tensor]:
    """Return projections of tokens, [B,heads,N,c] each: those from `start` to `stop` of queries, keys and values."""
    rows = slice(start * attention.embed_dim, stop * attention.embed_dim)
    bias = cast("Tensor | None", attention.in_proj_bias)
    projected = functional.linear(tokens, attention.in_proj_weight[rows], None if bias is None else bias[rows])
    heads = projected.view(*tokens.shape[:2], -1, attention.num_heads, attention.head_dim)
    return list(heads.permute(2, 0, 3, 1, 4))


def _mix_values(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Mix values [B,heads,N,c] by softmax(q kᵀ / √c)."""
    if query.device.type != "cpu" or query.dtype == torch.float32:
        return functional.scaled_dot_product_attention(query, key, value)
    # On a CPU the backward pass of the fused attention takes three times as long in half precision.
    return (query / math.sqrt(query.shape[-1]) @ key.transpose(-2, -1)).softmax(-1) @ value
