"""Messages between a server and a worker process, over a private socket."""

import pickle
from dataclasses import dataclass
from typing import Literal

from camserve_server.telemetry import Memory

Operation = Literal["run", "load", "drop", "row_bytes", "free_bytes"]

HEARTBEAT_INTERVAL = 0.5  # seconds between two heartbeats
HEARTBEAT_TIMEOUT = 4.0  # seconds without any message after which a worker process is considered hung
DEVICE_LOST = 69  # exit code of a process that cannot use its device any more


@dataclass(frozen=True, slots=True)
class Setup:
    """Configuration of a worker.

    Attributes:
        device: device to compute on, such as "cpu" or "cuda:0".
        threads: number of threads that torch computes with.
        shares_device: True if other workers may use the device at the same time.
        log_level: lowest level that is logged.
        log_format: "text" or "json".
        path: folders in which Python searches for modules.
        partitioned: True if two batches may run at once, each with half of the threads.
        streams: True if two batches may run at once, each in a stream of its own on a GPU.
        measure: True to report memory with each heartbeat.
        max_rows: largest number of rows in a batch; a GPU is warmed up for batches up to this size.
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
    """Call of a method of `WorkerProtocol` in a worker process."""

    number: int
    operation: Operation
    arguments: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Response:
    """Result of the request with the same number: a value, or an error."""

    number: int
    value: object = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sign of life. `ready` is True once the process accepts requests; `memory` is None unless it is measured."""

    ready: bool = True
    memory: Memory | None = None


def serialize(message: Setup | Request) -> bytes:
    """Serialize a message of the server. Arrays are copied once, and objects that several rows share stay shared.

    It is a pickle, because a worker trusts its server. Messages of a worker are not pickles: see `replies`.
    """
    return pickle.dumps(message, protocol=5)
