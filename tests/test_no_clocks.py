"""No test asserts how long something took, because that depends on the machine and its load.

A reading of a clock may be compared with another one, which is an order. What is computed from one is a duration, or a
deadline, and may not be part of an assertion; nor may a name, an attribute or a key that holds it. Order, counts and
bytes can be asserted; speed is for `make bench` and `make soak`.
"""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "time"}
CLOCKS |= {f"{name}_ns" for name in CLOCKS}
MENTIONS = re.compile(rf"\b({'|'.join(CLOCKS)})\s*\(|\bdeadline\b")
"""What a file without assertions about time may lack: a call of a clock, or a deadline."""

EXCEPTIONS = {"api/test_servicer.py::test_rows_have_the_deadline_of_their_call": "an instant, the same however late"}
"""Exceptions, by file and function: why the assertion may be about time. There should be hardly any."""

ADDS = {"append", "extend", "add", "insert", "put", "update"}


def is_reading(node):
    """Return True if this reads a clock: `time.monotonic()`, `loop.time()`, `perf_counter()`."""
    if not isinstance(node, ast.Call) or node.args:
        return False
    return getattr(node.func, "attr", getattr(node.func, "id", "")) in CLOCKS


def word_of(node):
    """Return the name of a value: a variable, an attribute, or a key that is a constant."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f".{node.attr}"
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return f"[{node.slice.value}]"
    return ""


def parts(node):
    """Yield the parts of a value, without the keyword arguments of calls: `ask(deadline=…)` is not a deadline."""
    yield node
    for part in [node.func, *node.args] if isinstance(node, ast.Call) else ast.iter_child_nodes(node):
        yield from parts(part)


class Scope:
    """Names of a function for readings and durations. The module shares its attributes and keys."""

    def __init__(self, module):
        self.module, self.readings, self.durations = module, set(), set()

    def has(self, node, names):
        """Return True if a value is, or contains, a reading of a clock or a name in `names`."""
        return any(word_of(part) in names or (names is self.readings and is_reading(part)) for part in parts(node))

    def is_duration(self, node):
        """Return True if a value is computed from a reading of a clock."""
        if self.has(node, self.durations | self.module):
            return True
        return any(isinstance(part, ast.BinOp) and self.has(part, self.readings) for part in parts(node))

    def learn(self, target, value):
        """Record what a target holds after an assignment."""
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for element, element_value in zip(target.elts, value.elts, strict=True):
                self.learn(element, element_value)
            return
        words = {word for word in map(word_of, target.elts if isinstance(target, ast.Tuple) else [target]) if word}
        if self.is_duration(value):
            self.durations |= {word for word in words if word[0] not in ".["}
            self.module |= {word for word in words if word[0] in ".["}
        elif self.has(value, self.readings):
            self.readings |= words

    def read(self, node):
        """Record the names in one statement or expression."""
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self.learn(target, node.value)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.NamedExpr) and node.value:
            self.learn(node.target, node.value)
        elif isinstance(node, ast.For | ast.comprehension):
            self.learn(node.target, node.iter)
        elif isinstance(node, ast.Call):
            self.call(node)
        elif isinstance(node, ast.Dict):
            held = zip(node.keys, node.values, strict=True)
            self.module |= {f"[{key.value}]" for key, value in held if is_constant(key) and self.is_duration(value)}

    def call(self, node):
        """Record the names in a call: values that are added to a list, and keyword arguments."""
        if isinstance(node.func, ast.Attribute) and node.func.attr in ADDS:
            for value in node.args:
                self.learn(node.func.value, value)
        self.module |= {f".{each.arg}" for each in node.keywords if each.arg and self.is_duration(each.value)}


def is_constant(node, kind=str):
    return isinstance(node, ast.Constant) and isinstance(node.value, kind)


def functions(tree):
    """Yield the functions of a module and the methods of its classes, without nested functions."""
    for node in tree.body:
        yield from node.body if isinstance(node, ast.ClassDef) else [node]


def until_settled(scope, node):
    """Record names until nothing new is found; return the function's result."""
    before = None
    while before != (before := (len(scope.readings), len(scope.durations), len(scope.module))):
        for part in ast.walk(node):
            scope.read(part)
            if isinstance(part, ast.Return | ast.Yield) and part.value and scope.is_duration(part.value):
                scope.module |= {node.name, f".{node.name}"} if hasattr(node, "name") else set()


def asserted(source, name="example.py"):
    """Return the places of assertions about time."""
    if not MENTIONS.search(source):
        return []
    tree, module, result = ast.parse(source), set(), []
    for _ in range(3):  # what one function returns, another one asserts
        for node in functions(tree):
            until_settled(Scope(module), node)
    for node in functions(tree):
        until_settled(scope := Scope(module), node)
        for part in ast.walk(node):
            if isinstance(part, ast.Assert) and scope.is_duration(part.test):
                result.append(f"{name}::{getattr(node, 'name', part.lineno)}")
            if isinstance(part, ast.keyword) and part.arg == "deadline" and is_constant(part.value, int):
                result.append(f"{name}::a limit of Hypothesis")
    return result


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_no_test_asserts_a_duration(path):
    result = asserted(path.read_text(), str(path.relative_to(TESTS)))

    assert set(result) - EXCEPTIONS.keys() == set()


PLANTED = {
    "a duration": "began = time.monotonic()\n  work()\n  assert time.monotonic() - began < 5",
    "kept": "began = perf_counter()\n  took = perf_counter() - began\n  assert took < 5",
    "of the loop": "late = loop.time() + 5\n  while not done():\n    assert loop.time() < late",
    "the worst of many": "all = []\n  all.append(time.perf_counter() - began())\n  assert max(all) <= 0.2",
    "in a tuple": "code, took = stop(), time.time() - began()\n  assert code == 0 and took <= 2",
    "an attribute": "self.seconds = time.time() - 5\n  assert self.seconds <= 2",
    "a key": "found = {'seconds': time.time() - 5}\n  assert found['seconds'] <= 2",
    "a rate": "began = time.time()\n  rate = 100 / (time.time() - began)\n  assert rate == pytest.approx(8)",
    "a limit of Hypothesis": "settings(deadline=1000)",
}
SOUND = {
    "an order": "before = time.time_ns()\n  work()\n  assert before <= stamp() <= time.time_ns()",
    "a count": "until = time.time() + 5\n  while time.time() < until:\n    count += 1\n  assert count == 4",
    "a deadline for the system": "now = loop.time()\n  assert ask(deadline=now + 5) is None",
}


@pytest.mark.parametrize("body", PLANTED.values(), ids=PLANTED)
def test_assertion_about_time_is_detected(body):
    assert asserted(f"def test():\n  {body}\n") != []


def test_assertion_about_another_functions_measurement_is_detected():
    source = "def took():\n  return time.time() - 5\n\ndef test():\n  assert took() < 1\n"

    assert asserted(source) == ["example.py::test"]


@pytest.mark.parametrize("body", SOUND.values(), ids=SOUND)
def test_orders_and_counts_are_not_durations(body):
    assert asserted(f"def test():\n  {body}\n") == []
