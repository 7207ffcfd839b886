"""No test asserts how long something took, or fails because something took long: both depend on the machine's load.

A reading of a clock may be compared with another one, which is an order. What is computed from one is a duration, or a
deadline, and may not be part of an assertion; nor may a name, an attribute or a key that holds it. Order, counts and
bytes can be asserted; speed is for `make bench` and `make soak`.

No timeout is below a minute, and nothing sleeps for a fixed time: a busy machine would decide what the test finds. The
few tests of a timeout itself say on its line why a slow machine cannot fail them: `# real timeout: <reason>`.
"""

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SOURCES = {
    str(path.relative_to(TESTS)): path.read_text() for path in sorted(TESTS.rglob("*.py")) if path != Path(__file__)
}
"""The other files of the tests, by path. Each rule has one test for all of them: a test for each took longer."""

CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "time"}
CLOCKS |= {f"{name}_ns" for name in CLOCKS}
MENTIONS = re.compile(rf"\b({'|'.join(CLOCKS)})\s*\(|\bdeadline\b")
"""What a file without assertions about time may lack: a call of a clock, or a deadline."""

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


NAMES = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr, ast.For, ast.comprehension, ast.Call, ast.Dict)
ENDS = (ast.Return, ast.Yield)
"""What may give a name to a value, or to the result of a function."""


def until_settled(scope, node, parts):
    """Record the names in the parts of a function until nothing new is found."""
    before = None
    while before != (before := (len(scope.readings), len(scope.durations), len(scope.module))):
        for part in parts:
            scope.read(part)
            if isinstance(part, ast.Return | ast.Yield) and part.value and scope.is_duration(part.value):
                scope.module |= {node.name, f".{node.name}"} if hasattr(node, "name") else set()


def asserted(source, name="example.py"):
    """Return the places of assertions about time."""
    if not MENTIONS.search(source):
        return []
    module, result, before = set(), [], None
    walked = [(node, list(ast.walk(node))) for node in functions(ast.parse(source))]
    naming = [(node, [part for part in parts if isinstance(part, (*NAMES, *ENDS))]) for node, parts in walked]
    while before != (before := len(module)):  # what one function returns, another one asserts
        for node, parts in naming:
            until_settled(Scope(module), node, parts)
    for (node, naming_parts), (_, parts) in zip(naming, walked, strict=True):
        until_settled(scope := Scope(module), node, naming_parts)
        for part in parts:
            if isinstance(part, ast.Assert) and scope.is_duration(part.test):
                result.append(f"{name}::{getattr(node, 'name', part.lineno)}")
            if isinstance(part, ast.keyword) and part.arg == "deadline" and is_constant(part.value, int):
                result.append(f"{name}::a limit of Hypothesis")
    return result


def test_no_test_asserts_a_duration():
    assert [place for path, source in SOURCES.items() for place in asserted(source, path)] == []


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


MINUTE = 60
LIMITS = "timeout|deadline|patience|grace|delay|interval|heartbeat|seconds"
LIMIT = re.compile(rf"(^|[_-])({LIMITS})($|[_-])", re.IGNORECASE)
"""Names that limit how long something may take. Those that end in `ms` hold milliseconds."""

WAITS = {"wait", "wait_for", "join", "result", "timeout", "settimeout", "select", "poll", "communicate"}
WAITS |= {"sleep", "call_later", "Timer"}
LIMITS_OR_WAITS = re.compile(
    rf"({LIMITS}|sleep)[^\d\n]*\n?[^\d\n]*\d"
    rf"|(?<![\"']\.)\b({'|'.join(WAITS)})[(,](?!\))",
    re.IGNORECASE,
)
"""What a file without limits may lack: a name of a limit before a digit, or a call that waits."""

IN_TEXT = re.compile(r"--([a-z-]+)[ =]([\d.]+)(?![\d.*])|\b(\w+) ?[=(] ?([\d.]+)(?![\d.*])")
"""A flag, an assignment or a call in a text: `--drain-seconds 5`, `TIMEOUT = 5`, `time.sleep(5)`."""

EXPLAINED = re.compile(r"# real timeout: \w\S*( \S+){2,}")
WAITS_FOR_A_CONDITION = "support.py"
"""The only file that may sleep between two looks."""


def named(node):
    """Yield the names in one statement or expression, each with its value."""
    if isinstance(node, ast.keyword):
        yield node.arg or "", node.value
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield word_of(target).strip(".[]"), node.value
    elif isinstance(node, ast.Dict):
        yield from ((text_of(key), value) for key, value in zip(node.keys, node.values, strict=True))
    elif isinstance(node, ast.arguments):
        names = [*node.posonlyargs, *node.args]
        yield from ((each.arg, value) for each, value in zip(names[::-1], node.defaults[::-1], strict=False))
        yield from ((each.arg, value) for each, value in zip(node.kwonlyargs, node.kw_defaults, strict=True))
    elif isinstance(node, ast.Call | ast.List | ast.Tuple):  # `"--drain-seconds", "5"`, `setattr(module, "TIMEOUT", 5)`
        listed = node.args if isinstance(node, ast.Call) else node.elts
        yield from ((text_of(name), value) for name, value in pairwise(listed))


def waited(node):
    """Yield the arguments of a call that waits: `event.wait(5)`, `pool.submit(event.wait, 5)`."""
    if not isinstance(node, ast.Call):
        return
    if word_of(node.func).strip(".") in WAITS:
        yield from node.args
    yield from (value for function, value in pairwise(node.args) if word_of(function).strip(".") in WAITS)


def text_of(node):
    """Return a constant text, without the path before a name."""
    return node.value.rpartition(".")[2] if is_constant(node) else ""


def is_short(value, name=""):
    """Return True if a value is a time below a minute. Zero expires at once on every machine, infinity never."""
    try:
        return value is not True and 0 < float(value) < MINUTE * (1000 if name.lower().endswith("ms") else 1)
    except ValueError:
        return False


MAY_LIMIT = (ast.keyword, ast.Assign, ast.AnnAssign, ast.Dict, ast.arguments, ast.Call, ast.List, ast.Tuple)


def short_limits(node):
    """Yield the lines of limits below a minute, and of fixed sleeps, in one statement or expression."""
    if is_constant(node):
        yield from limits_in_text(node)
    if not isinstance(node, MAY_LIMIT):
        return
    for name, value in named(node):
        if LIMIT.search(name) and is_constant(value, str | int | float) and is_short(value.value, name):
            yield value.lineno
    for value in waited(node):
        if is_constant(value, int | float) and is_short(value.value):
            yield value.lineno


def limits_in_text(node):
    """Yield the lines of limits below a minute, and of fixed sleeps, in a constant text."""
    for match in IN_TEXT.finditer(node.value):
        name, value = match[1] or match[3], match[2] or match[4]
        if (LIMIT.search(name) or name == "sleep") and is_short(value, name):
            yield min(node.lineno + node.value.count("\n", 0, match.start()), node.end_lineno)


def unexplained(source):
    """Return the lines with a timeout below a minute, or a fixed sleep, that no comment explains."""
    if not LIMITS_OR_WAITS.search(source):
        return []
    lines = source.splitlines()
    found = {number for node in ast.walk(ast.parse(source)) for number in short_limits(node)}
    places = ((number, lines[number - 1].strip()) for number in sorted(found))
    return [f"{number}: {line}" for number, line in places if not EXPLAINED.search(line)]


def test_no_timeout_is_shorter_than_a_busy_machine_may_need():
    found = {path: lines for path, source in SOURCES.items() if (lines := unexplained(source))}

    assert found.keys() - {WAITS_FOR_A_CONDITION} == set(), found


SHORT = {
    "a keyword": "client.explain(photo, timeout=5)",
    "a setting": "serving(connection_age_seconds=0.5)",
    "milliseconds": "serving(max_queue_delay_ms=50)",
    "a default": "def call(rpc, timeout=30): ...",
    "a default of a keyword": "def call(*, patience: float = 30): ...",
    "a flag": "run('--drain-seconds', '0.5')",
    "a flag in a list": "flags = [*more, '--timeout', 1]",
    "flags in a text": "start(f'--address {address} --connection-age-seconds 0.3')",
    "an item": "settings = {'idle_seconds': '0.1'}",
    "a constant": "DRAIN_TIMEOUT = 2",
    "a constant with a type": "HEARTBEAT_INTERVAL: float = 0.5",
    "an attribute": "supervisor.deadline = 0.4",
    "a key": "settings['grace'] = 3",
    "a patched constant": "monkeypatch.setattr(worker, 'START_TIMEOUT', 1.0)",
    "a patched path": "monkeypatch.setattr('camserve.worker.START_TIMEOUT', 1.0)",
    "a constant of a program": "run('import worker; worker.TIMEOUT = 3')",
    "an event": "assert go.wait(10)",
    "a thread": "thread.join(10)",
    "a future": "future.result(5)",
    "an awaitable": "asyncio.wait_for(call, 5)",
    "a block": "asyncio.timeout(5)",
    "a socket": "line.settimeout(20)",
    "several sockets": "select.select([line], [], [], 1)",
    "a wait in a thread": "asyncio.to_thread(go.wait, 5)",
    "a sleep": "time.sleep(0.01)",
    "a sleep of a task": "asyncio.sleep(0.01)",
    "a sleep of a program": "run('import time; time.sleep(3)')",
    "a timer": "loop.call_later(0.02, stop)",
    "no reason": "go.wait(5)  # real timeout: needed",
    "a reason on another line": "# real timeout: nobody ever sets it\ngo.wait(5)",
}
CALM = {
    "a minute": "client.explain(photo, timeout=60)",
    "none": "go.wait(); thread.join(timeout=None)",
    "zero": "line.settimeout(0); asyncio.sleep(0); serving(drain_seconds=0)",
    "infinity": "serving(drain_seconds=float('inf'), idle_seconds=math.inf)",
    "words": "','.join(words)",
    "a parameter": "client.explain(photo, timeout=timeout)",
    "a stopped clock": "clock.advance(5)",
    "a measurement": "Timing(decode_ms=1, queue_ms=2)",
    "a sentinel": "iter(ended.wait, True)",
    "an hour in a program": "run('import time; time.sleep(3600)')",
    "a formula": "run('worker.HEARTBEAT_INTERVAL = 10**6')",
    "an explained one": "go.wait(0.2)  # real timeout: nobody ever sets the event",
}


@pytest.mark.parametrize("line", SHORT.values(), ids=SHORT)
def test_short_timeout_is_detected(line):
    assert unexplained(f"{line}\n") != []


@pytest.mark.parametrize("line", CALM.values(), ids=CALM)
def test_other_values_are_no_short_timeouts(line):
    assert unexplained(f"{line}\n") == []


def test_short_timeout_is_named_by_its_line():
    source = 'NETS = """\nimport time\ntime.sleep(3)\n"""\n'

    assert unexplained(source) == ["3: time.sleep(3)"]
