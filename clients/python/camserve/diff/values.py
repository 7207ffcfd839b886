"""Values of a diff: cases, checks, groups of findings, and the report."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from camserve._values.comparison import Comparison
    from camserve._values.options import ExplainOptions
    from camserve._values.prediction import Prediction
    from camserve._values.targets import BoxLike
    from camserve._values.verdict import Verdict


SAMPLE: Final = 64
"""Default number of photos of a calibration."""

MAX_CHANGED: Final = 0.05
"""Default share of the photos that may change."""


@dataclass(frozen=True, slots=True)
class DiffSettings:
    """Settings of a diff.

    Attributes:
        options: What to explain: methods, layers, targets. None for those of a recorded baseline, or the defaults.
        sample: Number of photos of the calibration.
        seed: Seed of the calibration.
        max_changed: The share of the photos that may change.
        boxes: Positions of objects by name of the photo.
        skip_failed: True to leave out photos that one side cannot explain.
    """

    options: ExplainOptions | None = None
    sample: int = SAMPLE
    seed: int = 0
    max_changed: float = MAX_CHANGED
    boxes: Mapping[str, BoxLike] = field(default_factory=dict[str, "BoxLike"])
    skip_failed: bool = False


class Change(StrEnum):
    """Class of a finding, the most important first.

    Attributes:
        ELSEWHERE: Both models predict the same class, but the candidate looks elsewhere: the map is nearer to
            the ceiling of the calibration than to its floor.
        PREDICTION: The candidate predicts another class first.
        VERDICT: The maps have different verdicts.
        NONE: No finding.
    """

    ELSEWHERE = "looks elsewhere"
    PREDICTION = "prediction changed"
    VERDICT = "verdict changed"
    NONE = "same"


@dataclass(frozen=True, slots=True)
class Source:
    """One of the two sides of a diff.

    Attributes:
        name: The side as the user named it: a model, or the folder of a baseline.
        model: Name of the model.
        weights: Name of its weights.
        digest: SHA-256 of its weights.
        versions: Versions of the programs that computed the explanations.
    """

    name: str
    model: str
    weights: str
    digest: str
    versions: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of one side to a case.

    Attributes:
        prediction: The class that the model predicts first; None for a model without predictions.
        score: Score of the explained target.
        probability: Probability of the explained class.
        verdict: Verdict on the map.
    """

    prediction: Prediction | None
    score: float
    probability: float
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Case:
    """Comparison of one explanation of one photo: by one method, on one layer, of one target.

    Attributes:
        image: Name of the photo.
        index: Index of the explanation in the photo's result.
        method: Name of the method, with its smoothing.
        layer: Name of the layer; empty for methods without one.
        target: Name of the explained target.
        baseline: The answer of the baseline.
        candidate: The answer of the candidate.
        comparison: The numbers that compare the two maps.
        position: Position between the floor (0) and the ceiling (1) of the calibration; NaN if the maps cannot
            be compared.
        change: Class of the finding.
        places: Parts of the photo with the strongest evidence, such as "lower left", of the baseline's and of the
            candidate's map.
    """

    image: str
    index: int
    method: str
    layer: str
    target: str
    baseline: Answer
    candidate: Answer
    comparison: Comparison = field(repr=False)
    position: float
    change: Change
    places: tuple[str, str] = ("", "")


@dataclass(frozen=True, slots=True)
class Interval:
    """A number with its bootstrap interval of 95 %."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Check:
    """The check of all cases of one method on one layer against its calibration.

    Attributes:
        method: Name of the method, with its smoothing.
        layer: Name of the layer of the baseline; empty for methods without one.
        cases: Number of cases that could be compared.
        median: Median rank correlation of the cases.
        floor: Median rank correlation of the baseline with itself, with a little noise.
        floor_limit: The 5 % quantile of these rank correlations: the lower end of the floor's band.
        ceiling: Median rank correlation of the baseline with randomised weights.
        elsewhere: Share of the cases that are nearer to the ceiling than to the floor.
        changed: True if the check fails.
        reasons: Sentences that say why it fails.
    """

    method: str
    layer: str
    cases: int
    median: Interval
    floor: float
    floor_limit: float
    ceiling: float
    elsewhere: Interval
    changed: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Findings that are alike.

    Attributes:
        change: Class of the findings.
        title: Description of what they have in common, such as "looks at the lower left instead of the centre".
        cases: Indices in ``Report.cases``, worst first.
        photos: The number of photos.
    """

    change: Change
    title: str
    cases: tuple[int, ...]
    photos: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A photo that one side could not explain.

    Attributes:
        image: Name of the photo.
        side: "baseline" or "candidate".
        message: The error.
    """

    image: str
    side: str
    message: str


@dataclass(frozen=True, slots=True)
class Report:
    """Outcome of a diff.

    Attributes:
        baseline: The first side.
        candidate: The second side.
        photos: The number of photos that both sides explained.
        predictions_changed: Share of the photos whose predicted class differs.
        checks: One for each method and layer.
        cases: All cases, worst first.
        groups: The findings, grouped, the most important first.
        failures: Photos that one side could not explain.
        reasons: Sentences that say why the models differ; empty if they do not.
        max_changed: The share of photos that may change.
    """

    baseline: Source
    candidate: Source
    photos: int
    predictions_changed: Interval
    checks: tuple[Check, ...]
    cases: tuple[Case, ...]
    groups: tuple[Group, ...]
    failures: tuple[Failure, ...]
    reasons: tuple[str, ...]
    max_changed: float

    @property
    def changed(self) -> bool:
        """True if the models differ by more than the calibration allows."""
        return bool(self.reasons)
