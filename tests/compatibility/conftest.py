"""Fixtures: a server of this tree, and one that replays the records."""

import pytest

from compatibility import servers, tape


@pytest.fixture(scope="session")
def address():
    """Address of a server of this tree."""
    with servers.serving() as address:
        yield address


@pytest.fixture(scope="module")
def replay_server():
    """Server that replays recorded replies."""
    with tape.replaying() as server:
        yield server
