"""Folders of small models of transformers, saved when a test asks for them."""

import pytest


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


def marked_except(mark, unmarked, names):
    """Return names as parameters of a test, with a mark but for those in `unmarked`."""
    return [pytest.param(name, marks=() if name in unmarked else mark) for name in names]
