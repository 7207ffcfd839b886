"""What other packages bring: methods and sources of models, by entry points.

Packages count that are installed where the server is. The folder in which it was started does not, though modules are
found there: whoever may write a file into a folder shall not thereby have code run in whatever is started in it.
"""

import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint, distributions
from pathlib import Path
from typing import Any

from camserve_server.core.errors import ConfigError

METHODS = "camserve.methods"
SOURCES = "camserve.sources"


def found(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points of a group by their names.

    Raises:
        ConfigError: two packages bring the same name.
    """
    here = Path.cwd()
    path = [one for one in sys.path if one and Path(one).resolve() != here]
    seen: dict[str, EntryPoint] = {}
    # A package may be found twice, as by a link from lib to lib64.
    for entry in {(one.name, one.value, _package(one)): one for one in _entries(group, path)}.values():
        if entry.name in seen:
            both = f"{_package(seen[entry.name])} and {_package(entry)}"
            raise ConfigError(f'{both} both bring "{entry.name}" for {group}: uninstall one of them')
        seen[entry.name] = entry
    return seen


def _entries(group: str, path: list[str]) -> list[EntryPoint]:
    return [entry for one in distributions(path=path) for entry in one.entry_points.select(group=group)]


def loaded(entry: EntryPoint) -> Any:
    """Return what an entry point names.

    Raises:
        ConfigError: it cannot be imported.
    """
    try:
        return entry.load()
    except Exception as error:
        raise ConfigError(
            f'the plugin {_package(entry)} brings "{entry.name}" for {entry.group}, which cannot be loaded: '
            f"{type(error).__name__}: {error}"
        ) from error


def refused(entry: EntryPoint, why: str) -> ConfigError:
    """Return the error for what an entry point named."""
    return ConfigError(f'the plugin {_package(entry)} brings "{entry.name}" for {entry.group}: {why}')


def _package(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
