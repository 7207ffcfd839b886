"""Loads and unloads of models in every process of a server."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from camserve_server.app.control import Message
from camserve_server.app.server_process import ServerProcess
from camserve_server.core import logs

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Change:
    """A load or unload of a model.

    Attributes:
        operation: "load" or "unload".
        arguments: the request, with the name of the model.
        version: version of the model after the change; 0 if the process that is asked first chooses it.
    """

    operation: str
    arguments: Mapping[str, Any]
    version: int

    async def make(self, server: ServerProcess) -> Message:
        """Make the change in one process; return its reply.

        Raises:
            ConnectionError: the process ended.
        """
        arguments = dict(self.arguments)
        return await server.ask("change", operation=self.operation, arguments=arguments, version=self.version)


class ModelChanges:
    """Makes changes of models in every process, one after another. A process that is replaced catches up."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._latest: dict[str, _Change] = {}  # by model

    async def relay(self, origin: ServerProcess, message: Message, servers: Mapping[int, ServerProcess]) -> None:
        """Make a change that a process received from a client, in this process first, and reply to it.

        Args:
            origin: the process.
            message: its message.
            servers: all processes.
        """
        async with self._lock:
            try:
                outcome = await self._make(origin, message["operation"], message["arguments"], servers)
            except ConnectionError:
                return
        origin.send("reply", id=message["id"], **outcome)

    async def _make(
        self, origin: ServerProcess, operation: str, arguments: Mapping[str, Any], servers: Mapping[int, ServerProcess]
    ) -> Message:
        """Make a change in every process; return the reply to the client's process, which may be an error.

        If the first process fails, no other one is asked: the models stay as they are.

        Raises:
            ConnectionError: the first process ended.
        """
        name, latest = arguments["name"], self._latest.get(arguments["name"])
        version = latest.version + (operation == "load") if latest else 0
        change = _Change(operation, arguments, version)
        first = await change.make(origin)
        if "error" in first:
            return {key: first[key] for key in ("error", "message", "field", "fault")}
        self._latest[name] = change = replace(change, version=first["version"])
        others = [server for server in servers.values() if server.opened and server is not origin]
        replies = await asyncio.gather(*map(change.make, others), return_exceptions=True)
        # A process that ended meanwhile has not failed: the one that takes its place catches up.
        failed = [
            (server.number, reply["message"])
            for server, reply in zip(others, replies, strict=True)
            if isinstance(reply, dict) and "error" in reply
        ]
        return _partial_failure(name, operation, failed, len(others) + 1) if failed else {}

    async def catch_up_and_open(self, server: ServerProcess) -> None:
        """Make all earlier changes in a process that is warm, and let it open its port.

        A process that cannot make them is killed, as its answers would differ from those of the others.
        """
        async with self._lock:
            if server.state != "warm":
                return
            for name, change in self._latest.items():
                try:
                    reply = await change.make(server)
                except ConnectionError:
                    return
                if "error" in reply:
                    message = "model %s is not as in the other processes: %s"
                    log.error(message, name, reply["message"], extra=logs.fields(process=server.number))
                    server.kill()
                    return
            server.open()


def _partial_failure(name: str, operation: str, failed: list[tuple[int, str]], count: int) -> Message:
    number, reason = failed[0]
    done = f"model {name} was {operation}ed in {count - len(failed)} of {count} processes"
    return {"error": "FailedPrecondition", "message": f"{done}. Process {number}: {reason}", "field": "", "fault": ""}
