"""Maps from the attention in every block of a transformer: one function for each formula.

Notation, for one image: A_l is the attention of block l, a matrix N×N for each head whose row is what one token takes
from every token; ∇A_l is the score's gradient there; E_h is the mean over heads, (·)⁺ cuts at zero. Of the N tokens the
first ones, the prefix, are class, distillation and register tokens, the others are the image's patches. Every function
takes attention [L,B,heads,N,N], gradients of that shape and the length of the prefix, and returns a value for each
patch [B, N − prefix].

What an image says to the score is read where the score reads the tokens: in the rows of the tokens on which the
gradient of the last block shows the score to depend. Those are the class token's row alone, or the class and the
distillation token's, or, where the model takes the mean over its patches, theirs.
"""

from collections.abc import Iterable
from functools import reduce

import torch
from torch import Tensor


def rollout(attention: Tensor, gradients: Tensor, prefix: int, *, heads: str, discard: float) -> Tensor:
    """Follow the attention from the tokens that the score reads through all blocks to the patches.

    R = Ã_L … Ã_1, where Ã_l is 0.5 Ā_l + 0.5 I with each row divided by its sum, and Ā_l is the mean of A_l over heads;
    the map is R in the row of the class token. It does not depend on the target. Abnar and Zuidema 2020, section 3 and
    appendix A.1. Fusing the heads by their maximum or minimum, and setting the share `discard` of each block's lowest
    values to zero, are Gildenblat's additions.
    """
    fused = _FUSIONS[heads](attention)
    return _read(_rolled(_keep(block, discard) for block in fused), gradients, prefix)


def gradient_rollout(attention: Tensor, gradients: Tensor, prefix: int, *, discard: float) -> Tensor:
    """Follow the attention that speaks for the score through all blocks to the patches.

    R = Ã_L … Ã_1, where Ã_l is (E_h[∇A_l ⊙ A_l])⁺ + I with each row divided by its sum, after the share `discard` of
    its lowest values has been set to zero; the map is R in the row of the class token. Gildenblat 2020, with rows
    divided by their own sums (his code divides columns by them).
    """
    fused = (gradients * attention).mean(2).clamp(min=0)
    return _read(_rolled(_keep(block, discard) for block in fused), gradients, prefix)


def chefer(attention: Tensor, gradients: Tensor, prefix: int) -> Tensor:
    """Add up, from block to block, what the attention that speaks for the score carries to each token.

    R ← R + E_h[(∇A_l ⊙ A_l)⁺] R for each block l, from R = I; the map is R in the row of the class token. Chefer et al.
    2021, equations 5 and 6.
    """
    relevance = _identity(attention)
    for block in (gradients * attention).clamp(min=0).mean(2):
        relevance = relevance + block @ relevance
    return _read(relevance, gradients, prefix)


def legrad(_attention: Tensor, gradients: Tensor, prefix: int, *, blocks: float) -> Tensor:
    """Add up, over blocks, how much more attention to each patch would raise the score of the block's own tokens.

    Σ_l of the mean over heads and rows of (∂s_l/∂A_l)⁺, where s_l is the score that what follows the last block gives
    to the mean of block l's tokens, put in the place of every token. Bousselham et al. 2025, section 3, as the authors'
    code has it for models with a class token. Their other variant, for attentional pooling, looks at the pooling's
    attention instead; here that of the blocks is used for every model.
    """
    chosen = gradients[-int(blocks) :] if blocks else gradients
    return chosen.clamp(min=0).mean((2, 3)).sum(0)[:, prefix:]


_FUSIONS = {
    "mean": lambda attention: attention.mean(2),
    "max": lambda attention: attention.amax(2),
    "min": lambda attention: attention.amin(2),
}


def _keep(block: Tensor, discard: float) -> Tensor:
    """Set a share of each matrix's lowest values to zero."""
    flat = block.flatten(1)
    lowest = flat.topk(int(flat.shape[1] * discard), largest=False).indices
    return flat.scatter(1, lowest, 0.0).view_as(block)


def _rolled(blocks: Iterable[Tensor]) -> Tensor:
    """Multiply the blocks' matrices [B,N,N], each with the identity added and its rows made to sum to 1."""
    return reduce(lambda product, mixed: mixed @ product, map(_mixed, blocks))


def _mixed(block: Tensor) -> Tensor:
    mixed = block + torch.eye(block.shape[-1], device=block.device)
    return mixed / mixed.sum(-1, keepdim=True)


def _identity(attention: Tensor) -> Tensor:
    _, batch, _, tokens, _ = attention.shape
    return torch.eye(tokens, device=attention.device).expand(batch, -1, -1)


def _read(relevance: Tensor, gradients: Tensor, prefix: int) -> Tensor:
    """Take the mean of the rows [B,N,N] on whose tokens the score depends; of all, where it depends on none."""
    depends = gradients[-1].abs().amax((1, 3)) > 0
    depends = depends | ~depends.any(1, keepdim=True)
    rows = depends.to(relevance) / depends.sum(1, keepdim=True)
    return (rows.unsqueeze(1) @ relevance).squeeze(1)[:, prefix:]
