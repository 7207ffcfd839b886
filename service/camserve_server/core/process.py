"""Memory and file limits of a long-running process, and its tie to its parent."""

import contextlib
import ctypes
import gc
import logging
import os
import platform
import signal
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

OWN_FILES = 256  # open files of the process besides connections: libraries, logs, sockets
WORKER_FREE_MEMORY = 2**28  # freed bytes that a worker keeps for reuse
SERVER_FREE_MEMORY = 2**26  # freed bytes that a server keeps for reuse when its workers are separate processes
HEAP_GROWTH = 2**25  # bytes by which either may grow beyond that before it returns freed memory to the kernel
TRIM_INTERVAL = 1.0  # least seconds between two returns of freed memory
IDLE_TIMEOUT = 5.0  # seconds after its last batch until a worker returns freed memory

DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)

# glibc's options: the environment variable, and the number in malloc.h.
ALLOCATOR = (("MALLOC_ARENA_MAX", -8), ("MALLOC_MMAP_THRESHOLD_", -3), ("MALLOC_TRIM_THRESHOLD_", -1))


def configure_allocator(limit: int = WORKER_FREE_MEMORY) -> None:
    """Make glibc keep freed memory for reuse, instead of requesting the same pages from the kernel for every batch.

    By default glibc maps each large array separately, and gives each thread a heap that it returns as soon as it is
    empty. A batch of 32 rows of mobilenet_v3_large then spends more time on fresh pages than on arithmetic: processor
    time per Grad-CAM is 13.7 ms, and 6.5 ms with this (float32, 2 CPU cores, glibc 2.36). All threads share one heap.

    Options that the environment sets are left alone, and so are other allocators. Call it before starting threads.

    Args:
        limit: bytes of freed memory to keep at most.
    """
    if platform.libc_ver()[0] != "glibc" or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    libc = ctypes.CDLL(None)
    for (name, option), value in zip(ALLOCATOR, (1, limit // 2, limit), strict=True):
        if name not in os.environ:
            libc.mallopt(option, value)


def follow_parent() -> None:
    """Ignore signals that are meant for the parent process, and end with the thread that started this process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal and systemd send them to all processes
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)


def reap_orphans(own: Collection[int]) -> None:
    """Collect the exit codes of children that other processes left behind, as the first process of a container must.

    Args:
        own: ids of the children whose exit codes are collected elsewhere.
    """
    with contextlib.suppress(ChildProcessError):  # there is no child
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in own:
                return  # it is collected soon, and hides the others until then
            os.waitpid(ended.si_pid, 0)


def release_free_memory() -> None:
    """Return all freed memory that glibc keeps to the kernel."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


class Heap:
    """The process's heap, trimmed when the process has grown: mixed batch sizes leave it fragmented.

    Args:
        max_growth: bytes that the process may grow beyond its size at the last `trim`.
    """

    def __init__(self, max_growth: int) -> None:
        self._max_growth = max_growth
        self.trim()

    def trim(self) -> None:
        """Return freed memory to the kernel, and take the remaining size as the baseline."""
        release_free_memory()
        self._baseline, self._trimmed_at = resident(), time.monotonic()

    def check(self) -> None:
        """Return freed memory if the process has grown too much; at most once a second, as a batch may need it again.

        The baseline stays, since a batch may be running.
        """
        now = time.monotonic()
        if now - self._trimmed_at >= TRIM_INTERVAL and resident() > self._baseline + self._max_growth:
            self._trimmed_at = now
            release_free_memory()


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Switch garbage collection off inside the block, in which libraries are imported.

    The collector would look again and again at objects that stay: a quarter of the time of an import of torch and timm.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def freeze_objects() -> None:
    """Exclude all current objects from garbage collection: libraries and models live as long as the process.

    Without this, a full collection takes 0.8 s for 449,000 objects. The youngest generation is collected ten times less
    often than by default, as requests make few cycles: collections took 3 % of the event loop's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(7000, 10, 10)


def resident() -> int:
    """Return the resident memory of this process in bytes; its peak on systems without /proc; 0 on Windows."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        if resource is None:
            return 0
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10
    return int(pages) * resource.getpagesize()


def allow_files(count: int) -> None:
    """Raise the process's limit on open files, which is 1,024 on many systems, to allow a number of connections.

    If the system allows fewer, a warning is logged: connections beyond the limit wait instead of being accepted.

    Args:
        count: number of connections to allow.
    """
    if resource is None:
        return
    needed = count + OWN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        message = (
            "the limit on open files is %d, too low for max_connections: lower max_connections, or raise the limit"
        )
        log.warning(message, allowed)
