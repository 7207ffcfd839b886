"""A server of this tree, and one that replays the records."""

import pytest

from compatibility import servers, tape


@pytest.fixture(scope="module")
def address():
    """A server of this tree."""
    with servers.serving() as address:
        yield address


@pytest.fixture(scope="module")
def played():
    """A server that replays recorded replies."""
    with tape.replaying() as played:
        yield played
