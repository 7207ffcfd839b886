"""The command `camserve-server`; without the extra [server] it says which one is missing."""

import sys


def main() -> None:
    """Run the command line."""
    try:
        from camserve_server.commands import program  # noqa: PLC0415 -- what it imports may not be installed

        program()
    except ModuleNotFoundError as error:
        print(f'error: no module {error.name}: the server needs `pip install "camserve[server]"`', file=sys.stderr)
        sys.exit(2)
