"""What `camserve-server` can do: serve, explain files without a network, describe its settings."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from camserve_server import config, logs, server
from camserve_server.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


def _settings_options(command: F) -> F:
    """Give a command a flag for every setting."""
    for name, setting in reversed(config.Settings.model_fields.items()):
        if name == "models":
            option = click.option("--model", "models", multiple=True, metavar="MODEL", help=setting.description)
        else:
            option = click.option(f"--{name.replace('_', '-')}", name, metavar="VALUE", help=setting.description)
        command = option(command)
    return click.option("--config", "path", metavar="FILE", help="TOML file with settings.")(command)


def _load(path: str | None, flags: dict[str, Any]) -> config.Settings:
    flags["models"] = flags["models"] or None
    return config.load(path, flags)


@contextmanager
def _told() -> Iterator[None]:
    """Say what the operator got wrong in a line, without a traceback."""
    try:
        yield
    except ConfigError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="camserve")
def program() -> None:
    """Explain what vision models see: Grad-CAM and saliency heatmaps over gRPC."""
    # A user's own module:factory is found beside where the command is run, as `python -m` would.
    sys.path.insert(0, str(Path.cwd()))


@program.command()
@_settings_options
def serve(path: str | None, **flags: Any) -> None:
    """Serve until SIGTERM or Ctrl-C; a second one cuts the drain short.

    Every setting can also stand in the TOML file (by its name with underscores) or in the environment (as
    CAMSERVE_MAX_QUEUE_ROWS); flags win over the environment, and the environment over the file.
    """
    with _told():
        settings = _load(path, flags)
        logs.configure(settings.log_level, settings.log_format)
        sys.exit(asyncio.run(server.serve_until_signal(settings)))
