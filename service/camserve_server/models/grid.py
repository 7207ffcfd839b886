"""Where the image's grid may be in a layer's output, and how to bring it to [B,C,h,w]."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from camserve_server.models.values import Layout

PREFIXES = range(17)
"""How many class, distillation and register tokens may come before the grid's first; 5 is the most that is common."""


def candidates(shape: Sequence[int], size: tuple[int, int]) -> tuple[Layout, ...]:
    """List the ways in which an output can be read as a grid, the likeliest first.

    Four axes are [B,C,h,w] or [B,h,w,C]. Three are tokens [B,N,C], whose N is a number of prefix tokens and a product
    h*w. A grid has the image's proportions, to a row or a column, as strides round up or down; exact proportions are
    likelier than rounded ones, few prefix tokens than many.

    Args:
        shape: of the layer's output, the first being the batch.
        size: height and width of the model's input.

    Returns:
        None at all where there is no grid larger than one cell.
    """
    if len(shape) == 4:  # noqa: PLR2004 -- batch, channels, height, width
        found = [Layout("nchw", *shape[2:]), Layout("nhwc", *shape[1:3])]
    elif len(shape) == 3:  # noqa: PLR2004 -- batch, tokens, channels
        found = [grid for prefix in PREFIXES for grid in _rectangles(shape[1] - prefix, prefix)]
    else:
        found = []
    fitting = [one for one in found if distortion(one, size) <= max(size) and one.height * one.width > 1]
    return tuple(sorted(fitting, key=lambda one: distortion(one, size)))  # a stable sort: few prefix tokens first


def _rectangles(cells: int, prefix: int) -> Iterator[Layout]:
    for height in range(2, cells // 2 + 1):
        if cells % height == 0:
            yield Layout("tokens", height, cells // height, prefix)


def distortion(layout: Layout, size: tuple[int, int]) -> int:
    """Return how far a grid is from the image's proportions, in columns (or rows) times the image's height (width)."""
    height, width = size
    return abs(layout.height * width - layout.width * height)


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
