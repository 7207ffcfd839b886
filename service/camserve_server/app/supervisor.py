"""Supervisor of several server processes on one port. It imports neither torch nor a model, and serves nothing itself.

It starts the processes, and lets them accept requests when all of them are warm. It replaces those that die or hang,
stops all of them on a signal, passes loads and unloads of models on to all of them, and serves their metrics as one.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from camserve_server.api import exposure
from camserve_server.app import metrics_endpoint, reserved_port
from camserve_server.app.control import Message
from camserve_server.app.model_changes import ModelChanges
from camserve_server.app.server_process import ServerProcess
from camserve_server.app.sharing import share
from camserve_server.core import hardware, logs, process
from camserve_server.core.config import Settings
from camserve_server.core.errors import ConfigError

log = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3  # processes in a row that end before they are warm, until the server gives up its first start
MAX_PAUSE = 30.0  # seconds between two attempts to replace a process that ends before it is warm
PING_INTERVAL = 10.0  # seconds between two checks of a process's event loop
MAX_UNANSWERED = 6  # checks without an answer after which a process is considered hung
METRICS_TIMEOUT = 5.0  # seconds that a process has to return its metrics; half of what Prometheus waits by default
FIRST_PROCESS = 1  # of a container: the children of processes that ended become its own
STOP_TIMEOUT = 5.0  # seconds that a process may take longer to stop than the settings allow


def run(settings: Settings, count: int) -> int:
    """Serve with several processes until a signal.

    Args:
        settings: settings of the whole server.
        count: number of processes.

    Returns:
        The exit code: 0 after a clean stop; 1 if a second signal ended the drain, or a process lost accepted calls.

    Raises:
        ConfigError: the address cannot be listened on, or the processes cannot start with these settings.
    """
    exposure.check(settings)
    with ExitStack() as reserved:
        addresses = {"address": reserved.enter_context(reserved_port.reserve(settings.address))}
        if settings.http_address:
            addresses["http_address"] = reserved.enter_context(reserved_port.reserve(settings.http_address))
        settings = share(settings.model_copy(update=addresses), count, hardware.cores())
        return asyncio.run(Supervisor(settings).run())


class Supervisor:
    """Supervisor of server processes.

    Args:
        settings: settings of each process.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._servers: dict[int, ServerProcess] = {}
        self._restarts = [0] * settings.sharing
        self._changes = ModelChanges()
        self._all_were_warm = self._all_were_serving = False
        self._stop, self._stop_now = asyncio.Event(), asyncio.Event()
        self._error: ConfigError | None = None
        self._failed = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Serve until a signal; return the exit code.

        Raises:
            ConfigError: the processes cannot start with these settings.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._handle_signal)
        log.info("starting", extra=logs.fields(processes=self._settings.sharing))
        with self._metrics(loop):
            keepers = [asyncio.create_task(self._keep(number)) for number in range(self._settings.sharing)]
            self._spawn(self._watch())
            stopping = asyncio.create_task(self._stop.wait())
            await asyncio.wait((stopping, *keepers), return_when=asyncio.FIRST_COMPLETED)
            await self._shut_down(keepers)
        for task in self._tasks:
            task.cancel()
        if self._error:
            raise self._error
        return int(self._failed or self._stop_now.is_set())

    def _handle_signal(self) -> None:
        if not self._stop.is_set() and not self._all_were_warm:
            log.info("stopped before the models were loaded")
        (self._stop_now if self._stop.is_set() else self._stop).set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(task := asyncio.create_task(work))
        task.add_done_callback(self._tasks.discard)

    async def _keep(self, number: int) -> None:
        """Keep one process running until the server stops."""
        failures = 0
        while not self._stop.is_set():
            opened = await self._run_once(number)
            failures = 0 if opened else failures + 1
            if failures == MAX_FAILED_STARTS and not self._all_were_warm:
                log.error("giving up, as no process starts", extra=logs.fields(process=number, attempts=failures))
                self._failed = True
                self._stop.set()
            await self._pause(min(2.0 ** (failures - 1), MAX_PAUSE) if failures else 0)

    async def _run_once(self, number: int) -> bool:
        """Run a process until it ends; return True if it accepted requests."""
        try:
            # A client that connects during the first start waits. Later, a new connection must reach a warm process.
            early = not self._all_were_warm
            self._servers[number] = server = await ServerProcess.start(
                number, self._settings, self._handle, early=early
            )
        except OSError as error:
            reason = error.strerror  # a traceback would add nothing
            log.error("no process can be started: %s", reason, extra=logs.fields(process=number))  # noqa: TRY400 -- the same
            return False
        if self._stop.is_set():
            server.kill()
        code = await server.run()
        if self._stop.is_set():
            self._failed |= server.opened and code != 0
        else:
            self._restarts[number] += 1
            log.error("a process ended, and another takes its place", extra=logs.fields(process=number, code=code))
        return server.opened

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        except TimeoutError:
            pass

    def _handle(self, server: ServerProcess, message: Message) -> None:
        """Handle a message of a process."""
        kind = message["kind"]
        if kind == "warm":
            self._open_warm()
        elif kind == "serving":
            self._report_serving()
        elif kind == "failed":
            self._handle_failure(server, message["error"])
        elif kind == "change":
            self._spawn(self._changes.relay(server, message, self._servers))

    def _open_warm(self) -> None:
        """Let the processes that are warm accept requests: at first when all of them are, later each at once."""
        servers = list(self._servers.values())
        if len(servers) == self._settings.sharing and all(server.state == "warm" for server in servers):
            self._all_were_warm = True
        if self._all_were_warm:
            for server in servers:
                self._spawn(self._changes.catch_up_and_open(server))

    def _report_serving(self) -> None:
        if not self._all_were_serving and all(map(self._is_serving, range(self._settings.sharing))):
            self._all_were_serving = True
            port = int(self._settings.address.rpartition(":")[2])
            log.info("every process serves", extra=logs.fields(port=port, processes=len(self._servers)))

    def _handle_failure(self, server: ServerProcess, error: str) -> None:
        """Stop, because no process can start with these settings; a process that is replaced is only logged."""
        if self._all_were_warm:
            log.error("a process cannot start: %s", error, extra=logs.fields(process=server.number))
            return
        self._error = self._error or ConfigError(error)
        self._stop.set()

    async def _watch(self) -> None:
        """Kill processes whose event loop hangs, and collect the workers of processes that died.

        Checks are counted, not seconds: the machine may have been suspended.
        """
        while True:
            await asyncio.sleep(PING_INTERVAL)
            if os.getpid() == FIRST_PROCESS:
                process.reap_orphans({server.pid for server in self._servers.values()})
            for server in self._servers.values():
                if server.unanswered >= MAX_UNANSWERED:
                    log.error("a process hangs", extra=logs.fields(process=server.number))
                    server.kill()
                server.ping()

    async def _shut_down(self, keepers: "list[asyncio.Task[None]]") -> None:
        """Stop all processes, and return when they have ended.

        A process that is not open has no calls and is killed.

        Raises:
            Exception: the supervisor has failed.
        """
        self._stop.set()
        for server in self._servers.values():
            if server.opened:
                server.send("stop")
            else:
                server.kill()
        ending, hurrying = asyncio.gather(*keepers), asyncio.create_task(self._stop_now.wait())
        timeout = self._settings.drain_seconds + STOP_TIMEOUT
        await asyncio.wait((ending, hurrying), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            for server in self._servers.values():
                server.send("stop")  # a second time: at once
            await asyncio.wait((ending,), timeout=STOP_TIMEOUT)
            for server in self._servers.values():
                server.kill()
        await ending

    @contextmanager
    def _metrics(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Serve the metrics of all processes inside the block, if they are enabled."""
        if not self._settings.metrics_address:
            yield
            return
        from camserve_server.app import merged_metrics  # noqa: PLC0415 -- only if metrics are enabled

        def encode(accept: str) -> tuple[str, bytes]:
            families = asyncio.run_coroutine_threadsafe(self._collect(), loop).result()
            up = [self._is_serving(number) for number in range(self._settings.sharing)]
            return merged_metrics.encode(accept, families, up, self._restarts)

        with metrics_endpoint.serve_metrics(self._settings, encode):
            yield

    def _is_serving(self, number: int) -> bool:
        return number in self._servers and self._servers[number].state == "serving"

    async def _collect(self) -> dict[int, list[Any]]:
        """Return the metrics of each process that returns them in time."""

        async def ask(server: ServerProcess) -> list[Any]:
            async with asyncio.timeout(METRICS_TIMEOUT):
                families: list[Any] = (await server.ask("metrics"))["families"]
                return families

        servers = [server for server in self._servers.values() if server.state not in ("starting", "ended")]
        replies = await asyncio.gather(*map(ask, servers), return_exceptions=True)
        return {each.number: reply for each, reply in zip(servers, replies, strict=True) if isinstance(reply, list)}
