"""A server process, as its supervisor sees it."""

import asyncio
import itertools
import signal
import socket
import sys
from asyncio import StreamReader, StreamWriter, subprocess
from collections.abc import Callable
from typing import Literal, Self, TypeAlias

from camserve_server.app import control, supervisor_link
from camserve_server.app.control import Message
from camserve_server.core.config import Settings

OnMessage: TypeAlias = Callable[["ServerProcess", Message], object]

LAST_MESSAGES = 1.0  # seconds in which messages of a process that has ended are read; its workers may hold the socket


class ServerProcess:
    """A server process and the connection to it.

    Args:
        number: number of the process, from 0.
        process: the process.
        reader: messages from it.
        writer: messages to it.
        on_message: function that is called with each message that is not an answer.

    Attributes:
        number: number of the process, from 0.
        state: progress of its start. `open` means that it may accept requests, `serving` that it does.
        opened: True if it ever had the permission to accept requests, so that it may have calls.
        unanswered: checks of its event loop since it answered one.
    """

    def __init__(
        self,
        number: int,
        process: subprocess.Process,
        reader: StreamReader,
        writer: StreamWriter,
        on_message: OnMessage,
    ) -> None:
        self.number = number
        self.state: Literal["starting", "warm", "open", "serving", "ended"] = "starting"
        self.opened = False
        self.unanswered = 0
        self._process, self._reader, self._writer, self._on_message = process, reader, writer, on_message
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Message]] = {}

    @classmethod
    async def start(cls, number: int, settings: Settings, on_message: OnMessage, *, early: bool = False) -> Self:
        """Start a process. Call it in the main thread: the kernel ends the process together with the calling thread.

        Args:
            number: number of the process, from 0.
            settings: settings of the process.
            on_message: function that is called with each message that is not an answer.
            early: True to open the port while the models are loaded.

        Raises:
            OSError: no further process can be started.
        """
        own, theirs = socket.socketpair()
        with theirs:
            # Inherited by the process: Ctrl-C, which reaches it too, must not end it before it ignores signals. The
            # process is started before the first suspension of this coroutine, so others cannot interfere.
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *supervisor_link.PROGRAM,
                    str(theirs.fileno()),
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                )
            except OSError:
                own.close()
                raise
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
        reader, writer = await asyncio.open_unix_connection(sock=own, limit=control.MAX_LINE)
        server = cls(number, process, reader, writer, on_message)
        values = settings.model_dump(mode="json")
        server.send("start", settings=values, process=number, processes=settings.sharing, early=early)
        return server

    async def run(self) -> int:
        """Handle its messages until it ends; return its exit code, or the negative signal that ended it."""
        reading = asyncio.create_task(self._read())
        code = await self._process.wait()
        await asyncio.wait((reading,), timeout=LAST_MESSAGES)
        reading.cancel()
        self.state = "ended"
        self._writer.close()
        for reply in self._waiting.values():
            reply.set_exception(ConnectionError("the process has ended"))
        return code

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def open(self) -> None:
        """Tell the process to open the port, unless it is open already, and to accept requests."""
        self.state, self.opened = "open", True
        self.send("open")

    def ping(self) -> None:
        """Check the event loop of a process that is warm."""
        if self.state != "starting":
            self.unanswered += 1
            self.send("ping")

    def kill(self) -> None:
        """Kill the process if it is still alive; its workers end with it."""
        if self._process.returncode is None:
            self._process.kill()

    def send(self, kind: str, **values: object) -> None:
        """Send a message; nothing if the process has ended."""
        if not self._writer.is_closing():
            self._writer.write(control.encode(kind, **values))

    async def ask(self, kind: str, **values: object) -> Message:
        """Send a message, and return the reply.

        Raises:
            ConnectionError: the process ended before it replied.
        """
        if self.state == "ended":
            raise ConnectionError("the process has ended")
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self.send(kind, id=number, **values)
            return await self._waiting[number]
        finally:
            del self._waiting[number]

    async def _read(self) -> None:
        while line := await self._reader.readline():
            self._handle(control.decode(line))

    def _handle(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "reply":
            if (reply := self._waiting.get(message["id"])) and not reply.done():
                reply.set_result(message)
        elif kind == "pong":
            self.unanswered = 0
        else:
            if kind in ("warm", "serving"):
                self.state = kind
            self._on_message(self, message)
