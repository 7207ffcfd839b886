"""Plugins: methods and model sources that other packages provide as entry points.

Only installed packages count. The current folder is skipped, although modules can be imported from it: being allowed to
write a file into a folder must not be enough to run code in every server that is started there.
"""

import functools
import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint, distributions
from pathlib import Path
from typing import Any

from camserve_server.core.errors import ConfigError

METHODS = "camserve.methods"
SOURCES = "camserve.sources"


def find(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points of a group by name.

    Raises:
        ConfigError: two packages provide the same name.
    """
    current_folder = Path.cwd()
    folders = [Path(folder) for folder in sys.path if folder and Path(folder).resolve() != current_folder]
    versions = tuple((str(folder), folder.stat().st_mtime_ns) for folder in folders if folder.exists())
    # A package may be listed twice, for example through a link from lib to lib64.
    unique = {(entry.name, entry.value, _package(entry)): entry for entry in _entries(group, versions)}
    by_name: dict[str, EntryPoint] = {}
    for entry in unique.values():
        if entry.name in by_name:
            both = f"{_package(by_name[entry.name])} and {_package(entry)}"
            raise ConfigError(f'{both} both provide "{entry.name}" for {group}: uninstall one of them')
        by_name[entry.name] = entry
    return by_name


@functools.lru_cache(maxsize=2)  # it reads a file of each package, which took 10 ms; a folder's time changes with them
def _entries(group: str, versions: tuple[tuple[str, int], ...]) -> list[EntryPoint]:
    """Return the entry points of a group in folders, each with its time of modification."""
    path = [folder for folder, _ in versions]
    return [entry for package in distributions(path=path) for entry in package.entry_points.select(group=group)]


def load(entry: EntryPoint) -> Any:
    """Import the object of an entry point.

    Raises:
        ConfigError: the import failed.
    """
    try:
        return entry.load()
    except Exception as error:
        raise ConfigError(
            f'the plugin {_package(entry)} provides "{entry.name}" for {entry.group}, which cannot be loaded: '
            f"{type(error).__name__}: {error}"
        ) from error


def invalid(entry: EntryPoint, why: str) -> ConfigError:
    """Return the error for an entry point whose object is invalid."""
    return ConfigError(f'the plugin {_package(entry)} provides "{entry.name}" for {entry.group}: {why}')


def _package(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
