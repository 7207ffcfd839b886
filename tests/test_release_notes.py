"""The text of a release is its section of the changelog, and a tag must match the version."""

import pytest
from tools import release_notes

CHANGELOG = (
    "# Changelog\n\n## Unreleased\n\n- New.\n\n## 0.2.0 (2026-12-01)\n\n### Added\n\n- Two.\n\n## 0.1.0\n\n- One.\n"
)


@pytest.mark.parametrize(
    ("version", "text"), [("0.2.0", "### Added\n\n- Two."), ("0.1.0", "- One."), ("0.1", ""), ("0.2.1", "")]
)
def test_notes_are_the_section_of_exactly_that_version(version, text):
    assert release_notes.section(CHANGELOG, version) == text


@pytest.mark.parametrize(
    ("tag", "changelog", "error"),
    [
        ("v0.1.0", CHANGELOG, "the tag is v0.1.0, and the version in pyproject.toml is 0.2.0"),
        ("0.2.0", CHANGELOG, "the tag is 0.2.0, and the version in pyproject.toml is 0.2.0"),
        ("v0.2.0", "# Changelog\n\n## Unreleased\n", "CHANGELOG.md has no section for 0.2.0"),
    ],
)
def test_tag_without_its_version_or_section_is_an_error(tmp_path, monkeypatch, tag, changelog, error):
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(changelog)
    monkeypatch.setattr(release_notes, "ROOT", tmp_path)

    with pytest.raises(SystemExit, match=error.replace(".", r"\.")):
        release_notes.main(tag)


def test_relative_links_lead_to_the_tag():
    notes = "[a](docs/a.md) [b](https://b.example) [c](#c) [d](LICENSE)"

    assert release_notes.with_links(notes, "https://git.example/x/blob/v1.0.0") == (
        "[a](https://git.example/x/blob/v1.0.0/docs/a.md) [b](https://b.example) [c](#c)"
        " [d](https://git.example/x/blob/v1.0.0/LICENSE)"
    )
