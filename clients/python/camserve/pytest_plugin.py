"""Pytest plugin: a test that fails when a model looks at another part of a photo than before.

    # conftest.py
    pytest_plugins = ["camserve.pytest_plugin"]

    # test_model.py
    def test_looks_at_the_bird(explain_snapshot):
        with camserve.Client("localhost:50051") as client:
            result = explain_snapshot(client, "bird.jpg")
        assert result.predictions[0].label == "goldfinch"

``pytest --camserve-update`` records the snapshots, in the folder ``__explanations__`` beside the test. Commit them. A
snapshot is a baseline of ``camserve diff`` with one photo, and is calibrated as one.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import pytest

from camserve._core.errors import CamserveError
from camserve._core.text import brief
from camserve.diff import calibration, compare, lines, outputs, recording, run
from camserve.diff.recording import Recording
from camserve.diff.values import Change, DiffSettings

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Unpack

    from camserve._sync.client import Client
    from camserve._values.options import ExplainOptions, ImageLike
    from camserve._values.result import Result
    from camserve.diff.values import Case

FOLDER: Final = "__explanations__"
_PHOTO = "photo"  # name of the photo in a snapshot
_UPDATE = "--camserve-update"
_MAX_NAME = 80  # characters of the folder of a test


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that records snapshots."""
    group = parser.getgroup("camserve")
    group.addoption(_UPDATE, action="store_true", help="Record the snapshots of explain_snapshot.")


@pytest.fixture
def explain_snapshot(request: pytest.FixtureRequest, tmp_path: Path) -> ExplainSnapshot:
    """Function that explains a photo, and fails if the model looks elsewhere than in the snapshot."""
    folder = request.path.parent / FOLDER / request.path.stem / _folder_name(request.node.name)
    return ExplainSnapshot(folder, tmp_path, update=bool(request.config.getoption(_UPDATE)))


def _folder_name(test: str) -> str:
    name = re.sub(r"[^\w.-]+", "_", test)[:_MAX_NAME]
    return name if name == test else f"{name}-{hashlib.sha256(test.encode()).hexdigest()[:8]}"


@dataclass
class ExplainSnapshot:
    """Function that explains a photo, and fails if the model looks elsewhere than in the snapshot.

    Attributes:
        folder: Folder of the test's snapshots.
        temporary: Folder for temporary files.
        update: True to record the snapshots.
    """

    folder: Path
    temporary: Path
    update: bool
    _calls: int = field(default=0, init=False)

    def __call__(self, client: Client, image: ImageLike, **options: Unpack[ExplainOptions]) -> Result:
        """Explain a photo, and compare the maps with those of the snapshot.

        Without targets, the classes of the snapshot are explained. The test fails if the model predicts another class,
        if a verdict changed, or if a map is nearer to those of random weights than to the snapshot's own with noise.

        Args:
            client: Client of the server, or an ``Explainer``.
            image: Image as for ``Client.explain``.
            **options: Options as for ``Client.explain``.

        Returns:
            The result.
        """
        self._calls += 1
        folder = self.folder / str(self._calls)
        try:
            if self.update:
                self._record(folder, client, image, options)
            return _compare(folder, client, image, options)
        except CamserveError as error:
            pytest.fail(f"{folder}: {error}", pytrace=False)

    def _record(self, folder: Path, client: Client, image: ImageLike, options: ExplainOptions) -> None:
        photo = self.temporary / f"{_PHOTO}-{self._calls}"
        photo.write_bytes(client.file_of(image))
        folder.parent.mkdir(parents=True, exist_ok=True)
        model = run.LiveModel(options.get("model") or "", client, options.get("model") or "")
        run.accept({_PHOTO: photo}, model, folder, DiffSettings(options, sample=1))


def _compare(folder: Path, client: Client, image: ImageLike, options: ExplainOptions) -> Result:
    """Explain a photo again, and fail if a map differs from the snapshot in the folder."""
    if not folder.exists():
        pytest.fail(f"there is no snapshot in {folder}: record it with pytest {_UPDATE}", pytrace=False)
    snapshot, measured = Recording.load(folder), calibration.load(folder)
    if measured is None or _PHOTO not in snapshot.digests:
        pytest.fail(f"the snapshot in {folder} is incomplete: record it with pytest {_UPDATE}", pytrace=False)
    snapshot.header.check_options(recording.plain_options(options))
    before = snapshot.photo(_PHOTO)
    options["heatmap"] = True
    options["targets"] = before.targets
    result = client.explain(image, **options)
    after = lines.decode(lines.encode(_PHOTO, result), "the explanation")
    if before.sha256 != after.sha256:
        pytest.fail(f"the photo is not that of the snapshot in {folder}", pytrace=False)
    if findings := [case for case in compare.cases_of(before, after, measured) if case.change is not Change.NONE]:
        pytest.fail("\n".join(map(_describe, findings)), pytrace=False)
    return result


def _describe(case: Case) -> str:
    how = f"{case.method} on {case.layer}" if case.layer else case.method
    return brief(f"{how}, {case.target}: {case.change}: {outputs.describe(case)}")  # the server named method and target
