"""No test leaves a process behind, however it ends; a test that leaves one is named."""

import re

import pytest

import fork_server
import leftovers
from process_guard import RUN
from support import alive, wait_until

pytestmark = pytest.mark.slow
SLEEP = "import time; time.sleep(3600)"
PYTEST = """
import sys
sys.path.insert(0, {tests!r})
import leftovers, pytest
leftovers.SECONDS = 0  # so that the test does not take them
sys.exit(pytest.main(["-p", "process_guard", "-p", "no:cacheprovider", "-q", "-s", "-rN", *sys.argv[1:]]))
"""
STARTS = f"""
import subprocess, sys
import pytest

ORPHAN = "import subprocess, sys; print('started', subprocess.Popen([sys.executable, '-S', '-c', {SLEEP!r}]).pid)"

def start():
    process = subprocess.Popen([sys.executable, "-S", "-c", {SLEEP!r}])
    print("started", process.pid, flush=True)
    return process
"""
LEAVES = """
import os, signal

@pytest.fixture(scope="session", autouse=True)
def kept():
    os.environ["KEPT"] = str(start().pid)

def test_program():
    start()

def test_orphan():
    subprocess.run([sys.executable, "-S", "-c", ORPHAN], check=True)

def test_that_ends_its_process():
    with start() as process:
        process.kill()

@pytest.mark.timeout(3600)
def test_that_the_timeout_ends():
    start()
    signal.raise_signal(signal.SIGALRM)  # as the timer does
"""
LATER = """
import os
from pathlib import Path

def test_later():
    assert Path(f"/proc/{os.environ['KEPT']}").exists()
"""
ENDS = """
import os, signal

@pytest.fixture
def fixture():
    yield
    print("timer", signal.getitimer(signal.ITIMER_REAL)[0] > 0)

@pytest.mark.timeout(3600)
def test_that_the_timeout_ends(fixture):
    os.environ["KEPT"] = str(os.getpid())
    signal.raise_signal(signal.SIGALRM)
"""
HANGS = """
import signal

process = start()

def test_hanging():
    while True:
        signal.pause()
"""


def run_planted(folder, source, *flags):
    """Run planted tests; return the exit code, the output, and the ids of the processes that they started."""
    (folder / "test_planted.py").write_text(STARTS + source)
    (folder / "test_later.py").write_text(LATER)
    files = ("test_planted.py", "test_later.py")
    result = fork_server.run(PYTEST.format(tests=str(fork_server.TESTS)), *flags, *files, cwd=folder)
    return result.returncode, result.stdout, list(map(int, re.findall(r"started (\d+)", result.stdout)))


def test_processes_that_tests_leave_are_ended_and_the_tests_named(tmp_path):
    code, output, processes = run_planted(tmp_path, LEAVES)
    kept, program, orphan, _, ended = processes
    errors = re.findall(r"ERROR at teardown of (\w+)|::(\w+) \(\w+\) left process (\d+)", output)

    assert code == 1
    assert [name or (test, int(pid)) for name, test, pid in errors] == [
        "test_that_the_timeout_ends",  # the module's last test
        ("test_program", program),
        ("test_orphan", orphan),
        ("test_that_the_timeout_ends", ended),
        "test_later",  # the last test of all
        ("test_program", kept),
    ]
    assert "1 failed, 4 passed" in output
    assert not any(map(alive, processes))


def test_timer_runs_again_for_the_fixtures_of_a_test_that_it_has_ended(tmp_path):
    code, output, _ = run_planted(tmp_path, ENDS)

    assert code == 1
    assert "1 failed, 1 passed" in output
    assert re.findall(r"timer (\w+)", output) == ["True"]


def test_run_that_is_killed_leaves_no_process(tmp_path):
    flags = ("--timeout-method", "thread", "--timeout", "0.3")  # real timeout: it has to expire, early or late
    code, output, (process,) = run_planted(tmp_path, HANGS, *flags)

    assert code == 1
    assert "passed" not in output
    wait_until(lambda: not alive(process))


def test_forked_program_is_found_by_its_own_environment(pytestconfig, request):
    def found():
        left = leftovers.processes(pytestconfig.stash[RUN])
        return [process.test for process in left if process.pid == sleeping.pid]

    with fork_server.start(SLEEP) as sleeping:
        assert wait_until(found) == [f"{request.node.nodeid} (call)"]
        sleeping.kill()
    assert found() == []
