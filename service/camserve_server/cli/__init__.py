"""The command `camserve-server`. Without the extra [server], it exits with a hint to install it.

It may import `cluster` and `tuning` and the rooms below.
"""

import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

from camserve_server.core.process import configure_allocator, without_collection

INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
"""Exit codes of a command that was ended by Ctrl-C and by SIGTERM."""


def _stop(*_: object) -> None:
    """Handle SIGTERM: exit at once if the server has not started yet, else raise SystemExit."""
    if sys.argv[1:2] == ["serve"]:
        os._exit(0)  # in a fork callback or a finalizer, Python would only print an exception and continue
    sys.exit(TERMINATED)


def _exit_at_once(code: int) -> NoReturn:
    """Exit without waiting for threads: Python would end one that is inside of torch's C++ code, which then aborts."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader is gone, or the stream is closed
            stream.flush()
    os._exit(code)


def main() -> None:
    """Run the command line interface."""
    configure_allocator()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # the server has better messages, for example for a port in use
    # The first process of a container has no default handler. Without this one, SIGTERM would be ignored in the seconds
    # until the server installs its own.
    signal.signal(signal.SIGTERM, _stop)
    try:
        with without_collection():
            from camserve_server.cli.commands import program  # noqa: PLC0415 -- its dependencies may not be installed

        program()
    except SystemExit as error:
        if error.code in (INTERRUPTED, TERMINATED):
            _exit_at_once(error.code)
        raise
    except ModuleNotFoundError as error:
        print(f'error: no module {error.name}: the server needs `pip install "camserve[server]"`', file=sys.stderr)
        sys.exit(2)
