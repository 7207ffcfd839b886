"""Which files to explain, and under which names to write what comes out."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from camserve._errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from camserve._result import Explanation

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp"})

# In bytes, as file systems count; what is written first or beside has up to 20 more.
_LONGEST_NAME = 235
_LONGEST_PART = 50


def images_in(paths: Iterable[Path], output: Path) -> list[Path]:
    """Return files as they are, and for folders the images below them, sorted.

    What lies below ``output`` is left out of folders, so that a second run does not explain the
    pictures of the first.

    Raises:
        InvalidArgument: A folder has no images.
    """
    return [image for path in paths for image in _expanded(path, output)]


def _expanded(path: Path, output: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(each for each in path.rglob("*") if _is_image(each))
    # Only a folder of its own: who writes beside the photos still wants them explained.
    if output.resolve() != path.resolve():
        found = [each for each in found if not each.resolve().is_relative_to(output.resolve())]
    if not found:
        raise InvalidArgument(f"there are no images in {path}")
    return found


def _is_image(path: Path) -> bool:
    hidden = path.name.startswith(".")
    return path.suffix.lower() in SUFFIXES and not hidden and path.is_file()


@dataclass(slots=True)
class Names:
    """Names of files in one folder, none of them given twice.

    Upper and lower case are held for the same, as some file systems do.
    """

    folder: Path
    _taken: set[str] = field(default_factory=set[str])

    def unique(self, stem: str, suffix: str) -> Path:
        """Return a path that was not given before: the stem, or the stem and a number."""
        for name in _numbered(stem):
            if f"{name}{suffix}".casefold() not in self._taken:
                self._taken.add(f"{name}{suffix}".casefold())
                return self.folder / f"{name}{suffix}"
        raise AssertionError  # pragma: no cover -- there is always another number


def _numbered(stem: str) -> Iterator[str]:
    yield stem
    number = 2
    while True:
        yield f"{stem}-{number}"
        number += 1


def stem_of(image: Path, explanation: Explanation, *, with_layer: bool) -> str:
    """Return "cat.gradcam.tabby", or "cat.gradcam.features_4.tabby" where layers differ."""
    against = explanation.contrast
    target = explanation.target.name + (f"-not-{against.name}" if against else "")
    layer = (explanation.layer,) if with_layer and explanation.layer else ()
    behind = "".join(f".{_plain(part)}" for part in (_method_of(explanation), *layer, target))
    return cut(image.stem, _LONGEST_NAME - len(behind.encode())) + behind


def _method_of(explanation: Explanation) -> str:
    return explanation.how.replace(", ", "-")


def _plain(text: str) -> str:
    return cut(re.sub(r"[^\w-]+", "_", text), _LONGEST_PART).strip("_") or "_"


def cut(text: str, longest: int) -> str:
    """Return as many of the first characters of a text as have so many bytes."""
    data = text.encode("utf-8", "surrogateescape")
    return text if len(data) <= longest else data[:longest].decode("utf-8", "ignore")
