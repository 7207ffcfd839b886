"""Run a diff: record both sides, calibrate, compare, and write the report."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from camserve import _files, _local
from camserve._errors import FailedPrecondition, InvalidArgument
from camserve.diff import calibration, compare, html, outputs, recording
from camserve.diff.calibration import Sample
from camserve.diff.record import record
from camserve.diff.recording import Header, Recording
from camserve.diff.values import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from camserve._codec import ExplainOptions
    from camserve._errors import CamserveError
    from camserve._sync.client import Client
    from camserve.diff.calibration import Calibration
    from camserve.diff.values import Case, DiffSettings, Report

    Stage: TypeAlias = Callable[[str, int], Callable[[], object]]

REPORT: Final = "index.html"
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
        InvalidArgument: There are no photos, or two have the same name.
    """
    photos: dict[str, Path] = {}
    for path in paths:
        images, _ = _files.images_in([path], output)
        for image in images:
            name = image.relative_to(path).as_posix() if Path(path).is_dir() else image.name
            if name in photos:
                raise InvalidArgument(f"{photos[name]} and {image} have the same name: put them into one folder")
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
        settings: DiffSettings of the diff.
        stage: Function that is called with the name of each stage and its number of steps; it returns a function
            to call after each step.

    Raises:
        CamserveError: The two cannot be compared.
        OSError: The report cannot be written.
    """
    baseline, candidate = sides
    session = _Session(photos, _digests(photos), output / _RECORDINGS, settings, stage)
    first = session.open_baseline(baseline)
    second = session.open_candidate(candidate, first)
    measured = session.calibration(baseline, first)
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
    work = folder.parent / f".{folder.name}.new"
    session = _Session(photos, _digests(photos), work, settings, stage)
    made = session.open_baseline(model)
    session.calibration(model, made).save(made.folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Without its header a folder is no baseline: a process that is killed here leaves none, not a mixture of two.
    (folder / recording.HEADER_FILE).unlink(missing_ok=True)
    for name in (recording.PHOTOS_FILE, recording.CALIBRATION_FILE, recording.HEADER_FILE):
        (made.folder / name).replace(folder / name)
    for empty in (made.folder, work):
        empty.rmdir()
    return Recording.load(folder)


def _digests(photos: Mapping[str, Path]) -> dict[str, str]:
    return {name: hashlib.sha256(_read(path)).hexdigest() for name, path in photos.items()}


def _read(path: Path) -> bytes:
    with _local.open_regular(path) as file:
        return file.read()


@dataclass(frozen=True, slots=True)
class _Session:
    """Recordings of the sides of one diff.

    Attributes:
        photos: Paths of the photos by name.
        digests: SHA-256 of their files by name.
        folder: Folder of the recordings that this diff makes.
        settings: DiffSettings of the diff.
        stage: As for ``run``.
        failures: Photos that one side could not explain.
    """

    photos: Mapping[str, Path]
    digests: Mapping[str, str]
    folder: Path
    settings: DiffSettings
    stage: Stage
    failures: list[Failure] = field(default_factory=list["Failure"])

    def open_baseline(self, side: Side) -> Recording:
        """Return the recording of the baseline; explain the photos that it lacks."""
        if isinstance(side, LiveModel):
            options = self.settings.options or {}
            header = Header.of(side.client.model(side.model), recording.plain_options(options))
            return self._record(side, Recording.create(self.folder / "baseline", header), options, None)
        loaded = self._load(side)
        if self.settings.options is not None:
            loaded.header.check_options(recording.plain_options(self.settings.options))
        unknown = [name for name in self.photos if name not in loaded.digests]
        if unknown and not self.settings.skip_failed:
            raise FailedPrecondition(f"{_some(unknown)} {_are(unknown)} not in {side}: record it again with --accept")
        self.failures.extend(Failure(name, "baseline", "the baseline has no such photo") for name in unknown)
        return loaded

    def open_candidate(self, side: Side, baseline: Recording) -> Recording:
        """Return the recording of the candidate, with the targets of the baseline; explain the photos that it lacks."""
        if isinstance(side, LiveModel):
            header = Header.of(side.client.model(side.model), baseline.header.options, baseline.header)
            baseline.header.check_classes(header)
            made = Recording.create(self.folder / "candidate", header)
            return self._record(side, made, recording.options_of(baseline.header), baseline)
        loaded = self._load(side)
        baseline.header.check_options(loaded.header.options)
        baseline.header.check_classes(loaded.header)
        if unknown := [name for name in baseline.digests if name not in loaded.digests]:
            raise FailedPrecondition(f"{_some(unknown)} {_are(unknown)} not in {side}")
        return loaded

    def _load(self, folder: Path) -> Recording:
        """Open a recording of an earlier run, whose photos must be those of this run."""
        loaded = Recording.load(folder)
        if missing := [name for name in loaded.digests if name not in self.photos]:
            raise FailedPrecondition(f"{_some(missing)} of {folder} {_are(missing)} missing")
        if other := [name for name, digest in loaded.digests.items() if digest != self.digests[name]]:
            raise FailedPrecondition(f"{_some(other)} {_are(other)} not the same as in {folder}: the files differ")
        return loaded

    def _record(
        self, side: LiveModel, made: Recording, options: ExplainOptions, baseline: Recording | None
    ) -> Recording:
        skipped = {failure.image for failure in self.failures}
        names = [name for name in self.photos if name not in skipped and made.digests.get(name) != self.digests[name]]
        step = self.stage(f"explaining with {side.name}", len(names))
        photos = {name: self.photos[name] for name in names}
        errors = record(side.client, made, photos, {**options, "model": side.model}, baseline, step)
        self._note_failures(errors, side.name, "candidate" if baseline else "baseline")
        return made

    def _note_failures(self, errors: Mapping[str, CamserveError], side: str, role: str) -> None:
        if errors and not self.settings.skip_failed:
            name, error = next(iter(errors.items()))
            count = f"{len(errors)} of {len(self.photos)} photos"
            raise FailedPrecondition(
                f"{side} cannot explain {count}, such as {name}: {error}; --skip-failed leaves them out"
            )
        self.failures.extend(Failure(name, role, str(error)) for name, error in errors.items())

    def calibration(self, side: Side, baseline: Recording) -> Calibration:
        """Return the calibration of the baseline; measure it if it has none."""
        known = calibration.load(baseline.folder)
        if isinstance(side, Path):
            if known is None:
                raise FailedPrecondition(f"{side} has no calibration: record it again with --accept")
            return known
        photos = {name: self.photos[name] for name in baseline.digests if name in self.photos}
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
    def pictures(case: Case) -> html.Pictures:
        before, after = (side.photo(case.image) for side in sides)
        one, other = before.explanations[case.index], after.explanations[case.index]
        return html.Pictures(after.thumbnail, (one.photo, other.photo), (one.heatmap, other.heatmap))

    html.write(output / REPORT, report, pictures)
    _local.write(output / "junit.xml", outputs.to_junit(report))
    _local.write(output / "report.json", outputs.to_json(report))
    if summary := os.environ.get(SUMMARY_VARIABLE):
        with suppress(OSError), Path(summary).open("a", encoding="utf-8") as file:
            file.write(outputs.to_markdown(report))
