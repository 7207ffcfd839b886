"""Lines that native libraries write to standard error, such as libjpeg's warning about a broken photo, as log records.

Callers choose the photos. Without this they would write into the log at will, and a reader of JSON lines would fail.
"""

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from camserve_server.core import logs

log = logging.getLogger(__name__)

INTERVAL, LINES = 60.0, 10  # seconds, and the lines that are logged in them
_before: TextIO | None = None

FLUSH_TIMEOUT = 1.0  # seconds for the last lines; another process may still have the pipe open
_LENGTH = 200  # characters of a line that are logged
_CHUNK = 2**16


@contextmanager
def logged() -> Iterator[None]:
    """Log the lines that arrive on standard error of this process inside the block; the log goes where it went before.

    Enter it once, after other processes were started that inherit standard error; later ones get `standard_error`. What
    a library writes right before it ends the process is lost; the trace of Python's threads at that time is written.
    """
    global _before  # noqa: PLW0603 -- set once, as standard error is the process's
    _before = own = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    reading, writing = os.pipe()
    os.set_blocking(writing, False)  # lines are lost rather than that a library waits for the log
    os.dup2(writing, 2)
    os.close(writing)
    shown = sys.stderr
    _write_log_to(own)
    traced = not faulthandler.is_enabled()
    if traced:
        faulthandler.enable(own)
    thread = threading.Thread(target=_log_lines, args=(reading,), name="native output", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.dup2(own.fileno(), 2)  # which closes the last end of the pipe to write to
        thread.join(FLUSH_TIMEOUT)
        os.close(reading)
        _write_log_to(shown)
        if traced:
            faulthandler.disable()
        own.close()


def _write_log_to(file: TextIO) -> None:
    sys.stderr = file
    for handler in logging.getLogger("camserve_server").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(file)


def standard_error() -> TextIO | None:
    """Return where standard error led before `logged`; None if it still leads there."""
    return _before


def _log_lines(reading: int) -> None:
    began, logged, suppressed = -INTERVAL, 0, 0
    for line in _lines(reading):
        if (now := time.monotonic()) - began >= INTERVAL:
            began, logged = now, 0
        if logged == LINES:
            suppressed += 1
            continue
        logged += 1
        values = logs.fields(text=line, **({"suppressed": suppressed} if suppressed else {}))
        log.warning("a native library wrote to standard error", extra=values)
        suppressed = 0


def _lines(reading: int) -> Iterator[str]:
    """Yield the lines that arrive on a file descriptor, each cut to `_LENGTH` characters."""
    rest = b""
    while data := os.read(reading, _CHUNK):
        *lines, rest = (rest + data).split(b"\n")
        rest = rest[:_CHUNK]  # of a line that does not end
        for line in filter(None, lines):
            yield line.decode("utf-8", "backslashreplace")[:_LENGTH]
