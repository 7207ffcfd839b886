"""Reload files when they change on disk, such as certificates and tokens, without a restart."""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from camserve_server.core.errors import ConfigError

log = logging.getLogger(__name__)

T = TypeVar("T")
Contents: TypeAlias = tuple[bytes, ...]


def read(paths: Sequence[str]) -> Contents:
    """Return the contents of files.

    Raises:
        ConfigError: a file cannot be read.
    """
    return tuple(map(_read, paths))


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


class ReloadingFile(Generic[T]):
    """A value built from files, rebuilt when they change. Broken or missing files leave the last valid value in use.

    Changes are detected by comparing contents, not modification times: clocks are coarse, and the files are small.

    Args:
        what: name of the value in the log.
        paths: the files.
        make: function that builds the value from the contents, or raises ConfigError.

    Raises:
        ConfigError: the files are invalid at the start.
    """

    def __init__(self, what: str, paths: Sequence[str], make: Callable[[Contents], T]) -> None:
        self._what, self._paths, self._make = what, tuple(paths), make
        self._contents = read(self._paths)
        self._value = make(self._contents)
        self._last_error = ""
        self._lock = threading.Lock()  # else a thread could get the old value while another builds the new one

    def current(self) -> T:
        """Return the value, rebuilt if the files have changed. Thread-safe."""
        with self._lock:
            try:
                self._reload()
            except ConfigError as error:
                self._log_error(str(error))
            return self._value

    def _reload(self) -> None:
        contents = read(self._paths)
        if contents == self._contents:
            return
        self._contents = contents  # before `make`, so that broken contents are tried once and not on every call
        self._value = self._make(contents)
        self._last_error = ""
        log.info("%s reloaded", self._what)

    def _log_error(self, message: str) -> None:
        if message != self._last_error:  # log it once, not on every call
            self._last_error = message
            log.error("%s: keeping the previous ones: %s", self._what, message)
