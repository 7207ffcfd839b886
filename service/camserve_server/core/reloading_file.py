"""What is made of files, and made again when they change: certificates and tokens are renewed without a restart."""

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
    """Return what is in files.

    Raises:
        ConfigError: one cannot be read.
    """
    return tuple(map(_read, paths))


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


class ReloadingFile(Generic[T]):
    """A value made of files; files that are broken or gone leave the last good one.

    What is in the files is compared, not when they were written: clocks are coarse, and the files are small.

    Args:
        what: its name in the log.
        paths: the files.
        make: makes the value of their contents, or raises ConfigError.

    Raises:
        ConfigError: the files are no good to begin with.
    """

    def __init__(self, what: str, paths: Sequence[str], make: Callable[[Contents], T]) -> None:
        self._what, self._paths, self._make = what, tuple(paths), make
        self._seen = read(self._paths)
        self._value = make(self._seen)
        self._complaint = ""
        self._one_at_a_time = threading.Lock()  # or one thread would be handed the old while another makes the new

    def current(self) -> T:
        """Return the value, made again if the files are others; from any thread."""
        with self._one_at_a_time:
            try:
                self._look()
            except ConfigError as error:
                self._complain(str(error))
            return self._value

    def _look(self) -> None:
        seen = read(self._paths)
        if seen == self._seen:
            return
        self._seen = seen  # what is broken is looked at once
        self._value = self._make(seen)
        self._complaint = ""
        log.info("%s read again", self._what)

    def _complain(self, words: str) -> None:
        if words != self._complaint:  # once, not on every call
            self._complaint = words
            log.error("%s: the old stay in force: %s", self._what, words)
