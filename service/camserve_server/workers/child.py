"""Main program of a worker process, which a server starts.

The main thread runs batches, a second one reads requests, and a third one sends heartbeats. A thread that ends with
its request loads a model, or runs a batch beside another. A thread that stayed would slow down batches: OpenMP keeps
workers for every thread that ever computed, and with more of them than cores, all sleep between two loops, also those
of the main thread.
"""

import logging
import os
import queue
import sys
import threading
import time
import traceback
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, NoReturn

from camserve_server.core import logs, process
from camserve_server.core.errors import ConfigError, Internal, ServiceError
from camserve_server.workers.messages import DEVICE_LOST, HEARTBEAT_INTERVAL, Heartbeat, Request, Response, Setup
from camserve_server.workers.replies import serialize

if TYPE_CHECKING:
    from collections.abc import Callable

    from camserve_server.workers.in_process import InProcessWorker

log = logging.getLogger(__name__)

LARGE_RESPONSE = 8 * 2**20  # bytes; after a larger one, the memory of its copies is given back to the system


class _Child:
    """Runs the requests of a server, and sends responses and heartbeats."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._batches: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # for the main thread
        self._ready = False
        self._running: set[int] = set()  # numbers of requests
        self._last_ended = 0.0  # time at which the last request ended; 0 once its memory was given back
        self._measured: InProcessWorker | None = None
        self._device = "cpu"
        self._heap = process.Heap(process.WORKER_FREE_MEMORY + process.HEAP_GROWTH)

    def work(self) -> None:
        """Run requests until the server is gone."""
        setup: Setup = self._connection.recv()
        threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True).start()
        sys.path[:] = setup.path
        logs.configure(setup.log_level, setup.log_format)
        import torch  # noqa: PLC0415 -- takes seconds, in which heartbeats must be sent already

        from camserve_server.workers.in_process import InProcessWorker  # noqa: PLC0415 -- the same

        torch.set_num_threads(setup.threads)
        self._device = setup.device
        try:
            worker = InProcessWorker(setup)  # starts the device's driver; nothing later does
        except RuntimeError as error:
            _exit_without_device(setup.device, error)
        process.freeze_objects()  # of libraries only: models may be dropped
        threading.Thread(target=self._read, args=(worker,), name="reading", daemon=True).start()
        self._measured = worker if setup.measure else None
        self._ready = True
        self._send_heartbeat()  # the server waits for it before it sends the first model
        while True:
            self._batches.get()()

    def _read(self, worker: "InProcessWorker") -> None:
        try:
            while True:
                request: Request = self._connection.recv()
                # The last argument of "run" is the partition. A batch on partition 1 gets its own thread.
                if request.operation == "run" and request.arguments[-1] != 1:
                    self._batches.put(partial(self._answer, worker, request))
                else:
                    threading.Thread(target=self._answer, args=(worker, request), name="beside", daemon=True).start()
        except (EOFError, OSError):
            os._exit(0)  # the server is gone, or has closed this worker

    def _answer(self, worker: "InProcessWorker", request: Request) -> None:
        """Run a request, and send the response."""
        message = b""
        failure: Exception | None = None
        self._running.add(request.number)
        try:
            value = getattr(worker, request.operation)(*request.arguments)
            if request.operation == "load":
                self._warm_main_thread(worker, *request.arguments[:1])
            message = serialize(Response(request.number, value))
        except (ServiceError, ConfigError) as error:
            failure = error
        except Exception:  # noqa: BLE001 -- of a class that the server may not have
            failure = RuntimeError("in the worker process:\n" + traceback.format_exc())
        except BaseException:  # noqa: BLE001 -- a model may call sys.exit
            failure = Internal("the model tried to end the server")
        if failure:
            _check_device(self._device)  # first: a request that failed for want of a device is not at fault
        self._send(serialize(Response(request.number, error=failure)) if failure else message)
        size = len(message)
        del message
        if request.operation == "load" and failure:
            self._heap.trim()
        elif size > LARGE_RESPONSE:
            process.release_free_memory()
        else:
            self._heap.check()
        self._last_ended = time.monotonic()
        self._running.discard(request.number)

    def _warm_main_thread(self, worker: "InProcessWorker", name: object) -> None:
        """Run batches of a new model in the main thread, after returning the memory that loading has left.

        Otherwise the first batch would start the main thread's OpenMP workers and map fresh memory: 65 ms of processor
        time for the embedded model, and 43 ms later on (two threads).
        """
        done = threading.Event()

        def warm() -> None:
            try:
                serialize(Response(0, worker.warm(str(name))))
            except Exception as error:  # noqa: BLE001 -- of a user's model; it was warmed up before
                log.info("model %s failed in a batch after it was loaded: %s", name, error)
            except BaseException:  # noqa: BLE001 -- a model may call sys.exit
                log.info("model %s tried to end the server in a batch after it was loaded", name)
            finally:
                done.set()

        self._heap.trim()
        self._batches.put(warm)
        done.wait()

    def _send_heartbeats(self) -> None:
        while True:
            self._send_heartbeat()
            if self._last_ended and not self._running and time.monotonic() - self._last_ended > process.IDLE_TIMEOUT:
                self._last_ended = 0.0
                self._heap.trim()
            time.sleep(HEARTBEAT_INTERVAL)

    def _send_heartbeat(self) -> None:
        self._send(serialize(Heartbeat(self._ready, self._measured.memory() if self._measured else None)))

    def _send(self, message: bytes) -> None:
        try:
            with self._sending:
                self._connection.send_bytes(message)
        except OSError:
            os._exit(0)


def _check_device(device: str) -> None:
    """End the process if its device no longer computes. After some errors a GPU never does again in that process.

    It is called after any failure, because an error of the device during a load looks like one of the model.
    """
    from camserve_server.core.devices import device_for  # noqa: PLC0415 -- imports torch

    try:
        device_for(device).check()
    except RuntimeError as error:
        _exit_without_device(device, error)


def _exit_without_device(device: str, error: RuntimeError) -> NoReturn:
    """End the process, which cannot use its device; the server starts another one."""
    log.error("%s cannot be used by this process: it ends, and another takes its place", device, exc_info=error)
    os._exit(DEVICE_LOST)


def run(number: int) -> None:
    """Run a worker process until its server is gone.

    Args:
        number: file descriptor of the socket to the server.
    """
    process.follow_parent()
    process.configure_allocator()
    _Child(Connection(number)).work()
