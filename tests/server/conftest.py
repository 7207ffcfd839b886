"""A model that costs next to nothing."""

import sys

import pytest

from support import TINY


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A model that is there at once."""
    folder = tmp_path_factory.mktemp("nets")
    (folder / "server_nets.py").write_text(TINY)
    sys.path.insert(0, str(folder))
    yield "tiny=server_nets:tiny?size=32"
    sys.path.remove(str(folder))
