"""Find the images to explain."""

from __future__ import annotations

import glob
import os
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from camserve._core.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://", re.ASCII)  # RFC 3986, section 3.1
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"})


def images_in(paths: Iterable[str], output: Path, *, allow_outside: bool = False) -> tuple[list[Path], list[Path]]:
    """Return the images that paths name: files, the files of globs, and the images below folders, sorted.

    Images below ``output`` are left out of folders, so that a second run does not explain the
    overlays of the first.

    Args:
        paths: Files, folders and globs.
        output: The folder that the overlays are written to.
        allow_outside: True to follow links that lead out of a named folder.

    Returns:
        The images, and the links that were skipped because they lead out of their folder.

    Raises:
        InvalidArgument: A path is a URI, or a folder has no images.
    """
    images: list[Path] = []
    skipped: list[Path] = []
    for path in paths:
        if scheme_of(path):
            raise InvalidArgument(f"{path} is a URI, which needs --resume")
        root = None if allow_outside else root_of(path)
        for image in (image for match in expand_glob(path) for image in _expand_folder(match, output)):
            (images if root is None or leads_below(image, root) else skipped).append(Path(image))
    return images, skipped


def scheme_of(place: str) -> str:
    """Return the scheme of a URI with its "://"; an empty text for a path, which may have "://" in it, too."""
    scheme = _SCHEME.match(place)
    return scheme[0] if scheme else ""


def _expand_folder(path: str, output: Path) -> Iterable[str]:
    if not Path(path).is_dir():
        return [path]
    # Only subfolders are compared with the output, because overlays may be written beside their photos.
    images = list(walk(path, lambda folder: not (output.exists() and output.samefile(folder))))
    if not images:
        raise InvalidArgument(f"no images in {path}")
    return images


def walk(folder: str, enter: Callable[[str], bool]) -> Iterator[str]:
    """Yield the images below a folder, ordered by name. Links to folders are not followed: they could form a loop.

    Args:
        folder: A local folder.
        enter: Function that returns True for a subfolder to search.
    """
    stack = [iter(_list_folder(folder))]
    while stack:
        path, is_folder = next(stack[-1], ("", False))
        if not path:
            stack.pop()
        elif not is_folder:
            yield path
        elif enter(path):
            stack.append(iter(_list_folder(path)))


def _list_folder(folder: str) -> list[tuple[str, bool]]:
    """Return the paths of images and subfolders, each with True for a subfolder; hidden ones are left out."""
    with os.scandir(folder) as entries:
        visible = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
    return [
        (entry.path, is_folder)
        for entry in visible
        if (is_folder := entry.is_dir(follow_symlinks=False)) or (is_photo(entry.name) and Path(entry.path).is_file())
    ]


def is_photo(name: str) -> bool:
    """Return True if a file has the suffix of an image and is not hidden."""
    return posixpath.splitext(name)[1].lower() in SUFFIXES and not name.startswith(".")


def expand_glob(path: str) -> list[str]:
    """Return a path that exists unchanged, and for a glob the files and folders that match, except hidden ones.

    ``**`` does not follow links, which could form a loop.
    """
    if Path(path).exists():
        return [path]
    start, pattern = _split_glob(path)
    matches = start.glob(pattern) if "**" in path else map(Path, glob.glob(path))  # noqa: PTH207 -- it leaves hidden ones out
    visible = (match for match in matches if not _is_hidden(match.relative_to(start)))
    return sorted(str(match) for match in visible if match.is_file() or match.is_dir())


def _split_glob(path: str) -> tuple[Path, str]:
    """Return the folder that a glob begins with, and the pattern below it."""
    parts = Path(path).parts
    first = next((index for index, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    return Path(*parts[:first]), os.path.join(*parts[first:], "")[:-1]  # noqa: PTH118 -- a pattern is not a path


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def root_of(path: str) -> str | None:
    """Return the folder that the photos of a path must be in: the folder itself, or the folder that a glob begins with.

    For a file it is None: the caller named the file, so links are followed anywhere.
    """
    if Path(path).is_dir():
        return os.path.realpath(path)
    return None if Path(path).exists() else os.path.realpath(_split_glob(path)[0])


def leads_below(path: str, root: str) -> bool:
    """Return True if a path is below a folder after its links are resolved."""
    return os.path.realpath(path).startswith(f"{root.rstrip(os.sep)}{os.sep}")
