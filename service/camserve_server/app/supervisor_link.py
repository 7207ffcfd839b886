"""Link of a server among several to the supervisor that started it."""

import asyncio
import itertools
import logging
import os
import socket
import threading
from asyncio import AbstractEventLoop
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from camserve_server.app import control
from camserve_server.app.control import Message
from camserve_server.core import errors
from camserve_server.core.config import Settings
from camserve_server.core.errors import FailedPrecondition, Internal, ServiceError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from camserve_server.models.values import KnownModel, ModelInfo
    from camserve_server.serving.repository import ModelRepository
    from camserve_server.serving.requests import LoadRequest

log = logging.getLogger(__name__)

INVALID_SETTINGS = 2  # exit code, as that of a single server

# -P: without it Python would search the current folder for modules first.
PROGRAM = ("-P", "-c", "import sys; from camserve_server.app import start; start.run_among_several(sys.argv[1])")


class SupervisorLink:
    """Link of a server to its supervisor. Without a supervisor the server ends.

    Args:
        number: file descriptor of the socket to the supervisor.

    Attributes:
        settings: settings of this server.
        process: number of this process.
        position: number of this process and of all, such as "0/2".
    """

    def __init__(self, number: int) -> None:
        self._socket = socket.socket(fileno=number)
        self._lines = self._socket.makefile("rb")
        self._sending = threading.Lock()
        start = control.decode(next(self._lines))
        self.settings = Settings.model_validate(start["settings"])
        self.process = int(start["process"])
        self.early = bool(start["early"])
        self.position = f"{self.process}/{start['processes']}"
        self._metrics: CollectorRegistry | None = None
        self._may_open = asyncio.Event()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def listen(self, loop: AbstractEventLoop, on_stop: Callable[[], object]) -> None:
        """Handle the supervisor's messages from now on.

        Args:
            loop: event loop of the server.
            on_stop: function that is called on the loop for each request to stop.
        """
        self._on_stop = on_stop
        threading.Thread(target=self._read, args=(loop,), name="supervisor", daemon=True).start()

    def publish(self, metrics: "CollectorRegistry") -> None:
        """Let the supervisor read metrics."""
        self._metrics = metrics

    async def open_with_others(self, repository: "ModelRepository") -> None:
        """Report that the models are warm; return when requests may be accepted: at first when all are warm."""
        self._repository = repository
        self.send("warm")
        await self._may_open.wait()

    def send(self, kind: str, **values: object) -> None:
        """Send a message; thread-safe."""
        try:
            with self._sending:
                self._socket.sendall(control.encode(kind, **values))
        except OSError:
            os._exit(1)

    async def load(self, request: "LoadRequest") -> "ModelInfo":
        """Load a model in every process.

        Raises:
            ServiceError: this process could not load it, and none did; or another process could not.
        """
        from camserve_server.models.values import ModelInfo  # noqa: PLC0415 -- imports torch

        await self._request("load", asdict(request))
        model = self._repository.models[request.name]
        if not isinstance(model, ModelInfo):
            raise FailedPrecondition(f"model {request.name} was loaded, and is {model.state} again")
        return model

    async def unload(self, name: str) -> "KnownModel":
        """Unload a model in every process.

        Raises:
            ServiceError: unloading is not allowed.
        """
        await self._request("unload", {"name": name})
        return self._repository.models[name]

    async def _request(self, operation: str, arguments: dict[str, Any]) -> None:
        """Request a change of all processes, and return when they have made it."""
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self.send("change", id=number, operation=operation, arguments=arguments)
            reply = await self._waiting[number]
        finally:
            del self._waiting[number]
        if "error" in reply:
            raise _error_of(reply)

    def _read(self, loop: AbstractEventLoop) -> None:
        """Handle messages in a thread: metrics are collected there, whatever the event loop does."""
        for line in self._lines:
            message = control.decode(line)
            if message["kind"] == "metrics":
                self.send("reply", id=message["id"], families=self._families())
                continue
            try:
                loop.call_soon_threadsafe(self._handle, message)
            except RuntimeError:  # the loop is closed: the process ends
                return
        os._exit(1)  # the supervisor is gone

    def _families(self) -> list[Any]:
        if self._metrics is None:
            return []
        from camserve_server.app.merged_metrics import families_of  # noqa: PLC0415 -- only if metrics are enabled

        return families_of(self._metrics)

    def _handle(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "open":
            self._may_open.set()
        elif kind == "stop":
            self._on_stop()
        elif kind == "ping":
            self.send("pong")
        elif kind == "change":
            self._tasks.add(task := asyncio.create_task(self._change(message)))
            task.add_done_callback(self._tasks.discard)
        elif kind == "reply" and message["id"] in self._waiting:
            self._waiting[message["id"]].set_result(message)

    async def _change(self, message: Message) -> None:
        """Load or unload a model in this process, and reply."""
        from camserve_server.serving.requests import LoadRequest  # noqa: PLC0415 -- imports torch

        arguments, version = message["arguments"], message["version"]
        try:
            if message["operation"] == "load":
                model: KnownModel = await self._repository.load(LoadRequest(**arguments), version)
            else:
                model = await self._repository.unload(arguments["name"], version)
            outcome: dict[str, object] = {"version": model.version}
        except ServiceError as error:
            kind, message_ = type(error).__name__, error.message
            outcome = {"error": kind, "message": message_, "field": error.field, "fault": error.fault}
        except Exception:
            log.exception("a model could not be changed")
            outcome = {"error": "Internal", "message": "internal error", "field": "", "fault": ""}
        self.send("reply", id=message["id"], **outcome)


def _error_of(reply: Message) -> ServiceError:
    kind: type[ServiceError] = getattr(errors, reply["error"], Internal)
    error = kind(reply["message"], field=reply["field"])
    error.fault = reply["fault"]
    return error
