"""Comparison of two explanations of one photo, such as those of two versions of a model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from camserve._core.errors import FailedPrecondition, InvalidArgument
from camserve._values import map_numbers
from camserve._values.picture import Box, Photo
from camserve._values.targets import BoxLike, to_box

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from camserve._values.prediction import Prediction
    from camserve._values.verdict import Verdict

HOTTEST: Final = 0.2
"""Share of the cells that ``Comparison.iou`` compares."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Difference between two explanations of one photo, a baseline and a candidate.

    The maps are compared over the part of the photo that both models see, with their raw, signed values. Ranks are
    compared on the coarser of the two grids, reduced to at most 16 cells along each axis. A number is NaN if it is
    undefined: for a map with values that are not finite, a correlation with a map that is constant, or the centre of
    a map without positive values.

    Attributes:
        spearman: Spearman's rank correlation of the cells, -1 to 1, on the coarser grid.
            Adebayo et al. 2018, arXiv:1810.03292, section 3.
        iou_curve: Intersection over union of the hottest cells of both maps, 0 to 1, for each share of
            ``SHARES``, on the coarser grid. After the top-k intersection of Ghorbani et al. 2019,
            arXiv:1710.10547, section 2.
        shift: Distance between the centres of mass of the positive values, in percent of the photo's
            diagonal. Ghorbani et al. 2019.
        box_energy: Shares of the positive values of both maps that lie in the box, 0 to 1; None without a
            box. Wang et al. 2020, arXiv:1910.01279, section 4.3.
        ssim: Mean structural similarity, -1 to 1, of the maps on the finer grid, each divided by its largest
            absolute value. Wang et al. 2004, doi:10.1109/TIP.2003.819861, equation 13.
        pearson: Pearson's correlation, -1 to 1, on the finer grid. Bylinskii et al. 2019, arXiv:1604.03605,
            section 4.
        kl: Kullback-Leibler divergence in nats, from 0, of the candidate's positive values from the
            baseline's, on the finer grid. Bylinskii et al. 2019, section 4.
        score_change: Explained score of the candidate minus that of the baseline.
        probability_change: Probability of the explained class, of the candidate minus that of the baseline.
        verdicts: Verdicts on both maps.
        same_target: True if both maps explain the same class.

    Example:
        >>> first, second = client.explain("cat.jpg", methods=["gradcam", "layercam"]).explanations
        >>> comparison = first.compare(second, box=(75, 0, 300, 300))
        >>> round(comparison.spearman, 2), round(comparison.iou, 2), comparison.verdict_changed
        (0.98, 0.82, False)
        >>> [round(share, 2) for share in comparison.box_energy]
        [0.85, 0.84]
    """

    spearman: float
    iou_curve: tuple[float, ...] = field(repr=False)
    shift: float
    box_energy: tuple[float, float] | None
    ssim: float
    pearson: float
    kl: float
    score_change: float
    probability_change: float
    verdicts: tuple[Verdict, Verdict]
    same_target: bool

    @property
    def iou(self) -> float:
        """Intersection over union of the hottest fifths of both maps, 0 to 1."""
        return self.iou_curve[map_numbers.SHARES.index(HOTTEST)]

    @property
    def verdict_changed(self) -> bool:
        """True if the maps have different verdicts."""
        return self.verdicts[0] != self.verdicts[1]

    def plain(self) -> dict[str, Any]:
        """Return the comparison as plain values for JSON, with None for NaN.

        Example:
            >>> first, second = client.explain("cat.jpg", methods=["gradcam", "layercam"]).explanations
            >>> plain = first.compare(second).plain()
            >>> plain["verdicts"], plain["same_target"], plain["score_change"]
            (['OK', 'OK'], True, 0.0)
        """
        numbers = ("spearman", "iou", "shift", "ssim", "pearson", "kl", "score_change", "probability_change")
        return {
            **{name: _json_number(getattr(self, name)) for name in numbers},
            "iou_curve": [
                [share, _json_number(iou)] for share, iou in zip(map_numbers.SHARES, self.iou_curve, strict=True)
            ],
            "box_energy": self.box_energy and list(map(_json_number, self.box_energy)),
            "verdicts": list(map(str, self.verdicts)),
            "same_target": self.same_target,
        }


class Explained(Protocol):
    """An explanation as far as it is compared: see ``Explanation``."""

    @property
    def heatmap(self) -> NDArray[np.float32] | None:
        """The raw map, float32 [h, w]."""
        ...

    @property
    def photo(self) -> Photo:
        """Geometry of the photo."""
        ...

    @property
    def score(self) -> float:
        """The explained score."""
        ...

    @property
    def target(self) -> Prediction:
        """The explained class."""
        ...

    @property
    def verdict(self) -> Verdict:
        """The verdict on the map."""
        ...


def compare_explanations(baseline: Explained, candidate: Explained, box: BoxLike | None = None) -> Comparison:
    """Compare two explanations of one photo.

    Args:
        baseline: The first explanation.
        candidate: The second one.
        box: Position of the object in pixels of the photo: a ``Box``, or left, top, right, bottom.

    Raises:
        FailedPrecondition: An explanation has no heatmap.
        InvalidArgument: The photos have different sizes, the models see no common part, or the box is invalid.
    """
    heatmaps = (_heatmap(baseline), _heatmap(candidate))
    photos = (baseline.photo, candidate.photo)
    return Comparison(
        **map_numbers.compare(heatmaps, photos, _common_part(*photos)),
        box_energy=_box_energy(heatmaps, photos, box),
        score_change=candidate.score - baseline.score,
        probability_change=candidate.target.probability - baseline.target.probability,
        verdicts=(baseline.verdict, candidate.verdict),
        same_target=baseline.target.class_index == candidate.target.class_index,
    )


def _heatmap(explanation: Explained) -> NDArray[np.float32]:
    if explanation.heatmap is None:
        raise FailedPrecondition("the explanation has no heatmap; request it with client.explain(..., heatmap=True)")
    return explanation.heatmap


def _common_part(first: Photo, second: Photo) -> Box:
    """Return the part of the photo that two models see."""
    if (first.width, first.height) != (second.width, second.height):
        sizes = " and ".join(f"{photo.width} × {photo.height}" for photo in (first, second))
        raise InvalidArgument(f"the explanations are of different photos: they have {sizes} pixels")
    edges = [(photo.seen.left, photo.seen.top, -photo.seen.right, -photo.seen.bottom) for photo in (first, second)]
    left, top, right, bottom = map(max, *edges)
    if left >= -right or top >= -bottom:
        raise InvalidArgument("the two models see no common part of the photo")
    return Box(left, top, -right, -bottom)


def _box_energy(
    heatmaps: tuple[NDArray[np.float32], ...], photos: tuple[Photo, ...], box: BoxLike | None
) -> tuple[float, float] | None:
    if box is None:
        return None
    edges = to_box(box, "box")
    first, second = (
        map_numbers.share_in_box(heatmap, photo, edges) for heatmap, photo in zip(heatmaps, photos, strict=True)
    )
    return first, second


def _json_number(number: float) -> float | None:
    return number if math.isfinite(number) else None
