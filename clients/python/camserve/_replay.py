"""Replays: a receipt's explanation asked for again, and compared: pure, so that both clients share it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from camserve import _codec
from camserve._errors import Internal
from camserve._receipts import packed, target_message
from camserve._values import Method

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from camserve._receipts import Receipt
    from camserve._result import Explanation, Result
    from camserve.v1 import explain_pb2

CLOSE: Final = 1e-5
"""Share of a map's maximum, or of a score, up to which float32 differs by the company of a batch."""

_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was compared.

    Attributes:
        name: Of what was compared.
        then: What the receipt says.
        now: What came now.
        same: Whether they agree.
        matters: Whether the replay differs if they do not: other versions do not matter as long as
            the numbers are the same.
        words: What is the matter, or how well they agree.
    """

    name: str
    then: str
    now: str
    same: bool
    matters: bool = True
    words: str = ""


@dataclass(frozen=True, eq=False, slots=True)
class Replay:
    """What came of asking for a receipt's explanation again.

    Attributes:
        checks: What was compared: the photo, what the model saw of it, the weights, the score, the
            map, and what computed them.
        gap: Greatest difference of the two maps, as a share of the greatest absolute value of the
            receipt's; infinite where they are not on one grid, None where the receipt has no map.
        explanation: The new one.
    """

    checks: tuple[Check, ...]
    gap: float | None
    explanation: Explanation = field(repr=False)

    @property
    def same(self) -> bool:
        """Whether it is the same photo, by the same weights, with the same score and map."""
        return not self.differences

    @property
    def differences(self) -> tuple[str, ...]:
        """What differs, in words."""
        return tuple(each.words for each in self.checks if each.matters and not each.same)


def request(receipt: Receipt) -> explain_pb2.ExplainRequest:
    """Return the request for a receipt's explanation, still without an image.

    Raises:
        InvalidArgument: The receipt says what cannot be asked for.
    """
    smoothing = receipt.augmentation_smoothing, receipt.eigen_smoothing
    question = _codec.Question(
        model=receipt.model,
        methods=Method(receipt.method, receipt.parameters, *smoothing),
        layers=receipt.layers,
        fusion=receipt.fusion,
    ).request()
    question.targets.append(target_message(receipt.target))
    return question


def explanation(result: Result) -> Explanation:
    """Return the one explanation that was asked for.

    Raises:
        Internal: The answer has none.
    """
    if not result.explanations:
        raise Internal("the server sent no explanation")
    return result.explanations[0]


def compare(receipt: Receipt, explanation: Explanation) -> Replay:
    """Compare a receipt with a new explanation.

    Raises:
        FailedPrecondition: The server sent no receipt for it.
    """
    now = explanation.receipt
    gap = _gap(receipt.heatmap, now.heatmap)
    numbers = [_score(receipt.score, now.score)]
    if receipt.heatmap is not None and now.heatmap is not None and gap is not None:
        numbers.append(_map(receipt.heatmap, now.heatmap, gap))
    differ = not all(each.same for each in numbers)
    digests = (
        _digest("photo", "the photo is another one", receipt.image_sha256, now.image_sha256),
        _digest("pixels seen", "the model saw other pixels", receipt.input_sha256, now.input_sha256),
        _digest("weights", "the weights are others", receipt.digest, now.digest),
    )
    return Replay((*digests, *numbers, *_circumstances(receipt, now, matter=differ)), gap, explanation)


def _digest(name: str, words: str, then: str, now: str) -> Check:
    shown = f"{words} (SHA-256 {_brief(now)}, and it was {_brief(then)})"
    return Check(name, _brief(then), _brief(now), then == now, words="" if then == now else shown)


def _brief(digest: str) -> str:
    return digest if len(digest) <= _SHOWN else f"{digest[:_SHOWN]}…"


def _score(then: float, now: float) -> Check:
    # Two numbers that are no numbers are the same here; about zero float32 is off by as much as at one.
    same = math.isclose(then, now, rel_tol=CLOSE, abs_tol=CLOSE) or (math.isnan(then) and math.isnan(now))
    words = "" if same else f"the score is {now:.6g}, and was {then:.6g}"
    return Check("score", f"{then:.6g}", f"{now:.6g}", same, words=words)


def _gap(then: NDArray[np.float32] | None, now: NDArray[np.float32] | None) -> float | None:
    if then is None or now is None:
        return None
    if then.shape != now.shape:
        return math.inf
    if np.array_equal(then, now, equal_nan=True):
        return 0.0
    furthest = float(np.abs(then.astype(np.float64) - now).max())
    greatest = float(np.abs(then).max())
    return furthest / greatest if greatest > 0 and math.isfinite(furthest) else math.inf


def _map(then: NDArray[np.float32], now: NDArray[np.float32], gap: float) -> Check:
    had, has = ("×".join(map(str, each.shape)) for each in (then, now))
    if then.shape != now.shape:
        words = f"the map has {has} cells, and had {had}"
    elif packed(then) == packed(now):
        words = "byte for byte"
    elif gap <= CLOSE:
        words = f"within {gap:.1e} of its maximum"
    else:
        words = f"the map differs, by {gap:.2g} of its maximum"
    return Check("map", had, has, gap <= CLOSE, words=words)


def _circumstances(receipt: Receipt, now: Receipt, *, matter: bool) -> Iterator[Check]:
    then_by_name, now_by_name = ({**each.versions, **_place(each)} for each in (receipt, now))
    for name in sorted({*then_by_name, *now_by_name}):
        then, new = then_by_name.get(name, "none"), now_by_name.get(name, "none")
        words = "" if then == new else f"{name} is {new}, and was {then}"
        yield Check(name, then, new, then == new, matter, words)


def _place(receipt: Receipt) -> dict[str, str]:
    return {"device": receipt.device, "precision": receipt.precision, "source": receipt.source}
