"""Maps from the attention in every block of a transformer: one function for each formula.

Notation, for one image: A_l is the attention of block l, a matrix N×N for each head whose row is what one token takes
from every token; ∇A_l is the score's gradient there; E_h is the mean over heads, (·)⁺ cuts at zero. Of the N tokens the
first ones, the prefix, are class, distillation and register tokens, the others are the image's patches. Every function
takes attention [L,B,heads,N,N], gradients of that shape and the length of the prefix, and returns a value for each
patch [B, N − prefix].

What an image says to the score is read where the score reads the tokens: in the rows of the tokens on which the
gradient of the last block shows the score to depend. Those are the class token's row alone, or the class and the
distillation token's, or, where the model takes the mean over its patches, theirs. What a patch's token keeps of itself
past all attention, by the residual connections alone, is left out: where patches are read, it would be added to every
patch alike, and where a class token is read, it is in no patch's column.
"""

import torch
from torch import Tensor


def rollout(attention: Tensor, gradients: Tensor, prefix: int, *, heads: str, discard: float) -> Tensor:
    """Follow the attention from the tokens that the score reads through all blocks to the patches.

    R = Ã_L … Ã_1, where Ã_l is 0.5 Ā_l + 0.5 I with each row divided by its sum, and Ā_l is the mean of A_l over heads;
    the map is R in the row of the class token, or, without one, the mean over the patches' rows, less what each patch
    keeps of itself past all attention. It does not depend on the target. Abnar and Zuidema 2020, section 3. Fusing the
    heads by their maximum or minimum, and setting the share `discard` of each block's lowest values to zero, are
    Gildenblat's additions.
    """
    fused = _without_lowest(_FUSIONS[heads](attention), discard)
    return _read(_carried(fused, shared=True), gradients, prefix)


def gradient_rollout(attention: Tensor, gradients: Tensor, prefix: int, *, discard: float) -> Tensor:
    """Follow the attention that speaks for the score through all blocks to the patches.

    R = Ã_L … Ã_1, where Ã_l is (E_h[∇A_l ⊙ A_l])⁺ + I with each row divided by its sum, after the share `discard` of
    its lowest values has been set to zero; R is read as in attention_rollout. Gildenblat 2020, with rows divided by
    their own sums (his code divides columns by them).
    """
    fused = _without_lowest((gradients * attention).mean(2).clamp(min=0), discard)
    return _read(_carried(fused, shared=True), gradients, prefix)


def chefer(attention: Tensor, gradients: Tensor, prefix: int) -> Tensor:
    """Add up, from block to block, what the attention that speaks for the score carries to each token.

    R ← R + E_h[(∇A_l ⊙ A_l)⁺] R for each block l, from R = I; R is read as in attention_rollout. Chefer et al. 2021,
    equations 5 and 6.
    """
    fused = (gradients * attention).clamp(min=0).mean(2)
    return _read(_carried(fused, shared=False), gradients, prefix)


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


def _without_lowest(blocks: Tensor, share: float) -> Tensor:
    """Set a share of each matrix's lowest values to zero, in [L,B,N,N]."""
    flat = blocks.flatten(2)
    lowest = flat.topk(int(flat.shape[2] * share), largest=False).indices
    return flat.scatter(2, lowest, 0.0).view_as(blocks)


def _carried(blocks: Tensor, *, shared: bool) -> Tensor:
    """Return what each token gets from every token [B,N,N] through attention, by the recursion R ← (I + E_l) R.

    R is kept as the sum of what attention carries and of a diagonal, what the residual connections alone keep: taken
    away from R in the end, it would leave little but rounding errors.

    Args:
        blocks: E_l [L,B,N,N].
        shared: whether each row of I + E_l is divided by its sum.
    """
    carried, kept = torch.zeros_like(blocks[0]), torch.ones_like(blocks[0, ..., :1])
    for block in blocks:
        total = 1 + block.sum(-1, keepdim=True) if shared else 1
        carried = (carried + block @ carried + block * kept.mT) / total
        kept = kept / total
    return carried


def _read(relevance: Tensor, gradients: Tensor, prefix: int) -> Tensor:
    """Take the mean of the rows [B,N,N] on whose tokens the score depends; of all, where it depends on none."""
    depends = gradients[-1].abs().amax((1, 3)) > 0
    depends = depends | ~depends.any(1, keepdim=True)
    rows = depends.to(relevance) / depends.sum(1, keepdim=True)
    return (rows.unsqueeze(1) @ relevance).squeeze(1)[:, prefix:]
