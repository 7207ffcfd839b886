"""The papers' formulas on attention, for one image.

The model is a copy, in float64 unless asked otherwise, its attention computed step by step: by timm's own slow code, by
hand for torchvision's.
"""

import copy

import numpy as np
import torch
from torchvision import models as zoo


def blocks_of(module):
    return list(module.encoder.layers if isinstance(module, zoo.VisionTransformer) else module.blocks)


def by_hand(attention, kept):
    def forward(query, _key, _value, **_more):
        weight, bias, heads = attention.in_proj_weight, attention.in_proj_bias, attention.num_heads
        q, k, v = (query @ w.T + b for w, b in zip(weight.chunk(3), bias.chunk(3), strict=True))
        q, k, v = (each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in (q, k, v))
        kept.append((q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1))
        mixed = (kept[-1] @ v).transpose(1, 2).flatten(2)
        return mixed @ attention.out_proj.weight.T + attention.out_proj.bias, None

    return forward


def watched(model, dtype):
    """Return a copy of the model, and the lists of its blocks' attention and tokens, filled when it runs."""
    module, attention, tokens = copy.deepcopy(model).to(dtype), [], []
    for block in blocks_of(module):
        if isinstance(module, zoo.VisionTransformer):
            block.self_attention.forward = by_hand(block.self_attention, attention)
        else:
            block.attn.fused_attn = False
            block.attn.attn_drop.register_forward_hook(lambda _m, _i, out: attention.append(out))
        block.register_forward_hook(lambda _m, _i, out: tokens.append(out))
    return module, attention, tokens


def head(module, tokens):
    """The logits of a module's head for the mean of some tokens."""
    mean = tokens.mean(1, keepdim=True).expand_as(tokens)
    if isinstance(module, zoo.VisionTransformer):
        return module.heads(module.encoder.ln(mean)[:, 0])
    return module.forward_head(module.norm(mean))


def reference(model, seen, index=1, dtype=torch.float64):
    """Return the attention [L,heads,N,N] of one input [1,3,H,W], its gradients, and those of each block's own score."""
    module, attention, tokens = watched(model, dtype)
    logits = module(seen.to(dtype).requires_grad_())
    gradients = torch.autograd.grad(logits[0, index], attention, retain_graph=True)
    own = [
        torch.autograd.grad(head(module, z)[0, index], a, retain_graph=True)[0]
        for z, a in zip(tokens, attention, strict=True)
    ]
    as_array = lambda blocks: torch.cat(list(blocks)).detach().numpy()  # noqa: E731 -- three times in a row
    return as_array(attention), as_array(gradients), as_array(own)


def rolled(blocks):
    """The product of the blocks' matrices, less that of what their residual connections alone keep."""
    product, kept = np.eye(len(blocks[0])), np.eye(len(blocks[0]))
    for block in blocks:
        total = (block + np.eye(len(block))).sum(1, keepdims=True)
        product, kept = ((block + np.eye(len(block))) / total) @ product, kept / total
    return product - kept


def without_lowest(block, share):
    kept = block.copy().ravel()
    kept[np.argsort(kept, kind="stable")[: int(kept.size * share)]] = 0
    return kept.reshape(block.shape)


def paper(method, attention, gradients, own):
    """The relevance [N,N] of every token for every token; of LeGrad a row."""
    if method == "attention_rollout":
        return rolled([block.mean(0) for block in attention])
    if method == "gradient_rollout":
        fused = [(a * g).mean(0).clip(min=0) for a, g in zip(attention, gradients, strict=True)]
        return rolled([without_lowest(each, 0.9) for each in fused])
    if method == "chefer":
        relevance = np.eye(attention.shape[-1])
        for a, g in zip(attention, gradients, strict=True):
            relevance = relevance + (a * g).clip(min=0).mean(0) @ relevance
        return relevance - np.eye(len(relevance))
    return sum(g.clip(min=0).mean((0, 1)) for g in own)[None]
