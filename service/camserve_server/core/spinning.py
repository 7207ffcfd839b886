"""Bounds how long OpenMP's threads spin while other programs need the cores.

Between two parallel loops, the threads of GNU OpenMP spin, so that the next loop starts at once. A thread that spins
keeps its core from the thread that it waits for. Beside one program that uses a whole core of two, a Grad-CAM of
resnet50 took 348 ms, and 142 ms when threads slept instead; beside two, 318 and 134 ms, and the model was ready after
29 and 13 s. On free cores, sleeping can cost a fifth: docs/decisions/036 and 049.

The environment variables for this are read when OpenMP is loaded, but other programs come and go later. libgomp also
stops spinning while it manages more threads than there are processors (its manual, GOMP_SPINCOUNT). So while the cores
are contended, `SpinLimiter` keeps a team of threads that sleep.
"""

import ctypes
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from camserve_server.core import hardware

log = logging.getLogger(__name__)

INTERVAL = 0.5  # seconds between two readings; the kernel counts ticks of 10 ms, so shorter ones would be inexact
LINGER = 2.0  # seconds after the last batch until readings end, so that consecutive requests share a thread
MARGIN = 0.3  # cores that other programs may use before threads stop spinning; background services use less
THROTTLED = (
    0.02  # share of the time that the quota of a control group may stop this process before threads stop spinning
)
QUIET_TIME = 3.0  # seconds without contention after which threads spin again; doubled each time
MAX_QUIET_TIME = 600.0


@dataclass(frozen=True, slots=True)
class CpuUsage:
    """Processor time used until an instant.

    Attributes:
        at: the instant, in seconds of the monotonic clock.
        total: core-seconds that all programs have used, on the cores that this process may use.
        own: core-seconds that this process has used.
        throttled: seconds for which quotas have stopped the control groups of this process.
    """

    at: float
    total: float
    own: float
    throttled: float

    @classmethod
    def read(cls) -> Self:
        """Read the counters of the system.

        Raises:
            OSError: the system has no such counters; only Linux does.
        """
        return cls(time.monotonic(), hardware.used_core_seconds(), time.process_time(), hardware.throttled_seconds())

    def contention(self, before: Self, threads: int) -> str:
        """Return why spinning threads would lack cores, judged by the time since an earlier reading; "" if not.

        Args:
            before: the earlier reading.
            threads: number of threads that compute in this process.
        """
        seconds, cores, quota = self.at - before.at, hardware.allowed_cores(), hardware.quota()
        others = (self.total - before.total - self.own + before.own) / seconds
        if threads > quota:
            return f"the quota of this process is {quota:g} cores"
        if self.throttled - before.throttled > THROTTLED * seconds:
            return "this process has used up its quota"
        if threads + others > cores + MARGIN:
            return f"other programs use {others:.1f} of {cores} cores"
        return ""


class SpinLimiter:
    """Stops OpenMP's threads from spinning while the cores are contended.

    A thread reads the use of the cores while the process computes, and shortly afterwards.

    Args:
        threads: number of threads that compute in this process.

    Attributes:
        team: threads that sleep while spinning is limited, else None.
    """

    def __init__(self, threads: int) -> None:
        self.team: _SleepingTeam | None = None
        self._threads = threads
        self._lock = threading.Lock()
        self._computing = 0  # number of `watch` blocks that run
        self._reading = False
        self._quiet_seconds, self._quiet_time = 0.0, QUIET_TIME
        self._closed = threading.Event()
        if threads == 1 or not _spinning_can_be_limited():  # a single thread waits for no other
            self._closed.set()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch the use of the cores inside the block, in which the process computes."""
        with self._lock:
            self._computing += 1
            if not self._reading and not self._closed.is_set():
                self._reading = True
                threading.Thread(target=self._read, name="spin-limiter", daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                self._computing -= 1

    def close(self) -> None:
        """End the readings, and let threads spin again."""
        self._closed.set()
        with self._lock:
            self._set_limited(limited=False)

    def _read(self) -> None:
        """Read the use of the cores until the process has not computed for a while."""
        before = CpuUsage.read()
        last_computing = before.at
        while not self._closed.wait(INTERVAL):
            usage = CpuUsage.read()
            with self._lock:
                if self._computing:
                    last_computing = usage.at
                elif usage.at - last_computing > LINGER:
                    self._reading = False
                    return
                if not self._closed.is_set():
                    self._judge(usage.contention(before, self._threads), usage.at - before.at)
            before = usage

    def _judge(self, reason: str, seconds: float) -> None:
        """Limit spinning if the cores were contended in the last seconds; end the limit after a time without it."""
        self._quiet_seconds = 0.0 if reason else self._quiet_seconds + seconds
        if reason and self.team is None:
            log.info("threads that wait now sleep instead of spinning: %s", reason)
            self._set_limited(limited=True)
        elif self.team and self._quiet_seconds >= self._quiet_time:
            log.info("threads that wait spin again: the cores have been free for %.0f s", self._quiet_seconds)
            self._set_limited(limited=False)
            self._quiet_time = min(2 * self._quiet_time, MAX_QUIET_TIME)

    def _set_limited(self, *, limited: bool) -> None:
        if self.team:
            self.team.end()
        self.team = _SleepingTeam() if limited else None


class _SleepingTeam:
    """Threads of OpenMP that sleep until `end`: one more than there are processors.

    They belong to a thread that does nothing else, and end with it.
    """

    def __init__(self) -> None:
        self._ended = threading.Event()
        self.thread = threading.Thread(target=self._sleep, name="sleeping-team", daemon=True)
        self.thread.start()

    def end(self) -> None:
        """Let the threads end."""
        self._ended.set()

    def _sleep(self) -> None:
        openmp = ctypes.CDLL(None)
        # The loop only has to start threads. This function ignores its argument, and needs no lock of the interpreter.
        nothing = ctypes.cast(openmp.omp_get_num_threads, ctypes.c_void_p)
        openmp.GOMP_parallel(nothing, None, openmp.omp_get_num_procs() + 1, 0)
        self._ended.wait()


def _spinning_can_be_limited() -> bool:
    """Return True if torch computes with GNU OpenMP, and the system counts the use of its cores.

    LLVM's and Intel's OpenMP have the functions of GNU's as well, and `kmp_set_blocktime`.
    """
    if not hasattr(os, "sched_getaffinity"):  # not Linux
        return False
    openmp = ctypes.CDLL(None)  # torch makes its libraries' symbols global
    try:
        CpuUsage.read()
    except OSError:
        return False
    return hasattr(openmp, "GOMP_parallel") and not hasattr(openmp, "kmp_set_blocktime")
