"""The command `camserve-server`; without the extra [server] it says which one is missing.

It may import `cluster` and `tuning` and the rooms below.
"""

import os
import signal
import sys

from camserve_server.core.process import keep_memory


def _stop(*_: object) -> None:
    """Exit at once if the server has not started yet; end any other command with an exception."""
    if sys.argv[1:2] == ["serve"]:
        os._exit(0)  # in a callback after a fork or in a finalizer, Python would print an exception and go on
    sys.exit(128 + signal.SIGTERM)


def main() -> None:
    """Run the command line."""
    keep_memory()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what gRPC itself says of a port that is taken is said better here
    # The first process of a container has no default handler: without this one, a stop in the seconds until the server
    # has its own would be ignored.
    signal.signal(signal.SIGTERM, _stop)
    try:
        from camserve_server.cli.commands import program  # noqa: PLC0415 -- what it imports may not be installed

        program()
    except ModuleNotFoundError as error:
        print(f'error: no module {error.name}: the server needs `pip install "camserve[server]"`', file=sys.stderr)
        sys.exit(2)
