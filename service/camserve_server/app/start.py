"""Start of a server process: import what it needs, start the fork server, and run the event loop."""

import asyncio
import signal
import sys
from typing import NoReturn

from camserve_server.app.supervisor_link import INVALID_SETTINGS, SupervisorLink
from camserve_server.core import logs, native_output, process
from camserve_server.core.config import Settings
from camserve_server.core.errors import ConfigError


def run_among_several(number: str) -> NoReturn:
    """Run a server until its supervisor stops it or is gone.

    Args:
        number: file descriptor of the socket to the supervisor.
    """
    process.follow_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))  # blocked since before the start
    process.configure_allocator()
    link = SupervisorLink(int(number))
    logs.configure(link.settings.log_level, link.settings.log_format, link.process)
    try:
        sys.exit(run(link.settings, link))
    except ConfigError as error:
        link.send("failed", error=str(error))
        sys.exit(INVALID_SETTINGS)


def run(settings: Settings, link: SupervisorLink | None = None) -> int:
    """Serve in this process until a signal, or until the supervisor stops it; return the exit code.

    Args:
        settings: settings of the server.
        link: link to the supervisor of several processes; None for one process.

    Raises:
        ConfigError: a model, a device or the address cannot be used.
    """
    with process.without_collection():
        from camserve_server import models, workers  # noqa: PLC0415 -- imports torch, which takes seconds
        from camserve_server.app import server  # noqa: PLC0415 -- the same

        specs = [models.parse(text) for text in settings.models]
        for spec in specs:
            models.search_current_folder(spec)
    if settings.isolation == "process":
        with process.without_collection():
            for spec in specs:
                models.import_libraries(spec)  # worker processes share with the fork server what it has imported
        process.freeze_objects()  # before the fork: each process would look at the same objects again
        workers.open_fork_server()
    with native_output.logged(), asyncio.Runner(loop_factory=_event_loop) as runner:
        return runner.run(server.serve_until_signal(settings, link))


def _event_loop() -> asyncio.AbstractEventLoop:
    """Return uvloop's event loop, on which a request takes a tenth less of the process; asyncio's without uvloop."""
    try:
        import uvloop  # noqa: PLC0415 -- not on Windows
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
