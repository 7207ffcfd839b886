"""Add licences to the SBOM of service/requirements.lock, and check it against the schema of CycloneDX.

    cyclonedx-py requirements service/requirements.lock --pyproject pyproject.toml --output-reproducible |
      python tools/sbom.py > sbom.json

cyclonedx-py reads names, versions and hashes from the lock file, which has no licences. They come from the table in
docs/supply-chain.md. The output depends on these files only, so that two runs write the same bytes.
"""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "supply-chain.md"
ROW = re.compile(r"^\| ([\w.-]+) \| ([\w.]+) \| [a-z, ]+ \| (.+) \|$", re.MULTILINE)


def licences(page: str) -> dict[tuple[str, str], str]:
    """Return the licences in a page's table, by normalised name and version."""
    return {(normal(name), version): licence for name, version, licence in ROW.findall(page)}


def normal(name: str) -> str:
    """Return a package's name in the form in which package indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def component(entry: dict[str, Any], known: Mapping[tuple[str, str], str]) -> dict[str, Any]:
    """Return a component with its licence, identified by its package URL and not by its line in the lock file."""
    kept = {key: value for key, value in entry.items() if key != "description"}
    licence = known.get((normal(entry["name"]), entry["version"]))
    named = {"licenses": [{"license": {"name": licence}}]} if licence not in (None, "none said") else {}
    return {**kept, "bom-ref": entry["purl"], **named}


def with_licences(sbom: dict[str, Any], page: str) -> dict[str, Any]:
    """Return an SBOM of cyclonedx-py with the licences of a page.

    Args:
        sbom: A CycloneDX document.
        page: Markdown with the table of docs/generate/licences.py.
    """
    known = licences(page)
    components = [component(entry, known) for entry in sbom["components"]]
    references = [sbom["metadata"]["component"]["bom-ref"], *(entry["bom-ref"] for entry in components)]
    return {**sbom, "components": components, "dependencies": [{"ref": reference} for reference in references]}


def check(text: str) -> None:
    """Check a document against the schema.

    Raises:
        SystemExit: It is not valid.
    """
    from cyclonedx.schema import SchemaVersion  # noqa: PLC0415 -- installed for releases only
    from cyclonedx.validation.json import JsonStrictValidator  # noqa: PLC0415 -- the same

    if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        sys.exit(f"the SBOM is not valid: {error}")


def main() -> None:
    """Read an SBOM from standard input, and print it with licences."""
    sbom = with_licences(json.load(sys.stdin), PAGE.read_text(encoding="utf-8"))
    text = json.dumps(sbom, indent=1, ensure_ascii=False, sort_keys=True)
    check(text)
    print(text)


if __name__ == "__main__":
    main()
