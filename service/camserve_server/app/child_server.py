"""Main program of a server among several, which a supervisor starts."""

import asyncio
import signal
import sys
from typing import NoReturn

from camserve_server.app.supervisor_link import SupervisorLink
from camserve_server.core import logs, process
from camserve_server.core.errors import ConfigError

INVALID_SETTINGS = 2  # exit code, as that of a single server

# -P: without it Python would search the current folder for modules first.
PROGRAM = ("-P", "-c", "import sys; from camserve_server.app import child_server; child_server.run(sys.argv[1])")


def run(number: str) -> NoReturn:
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
        sys.exit(_serve(link))
    except ConfigError as error:
        link.send("failed", error=str(error))
        sys.exit(INVALID_SETTINGS)


def _serve(link: SupervisorLink) -> int:
    from camserve_server import models, workers  # noqa: PLC0415 -- imports torch, and the supervisor may be gone earlier
    from camserve_server.app import server  # noqa: PLC0415 -- the same

    for text in link.settings.models:
        models.search_current_folder(models.parse(text))
    if link.settings.isolation == "process":
        workers.open_fork_server()
    return asyncio.run(server.serve_until_signal(link.settings, link))
