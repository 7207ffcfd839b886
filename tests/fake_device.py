""" "cpu:1": it computes on the CPU, and notes which device each thread had made current.

As with GPUs, a thread's current device is the first at the beginning, and after some errors a process cannot use its
device any more.
"""

import os
import threading
from pathlib import Path

from camserve_server.core import devices

NAME = "cpu:1"


class Fake(devices.Device):
    """The device. Each use of it is a line of `log`: the thread, the device that it had made current, and the use.

    A use that the file `fatal` beside it names is the last that goes well in its process.
    """

    is_cpu = False
    log: Path
    broken = False
    _current = threading.local()

    def _used(self, use):
        with self.log.open("a") as file:
            file.write(f"{os.getpid()}/{threading.get_native_id()} {getattr(self._current, 'index', 0)} {use}\n")
        fatal = self.log.with_name("fatal")
        if fatal.exists() and fatal.read_text() == use:
            fatal.unlink()
            Fake.broken = True
        if self.broken:
            raise RuntimeError("CUDA error: device-side assert triggered")

    def make_current(self):
        self._current.index = self.torch.index

    def initialize(self):
        self.make_current()
        self._used("initialize")

    def context(self, *, own_stream):
        self._used("stream" if own_stream else "no_stream")
        return _Context(self)

    def upload(self, tensor):
        self._used("upload")
        return tensor

    def synchronize(self):
        self._used("synchronize")

    def check(self):
        self._used("check")

    def release_memory(self):
        self._used("release_memory")


class _Context:
    def __init__(self, device):
        self._device = device

    def __enter__(self):
        self._device._used("context")

    def __exit__(self, *_):
        self._device._used("context")


def install(log):
    """Have this process, and those that are forked from it, find the device by its name."""
    Fake.log = Path(log)
    devices.KINDS["cpu"] = _named
    devices.device_for.cache_clear()


def _named(name):
    """Return the device, or the real CPU, which a server of another test may still use."""
    return Fake(name) if name == NAME else devices.Device(name)


def uses(log):
    """Return the uses: the thread, the device that it had made current, and the use."""
    return [(thread, int(index), use) for thread, index, use in map(str.split, log.read_text().splitlines())]
