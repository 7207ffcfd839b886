"""An engine in a process of its own, which is watched: when it dies or hangs, another takes its place.

Native code can end a process, and an error of a GPU can leave it of no use; nothing inside of it can help then. And
whatever the engine computes in Python does not keep the server from its callers.
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
    packed,
)
from camserve_server.workers.replies import BadMessageError, unpacked

log = logging.getLogger(__name__)

STARTING = 300.0  # seconds until a process must be ready: a cold disk is slow to load torch, and a driver to start
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds between two tries to start one, if it never came so far as to be ready
DEADLY = 3  # processes that may end while they load a model again, one after the other, before it is given up
MOST_BYTES = 2**32  # of one message; a longer one is refused
LOADING = 1800.0  # seconds that a model may take: weights may come over a slow network

Told = Callable[[], object]
"""Told that a worker is up, or down; in a thread of the worker's."""


@dataclass(slots=True)
class _Waiting:
    """Something that was asked, and when it must be answered, on the clock of `time.monotonic`."""

    what: Operation
    late: float
    answer: Future[object] = field(default_factory=Future)


class _WorkerProcess:
    """One process, from its start to its end.

    Args:
        setup: of the engine.
        ended: called when it has ended, before those who wait for it are told.
    """

    def __init__(self, setup: Setup, ended: Callable[[], None]) -> None:
        self.ready: Future[None] = Future()
        self.filled = threading.Event()
        self.over = False
        self.memory: Memory | None = None
        self._ended = ended
        self._asked: dict[int, _Waiting] = {}
        self._count = 0
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._ending = False
        self._socket, theirs = socket.socketpair()
        self._connection = Connection(os.dup(self._socket.fileno()))
        self._patience(STARTING)
        self._late = time.monotonic() + STARTING
        with theirs:
            self.process = fork_server.begin(theirs.fileno())
        self._connection.send(setup)

    def read(self) -> None:
        """Take what the process says until it ends, or is ended for its silence."""
        try:
            while True:
                self._take(unpacked(self._connection.recv_bytes(MOST_BYTES)))
                self._check()
        except BlockingIOError:  # how a socket says that its patience is over
            self._terminate(f"gave no sign of life for {HEARTBEAT_TIMEOUT:g} s")
        except (TimeoutError, BadMessageError) as error:
            self._terminate(str(error))
        except (EOFError, OSError):
            self._terminate()

    def ask(self, what: Operation, *arguments: object, seconds: float) -> Future[object]:
        """Ask for something; the answer raises WorkerLost if the process ends before."""
        waiting = _Waiting(what, time.monotonic() + seconds)
        with self._lock:
            if self._socket.fileno() < 0:
                raise _lost()
            self._count += 1
            number, self._asked[self._count] = self._count, waiting
        with suppress(OSError), self._sending:  # the reading thread sees the same, and tells all who wait
            self._connection.send_bytes(packed(Request(number, what, arguments)))
        return waiting.answer

    def end(self) -> None:
        """Have the process go."""
        self._ending = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _take(self, message: Response | Heartbeat) -> None:
        if isinstance(message, Heartbeat):
            self.memory = message.memory
            if message.ready and not self.ready.done():
                self._patience(HEARTBEAT_TIMEOUT)
                self.ready.set_result(None)
            return
        with self._lock:
            waiting = self._asked.pop(message.number, None)
        if waiting is None:
            raise BadMessageError("answered a request that it did not get")
        if message.error is None:
            waiting.answer.set_result(message.value)
        else:
            waiting.answer.set_exception(message.error)

    def _check(self) -> None:
        """See that nothing takes too long: the start, of which there are signs of life too, or something asked for."""
        if not self.ready.done() and self._late < time.monotonic():
            raise TimeoutError(f"was not ready after {STARTING:g} s")
        with self._lock:
            late = min(self._asked.values(), key=lambda one: one.late, default=None)
        if late and late.late < time.monotonic():
            limit = "longer than max_batch_seconds" if late.what == "run" else "too long"
            raise TimeoutError(f"took {limit} to {late.what}")

    def _terminate(self, why: str = "") -> None:
        """Make sure that the process has ended, log why, and fail all requests that wait for it."""
        code = self.process.end()
        why = f"the worker {why or _cause(code)}"
        if not self._ending:
            log.error("an engine's process ended: %s", why, extra=logs.fields(exit=code))
        self.over = True
        self._ended()
        with self._lock:
            asked = [self._asked.pop(number) for number in list(self._asked)]
            self._socket.close()
        with self._sending:
            self._connection.close()
        if not self.ready.done():
            self.ready.set_exception(_lost())
        for one in asked:
            one.answer.set_exception(WorkerLost(why, process_id=self.process.pid, others=len(asked) - 1))

    def _patience(self, seconds: float) -> None:
        """Say how long a silence, or a full socket, is borne."""
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), 0))


def _results(value: object, count: int) -> list[RowResult]:
    """Check that a process returned a result for each row."""
    if not isinstance(value, tuple) or len(value) != count or not all(isinstance(one, RowResult) for one in value):
        raise Internal("the worker did not return a result for each row")
    return list(value)


def _lost() -> WorkerLost:
    return WorkerLost("the worker was lost before it ran this, and is being started again")


_CAUSES = {
    "SIGKILL": "was killed, probably out of memory",
    "SIGSEGV": "crashed with a segmentation fault",
    "SIGBUS": "crashed with a bus error",
    "SIGABRT": "aborted",
    "SIGILL": "crashed with an illegal instruction",
    "SIGFPE": "crashed with an arithmetic error",
}
"""By the names of signals, not all of which each system has."""


def _cause(code: int) -> str:
    """Describe why a process ended, from its exit code; a negative code is the signal that ended it."""
    words = "ended"
    if code == DEVICE_LOST:
        words = "could not use its device"
    elif code < 0:
        with suppress(ValueError):  # a signal without a name
            words = _CAUSES.get(signal.Signals(-code).name, words)
    return f"{words}: exit {code}"


class Worker:
    """An engine in a process of its own, and another one after it.

    Args:
        setup: of the engine.
        batch_seconds: that one batch may take; with one that takes longer the process is taken for hung.
        up: told when it takes batches, with every model that it was given.
        down: told when it no longer does.
        lost: told of a model that it was given, and that a process which took another's place could not load again.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        batch_seconds: float = 60.0,
        up: Told = lambda: None,
        down: Told = lambda: None,
        lost: Callable[[str], object] = lambda _name: None,
    ) -> None:
        self._setup = setup
        self._batch_seconds = batch_seconds
        self._tell_up, self._tell_down, self._tell_lost = up, down, lost
        self._models: dict[str, tuple[ModelSpec, str]] = {}
        self._deadly = Counter[str]()
        self._changing = threading.Lock()
        self._turning = threading.Lock()
        self._newest: _WorkerProcess
        self._born = threading.Event()
        self._up: _WorkerProcess | None = None
        self._closing = threading.Event()
        # A process is told to die with the thread that started it: this one stays.
        self._keeper = threading.Thread(target=self._keep, name="worker", daemon=True)
        self._keeper.start()
        self._born.wait()

    @property
    def process_id(self) -> int | None:
        """Of the process that runs batches now."""
        return self._up.process.pid if self._up else None

    def load(self, name: str, spec: ModelSpec) -> ModelInfo:
        """Load a model; see `WorkerProtocol.load`."""
        life = self._filled()
        with self._changing:
            try:
                info = cast("ModelInfo", life.ask("load", name, spec, seconds=LOADING).result())
            except WorkerLost as error:
                raise ConfigError(f"model {spec.name} ({spec.origin}): the engine ended while it loaded it") from error
            self._models[name] = (spec, info.digest)
        return info

    def drop(self, name: str) -> None:
        """Forget a model; see `WorkerProtocol.drop`."""
        with self._changing:
            self._models.pop(name, None)
            with suppress(WorkerLost):
                self._living().ask("drop", name, seconds=self._batch_seconds).result()

    def run(self, pass_: Pass, rows: Sequence[Row], partition: Partition | None = None) -> list[RowResult]:
        """Run one batch; see `WorkerProtocol.run`."""
        seconds = self._batch_seconds * (
            1 if partition is None else 2
        )  # with half of the cores, or beside another batch
        answer = self._living().ask("run", pass_, rows, partition, seconds=seconds)
        return _results(answer.result(), len(rows))

    def row_bytes(self, name: str) -> Mapping[Kind, int]:
        """Measure how much memory one input of a model takes; see `WorkerProtocol.row_bytes`."""
        found = self._living().ask("row_bytes", name, seconds=LOADING).result()
        if not isinstance(found, Mapping) or not all(type(size) is int and size > 0 for size in found.values()):
            raise Internal("the worker did not return the memory of a row")
        return cast("Mapping[Kind, int]", found)

    def free_bytes(self) -> int:
        """Return how much memory batches can take together; see `WorkerProtocol.free_bytes`."""
        found = self._living().ask("free_bytes", seconds=LOADING).result()
        if type(found) is not int:
            raise Internal("the worker did not return its free memory")
        return found

    def memory(self) -> Memory | None:
        """Return what its last sign of life said of its memory; see `WorkerProtocol.memory`."""
        life = self._up
        return life.memory if life else None

    def close(self) -> None:
        """End the process, and start no other."""
        self._closing.set()
        self._born.wait()
        self._newest.end()
        self._keeper.join()

    def _filled(self) -> _WorkerProcess:
        """Return the process, once it has every model that the one before it had."""
        while True:
            self._born.wait()
            life = self._newest
            life.filled.wait()
            if not life.over or self._closing.is_set():
                return life

    def _living(self) -> _WorkerProcess:
        if self._up is None:
            raise _lost()
        return self._up

    def _keep(self) -> None:
        """Start a process; when it ends, another."""
        pause = 0.0
        while not self._closing.wait(pause):
            try:
                self._newest = _WorkerProcess(self._setup, self._down)
            except OSError as error:
                log.error("an engine's process could not be started: %s", error)  # noqa: TRY400 -- no fault of the code
                pause = LONGEST_PAUSE
                continue
            self._born.set()
            threading.Thread(target=self._fill, args=(self._newest,), name="filling", daemon=True).start()
            self._newest.read()
            worked = self._newest.ready.exception() is None
            pause = 0.0 if worked else min(2 * pause + FIRST_PAUSE, LONGEST_PAUSE)
        self._born.set()

    def _fill(self, life: _WorkerProcess) -> None:
        """Give a process the models that were given to the one before, and then let rows come."""
        with self._changing, suppress(WorkerLost):
            life.ready.result()
            for name in list(self._models):
                if not self._loaded_again(life, name):
                    del self._models[name]
                    self._tell_lost(name)
            with self._turning:
                if not life.over:
                    self._up = life
                    self._tell_up()
        life.filled.set()  # whatever a model raises is caught above: else nobody could load one any more

    def _loaded_again(self, life: _WorkerProcess, name: str) -> bool:
        """Give a process a model that the one before had; return whether it has it now.

        Raises:
            WorkerLost: the process ended meanwhile, and the model may or may not be why.
        """
        spec, digest = self._models[name]
        if self._deadly[name] >= DEADLY:
            log.error("model %s was lost: %d processes ended while they loaded it again", name, DEADLY)
            return False
        self._deadly[name] += 1
        try:
            info = cast("ModelInfo", life.ask("load", name, spec, seconds=LOADING).result())
        except WorkerLost:
            raise
        except ConfigError as error:
            log.error("a model was lost: %s", error)  # noqa: TRY400 -- the operator's words, not a traceback
            return False
        except Exception:  # what a model or a device says: with the others the engine can still work
            log.exception("model %s was lost", name)
            return False
        finally:
            if not life.over:
                del self._deadly[name]
        if info.digest != digest:
            log.error("model %s was lost: its weights are not those it had before", name)
            life.ask("drop", name, seconds=LOADING).result()
        return info.digest == digest

    def _down(self) -> None:
        self._born.clear()  # what is asked next, is asked of the next one
        with self._turning:
            was, self._up = self._up, None
            if was:
                self._tell_down()
