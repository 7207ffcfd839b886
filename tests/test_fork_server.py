"""Forked programs run and end as new processes of Python do, and a call in a process of its own returns its result."""

import json
import os
import subprocess
import sys

import pytest

import fork_server

pytestmark = pytest.mark.slow
SEES = """
import __main__, json, os, sys, threading
print(json.dumps({
    "arguments": sys.argv, "module": __name__, "file": hasattr(__main__, "__file__"), "first": sys.path[0],
    "tests": any(path.rstrip("/").endswith("tests") for path in sys.path), "marker": os.environ.get("MARKER"),
    "folder": os.getcwd(), "threads": threading.active_count(),
}))
"""
ENDINGS = {
    "the end": "print('done')",
    "a number": "import sys; print('done'); sys.exit(3)",
    "a large number": "import sys; sys.exit(259)",
    "a text": "import sys; sys.exit('wrong use')",
    "no number": "raise SystemExit",
    "an error": "print('done'); 1 / 0",
    "Ctrl-C": "import os, signal; signal.signal(2, signal.default_int_handler); os.kill(os.getpid(), 2)",
    "a thread": "import threading; threading.Timer(0.01, print, ['late']).start()",
    "exit functions": "import atexit; atexit.register(print, 'at exit'); print('done')",
    "a closed output": "import os; print('done'); os.close(1)",
}


def run_anew(code, *arguments, **options):
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, **options
    )


def test_forked_program_sees_what_a_new_process_sees(tmp_path, monkeypatch):
    monkeypatch.setenv("MARKER", "a value")
    forked, new = (run(SEES, "one", "two", cwd=tmp_path) for run in (fork_server.run, run_anew))

    assert json.loads(forked.stdout) == json.loads(new.stdout)


@pytest.mark.parametrize("ending", ENDINGS)
def test_forked_program_ends_as_a_new_process_does(ending):
    forked, new = (run(ENDINGS[ending]) for run in (fork_server.run, run_anew))

    assert (forked.returncode, forked.stdout) == (new.returncode, new.stdout)
    assert forked.stderr.splitlines()[-1:] == new.stderr.splitlines()[-1:]


def number_and_process(number):
    return number, os.getpid()


def failing():
    raise ValueError("a fault")


def test_call_runs_a_function_in_another_process():
    number, process = fork_server.call(number_and_process, 7)

    assert number == 7
    assert process != os.getpid()


def test_failed_call_shows_the_error():
    with pytest.raises(AssertionError, match="ValueError: a fault"):
        fork_server.call(failing)


def test_allocated_memory_is_the_largest_during_the_call():
    result, peak = fork_server.call(fork_server.allocating, largest)

    assert result == 20_000_000
    assert 20_000_000 <= peak < 21_000_000


def largest():
    large = bytes(20_000_000)
    size = len(large)
    del large
    return size + len(bytes(5_000_000)) - 5_000_000
