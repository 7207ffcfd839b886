"""What a process that serves for long does with its memory."""

import contextlib
import ctypes
import gc
import logging
import os
import platform
import time
from pathlib import Path

try:
    import resource
except ImportError:  # Windows has none
    resource = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

OWN_FILES = 256  # libraries, logs, sockets of its own
MOST_KEPT = 2**28  # freed bytes that an engine keeps
SERVER_KEEPS = 2**26  # freed bytes that a server keeps if its engines are separate processes
PIECES = 2**25  # bytes by which either may grow beyond that, before freed memory is returned
PAUSE = 1.0  # seconds at least between two such returns
IDLE = 5.0  # seconds after its last batch until an engine returns them to the kernel

# Name in the environment, and number in malloc.h.
ALLOCATOR = (("MALLOC_ARENA_MAX", -8), ("MALLOC_MMAP_THRESHOLD_", -3), ("MALLOC_TRIM_THRESHOLD_", -1))


def keep_memory(most: int = MOST_KEPT) -> None:
    """Have glibc keep what was freed, up to so many bytes, instead of asking the kernel for the same pages every time.

    Its defaults give each large array pages of its own, and each thread a heap that is given back as soon as it is
    empty: at 32 rows a batch of mobilenet_v3_large then spends more time on fresh pages than on arithmetic. So there is
    one heap for all threads. What the environment sets itself stays as it is; with another allocator nothing happens.
    To be called before there are threads.
    """
    if platform.libc_ver()[0] != "glibc" or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    libc = ctypes.CDLL(None)
    for (name, option), value in zip(ALLOCATOR, (1, most // 2, most), strict=True):
        if name not in os.environ:
            libc.mallopt(option, value)


def give_back() -> None:
    """Return all freed memory that glibc keeps to the kernel."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


class Heap:
    """Returns freed memory to the system when a process has grown: a mixture of work leaves its heap fragmented.

    Args:
        most: bytes that the process may have beyond those that it has at rest.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.rest()

    def rest(self) -> None:
        """Give back what is free. What is left, the process has at rest."""
        give_back()
        self._at_rest, self._given_back = resident(), time.monotonic()

    def check(self) -> None:
        """Give back what is free if the process has grown too much; at most once a second, for it may be in use."""
        now = time.monotonic()
        if now - self._given_back >= PAUSE and resident() > self._at_rest + self._most:
            self._given_back = now
            give_back()


def keep_objects() -> None:
    """Take all there is now out of the garbage collector's rounds: libraries and models live as long as the process."""
    gc.collect()
    gc.freeze()


def resident() -> int:
    """Return how many bytes of memory this process has; without /proc, the most that it had; 0 on Windows."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        if resource is None:
            return 0
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10
    return int(pages) * resource.getpagesize()


def allow_files(count: int) -> None:
    """Raise the limit on open files, which many systems set to 1,024, to so many beside a process's own.

    Where that is not allowed, the log says so: without a file for it a connection is not accepted, but waits.
    """
    if resource is None:
        return
    wanted = count + OWN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < wanted:
        log.warning("at most %d files may be open, fewer than connections: lower max_connections, or raise it", most)
