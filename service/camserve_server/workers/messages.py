"""What passes between a server and the process of an engine, over a socket that nobody else has."""

import pickle
from dataclasses import dataclass
from typing import Literal

from camserve_server.telemetry import Memory

Operation = Literal["run", "load", "drop", "row_bytes", "free_bytes"]

HEARTBEAT_INTERVAL = 0.5  # seconds between two signs of life
DEVICE_LOST = 69  # exit code of a process that cannot use its device any more
HEARTBEAT_TIMEOUT = 4.0  # seconds without one: whoever is silent for longer, has stopped


@dataclass(frozen=True, slots=True)
class Setup:
    """What an engine starts with.

    Attributes:
        device: "cpu" or "cuda:0".
        threads: that torch computes with.
        shares_device: whether other engines may work on that device at the same time.
        log_level: least level that is logged.
        log_format: "text" or "json".
        path: where Python looks for modules.
        partitioned: whether two batches may run at once, each with half of the threads.
        streams: whether two batches may run at once, each in a stream of its own; on a GPU.
        measure: whether it is to say how much memory it has.
        max_rows: of a batch; a GPU is warmed up for batches up to this size.
    """

    device: str
    threads: int
    shares_device: bool = False
    log_level: str = "info"
    log_format: str = "text"
    path: tuple[str, ...] = ()
    partitioned: bool = False
    streams: bool = False
    measure: bool = False
    max_rows: int = 1


@dataclass(frozen=True, slots=True)
class Request:
    """Something to be done: a method of the engine's port, and what it is called with."""

    number: int
    what: Operation
    arguments: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Response:
    """What came of it: a value, or the error."""

    number: int
    value: object = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life; `ready` once the engine takes what it is asked, and its memory if that is wanted."""

    ready: bool = True
    memory: Memory | None = None


def packed(message: Setup | Request) -> bytes:
    """Return a server's message as bytes; arrays are copied once, and objects that several rows share stay shared.

    It is a pickle, because a worker obeys its server anyway. A worker's answers are not pickles: see `replies`.
    """
    return pickle.dumps(message, protocol=5)
