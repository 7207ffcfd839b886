"""Every name of the public API has a docstring, with an example that runs."""

import doctest
import importlib
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import camserve
import camserve_server

DOCS = Path(__file__).parents[1] / "docs" / "api"
DOCUMENTED = re.compile(r"^\.\. auto(?:class|function|exception):: ([\w.]+)$", re.MULTILINE)
WITHOUT_MEMBERS = re.compile(r"^\.\. autoclass:: ([\w.]+)\n   :no-members:$", re.MULTILINE)
OURS = ("camserve", "camserve_server", "planted")


def public_names():
    """Return the public names, as users import them."""
    names = [f"{package.__name__}.{name}" for package in (camserve, camserve_server) for name in package.__all__]
    for page in sorted(DOCS.glob("*.md")):
        names += DOCUMENTED.findall(page.read_text("utf-8"))
    return list(dict.fromkeys(names))


def names_without_members():
    """Return the classes whose members no page shows: plugins only construct them."""
    return {name for page in DOCS.glob("*.md") for name in WITHOUT_MEMBERS.findall(page.read_text("utf-8"))}


def resolve(name):
    """Return the object with a dotted name."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def faults(name, *, members=True):
    """Yield one line for each docstring of a public name, and of its members, that is missing or has no example."""
    value = resolve(name)
    if isinstance(value, str):  # an alias of a type, which can have no docstring
        return
    yield from _faults(name, value, value.__module__)
    for home, member, part in _members(value) if members and inspect.isclass(value) else ():
        is_shown = isinstance(part, property) and _uses(member, value.__doc__ or "")
        yield from _faults(f"{name}.{member}", part, home, needs_example=not is_shown)


def _members(owner):
    """Yield the module, the name and the object of each public method and property that our code defines."""
    for name in {name: None for base in owner.__mro__ for name in vars(base) if not name.startswith("_")}:
        definer = next(base for base in owner.__mro__ if name in vars(base))
        value = inspect.getattr_static(definer, name)
        value = getattr(value, "__func__", value)  # of a static method
        if definer.__module__.startswith(OURS) and (inspect.isfunction(value) or isinstance(value, property)):
            yield definer.__module__, name, value


def _faults(label, value, home, *, needs_example=True):
    docstring = value.__doc__
    from_dataclass = f"{label.rpartition('.')[2]}("  # the docstring that a dataclass makes for itself
    if not docstring or docstring.startswith(from_dataclass):
        yield f"{label} has no docstring"
    elif needs_example and not has_example(docstring, sys.modules[home]):
        yield f"{label} has no example"


def has_example(docstring, module):
    """Return true if doctest finds examples in a docstring of a module, and skips none of them."""
    found = doctest.DocTestFinder().find(module, module.__name__)
    examples = [example for test in found if test.docstring == docstring for example in test.examples]
    return bool(examples) and not any(doctest.SKIP in example.options for example in examples)


def _uses(member, docstring):
    """Return true if an example uses a property."""
    examples = doctest.DocTestParser().get_examples(docstring)
    return any(re.search(rf"\.{member}\b", example.source) for example in examples)


def test_every_public_name_has_a_docstring_with_an_example():
    alone = names_without_members()
    assert [fault for name in public_names() for fault in faults(name, members=name not in alone)] == []


def test_class_whose_members_no_page_shows_still_needs_an_example(monkeypatch):
    module = ModuleType("planted")
    monkeypatch.setitem(sys.modules, "planted", module)
    exec(PLANTED, vars(module))  # noqa: S102 -- the text below

    assert list(faults("planted.Undocumented", members=False)) == ["planted.Undocumented has no docstring"]


PLANTED = '''
from dataclasses import dataclass


@dataclass
class Undocumented:
    value: int

    def save(self):
        """Save it."""

    @property
    def hidden(self):
        """1, which no example shows."""
        return 1


class Skipped:
    """Class with an example that does not run.

    >>> Skipped().value()  # doctest: +SKIP
    1
    """

    @staticmethod
    def value():
        """1.

        >>> Skipped.value()
        1
        """
        return 1

    def silent(self):
        pass


class Documented:
    """Class with an example.

    >>> Documented().shown
    1
    """

    @property
    def shown(self):
        """1, as the class's example shows."""
        return 1

    def _private(self):
        pass


def function():
    """Return 1."""
'''


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Undocumented", [" has no docstring", ".save has no example", ".hidden has no example"]),
        ("Skipped", [" has no example", ".silent has no docstring"]),
        ("Documented", []),
        ("function", [" has no example"]),
    ],
)
def test_planted_fault_is_found(name, expected, monkeypatch):
    module = ModuleType("planted")
    monkeypatch.setitem(sys.modules, "planted", module)
    exec(PLANTED, vars(module))  # noqa: S102 -- the text above

    assert list(faults(f"planted.{name}")) == [f"planted.{name}{fault}" for fault in expected]
