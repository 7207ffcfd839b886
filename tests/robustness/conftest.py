"""The log of worker processes that ended."""

import pytest

from camserve_server.workers import worker


@pytest.fixture
def ended(monkeypatch):
    """The errors that this process logs when worker processes end."""
    lines = []
    monkeypatch.setattr(worker.log, "error", lambda words, *values, **_: lines.append(words % values))
    return lines
