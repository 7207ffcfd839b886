"""Folders of small models of transformers, saved when a test asks for them, and the models that servers load."""

from contextlib import ExitStack

import pytest

from camserve_server.models import parse
from camserve_server.workers import in_process
from support import serving


class Folders(dict):
    """Folders by the name of their model, each saved when it is first asked for.

    Args:
        save: receives the name of a model and a folder; saves the model in a folder below that one, and returns it.
        root: the folder for all of them.
    """

    def __init__(self, save, root):
        super().__init__()
        self._save, self._root = save, root

    def __missing__(self, name):
        self[name] = self._save(name, self._root)
        return self[name]


class Servers:
    """Servers of one model each, in this process, started when a test asks for them; a context manager.

    Tests that need no server read a replica of the server's model: loading one takes longer than most of these tests,
    and the model itself may run a canary at any time. Few models cannot be copied, and are loaded once more.
    """

    def __enter__(self):
        self._running, self._addresses, self._replicas = ExitStack(), {}, {}
        patch, load = self._running.enter_context(pytest.MonkeyPatch.context()), in_process.load

        def load_and_copy(spec, *arguments, **options):
            model = load(spec, *arguments, **options)
            self._replicas[spec] = model.replica() or load(spec, *arguments, **options)
            return model

        patch.setattr(in_process, "load", load_and_copy)
        return self

    def __exit__(self, *_):
        self._running.close()

    def address(self, spec):
        """Return the address of the server of a spec."""
        if spec not in self._addresses:
            running = self._running.enter_context(serving(models=(spec,), device="cpu", threads=1))
            self._addresses[spec] = running.address
        return self._addresses[spec]

    def model(self, spec):
        """Return a replica of the model that the server of a spec has loaded. Tests must not change it."""
        self.address(spec)
        return self._replicas[parse(spec)]


def marked_except(mark, unmarked, names):
    """Return names as parameters of a test, with a mark but for those in `unmarked`."""
    return [pytest.param(name, marks=() if name in unmarked else mark) for name in names]
