"""Logs: one line an event, as text for people or JSON for machines, each with the id of its request."""

import json
import logging
import sys
from contextvars import ContextVar
from typing import Any

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
TRACE_ID: ContextVar[str] = ContextVar("trace_id", default="")
CALLER: ContextVar[str] = ContextVar("caller", default="")
"""The name of the token that a call shows; never the token."""


class TextFormatter(logging.Formatter):
    """Time, level, message, then `key=value` for each field; what could be misread as a line of its own is quoted."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        record.message = record.getMessage()
        parts = [self.formatTime(record), record.levelname, _printable(record.message)]
        line = " ".join(parts + [f"{key}={_quoted(value)}" for key, value in _fields(record).items()])
        if record.exc_info:
            trace = self.formatException(record.exc_info).splitlines()
            line = "\n".join([line, *("    " + _printable(each) for each in trace)])
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        entry = {"time": self.formatTime(record), "level": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry | _fields(record), default=str)


def _quoted(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text else _printable(json.dumps(text, ensure_ascii=False))


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = dict(getattr(record, "fields", {}))
    if caller := CALLER.get():
        fields["caller"] = caller
    if request_id := REQUEST_ID.get():
        fields["request_id"] = request_id
    if trace_id := TRACE_ID.get():
        fields["trace_id"] = trace_id
    return fields


def fields(**values: Any) -> dict[str, Any]:
    """Return what a logging call takes as `extra` to log these fields."""
    return {"fields": values}


def configure(level: str, form: str) -> None:
    """Log to standard error, from this level up, as "text" or "json"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logger = logging.getLogger("camserve_server")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
