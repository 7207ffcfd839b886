"""Maps from the attention in every block of a transformer: one function for each formula.

Notation, for one image: A_l is the attention of block l of D, a matrix N×N for each head. Each row of it holds the
shares that one token takes from every token. ∇A_l is the gradient of the score with respect to A_l, E_h is the mean
over heads, and (·)⁺ is the ReLU. The first of the N tokens, the prefix, are class, distillation and register tokens;
the others are the image's patches. Each function takes attention [D,B,heads,N,N], gradients of that shape and the
length of the prefix, and returns a value for each patch [B, N − prefix]. `gradeclip` takes other tensors.

R, the attention accumulated over the blocks, is read in the rows of the tokens that the score depends on: those with a
gradient in the last block. They are the class token; or the class and the distillation token; or all patches, if the
model takes the mean over them. The product of the identity terms alone, which the residual connections carry from a
token to itself, is subtracted. If patches are read, it would add the same to every patch; if a class token is read, it
is in no patch's column.
"""

import torch
from torch import Tensor
from torch.nn import functional


def rollout(attention: Tensor, gradients: Tensor, prefix: int, *, heads: str, discard: float) -> Tensor:
    """Multiply the attention of all blocks, from the patches to the tokens that the score depends on.

    R = Ã_D … Ã_1, where Ã_l is 0.5 Ā_l + 0.5 I with each row divided by its sum, and Ā_l is the mean of A_l over heads.

    The map is the class token's row of R. If the score depends on several tokens, it is the mean of their rows: of the
    class and the distillation token, or of all patches if the model averages them. First, the product of the identity
    terms alone is subtracted from R. It is a diagonal: what the residual connections carry from a token to itself.

    The map does not depend on the target. Abnar and Zuidema 2020, section 3. Two options are Gildenblat's additions:
    `heads` fuses the heads by their maximum or minimum, and `discard` sets a share of each block's lowest values to
    zero.
    """
    fused = _drop_lowest(_HEAD_FUSIONS[heads](attention), discard)
    return _read_rows(_accumulate(fused, normalised=True), gradients, prefix)


def gradient_rollout(attention: Tensor, gradients: Tensor, prefix: int, *, discard: float) -> Tensor:
    """Multiply the attention of all blocks, each weighted by its positive effect on the score.

    R = Ã_D … Ã_1, where Ã_l is (E_h[∇A_l ⊙ A_l])⁺ + I with each row divided by its sum.

    The share `discard` of the lowest values of (E_h[∇A_l ⊙ A_l])⁺ is set to zero before I is added. The map is taken
    from R as in attention_rollout. Gildenblat 2020, except that each row is divided by its own sum. His code divides
    the columns by the rows' sums.
    """
    fused = _drop_lowest((gradients * attention).mean(2).clamp(min=0), discard)
    return _read_rows(_accumulate(fused, normalised=True), gradients, prefix)


def chefer(attention: Tensor, gradients: Tensor, prefix: int) -> Tensor:
    """Accumulate over the blocks the relevance that attention with a positive effect on the score carries.

    R ← R + E_h[(∇A_l ⊙ A_l)⁺] R for each block l, starting with R = I.

    The map is taken from R as in attention_rollout. Chefer et al. 2021, equations 5 and 6.
    """
    fused = (gradients * attention).clamp(min=0).mean(2)
    return _read_rows(_accumulate(fused, normalised=False), gradients, prefix)


def legrad(_attention: Tensor, gradients: Tensor, prefix: int, *, blocks: float) -> Tensor:
    """Add up over blocks how much more attention to each patch would raise the score of the block's own tokens.

    M_j = Σ_l E_h[1/N Σ_i (∂s_l/∂A_l)⁺_ij] for patch j, with i over the N tokens, where s_l is the score of block l.

    The head of the model is everything after the last block. s_l is the score that it computes if each of its input
    tokens is replaced by the mean of block l's tokens. Bousselham et al. 2025, section 3, as in the authors' code for
    models with a class token. For models with attentional pooling, the authors use the attention of the pooling;
    camserve uses that of the blocks for every model.
    """
    used = gradients[-int(blocks) :] if blocks else gradients
    return used.clamp(min=0).mean((2, 3)).sum(0)[:, prefix:]


def gradeclip(queries: Tensor, keys: Tensor, values: Tensor, gradients: Tensor, prefix: int) -> Tensor:
    """Weight the values of the last attention by the gradient at its output, and by how alike queries and keys are.

    M_j = (Σ_t λ_tj ⟨∂S/∂o_t, v_j⟩)⁺ for patch j, where o_t is the output of the last attention for token t.

    t is the class token. If the score depends on several tokens of the last attention, t runs over these. In a model
    with attention pooling, such as SigLIP, the pooling is the last attention and its query is t. Queries q, keys k,
    values v and outputs o, before the projection, are those of all heads, concatenated.

    λ_tj is the cosine of q_t and k_j, min-max normalised over the patches, or 1 if all are equal. It replaces the
    attention, which is often on few patches. Zhao et al. 2024, section 3. The authors' code computes the last attention
    with a single head; camserve does not change the model.

    Args:
        queries: [B,heads,T,d].
        keys: [B,heads,N,d].
        values: [B,heads,N,d].
        gradients: of the score at the attention's output, [B,heads,T,d].
        prefix: the number of tokens before the patches.
    """
    query, key, value, gradient = (tokens.transpose(1, 2).flatten(2) for tokens in (queries, keys, values, gradients))
    cosines = functional.normalize(query, dim=-1) @ functional.normalize(key[:, prefix:], dim=-1).mT
    lowest, highest = cosines.amin(-1, keepdim=True), cosines.amax(-1, keepdim=True)
    alike = torch.where(highest > lowest, (cosines - lowest) / (highest - lowest), 1.0)
    return (alike * (gradient @ value[:, prefix:].mT)).sum(1).clamp(min=0)


_HEAD_FUSIONS = {
    "mean": lambda attention: attention.mean(2),
    "max": lambda attention: attention.amax(2),
    "min": lambda attention: attention.amin(2),
}


def _drop_lowest(blocks: Tensor, share: float) -> Tensor:
    """Set a share of the lowest values of each matrix in [D,B,N,N] to zero."""
    flat = blocks.flatten(2)
    lowest = flat.topk(int(flat.shape[2] * share), largest=False).indices
    return flat.scatter(2, lowest, 0.0).view_as(blocks)


def _accumulate(blocks: Tensor, *, normalised: bool) -> Tensor:
    """Return R without the product of the identity terms [B,N,N], by R ← (I + E_l) R from R = I.

    R is kept as the sum of the part that attention carries and of a diagonal, the product of the identity terms.
    Subtracting that diagonal from R in the end would leave little but rounding errors.

    Args:
        blocks: E_l [D,B,N,N].
        normalised: True to divide each row of I + E_l by its sum.
    """
    carried, diagonal = torch.zeros_like(blocks[0]), torch.ones_like(blocks[0, ..., :1])
    for block in blocks:
        row_sums = 1 + block.sum(-1, keepdim=True) if normalised else 1
        carried = (carried + block @ carried + block * diagonal.mT) / row_sums
        diagonal = diagonal / row_sums
    return carried


def _read_rows(relevance: Tensor, gradients: Tensor, prefix: int) -> Tensor:
    """Return the mean [B, N − prefix] of the rows of R whose tokens the score depends on, or of all if of none."""
    depends = gradients[-1].abs().amax((1, 3)) > 0
    depends = depends | ~depends.any(1, keepdim=True)
    row_weights = depends.to(relevance) / depends.sum(1, keepdim=True)
    return (row_weights.unsqueeze(1) @ relevance).squeeze(1)[:, prefix:]
