"""The programs that run the suite report every test that fails, however it fails, and leave no process behind."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from tools.suite import parts
from tools.suite.process import NO_TESTS, Settings
from tools.suite.results import Results
from tools.suite.run import Run

from support import wait_until

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
MIXED = """
import pytest

def test_passes():
    pass

def test_fails():
    print("printed by the test")
    assert 1 + 1 == 3

@pytest.mark.skip(reason="a tool is not installed: apt-get install tool")
@pytest.mark.parametrize("number", range(3))
def test_skipped(number):
    pass

@pytest.mark.xfail(reason="a known fault")
def test_fails_as_expected():
    assert False

@pytest.fixture
def broken():
    yield
    raise ValueError("broken teardown: \\udc80")

def test_with_a_broken_fixture(broken):
    pass

@pytest.mark.slow
def test_slow():
    pass

@pytest.mark.search
def test_search():
    pass
"""
CRASHING = """
import os
import subprocess
from pathlib import Path

def test_passes():
    pass

def test_ends_the_process():
    left = subprocess.Popen(["sleep", "1000"])
    Path("left").write_text(str(left.pid))
    os._exit(3)

def test_never_run():
    pass
"""
HANGING = """
import os
import threading
from pathlib import Path

import pytest

@pytest.fixture
def resource():
    yield
    Path("cleaned").touch()

def test_fails():
    assert False

def test_hangs(resource):
    Path("began.new").write_text(str(os.getpid()))
    Path("began.new").rename("began")
    threading.Event().wait()
"""
ORPHANS = """
import os
from pathlib import Path

def test_waits_until_the_program_is_killed():
    Path("began.new").write_text(str(os.getpid()))
    Path("began.new").rename("began")
    Path("gate").read_text()

def test_later():
    Path("later").touch()
"""
EVERY_SECOND = """
from pathlib import Path

def test_fails_in_every_second_run():
    runs = Path("runs")
    with runs.open("a") as file:
        file.write("x")
    assert len(runs.read_text()) % 2 == 1
"""
BUSY = """
import os
import threading
from pathlib import Path

def test_sees_the_busy_program():
    assert len(os.sched_getaffinity(0)) == 1
    children = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split()
    [busy] = [each for each in children if b"getppid" in Path(f"/proc/{each}/cmdline").read_bytes()]
    Path("found.new").write_text(f"{busy} {os.getpid()}")
    Path("found.new").rename("found")
"""
COUNTED = """
import pytest
from pathlib import Path

@pytest.fixture(scope="module", params=["a", "b"])
def expensive(request):
    with open("order", "a") as file:
        file.write(f"prepare {request.param}\\n")
    return request.param

@pytest.mark.parametrize("number", range(20))
def test_counts(number):
    with open("order", "a") as file:
        file.write(f"{number}\\n")

@pytest.mark.parametrize("number", range(20))
def test_uses(expensive, number):
    pass
"""
INI = """
[pytest]
markers =
    slow
    search
addopts = --import-mode=importlib
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Return a function that writes test files into a project, and returns its folder."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # loading them takes longer than a run without them
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text(INI)

    def write(**sources):
        for name, source in sources.items():
            (tmp_path / "tests" / f"test_{name}.py").write_text(source)
        return tmp_path

    return write


@pytest.fixture(params=["new processes", "forks"])
def any_project(project, request):
    """The same function, for a project whose parts are new processes, and for one whose parts are forks."""
    if request.param == "forks":
        tests = project() / "tests"
        (tests / "leftovers.py").write_bytes((ROOT / "tests" / "leftovers.py").read_bytes())
        server = (ROOT / "tests" / "fork_server.py").read_text(encoding="utf-8")
        without_torch = "\n\ndef _import_programs():\n    pass\n"
        (tests / "fork_server.py").write_text(server + without_torch, encoding="utf-8")
    return project


def start(root, *arguments, program="run_tests"):
    command = [sys.executable, "-m", f"tools.{program}", *arguments, "--root", str(root)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_start(process, file):
    """Wait until a test of a program has written a file.

    Raises:
        ChildProcessError: the program ended before.
    """
    wait_until(lambda: file.exists() or process.poll() is not None)
    if not file.exists():
        raise ChildProcessError(process.communicate()[0])


def run(root, *arguments, program="run_tests"):
    """Run a program to its end; return its exit code and what it printed."""
    with start(root, *arguments, program=program) as process:
        shown, _ = process.communicate()
    return process.returncode, shown


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def without_time(line):
    return re.sub(r" in \d+:\d\d", "", line)


def test_report_ends_with_the_failures_and_the_counts(project):
    code, shown = run(project(mixed=MIXED), "fast")
    end = shown.partition("Failed tests:\n")[2].splitlines()

    assert code == 1
    assert end[:2] == [
        "FAILED tests/test_mixed.py::test_fails - assert (1 + 1) == 3",
        "FAILED tests/test_mixed.py::test_with_a_broken_fixture (teardown) - ValueError: broken teardown: \\udc80",
    ]
    assert without_time(end[-1]) == "1 passed, 2 failed, 3 skipped, 1 xfailed"
    assert "E   assert (1 + 1) == 3" in shown
    assert shown.count("printed by the test") == 1
    assert shown.count("    3  a tool is not installed: apt-get install tool\n") == 1


@pytest.mark.parametrize(("choice", "count"), [("fast", 1), ("slow", 1), ("all", 2)])
def test_choice_of_tests_follows_the_marker(choice, count, project):
    source = "import pytest\n\ndef test_a(): pass\n\n@pytest.mark.slow\ndef test_b(): pass\n"
    code, shown = run(project(a=source), choice)

    assert code == 0
    assert without_time(shown.splitlines()[-1]) == f"{count} passed, 0 failed, 0 skipped"


def test_each_part_prints_a_line_when_it_ends(project):
    root = project(a="def test_a(): pass", b="def test_b(): pass")
    (root / "tests" / "e2e").mkdir()
    (root / "tests" / "e2e" / "test_c.py").write_text("def test_c(): pass")
    code, shown = run(root, "fast", "--jobs", "1")

    assert code == 0
    assert without_time(shown).splitlines() == [
        "fast tests in 2 parts, 1 at a time:",
        "  tests/e2e/test_c.py",
        "  tests (2 files)",
        "[ 1/2] tests/e2e/test_c.py: 1 passed, 0 failed, 0 skipped",
        "[ 2/2] tests: 2 passed, 0 failed, 0 skipped",
        "",
        "3 passed, 0 failed, 0 skipped",
    ]


def test_file_that_cannot_be_imported_fails_and_others_run(project):
    code, shown = run(project(a="import nothing_of_this_name", b="def test_b(): pass"), "fast")

    assert code == 1
    assert "FAILED tests/test_a.py (collect) - ModuleNotFoundError: No module named 'nothing_of_this_name'" in shown
    assert without_time(shown.splitlines()[-1]) == "1 passed, 1 failed, 0 skipped"


def test_ended_pytest_process_fails_and_leaves_no_process(any_project):
    root = any_project(crashing=CRASHING)
    code, shown = run(root, "fast")

    assert code == 1
    failed = "FAILED tests/test_crashing.py::test_ends_the_process (process) - "
    assert f"{failed}pytest ended with exit code 3 before 2 of its tests had a result\n" in shown
    assert without_time(shown.splitlines()[-1]) == "1 passed, 1 failed, 0 skipped"
    wait_until(lambda: not is_running(int((root / "left").read_text())))


def test_pytest_process_that_ends_without_an_error_fails_too(any_project):
    code, shown = run(any_project(ending="import os\n\ndef test_ends():\n    os._exit(0)\n"), "fast")

    assert code == 1
    assert "FAILED tests/test_ending.py::test_ends (process) - pytest ended with exit code 0 before 1 of" in shown


def test_error_of_pytest_itself_fails_and_is_shown(any_project):
    root = any_project(a="def test_a(): pass")
    (root / "conftest.py").write_text("raise ValueError('a broken conftest')")
    code, shown = run(root, "fast")

    assert code == 1
    assert "FAILED tests/test_a.py (process) - pytest ended with exit code 4" in shown
    assert "a broken conftest" in shown


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_stops_its_tests_and_reports_the_rest(number, any_project):
    root = any_project(hanging=HANGING)
    with start(root, "fast") as process:
        wait_for_start(process, root / "began")
        process.send_signal(number)
        shown, _ = process.communicate()

    assert process.returncode == 130, shown
    assert "FAILED tests/test_hanging.py::test_fails" in shown
    assert shown.splitlines()[-1].endswith("stopped before the end")
    assert (root / "cleaned").exists()
    assert not is_running(int((root / "began").read_text()))


class InterruptedReading(mock.Mock):
    """Process of a part. Ctrl-C comes while its results are read for the first time."""

    results, elapsed = Results(), 0.0

    def read(self):
        if not self.has_ended.called:
            signal.raise_signal(signal.SIGINT)  # to this thread, as the program has only one
        self.complete()
        return []


def test_ctrl_c_waits_until_results_are_read():
    process, running = InterruptedReading(), Run([], Settings(ROOT, "fast"), 1)
    process.has_ended.return_value = False
    running._running.append(process)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        running.run()
    finally:
        signal.signal(signal.SIGINT, before)

    assert running.interrupted
    names = [call[0] for call in process.method_calls]
    assert names == ["complete", "has_ended", "interrupt", "wait", "kill", "complete", "close"]


def test_tests_end_if_the_program_that_runs_them_is_killed(any_project, monkeypatch):
    root = any_project(orphans=ORPHANS)
    os.mkfifo(root / "gate")
    monkeypatch.setenv("TMPDIR", str(root))  # the program cannot remove its files
    with start(root, "fast") as process:
        wait_for_start(process, root / "began")
        process.kill()
    if not (
        root / "tests" / "fork_server.py"
    ).exists():  # a fork is killed while it waits, others end before the next test
        (root / "gate").write_text("open")
    wait_until(lambda: not is_running(int((root / "began").read_text())))

    assert not (root / "later").exists()


def test_seed_shuffles_a_file_and_prepares_its_fixtures_once(project):
    root, orders = project(counted=COUNTED), []
    for seed in ("5", "5", "6"):
        run(root, "fast", "--seed", seed)
        orders.append((root / "order").read_text().splitlines())
        (root / "order").unlink()

    assert orders[0] == orders[1] != orders[2]
    assert [line for line in orders[0] if line.isdecimal()] != [str(number) for number in range(20)]
    assert sorted(line for line in orders[0] if not line.isdecimal()) == ["prepare a", "prepare b"]


def test_coverage_of_all_parts_is_measured(project):
    root = project(a="def test_a(): pass")
    code, _ = run(root, "fast", "--coverage")

    assert code == 0
    assert list(root.glob(".coverage*"))


def test_record_lists_the_files_that_take_a_second(tmp_path):
    (tmp_path / parts.SECONDS).parent.mkdir(parents=True)
    first = {("fast", "tests/test_a.py"): 1.2, ("fast", "tests/test_b.py"): 0.2, ("slow", "tests/test_a.py"): 9.0}
    parts.record_seconds(tmp_path, "all", first)
    parts.record_seconds(tmp_path, "fast", {("fast", "tests/test_b.py"): 3.0})

    assert parts.expected_seconds(tmp_path, "fast") == {"tests/test_b.py": 3}
    assert parts.expected_seconds(tmp_path, "all") == {"tests/test_b.py": 3, "tests/test_a.py": 9}


SPEEDS = {
    "fast": "def test_a(): pass",
    "mixed": "@pytest.mark.slow\ndef test_a(): pass",
    "slow": "pytestmark = pytest.mark.slow",
    "first": "pytestmark = [\n    pytest.mark.slow,\n    pytest.mark.asyncio,\n]",
}
FILES = [
    f"tests/{room}/test_{name}.py" for room in ("api", "core", "e2e", "robustness", "simulated") for name in "abcd"
]
TIMES = dict.fromkeys(FILES, 30.0) | {"tests/core/test_a.py": 200.0}


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_every_file_is_in_one_part_with_files_of_its_group(seed):
    divided = parts.divide(FILES, TIMES, seed)

    assert sorted(file for part in divided for file in part.files) == sorted(FILES)
    assert all(len({file.split("/")[1] for file in part.files}) == 1 for part in divided if len(part.files) > 1)
    assert all(part.seconds <= 1.5 * parts.PART_SECONDS for part in divided if len(part.files) > 1)


def test_there_are_few_parts_however_long_the_tests_take():
    times = dict.fromkeys(FILES, 1000.0)
    divided = parts.divide(FILES, times)

    assert len(divided) <= parts.MOST_PARTS + len(parts.GROUPS)
    assert max(part.seconds for part in divided) <= 1.5 * sum(times.values()) / parts.MOST_PARTS


def test_parts_of_servers_start_first_and_then_the_longest():
    divided = parts.divide(FILES, TIMES)
    folders = [part.files[0].split("/")[1] for part in divided]
    first = len([folder for folder in folders if folder in ("e2e", "robustness")])

    assert set(folders[:first]) == {"e2e", "robustness"}
    for seconds in ([part.seconds for part in divided[:first]], [part.seconds for part in divided[first:]]):
        assert seconds == sorted(seconds, reverse=True)


def test_parts_that_compute_with_one_thread_are_not_those_of_servers():
    threads = {part.files[0].split("/")[1]: "OMP_NUM_THREADS" in part.variables for part in parts.divide(FILES, TIMES)}

    assert threads == {"api": True, "core": True, "e2e": False, "robustness": False, "simulated": True}


def test_slow_marker_is_in_the_file_of_its_test():
    """The slow run reads only files with the marker."""
    others = [path for path in (ROOT / "tests").rglob("*.py") if not path.name.startswith("test_")]

    assert [path.name for path in others if "mark.slow" in path.read_text(encoding="utf-8")] == []


def test_runs_contain_every_file_in_which_pytest_finds_tests():
    others = [f"--ignore={file}" for file in parts.find(ROOT, "all")]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *others]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert found.returncode == NO_TESTS, found.stdout


def test_fast_runs_leave_out_files_whose_tests_are_all_slow(tmp_path):
    folder = tmp_path / "tests"
    folder.mkdir()
    for name, text in SPEEDS.items():
        (folder / f"test_{name}.py").write_text(text)

    assert list(parts.find(tmp_path, "fast")) == ["tests/test_fast.py", "tests/test_mixed.py"]
    assert list(parts.find(tmp_path, "slow")) == ["tests/test_first.py", "tests/test_mixed.py", "tests/test_slow.py"]
    assert len(list(parts.find(tmp_path, "all"))) == len(SPEEDS)


def flaky(root, *arguments):
    return run(root, *arguments, program="find_flaky")


def test_flaky_test_is_reported_with_its_runs_and_its_output(project):
    root = project(flaky=EVERY_SECOND, good="def test_good(): pass", bad="def test_bad(): assert False")
    code, shown = flaky(root, "--runs", "4", "--busy", "0", "--seed", "7")
    end = shown.partition("Tests that failed in 4 runs:\n")[2]

    assert code == 1
    assert "  4 of 4  tests/test_bad.py::test_bad  (run 1, SEED=7; run 2, SEED=8; " in end
    assert "  2 of 4  tests/test_flaky.py::test_fails_in_every_second_run  (run 2, SEED=8; run 4, SEED=10)\n" in end
    assert "test_good" not in end
    assert re.search(r"run 2, SEED=8:\n_+ \S+test_fails_in_every_second_run \(call\) _+\n.*?assert", shown, re.DOTALL)


def test_runs_have_one_core_beside_a_busy_program(project):
    root = project(busy=BUSY)
    code, shown = flaky(root, "--runs", "1", "--busy", "1", "--cores", "1")

    assert code == 0
    assert "No test failed in 1 runs." in shown
    assert re.search(r"run 1, SEED=\d+, of 1 runs beside 1 busy programs; usable cores: 1", shown)
    wait_until(lambda: not is_running(int((root / "found").read_text().split()[0])))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_busy_programs_end_however_the_run_ends(number, project, monkeypatch):
    root = project(busy=f"{BUSY}    threading.Event().wait()\n")
    monkeypatch.setenv("TMPDIR", str(root))  # a killed program cannot remove its files
    with start(root, "--runs", "2", "--busy", "1", "--cores", "1", program="find_flaky") as process:
        wait_for_start(process, root / "found")
        process.send_signal(number)
        process.communicate()  # the busy program has the same output
    busy, tests = map(int, (root / "found").read_text().split())
    wait_until(lambda: not is_running(busy))
    if number == signal.SIGKILL:
        os.kill(tests, signal.SIGKILL)

    assert process.returncode in (130, -number)
    wait_until(lambda: not is_running(tests))
