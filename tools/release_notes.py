"""Print the section of CHANGELOG.md for a version, as the text of its GitHub release.

    python tools/release_notes.py v0.2.0

Relative links lead to the files of the tag if CAMSERVE_REPOSITORY is the URL of the repository, because GitHub does not
resolve relative links of a release. It exits with an error if the version is not the one in pyproject.toml, or if the
changelog has no section for it. So a tag cannot publish another version than it names.
"""

import os
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def section(text: str, version: str) -> str:
    """Return the section of a version, without its heading, or an empty text.

    Args:
        text: The whole changelog.
        version: A version without the `v` of its tag.
    """
    heading = rf"^## \[?{re.escape(version)}\]?(?: [^\n]*)?$"
    found = re.search(rf"{heading}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return found[1].strip() if found else ""


def with_links(notes: str, tree: str) -> str:
    """Return notes whose relative links begin with the URL of a tree of the repository."""
    return re.sub(r"\]\((?![a-z]+:|#)", f"]({tree}/", notes)


def main(tag: str) -> None:
    """Print the section of a tag's version.

    Raises:
        SystemExit: The tag is not the version of the package, or it has no section.
    """
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    if tag != f"v{version}":
        sys.exit(f"the tag is {tag}, and the version in pyproject.toml is {version}")
    notes = section((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    if not notes:
        sys.exit(f"CHANGELOG.md has no section for {version}")
    repository = os.environ.get("CAMSERVE_REPOSITORY")
    print(with_links(notes, f"{repository}/blob/{tag}") if repository else notes)


if __name__ == "__main__":
    main(sys.argv[1])
