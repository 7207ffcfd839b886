"""Run lengths of masks, as COCO stores them: column by column, as compressed text."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from camserve_server.core.arrays import Mask
from camserve_server.imaging.values import RunLengths

Edges: TypeAlias = NDArray[np.int32]
"""Edges of n rows or columns of cells, in pixels of a photo: int32 [n + 1], ascending."""

_BITS, _MORE, _OFFSET = 5, 0x20, 48  # of a character: bits of the number, flag that more characters follow, "0"
_DIGIT, _SIGN = 0x1F, 0x10


def encode(mask: Mask, rows: Edges, columns: Edges, size: tuple[int, int]) -> RunLengths:
    """Encode a mask of cells as the run lengths of the photo's pixels in them.

    Args:
        mask: True for the cells of the mask, bool [h, w].
        rows: edges of the rows of cells, in pixels of the photo, strictly ascending: [h + 1].
        columns: edges of the columns of cells, likewise: [w + 1].
        size: height and width of the photo, with fewer than 2^31 pixels.
    """
    height, width = size
    bounds = _bounds(mask, rows, columns, height)
    joined = np.flatnonzero(bounds[1:-1:2] == bounds[2::2])  # a run to the bottom of a column goes on in the next one
    bounds = np.delete(bounds, np.concatenate((2 * joined + 1, 2 * joined + 2)))
    lengths = np.diff(bounds, prepend=np.int32(0), append=np.int32(height * width))
    if len(lengths) > 1 and lengths[-1] == 0:  # the last run has no zeros after it
        lengths = lengths[:-1]
    return RunLengths(height, width, compress(lengths))


def _bounds(mask: Mask, rows: Edges, columns: Edges, height: int) -> Edges:
    """Return where runs start and stop, by turns, as pixels counted column by column."""
    changes = np.diff(np.pad(mask.T, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    cell_column, edge = np.nonzero(changes)
    places = rows[edge]
    counts = np.bincount(cell_column, minlength=mask.shape[1]).astype(np.int32)  # changes in each column of cells
    of_pixel = np.repeat(np.arange(mask.shape[1]), np.diff(columns))  # the column of cells of each column of pixels
    repeated = counts[of_pixel]
    ends = repeated.cumsum(dtype=np.int32)
    first = (counts.cumsum(dtype=np.int32) - counts)[of_pixel]  # the first change of each column of pixels
    index = np.arange(repeated.sum(), dtype=np.int32)
    index += np.repeat(first - (ends - repeated), repeated)
    bounds: Edges = places[index]
    bounds += np.repeat(np.arange(columns[0], columns[-1], dtype=np.int32) * np.int32(height), repeated)
    return bounds


def compress(lengths: NDArray[np.int32]) -> str:
    """Return run lengths as COCO's text.

    From the fourth on, each is the difference to the length before the last, as for masks whose columns resemble each
    other. A number is written in characters of five bits, the lowest first, with its sign in the last one.
    """
    numbers = lengths.copy()
    numbers[3:] -= lengths[1:-2]
    characters = []  # the first character of every number, the second, …; 0 where a number has no more
    more = np.ones(len(numbers), bool)
    while more.any():
        digit = numbers & _DIGIT
        numbers >>= _BITS
        goes_on = more & np.where(digit & _SIGN, numbers != -1, numbers != 0)
        characters.append(np.where(more, (digit | goes_on * _MORE) + _OFFSET, 0).astype(np.uint8))
        more = goes_on
    table = np.stack(characters, axis=1)
    return table[table > 0].tobytes().decode("ascii")
