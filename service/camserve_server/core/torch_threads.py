"""Number of threads that torch computes with in the threads of a process.

`torch.set_num_threads` changes it for the calling thread and for all that start later. In a notebook these are also the
user's own.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class _Restoration:
    """Restores the number for new threads when the last block has ended: blocks of two explainers may overlap."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = self._before = 0

    @contextmanager
    def block(self) -> Iterator[None]:
        """Run a block of code that may change the number."""
        with self._lock:
            if not self._blocks:
                self._before = _in_new_thread()
            self._blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1
                if not self._blocks and _in_new_thread() != self._before:
                    _run(lambda: torch.set_num_threads(self._before))


restored = _Restoration().block
"""Context manager that restores the number for new threads at its end."""


def _in_new_thread() -> int:
    numbers = list[int]()
    _run(lambda: numbers.append(torch.get_num_threads()))
    return numbers[0]


def _run(function: Callable[[], None]) -> None:
    """Call a function in a new thread, so that the number of the calling thread stays as it is."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()
