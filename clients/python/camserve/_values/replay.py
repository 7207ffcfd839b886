"""Compare a receipt with an explanation that was computed again."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from camserve._core.errors import Internal
from camserve._values.receipt import Receipt, packed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from camserve._values.result import Explanation, Result

CLOSE: Final = 1e-5
"""Tolerance, relative to a map's largest absolute value or to a score.

float32 results can differ this much if the rest of the batch differs.
"""

_SHOWN_DIGITS = 12  # of a digest


@dataclass(frozen=True, slots=True)
class Check:
    """Comparison of one property of two explanations.

    Attributes:
        name: Name of the property.
        then: Its value in the receipt.
        now: Its value in the new explanation.
        same: True if they agree.
        matters: True if a difference makes the replay differ. Other versions do not matter if the
            numbers agree.
        words: Description of the difference, or of the agreement.

    Example:
        >>> receipt = client.explain("cat.jpg").explanations[0].receipt
        >>> checks = client.replay(receipt, "cat.jpg").checks
        >>> [(check.name, check.same) for check in checks if check.matters]
        [('photo', True), ('pixels seen', True), ('weights', True), ('score', True), ('map', True)]
    """

    name: str
    then: str
    now: str
    same: bool
    matters: bool = True
    words: str = ""


@dataclass(frozen=True, eq=False, slots=True)
class Replay:
    """Comparison of a receipt with a new explanation of the same request.

    Attributes:
        checks: Comparisons of the photo, the pixels that the model saw, the weights, the score,
            the map, and the versions that computed them.
        gap: Largest absolute difference between the two maps, divided by the largest absolute value of
            the receipt's map. Infinite if the sizes differ, if only one map has non-finite values, or if
            only the receipt's map is zero everywhere; None if either has no map.
        explanation: The new explanation.

    Example:
        >>> from PIL import Image
        >>> receipt = client.explain("cat.jpg", targets=["tabby"]).explanations[0].receipt
        >>> client.replay(receipt, "cat.jpg").same
        True
        >>> replay = client.replay(receipt, Image.open("cat.jpg").point(lambda value: value // 2))  # a darker photo
        >>> [check.name for check in replay.checks if not check.same]
        ['photo', 'pixels seen', 'score', 'map']
        >>> replay.differences[0], round(replay.gap, 1)
        ('the photo differs (SHA-256 ..., was ...)', 0.1)
    """

    checks: tuple[Check, ...]
    gap: float | None
    explanation: Explanation = field(repr=False)

    @property
    def same(self) -> bool:
        """True if photo, weights, score and map are the same."""
        return not self.differences

    @property
    def differences(self) -> tuple[str, ...]:
        """Descriptions of the differences that matter."""
        return tuple(check.words for check in self.checks if check.matters and not check.same)


def only_explanation(result: Result) -> Explanation:
    """Return the only explanation of a replayed request.

    Raises:
        Internal: The result has no explanation.
    """
    if not result.explanations:
        raise Internal("the server sent no explanation")
    return result.explanations[0]


def compare_with_receipt(receipt: Receipt, explanation: Explanation) -> Replay:
    """Compare a receipt with a new explanation.

    Raises:
        FailedPrecondition: The server sent no receipt with the explanation.
    """
    now = explanation.receipt
    gap = _relative_gap(receipt.heatmap, now.heatmap)
    results = [_compare_scores(receipt.score, now.score)]
    if receipt.heatmap is not None:
        results.append(_compare_maps(receipt.heatmap, now.heatmap, gap))
    differ = not all(check.same for check in results)
    digests = (
        _compare_digests("photo", "the photo differs", receipt.image_sha256, now.image_sha256),
        _compare_digests("pixels seen", "the pixels that the model saw differ", receipt.input_sha256, now.input_sha256),
        _compare_digests("weights", "the weights differ", receipt.digest, now.digest),
    )
    return Replay((*digests, *results, *_compare_environments(receipt, now, matter=differ)), gap, explanation)


def _compare_digests(name: str, difference: str, then: str, now: str) -> Check:
    words = "" if then == now else f"{difference} (SHA-256 {_shorten(now)}, was {_shorten(then)})"
    return Check(name, _shorten(then), _shorten(now), then == now, words=words)


def _shorten(digest: str) -> str:
    return digest if len(digest) <= _SHOWN_DIGITS else f"{digest[:_SHOWN_DIGITS]}…"


def _compare_scores(then: float, now: float) -> Check:
    # Two NaN are the same here. Around zero the tolerance is absolute: float32 is off there by as much as around one.
    same = math.isclose(then, now, rel_tol=CLOSE, abs_tol=CLOSE) or (math.isnan(then) and math.isnan(now))
    words = "" if same else f"the score is {now:.6g}, was {then:.6g}"
    return Check("score", f"{then:.6g}", f"{now:.6g}", same, words=words)


def _relative_gap(then: NDArray[np.float32] | None, now: NDArray[np.float32] | None) -> float | None:
    if then is None or now is None:
        return None
    if then.shape != now.shape:
        return math.inf
    if np.array_equal(then, now, equal_nan=True):
        return 0.0
    difference = float(np.abs(then.astype(np.float64) - now).max())
    scale = float(np.abs(then).max())
    return difference / scale if scale > 0 and math.isfinite(difference) else math.inf


def _compare_maps(then: NDArray[np.float32], now: NDArray[np.float32] | None, gap: float | None) -> Check:
    if now is None or gap is None:
        return Check("map", _size(then), "none", same=False, words=f"there is no map, had {_size(then)} cells")
    old_size, new_size = _size(then), _size(now)
    if then.shape != now.shape:
        words = f"the map has {new_size} cells, had {old_size}"
    elif packed(then) == packed(now):
        words = "byte for byte"
    elif gap <= CLOSE:
        words = f"within {gap:.1e} of its largest absolute value"
    else:
        words = f"the map differs by {gap:.2g} of its largest absolute value"
    return Check("map", old_size, new_size, gap <= CLOSE, words=words)


def _size(heatmap: NDArray[np.float32]) -> str:
    return "×".join(map(str, heatmap.shape))


def _compare_environments(receipt: Receipt, now: Receipt, *, matter: bool) -> Iterator[Check]:
    old_values, new_values = _environment(receipt), _environment(now)
    for name in sorted({*old_values, *new_values}):
        old, new = old_values.get(name, "none"), new_values.get(name, "none")
        words = "" if old == new else f"{name} is {new}, was {old}"
        yield Check(name, old, new, old == new, matter, words)


def _environment(receipt: Receipt) -> dict[str, str]:
    device = {"device": receipt.device, "precision": receipt.precision, "source": receipt.source}
    return {**receipt.versions, **device}
