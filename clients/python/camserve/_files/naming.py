"""Names of the files of results."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from camserve._values.result import Explanation

# In bytes, as file systems count. The names of temporary files and of ".receipt.json" are up to 20 bytes longer.
_MAX_NAME_BYTES = 235
_MAX_PART_BYTES = 50


@dataclass(slots=True)
class UniqueNames:
    """Generator of unique file names in one folder.

    Names that differ only in case count as equal, as on some file systems.
    """

    folder: Path
    _taken: set[str] = field(default_factory=set[str])

    def unique(self, stem: str, suffix: str) -> Path:
        """Return a path that was not returned before: the stem, or the stem with a number."""
        for name in _number(stem):
            if f"{name}{suffix}".casefold() not in self._taken:
                self._taken.add(f"{name}{suffix}".casefold())
                return self.folder / f"{name}{suffix}"
        raise AssertionError  # pragma: no cover -- the numbers do not end


def _number(stem: str) -> Iterator[str]:
    yield stem
    number = 2
    while True:
        yield f"{stem}-{number}"
        number += 1


def stem_of(image: Path, explanation: Explanation, *, with_layer: bool) -> str:
    """Return the stem of a result's file: "cat.gradcam.tabby", or "cat.gradcam.features_4.tabby" with the layer."""
    contrast = explanation.contrast
    target = explanation.target.name + (f"-not-{contrast.name}" if contrast else "")
    layer = (explanation.layer,) if with_layer and explanation.layer else ()
    ending = "".join(f".{_sanitize(part)}" for part in (_method_name(explanation), *layer, target))
    return truncate(image.stem, _MAX_NAME_BYTES - len(ending.encode())) + ending


def _method_name(explanation: Explanation) -> str:
    return explanation.how.replace(", ", "-")


def _sanitize(text: str) -> str:
    return truncate(re.sub(r"[^\w-]+", "_", text), _MAX_PART_BYTES).strip("_") or "_"


def truncate(text: str, max_bytes: int) -> str:
    """Truncate a text to a number of bytes in UTF-8, between two characters."""
    data = text.encode("utf-8", "surrogateescape")
    return text if len(data) <= max_bytes else data[:max_bytes].decode("utf-8", "ignore")
