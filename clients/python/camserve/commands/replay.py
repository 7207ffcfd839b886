"""The command `replay`."""

from __future__ import annotations

from pathlib import Path

import click

import camserve
from camserve.commands import tables
from camserve.commands.group import FAILED, main
from camserve.commands.options import Connect, connection_options, photo_argument
from camserve.terminal import print_table


@main.command()
@click.argument("receipt", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@photo_argument
@connection_options
def replay(receipt: Path, photo: Path, connect: Connect) -> int:
    """Explain a photo again and compare the result with a receipt.

    RECEIPT is a .receipt.json file from `camserve explain --receipts`, and PHOTO is its photo. The exit code is 0 if
    the photo, the weights, the score and the map are the same, and 1 if they differ.
    """
    with connect() as client:
        comparison = client.replay(camserve.Receipt.load(receipt), photo)
    print_table(tables.REPLAY_HEADINGS, tables.replay_rows(comparison))
    return 0 if comparison.same else FAILED
