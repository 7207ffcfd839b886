"""The command `camserve-server`. Without the extra [server], it exits with a hint to install it.

It may import `cluster` and `tuning` and the rooms below.
"""

import os
import signal
import sys

from camserve_server.core.process import configure_allocator, without_collection


def _stop(*_: object) -> None:
    """Handle SIGTERM: exit at once if the server has not started yet, else raise SystemExit."""
    if sys.argv[1:2] == ["serve"]:
        os._exit(0)  # in a fork callback or a finalizer, Python would only print an exception and continue
    sys.exit(128 + signal.SIGTERM)


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
    except ModuleNotFoundError as error:
        print(f'error: no module {error.name}: the server needs `pip install "camserve[server]"`', file=sys.stderr)
        sys.exit(2)
