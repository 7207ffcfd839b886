"""The group of the commands, and how they report errors."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import click

import camserve
from camserve._core.text import brief
from camserve.terminal import echo

FAILED, INTERRUPTED = 1, 130
"""Exit codes of a command that failed, and of one that was interrupted with Ctrl-C."""


class Command(click.Command):
    """Command that rejects a repeated option, unless the option accepts several values."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Reject a second value; click would silently use the last one."""
        if not ctx.resilient_parsing and not (self.no_args_is_help and not args):
            *_, parsed_options = self.make_parser(ctx).parse_args(list(args))
            for option, count in Counter(parsed_options).items():
                if count > 1 and isinstance(option, click.Option) and not (option.multiple or option.is_flag):
                    raise click.UsageError(f"{option.opts[-1]} was given {count} times, but accepts one value", ctx)
        return super().parse_args(ctx, args)


class Commands(click.Group):
    """Group of commands that reports an error in one line and with the exit code."""

    command_class = Command
    group_class = type  # click then creates subgroups of this class too

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command and exit."""
        kwargs["standalone_mode"] = False
        try:
            code = super().main(*args, **kwargs)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            code = error.exit_code
        except (click.ClickException, click.Abort, camserve.CamserveError, OSError) as error:
            code = _report(error)
        sys.exit(code)


def _report(error: Exception) -> int:
    if isinstance(error, click.Abort):
        return print_error("interrupted", INTERRUPTED)
    if isinstance(error, click.ClickException):
        return print_error(error.format_message(), error.exit_code)
    return print_error(str(error))


def print_error(message: str, exit_code: int = FAILED) -> int:
    """Print an error in one line; return the exit code."""
    echo(f"error: {brief(' '.join(message.split()))}", err=True)
    return exit_code


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="camserve")
def main() -> None:
    """Explain the predictions of vision models with a camserve server."""
