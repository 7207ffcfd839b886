"""Tests start servers, get ports and wait in one way, which works on a busy machine, too.

`server_process` starts servers as processes of their own: it reads their ports from the log, and leaves none running.
`support.wait_until` and `wait_in_loop_until` wait for conditions. A port that was free may belong to somebody else by
the time a server gets it: servers listen on port 0, and for programs that cannot report their port, a socket of
`reserved_port` keeps it.
"""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
EXCEPTIONS = {
    "cli/test_commands.py: starts a server": "the program itself is tested: what a user sees of its start and its end",
    "leftovers.py: waits": "it waits for the end of processes that may not end",
    "robustness/soak.py: waits": "it waits for a state that a leaking server does not reach",
    "support.py: waits": "this is the way",
}
"""Exceptions: why there is another way."""

STARTS = {"Popen", "create_subprocess_exec", "create_subprocess_shell", "posix_spawn", "start"}
SERVERS = {"SERVER", "serve"}
OPENS = {"socket", "create_server"}
DECIDES = ast.Assert | ast.If | ast.Return | ast.Break | ast.Continue | ast.Pass | ast.Raise
"""Statements of a loop that waits, beside the call that sleeps."""


def name_of(node):
    return getattr(node, "attr", getattr(node, "id", ""))


def calls(node, names):
    """Return the calls of functions with these names in a part of a program."""
    return [part for part in ast.walk(node) if isinstance(part, ast.Call) and name_of(part.func) in names]


def starts_server(node):
    """Return True if this starts a program of which a word is `serve`, or which is `fork_server.SERVER`."""
    if not (isinstance(node, ast.Call) and name_of(node.func) in STARTS):
        return False
    parts = [part for argument in node.args for part in ast.walk(argument)]
    words = {word for part in parts if isinstance(part, ast.Constant) for word in str(part.value).split()}
    return bool(SERVERS & (words | {name_of(part) for part in parts}))


def releases_port(function):
    """Return True if a function uses the number of a port after the socket that had it was closed."""
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    for block in ast.walk(function):
        if isinstance(block, ast.With) and any(calls(item.context_expr, OPENS) for item in block.items):
            kept = {name_of(target) for part in ast.walk(block) for target in targets_of(part, {"getsockname"})}
            returned = (part for part in ast.walk(block) if isinstance(part, ast.Return))
            if kept & names_after(block, function) or any(calls(part, {"getsockname"}) for part in returned):
                return True
    closed = {name_of(call.func.value) for call in calls(function, {"close"}) if isinstance(call.func, ast.Attribute)}
    opened = {name_of(target) for part in ast.walk(function) for target in targets_of(part, OPENS)}
    asked = {name_of(call.func.value) for call in calls(function, {"getsockname"})}
    return bool(closed & opened & asked)


def names_after(block, function):
    """Return the names that a function uses after a block, but not only to check what happened inside it."""
    later = [part for part in function.body if part.lineno > block.end_lineno and not isinstance(part, ast.Assert)]
    return {name_of(part) for statement in later for part in ast.walk(statement)}


def targets_of(node, names):
    """Return the targets of an assignment whose value calls one of these functions."""
    return node.targets if isinstance(node, ast.Assign) and calls(node.value, names) else []


def waits(node):
    """Return True if a loop does nothing but sleep until it has a reason to end."""
    if not isinstance(node, ast.While | ast.For | ast.AsyncFor):
        return False
    sleeps = [each for each in node.body if isinstance(each, ast.Expr) and calls(each, {"sleep"})]
    others = [each for each in node.body if each not in sleeps and not isinstance(each, DECIDES)]
    yields = all(isinstance(each.args[0], ast.Constant) and each.args[0].value == 0 for each in calls(node, {"sleep"}))
    return bool(sleeps) and not others and not yields


KINDS = {
    "starts a server": (starts_server, re.compile(r"\b(serve|SERVER)\b")),
    "releases a port": (releases_port, re.compile("getsockname")),
    "waits": (waits, re.compile("sleep")),
}
"""Kinds of other ways: what finds one in a part of a program, and a word without which a file has none."""


def found(source):
    """Return the kinds that a file has."""
    kinds = {kind: has for kind, (has, word) in KINDS.items() if word.search(source)}
    nodes = list(ast.walk(ast.parse(source))) if kinds else []
    return {kind for kind, has in kinds.items() if any(map(has, nodes))}


def test_servers_ports_and_waits_have_one_way():
    paths = [path for path in TESTS.rglob("*.py") if path != Path(__file__)]
    places = {f"{path.relative_to(TESTS)}: {kind}" for path in paths for kind in found(path.read_text())}

    assert places == EXCEPTIONS.keys()  # without one that is no longer needed


PLANTED = {
    "a process": ("starts a server", "subprocess.Popen([PROGRAM, 'serve', *flags])"),
    "a process in a text": ("starts a server", "Popen(f'camserve-server serve --address {address}'.split())"),
    "a fork": ("starts a server", "fork_server.start(fork_server.SERVER, *flags)"),
    "a process of a loop": ("starts a server", "await asyncio.create_subprocess_exec('camserve-server', 'serve')"),
    "a port returned": ("releases a port", "with socket.socket() as s:\n    s.bind(A)\n    return s.getsockname()[1]"),
    "a port kept": ("releases a port", "with create_server(A) as s:\n    port = s.getsockname()[1]\n  serve(port)"),
    "an address kept": ("releases a port", "with socket() as s:\n    a = f'h:{s.getsockname()[1]}'\n  start(a)"),
    "a closed socket": ("releases a port", "s = socket.create_server(A)\n  port = s.getsockname()[1]\n  s.close()"),
    "a loop": ("waits", "while not done():\n    time.sleep(pause)"),
    "a loop with a check": ("waits", "while not done():\n    assert process.poll() is None\n    time.sleep(pause)"),
    "a loop with an end": ("waits", "while True:\n    if done():\n      break\n    await asyncio.sleep(pause)"),
    "a number of looks": ("waits", "for _ in range(100):\n    if done():\n      break\n    time.sleep(pause)"),
}
SOUND = {
    "another program": "subprocess.Popen(['haproxy', '-f', path])",
    "a command that ends": "subprocess.run([PROGRAM, 'serve', '--model', 'none'])",
    "a thread": "threading.Thread(target=work).start()",
    "a socket that listens": "with create_server(A) as s:\n    port = s.getsockname()[1]\n    client.connect(port)",
    "a load": "while not done():\n    client.explain(photo)\n    time.sleep(pause)",
    "a loop that runs": "while not done():\n    await asyncio.sleep(0)",
    "a condition": "wait_until(lambda: done())",
}


@pytest.mark.parametrize(("kind", "body"), PLANTED.values(), ids=PLANTED)
def test_other_way_is_found(kind, body):
    assert found(f"async def test():\n  {body}\n") == {kind}


@pytest.mark.parametrize("body", SOUND.values(), ids=SOUND)
def test_what_needs_no_other_way_is_not_found(body):
    assert found(f"async def test():\n  {body}\n") == set()
