"""The fixture that fails if a model looks elsewhere than in its snapshot."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import pytest

import camserve
from camserve.pytest_plugin import ExplainSnapshot
from client.diff import looks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def models(server: Any) -> looks.Looks:
    """Models that look at the bright parts of a photo."""
    models = looks.Looks()
    models.install(server)
    return models


@pytest.fixture
def explainer(server: Any) -> Iterator[camserve.Client]:
    with camserve.Client(server.address) as client:
        yield client


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    looks.write_photo(tmp_path / "photo.png", 0)
    return tmp_path / "photo.png"


def snapshot(folder: Path, *, update: bool = False) -> ExplainSnapshot:
    """Return the fixture's function as a new run of pytest has it."""
    return ExplainSnapshot(folder / "snapshots", folder, update)


def record(folder: Path, explainer: camserve.Client, photo: Path) -> None:
    snapshot(folder, update=True)(explainer, photo, model="tiny")


@pytest.mark.usefixtures("models")
def test_same_model_passes_and_its_result_is_returned(tmp_path: Path, explainer: Any, photo: Path) -> None:
    record(tmp_path, explainer, photo)
    result = snapshot(tmp_path)(explainer, photo, model="tiny")

    assert result.explanations[0].heatmap is not None
    assert result.model == "tiny"


def test_model_that_looks_elsewhere_fails(tmp_path: Path, explainer: Any, photo: Path, models: looks.Looks) -> None:
    record(tmp_path, explainer, photo)
    models.dark = {"tiny"}

    with pytest.raises(pytest.fail.Exception, match=r"gradcam on features, \w+: looks elsewhere: from the .* to the"):
        snapshot(tmp_path)(explainer, photo, model="tiny")


def test_model_that_predicts_another_class_fails(
    tmp_path: Path, explainer: Any, photo: Path, models: looks.Looks
) -> None:
    record(tmp_path, explainer, photo)
    models.flipped = {"tiny"}

    with pytest.raises(pytest.fail.Exception, match=r"prediction changed: .* becomes"):
        snapshot(tmp_path)(explainer, photo, model="tiny")


def test_labels_of_a_server_cannot_control_the_terminal(
    tmp_path: Path, explainer: Any, photo: Path, models: looks.Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks, "LABELS", ("\x1b]0;a\x07cat", "\x1b[2Jdog\u202e"))
    record(tmp_path, explainer, photo)
    models.flipped = {"tiny"}

    with pytest.raises(pytest.fail.Exception, match=r"prediction changed: .*\\x1b.* becomes .*\\x1b") as failed:
        snapshot(tmp_path)(explainer, photo, model="tiny")
    assert not {"\x1b", "\x07", "\u202e"} & set(str(failed.value))


@pytest.mark.usefixtures("models")
def test_missing_snapshot_says_how_to_record_it(tmp_path: Path, explainer: Any, photo: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"no snapshot in .*: record it with pytest --camserve-update"):
        snapshot(tmp_path)(explainer, photo, model="tiny")


@pytest.mark.usefixtures("models")
def test_other_photo_and_other_options_fail(tmp_path: Path, explainer: Any, photo: Path) -> None:
    record(tmp_path, explainer, photo)
    with pytest.raises(pytest.fail.Exception, match="methods differ"):
        snapshot(tmp_path)(explainer, photo, model="tiny", methods=["layercam"])

    looks.write_photo(photo, 1)
    with pytest.raises(pytest.fail.Exception, match="the photo is not that of the snapshot"):
        snapshot(tmp_path)(explainer, photo, model="tiny")


@pytest.mark.usefixtures("models")
def test_every_call_of_a_test_has_a_snapshot_of_its_own(tmp_path: Path, explainer: Any, photo: Path) -> None:
    both = snapshot(tmp_path, update=True)
    both(explainer, photo, model="tiny")
    both(explainer, photo, model="tiny", methods=["layercam"])
    again = snapshot(tmp_path)
    again(explainer, photo, model="tiny")
    again(explainer, photo, model="tiny", methods=["layercam"])

    assert sorted(folder.name for folder in (tmp_path / "snapshots").iterdir()) == ["1", "2"]


@pytest.mark.usefixtures("models")
def test_fixture_records_beside_the_test_and_compares(
    tmp_path: Path, server: Any, photo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"""
        import camserve
        import pytest

        @pytest.mark.parametrize("place", ["a/b", "a b"])
        def test_looks(explain_snapshot, place):
            with camserve.Client("{server.address}") as client:
                assert explain_snapshot(client, "{photo}", model="tiny").model == "tiny"
    """
    (tmp_path / "test_model.py").write_text(textwrap.dedent(source))
    monkeypatch.chdir(tmp_path)
    arguments = [
        "-q",
        "-p",
        "camserve.pytest_plugin",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:asyncio",
        "--rootdir",
        str(tmp_path),
        ".",
    ]

    assert pytest.main(arguments) is pytest.ExitCode.TESTS_FAILED
    assert pytest.main([*arguments, "--camserve-update"]) is pytest.ExitCode.OK
    assert pytest.main(arguments) is pytest.ExitCode.OK
    assert len(list((tmp_path / "__explanations__" / "test_model").iterdir())) == 2
