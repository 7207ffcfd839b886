"""Where the image's grid is in a layer's output, and how to bring it to [B,C,h,w]."""

import math
from collections.abc import Collection

from torch import Tensor, nn

from camserve_server.types import Layout

PREFIXES = (0, 1, 2, 5)  # none; a class token; class and distillation tokens; class and four register tokens


def find(output: Tensor, model: nn.Module, tokens: Collection[int] = ()) -> Layout | None:
    """Find the grid in a layer's output for one image.

    Four dimensions are [1,C,h,w], or [1,h,w,C] where only the first two of the three can be a grid; three are tokens
    [1,N,C] with a square grid behind the class and register tokens. An output whose first dimension is not the batch
    (the windows of a Swin), that is not square as the image is (the heads of an attention), or that has a row and a
    column for every token (an attention matrix), has no grid.

    Args:
        output: of the layer, for one square image.
        model: asked for its number of prefix tokens, which timm's transformers know.
        tokens: how many tokens the model's layers have.

    Returns:
        The layout, or None where there is no grid larger than one cell.
    """
    if output.dim() == 0 or output.shape[0] != 1:
        return None
    if output.dim() == 4:  # noqa: PLR2004 -- batch, channels, height, width
        return _image_grid(output, tokens)
    if output.dim() == 3:  # noqa: PLR2004 -- batch, tokens, channels
        return _token_grid(output.shape[1], getattr(model, "num_prefix_tokens", None))
    return None


def _image_grid(output: Tensor, tokens: Collection[int]) -> Layout | None:
    _, first, second, third = output.shape
    if second == third in tokens:
        return None
    if first == second != third and second > 1:
        return Layout("nhwc", first, second)
    square = abs(second - third) <= 1 < second * third
    return Layout("nchw", second, third) if square else None


def _token_grid(tokens: int, prefix: int | None) -> Layout | None:
    for skipped in PREFIXES if prefix is None else (prefix,):
        side = math.isqrt(max(tokens - skipped, 0))
        if side > 1 and side * side == tokens - skipped:
            return Layout("tokens", side, side, skipped)
    return None


def ambiguous(output: Tensor) -> bool:
    """Tell whether the channels of a [1,C,h,w] or [1,h,w,C] cannot be told from its rows: all three are equal."""
    return output.dim() == 4 and len(set(output.shape[1:])) == 1  # noqa: PLR2004 -- batch, channels, height, width


def to_grid(output: Tensor, layout: Layout) -> Tensor:
    """Bring a layer's output, or its gradient, to [B,C,h,w], in float32.

    Half precision would lose the squares and cubes of gradients that the methods take.
    """
    if layout.axes == "nhwc":
        output = output.movedim(3, 1)
    elif layout.axes == "tokens":
        tokens = output[:, layout.prefix :].transpose(1, 2)
        output = tokens.reshape(*tokens.shape[:2], layout.height, layout.width)
    return output.float()
