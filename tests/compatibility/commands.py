"""Print the commands of a program as JSON: `python -m compatibility.commands camserve.cli`."""

import importlib
import json
import sys
from contextlib import suppress
from unittest import mock

import click

from compatibility.surfaces import command


class _Started(BaseException):
    """The console script has called click."""


def program(module):
    """Return the click command of a console script, wherever it is defined."""
    started = []

    def start(self, *_args, **_kwargs):
        started.append(self)
        raise _Started

    with mock.patch.object(click.Command, "main", start), suppress(_Started):
        importlib.import_module(module).main()
    return started[0]


if __name__ == "__main__":
    print(json.dumps(command(program(sys.argv[1]))))  # noqa: T201 -- a command prints
