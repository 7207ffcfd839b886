"""The command `ui`."""

from __future__ import annotations

import click

from camserve.commands.group import main
from camserve.commands.options import Connect, connection_options


@main.command()
@click.option("--port", default=0, show_default=True, type=click.IntRange(0, 65535), help="Port; 0 picks a free one.")
@click.option("--no-browser", is_flag=True, help="Print the address of the page, and open no browser.")
@connection_options
def ui(connect: Connect, *, port: int, no_browser: bool) -> None:
    """Open the web page for a server, in a browser on this machine.

    The page shows explanations side by side. This command forwards its calls to the server, and keeps the token away
    from the browser. The address of the page has a key, which only you should know. Ctrl-C ends the command.
    """
    from camserve.web import browser  # noqa: PLC0415 -- it imports an HTTP server

    with connect() as client:
        browser.run(client, port, open_browser=not no_browser)
