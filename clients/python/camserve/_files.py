"""Which files to explain, and under which names to write what comes out."""

from __future__ import annotations

import glob
import os
import posixpath
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from camserve._errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from camserve._result import Explanation

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp"})

# In bytes, as file systems count; what is written first or beside has up to 20 more.
_LONGEST_NAME = 235
_LONGEST_PART = 50


def images_in(paths: Iterable[str], output: Path, *, allow_outside: bool = False) -> tuple[list[Path], list[Path]]:
    """Return files as they are, for globs what they name, and for folders the images below them, sorted.

    What lies below ``output`` is left out of folders, so that a second run does not explain the
    pictures of the first.

    Args:
        paths: Files, folders and globs.
        output: The folder for the pictures.
        allow_outside: Whether links may lead out of a named folder.

    Returns:
        The images, and the links that were left out because they lead out of their folder.

    Raises:
        InvalidArgument: A path is a URI, or a folder has no images.
    """
    images: list[Path] = []
    left_out: list[Path] = []
    for path in paths:
        if "://" in path:
            raise InvalidArgument(f"{path} is read by --resume only")
        root = None if allow_outside else root_of(path)
        for each in (each for found in named(path) for each in _expanded(found, output)):
            (images if root is None or leads_below(each, root) else left_out).append(Path(each))
    return images, left_out


def _expanded(path: str, output: Path) -> Iterable[str]:
    if not Path(path).is_dir():
        return [path]
    # Only a folder of its own: who writes beside the photos still wants them explained.
    found = list(walk(path, lambda folder: not (output.exists() and output.samefile(folder))))
    if not found:
        raise InvalidArgument(f"there are no images in {path}")
    return found


def walk(folder: str, enter: Callable[[str], bool]) -> Iterator[str]:
    """Yield the images below a folder, by name. Links to folders are not followed: they could form a loop.

    Args:
        folder: A local folder.
        enter: Whether to search a folder below it.
    """
    ahead = [iter(_entries(folder))]
    while ahead:
        path, is_folder = next(ahead[-1], ("", False))
        if not path:
            ahead.pop()
        elif not is_folder:
            yield path
        elif enter(path):
            ahead.append(iter(_entries(path)))


def _entries(folder: str) -> list[tuple[str, bool]]:
    with os.scandir(folder) as entries:
        shown = sorted((each for each in entries if not each.name.startswith(".")), key=lambda each: each.name)
    return [
        (each.path, is_folder)
        for each in shown
        if (is_folder := each.is_dir(follow_symlinks=False)) or (is_photo(each.name) and Path(each.path).is_file())
    ]


def is_photo(name: str) -> bool:
    """Return whether a file's name is that of a photo."""
    return posixpath.splitext(name)[1].lower() in SUFFIXES and not name.startswith(".")


def named(path: str) -> list[str]:
    """Return a path as it is, or the files and folders that a glob names, except hidden ones.

    ``**`` does not follow links, which could form a loop.
    """
    if Path(path).exists():
        return [path]
    start, pattern = _split(path)
    found = start.glob(pattern) if "**" in path else map(Path, glob.glob(path))  # noqa: PTH207 -- it leaves hidden ones out
    seen = (each for each in found if not _is_hidden(each.relative_to(start)) and (each.is_file() or each.is_dir()))
    return sorted(map(str, seen))


def _split(path: str) -> tuple[Path, str]:
    """Return the folder that a glob begins with, and the rest."""
    parts = Path(path).parts
    first = next((at for at, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    return Path(*parts[:first]), os.path.join(*parts[first:], "")[:-1]  # noqa: PTH118 -- a pattern is no path


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def root_of(path: str) -> str | None:
    """Return the folder that the photos of a path must lie in: the folder itself, or the first folder of a glob.

    None for a file: the caller named it, so it is read wherever its links lead.
    """
    if Path(path).is_dir():
        return os.path.realpath(path)
    return None if Path(path).exists() else os.path.realpath(_split(path)[0])


def leads_below(path: str, root: str) -> bool:
    """Return whether a path lies below a folder once its links are followed."""
    return os.path.realpath(path).startswith(f"{root.rstrip(os.sep)}{os.sep}")


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
