"""Comparison of the results of two models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from camserve._core.errors import FailedPrecondition, Internal
from camserve._values.comparison import Comparison, compare_explanations

if TYPE_CHECKING:
    from camserve._values.result import Result
    from camserve._values.targets import BoxLike, TargetLike


@dataclass(frozen=True, eq=False, slots=True)
class ResultComparison:
    """Comparison of the explanations of one image by two models.

    Attributes:
        baseline: Result of the first model.
        candidate: Result of the second model, for the same targets.
        comparisons: One comparison for each pair of explanations, in their order.

    Example:
        >>> both = client.compare("cat.jpg", "segmenter", "segmenter-2", targets=camserve.segment("red"))
        >>> both.same_prediction, len(both.comparisons)
        (True, 1)
        >>> both.candidate.model, both.candidate.explanations[0].title
        ('segmenter-2', 'red')
    """

    baseline: Result
    candidate: Result
    comparisons: tuple[Comparison, ...]

    @property
    def same_prediction(self) -> bool:
        """True if both models predict the same class first."""
        first, second = (result.predictions[:1] for result in (self.baseline, self.candidate))
        return [prediction.class_index for prediction in first] == [prediction.class_index for prediction in second]


def compare_results(baseline: Result, candidate: Result, box: BoxLike | None = None) -> ResultComparison:
    """Compare two results of one request to two models.

    Raises:
        Internal: They do not have the same number of explanations.
    """
    if len(baseline.explanations) != len(candidate.explanations):
        raise Internal("the two models returned different numbers of explanations")
    pairs = zip(baseline.explanations, candidate.explanations, strict=True)
    return ResultComparison(baseline, candidate, tuple(compare_explanations(one, other, box) for one, other in pairs))


def targets_of(result: Result) -> list[TargetLike]:
    """Return the targets of a result, to explain the same ones with another model.

    Raises:
        FailedPrecondition: The server did not say how it resolved them.
    """
    first = result.explanations[0]
    # All targets of the first layer of the first method come first.
    same = [other for other in result.explanations if (other.how, other.layer) == (first.how, first.layer)]
    targets = [explanation.resolved for explanation in same if explanation.resolved is not None]
    if len(targets) < len(same):
        raise FailedPrecondition("the server did not send the resolved targets: name the targets to compare")
    return targets
