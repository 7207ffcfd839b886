"""Logging: one line per event, as text or JSON, each with the ID of its request."""

import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import Any

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
TRACE_ID: ContextVar[str] = ContextVar("trace_id", default="")
CALLER: ContextVar[str] = ContextVar("caller", default="")
"""Name of the token that a call was authenticated with; never the token itself."""


_process: int | None = None
"""Number of this server process among several: set once, and inherited by the workers that it forks."""


class _Formatter(logging.Formatter):
    """Base class of the formats: formats the date once for all records of a second."""

    def __init__(self) -> None:
        super().__init__()
        self._second: tuple[int, str] = (-1, "")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002, N802 -- the base class's
        """Return the time of a record, as the base class does by default."""
        second, text = self._second
        if int(record.created) != second:
            second = int(record.created)
            text = time.strftime(self.default_time_format, time.localtime(record.created))
            self._second = second, text
        return f"{text},{int(record.msecs):03}"


class TextFormatter(_Formatter):
    """Formats a record as time, level, message and `key=value` fields.

    Control characters are escaped, so that no value can forge another line.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the formatted record."""
        record.message = record.getMessage()
        parts = [self.formatTime(record), record.levelname, _printable(record.message)]
        line = " ".join(parts + [f"{key}={_quoted(value)}" for key, value in _fields(record).items()])
        if record.exc_info:
            trace = self.formatException(record.exc_info).splitlines()
            line = "\n".join([line, *("    " + _printable(part) for part in trace)])
        return line


class JsonFormatter(_Formatter):
    """Formats a record as one JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the formatted record."""
        entry = {"time": self.formatTime(record), "level": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry | _fields(record), default=str)


def _quoted(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text else _printable(json.dumps(text, ensure_ascii=False))


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = dict(getattr(record, "fields", {}))
    if _process is not None:
        fields.setdefault("process", _process)
    if caller := CALLER.get():
        fields["caller"] = caller
    if request_id := REQUEST_ID.get():
        fields["request_id"] = request_id
    if trace_id := TRACE_ID.get():
        fields["trace_id"] = trace_id
    return fields


def fields(**values: Any) -> dict[str, Any]:
    """Return the argument `extra` of a logging call that logs these fields."""
    return {"fields": values}


def write_access_line(logger: logging.Logger, message: str, values: dict[str, object]) -> None:
    """Log a line with these fields. It costs half as much as `Logger.info`, which also looks for the calling line."""
    if logger.isEnabledFor(logging.INFO):
        record = logging.LogRecord(logger.name, logging.INFO, "", 0, message, (), None)
        record.fields = values
        logger.handle(record)


def configure(level: str, form: str, process: int | None = None) -> None:
    """Log to standard error.

    Args:
        level: the lowest level that is logged.
        form: "text" or "json".
        process: number of this server process among several; None to keep the current one.
    """
    global _process  # noqa: PLW0603 -- set at the start of a process
    _process = _process if process is None else process
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logger = logging.getLogger("camserve_server")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # it warns of every broken file that a caller sends
