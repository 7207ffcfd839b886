"""Serve the page on this machine, and open it in a browser."""

from __future__ import annotations

import os
import tempfile
import threading
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from camserve.terminal import echo
from camserve.web import proxy

if TYPE_CHECKING:
    from camserve._sync.client import Client


def run(client: Client, port: int, *, open_browser: bool) -> None:
    """Serve the page until Ctrl-C.

    Args:
        client: Client of the server.
        port: Port to listen on; 0 for a free one.
        open_browser: True to open the page in a browser.
    """
    with proxy.PageServer(client, port) as server:
        echo(f"The page is at {server.url}")
        echo("Press Ctrl-C to end.", err=True)
        if open_browser:
            threading.Thread(target=_open_browser, args=(server,), daemon=True).start()
        with suppress(KeyboardInterrupt):
            server.serve_forever()


def _open_browser(server: proxy.PageServer) -> None:
    """Open the page in a browser, by a file that only this user can read, and delete the file when the page is open.

    All users of a machine can read the arguments of a browser, so the key may not be among them.
    """
    # Browsers in a sandbox, such as those of snap, cannot read the system's folder for temporary files.
    home = os.path.expanduser("~")  # noqa: PTH111 -- a user without a home is no error
    parent = home if os.access(home, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="camserve-ui-", dir=parent) as folder:
        file = Path(folder, "page.html")
        file.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={server.url}">\n', encoding="utf-8")
        webbrowser.open(file.as_uri())
        server.opened.wait()
