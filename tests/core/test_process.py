"""Memory of a serving process: it keeps freed memory for the next batch, up to a limit."""

import contextlib
import ctypes
import gc
import platform
import resource
import subprocess
import sys
import threading

import pytest

from camserve_server import running
from camserve_server.core import process
from camserve_server.serving.model_loading import LOADING_THREAD

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator is left alone")

# Batches as a thread makes them: arrays that come and go together.
CHURN = """
import resource, sys, threading
import numpy as np
from camserve_server.core import process

if sys.argv[1] == "kept":
    process.configure_allocator()
faults = []

def work():
    for _ in range(9):
        batch = [np.ones(4 * 2**20, np.float32) for _ in range(6)]
        del batch
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)

thread = threading.Thread(target=work)
thread.start()
thread.join()
print(faults[-1] - faults[4])
"""

PEAK = """
import numpy as np
from pathlib import Path
from camserve_server.core import process

def resident():
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith("VmRSS")) // 1024

process.configure_allocator()
before = resident()
batch = [np.ones(25 * 2**20, np.float32) for _ in range(6)]
most = resident()
del batch
print(most - before, resident() - before)
"""

PIECES = """
import sys
import numpy as np
from camserve_server.core import process

process.configure_allocator()
process.TRIM_INTERVAL = 0
heap = process.Heap(int(sys.argv[1]) * 2**20)
before = process.resident()
blocks = [(np.ones(2**18, np.float32), np.ones(2**9, np.float32)) for _ in range(100)]  # 1 MiB each, and a small one
blocks[:60] = [small for _, small in blocks[:60]]
heap.check()
print((process.resident() - before) // 2**20)
"""

ORPHANS = """
import ctypes, os, subprocess, sys, time
from camserve_server.core import process

ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans become children of this process, as in a container
process.reap_orphans(())
sleeps = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
own = subprocess.Popen(sleeps)
start = f"import subprocess; print(subprocess.Popen({sleeps}, stdout=subprocess.DEVNULL).pid)"
orphan = int(subprocess.run([sys.executable, "-S", "-c", start], stdout=subprocess.PIPE).stdout)
process.reap_orphans((own.pid,))
os.kill(orphan, 9)
while os.path.exists(f"/proc/{orphan}"):
    process.reap_orphans((own.pid,))
own.kill()
os.waitid(os.P_PID, own.pid, os.WEXITED | os.WNOWAIT)
process.reap_orphans((own.pid,))
print(own.wait())
"""

COLLECT = """
import gc, weakref
from camserve_server.core import process

class Ring:
    def __init__(self):
        self.me = self

process.freeze_objects()
before = len(gc.get_objects())
ring = weakref.ref(Ring())
gc.collect()
print(before, ring() is None)
"""


def run_script(script, *arguments):
    return subprocess.run([sys.executable, "-c", script, *arguments], check=True, capture_output=True).stdout.split()


@glibc
def test_batches_reuse_the_same_memory():
    (fresh,), (kept,) = run_script(CHURN, "default"), run_script(CHURN, "kept")

    assert int(kept) < int(fresh) / 20


@glibc
def test_memory_of_a_large_batch_is_returned_up_to_a_limit():
    most, left = map(int, run_script(PEAK))

    assert most > 570
    assert left <= 512 + 16


@glibc
def test_fragmented_free_memory_is_returned_once_the_process_has_grown():
    (beyond,), (within,) = run_script(PIECES, "64"), run_script(PIECES, "128")

    assert int(beyond) <= 48
    assert int(within) >= 96


@pytest.fixture
def options(monkeypatch):
    """Record the options of the allocator, in an environment without any."""
    options = {}

    class Libc:
        def mallopt(self, option, value):
            options[option] = value

    monkeypatch.setattr(ctypes, "CDLL", lambda _name: Libc())
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    for name, _ in process.ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    return options


def test_allocator_gets_the_option_numbers_of_malloc_h(options):
    """M_ARENA_MAX is -8, M_MMAP_THRESHOLD -3, M_TRIM_THRESHOLD -1."""
    process.configure_allocator()

    assert options == {-8: 1, -3: 128 * 2**20, -1: 256 * 2**20}


def test_allocator_options_of_the_environment_are_kept(options, monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
    process.configure_allocator()
    assert options == {-3: 128 * 2**20, -1: 256 * 2**20}

    options.clear()
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=4")
    process.configure_allocator()
    assert options == {}


def test_allocators_other_than_glibc_are_left_alone(options, monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    process.configure_allocator()

    assert options == {}


def test_garbage_collection_skips_old_objects_and_collects_new_ones():
    looked_at, collected = run_script(COLLECT)

    assert int(looked_at) < 100
    assert collected == b"True"


def test_thread_that_loads_models_ends_with_its_openmp_threads():
    before = set(threading.enumerate())  # an earlier test may have left a thread that loads a model forever
    with running(models=["timm:test_resnet?weights=none&size=64"]):
        started = [thread for thread in threading.enumerate() if thread not in before]
        assert "camserve-server" in [thread.name for thread in started]
        for thread in started:
            if thread.name == LOADING_THREAD:  # it has reported the model, and may still be ending
                thread.join(timeout=60)
                assert not thread.is_alive()


LIMITS = """
import resource, sys
from camserve_server.core import process
resource.setrlimit(resource.RLIMIT_NOFILE, (300, int(sys.argv[1])))
process.allow_files(1000)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(("hard", "soft"), [(2000, 1256), (500, 500)])
def test_open_file_limit_is_raised_for_connections_as_far_as_allowed(hard, soft):
    done = subprocess.run([sys.executable, "-c", LIMITS, str(hard)], capture_output=True, text=True, check=True)

    assert int(done.stdout) == soft
    assert ("lower max_connections" in done.stderr) is (soft < 1256)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_orphans_are_collected_and_own_children_are_not():
    done = subprocess.run([sys.executable, "-c", ORPHANS], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "-9"


def test_sufficient_open_file_limit_is_kept():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    process.allow_files(1)

    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


@pytest.mark.parametrize("enabled", [True, False])
def test_collection_is_off_inside_the_block_and_as_before_after_it(enabled):
    try:
        (gc.enable if enabled else gc.disable)()
        with contextlib.suppress(ImportError), process.without_collection():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
