"""Run a diff: record both sides, calibrate, compare, and write the report."""

from __future__ import annotations

import hashlib
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias, cast

from camserve._core.errors import CamserveError, FailedPrecondition, InvalidArgument
from camserve._core.files import open_regular, write_file
from camserve._files.finding import images_in, scheme_of
from camserve.diff import calibration, compare, html, outputs, recording
from camserve.diff.calibration import Sample
from camserve.diff.record import record
from camserve.diff.recording import Header, Recording
from camserve.diff.values import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from io import BufferedReader

    from camserve._sync.client import Client
    from camserve._values.options import ExplainOptions
    from camserve.diff.calibration import Calibration
    from camserve.diff.values import Case, DiffSettings, Report

    Stage: TypeAlias = Callable[[str, int], Callable[[], object]]

REPORT: Final = "index.html"
_JUNIT, _JSON = "junit.xml", "report.json"
UNFINISHED: Final = ".new"
"""Folder of an unfinished baseline, in that of the baseline."""

SUMMARY_VARIABLE: Final = "GITHUB_STEP_SUMMARY"
_RECORDINGS = "recordings"
_NAMED = 3  # photos that are named in an error


@dataclass(frozen=True, slots=True)
class LiveModel:
    """A model on a server, or of this process.

    Attributes:
        name: The model as the user named it.
        client: Client of its server.
        model: Its name on the server; empty for the server's first model.
    """

    name: str
    client: Client
    model: str = ""


Side: TypeAlias = LiveModel | Path
"""One side of a diff: a model, or the folder of a recording."""


def _no_stage(_name: str, _total: int) -> Callable[[], object]:
    return lambda: None


def photos_in(paths: Iterable[str], output: Path) -> dict[str, Path]:
    """Return the photos that paths name, by their names: paths relative to a named folder, otherwise file names.

    Raises:
        InvalidArgument: There are no photos, one is not below its folder, or two have the same name.
    """
    photos: dict[str, Path] = {}
    for path in paths:
        if scheme_of(path):
            raise InvalidArgument(f"{path} is a URI: name a folder of this machine")
        images, outside = images_in([path], output)
        if outside:
            raise InvalidArgument(f"{outside[0]} is a link out of its folder: name the folder that it leads to")
        for image in images:
            name = image.relative_to(path).as_posix() if Path(path).is_dir() else image.name
            if name in photos:
                raise InvalidArgument(f"{photos[name]} and {image} have the same name: name a folder that has both")
            photos[name] = image
    return photos


def run(
    photos: Mapping[str, Path], sides: tuple[Side, Side], output: Path, settings: DiffSettings, stage: Stage = _no_stage
) -> Report:
    """Compare a candidate with a baseline on photos, and write the report.

    What is explained is recorded below the output, so that a run that was interrupted is continued.

    Args:
        photos: Paths of the photos by name.
        sides: The baseline and the candidate.
        output: Folder of the report.
        settings: Settings of the diff.
        stage: Function that is called with the name of each stage and its number of steps; it returns a function
            to call after each step.

    Raises:
        CamserveError: The two cannot be compared.
        OSError: The report cannot be written.
    """
    baseline, candidate = sides
    compare.check_number(len(photos))
    session = _Session(photos, _digests(photos), output / _RECORDINGS, settings, stage)
    # Explaining may take an hour, so sides that cannot be compared are refused before.
    headers = session.headers(baseline, candidate)
    for name in (REPORT, _JUNIT, _JSON):  # of an earlier run: CI must not take them for those of this one
        (output / name).unlink(missing_ok=True)
    first = session.open_baseline(baseline, headers[0])
    measured = session.calibration(baseline, first)
    compare.check_calibration(measured)
    second = session.open_candidate(candidate, headers[1], first)
    left_out = {failure.image for failure in session.failures}
    report = compare.report(
        ((_name(baseline), first), (_name(candidate), second)),
        measured,
        [name for name in photos if name not in left_out],
        settings,
        session.failures,
    )
    _write(report, (first, second), output)
    return report


def _name(side: Side) -> str:
    return str(side) if isinstance(side, Path) else side.name


def accept(
    photos: Mapping[str, Path], model: LiveModel, folder: Path, settings: DiffSettings, stage: Stage = _no_stage
) -> Recording:
    """Record and calibrate a model as the new baseline in a folder.

    The folder's baseline is replaced when the new one is complete. A run that was interrupted is continued.

    Raises:
        CamserveError: The model cannot explain the photos.
        OSError: The folder cannot be written.
    """
    work = folder / UNFINISHED  # on the same file system, so that its files can be moved
    session = _Session(photos, _digests(photos), work, settings, stage)
    made = session.open_baseline(model, session.header(model))
    session.calibration(model, made)
    made.compact(name for name in photos if name in made.digests)
    # Without its header a folder is no baseline: a process that is killed here leaves none, not a mixture of two.
    (folder / recording.HEADER_FILE).unlink(missing_ok=True)
    for name in (recording.PHOTOS_FILE, recording.CALIBRATION_FILE, recording.HEADER_FILE):
        (made.folder / name).replace(folder / name)
    shutil.rmtree(work, ignore_errors=True)
    return Recording.load(folder)


def _digests(photos: Mapping[str, Path]) -> dict[str, str]:
    return {name: _digest(path) for name, path in photos.items()}


def _digest(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(cast("BufferedReader", file), "sha256").hexdigest()


@dataclass(frozen=True, slots=True)
class _Session:
    """Recordings of the sides of one diff.

    Attributes:
        photos: Paths of the photos by name.
        digests: SHA-256 of their files by name.
        folder: Folder of the recordings that this diff makes.
        settings: Settings of the diff.
        stage: As for ``run``.
        failures: Photos that one side could not explain.
    """

    photos: Mapping[str, Path]
    digests: Mapping[str, str]
    folder: Path
    settings: DiffSettings
    stage: Stage
    failures: list[Failure] = field(default_factory=list["Failure"])

    def header(self, side: LiveModel) -> Header:
        """Return the header of a baseline of these options."""
        return Header.of(side.client.model(side.model), recording.plain_options(self.settings.options or {}))

    def headers(self, baseline: Side, candidate: Side) -> tuple[Header, Header]:
        """Return the headers of both sides.

        Raises:
            FailedPrecondition: The sides cannot be compared.
        """
        if isinstance(baseline, LiveModel):
            first = self.header(baseline)
        else:
            first = recording.read_header(baseline)
            given = self.settings.options or {}
            first.check_options(recording.plain_options(given), given)
        if isinstance(candidate, LiveModel):
            second = Header.of(candidate.client.model(candidate.model), first.options, first)
        else:
            second = recording.read_header(candidate)
            first.check_options(second.options)
        first.check_classes(second)
        return first, second

    def open_baseline(self, side: Side, header: Header) -> Recording:
        """Return the recording of the baseline; explain the photos that it lacks."""
        if isinstance(side, LiveModel):
            made = Recording.create(self.folder / "baseline", header)
            return self._record(side, made, self.settings.options or {}, None)
        loaded = self._load(side)
        unknown = [name for name in self.photos if name not in loaded.digests]
        if unknown and not self.settings.skip_failed:
            advice = "record a new baseline with --accept"
            raise FailedPrecondition(f"{_some(unknown)} {_are(unknown)} not in {side}: {advice}")
        self.failures.extend(Failure(name, "baseline", "the baseline has no such photo") for name in unknown)
        return loaded

    def open_candidate(self, side: Side, header: Header, baseline: Recording) -> Recording:
        """Return the recording of the candidate, with the targets of the baseline; explain the photos that it lacks."""
        if isinstance(side, LiveModel):
            made = Recording.create(self.folder / "candidate", header)
            return self._record(side, made, recording.options_of(baseline.header), baseline)
        loaded = self._load(side)
        if unknown := [name for name in self.photos if name in baseline.digests and name not in loaded.digests]:
            raise FailedPrecondition(f"{_some(unknown)} {_are(unknown)} not in {side}")
        return loaded

    def _load(self, folder: Path) -> Recording:
        """Open a recording of an earlier run, whose photos must be those of this run."""
        loaded = Recording.load(folder)
        if missing := [name for name in loaded.digests if name not in self.photos]:
            raise FailedPrecondition(f"{_some(missing)} {_are(missing)} in {folder}, but not among these photos")
        if other := [name for name, digest in loaded.digests.items() if digest != self.digests[name]]:
            raise FailedPrecondition(f"{_some(other)} {_are(other)} not the same as in {folder}: the content differs")
        return loaded

    def _record(
        self, side: LiveModel, made: Recording, options: ExplainOptions, baseline: Recording | None
    ) -> Recording:
        skipped = {failure.image for failure in self.failures}
        names = [name for name in self.photos if name not in skipped and made.digests.get(name) != self.digests[name]]
        if any(name in made.digests for name in names):  # a file has changed, and may be in the sample
            (made.folder / recording.CALIBRATION_FILE).unlink(missing_ok=True)
        step = self.stage(f"explaining with {side.name}", len(names))
        photos = {name: self.photos[name] for name in names}
        errors = record(side.client, made, photos, {**options, "model": side.model}, baseline, step)
        self._note_failures(errors, side.name, "candidate" if baseline else "baseline")
        if changed := [name for name in names if name not in errors and made.digests[name] != self.digests[name]]:
            raise FailedPrecondition(f"{_some(changed)} changed while the photos were explained: run it again")
        return made

    def _note_failures(self, errors: Mapping[str, CamserveError], side: str, role: str) -> None:
        if errors and not self.settings.skip_failed:
            name, error = next(iter(errors.items()))
            others = f" and {len(errors) - 1:,} more of {len(self.photos):,} photos" if len(errors) > 1 else ""
            advice = "--skip-failed leaves such photos out"
            raise FailedPrecondition(f"{side} cannot explain {name}{others}: {error}; {advice}")
        self.failures.extend(Failure(name, role, str(error)) for name, error in errors.items())

    def calibration(self, side: Side, baseline: Recording) -> Calibration:
        """Return the calibration of the baseline; measure it if it has none."""
        known = calibration.load(baseline.folder)
        if isinstance(side, Path):
            if known is None:
                raise FailedPrecondition(f"{side} has no calibration: record a new baseline with --accept")
            return known
        photos = {name: path for name, path in self.photos.items() if baseline.digests.get(name) == self.digests[name]}
        sample = Sample.of(photos, self.settings.sample, self.settings.seed)
        if known is not None and (known.photos, known.seed) == (sample.names, sample.seed):
            return known
        step = self.stage(f"calibrating {side.name}", 3 * len(sample.names))
        options: ExplainOptions = {**recording.options_of(baseline.header), "model": side.model}
        measured = calibration.calibrate(side.client, baseline, options, sample, step)
        measured.save(baseline.folder)
        return measured


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more photos"


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _write(report: Report, sides: tuple[Recording, Recording], output: Path) -> None:
    others = {_JUNIT: outputs.to_junit(report), _JSON: outputs.to_json(report)}

    def pictures(case: Case) -> html.Pictures:
        before, after = (side.photo(case.image) for side in sides)
        one, other = before.explanations[case.index], after.explanations[case.index]
        return html.Pictures(after.thumbnail, (one.photo, other.photo), (one.heatmap, other.heatmap))

    html.write(output / REPORT, report, pictures)
    for name, data in others.items():
        write_file(output / name, data)
    if summary := os.environ.get(SUMMARY_VARIABLE):
        with suppress(OSError), Path(summary).open("a", encoding="utf-8") as file:
            file.write(outputs.to_markdown(report))
