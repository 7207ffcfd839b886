"""Start of a server process: import what it needs, start the fork server, and run the event loop."""

import asyncio
from typing import TYPE_CHECKING

from camserve_server.core import process
from camserve_server.core.config import Settings

if TYPE_CHECKING:
    from camserve_server.app.supervisor_link import SupervisorLink


def run(settings: Settings, link: "SupervisorLink | None" = None) -> int:
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
    with asyncio.Runner(loop_factory=_event_loop) as runner:
        return runner.run(server.serve_until_signal(settings, link))


def _event_loop() -> asyncio.AbstractEventLoop:
    """Return uvloop's event loop, on which a request takes a tenth less of the process; asyncio's without uvloop."""
    try:
        import uvloop  # noqa: PLC0415 -- not on Windows
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
