"""Values that requests are made of, predictions, and descriptions of a server's models, layers and methods."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

import numpy as np

from camserve._core.errors import FailedPrecondition, Internal

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from camserve._values.picture import Box


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionOptions:
    """The regions of a map to return: its connected parts above a threshold, strongest first.

    Attributes:
        quantile: Threshold as a quantile of the shown values, 0 to 1. Default: 0.8, unless there is
            a ``mass``.
        mass: Threshold as a share of the sum of the shown values, 0 to 1: the strongest pixels that
            together have at least this share.
        max_regions: Maximum number of regions, 1 to 64: those with the largest sums.
        draw: True to draw their outlines on the overlay.
        masks: True to return a mask of each region.

    Example:
        >>> options = camserve.RegionOptions(mass=0.5, max_regions=3)  # the strongest pixels with half of the evidence
        >>> regions = client.explain("cat.jpg", regions=options).explanations[0].regions
        >>> [round(region.share, 1) for region in regions]
        [0.5]
    """

    quantile: float | None = None
    mass: float | None = None
    max_regions: int = 8
    draw: bool = False
    masks: bool = False


RegionsLike: TypeAlias = "bool | float | RegionOptions | None"
MAX_REGIONS = 64

# COCO writes a number as characters from "0" on, which stand for 6 bits each: 5 of the number, the lowest ones first,
# and one that is set if more follow. The highest bit of the last character is the sign.
_FIRST_CHARACTER = ord("0")
_CHARACTERS = 64
_BITS = 5
_MORE = 1 << _BITS
_SIGN = 1 << (_BITS - 1)
MAX_LENGTH = 12  # characters of a number: 60 bits


class RunLengths(TypedDict):
    """A mask in COCO's compressed run-length encoding, as ``pycocotools.mask`` reads it.

    Attributes:
        size: Height and width of the mask in pixels.
        counts: The lengths of the runs, column by column.

    Example:
        >>> options = camserve.RegionOptions(masks=True)
        >>> region = client.explain("cat.jpg", regions=options).explanations[0].regions[0]
        >>> region.mask["size"], type(region.mask["counts"])
        ([300, 451], <class 'str'>)
    """

    size: list[int]
    counts: str


@dataclass(frozen=True, eq=False, slots=True)
class Region:
    """A connected part of a map, in the pixels of the photo.

    Attributes:
        box: The smallest box around it.
        area: The number of its pixels.
        contour: Its outline, float32 [n, 2], read-only: the x and y of each corner, without holes.
        peak: Position (x, y) of its strongest value.
        peak_value: The raw value there; negative in a region of negative values.
        share: Share of the sum of all shown values of the map that it contains, 0 to 1.
        mask: The mask in COCO's run-length encoding; None if it was not requested.

    Example:
        >>> region = client.explain("cat.jpg", regions=True).explanations[0].regions[0]
        >>> region.box
        Box(left=121.0, top=60.0, right=303.0, bottom=252.0)
        >>> tuple(map(round, region.peak)), f"{region.share:.0%} of the evidence"
        ((140, 151), '31% of the evidence')
    """

    box: Box
    area: int
    contour: NDArray[np.float32] = field(repr=False)
    peak: tuple[float, float]
    peak_value: float
    share: float
    mask: RunLengths | None = field(default=None, repr=False)

    @property
    def mask_array(self) -> NDArray[np.bool_]:
        """The mask as an array: bool [height, width] of the photo.

        Raises:
            FailedPrecondition: The mask was not requested.

        Example:
            >>> options = camserve.RegionOptions(masks=True)
            >>> region = client.explain("cat.jpg", regions=options).explanations[0].regions[0]
            >>> region.mask_array.shape, region.mask_array.sum() == region.area
            ((300, 451), np.True_)
        """
        if self.mask is None:
            raise FailedPrecondition(
                "the region has no mask; request it with client.explain(..., regions=RegionOptions(masks=True))"
            )
        height, width = self.mask["size"]
        runs = run_lengths(self.mask["counts"])
        return np.repeat(np.arange(runs.size) % 2 == 1, runs).reshape(width, height).T

    def plain(self) -> dict[str, Any]:
        """Return the region as plain values for JSON.

        Example:
            >>> import json
            >>> region = client.explain("cat.jpg", regions=True).explanations[0].regions[0]
            >>> list(json.loads(json.dumps(region.plain())))
            ['box', 'area', 'contour', 'peak', 'peak_value', 'share', 'mask']
        """
        return {
            "box": asdict(self.box),
            "area": self.area,
            "contour": self.contour.tolist(),
            "peak": list(self.peak),
            "peak_value": self.peak_value,
            "share": self.share,
            "mask": self.mask,
        }


def run_lengths(counts: str) -> NDArray[np.int64]:
    """Return the lengths of the runs of a mask: of 0, of 1, of 0, and so on.

    From the fourth on, COCO writes each length as its difference from the last but one.

    Raises:
        Internal: The text is not a list of numbers.
    """
    codes = np.frombuffer(counts.encode(), np.uint8).astype(np.int64) - _FIRST_CHARACTER
    ends = np.flatnonzero(codes & _MORE == 0)
    lengths = np.diff(ends, prepend=-1)
    is_encoded = codes.size and not ((codes < 0) | (codes >= _CHARACTERS)).any() and not codes[-1] & _MORE
    if not is_encoded or lengths.max() > MAX_LENGTH:
        raise Internal("the server sent a mask that is not encoded as COCO does")
    starts = ends - lengths + 1
    shifts = _BITS * (np.arange(codes.size) - np.repeat(starts, lengths))
    runs = np.add.reduceat((codes & (_MORE - 1)) << shifts, starts)
    runs -= ((codes[ends] & _SIGN) != 0) * (1 << _BITS * lengths)
    runs[1::2] = np.cumsum(runs[1::2])
    runs[2::2] = np.cumsum(runs[2::2])
    return runs
