"""Worker in a process of its own, which is watched. When it dies or hangs, another process takes its place.

Native code can end a process, and an error of a GPU can make the GPU useless to it. Nothing inside of the process can
help then. Also, what the worker computes in Python does not delay the server's own work.
"""

import logging
import os
import signal
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import cast

from camserve_server.core import logs
from camserve_server.core.errors import ConfigError, Internal, WorkerLost
from camserve_server.engine.values import Partition, Row, RowResult
from camserve_server.models.spec import ModelSpec
from camserve_server.models.values import Kind, ModelInfo, Pass
from camserve_server.telemetry import Memory
from camserve_server.workers import fork_server
from camserve_server.workers.messages import (
    DEVICE_LOST,
    HEARTBEAT_TIMEOUT,
    Heartbeat,
    Operation,
    Request,
    Response,
    Setup,
    serialize,
)
from camserve_server.workers.replies import BadMessageError, deserialize

log = logging.getLogger(__name__)

START_TIMEOUT = 300.0  # seconds until a process must be ready: a cold disk is slow to load torch, and a driver to start
LOAD_TIMEOUT = 1800.0  # seconds that a model may take to load: weights may come over a slow network
FIRST_PAUSE, MAX_PAUSE = 0.5, 30.0  # seconds between two attempts to start a process, if the first was never ready
MAX_FATAL_LOADS = 3  # processes that may end in a row while they load a model again, before the model is given up
MAX_MESSAGE_BYTES = 2**32  # a longer message is refused

Listener = Callable[[], object]
"""Callback for a change of a worker's state; called in a thread of the worker."""


@dataclass(slots=True)
class _PendingRequest:
    """Request that waits for its response.

    Attributes:
        operation: the requested operation.
        deadline: time by which the response must arrive, on the clock of `time.monotonic`.
        response: future of the result.
    """

    operation: Operation
    deadline: float
    response: Future[object] = field(default_factory=Future)


class _WorkerProcess:
    """One worker process, from its start to its end.

    Args:
        setup: configuration of the worker.
        on_end: callback when the process has ended, before its pending requests fail.

    Attributes:
        ready: future that ends when the process accepts requests, or fails when it has ended before.
        filled: event, set once the process has the models of the one before it, or has ended.
        ended: True once the process has ended.
        memory: memory that the latest heartbeat reported, or None.
        process: the operating system's process.
    """

    def __init__(self, setup: Setup, on_end: Callable[[], None]) -> None:
        self.ready: Future[None] = Future()
        self.filled = threading.Event()
        self.ended = False
        self.memory: Memory | None = None
        self._on_end = on_end
        self._pending: dict[int, _PendingRequest] = {}
        self._count = 0
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._closing = False
        self._socket, child_socket = socket.socketpair()
        self._connection = Connection(os.dup(self._socket.fileno()))
        self._set_timeout(START_TIMEOUT)
        self._start_deadline = time.monotonic() + START_TIMEOUT
        with child_socket:
            self.process = fork_server.begin(child_socket.fileno())
        self._connection.send(setup)

    def read(self) -> None:
        """Read messages until the process ends, or is ended because it hangs."""
        try:
            while True:
                self._handle(deserialize(self._connection.recv_bytes(MAX_MESSAGE_BYTES)))
                self._check_deadlines()
        except BlockingIOError:  # the socket's timeout
            self._terminate(f"gave no sign of life for {HEARTBEAT_TIMEOUT:g} s")
        except (TimeoutError, BadMessageError) as error:
            self._terminate(str(error))
        except (EOFError, OSError):
            self._terminate()

    def request(self, operation: Operation, *arguments: object, seconds: float) -> Future[object]:
        """Send a request; return the future of its result, which raises WorkerLost if the process ends before."""
        pending = _PendingRequest(operation, time.monotonic() + seconds)
        with self._lock:
            if self._socket.fileno() < 0:
                raise _lost_before()
            self._count += 1
            number, self._pending[self._count] = self._count, pending
        with suppress(OSError), self._sending:  # the reading thread gets the same error, and fails all that is pending
            self._connection.send_bytes(serialize(Request(number, operation, arguments)))
        return pending.response

    def close(self) -> None:
        """End the process."""
        self._closing = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _handle(self, message: Response | Heartbeat) -> None:
        if isinstance(message, Heartbeat):
            self.memory = message.memory
            if message.ready and not self.ready.done():
                self._set_timeout(HEARTBEAT_TIMEOUT)
                self.ready.set_result(None)
            return
        with self._lock:
            pending = self._pending.pop(message.number, None)
        if pending is None:
            raise BadMessageError("answered a request that it did not get")
        if message.error is None:
            pending.response.set_result(message.value)
        else:
            pending.response.set_exception(message.error)

    def _check_deadlines(self) -> None:
        """Raise TimeoutError if the start or a request takes too long, although heartbeats arrive."""
        if not self.ready.done() and self._start_deadline < time.monotonic():
            raise TimeoutError(f"was not ready after {START_TIMEOUT:g} s")
        with self._lock:
            pending = min(self._pending.values(), key=lambda request: request.deadline, default=None)
        if pending and pending.deadline < time.monotonic():
            limit = "longer than max_batch_seconds" if pending.operation == "run" else "too long"
            raise TimeoutError(f"took {limit} to {pending.operation}")

    def _terminate(self, reason: str = "") -> None:
        """Kill the process if it is still alive, log the reason, and fail all pending requests."""
        code = self.process.end()
        reason = f"the worker {reason or _describe_exit(code)}"
        if not self._closing:
            log.error("a worker process ended: %s", reason, extra=logs.fields(exit=code))
        self.ended = True
        self._on_end()
        with self._lock:
            requests = [self._pending.pop(number) for number in list(self._pending)]
            self._socket.close()
        with self._sending:
            self._connection.close()
        if not self.ready.done():
            self.ready.set_exception(_lost_before())
        for request in requests:
            error = WorkerLost(reason, process_id=self.process.pid, others=len(requests) - 1)
            request.response.set_exception(error)

    def _set_timeout(self, seconds: float) -> None:
        """Set after how long a silent process, or a full socket, ends the connection."""
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), 0))


def _check_results(value: object, count: int) -> list[RowResult]:
    """Return the results of a batch, after checking that there is one for each row."""
    if not isinstance(value, tuple) or len(value) != count or not all(isinstance(item, RowResult) for item in value):
        raise Internal("the worker did not return a result for each row")
    return list(value)


def _lost_before() -> WorkerLost:
    """Return the error of a request that no process has received."""
    return WorkerLost("the worker was lost before it ran this, and is being started again")


_SIGNALS = {
    "SIGKILL": "was killed, probably out of memory",
    "SIGSEGV": "crashed with a segmentation fault",
    "SIGBUS": "crashed with a bus error",
    "SIGABRT": "aborted",
    "SIGILL": "crashed with an illegal instruction",
    "SIGFPE": "crashed with an arithmetic error",
}
"""Descriptions by the names of signals, since not every system has all of them."""


def _describe_exit(code: int) -> str:
    """Describe why a process ended, from its exit code; a negative code is the signal that ended it."""
    description = "ended"
    if code == DEVICE_LOST:
        description = "could not use its device"
    elif code < 0:
        with suppress(ValueError):  # a signal without a name
            description = _SIGNALS.get(signal.Signals(-code).name, description)
    return f"{description}: exit {code}"


class Worker:
    """Worker in a process of its own. When the process ends, another one is started, and gets the same models.

    Args:
        setup: configuration of the worker.
        batch_seconds: seconds that one batch may take; then the process is considered hung.
        on_ready: callback when a process accepts batches, and has every model of the worker.
        on_exit: callback when that process has ended.
        on_model_lost: callback for a model that a new process could not load again.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        batch_seconds: float = 60.0,
        on_ready: Listener = lambda: None,
        on_exit: Listener = lambda: None,
        on_model_lost: Callable[[str], object] = lambda _name: None,
    ) -> None:
        self._setup = setup
        self._batch_seconds = batch_seconds
        self._on_ready, self._on_exit, self._on_model_lost = on_ready, on_exit, on_model_lost
        self._models: dict[str, tuple[ModelSpec, str]] = {}  # spec and digest of each loaded model
        self._fatal_loads = Counter[str]()  # processes that ended while they loaded a model again
        self._changing_models = threading.Lock()
        self._switching = threading.Lock()
        self._newest: _WorkerProcess
        self._started = threading.Event()  # set while `_newest` is a process that has not ended
        self._ready: _WorkerProcess | None = None
        self._closing = threading.Event()
        # The kernel ends a worker process together with the thread that started it, so this thread must stay.
        self._keeper = threading.Thread(target=self._keep_running, name="worker", daemon=True)
        self._keeper.start()
        self._started.wait()

    @property
    def process_id(self) -> int | None:
        """Id of the process that runs batches now, or None."""
        return self._ready.process.pid if self._ready else None

    def load(self, name: str, spec: ModelSpec) -> ModelInfo:
        """Load a model; see `WorkerProtocol.load`."""
        process = self._wait_for_filled()
        with self._changing_models:
            try:
                info = cast("ModelInfo", process.request("load", name, spec, seconds=LOAD_TIMEOUT).result())
            except WorkerLost as error:
                message = f"model {spec.name} ({spec.origin}): the worker process ended while it loaded the model"
                raise ConfigError(message) from error
            self._models[name] = (spec, info.digest)
        return info

    def drop(self, name: str) -> None:
        """Drop a model; see `WorkerProtocol.drop`."""
        with self._changing_models:
            self._models.pop(name, None)
            with suppress(WorkerLost):
                self._require_ready().request("drop", name, seconds=self._batch_seconds).result()

    def run(self, pass_: Pass, rows: Sequence[Row], partition: Partition | None = None) -> list[RowResult]:
        """Run one batch; see `WorkerProtocol.run`."""
        # With half of the cores, or beside another batch on the GPU, a batch takes up to twice as long.
        seconds = self._batch_seconds * (1 if partition is None else 2)
        response = self._require_ready().request("run", pass_, rows, partition, seconds=seconds)
        return _check_results(response.result(), len(rows))

    def row_bytes(self, name: str) -> Mapping[Kind, int]:
        """Measure how many bytes one input of a model takes; see `WorkerProtocol.row_bytes`."""
        sizes = self._require_ready().request("row_bytes", name, seconds=LOAD_TIMEOUT).result()
        if not isinstance(sizes, Mapping) or not all(type(size) is int and size > 0 for size in sizes.values()):
            raise Internal("the worker did not return the memory of a row")
        return cast("Mapping[Kind, int]", sizes)

    def free_bytes(self) -> int:
        """Return how many bytes batches can take together; see `WorkerProtocol.free_bytes`."""
        size = self._require_ready().request("free_bytes", seconds=LOAD_TIMEOUT).result()
        if type(size) is not int:
            raise Internal("the worker did not return its free memory")
        return size

    def memory(self) -> Memory | None:
        """Return the memory that the latest heartbeat reported; see `WorkerProtocol.memory`."""
        process = self._ready
        return process.memory if process else None

    def close(self) -> None:
        """End the process, and start no other."""
        self._closing.set()
        self._started.wait()
        self._newest.close()
        self._keeper.join()

    def _wait_for_filled(self) -> _WorkerProcess:
        """Wait until a process has every model of the one before it, and return it."""
        while True:
            self._started.wait()
            process = self._newest
            process.filled.wait()
            if not process.ended or self._closing.is_set():
                return process

    def _require_ready(self) -> _WorkerProcess:
        if self._ready is None:
            raise _lost_before()
        return self._ready

    def _keep_running(self) -> None:
        """Start a process, and another one whenever it ends."""
        pause = 0.0
        while not self._closing.wait(pause):
            try:
                self._newest = _WorkerProcess(self._setup, self._handle_end)
            except OSError as error:
                log.error("a worker process could not be started: %s", error)  # noqa: TRY400 -- no fault of the code
                pause = MAX_PAUSE
                continue
            self._started.set()
            threading.Thread(target=self._fill, args=(self._newest,), name="filling", daemon=True).start()
            self._newest.read()
            was_ready = self._newest.ready.exception() is None
            pause = 0.0 if was_ready else min(2 * pause + FIRST_PAUSE, MAX_PAUSE)
        self._started.set()

    def _fill(self, process: _WorkerProcess) -> None:
        """Load the models of the previous process on a new one, and then accept batches."""
        with self._changing_models, suppress(WorkerLost):
            process.ready.result()
            for name in list(self._models):
                if not self._reload(process, name):
                    del self._models[name]
                    self._on_model_lost(name)
            with self._switching:
                if not process.ended:
                    self._ready = process
                    self._on_ready()
        process.filled.set()  # errors of models are caught in `_reload`: otherwise no further model could be loaded

    def _reload(self, process: _WorkerProcess, name: str) -> bool:
        """Load a model of the previous process on a new one; return True if it has the same weights.

        Raises:
            WorkerLost: the process ended meanwhile; the model may be the cause.
        """
        spec, digest = self._models[name]
        if self._fatal_loads[name] >= MAX_FATAL_LOADS:
            log.error("model %s was lost: %d processes ended while they loaded it again", name, MAX_FATAL_LOADS)
            return False
        self._fatal_loads[name] += 1
        try:
            info = cast("ModelInfo", process.request("load", name, spec, seconds=LOAD_TIMEOUT).result())
        except WorkerLost:
            raise
        except ConfigError as error:
            log.error("a model was lost: %s", error)  # noqa: TRY400 -- a message for the operator, not a traceback
            return False
        except Exception:  # any error of a model or a device: the worker can still run its other models
            log.exception("model %s was lost", name)
            return False
        finally:
            if not process.ended:
                del self._fatal_loads[name]
        if info.digest != digest:
            log.error("model %s was lost: its weights are not those it had before", name)
            process.request("drop", name, seconds=LOAD_TIMEOUT).result()
        return info.digest == digest

    def _handle_end(self) -> None:
        self._started.clear()  # further requests are for the next process
        with self._switching:
            previous, self._ready = self._ready, None
            if previous:
                self._on_exit()
