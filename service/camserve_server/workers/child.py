"""The process of an engine, which a server starts.

Its first thread runs batches, one reads what is asked, one says that the process is alive, and one that ends loads a
model, or runs a batch beside another: OpenMP keeps workers for every thread that ever computed, and with more of them
than cores all would sleep between two loops, the engine's too.
"""

import ctypes
import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, NoReturn

from camserve_server.core import logs, process
from camserve_server.core.errors import ConfigError, Internal, ServiceError
from camserve_server.workers.messages import DEVICE_LOST, HEARTBEAT_INTERVAL, Heartbeat, Request, Response, Setup
from camserve_server.workers.replies import packed

if TYPE_CHECKING:
    from camserve_server.workers.in_process import InProcessWorker

log = logging.getLogger(__name__)

DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
LARGE = 8 * 2**20  # bytes of a reply, after which freed memory goes back to the system: there were copies of it


class _Child:
    """Answers what a server asks."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._batches: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._ready = False
        self._under_way: set[int] = set()  # numbers of requests
        self._worked = 0.0  # when the last request ended; 0 once its memory was given back
        self._measured: InProcessWorker | None = None
        self._device = "cpu"
        self._heap = process.Heap(process.WORKER_FREE_MEMORY + process.HEAP_GROWTH)

    def work(self) -> None:
        """Work until the server is gone."""
        setup: Setup = self._connection.recv()
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        sys.path[:] = setup.path
        logs.configure(setup.log_level, setup.log_format)
        import torch  # noqa: PLC0415 -- it takes seconds, in which the server shall hear that there is life

        from camserve_server.workers.in_process import InProcessWorker  # noqa: PLC0415 -- the same

        torch.set_num_threads(setup.threads)
        self._device = setup.device
        try:
            engine = InProcessWorker(setup)  # which starts the device's driver: nothing later does
        except RuntimeError as error:
            _give_up(setup.device, error)
        process.keep_objects()  # libraries only: models may go again
        threading.Thread(target=self._read, args=(engine,), name="reading", daemon=True).start()
        self._measured = engine if setup.measure else None
        self._ready = True
        while True:
            self._answer(engine, self._batches.get())

    def _read(self, engine: "InProcessWorker") -> None:
        try:
            while True:
                ask: Request = self._connection.recv()
                if ask.what == "run" and ask.arguments[-1] != 1:  # the second half's is another thread's
                    self._batches.put(ask)
                else:
                    threading.Thread(target=self._answer, args=(engine, ask), name="beside", daemon=True).start()
        except (EOFError, OSError):
            os._exit(0)  # the server is gone, or wants no more

    def _answer(self, engine: "InProcessWorker", ask: Request) -> None:
        """Do what is asked, and say what came of it."""
        message = b""
        failure: Exception | None = None
        self._under_way.add(ask.number)
        try:
            message = packed(Response(ask.number, getattr(engine, ask.what)(*ask.arguments)))
        except (ServiceError, ConfigError) as error:
            failure = error
        except Exception:  # noqa: BLE001 -- of classes that the server may not have
            failure = RuntimeError("in the engine's process:\n" + traceback.format_exc())
        except BaseException:  # noqa: BLE001 -- a model may call sys.exit
            failure = Internal("the model tried to end the server")
        if failure:
            _check(self._device)  # first: a request that failed for want of a device is no failure of its own
        self._send(packed(Response(ask.number, error=failure)) if failure else message)
        size = len(message)
        del message
        if ask.what == "load":
            self._heap.trim()
        elif size > LARGE:
            process.give_back()
        else:
            self._heap.check()
        self._worked = time.monotonic()
        self._under_way.discard(ask.number)

    def _beat(self) -> None:
        while True:
            self._send(packed(Heartbeat(self._ready, self._measured.memory() if self._measured else None)))
            if self._worked and not self._under_way and time.monotonic() - self._worked > process.IDLE_TIMEOUT:
                self._worked = 0.0
                self._heap.trim()
            time.sleep(HEARTBEAT_INTERVAL)

    def _send(self, message: bytes) -> None:
        try:
            with self._sending:
                self._connection.send_bytes(message)
        except OSError:
            os._exit(0)


def _check(device: str) -> None:
    """End the process if its device no longer computes: after some errors a GPU never does again in that process.

    It is called after any failure: what a device raises while a model is loaded arrives as a fault of the model.
    """
    from camserve_server.core.devices import device_of  # noqa: PLC0415 -- it needs torch

    try:
        device_of(device).check()
    except RuntimeError as error:
        _give_up(device, error)


def _give_up(device: str, error: RuntimeError) -> NoReturn:
    """End the process, in which the device cannot be used; the server starts another."""
    log.error("%s cannot be used by this process: it ends, and another takes its place", device, exc_info=error)
    os._exit(DEVICE_LOST)


def follow() -> None:
    """Take no signal that is meant for the server, and end with the thread that made this process."""
    for each in (signal.SIGINT, signal.SIGTERM):  # a terminal and systemd send them to all
        signal.signal(each, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)


def run(number: int) -> None:
    """Be an engine's process.

    Args:
        number: of the socket to the server.
    """
    follow()
    process.keep_memory()
    _Child(Connection(number)).work()
