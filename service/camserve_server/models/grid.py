"""Possible positions of the image grid in a layer's output, and its conversion to [B,C,h,w]."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from camserve_server.models.values import Layout

PREFIXES = range(17)
"""Possible numbers of class, distillation and register tokens before the grid; 5 is the most in common models."""


def candidates(shape: Sequence[int], size: tuple[int, int], suffix: int = 0) -> tuple[Layout, ...]:
    """List the layouts that an output may have, the likeliest first.

    Four axes are [B,C,h,w] or [B,h,w,C]. Three are tokens [B,N,C], where N is a number of prefix tokens plus h*w, or a
    known number of suffix tokens more. A grid has the proportions of the image, to a row or a column, because strides
    round up or down. Exact proportions are likelier than rounded ones, and few prefix tokens are likelier than many.

    Args:
        shape: the shape of the layer's output, with the batch first.
        size: height and width of the model's input.
        suffix: a number of tokens that may follow the grid.

    Returns:
        The layouts of more than one cell; empty if no such grid fits.
    """
    if len(shape) == 4:  # noqa: PLR2004 -- batch, channels, height, width
        layouts = [Layout("nchw", *shape[2:]), Layout("nhwc", *shape[1:3])]
    elif len(shape) == 3:  # noqa: PLR2004 -- batch, tokens, channels
        layouts = [
            layout
            for tail in dict.fromkeys((0, suffix))
            for prefix in PREFIXES
            for layout in _rectangles(shape[1] - prefix - tail, prefix, tail)
        ]
    else:
        layouts = []
    fitting = [
        layout for layout in layouts if distortion(layout, size) <= max(size) and layout.height * layout.width > 1
    ]
    return tuple(sorted(fitting, key=lambda layout: distortion(layout, size)))  # stable: few prefix tokens first


def _rectangles(cells: int, prefix: int, suffix: int) -> Iterator[Layout]:
    for height in range(2, cells // 2 + 1):
        if cells % height == 0:
            yield Layout("tokens", height, cells // height, prefix, suffix)


def fitting(layout: Layout, tokens: int) -> Layout:
    """Return the layout for this number of tokens that is closest to a layout known to within a row and a column.

    The size of a grid for another input depends on how the model rounds; only the number of tokens shows it.
    """
    if layout.tokens in (0, tokens):
        return layout

    def distance(other: Layout) -> int:
        return abs(other.height - layout.height) + abs(other.width - layout.width)

    rectangles = _rectangles(tokens - layout.prefix - layout.suffix, layout.prefix, layout.suffix)
    return min(rectangles, key=distance, default=layout)


def distortion(layout: Layout, size: tuple[int, int]) -> int:
    """Return a grid's deviation from the image's proportions, in columns (rows) times the image's height (width)."""
    height, width = size
    return abs(layout.height * width - layout.width * height)


def to_grid(output: Tensor, layout: Layout) -> Tensor:
    """Convert a layer's output, or its gradient, to [B,C,h,w] in float32.

    In half precision the squares and cubes of gradients, which the methods compute, would be lost.
    """
    if layout.axes == "nhwc":
        output = output.movedim(3, 1)
    elif layout.axes == "tokens":
        layout = fitting(layout, output.shape[1])
        tokens = output[:, layout.prefix : output.shape[1] - layout.suffix].transpose(1, 2)
        output = tokens.reshape(*tokens.shape[:2], layout.height, layout.width)
    return output.float()
