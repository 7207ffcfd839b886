"""Fake device "cpu:1" that computes on the CPU and logs the current device of each thread.

As with GPUs, a new thread's current device is the first one, and some errors leave a process unable to use its device.
"""

import os
import threading
from pathlib import Path

from camserve_server.core import devices

NAME = "cpu:1"


class Fake(devices.Device):
    """Fake device. Each use is a line of `log`: the thread, its current device, and the kind of use.

    If the file `fatal` next to the log names a kind of use, the first such use and all later ones in that process fail.
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
    """Register the device by its name, in this process and those that fork from it."""
    Fake.log = Path(log)
    devices.KINDS["cpu"] = _device_of
    devices.device_for.cache_clear()


def _device_of(name):
    """Return the fake device, or the real CPU, which a server of another test may still use."""
    return Fake(name) if name == NAME else devices.Device(name)


def uses(log):
    """Return the logged uses: the thread, its current device, and the kind of use."""
    return [(thread, int(index), use) for thread, index, use in map(str.split, log.read_text().splitlines())]
