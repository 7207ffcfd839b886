"""Compare two recordings, photo by photo, and decide."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from camserve._core.errors import FailedPrecondition, InvalidArgument
from camserve._values.comparison import Comparison, compare_explanations
from camserve.diff import groups, rule
from camserve.diff.calibration import first_class
from camserve.diff.values import Answer, Case, Change, Failure, Report, Source

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from camserve._values.targets import BoxLike
    from camserve.diff.calibration import Calibration, MethodCalibration
    from camserve.diff.lines import RecordedExplanation, RecordedPhoto
    from camserve.diff.recording import Recording
    from camserve.diff.values import DiffSettings


def report(
    sides: tuple[tuple[str, Recording], tuple[str, Recording]],
    calibration: Calibration,
    names: Sequence[str],
    settings: DiffSettings,
    failures: Sequence[Failure] = (),
) -> Report:
    """Compare two recordings of the same photos.

    Args:
        sides: The baseline and the candidate, each with the name that the user gave it.
        calibration: Calibration of the baseline.
        names: Names of the photos that both have.
        settings: Settings of the diff.
        failures: Photos that are left out.

    Raises:
        FailedPrecondition: The photos are too few, or a method cannot be calibrated.
        InvalidArgument: A recording is damaged.
    """
    (_, baseline), (_, candidate) = sides
    cases: list[Case] = []
    predictions: list[bool] = []
    for name in names:
        pair = baseline.photo(name), candidate.photo(name)
        predictions.append(first_class(pair[0]) != first_class(pair[1]))
        cases += cases_of(*pair, calibration, settings.boxes.get(name))
    check_number(len(names))
    return _decide(sides, cases, predictions, calibration, settings.max_changed, failures)


def check_number(photos: int) -> None:
    """Check that there are enough photos.

    Raises:
        FailedPrecondition: They are too few.
    """
    if photos < rule.MIN_PHOTOS:
        are = "photo is" if photos == 1 else "photos are"
        raise FailedPrecondition(f"{photos} {are} too few to say: at least {rule.MIN_PHOTOS} are needed")


def check_calibration(calibration: Calibration) -> None:
    """Check that every method can be calibrated.

    Raises:
        FailedPrecondition: One cannot.
    """
    for method in calibration.methods:
        rule.scale_of(method)


def _decide(
    sides: tuple[tuple[str, Recording], tuple[str, Recording]],
    cases: list[Case],
    predictions: list[bool],
    calibration: Calibration,
    max_changed: float,
    failures: Sequence[Failure],
) -> Report:
    ordered = tuple(sorted(cases, key=_severity, reverse=True))
    checks = tuple(_check(cases, each, max_changed) for each in calibration.methods)
    changed = rule.bootstrap(predictions, np.mean)
    reasons = [reason for each in checks for reason in each.reasons]
    if reason := rule.check_predictions(predictions, calibration.predictions_changed, max_changed):
        reasons.append(reason)
    return Report(
        _source(*sides[0]),
        _source(*sides[1]),
        photos=len(predictions),
        predictions_changed=changed,
        checks=checks,
        cases=ordered,
        groups=groups.group(ordered),
        failures=tuple(failures),
        reasons=tuple(reasons),
        max_changed=max_changed,
    )


def _source(name: str, recording: Recording) -> Source:
    header = recording.header
    versions = recording.photo(next(iter(recording.digests))).explanations[0].receipt.versions
    return Source(name, header.model, header.weights, header.digest, versions)


def cases_of(
    before: RecordedPhoto, after: RecordedPhoto, calibration: Calibration, box: BoxLike | None = None
) -> Iterator[Case]:
    """Yield the comparisons of the explanations of one photo.

    Args:
        before: The photo in the baseline.
        after: The photo in the candidate.
        calibration: Calibration of the baseline.
        box: Position of the object.

    Raises:
        FailedPrecondition: A method cannot be calibrated, or the explanations cannot be compared.
    """
    scales = {(each.method, each.layer): rule.scale_of(each) for each in calibration.methods}
    if len(before.explanations) != len(after.explanations):
        raise FailedPrecondition(f"{before.name}: the models have different numbers of explanations")
    for index, (one, other) in enumerate(zip(before.explanations, after.explanations, strict=True)):
        if (one.method, one.layer) not in scales:
            raise FailedPrecondition(f"the baseline's calibration lacks {one.method} {one.layer}".rstrip())
        comparison = _compare(before.name, one, other, box)
        if not comparison.same_target:
            raise FailedPrecondition(f"{before.name}: the two sides explain different classes")
        floor, _, ceiling = scales[one.method, one.layer]
        case = Case(
            image=before.name,
            index=index,
            method=one.method,
            layer=one.layer,
            target=one.title,
            baseline=_answer(before, one),
            candidate=_answer(after, other),
            comparison=comparison,
            position=rule.position(comparison.spearman, floor, ceiling),
            change=Change.NONE,
            places=(groups.place_of(one.heatmap, one.photo), groups.place_of(other.heatmap, other.photo)),
        )
        yield replace(case, change=_change(case, same_class=first_class(before) == first_class(after)))


def _compare(name: str, one: RecordedExplanation, other: RecordedExplanation, box: BoxLike | None) -> Comparison:
    try:
        return compare_explanations(one, other, box)
    except InvalidArgument as error:
        raise FailedPrecondition(f"{name}: {error.message}") from error


def _answer(photo: RecordedPhoto, explanation: RecordedExplanation) -> Answer:
    first = photo.predictions[0] if photo.predictions else None
    return Answer(first, explanation.score, explanation.target.probability, explanation.verdict)


def _change(case: Case, *, same_class: bool) -> Change:
    if not same_class:
        return Change.PREDICTION
    if case.position > rule.MIDDLE:
        return Change.ELSEWHERE
    return Change.VERDICT if case.comparison.verdict_changed else Change.NONE


def _is_elsewhere(case: Case) -> bool:
    """Return True for a map that is nearer to the ceiling, or that cannot be compared because its verdict changed."""
    return case.position > rule.MIDDLE or (math.isnan(case.position) and case.comparison.verdict_changed)


def _severity(case: Case) -> tuple[bool, float]:
    """Sort key: findings first, by their position."""
    return case.change is not Change.NONE, 1.0 if math.isnan(case.position) else case.position


def _check(cases: Sequence[Case], calibration: MethodCalibration, max_changed: float) -> Any:
    mine = [case for case in cases if (case.method, case.layer) == (calibration.method, calibration.layer)]
    correlations = [case.comparison.spearman for case in mine]
    return rule.check(correlations, list(map(_is_elsewhere, mine)), calibration, max_changed)
