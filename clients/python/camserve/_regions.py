"""Regions of a map: the connected parts where its values are high."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from camserve import _rendering
from camserve._errors import FailedPrecondition, Internal
from camserve._picture import Box

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from camserve._picture import Photo
    from camserve.v1 import explain_pb2

# COCO writes a number as characters from "0" on, which stand for 6 bits each: 5 of the number, the lowest ones first,
# and one that is set if more follow. The highest bit of the last character is the sign.
_FIRST_CHARACTER = ord("0")
_CHARACTERS = 64
_BITS = 5
_MORE = 1 << _BITS
_SIGN = 1 << (_BITS - 1)
_MAX_LENGTH = 12  # characters of a number: 60 bits
_MAX_CHARACTERS = 1 << 23  # of a mask; while it is read, each takes some 60 bytes


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
        runs = _runs(self.mask["counts"])
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


def decode(messages: Sequence[explain_pb2.Region], photo: Photo) -> tuple[Region, ...]:
    """Decode the regions of a map.

    Raises:
        Internal: They are invalid, such as a mask that does not have the photo's size.
    """
    if len(messages) > _rendering.MAX_REGIONS:
        raise Internal("the server sent more regions than a request can ask for")
    return tuple(_decode(message, photo) for message in messages)


def _decode(message: explain_pb2.Region, photo: Photo) -> Region:
    contour = np.array(message.contour, np.float32)
    box = (message.box.left, message.box.top, message.box.right, message.box.bottom)
    numbers = (*box, message.peak.x, message.peak.y, message.peak_value, message.share)
    if contour.size % 2 or not np.isfinite(contour).all() or not all(map(math.isfinite, numbers)):
        raise Internal("the server sent a region that has no valid place")
    if message.area > photo.width * photo.height:
        raise Internal("the server sent a region that is larger than the photo")
    contour.setflags(write=False)
    return Region(
        box=Box(*box),
        area=message.area,
        contour=contour.reshape(-1, 2),
        peak=(message.peak.x, message.peak.y),
        peak_value=message.peak_value,
        share=message.share,
        mask=_decode_mask(message.mask, photo) if message.HasField("mask") else None,
    )


def _decode_mask(message: explain_pb2.RunLengths, photo: Photo) -> RunLengths:
    pixels = photo.width * photo.height
    if len(message.counts) > min(_MAX_LENGTH * (pixels + 1), _MAX_CHARACTERS):
        raise Internal(f"the server sent a mask of {len(message.counts):,} characters, more than a photo can need")
    runs = _runs(message.counts)
    has_photo_size = (message.height, message.width) == (photo.height, photo.width)
    # A sum of floats does not overflow, and is exact up to 2^53.
    if not has_photo_size or runs.min() < 0 or runs.max() > pixels or runs.sum(dtype=np.float64) != pixels:
        raise Internal(f"the server sent a mask that does not have {photo.height} × {photo.width} pixels")
    return RunLengths(size=[message.height, message.width], counts=message.counts)


def _runs(counts: str) -> NDArray[np.int64]:
    """Return the lengths of the runs of a mask: of 0, of 1, of 0, and so on.

    From the fourth on, COCO writes each length as its difference from the last but one.

    Raises:
        Internal: The text is not a list of numbers.
    """
    codes = np.frombuffer(counts.encode(), np.uint8).astype(np.int64) - _FIRST_CHARACTER
    ends = np.flatnonzero(codes & _MORE == 0)
    lengths = np.diff(ends, prepend=-1)
    is_encoded = codes.size and not ((codes < 0) | (codes >= _CHARACTERS)).any() and not codes[-1] & _MORE
    if not is_encoded or lengths.max() > _MAX_LENGTH:
        raise Internal("the server sent a mask that is not encoded as COCO does")
    starts = ends - lengths + 1
    shifts = _BITS * (np.arange(codes.size) - np.repeat(starts, lengths))
    runs = np.add.reduceat((codes & (_MORE - 1)) << shifts, starts)
    runs -= ((codes[ends] & _SIGN) != 0) * (1 << _BITS * lengths)
    runs[1::2] = np.cumsum(runs[1::2])
    runs[2::2] = np.cumsum(runs[2::2])
    return runs
